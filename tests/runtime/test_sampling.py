"""Tokens are chosen as transformers would filter them, by chance where asked, and the same in any batch.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mgtp.runtime import sampling
from mgtp.runtime.penalties import TokenHistory, record
from mgtp.runtime.philox import uniform
from mgtp.runtime.sampling import Sampled, Sampler, likeliest, pick, top_logprobs
from mgtp.runtime.sampling_params import SamplingParams

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, no_cuda])]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def random_logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: Tensor, params: SamplingParams, positions: Sequence[int] | Tensor, **options: Any) -> Sampled:
    return Sampler().sample(logits, [params] * len(logits), positions, **options)


def drawn(row: Tensor, params: SamplingParams, draws: int, device: str = "cpu") -> Tensor:
    """`draws` tokens [draws] of one row of logits [V], at the positions 0, 1, 2, ..."""
    result = sample(row.to(device).expand(draws, -1), params, torch.arange(draws))
    assert not result.failed.any()
    return result.ids.cpu()


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic over its degrees of freedom; tokens expected fewer than 5 times are pooled."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()) / max(1, len(counts) - 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_and_the_lowest_id_among_equals(device: str, dtype: torch.dtype) -> None:
    logits = random_logits(64, 1000).round().to(device, dtype)
    ids = sample(logits, SamplingParams(temperature=0), [5] * 64).ids
    highest = logits.max(dim=-1).values
    assert ids.dtype == torch.int64
    assert ids.tolist() == [int((row == top).nonzero()[0]) for row, top in zip(logits, highest, strict=True)]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-40}])
def test_a_filter_down_to_one_token_is_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(32, 500)
    ids = sample(logits, SamplingParams(seed=1, **params), [0] * 32).ids
    assert ids.tolist() == logits.argmax(dim=-1).tolist()


def test_the_last_digit_of_float64_counts() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-15, 0.0]], dtype=torch.float64)
    assert sample(logits, SamplingParams(temperature=0), [0]).ids.tolist() == [1]


FILTERS = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.3, "top_k": 7, "top_p": 0.5},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [60, 3000])
def test_filters_keep_what_transformers_keeps(options: dict[str, Any], vocab: int, device: str) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(16, vocab)
    params = SamplingParams(seed=0, **options)
    expected, unused = logits, torch.zeros(16, 1, dtype=torch.int64)
    for warper, value in (
        (TemperatureLogitsWarper, options.get("temperature")),
        (TopKLogitsWarper, options.get("top_k")),
        (TopPLogitsWarper, options.get("top_p")),
        (MinPLogitsWarper, options.get("min_p")),
    ):
        if value is not None:
            expected = warper(value)(unused, expected)  # type: ignore[arg-type]
    draws = sampling._Draws([params] * 16, vocab, torch.device(device))
    weights = draws._weights(logits.to(device), slice(None)).cpu()
    probabilities = expected.softmax(-1)
    assert torch.equal(weights > 0, probabilities > probabilities.amax(-1, keepdim=True) * 2.0**-40)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), probabilities, rtol=1e-4, atol=1e-7)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    scaled = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()[None] - math.log(0.5)
    for top_p, expected in [(0.4, [0]), (0.5001, [0, 1]), (0.75, [0, 1, 2]), (0.95, [0, 1, 2, 3])]:
        keep = likeliest(scaled, torch.tensor([[4]]), torch.tensor([[top_p]], dtype=torch.float64), 4)
        assert keep[0].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("candidates", [3, 2000])
def test_ties_at_the_edge_go_to_the_lower_ids(candidates: int, device: str) -> None:
    """bfloat16 logits are full of ties; k must still mean k, and not depend on a sort's mood."""
    scaled = torch.full((1, 2000), -1.0, device=device)
    scaled[0, 1500] = 0.0
    no_limit = torch.ones(1, 1, dtype=torch.float64, device=device)
    keep = likeliest(scaled, torch.tensor([[3]], device=device), no_limit, candidates)
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 1500]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 12}, {"top_p": 0.7}], ids=str
)
def test_draws_follow_the_distribution(options: dict[str, Any], device: str) -> None:
    row = random_logits(1, 50, scale=1.5, seed=3)[0]
    params = SamplingParams(seed=1234, **options)
    weights = sampling._Draws([params], 50, torch.device("cpu"))._weights(row[None], slice(None))[0]
    ids = drawn(row, params, 40_000, device)
    assert set(ids.tolist()) <= set(weights.nonzero().flatten().tolist())
    assert chi_square(ids, weights / weights.sum()) < 2


def test_seeds_and_positions_are_independent() -> None:
    """The same text for every request, or a text that repeats itself, would be the sign of a wrong counter."""
    row = torch.zeros(64)
    one, other = (drawn(row, SamplingParams(seed=seed), 5000) for seed in (1, 2))
    assert chi_square(one * 64 + other, torch.full((4096,), 1 / 4096)) < 1.5
    assert chi_square(one[:-1] * 64 + one[1:], torch.full((4096,), 1 / 4096)) < 1.5
    assert not torch.equal(one, drawn(row, SamplingParams(seed=1 << 32), 5000))


def test_a_token_does_not_depend_on_the_batch(device: str) -> None:
    """Preempted and run again with other company, a request must go on with the same tokens."""
    vocab = 700
    kinds = [
        {"temperature": 0},
        {"seed": 5},
        {"seed": 6, "top_p": 0.9, "temperature": 0.7},
        {"seed": 7, "top_k": 30},
        {"seed": 8, "min_p": 0.1, "repetition_penalty": 1.3},
        {"seed": 9, "top_k": 20, "top_p": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    ]
    params = [SamplingParams(**kind) for kind in kinds] * 5
    logits = random_logits(len(params), vocab).to(device)
    positions = [11 * row for row in range(len(params))]
    history = [TokenHistory([1, 2, row], [row, row, 7], vocab, device) for row in range(len(params))]
    sampler = Sampler()
    together = sampler.sample(logits, params, positions, history).ids.tolist()
    alone = [
        Sampler().sample(logits[row : row + 1], params[row : row + 1], positions[row : row + 1], history[row : row + 1])
        for row in range(len(params))
    ]
    assert [int(result.ids) for result in alone] == together
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sampler.sample(
        logits[order],
        [params[row] for row in order],
        [positions[row] for row in order],
        [history[row] for row in order],
    )
    assert shuffled.ids.tolist() == [together[row] for row in order]


def test_random_numbers_made_ahead_are_those_of_the_positions(device: str) -> None:
    """However the positions move: by one for a long time, all but one row, back after a preemption."""
    logits = random_logits(3, 1000).to(device)
    params = [SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(seed=2)]
    sampler = Sampler()
    for positions in [
        *([5 + i, i, i * i] for i in range(3)),
        *([i, 0, 7 + i] for i in range(40)),
        [2, 0, 1],
        [3, 0, 1],
    ]:
        ids = sampler.sample(logits, params, positions).ids
        assert torch.equal(ids, Sampler().sample(logits, params, torch.tensor(positions, device=device)).ids)


def test_a_large_batch_is_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(37, 300)
    params = SamplingParams(seed=3, top_p=0.9)
    whole = sample(logits, params, range(37)).ids
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 1000)
    assert torch.equal(sample(logits, params, range(37)).ids, whole)


@no_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, *FILTERS], ids=str)
def test_cuda_draws_what_the_cpu_draws(options: dict[str, Any]) -> None:
    logits = random_logits(512, 2000)
    params = SamplingParams(seed=11, **options)
    on_cpu, on_cuda = (sample(logits.to(place), params, torch.arange(512)).ids.cpu() for place in ("cpu", "cuda"))
    assert torch.equal(on_cpu, on_cuda)


def test_rounding_of_another_tp_size_hardly_changes_a_token() -> None:
    """In order of probability, two tokens that rounding swaps would exchange their stretches of the unit interval."""
    logits = random_logits(2000, 100, scale=0.001)
    noise = random_logits(2000, 100, scale=1e-6, seed=1)
    params = SamplingParams(seed=2)
    changed = sample(logits, params, range(2000)).ids != sample(logits + noise, params, range(2000)).ids
    assert int(changed.sum()) <= 2


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"top_k": 331}, {"top_k": 400}, {"min_p": 1e-6}], ids=str)
def test_padding_is_never_sampled(options: dict[str, Any], device: str) -> None:
    row = torch.cat([random_logits(1, 331, scale=0.1)[0], torch.full((13,), -INF)])
    ids = drawn(row, SamplingParams(temperature=5, seed=77, **options), 10_000, device)
    assert int(ids.max()) < 331
    assert len(ids.unique()) > 300
    front = drawn(row.flip(0), SamplingParams(temperature=5, seed=77, **options), 10_000, device)
    assert int(front.min()) >= 13


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_pick_takes_the_first_sum_above_its_target(number: float) -> None:
    weights = torch.tensor([[0, 1, 0, 1, 2, 0]])
    expected = {0.0: 1, 0.25: 3, 0.5: 4, 1 - 2**-53: 4}[number]
    assert pick(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [expected]


def test_pick_in_long_rows(device: str) -> None:
    """Over many blocks, mostly empty ones, the place is that of a plain running sum."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 40), 1 << 34, (200, 3001), generator=generator).clamp(min=0)
    weights[:, 500:1500] = 0
    randoms = uniform(torch.arange(200), torch.arange(200))
    ids = pick(weights.to(device), randoms.to(device)).cpu()
    targets = (randoms * weights.sum(-1)).long()
    assert torch.equal(ids, torch.searchsorted(weights.cumsum(-1), targets[:, None], right=True)[:, 0])
    assert bool((weights.gather(1, ids[:, None]) > 0).all())


def test_penalties_are_those_of_transformers(device: str) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    vocab, prompt, generated = 50, [1, 2, 2, 3], [3, 4, 4, 4]
    logits = random_logits(2, vocab)
    bias = {7: -100.0, 9: 2.5}
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=-0.2, logit_bias=bias
    )
    history = TokenHistory(prompt, generated[:1], vocab, device)
    for token_id in generated[1:]:
        record([None, history], torch.tensor([0, token_id], device=device))
    plain = SamplingParams(temperature=0)
    batch = sampling._Batch.of([plain, params], vocab, torch.device(device))
    assert batch.adjust is not None
    adjusted = batch.adjust(logits.to(device), [None, history]).cpu()
    ids = torch.tensor([prompt + generated])
    expected = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits[1:].clone())[0]  # type: ignore[arg-type]
    for token_id, count in ((3, 1), (4, 3)):
        expected[token_id] -= 0.3 - 0.2 * count
    for token_id, value in bias.items():
        expected[token_id] += value
    torch.testing.assert_close(adjusted[1], expected)
    assert torch.equal(adjusted[0], logits[0])
    result = Sampler().sample(logits.to(device), [plain, params], [8, 8], [None, history])
    assert result.ids.tolist() == [int(logits[0].argmax()), int(expected.argmax())]


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(3, 40).bfloat16()
    before = logits.clone()
    history = TokenHistory([1], [2], 40, "cpu")
    params = SamplingParams(seed=0, top_p=0.5, presence_penalty=1.0, logit_bias={1: 1.0})
    sample(logits, params, [0, 1, 2], history=[history] * 3)
    assert torch.equal(logits, before)


def test_history_kept_in_inference_mode_and_ids_beyond_the_vocabulary() -> None:
    with torch.inference_mode():
        history = TokenHistory([1, 99], [], 10, "cpu")
        ids = torch.tensor([4])
    record([history], ids)
    assert history.generated.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert history.in_prompt.nonzero().tolist() == [[1]]


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_rows_without_a_choice_are_marked(options: dict[str, Any], device: str) -> None:
    logits = random_logits(6, 20)
    logits[1, 19], logits[3], logits[4, 0] = NAN, -INF, INF
    result = sample(logits.to(device), SamplingParams(seed=0, **options), range(6))
    assert result.failed.tolist() == [False, True, False, True, True, False]
    assert bool(((result.ids >= 0) & (result.ids < 20)).all())


def test_what_the_caller_must_not_forget() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(random_logits(1, 5), SamplingParams(), [0])
    with pytest.raises(ValueError, match="history"):
        sample(random_logits(1, 5), SamplingParams(temperature=0, presence_penalty=1), [0])


def test_options_are_taken_anew_when_the_batch_changes() -> None:
    sampler, logits = Sampler(), random_logits(2, 50)
    greedy, biased = SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={7: 100.0})
    best = logits.argmax(dim=-1).tolist()
    assert sampler.sample(logits, [greedy, biased], [0, 0]).ids.tolist() == [best[0], 7]
    assert sampler.sample(logits, [biased, greedy], [0, 0]).ids.tolist() == [7, best[1]]
    assert sampler.sample(logits[:1], [greedy], [0]).ids.tolist() == best[:1]
    assert sampler.sample(logits[:1, :7], [greedy], [0]).ids.tolist() == [int(logits[0, :7].argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logprobs(device: str, dtype: torch.dtype) -> None:
    logits = random_logits(4, 30).to(dtype)
    logits[:, 28:] = -INF
    ids = torch.tensor([0, 5, 27, 3])
    chosen, values, top_ids = (part.cpu() for part in top_logprobs(logits.to(device), ids.to(device), 5))
    expected = logits.float().log_softmax(dim=-1)
    torch.testing.assert_close(chosen, expected.gather(1, ids[:, None])[:, 0])
    torch.testing.assert_close(values, expected.topk(5).values)
    torch.testing.assert_close(expected.gather(1, top_ids), values)
    assert (chosen.dtype, values.dtype, values.shape) == (torch.float32, torch.float32, (4, 5))
    assert top_logprobs(logits, ids, 0)[1].shape == (4, 0)
    assert top_logprobs(logits, ids, 99)[1].shape == (4, 30)
