"""Every kernel against its float32 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels import references

DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 2e-2)}
TYPES = pytest.mark.parametrize("kind", DTYPES)


def close(out: torch.Tensor, reference: torch.Tensor, kind: str) -> None:
    """Relative error of the whole tensor below what the dtype's rounding explains; NaN never passes."""
    assert out.dtype == DTYPES[kind][0]
    error = (out.float() - reference).norm() / reference.norm()
    assert error < DTYPES[kind][1], error


def random(*shape: int, kind: str, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(DTYPES[kind][0])


@TYPES
@pytest.mark.parametrize(
    ("one_plus", "cast_first", "weighted", "added"),
    [(False, True, True, True), (True, False, True, True), (False, False, True, False), (False, True, False, True)],
)
def test_add_rms_norm(device, kind, one_plus, cast_first, weighted, added):
    from mgtp.runtime.kernels.norm import add_rms_norm

    x, r = random(3, 100, kind=kind, device=device), random(3, 100, kind=kind, device=device)
    w = random(100, kind=kind, device=device) if weighted else None
    residual = r if added else None
    normed, total = add_rms_norm(x, residual, w, 1e-5, one_plus=one_plus, cast_first=cast_first)
    expected, expected_total = references.add_rms_norm(x, residual, w, 1e-5, one_plus=one_plus)
    close(normed, expected, kind)
    close(total, expected_total, kind)


@TYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_activation(device, kind, activation):
    from mgtp.runtime.kernels.activation import gated_activation

    x = random(3, 2 * 72, kind=kind, device=device)
    gate, up = x.float().chunk(2, dim=-1)
    close(gated_activation(x, activation), references.ACTIVATIONS[activation](gate) * up, kind)


@TYPES
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_linear(device, kind, activation, biased, tokens):
    from mgtp.runtime.kernels.linear import row_products, tile_products
    from mgtp.runtime.kernels.tilings import Tiling

    x, w = random(tokens, 88, kind=kind, device=device), random(100, 88, kind=kind, device=device)
    bias = random(100, kind=kind, device=device) if biased else None
    expected = references.linear(x, w, bias, activation)
    for splits in (1, 2):
        close(tile_products(x, w, bias, Tiling(16, 32, 4, 2, splits), activation), expected, kind)
    if tokens == 1:
        close(row_products(x, w, bias, Tiling(2, 64, 4), activation), expected, kind)


class Case:
    """Three sequences of different lengths in a shuffled cache, with what is needed to attend to it."""

    def __init__(self, kind, device, *, kv=2, groups=3, dim=24, rot=24, size=8, interleaved=False, norms=False):
        from mgtp.runtime.kernels.rotary import HeadNorm, Rotation

        self.kv, self.groups, self.dim, self.size, self.interleaved = kv, groups, dim, size, interleaved
        self.lengths = [1, 9, 75]
        blocks = 12
        order = torch.randperm(blocks * 3, device=device)
        self.table = (1 + order).view(3, blocks).to(torch.int32)
        self.rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        shape = (1 + blocks * 3, size, kv, dim)
        self.cache = random(*shape, kind=kind, device=device), random(*shape, kind=kind, device=device)
        angles = torch.rand(96, rot // 2, device=device) * 6
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.rotation = Rotation(self.cos_sin, interleaved)
        weights = [random(dim, kind=kind, device=device) for _ in range(2)]
        self.norms = (HeadNorm(weights[0], 1e-5), HeadNorm(weights[1], 1e-5)) if norms else None
        self.counters = torch.zeros(64, dtype=torch.int32, device=device)
        self.device, self.kind = device, kind

    def cached(self, which: int, s: int) -> torch.Tensor:
        """All keys or values of sequence s, [tokens, kv, D]."""
        return self.cache[which][self.table[self.rows[s]].long()].flatten(0, 1)

    def share(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache of one of several ranks that take blocks in turn."""
        caches = self.cache[0].clone(), self.cache[1].clone()
        for row in self.table.long():
            own = row[rank::ranks]
            for mine, whole in zip(caches, self.cache, strict=True):
                mine[row[: len(own)]] = whole[own]
        return caches

    def int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


INTERLEAVED = {"interleaved": True, "rot": 12}
NORMED = {"norms": True, "dim": 32, "rot": 16}
UNGROUPED = {"groups": 1, "kv": 3}
VARIANTS = pytest.mark.parametrize("options", [{}, INTERLEAVED, NORMED, UNGROUPED])
CASES = pytest.mark.parametrize(
    ("options", "extras"),
    [({}, {}), (INTERLEAVED, {"cap": 5.0}), (NORMED, {"window": 11}), (UNGROUPED, {"window": 20, "sinks": True})],
)


def softmax_of(case: Case, extras: dict):
    from mgtp.runtime.kernels.decode_attention import Softmax

    sinks = torch.randn(case.kv * case.groups, device=case.device) if extras.get("sinks") else None
    return Softmax(case.dim**-0.5, extras.get("cap", 0.0), extras.get("window", 0), sinks)


@TYPES
@VARIANTS
def test_rotate_and_write(device, kind, options):
    from mgtp.runtime.kernels.rotary import rotate_and_write

    case = Case(kind, device, **options)
    positions = [0, 8, 74]
    heads = case.kv * case.groups
    qkv = random(3, (heads + 2 * case.kv) * case.dim, kind=kind, device=device)
    at = (case.table, case.rows, case.int32(positions))
    q = rotate_and_write(qkv, case.cache, *at, case.rotation, case.norms)
    parts = qkv.view(3, -1, case.dim).split([heads, case.kv, case.kv], dim=1)
    norms = case.norms or (None, None)
    angles = case.cos_sin[positions]
    close(q, references.rotated(parts[0], angles, case.interleaved, norms[0]), kind)
    keys = torch.stack([case.cached(0, s)[p] for s, p in enumerate(positions)])
    values = torch.stack([case.cached(1, s)[p] for s, p in enumerate(positions)])
    close(keys, references.rotated(parts[1], angles, case.interleaved, norms[1]), kind)
    assert torch.equal(values, parts[2])
    both = rotate_and_write(qkv, case.cache, *at, case.rotation, case.norms, keys_too=True)
    assert torch.equal(both, torch.cat([q, keys], dim=1))


@TYPES
@CASES
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention(device, kind, options, extras, splits, fused):
    from mgtp.runtime.kernels.decode_attention import decode_attention

    case = Case(kind, device, **options)
    softmax = softmax_of(case, extras)
    heads = case.kv * case.groups
    positions = [n - 1 for n in case.lengths]
    fields = heads + 2 * case.kv if fused else heads
    q = random(3, fields * case.dim, kind=kind, device=device)
    arguments = (case.cache, case.table, case.rows, case.int32(positions), case.counters, softmax)
    if fused:
        out = decode_attention(q, *arguments, case.rotation, case.norms, splits=splits)
        norms = case.norms or (None, None)
        q, new_keys, new_values = q.view(3, -1, case.dim).split([heads, case.kv, case.kv], dim=1)
        q = references.rotated(q, case.cos_sin[positions], case.interleaved, norms[0])
        new_keys = references.rotated(new_keys, case.cos_sin[positions], case.interleaved, norms[1])
        for s, p in enumerate(positions):
            close(case.cached(0, s)[p], new_keys[s], kind)
            assert torch.equal(case.cached(1, s)[p], new_values[s])
    else:
        q = q.view(3, heads, case.dim)
        out = decode_attention(q, *arguments, splits=splits)
    assert not case.counters.any(), "the counters must be left at zero"
    expected = [
        references.attention(q[s], case.cached(0, s), case.cached(1, s), softmax, p) for s, p in enumerate(positions)
    ]
    close(out, torch.stack(expected).flatten(1), kind)


@TYPES
@CASES
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention_over_a_shared_cache(device, kind, options, extras, splits, fused):
    """Three ranks, of which some keep nothing of a short sequence: merged, what one rank finds in all of it."""
    from mgtp.runtime.kernels.decode_attention import CachePart, decode_attention, merged

    case = Case(kind, device, **options)
    softmax, ranks, size = softmax_of(case, extras), 3, case.cache[0].shape[1]
    positions = [n - 1 for n in case.lengths]
    fields = case.kv * (case.groups + (2 if fused else 0))
    q = random(3, fields * case.dim, kind=kind, device=device)
    rotation, norms = (case.rotation, case.norms) if fused else (None, None)
    caches = [case.share(rank, ranks) for rank in range(ranks)]
    places = (case.table, case.rows, case.int32(positions), case.counters)
    found = [
        decode_attention(q, cache, *places, replace(softmax, sinks=softmax.sinks if rank == 0 else None), rotation, norms,
                         part=CachePart(rank, ranks), splits=splits)
        for rank, cache in enumerate(caches)
    ]  # fmt: skip
    expected = decode_attention(q, case.cache, *places, softmax, rotation, norms, splits=splits)
    close(merged(torch.stack(found), q.dtype), expected, kind)
    for s, p in enumerate(positions):
        block = case.table[case.rows[s], p // (size * ranks)]
        keys = caches[p // size % ranks][0][block, p % size]
        close(keys, case.cached(0, s)[p], kind)


@TYPES
@CASES
def test_prefill_attention(device, kind, options, extras):
    from mgtp.runtime.kernels.prefill_attention import prefill_attention

    case = Case(kind, device, **options)
    softmax = softmax_of(case, extras)
    counts, heads = [1, 5, 70], case.kv * case.groups
    q = random(sum(counts), heads, case.dim, kind=kind, device=device)
    starts = case.int32([0, 1, 6, 76])
    out = prefill_attention(q, case.cache, case.table, case.rows, starts, case.int32(case.lengths), 70, softmax)
    expected = []
    for s, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        for i in range(count):
            position = length - count + i
            expected.append(
                references.attention(q[len(expected)], case.cached(0, s), case.cached(1, s), softmax, position)
            )
    close(out, torch.stack(expected).flatten(1), kind)


@TYPES
@pytest.mark.parametrize(
    ("groups", "extras"), [(3, {}), (1, {"cap": 5.0}), (2, {"window": 11}), (1, {"window": 20, "sinks": True})]
)
@pytest.mark.parametrize("tile", [(32, 16), (16, 16), (16, 32)])
def test_prompt_attention(device, kind, groups, extras, tile):
    from mgtp.runtime.kernels.prompt_attention import PromptTiling, prompt_attention

    case = Case(kind, device, groups=groups, dim=32)
    softmax, counts = softmax_of(case, extras), [1, 45, 16, 70]
    heads = case.kv * groups
    qkv = random(sum(counts), (heads + 2 * case.kv) * case.dim, kind=kind, device=device)
    tiling = PromptTiling(tile[0], tile[1], 4, 2)
    starts = case.int32([0, 1, 46, 62, 132])
    rotated = qkv.unflatten(1, (-1, case.dim))[:, : heads + case.kv].contiguous()
    out = prompt_attention(rotated, qkv, case.kv, starts, 70, softmax, tiling)
    expected = []
    for part in qkv.unflatten(1, (-1, case.dim)).split(counts):
        q, k, v = part.split([heads, case.kv, case.kv], dim=1)
        expected += [references.attention(q[i], k, v, softmax, i) for i in range(len(part))]
    close(out, torch.stack(expected).flatten(1), kind)


@TYPES
def test_likeliest(device, kind):
    from mgtp.runtime.kernels.argmax import likeliest

    logits = random(6, 5000, kind=kind, device=device)
    logits[1, 4700] = logits[1, 300] = 50.0
    logits[2, 17] = float("nan")
    logits[3, 4999] = float("inf")
    logits[4] = float("-inf")
    logits[5, :-1] = float("-inf")
    rows = torch.tensor([3, 1, 0, 5, 2, 4], dtype=torch.int32, device=device)
    last_ids = torch.full((7,), -1, device=device)
    ids, failed = likeliest(logits, rows, last_ids)
    assert failed.tolist() == [False, False, True, True, True, False]
    good = ~failed
    assert torch.equal(ids[good], logits.argmax(dim=-1)[good])
    assert ids[1] == 300
    assert ((ids >= 0) & (ids < 5000)).all()
    assert torch.equal(last_ids[rows.long()], ids)
    assert last_ids[6] == -1
