"""What `mgtp plan` promises for a card is what the ranks find on it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import mgtp
from tests.tiny import write_llama

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")]

CARD_BYTES = 12 << 30


@pytest.fixture
def small_cards():
    """Every GPU has CARD_BYTES free: small enough for what CUDA and NCCL take themselves to be seen."""
    held = []
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
        free = torch.cuda.mem_get_info(index)[0]
        held.append(torch.empty(free - CARD_BYTES, dtype=torch.uint8, device=f"cuda:{index}"))
    yield
    held.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_longest_context_is_the_plans_within_five_percent(tp_size, small_cards, tmp_path):
    if torch.cuda.device_count() < tp_size:
        pytest.skip("needs two GPUs")
    sizes: dict[str, Any] = dict(hidden=1024, ffn=2816, heads=16, kv=4, layers=16, vocab=32000, dtype="bfloat16")
    model = write_llama(tmp_path / "m", **sizes, max_position_embeddings=1 << 22)
    with tempfile.TemporaryDirectory(prefix="mgtp-test-") as name:
        folder = Path(name)
        mgtp(folder, "shard", str(model), "--tp-size", str(tp_size), "--out", str(folder / "set"))
        plan = json.loads(mgtp(folder, "plan", str(folder / "set"), "--device-memory", str(CARD_BYTES), "--json").out)
        found = json.loads(mgtp(folder, "probe-memory", str(folder / "set"), "--device", "cuda", "--json").out)
    print({"plan": plan["fit"], "found": found["ranks"]})
    tokens = min(rank["kv_cache_tokens"] for rank in found["ranks"])
    assert abs(tokens / plan["fit"]["longest_context"] - 1) <= 0.05
