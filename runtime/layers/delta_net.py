"""Gated delta net layer of Qwen3-Next and Qwen3.5: project, convolve over time, apply the delta rule, norm, project.

Shapes: T tokens of S sequences, H hidden, k and v the key and value heads of this rank, dk and dv their dimensions,
C = 2 k dk + v dv channels of the convolution, K its width.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F

from ...shardplan.config import DeltaNet
from ..batch import ForwardBatch
from ..context_batch import ContextBatch
from .activation import ACTIVATIONS
from .builder import LayerBuilder
from .delta_passing import PassedAlong
from .delta_rule import PreparedChunks, delta_step, prepare_chunks, run_chunks

_NORM_EPS = 1e-6  # of the unit-length queries and keys


class GatedDeltaNet:
    """A recurrent layer in attention's place: what it remembers of a sequence has a fixed size."""

    def __init__(self, build: LayerBuilder, index: int, net: DeltaNet) -> None:
        p = f"model.layers.{index}.linear_attn."
        heads, keys = build.size("delta_v_heads"), build.size("delta_k_heads") * net.key_dim
        values = heads * net.value_dim
        self.index, self.net, self.heads = index, net, heads
        self.in_proj = build.column(*(f"{p}in_proj_{name}" for name in ("qkv", "z", "b", "a")))
        self.in_sizes, self.channel_sizes = [2 * keys + values, values, heads, heads], [keys, keys, values]
        self.kernel = build.weights.take(f"{p}conv1d.weight")
        self.activation = ACTIVATIONS[build.model.activation]
        self.a_log, self.dt_bias = build.weights.take(f"{p}A_log"), build.weights.take(f"{p}dt_bias")
        self.norm = build.norm(f"{p}norm")
        self.out_proj = build.row(f"{p}out_proj")

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        qkv, z, b, a = self.in_proj(x).split(self.in_sizes, dim=-1)
        beta = b.sigmoid().float()
        g = (-self.a_log.float().exp() * F.softplus(a.float() + self.dt_bias)).float()
        if batch.decode_only:
            out = self._step(qkv, g, beta, batch, batch.state_slots)
        else:
            out = self._mixed(qkv, g, beta, batch)
        gates = F.silu(z.float()).view_as(out)
        # The norm is over single heads, then gated.
        return self.out_proj((self.norm(out.to(x.dtype)) * gates).to(x.dtype).flatten(1))

    def _mixed(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Sequences of any lengths, [T, ..] -> [T, v, dv]: those with one new token together, the others in turn."""
        out = qkv.new_empty(len(qkv), self.heads, self.net.value_dim, dtype=torch.float32)
        ends = list(accumulate(batch.query_lens))
        if 1 in batch.query_lens:
            rows, slots = _single_tokens(batch, ends)
            out[rows] = self._step(qkv[rows], g[rows], beta[rows], batch, slots)
        for s, count in enumerate(batch.query_lens):
            span, slot = slice(ends[s] - count, ends[s]), batch.state_slots[s : s + 1]
            if isinstance(batch, ContextBatch) and s >= batch.num_whole:
                out[span] = self._over_context(qkv[span], g[span], beta[span], batch, s)
            elif count > 1:
                out[span] = self._chunks(qkv[span], g[span], beta[span], batch, slot)
        return out

    def _step(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch, slots: torch.Tensor
    ) -> torch.Tensor:
        """One token of each of the sequences in `slots` [S]: qkv [S, C], g and beta [S, v] -> [S, v, dv]."""
        state = batch.states.layer(self.index)[1]
        q, k, v = self._heads(self._convolve(qkv.unsqueeze(1), batch, slots).squeeze(1))
        out, new = delta_step(q, k, v, g, beta, state[slots])
        state.index_copy_(0, slots, new)
        return out

    def _chunks(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch, slot: torch.Tensor
    ) -> torch.Tensor:
        """n tokens of the sequence in `slot` [1]: qkv [n, C], g and beta [n, v] -> [n, v, dv]."""
        state = batch.states.layer(self.index)[1]
        prepared = self._prepare(self._convolve(qkv.unsqueeze(0), batch, slot).squeeze(0), g, beta)
        out, new = run_chunks(prepared, state[slot].squeeze(0))
        state.index_copy_(0, slot, new.unsqueeze(0))
        return out.transpose(0, 1)

    def _over_context(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, batch: ContextBatch, s: int
    ) -> torch.Tensor:
        """This rank's tokens of sequence `s`, which ranks share out: qkv [n, C], g and beta [n, v] -> [n, v, dv].

        All ranks prepare their pieces at once; then the state is passed along the sequence, from piece to piece.
        """
        layout, slot = batch.layouts[s - batch.num_whole], batch.state_slots[s]
        history, state = batch.states.layer(self.index)
        passed = PassedAlong(layout, batch.communicator)
        sizes = [stop - start for start, stop in layout.pieces[batch.communicator.rank]]
        before, history[slot] = passed.inputs_before(qkv, history[slot])
        prepared = [
            self._prepare(self._mix(torch.cat([earlier, own]).unsqueeze(0)).squeeze(0), gate, strength)
            for earlier, own, gate, strength in zip(before, *(x.split(sizes) for x in (qkv, g, beta)), strict=True)
        ]
        outputs, state[slot] = passed.states(prepared, state[slot])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _prepare(self, channels: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> PreparedChunks:
        """Of n tokens after the convolution: channels [n, C], g and beta [n, v]."""
        q, k, v = (x.transpose(0, 1) for x in self._heads(channels))
        return prepare_chunks(q, k, v, g.T, beta.T)

    def _convolve(self, inputs: torch.Tensor, batch: ForwardBatch, slots: torch.Tensor) -> torch.Tensor:
        """Causal depthwise convolution over time, then the activation: n new tokens of S sequences, [S, n, C] -> same."""
        history = batch.states.layer(self.index)[0]
        longer = torch.cat([history[slots], inputs], dim=1)
        history.index_copy_(0, slots, longer[:, inputs.shape[1] :])
        return self._mix(longer)

    def _mix(self, inputs: torch.Tensor) -> torch.Tensor:
        """[S, K - 1 + n, C] -> [S, n, C]"""
        mixed = F.conv1d(inputs.transpose(1, 2), self.kernel, groups=len(self.kernel))
        return self.activation(mixed).transpose(1, 2)

    def _heads(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, C] -> queries and keys of unit length, repeated for each value head, [n, v, dk], and values [n, v, dv]."""
        q, k, v = channels.float().split(self.channel_sizes, dim=-1)
        q, k = (self._unit(part.unflatten(-1, (-1, self.net.key_dim))) for part in (q, k))
        return q * self.net.key_dim**-0.5, k, v.unflatten(-1, (-1, self.net.value_dim))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
        return unit.repeat_interleave(self.heads // x.shape[1], dim=1)


def _single_tokens(batch: ForwardBatch, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, state slots) of the sequences with one new token, worked out once a step."""
    key = "single tokens"
    if key not in batch.scratch:
        single = [s for s, count in enumerate(batch.query_lens) if count == 1]
        rows, sequences = torch.tensor([[ends[s] - 1 for s in single], single], device=batch.state_slots.device)
        batch.scratch[key] = rows, batch.state_slots[sequences]
    return batch.scratch[key]
