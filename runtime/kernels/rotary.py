"""Rotary embedding of queries and keys, head norms before it, and the write to the cache, in one pass.

The rotation handles all layouts alike: a dimension d turns together with its partner, d +- rot/2 or, interleaved,
d xor 1; dimensions from `rot` on pass through with angle 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .launch import Kernel, power_of_2, start_dependents, wait_for_inputs
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


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "rows", "positions"],  # parts of larger tensors, at any place
)
def _rotate_and_write(
    qkv_ptr, out_ptr, k_cache, v_cache, tables, rows, positions, cos_sin, q_weight, k_weight, q_eps, k_eps,
    qkv_stride, table_stride,
    KV: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    ROT: tl.constexpr, INTERLEAVED: tl.constexpr, BY_TOKEN: tl.constexpr, KEYS_TOO: tl.constexpr,
    HEAD_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, CAST_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's G queries, key and value of one kv head."""
    start_dependents(PDL)
    wait_for_inputs(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    g = tl.arange(0, G_PAD)
    position = tl.load(positions + token)
    angles = cos_sin + (token if BY_TOKEN else position).to(tl.int64) * ROT
    start = qkv_ptr + token.to(tl.int64) * qkv_stride
    heads = head * G + g
    q = load_rotated(start + heads * D, g < G, angles, q_weight, q_eps, D, D_PAD, ROT, INTERLEAVED,
                     HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    out = out_ptr + token.to(tl.int64) * ((KV * G + KV if KEYS_TOO else KV * G) * D) + d[None, :]
    tl.store(out + heads[:, None] * D, q.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])
    one = tl.arange(0, 1)
    k = load_rotated(start + (KV * G + head) * D + one, one == 0, angles, k_weight, k_eps, D, D_PAD, ROT, INTERLEAVED,
                     HEAD_NORM, ONE_PLUS, CAST_FIRST)  # fmt: skip
    v = tl.load(start + (KV * G + KV + head) * D + d, mask=d < D, other=0.0)
    block = tl.load(tables + tl.load(rows + token).to(tl.int64) * table_stride + position // SIZE)
    slot = ((block.to(tl.int64) * SIZE + position % SIZE) * KV + head) * D
    tl.store(k_cache + slot + one[:, None] + d[None, :], k.to(k_cache.dtype.element_ty), mask=(d < D)[None, :])
    if KEYS_TOO:
        tl.store(out + (KV * G + head + one[:, None]) * D, k.to(out_ptr.dtype.element_ty), mask=(d < D)[None, :])
    tl.store(v_cache + slot + d, v, mask=d < D)


_kernel = Kernel(_rotate_and_write)


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
        _kernel(
            (tokens, kv),
            (
                qkv, out, k_cache, v_cache, table, rows, positions, rotation.cos_sin,
                *norm_arguments(norms, rotation.cos_sin), qkv.stride(0), table.stride(0),
            ),
            {
                "KV": kv, "G": groups, "G_PAD": power_of_2(groups), "D": dim,
                "D_PAD": power_of_2(dim), "SIZE": size, "ROT": rotation.cos_sin.shape[1],
                "INTERLEAVED": rotation.interleaved, "BY_TOKEN": rotation.by_token, "KEYS_TOO": keys_too,
                **norm_flags(norms),
            },
            warps=1,
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
