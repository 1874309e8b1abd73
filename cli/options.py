"""Checks of option values that several commands share."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from ..shardplan.errors import UsageError


def flag(name: str) -> str:
    """An option's name as it is typed: max_tokens -> --max-tokens."""
    return f"--{name.replace('_', '-')}"


def path(text: str) -> Path:
    """A path; an empty one stands for the current folder, and as a rule for a variable that is not set."""
    if not text:
        raise typer.BadParameter("is empty, name a file or folder")
    return Path(text)


def finite(param: typer.CallbackParam, value: float | None) -> float | None:
    """`value`, which must be a number that ends."""
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{param.opts[0]} {value} must be finite", "give a number of seconds, however large")
    return value


def positive(param: typer.CallbackParam, value: int | None) -> int | None:
    """`value`, which must be 1 or more when given; the error names option and value, which Typer's own does not."""
    if value is not None and value < 1:
        raise UsageError(f"{param.opts[0]} {value} must be 1 or more", "give a whole number: 1, 2, ...")
    return value
