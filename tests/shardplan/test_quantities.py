"""Shares and sizes as people write them."""

from __future__ import annotations

import pytest

from mgtp.shardplan.errors import UsageError
from mgtp.shardplan.quantities import parse_shares, parse_sizes


@pytest.mark.parametrize(
    ("text", "shares"), [("2,1,1", [2, 1, 1]), ("24, 12,12", [2, 1, 1]), ("7,7,7", [1, 1, 1]), ("3,1,2", [3, 1, 2])]
)
def test_shares(text: str, shares: list[int]) -> None:
    assert parse_shares(text, 3) == shares


@pytest.mark.parametrize(
    "text", ["", "2,1", "2,1,1,1", "2,0,1", "2,-1,1", "2,1.5,1", "a,b,c", "1,1,2147483648", "²,1,1"]
)
def test_wrong_shares(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shares .*(from 1 to 2147483647|entries)"):
        parse_shares(text, 3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24gib", 24 << 30),
        ("24G", 24 << 30),
        ("24 GB", 24 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("80000000000", 80_000_000_000),
        ("80000000000B", 80_000_000_000),
        ("1T", 1 << 40),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_sizes(text, "--device-memory") == [size]
    assert parse_sizes(f"{text},{text}", "--device-memory") == [size, size]


@pytest.mark.parametrize(
    "text", ["", "GiB", "24GiB,", "-1GiB", "1e3GiB", "24 GiB 3", "inf", "0", "0GiB", "24", "24KiB", "24Gi B", "²GiB"]
)
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--device-memory"):
        parse_sizes(text, "--device-memory")


@pytest.mark.parametrize("text", ["1.1PiB", "2000TiB", "1EiB"])
def test_sizes_that_are_too_large(text: str) -> None:
    with pytest.raises(UsageError, match="is more than 1PiB"):
        parse_sizes(text, "--device-memory")
