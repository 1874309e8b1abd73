"""Runs steps on a GPU: turns a step into device tensors with one small copy, and replays a graph where it can."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from .batch import upload
from .block_tables import BlockTables
from .graphs import DecodeGraphs
from .kernels.argmax import likeliest
from .messages import SequenceStep, Step
from .models import Model
from .paged import PagedBatch, PagedInputs, PrefillInputs, Stores
from .place import Place
from .sampling import Sampled

log = logging.getLogger("mgtp.runtime")


class PagedSteps:
    """Steps of one model over one cache. `last_ids` [R] holds what each slot sampled last.

    `likeliest`: the likeliest token of every sequence of the last step, when that was replayed; every rank and
    `last_ids` have it already.
    """

    def __init__(self, model: Model, stores: Stores, last_ids: torch.Tensor, max_model_len: int, place: Place) -> None:
        self.model, self.stores, self.last_ids, self.place = model, stores, last_ids, place
        self.device = last_ids.device
        cache = stores.cache
        num_slots, span = len(last_ids) - 1, cache.block_size * place.context.size
        self.tables = BlockTables(len(cache.groups), num_slots, -(-max_model_len // span), self.device)
        self.counters = torch.zeros(len(last_ids) * cache.max_heads, dtype=torch.int32, device=self.device)
        self.varying = [rope for rope in stores.rotary.tables if rope.depends_on_length]
        self.graphs: DecodeGraphs | None = None
        self.likeliest: Sampled | None = None

    def capture(self) -> None:
        """Record the decode step for every batch size; afterwards such steps are replayed."""
        if self.graphs is None:
            try:
                self.graphs = DecodeGraphs(self.decode, self.last_ids, self.varying, self.stores.rotary)
            except RuntimeError as error:
                log.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])

    def close(self) -> None:
        """Give the graphs back; steps could go on without."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def forward(self, step: Step, all_logits: bool = False) -> torch.Tensor:
        """The logits [L, V] of the tokens where they are wanted, or of every token. Valid until the next step."""
        self.tables.update(step.sequences)
        if self.graphs is not None and not all_logits and all(s.sample and not s.token_ids for s in step.sequences):
            logits, self.likeliest = self.graphs.replay(step)
            return logits
        self.likeliest = None
        return self.model(self._batch(step, all_logits))

    def decode(self, positions: torch.Tensor, rows: torch.Tensor, angles: dict) -> tuple[torch.Tensor, Sampled]:
        """Logits [S, V] after the token that each row of the tables sampled last, at `positions`, both int32 [S].

        And the likeliest tokens, which become the rows' last ones.
        """
        where = positions, rows, self.tables.groups, self.counters, len(rows)
        paged = PagedInputs(*where, angles=angles, context=self.place.context)
        slots = rows.long()
        ids = self.last_ids[slots]
        logits = self.model(PagedBatch(ids, paged, [1] * len(rows), slice(None), self.stores))
        ids, failed = likeliest(logits, rows, self.last_ids)  # type: ignore[call-arg]
        if self.place.num_ranks > 1:
            ids = self.place.broadcast(ids)
            self.last_ids.index_copy_(0, slots, ids)
        return logits, Sampled(ids, failed)

    def _batch(self, step: Step, all_logits: bool) -> PagedBatch:
        """A step of any kind, its one-token sequences first."""
        ordered = sorted(step.sequences, key=lambda s: s.num_tokens > 1)
        single = [s for s in ordered if s.num_tokens == 1]
        fields = _Fields(ordered)
        ends = dict(zip((s.slot for s in ordered), fields.ends, strict=True))
        wanted = [ends[s.slot] - s.num_tokens + i for s in step.sequences for i in s.logit_tokens]
        if all_logits:
            wanted = [i for s in step.sequences for i in range(ends[s.slot] - s.num_tokens, ends[s.slot])]
        many = ordered[len(single) :]
        starts = [end - len(single) for end in [len(single), *fields.ends[len(single) :]]] if many else []
        columns = [fields.ids, fields.positions, fields.rows, fields.lengths if self.varying else [], wanted]
        columns += [starts, [s.slot for s in many], [s.start + s.num_tokens for s in many]]
        parts = upload([value for column in columns for value in column], self.device)
        ids, positions, rows, lengths, logit_rows, *of_many = parts.split([len(column) for column in columns])
        first_tokens, table_rows, kv_lens = of_many
        longest = max((s.num_tokens for s in many), default=0)
        whole = all(s.start == 0 for s in many)
        angles = {rope: self.stores.rotary.joined_rows(rope, positions, lengths) for rope in self.varying}
        paged = PagedInputs(
            positions, rows, self.tables.groups, self.counters, len(single),
            PrefillInputs(first_tokens, table_rows, kv_lens, longest, whole) if many else None, angles, self.place.context,
        )  # fmt: skip
        token_ids = torch.where(ids < 0, self.last_ids[rows.long()], ids)
        return PagedBatch(token_ids, paged, [s.num_tokens for s in ordered], logit_rows.long(), self.stores)


class _Fields:
    """Per token of `sequences`, one after another: id (-1: what the slot sampled last), position, row, rope length.

    `ends`: where each sequence's tokens end.
    """

    def __init__(self, sequences: Sequence[SequenceStep]) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []
        self.ends: list[int] = []
        for s in sequences:
            self.ids += s.token_ids or [-1]
            self.positions += range(s.start, s.start + s.num_tokens)
            self.rows += [s.slot] * s.num_tokens
            self.ends.append(len(self.ids))
        self._sequences = sequences

    @property
    def lengths(self) -> list[int]:
        """The length that length-dependent frequencies go by: the prompt's, until the sequence is longer."""
        return [max(s.prompt_len, p + 1) for s in self._sequences for p in range(s.start, s.start + s.num_tokens)]
