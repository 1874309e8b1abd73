"""Penalties and token counts by the kernels are those of torch's operations."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime import penalties
from mgtp.runtime.penalties import Adjustment, TokenHistory
from mgtp.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_penalties_are_those_of_torch_at_both_ends(device, dtype, monkeypatch):
    vocab = 4999
    logits = (torch.randn(5, vocab) * 3).to(device, dtype)
    logits[:, 4000] = float("-inf")
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(),
        SamplingParams(presence_penalty=0.5, logit_bias={4998: 2.0}),
        SamplingParams(frequency_penalty=-0.7),
        SamplingParams(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=1.5),
    ]
    history = [TokenHistory([0, 1, 4998, row], [row, row, 7, 4998, 4000], vocab, device) for row in range(5)]
    adjust = Adjustment(params, vocab, logits.device)
    found = adjust(logits, history)
    monkeypatch.setattr(penalties, "use_kernels", lambda _: False)
    torch.testing.assert_close(found, adjust(logits, history), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1], logits[1].float())


def test_tokens_are_counted_at_both_ends(device):
    from mgtp.runtime.kernels.penalties import count_tokens

    history = [TokenHistory([], [0, 2], 10, device) for _ in range(3)]
    ids = torch.tensor([5, 0, 9, 2], device=device)
    places = torch.tensor([(row + 1, each.generated.data_ptr()) for row, each in enumerate(history)], device=device)
    for _ in range(2):
        count_tokens(places, ids)
    for each, token_id in zip(history, (0, 9, 2), strict=True):
        expected = torch.tensor([1, 0, 1] + [0] * 7)
        expected[token_id] += 2
        assert each.generated.tolist() == expected.tolist()
