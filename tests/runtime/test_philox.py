"""The random numbers are the published generator's, and depend on nothing but seed and position."""

from __future__ import annotations

import pytest
import torch

from mgtp.runtime.philox import philox4x32, uniform

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, no_cuda])]

# The "philox4x32 10" lines of Random123's tests/kat_vectors: four counter words, two key words, four random words.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same generator on Python's integers."""
    c, k = counter, key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("device", DEVICES)
def test_known_answers(device: str) -> None:
    words = torch.tensor([[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS], device=device).T
    assert philox4x32(words[:4], words[4:6]).tolist() == words[6:].tolist()


def test_a_thousand_random_counters_and_keys() -> None:
    words = torch.randint(0, 1 << 32, (6, 1000), generator=torch.Generator().manual_seed(0))
    expected = [plain_philox(column[:4], column[4:]) for column in words.T.tolist()]
    assert philox4x32(words[:4], words[4:]).T.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_of_wide_seeds_and_positions(device: str) -> None:
    cases = [(0, 0), (1, 0), (0, 1), ((1 << 64) - 1, 131071), (1 << 63, 1 << 40), (0x0123456789ABCDEF, (1 << 31) + 5)]
    seeds, positions = (
        torch.tensor([as_int64(value) for value in part], device=device) for part in zip(*cases, strict=True)
    )
    expected = []
    for seed, position in cases:
        first, second, *_ = plain_philox([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
        expected.append(((first >> 5) * 2**26 + (second >> 6)) / 2**53)
    numbers = uniform(seeds, positions)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == expected


def test_uniform_is_uniform_and_uncorrelated() -> None:
    positions = torch.arange(100_000)
    one, other = uniform(torch.zeros_like(positions), positions), uniform(torch.ones_like(positions), positions)
    for numbers in (one, other):
        assert 0 <= float(numbers.min()) < 1e-3
        assert 0.999 < float(numbers.max()) < 1
        counts = torch.histc(numbers, bins=100, min=0, max=1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 150  # chi-square, 99 degrees: 0.9993 quantile
    pairs = torch.stack([one, other, one.roll(1)])
    assert float((torch.corrcoef(pairs) - torch.eye(3)).abs().max()) < 0.02
