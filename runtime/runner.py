"""A rank's model and cache, and the one thing done with them: run a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..shardplan.config import ModelConfig
from ..shardplan.plan import ShardPlan
from .batch import ForwardBatch, upload
from .context_batch import context_batch, shared_last
from .kernels import use_kernels
from .kv_cache import KVCache
from .layers.builder import LayerBuilder
from .layers.rotary import RotaryTables
from .messages import SequenceStep, Step
from .models import build_model
from .paged import Stores
from .place import Place
from .sampling import Sampled
from .state_cache import StateCache
from .weights import TORCH_DTYPE, Weights

if TYPE_CHECKING:
    from .paged_steps import PagedSteps


class Runner:
    """Holds the model on one rank; all ranks run the same steps in the same order."""

    def __init__(self, model: ModelConfig, plan: ShardPlan, weights: Weights, place: Place) -> None:
        self.config, self.plan, self.place = model, plan, place
        self.axes = plan.shared_axes()
        self.dtype = TORCH_DTYPE[plan.dtype]
        self.model = build_model(LayerBuilder(model, self.axes, weights, place.communicator))
        self.cache: KVCache | None = None
        self.paged_steps: PagedSteps | None = None
        # The likeliest tokens after the last step, where all ranks have them already: there is no need to settle then.
        self.likeliest: Sampled | None = None

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
            self.paged_steps = PagedSteps(self.model, stores, self.last_ids, max_model_len, self.place)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record decode steps as graphs, where kernels run them and every collective can be recorded."""
        if self.paged_steps is not None and self.place.capturable:
            self.paged_steps.capture()

    def close(self) -> None:
        """Give back what holds on to the communicators, before they are closed."""
        if self.paged_steps is not None:
            self.paged_steps.close()

    @torch.inference_mode()
    def forward(self, step: Step, all_logits: bool = False) -> torch.Tensor:
        """Run a step: the logits [L, V] of the tokens where they are wanted, or of every token."""
        self.states.clear([s.slot for s in step.sequences if s.start == 0])
        for_kernels = self._for_kernels(step)
        if self.paged_steps is not None and len(for_kernels) == len(step.sequences):
            logits = self.paged_steps.forward(step, all_logits)
            self.likeliest = self.paged_steps.likeliest
            return logits
        self.likeliest = None
        if for_kernels:
            return self._in_two(step, for_kernels, all_logits)
        return self.model(self._batch(step, all_logits))

    def _for_kernels(self, step: Step) -> list[SequenceStep]:
        """Where ranks share out the cache, only tokens that all of them compute."""
        if self.paged_steps is None:
            return []
        alone = self.place.context.size == 1
        return [s for s in step.sequences if alone or s.num_tokens == 1]

    def _in_two(self, step: Step, single: list[SequenceStep], all_logits: bool) -> torch.Tensor:
        """`single` by the kernels, then the others: reading the weights twice costs less than decoding without kernels."""
        assert self.paged_steps is not None
        others = [s for s in step.sequences if s.num_tokens > 1]
        first = self.paged_steps.forward(Step(single), all_logits)
        logits = torch.cat([first, self.model(self._batch(Step(others), all_logits))])
        rows, begin = {}, 0
        for s in [*single, *others]:
            count = s.num_tokens if all_logits else len(s.logit_tokens)
            rows[s.slot] = range(begin, begin + count)
            begin += count
        return logits[upload([i for s in step.sequences for i in rows[s.slot]], self.place.device).long()]

    @torch.inference_mode()
    def settle(self, step: Step, sampled: torch.Tensor | None) -> torch.Tensor:
        """Spread the ids [L] that the leader sampled for `step` (None on followers) to every rank; return them."""
        slots = [s.slot for s in step.sequences if s.sample]
        ids = torch.empty(len(slots), dtype=torch.int64, device=self.place.device) if sampled is None else sampled
        ids = self.place.broadcast(ids)
        self.last_ids.index_copy_(0, upload(slots, self.place.device).long(), ids)
        return ids

    def _batch(self, step: Step, all_logits: bool) -> ForwardBatch:
        """The step as tensors; with several ranks on the cp axis, this rank's part of it."""
        assert self.cache is not None
        context = self.place.context
        sequences = step.sequences if context.size == 1 else shared_last(step.sequences, context.size)
        size, span = self.cache.block_size, self.cache.block_size * context.size
        positions, lengths, ends = [], [], {}
        slots: list[list[int]] = [[] for _ in self.cache.groups]
        for s in sequences:
            tokens = range(s.start, s.start + s.num_tokens)
            positions += tokens
            lengths += [max(s.prompt_len, p + 1) for p in tokens]
            ends[s.slot] = len(positions)
            for g, table in enumerate(s.tables):
                slots[g] += [table[p // span] * size + p % size for p in tokens]
        wanted = [
            ends[s.slot] - s.num_tokens + i
            for s in step.sequences
            for i in (range(s.num_tokens) if all_logits else s.logit_tokens)
        ]
        whole = ForwardBatch(
            token_ids=self._token_ids(sequences, ends),
            positions=self._tensor(positions),
            rope_lengths=self._tensor(lengths),
            query_lens=[s.num_tokens for s in sequences],
            kv_lens=[s.start + s.num_tokens for s in sequences],
            slots=[self._tensor(group) for group in slots],
            tables=[self._tables([s.tables[g] for s in sequences]) for g in range(len(self.cache.groups))],
            state_slots=self._tensor([s.slot for s in sequences]),
            logit_rows=self._tensor(wanted),
            cache=self.cache,
            states=self.states,
            rotary=self.rotary,
        )
        return whole if context.size == 1 else context_batch(whole, context)

    def _token_ids(self, sequences: Sequence[SequenceStep], ends: dict[int, int]) -> torch.Tensor:
        """[T]: the given tokens, and for sequences that give none the one their slot sampled last."""
        tokens = self._tensor([token for s in sequences for token in s.token_ids or [0]])
        last = [(ends[s.slot] - 1, s.slot) for s in sequences if not s.token_ids]
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
