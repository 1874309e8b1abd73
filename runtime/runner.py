"""A rank's model and cache, and the one thing done with them: run a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..shardplan.config import ModelConfig
from ..shardplan.plan import ShardPlan
from .batch import ForwardBatch, upload
from .communicator import Communicator
from .kernels import use_kernels
from .kv_cache import KVCache
from .layers.builder import LayerBuilder
from .layers.rotary import RotaryTables
from .messages import Step
from .models import build_model
from .paged import Stores
from .sampling import Sampled
from .state_cache import StateCache
from .weights import TORCH_DTYPE, Weights

if TYPE_CHECKING:
    from .paged_steps import PagedSteps


@dataclass(frozen=True)
class Place:
    """Where a rank computes: its device and its communicator on the tp axis."""

    device: torch.device
    communicator: Communicator


class Runner:
    """Holds the model on one rank; all ranks run the same steps in the same order."""

    def __init__(self, model: ModelConfig, plan: ShardPlan, weights: Weights, place: Place) -> None:
        self.config, self.plan, self.place = model, plan, place
        self.axes = plan.shared_axes()
        self.dtype = TORCH_DTYPE[plan.dtype]
        self.model = build_model(LayerBuilder(model, self.axes, weights, place.communicator))
        self.cache: KVCache | None = None
        self.paged_steps: PagedSteps | None = None

    def allocate(self, num_blocks: list[int], block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        """Make the KV cache, the recurrent states and the tables whose size depends on the context length."""
        rank, device = self.place.communicator.rank, self.place.device
        self.cache = KVCache(self.config, self.axes, rank, num_blocks, block_size, self.dtype, device)
        # One slot more than sequences: what pads a batch has to be somewhere.
        self.states = StateCache(self.config, self.axes, rank, max_num_seqs + 1, self.dtype, device)
        ropes = {layer.attention.rope for layer in self.config.layers if layer.attention is not None}
        self.rotary = RotaryTables(ropes, max_model_len, device)
        self.last_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        if use_kernels(torch.empty(0, dtype=self.dtype, device=device)):
            from .paged_steps import PagedSteps

            stores = Stores(self.cache, self.states, self.rotary)
            self.paged_steps = PagedSteps(self.model, stores, self.last_ids, max_model_len, self.place.communicator)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record decode steps as graphs, where kernels run them and every collective can be recorded."""
        if self.paged_steps is not None and self.place.communicator.capturable:
            self.paged_steps.capture()

    @torch.inference_mode()
    def forward(self, step: Step, all_logits: bool = False) -> torch.Tensor:
        """Run a step: the logits [L, V] of the tokens where they are wanted, or of every token."""
        self.states.clear([s.slot for s in step.sequences if s.start == 0])
        if self.paged_steps is not None:
            return self.paged_steps.forward(step, all_logits)
        return self.model(self._batch(step, all_logits))

    @property
    def likeliest(self) -> Sampled | None:
        """The likeliest tokens after the last step, where all ranks have them already; then there is no need to settle."""
        return None if self.paged_steps is None else self.paged_steps.likeliest

    @torch.inference_mode()
    def settle(self, step: Step, sampled: torch.Tensor | None) -> torch.Tensor:
        """Spread the ids [L] that the leader sampled for `step` (None on followers) to every rank; return them."""
        slots = [s.slot for s in step.sequences if s.sample]
        ids = torch.empty(len(slots), dtype=torch.int64, device=self.place.device) if sampled is None else sampled
        ids = self.place.communicator.broadcast(ids)
        self.last_ids.index_copy_(0, upload(slots, self.place.device).long(), ids)
        return ids

    def _batch(self, step: Step, all_logits: bool) -> ForwardBatch:
        """The step as tensors."""
        assert self.cache is not None
        sequences, size = step.sequences, self.cache.block_size
        positions, lengths, ends = [], [], []
        slots: list[list[int]] = [[] for _ in self.cache.groups]
        for s in sequences:
            span = range(s.start, s.start + s.num_tokens)
            positions += span
            lengths += [max(s.prompt_len, p + 1) for p in span]
            ends.append(len(positions) - 1)
            for g, table in enumerate(s.tables):
                slots[g] += [table[p // size] * size + p % size for p in span]
        firsts = [end + 1 - s.num_tokens for end, s in zip(ends, sequences, strict=True)]
        wanted = [first + i for first, s in zip(firsts, sequences, strict=True) for i in s.logit_tokens]
        rows = list(range(len(positions))) if all_logits else wanted
        return ForwardBatch(
            token_ids=self._token_ids(step, ends),
            positions=self._tensor(positions),
            rope_lengths=self._tensor(lengths),
            query_lens=[s.num_tokens for s in sequences],
            kv_lens=[s.start + s.num_tokens for s in sequences],
            slots=[self._tensor(group) for group in slots],
            tables=[self._tables([s.tables[g] for s in sequences]) for g in range(len(self.cache.groups))],
            state_slots=self._tensor([s.slot for s in sequences]),
            logit_rows=self._tensor(rows),
            cache=self.cache,
            states=self.states,
            rotary=self.rotary,
        )

    def _token_ids(self, step: Step, ends: list[int]) -> torch.Tensor:
        """[T]: the given tokens, and for sequences that give none the one their slot sampled last."""
        ids: list[int] = []
        for s in step.sequences:
            ids += s.token_ids or [0]
        tokens = self._tensor(ids)
        last = [(e, s.slot) for e, s in zip(ends, step.sequences, strict=True) if not s.token_ids]
        if last:
            at, slots = (self._tensor(list(column)) for column in zip(*last, strict=True))
            tokens[at] = self.last_ids[slots]
        return tokens

    def _tables(self, tables: list[list[int]]) -> torch.Tensor:
        """[S, longest], short ones filled up with the scratch block."""
        longest = max(len(table) for table in tables)
        return self._tensor([table + [0] * (longest - len(table)) for table in tables])

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.place.device)
