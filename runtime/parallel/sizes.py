"""Sizes that must agree are refused with the numbers: a collective would wait for ever, or mix up what ranks have."""

from __future__ import annotations

from ...shardplan.errors import UsageError


def agree(what: str, found: int, expected: int) -> None:
    """Raise UsageError unless `found`, the size of `what`, is `expected`."""
    if found != expected:
        raise UsageError(f"{what}: {found}, not {expected}", "every rank must call with sizes that fit together")
