"""What tests of the building blocks let ranks do: each returns this rank's results and gradients, for one given loss.

The loss is the sum of the whole result times fixed random numbers, so that a gradient in the wrong place shows.
"""

from __future__ import annotations

import torch

from mgtp.runtime.communicator import Communicator
from mgtp.runtime.parallel.attention import (
    KeyPart,
    Visibility,
    across_ranks,
    attend,
    attend_to_part,
    exchange,
    with_sinks,
)
from mgtp.runtime.parallel.collectives import copy_to_ranks
from mgtp.runtime.parallel.linear import (
    ColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mgtp.runtime.parallel.norm import SplitRMSNorm
from mgtp.runtime.parallel.ranges import SequenceLayout, even_ranges
from mgtp.runtime.parallel.sequence import gather_parts, gather_sequence, own_positions, scatter_sequence

Tensors = list[torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers wherever it is called."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss(y: torch.Tensor) -> torch.Tensor:
    """One number that depends on every element of `y` in a way of its own."""
    return (y * random(*y.shape, seed=99)).sum()


def leaf(x: torch.Tensor) -> torch.Tensor:
    """`x` as a tensor whose gradient is asked for."""
    return x.clone().requires_grad_()


def gradient(x: torch.Tensor) -> torch.Tensor:
    """What `backward` left."""
    assert x.grad is not None
    return x.grad


def detached(*tensors: torch.Tensor) -> Tensors:
    """Tensors that can be sent between processes."""
    return [t.detach().clone() for t in tensors]


def mlp(communicator: Communicator, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor):
    """Column- then row-parallel: (y, gradients of x, of this rank's rows of `up` and columns of `down`, of the bias)."""
    start, stop = even_ranges(len(up), communicator.size)[communicator.rank]
    x, up, down, bias = leaf(x), leaf(up[start:stop]), leaf(down[:, start:stop]), leaf(bias)
    hidden = torch.tanh(ColumnParallelLinear(up, None, communicator)(x))
    y = RowParallelLinear(down, bias, communicator)(hidden)
    loss(y).backward()
    return detached(y, *map(gradient, (x, up, down, bias)))


def embed_and_score(communicator: Communicator, ids: torch.Tensor, table: torch.Tensor, head: torch.Tensor):
    """Embedding, then logits: (logits, gradients of this rank's rows of both matrices)."""
    rows = even_ranges(len(table), communicator.size)
    start, stop = rows[communicator.rank]
    own_table, own_head = leaf(table[start:stop]), leaf(head[start:stop])
    x = torch.tanh(VocabParallelEmbedding(own_table, (start, stop), communicator)(ids))
    logits = ParallelLMHead(own_head, rows, communicator)(x)
    loss(logits).backward()
    return detached(logits, gradient(own_table), gradient(own_head))


def norm(communicator: Communicator, x: torch.Tensor, z: torch.Tensor, w: torch.Tensor):
    """Two tensors of the same width, normed with one exchange: (both, gradients of this rank's columns of x and w)."""
    sizes = [stop - start for start, stop in even_ranges(x.shape[1], communicator.size)]
    start, stop = even_ranges(x.shape[1], communicator.size)[communicator.rank]
    own_x, own_w = leaf(x[:, start:stop]), leaf(w[start:stop])
    layer = SplitRMSNorm([own_w, own_w], [x.shape[1]] * 2, 1e-6, communicator, dtype=torch.float64)
    y, other = layer(own_x, z[:, start:stop])
    whole = torch.cat([gather_parts(y, sizes, communicator, 1), gather_parts(other, sizes, communicator, 1)])
    loss(whole).backward()
    return detached(whole, gradient(own_x), gradient(own_w))


def there_and_back(communicator: Communicator, x: torch.Tensor, layout: SequenceLayout, dim: int):
    """Scatter, square, gather: (own part, the whole, gradient of the whole x)."""
    x = leaf(x)
    part = scatter_sequence(x, layout, communicator, dim)
    whole = gather_sequence(part.square(), layout, communicator, dim)
    loss(whole).backward()
    return detached(part, whole, gradient(x))


def attention(communicator: Communicator, qkv: Tensors, layout: SequenceLayout, window: int | None, gather_bytes: int):
    """A sequence shared out by `layout`, its attention gathered again: (out, gradients of whole q, k, v and sinks)."""
    q, k, v, sinks = map(leaf, qkv)
    positions = [own_positions(layout, rank) for rank in range(communicator.size)]
    own = [scatter_sequence(x, layout, communicator, dim=-2) for x in (q, k, v)]
    parts = exchange(own[1], own[2], positions, communicator, gather_bytes)
    visible = Visibility(positions[communicator.rank], window)
    out = attend(own[0], visible, parts, q.shape[-1] ** -0.5, copy_to_ranks(sinks, communicator))
    whole = gather_sequence(out, layout, communicator, dim=-2)
    loss(whole).backward()
    return detached(whole, *map(gradient, (q, k, v, sinks)))


def attention_to_own_keys(communicator: Communicator, qkv: Tensors):
    """Queries that every rank has, at the end of a sequence whose keys are shared out: (out, gradients as `attention`)."""
    q, k, v, sinks = map(leaf, qkv)
    length = k.shape[-2]
    at = torch.arange(*even_ranges(length, communicator.size)[communicator.rank])
    part = KeyPart(k[..., at, :], v[..., at, :], at)
    visible = Visibility(torch.arange(length - q.shape[-2], length))
    found = attend_to_part(copy_to_ranks(q, communicator), visible, part, q.shape[-1] ** -0.5)
    out = with_sinks(across_ranks(found, communicator), sinks)
    loss(out).backward()
    return detached(out, gradient(q), gradient(k)[..., at, :], gradient(v)[..., at, :], gradient(sinks))
