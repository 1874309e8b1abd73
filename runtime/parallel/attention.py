"""Attention to keys and values that are spread over ranks: partial results, merged by their log-sum-exp.

Softmax over all keys is a weighted mean of softmaxes over parts of them, weighted by each part's sum of exponentials
(Milakov and Gimelshein 2018; Rabe and Staats 2021). So parts may be attended to in any order and anywhere:

    parts = exchange(k, v, positions, communicator)                  # every rank's keys and values, as they come
    out = attend(q, own, parts, scaling=d**-0.5)                     # this rank's queries, over all of them
    out = across_ranks(attend_to_part(q, own, part, ...), comm)      # or: the same queries, each rank's own keys

In the second form every rank uses the same q otherwise: for its gradients, pass `copy_to_ranks(q, comm)`.

Shapes: n queries, m keys of a part, kv heads of keys, G query heads of each, D head dimension; leading dimensions are
batches. Whatever the inputs are, results are computed in float32, or in float64 for float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...shardplan.errors import UsageError
from ..communicator import Communicator
from .collectives import copy_to_ranks, shift
from .sequence import gather_parts
from .sizes import agree

GATHER_BYTES = 64 << 20
"""Keys and values of all ranks together that are gathered at once; more go round a ring, a rank's part at a time."""

KEY_CHUNK = 1024
"""Keys that are always attended to at once; more where queries are few."""

CHUNK_NUMBERS = 1 << 26
"""Scores, and numbers of keys, that are in memory at a time: so that a long context takes no more."""

NOWHERE = 1 << 62
"""The position of a key that no query sees."""


class KeyPart(NamedTuple):
    """Some keys and values [.., kv, m, D] and where they are in their sequence, [m]. There may be none."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


class Partial(NamedTuple):
    """What some queries found in some keys: the weighted mean [.., n, D], and the log of the weights' sum [.., n].

    Queries that see none of the keys have zero and -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Visibility(NamedTuple):
    """Which keys a query at `queries` [.., n] may see: none that are later, none that are `window` or more back."""

    queries: torch.Tensor
    window: int | None = None

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """[.., n, m]: whether each query sees the key at each of `positions` [m]."""
        queries = self.queries.unsqueeze(-1)
        seen = positions <= queries
        return seen if self.window is None else seen & (positions > queries - self.window)


def exchange(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: Sequence[torch.Tensor],
    communicator: Communicator,
    gather_bytes: int | None = None,
) -> Iterator[KeyPart]:
    """The keys and values of every rank, this one's being `keys` and `values`; `positions` are those of every rank.

    At once when they are at most `gather_bytes` (None: GATHER_BYTES), which is one message; else rank by rank round a
    ring, in the memory of two parts.
    """
    agree("tensors of positions", len(positions), communicator.size)
    agree(f"keys of rank {communicator.rank}", keys.shape[-2], len(positions[communicator.rank]))
    if communicator.size == 1:
        yield KeyPart(keys, values, positions[0])
        return
    sizes = [len(p) for p in positions]
    both = torch.stack([keys, values])
    key_bytes = math.prod(keys.shape[:-2]) * keys.shape[-1] * keys.element_size()
    if 2 * key_bytes * sum(sizes) <= (GATHER_BYTES if gather_bytes is None else gather_bytes):
        gathered = copy_to_ranks(gather_parts(both, sizes, communicator, dim=-2), communicator)
        yield KeyPart(gathered[0], gathered[1], torch.cat(list(positions)))
        return
    # Padded parts are passed on and attended to whole: what each rank does, forward and backward, is the same.
    widest = max(sizes)
    both = F.pad(both, (0, 0, 0, widest - keys.shape[-2]))
    for turn in range(communicator.size):
        source = (communicator.rank - turn) % communicator.size
        yield KeyPart(both[0], both[1], _padded_positions(positions[source], widest - sizes[source]))
        if turn < communicator.size - 1:
            both = shift(both, communicator)


def attend(
    q: torch.Tensor, visible: Visibility, parts: Iterable[KeyPart], scaling: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """q [.., kv, G, n, D] over all of `parts` -> the same, in q's dtype. `sinks` [kv, G]: see `with_sinks`."""
    found = merge_as_they_come(attend_to_part(q, visible, part, scaling) for part in parts)
    return (found.out if sinks is None else with_sinks(found, sinks)).to(q.dtype)


def attend_to_part(q: torch.Tensor, visible: Visibility, part: KeyPart, scaling: float) -> Partial:
    """q [.., kv, G, n, D] over one part's keys, a chunk of them at a time."""
    agree("positions of queries", visible.queries.shape[-1], q.shape[-2])
    agree("positions of keys", len(part.positions), part.keys.shape[-2])
    agree("values of keys", part.values.shape[-2], part.keys.shape[-2])
    if not len(part.positions):  # one key that no query sees
        part = _padded(part, 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = (q.to(dtype) * scaling).flatten(
        -3, -2
    )  # the G heads of a kv head are further queries: no key is repeated
    a_key = max(math.prod(grouped.shape[:-1]), math.prod(part.keys.shape[:-2]) * part.keys.shape[-1])
    size = max(KEY_CHUNK, CHUNK_NUMBERS // max(1, a_key))
    chunks = zip(*(x.split(size, dim=d) for x, d in zip(part, (-2, -2, 0), strict=True)), strict=True)
    return merge_as_they_come(_chunk(grouped, q.shape, visible.of(at), k.to(dtype), v.to(dtype)) for k, v, at in chunks)


def merge(partials: Sequence[Partial]) -> Partial:
    """One result out of several over different keys."""
    lse = torch.stack([p.lse for p in partials])
    most = _finite(lse.amax(0).detach())
    weights = (lse - most).exp()
    total = weights.sum(0)
    out = (weights.unsqueeze(-1) * torch.stack([p.out for p in partials])).sum(0)
    return Partial(out / _positive(total).unsqueeze(-1), _log(total, most))


def merge_as_they_come(partials: Iterable[Partial]) -> Partial:
    """`merge`, without keeping more than two."""
    iterator = iter(partials)
    found = next(iterator, None)
    if found is None:
        raise UsageError("there are no parts to attend to", "give one without keys")
    for further in iterator:
        found = merge([found, further])
    return found


def across_ranks(partial: Partial, communicator: Communicator) -> Partial:
    """One result out of every rank's, for queries that all of them have: each saw its own keys."""
    if communicator.size == 1:
        return partial
    joined = torch.cat([partial.out, partial.lse.unsqueeze(-1)], dim=-1)
    ranks = gather_parts(joined.unsqueeze(0), [1] * communicator.size, communicator)
    return merge([Partial(rank[..., :-1], rank[..., -1]) for rank in ranks])


def with_sinks(partial: Partial, sinks: torch.Tensor) -> torch.Tensor:
    """The result with one more logit a head, `sinks` [kv, G], that takes its share of the softmax and gives nothing."""
    share = torch.sigmoid(partial.lse - sinks.unsqueeze(-1).to(partial.lse.dtype))
    return partial.out * share.unsqueeze(-1)


def _chunk(q: torch.Tensor, shape: torch.Size, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    """Scaled q [.., kv, G*n, D] over keys [.., kv, m, D]; `shape` is q's, [.., kv, G, n, D]."""
    scores = (q @ k.transpose(-1, -2)).view(*shape[:-1], k.shape[-2])
    scores = scores.masked_fill(~visible[..., None, None, :, :], float("-inf"))
    most = _finite(scores.amax(-1).detach())
    weights = (scores - most.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    out = (weights.flatten(-3, -2).to(v.dtype) @ v).view(*shape[:-1], v.shape[-1])
    return Partial(out / _positive(total).unsqueeze(-1), _log(total, most))


def _padded(part: KeyPart, count: int) -> KeyPart:
    """The part with `count` more keys, which no query sees."""
    keys, values = (F.pad(x, (0, 0, 0, count)) for x in part[:2])
    return KeyPart(keys, values, _padded_positions(part.positions, count))


def _padded_positions(positions: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(positions, (0, count), value=NOWHERE)


def _finite(most: torch.Tensor) -> torch.Tensor:
    """What to subtract before exponentials: nothing where everything is -inf."""
    return most.masked_fill(most == float("-inf"), 0.0)


def _positive(total: torch.Tensor) -> torch.Tensor:
    """A divisor: 1 where there is nothing to divide, so that no gradient is NaN."""
    return total.masked_fill(total == 0, 1.0)


def _log(total: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    return (_positive(total).log() + most).masked_fill(total == 0, float("-inf"))
