"""Choosing the next token of every sequence of a batch at once, on the device that holds the logits.

Shapes: S sequences of the batch, R of them drawn by chance, V vocabulary (padding included), K candidates, k reported.

A draw depends on its own logits, options, seed and position alone: neither on the rest of the batch nor on what was
drawn before, so a preempted request comes back to the same tokens. The random number picks a token by inverse CDF in
the order of token ids. Sorted by probability instead, two nearly equal tokens that rounding swaps (another tensor
parallel size is enough) would exchange large stretches of the unit interval.

On a GPU a few kernels do what is written here (kernels/draw.py, kernels/edges.py): the same numbers, with the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import use_kernels
from .penalties import Adjustment, TokenHistory, columns, record, to_device
from .philox import uniform
from .sampling_params import SamplingParams

MAX_ELEMENTS = 1 << 23
"""Logits that torch's operations draw from at once; at most some 60 bytes of working memory each."""

_AHEAD = 16  # steps
_MAX_CANDIDATES = 1024  # up to here selecting the largest logits is cheaper than sorting all
_LIKELIEST = 1 << 40  # the weight of the likeliest token; a vocabulary of 2**22 could not overflow an int64
_BLOCK = 256  # near the square root of a vocabulary, and a divisor of most
_MIN_TEMPERATURE = 1e-30  # far below what tells any two logits apart, and a float32


class Sampled(NamedTuple):
    """The choice for every sequence."""

    ids: Tensor
    """int64 [S], always below V"""
    failed: Tensor
    """bool [S]: no choice was possible, the logits hold a NaN or +inf, or nothing but -inf; the id means nothing"""


class Sampler:
    """Chooses tokens; remembers nothing but the options of the last batch, which seldom change from step to step."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int] | Tensor,
        history: Sequence[TokenHistory | None] | None = None,
    ) -> Sampled:
        """One token for every row of `logits` [S, V] (any float dtype, left as they are); does not wait for the device.

        `positions`: the index that the chosen token will have in its sequence, the prompt's first token being 0. As a
        tensor on the device they leave the host nothing to do, so that the call can be part of a CUDA graph.
        `history`: needed for the rows whose `params.needs_history`.
        """
        batch = self._options(params, logits)
        ids, failed = _likeliest(logits)
        if batch.adjust is not None:
            logits = batch.adjust(logits, history)
            ids = _likeliest(logits).ids
        if batch.draws is not None:
            ids = batch.draws.draw(logits, torch.as_tensor(positions, dtype=torch.int64), ids)
        return Sampled(ids, failed)

    def _options(self, params: Sequence[SamplingParams], logits: Tensor) -> _Batch:
        """The options as tensors, those of the last step where they are the same."""
        batch = self._batch
        if (
            batch is None
            or len(batch.params) != len(params)
            or not all(map(_is, batch.params, params))
            or (batch.vocab_size, batch.device) != (logits.shape[-1], logits.device)
        ):
            batch = self._batch = _Batch.of(params, logits.shape[-1], logits.device)
        return batch


def warm_up(logits: Tensor) -> None:
    """Draw from `logits` [1, V] in every way, so that no request waits for kernels to be compiled."""
    history = [TokenHistory([], [], logits.shape[-1], logits.device)]
    for penalty in (0.0, 1.0):
        for top_p in (1.0, 0.5):
            params = SamplingParams(seed=0, presence_penalty=penalty, top_p=top_p)
            record(history, Sampler().sample(logits, [params], [0], history).ids)


def top_logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under raw `logits` [S, V]: of `ids` [S], and of the k likeliest, with their ids.

    Returns (chosen float32 [S], values float32 [S, k], ids int64 [S, k]), likeliest first; k is cut to V.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, ids[:, None]) - total
    values, top_ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return chosen[:, 0], values - total, top_ids


def _likeliest(logits: Tensor) -> Sampled:
    """The first of the largest of every row."""
    if use_kernels(logits):
        from .kernels.argmax import likeliest as launch  # triton is there on a GPU alone

        return Sampled(*launch(logits))
    highest, ids = logits.max(dim=-1)
    return Sampled(ids, (highest - highest) != 0)  # not finite, in two operations


@dataclass(frozen=True)
class _Batch:
    """What a list of options comes to on the device, for as long as the batch consists of the same requests."""

    params: tuple[SamplingParams, ...]
    vocab_size: int
    device: torch.device
    adjust: Adjustment | None
    draws: _Draws | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> _Batch:
        adjusts = any(each.needs_history or each.logit_bias for each in params)
        return cls(
            params=tuple(params),
            vocab_size=vocab_size,
            device=device,
            adjust=Adjustment(params, vocab_size, device) if adjusts else None,
            draws=None if all(each.greedy for each in params) else _Draws(params, vocab_size, device),
        )


class _Draws:
    """Temperature, filters and the draw, for the R rows that are not greedy."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        rows = [row for row, each in enumerate(params) if not each.greedy]
        drawn = [params[row] for row in rows]
        self._all = len(rows) == len(params)
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._index = to_device(self._rows, device)
        self._host_seeds = torch.tensor([_signed_seed(each) for each in drawn], dtype=torch.int64)
        self._seeds = to_device(self._host_seeds, device)
        self._first = torch.full((len(rows),), -_AHEAD)  # the positions that self._ahead begins with: none as yet
        self._ahead = self._seeds
        column = columns(drawn, device)
        self._temperature = column(lambda each: max(each.temperature, _MIN_TEMPERATURE), torch.float32)
        self._min_weight = column(lambda each: math.ceil(each.min_p * _LIKELIEST), torch.int64)
        self._has_min = any(each.min_p for each in drawn)
        self._top_k = column(lambda each: each.num_kept(vocab_size), torch.int64)
        self._top_p = column(lambda each: each.top_p, torch.float64)
        self._filters = column(lambda each: each.top_k > 0 or each.top_p < 1, torch.bool)
        self._num_candidates = max(
            each.num_kept(vocab_size) if each.top_k > 0 or each.top_p < 1 else 0 for each in drawn
        )

    def draw(self, logits: Tensor, positions: Tensor, greedy_ids: Tensor) -> Tensor:
        """The ids [S]: `greedy_ids`, which may be written to, and drawn ones in the rows left to chance."""
        if positions.device.type == "cpu":
            randoms = self._randoms_ahead(positions[self._rows])
        else:
            randoms = uniform(self._seeds, positions if self._all else positions[self._index])
        if use_kernels(logits):
            self._launch(logits, greedy_ids, randoms)
            return greedy_ids
        logits = logits if self._all else logits[self._index]
        step = max(1, MAX_ELEMENTS // logits.shape[-1])
        blocks = [slice(start, start + step) for start in range(0, len(logits), step)]
        ids = torch.cat([pick(self._weights(logits[rows], rows), randoms[rows]) for rows in blocks])
        return ids if self._all else greedy_ids.index_copy(0, self._index, ids)

    def _launch(self, logits: Tensor, ids: Tensor, randoms: Tensor) -> None:
        """The same by a few kernels, in place."""
        from .kernels.draw import draw
        from .kernels.edges import find_edges

        edges = None
        if self._num_candidates:
            edges = find_edges(logits, ids, self._index, self._temperature, self._top_k, self._top_p)
        draw(logits, ids, self._index, randoms, self._temperature, self._min_weight, edges)

    def _randoms_ahead(self, positions: Tensor) -> Tensor:
        """`uniform` [R] for positions on the host, made there, for some steps at once.

        That saves the launches of many tiny kernels. As a rule every position goes up by one from step to step.
        """
        ahead = positions - self._first
        step = int(ahead[0])
        if not 0 <= step < _AHEAD or not bool((ahead == step).all()):
            steps = torch.arange(_AHEAD)[:, None]
            randoms = uniform(self._host_seeds.repeat(_AHEAD), (positions + steps).flatten()).view(_AHEAD, -1)
            # Every step's numbers begin at a multiple of 16 bytes: a kernel is compiled for whether they do.
            padded = torch.nn.functional.pad(randoms, (0, len(positions) % 2))
            self._first, self._ahead = positions, to_device(padded, self._seeds.device)
            step = 0
        return self._ahead[step, : len(positions)]

    def _weights(self, logits: Tensor, rows: slice) -> Tensor:
        """int64 [R, V]: the probabilities as `weigh` writes them, 0 for the tokens that are filtered out."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = (logits - logits.amax(dim=-1, keepdim=True)).float() / self._temperature[rows]
        weights = weigh(scaled)
        if self._num_candidates:
            keep = likeliest(scaled, self._top_k[rows], self._top_p[rows], self._num_candidates)
            weights = weights * (keep | ~self._filters[rows])
        if self._has_min:
            weights = weights * (weights >= self._min_weight[rows])
        return weights


def weigh(scaled: Tensor) -> Tensor:
    """int64: exp of logits less the largest, in units of 2**-40 of the likeliest token.

    Sums of whole numbers are exact, so that they are the same on every device, in every batch and in any order. What
    is rounded down to nothing adds up to less than one part in a million.
    """
    return (scaled.exp() * _LIKELIEST).to(torch.int64)


def likeliest(scaled: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """bool [R, V]: the tokens that top-k, then top-p keep, at least one; of equal ones those with lower ids.

    `scaled` float [R, V]: logits less the largest, at their temperature. `top_k` int64 [R, 1] and `top_p` float64
    [R, 1], on the probabilities that top-k leaves. `num_candidates`: the most tokens that any row can keep.
    """
    if num_candidates <= min(_MAX_CANDIDATES, scaled.shape[-1]):
        ordered = scaled.topk(num_candidates, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    places = torch.arange(scaled.shape[-1], device=scaled.device)
    weights = weigh(ordered) * (places[: ordered.shape[-1]] < top_k)
    totals = weights.sum(dim=-1, keepdim=True)
    enough = torch.minimum((top_p * totals).ceil().to(torch.int64), totals)
    num_kept = 1 + first_beyond(weights, enough - 1)
    # Values, not positions, say which tokens these are: sorting puts equal ones in no particular order.
    lowest = ordered.gather(-1, num_kept - 1)
    equal = scaled == lowest
    num_equal = num_kept - (ordered > lowest).sum(dim=-1, keepdim=True)
    return (scaled > lowest) | (equal & (places <= first_beyond(equal, num_equal - 1)))


def pick(weights: Tensor, randoms: Tensor) -> Tensor:
    """The ids int64 [R] that `randoms` [R] in [0, 1) pick from `weights` int64 [R, V], in the order of token ids."""
    totals = weights.sum(dim=-1)
    targets = torch.minimum((randoms * totals).to(torch.int64), totals - 1)
    return first_beyond(weights, targets[:, None])[:, 0]


def first_beyond(weights: Tensor, targets: Tensor) -> Tensor:
    """int64 [R, 1]: where the running sum of `weights` [R, N], whole numbers, first exceeds `targets` int64 [R, 1].

    A target lies from 0 to the sum of all less 1, so there always is such a place, and it has a weight. Blocks are
    summed up first, then one of them is searched: a running sum over all N is many times slower on a GPU.
    """
    if padding := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    block, before = _first_beyond(blocks.sum(dim=-1), targets)
    inside = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0]
    return block * _BLOCK + _first_beyond(inside.to(torch.int64), targets - before)[0]


def _first_beyond(weights: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(place, sum before it), both int64 [R, 1], for weights int64 [R, N]."""
    sums = weights.cumsum(dim=-1)
    place = (sums > targets).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return place, (sums - weights).gather(-1, place)


def _is(one: object, other: object) -> bool:
    return one is other


def _signed_seed(params: SamplingParams) -> int:
    """The seed's 64 bits as an int64."""
    if params.seed is None:
        raise ValueError("a request that is drawn by chance needs a seed: use SamplingParams.with_seed")
    seed = params.seed & ((1 << 64) - 1)
    return seed - (1 << 64) if seed >> 63 else seed
