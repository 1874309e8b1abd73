"""Rotary embedding of queries and keys, head norms before it, and the write to the cache, in one pass.

The rotation handles all layouts alike: a dimension d turns together with its partner, d +- rot/2 or, interleaved,
d xor 1; dimensions from `rot` on pass through with angle 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .launch import Kernel, cdiv, power_of_2, start_dependents, wait_for_inputs
from .norm import rms_scale


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of single heads: weight [D], shared by the heads, and the variant (see runtime/layers/norm.py)."""

    weight: torch.Tensor
    eps: float
    one_plus: bool = False
    cast_first: bool = True


@dataclass(frozen=True)
class Rotation:
    """cos and sin, float32 [rows, rot]: cos in the first half of a row, sin in the second.

    A token's row is its position, or, `by_token`, its index in the step.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    by_token: bool = False

    def after(self, count: int) -> Rotation:
        """The same for a step without its first `count` tokens."""
        return replace(self, cos_sin=self.cos_sin[count:]) if self.by_token else self


@triton.jit
def load_rotated(
    base, inside, cos_sin, weight_ptr, eps,
    D: tl.constexpr, D_PAD: tl.constexpr, ROT: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Heads at pointers `base` [heads], normed and rotated, float32 [heads, D_PAD] rounded to the dtype; zero outside."""
    d = tl.arange(0, D_PAD)
    half: tl.constexpr = ROT // 2
    turns = d < ROT
    if INTERLEAVED:
        partner, angle, negative = d ^ 1, d // 2, d % 2 == 0
    else:
        partner, angle, negative = tl.where(d < half, d + half, d - half), tl.where(d < half, d, d - half), d < half
    partner = tl.where(turns, partner, d)
    mask = inside[:, None] & (d < D)[None, :]
    dtype = base.dtype.element_ty
    x = tl.load(base[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HEAD_NORM:
        inverse = (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps))[:, None]
        w = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = rms_scale(x, w, inverse, True, ONE_PLUS, CAST_FIRST, dtype).to(dtype).to(tl.float32)
        w = tl.load(weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y = rms_scale(y, w, inverse, True, ONE_PLUS, CAST_FIRST, dtype).to(dtype).to(tl.float32)
    cos = tl.load(cos_sin + angle, mask=turns, other=1.0)[None, :]
    sin = tl.load(cos_sin + half + angle, mask=turns, other=0.0)[None, :]
    rotated = x * cos + tl.where(negative, -1.0, 1.0)[None, :] * (y * sin)
    return rotated.to(dtype).to(tl.float32)


@triton.jit
def _weighted(x, weight_ptr, at, inside, inverse, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, DTYPE):
    w = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return rms_scale(x, w, inverse, True, ONE_PLUS, CAST_FIRST, DTYPE).to(DTYPE).to(tl.float32)


@triton.jit
def _load_pairs(heads, inside, ROT: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both partners of each pair, [tokens, HALF_PAD]."""
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF_PAD)
        both = tl.load(heads[:, None] + at[None, :], mask=inside[:, None] & (at < ROT)[None, :], other=0.0)
        x, y = tl.split(tl.reshape(both, [heads.shape[0], HALF_PAD, 2]))
    else:
        at = tl.arange(0, HALF_PAD)
        mask = inside[:, None] & (at < ROT // 2)[None, :]
        x = tl.load(heads[:, None] + at[None, :], mask=mask, other=0.0)
        y = tl.load(heads[:, None] + (ROT // 2 + at)[None, :], mask=mask, other=0.0)
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def _store_pairs(heads, x, y, inside, ROT: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF_PAD)
        both = tl.reshape(tl.join(x, y), [heads.shape[0], 2 * HALF_PAD])
        tl.store(heads[:, None] + at[None, :], both, mask=inside[:, None] & (at < ROT)[None, :])
    else:
        at = tl.arange(0, HALF_PAD)
        mask = inside[:, None] & (at < ROT // 2)[None, :]
        tl.store(heads[:, None] + at[None, :], x, mask=mask)
        tl.store(heads[:, None] + (ROT // 2 + at)[None, :], y, mask=mask)


@triton.jit
def _rotate_heads(
    heads, out, copy, inside, cos, sin, weight_ptr, eps,
    D: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    OUT: tl.constexpr, COPY: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """A head of each token, at pointers `heads` [tokens], normed and rotated, to pointers `out` and `copy` [tokens].

    Unlike in load_rotated each element is loaded once, and partners meet in one thread.
    """
    x, y = _load_pairs(heads, inside, ROT, HALF_PAD, INTERLEAVED)
    dtype = heads.dtype.element_ty
    z_at = ROT + tl.arange(0, REST_PAD)
    z_mask = inside[:, None] & (z_at < D)[None, :]
    if ROT < D:
        z = tl.load(heads[:, None] + z_at[None, :], mask=z_mask, other=0.0).to(tl.float32)
    if HEAD_NORM:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if ROT < D:
            squares += tl.sum(z * z, 1)
        inverse = (1.0 / tl.sqrt_rn(squares / D + eps))[:, None]
        pair = tl.arange(0, HALF_PAD)
        turns = pair < ROT // 2
        x_at = pair * 2 if INTERLEAVED else pair
        y_at = x_at + (1 if INTERLEAVED else ROT // 2)
        x = _weighted(x, weight_ptr, x_at, turns, inverse, ONE_PLUS, CAST_FIRST, dtype)
        y = _weighted(y, weight_ptr, y_at, turns, inverse, ONE_PLUS, CAST_FIRST, dtype)
        if ROT < D:
            z = _weighted(z, weight_ptr, z_at, z_at < D, inverse, ONE_PLUS, CAST_FIRST, dtype)
    rotated_x = (x * cos - y * sin).to(dtype)
    rotated_y = (y * cos + x * sin).to(dtype)
    if OUT:
        _store_pairs(out, rotated_x, rotated_y, inside, ROT, HALF_PAD, INTERLEAVED)
        if ROT < D:
            tl.store(out[:, None] + z_at[None, :], z.to(dtype), mask=z_mask)
    if COPY:
        _store_pairs(copy, rotated_x, rotated_y, inside, ROT, HALF_PAD, INTERLEAVED)
        if ROT < D:
            tl.store(copy[:, None] + z_at[None, :], z.to(dtype), mask=z_mask)


@triton.jit(
    do_not_specialize=["tokens", "table_stride"],
    do_not_specialize_on_alignment=["tables", "rows", "positions"],  # parts of larger tensors, at any place
)
def _rotate_and_write(
    qkv_ptr, out_ptr, k_cache, v_cache, tables, rows, positions, cos_sin, q_weight, k_weight, q_eps, k_eps,
    tokens, qkv_stride, table_stride,
    KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    ROT: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    BY_TOKEN: tl.constexpr, KEYS_TOO: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens' G queries, key and value of one kv head."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    token, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = token < tokens
    position = tl.load(positions + token, mask=inside, other=0)
    pair = tl.arange(0, HALF_PAD)
    angles = cos_sin + (token if BY_TOKEN else position).to(tl.int64)[:, None] * ROT + pair[None, :]
    angle_mask = inside[:, None] & (pair < ROT // 2)[None, :]
    cos = tl.load(angles, mask=angle_mask, other=0.0)
    sin = tl.load(angles + ROT // 2, mask=angle_mask, other=0.0)
    start = qkv_ptr + token.to(tl.int64) * qkv_stride
    out = out_ptr + token.to(tl.int64) * ((KV * G + KV if KEYS_TOO else KV * G) * D)
    for g in tl.static_range(G):
        at = (head * G + g) * D
        _rotate_heads(start + at, out + at, out, inside, cos, sin, q_weight, q_eps,
                      D, ROT, HALF_PAD, REST_PAD, INTERLEAVED, True, False, HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    row = tl.load(rows + token, mask=inside, other=0).to(tl.int64)
    block = tl.load(tables + row * table_stride + position // SIZE, mask=inside, other=0)
    slot = ((block.to(tl.int64) * SIZE + position % SIZE) * KV + head) * D
    at = (KV * G + head) * D
    _rotate_heads(start + at, out + at, k_cache + slot, inside, cos, sin, k_weight, k_eps,
                  D, ROT, HALF_PAD, REST_PAD, INTERLEAVED, KEYS_TOO, True, HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    d = tl.arange(0, D_PAD)
    mask = inside[:, None] & (d < D)[None, :]
    v = tl.load(start[:, None] + (at + KV * D) + d[None, :], mask=mask, other=0.0)
    tl.store(v_cache + slot[:, None] + d[None, :], v, mask=mask)


_kernel = Kernel(_rotate_and_write)

BLOCK = 16
"""Tokens that a program takes at a time: 4 warps load 16 bytes a thread of each half of their heads of 128."""


def rotate_and_write(
    qkv: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    *,
    keys_too: bool = False,
) -> torch.Tensor:
    """qkv [T, (kv*G + 2 kv) * D] -> rotated queries [T, kv*G, D]; keys and values go to `cache`, each [B, S, kv, D].

    With `keys_too` the keys follow the queries: [T, kv*G + kv, D].
    `rows` int32 [T]: each token's row in `table` int32 [R, blocks]. `positions` int32 [T].
    """
    k_cache, v_cache = cache
    size, kv, dim = k_cache.shape[1:]
    tokens, groups = qkv.shape[0], (qkv.shape[1] // dim - 2 * kv) // kv
    out = qkv.new_empty((tokens, kv * groups + (kv if keys_too else 0), dim))
    if tokens:
        rot = rotation.cos_sin.shape[1]
        _kernel(
            (cdiv(tokens, BLOCK), kv),
            (
                qkv, out, k_cache, v_cache, table, rows, positions, rotation.cos_sin,
                *norm_arguments(norms, rotation.cos_sin), tokens, qkv.stride(0), table.stride(0),
            ),
            {
                "KV": kv, "G": groups, "D": dim, "D_PAD": power_of_2(dim), "SIZE": size,
                "ROT": rot, "HALF_PAD": power_of_2(rot // 2), "REST_PAD": power_of_2(max(1, dim - rot)),
                "INTERLEAVED": rotation.interleaved, "BY_TOKEN": rotation.by_token, "KEYS_TOO": keys_too,
                "BLOCK": BLOCK,
                **norm_flags(norms),
            },
            warps=4,
        )  # fmt: skip
    return out


def norm_arguments(norms: tuple[HeadNorm, HeadNorm] | None, unused: torch.Tensor) -> tuple:
    """(q weight, k weight, q eps, k eps) for a kernel."""
    if norms is None:
        return unused, unused, 0.0, 0.0
    return norms[0].weight, norms[1].weight, norms[0].eps, norms[1].eps


def norm_flags(norms: tuple[HeadNorm, HeadNorm] | None) -> dict[str, bool]:
    """The compile-time side of head norms; both norms are of one variant."""
    if norms is None:
        return {"HEAD_NORM": False, "ONE_PLUS": False, "CAST_FIRST": False}
    return {"HEAD_NORM": True, "ONE_PLUS": norms[0].one_plus, "CAST_FIRST": norms[0].cast_first}
