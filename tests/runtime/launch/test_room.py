"""A model that the GPUs have no room for is refused before anything is started, with the numbers and what would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mgtp.runtime.dummy import dummy_shard_set
from mgtp.runtime.launch import devices, room
from mgtp.runtime.launch.devices import Gpu
from mgtp.runtime.launch.start import LaunchOptions
from mgtp.shardplan.errors import DeviceError

LLAMA_100B = Path(__file__).parents[3] / "benchmarks" / "llama_100b.json"
CARD = 143_771 << 20


@pytest.fixture
def two_cards(monkeypatch):
    """Pretend that there are two GPUs of CARD bytes, all of them free."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: [Gpu(i, "NVIDIA H200", CARD) for i in range(2)])
    monkeypatch.setattr(room, "free_bytes", lambda device: {0: CARD, 1: CARD, room.HOST: 0})


def test_a_model_larger_than_a_card_is_refused_on_one(two_cards):
    shard_set = dummy_shard_set(LLAMA_100B, 1)
    with pytest.raises(DeviceError) as error:
        room.check_memory(shard_set, LaunchOptions())
    weights = shard_set.plan.ranks[0].weight_bytes
    assert weights > 200e9
    needed = int(error.value.message.partition(" needs ")[2].split()[0])
    assert weights < needed < 1.02 * weights and f"bytes of GPU 0, {CARD} are free" in error.value.message
    assert error.value.hint == "use --tp-size 2"


def test_it_is_not_on_two(two_cards):
    room.check_memory(dummy_shard_set(LLAMA_100B, 2), LaunchOptions())


def test_ranks_that_share_a_card_count_together(two_cards):
    shared = LaunchOptions(devices=(1,), allow_shared_device=True)
    with pytest.raises(DeviceError, match="of GPU 1") as error:
        room.check_memory(dummy_shard_set(LLAMA_100B, 2), shared)
    assert error.value.hint.startswith("use GPUs with more memory")


def test_on_the_cpu_no_file_is_refused(two_cards):
    mapped = replace(dummy_shard_set(LLAMA_100B, 1), has_weights=True)
    room.check_memory(mapped, LaunchOptions(device="cpu"))


def test_random_weights_must_fit_into_the_host(monkeypatch):
    """The rank died of it, or the host's other programs did."""
    shard_set = dummy_shard_set(LLAMA_100B, 2)
    monkeypatch.setattr(room, "free_bytes", lambda device: {room.HOST: CARD})
    with pytest.raises(DeviceError, match=f"random weights of .* do not fit into the host's memory, {CARD} are free"):
        room.check_memory(shard_set, LaunchOptions(device="cpu"))
    monkeypatch.setattr(room, "free_bytes", lambda device: {room.HOST: 2 * CARD})
    room.check_memory(shard_set, LaunchOptions(device="cpu"))
