"""Values that were read from JSON files or options: checking and showing them."""

from __future__ import annotations

import math
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """`value`, fit for one line: escaped, and shortened however long or nested it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 160 else text[:140] + "..." + text[-17:]


def escaped(text: str) -> str:
    """`text` on one line: what cannot be printed, line breaks and control characters, as Python escapes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def counted(count: int, noun: str) -> str:
    """'1 tensor', '2 tensors', '2 entries'."""
    plural = f"{noun[:-1]}ies" if noun.endswith("try") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def json_kind(value: Any) -> str:
    """What JSON calls a value that was read from it."""
    kinds = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


def is_finite_number(value: Any) -> bool:
    """Whether `value` is a number (no boolean) that a float can hold; JSON's integers may be too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
