"""What may go over symmetric memory, and what --collective may ask for: tables."""

from __future__ import annotations

import pytest

from mgtp.runtime.collectives.eligibility import TWO_SHOT_BYTES, Member, Message, gathers, group_refusal, method_for
from mgtp.runtime.collectives.request import check_placement, parse_collective
from mgtp.shardplan.errors import UsageError

MIB = 1 << 20


def message(**changes) -> Message:
    return Message(**{"dtype": "bfloat16", "num_bytes": 8192, "dims": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "ranks", "method", "why"),
    [
        ({}, 2, "one-shot", "8192 bytes"),
        ({"dtype": "float16"}, 8, "one-shot", ""),
        ({"dtype": "float32"}, 3, "one-shot", ""),
        ({"num_bytes": MIB}, 2, "one-shot", ""),
        ({"num_bytes": MIB}, 4, "two-shot", ""),
        ({"num_bytes": MIB // 2}, 4, "one-shot", ""),
        ({"num_bytes": MIB // 2}, 8, "two-shot", ""),
        ({"num_bytes": MIB // 4}, 8, "one-shot", ""),
        ({"num_bytes": TWO_SHOT_BYTES}, 2, "two-shot", ""),
        ({"num_bytes": TWO_SHOT_BYTES + 16}, 2, "fallback", "do not fit a workspace"),
        ({"num_bytes": 4 * MIB}, 3, "fallback", "no two-shot sum"),
        ({"num_bytes": 4 * MIB, "dtype": "float16"}, 2, "fallback", "no two-shot sum"),
        ({"dtype": "int64"}, 2, "fallback", "int64 is not one of"),
        ({"dtype": "float64"}, 2, "fallback", "float64 is not one of"),
        ({"dims": 1}, 2, "fallback", "1 dimension"),
        ({"contiguous": False}, 2, "fallback", "not contiguous"),
        ({"num_bytes": 8190}, 2, "fallback", "no multiple of 16"),
        ({"num_bytes": 0}, 2, "fallback", "empty"),
        ({"operation": "max"}, 2, "fallback", "max is not a sum"),
    ],
)
def test_the_way_of_a_message(changes, ranks, method, why):
    found, reason = method_for(message(**changes), ranks)
    assert found == method and why in reason


@pytest.mark.parametrize(
    ("changes", "ranks", "fits"),
    [
        ({"dtype": "int64", "dims": 1, "num_bytes": 48, "contiguous": False}, 8, True),
        ({"dtype": "int64", "dims": 1, "num_bytes": 8}, 2, True),
        ({"num_bytes": MIB}, 2, True),
        ({"num_bytes": MIB + 16}, 2, False),
        ({"num_bytes": MIB}, 4, False),
        ({"num_bytes": 8190}, 2, False),
        ({"num_bytes": 0}, 2, False),
    ],
)
def test_what_is_gathered_at_once(changes, ranks, fits):
    assert gathers(message(**changes), ranks) == fits


def test_without_torchs_two_shot_kernel_large_sums_fall_back():
    assert method_for(message(num_bytes=2 * MIB), 2, two_shot=False)[0] == "fallback"


def members(devices, nodes=None, unmapped=()) -> list[Member]:
    size = len(devices)
    nodes = nodes or ["a"] * size
    return [
        Member(rank, nodes[rank], devices[rank], [(rank, other) not in unmapped for other in range(size)])
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("group", "shared", "refusal"),
    [
        (members([0, 1]), False, ""),
        (members([0, 1, 2, 3]), False, ""),
        (members([0, 1], nodes=["a", "b"]), False, "ranks 0 and 1 are on different nodes"),
        (members([0, 0]), False, "ranks 0 and 1 share a device without --allow-shared-device"),
        (members([0, 0]), True, ""),
        (members([0, 1, 0, 1]), True, ""),
        (members([0, 1, 2], unmapped=[(2, 0)]), False, "rank 2 cannot map the memory of rank 0"),
    ],
)
def test_the_group(group, shared, refusal):
    assert group_refusal(group, shared) == refusal


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("auto", {"tp": "auto", "cp": "auto"}),
        ("host", {"tp": "host", "cp": "host"}),
        ("tp=oneshot,cp=nccl", {"tp": "oneshot", "cp": "nccl"}),
        ("cp=host", {"tp": "auto", "cp": "host"}),
    ],
)
def test_what_is_asked_for(text, asked):
    assert parse_collective(text, ["tp", "cp"]) == asked


@pytest.mark.parametrize("text", ["ring", "", "tp=", "tp=ring", "dp=nccl", "tp=nccl,host", "tp=nccl,tp=host"])
def test_what_cannot_be_asked_for(text):
    with pytest.raises(UsageError) as error:
        parse_collective(text, ["tp"])
    assert repr(text) in error.value.message and error.value.hint


@pytest.mark.parametrize(
    ("asked", "device", "devices", "words"),
    [
        ("nccl", "cpu", [], "needs GPUs"),
        ("oneshot", "cpu", [], "needs GPUs"),
        ("nccl", "cuda", [0, 0], "refuses ranks that share a device (0, 0)"),
    ],
)
def test_a_backend_that_the_placement_rules_out(asked, device, devices, words):
    with pytest.raises(UsageError, match="--collective") as error:
        check_placement({"tp": asked}, device, devices)
    assert words in error.value.message


@pytest.mark.parametrize("asked", ["auto", "host", "oneshot"])
def test_backends_for_ranks_that_share_a_device(asked):
    check_placement({"tp": asked}, "cuda", [0, 0])
