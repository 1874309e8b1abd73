"""Rotary position embedding (Su et al. 2021) and the ways in which models stretch it to longer contexts.

d is the number of dimensions that rotate; a table row holds d/2 angles.
"""

from __future__ import annotations

import math

import torch

from ...shardplan.rope import Rope


def inverse_frequencies(rope: Rope, length: int | torch.Tensor = 0) -> torch.Tensor:
    """Angle a position, float32 [d/2], or [T, d/2] when `length` is a tensor [T] (dynamic and longrope only).

    `length` is the sequence length that length-dependent kinds go by. Formulas: families of `rope_type` in
    transformers' modeling_rope_utils; linear: Chen et al. 2023; NTK: bloc97 2023; YaRN: Peng et al. 2023, section 3;
    longrope: Ding et al. 2024.
    """
    d = rope.rotary_dim
    exponents = torch.arange(0, d, 2, dtype=torch.float32) / d
    if rope.kind in ("dynamic", "longrope"):
        return _length_dependent(rope, exponents, torch.as_tensor(length))
    if rope.kind == "ntk_alpha":
        return 1.0 / (rope.theta * rope.alpha ** (d / (d - 2))) ** exponents
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "proportional":
        plain[rope.rotated_pairs :] = 0.0
        return plain / rope.factor
    return plain


def _length_dependent(rope: Rope, exponents: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    exponents = exponents.to(length.device)
    original, d = rope.original_max_position, rope.rotary_dim
    column = length.unsqueeze(-1)
    if rope.kind == "dynamic":
        # Computed in float64: the base would otherwise differ in its last bits from a scalar computation.
        longer = column.clamp(min=original).double()
        base = rope.theta * ((rope.factor * longer / original) - (rope.factor - 1)) ** (d / (d - 2))
        return 1.0 / base.float() ** exponents
    factors = torch.tensor([rope.short_factor, rope.long_factor], dtype=torch.float32, device=length.device)
    stretched = torch.where(column > original, factors[1], factors[0])
    return 1.0 / (stretched * rope.theta**exponents)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > rope.original_max_position / low, plain / rope.factor, plain)
    middle = (wavelength <= rope.original_max_position / low) & (wavelength >= rope.original_max_position / high)
    return torch.where(middle, blended, scaled)


def _yarn(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (YaRN, 'NTK-by-parts')."""
    d = rope.rotary_dim

    def correction(rotations: float) -> float:
        return d * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


class RotaryTables:
    """cos and sin of every rope that a model has, by position; one step asks for its tokens' rows once a rope."""

    def __init__(self, ropes: set[Rope], max_positions: int, device: torch.device) -> None:
        self.tables = {rope: self._build(rope, max_positions, device) for rope in ropes}

    def _build(self, rope: Rope, count: int, device: torch.device) -> torch.Tensor:
        """[positions, d] float32: cos in the first half, sin in the second. Length-dependent ropes: as decoded."""
        positions = torch.arange(count, dtype=torch.float32)
        inverse = inverse_frequencies(rope, torch.arange(1, count + 1))
        return _cos_sin(rope, positions, inverse).to(device)

    def rows(self, rope: Rope, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each float32 [T, d/2], for tokens at `positions` of sequences `lengths` long."""
        if rope.depends_on_length:
            inverse = inverse_frequencies(rope, lengths)
            table = _cos_sin(rope, positions.float(), inverse)
        else:
            table = self.tables[rope][positions]
        cos, sin = table.chunk(2, dim=-1)
        return cos, sin

    def joined_rows(self, rope: Rope, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`rows` as one tensor [T, d]: cos, then sin; for integer tensors of any size."""
        return torch.cat(self.rows(rope, positions.long(), lengths.long()), dim=-1)


def _cos_sin(rope: Rope, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    angles = positions.unsqueeze(-1) * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first d of x's [T, heads, D] dimensions by angles whose cos and sin are [T, d/2]."""
    d = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., :d], x[..., d:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
