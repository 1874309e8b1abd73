"""What the oneshot backend may carry, as tables: pure, so that every rank comes to the same answer from the same facts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shardplan.values import counted

TWO_SHOT_BYTES = 8 << 20
"""The largest two-shot message. Larger ones are bound by bandwidth, where NCCL is at home."""

ALIGNMENT = 16
"""Bytes of one load: sizes must be multiples. Addresses, too, but ranks may differ in them: oneshot.py sees to that."""

ONE_SHOT_DTYPES = ("bfloat16", "float16", "float32")
TWO_SHOT_DTYPES = ("bfloat16", "float32")
TWO_SHOT_RANKS = (2, 4, 8)
"""What torch's two-shot kernel is compiled for: every rank sums a share, then all read all shares."""


class Message(msgspec.Struct, frozen=True):
    """A tensor that is to go over ranks: what all of them know alike, or they would take different ways."""

    dtype: str
    num_bytes: int
    dims: int
    contiguous: bool = True
    operation: str = "sum"


def one_shot_bytes(num_ranks: int) -> int:
    """Up to here every rank sends all of its message to every other."""
    return {2: 1 << 20, 3: 1 << 19, 4: 1 << 19}.get(num_ranks, 1 << 18)


def method_for(message: Message, num_ranks: int, two_shot: bool = True) -> tuple[str, str]:
    """('one-shot' | 'two-shot' | 'fallback', why)."""
    refusal = _refusal(message)
    if refusal:
        return "fallback", refusal
    if message.num_bytes <= one_shot_bytes(num_ranks):
        return "one-shot", f"{message.num_bytes} bytes"
    if message.num_bytes > TWO_SHOT_BYTES:
        return "fallback", f"{message.num_bytes} bytes do not fit a workspace of {TWO_SHOT_BYTES}"
    if not two_shot or num_ranks not in TWO_SHOT_RANKS or message.dtype not in TWO_SHOT_DTYPES:
        return "fallback", f"no two-shot sum of {message.num_bytes} bytes of {message.dtype} over {num_ranks} ranks"
    return "two-shot", f"{message.num_bytes} bytes"


def gathers(message: Message, num_ranks: int) -> bool:
    """Whether every rank's message of any dtype can be sent to all ranks at once: it is made of whole packets."""
    return message.num_bytes % 4 == 0 and 0 < message.num_bytes <= one_shot_bytes(num_ranks)


def _refusal(message: Message) -> str:
    if message.operation != "sum":
        return f"{message.operation} is not a sum"
    if message.dtype not in ONE_SHOT_DTYPES:
        return f"{message.dtype} is not one of {', '.join(ONE_SHOT_DTYPES)}"
    if message.dims < 2:
        return f"{counted(message.dims, 'dimension')}: not hidden states"
    if not message.contiguous:
        return "not contiguous"
    if message.num_bytes % ALIGNMENT:
        return f"{message.num_bytes} bytes are no multiple of {ALIGNMENT}"
    return "" if message.num_bytes else "empty"


class Member(msgspec.Struct, frozen=True):
    """What a rank tells the others before symmetric memory is set up.

    `node` names the machine and its boot. `maps`: of every rank, whether its device's memory can be mapped here.
    """

    rank: int
    node: str
    device: int
    maps: list[bool]


def group_refusal(members: Sequence[Member], allow_shared: bool) -> str:
    """Why these ranks cannot share memory, or an empty string."""
    first = members[0]
    for member in members:
        if member.node != first.node:
            return f"ranks {first.rank} and {member.rank} are on different nodes"
        for other, maps in zip(members, member.maps, strict=True):
            if other.rank < member.rank and other.device == member.device and not allow_shared:
                return f"ranks {other.rank} and {member.rank} share a device without --allow-shared-device"
            if not maps:
                return f"rank {member.rank} cannot map the memory of rank {other.rank}"
    return ""
