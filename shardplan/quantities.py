"""Options that carry numbers: shares such as 2,1,1 and sizes such as 24GiB."""

from __future__ import annotations

import math
import re

from .errors import UsageError
from .values import counted

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTPE]?)(i?)B?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_LARGEST_SHARE = (1 << 31) - 1
_LARGEST_SIZE = 1 << 50  # 1 PiB


def parse_shares(text: str, tp_size: int) -> list[int]:
    """'2,1,1' as the ranks' weights, in lowest terms; raises UsageError unless they are one positive number a rank."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isdecimal() and len(p) < 12 and 0 < int(p) <= _LARGEST_SHARE for p in parts):
        raise UsageError(
            f"--shares {text!r} is not a list of whole numbers from 1 to {_LARGEST_SHARE}", "give shares such as 2,1,1"
        )
    if len(parts) != tp_size:
        raise UsageError(
            f"--shares {text} has {counted(len(parts), 'entry')}, --tp-size is {tp_size}", "give one share a rank"
        )
    return lowest_terms([int(p) for p in parts])


def lowest_terms(shares: list[int]) -> list[int]:
    """`shares` divided by what they have in common, so that 2,2 and 1,1 make the same plan."""
    divisor = math.gcd(*shares)
    return [s // divisor for s in shares]


def parse_sizes(text: str, option: str) -> list[int]:
    """'24GiB,12GiB' in bytes. GiB and G are 1024^3 bytes, GB is 1000^3; raises UsageError naming `option`."""
    return [_parse_size(part.strip(), text, option) for part in text.split(",")]


def _parse_size(part: str, text: str, option: str) -> int:
    match = _SIZE.fullmatch(part)
    if match is None or len(part) > 32:
        raise UsageError(f"{option} {text!r}: {part!r} is not a size", "give sizes such as 24GiB, 80GB or 512MiB")
    number, prefix, binary = match.groups()
    is_decimal = not binary and part[-1] in "bB"
    size = int(float(number) * (1000 if is_decimal else 1024) ** _POWER[prefix.upper()])
    if size < 1 << 20:
        raise UsageError(
            f"{option} {text!r}: {part!r} is only {counted(size, 'byte')}", "give 1MiB or more, such as 24GiB"
        )
    if size > _LARGEST_SIZE:
        raise UsageError(f"{option} {text!r}: {part!r} is more than 1PiB", "give at most 1PiB, such as 24GiB")
    return size
