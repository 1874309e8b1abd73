"""Checks of option values that several commands share."""

from __future__ import annotations

import typer

from ..shardplan.errors import UsageError


def flag(name: str) -> str:
    """An option's name as it is typed: max_tokens -> --max-tokens."""
    return f"--{name.replace('_', '-')}"


def positive(param: typer.CallbackParam, value: int | None) -> int | None:
    """`value`, which must be 1 or more when given; the error names option and value, which Typer's own does not."""
    if value is not None and value < 1:
        raise UsageError(f"{param.opts[0]} {value} must be 1 or more", "give a whole number: 1, 2, ...")
    return value
