"""Which tokens of which requests each step computes: continuous batching, chunked prefill, prefix caching. No torch."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from .blocks import BlockPool, chain_hash
from .messages import Request, SequenceStep

TOKEN_TO_COME = -1
"""Stands in a sequence's output for a token that the device has sampled, or will, and nobody has read."""


SCORED_TOKENS = 256
"""Most tokens of a step whose logits are all wanted: those of a whole prompt would take gigabytes."""


@dataclass(eq=False)
class Sequence:
    """A request on its way. Tokens [0, num_computed) are in the cache."""

    request: Request
    num_groups: int
    slot: int = -1
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    is_sampled: bool = False  # the last token is known to the ranks: it was sampled from this slot's last step
    digests: list[bytes] = field(default_factory=list)  # names of the full blocks so far
    arrived: float = field(default_factory=time.monotonic)
    was_admitted: bool = False  # before, if it was preempted
    num_cached: int = 0  # prompt tokens that were found in the cache when it was admitted

    is_full: bool = False  # no token can follow the last one, which is yet to be read
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.num_groups)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of its prompt's tokens are wanted, and not there yet."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is yet to be read."""
        return bool(self.output_ids) and self.output_ids[-1] == TOKEN_TO_COME

    def expect_token(self) -> int:
        """Make room in the output for a token that is being sampled; returns its place there."""
        self.output_ids.append(TOKEN_TO_COME)
        return len(self.output_ids) - 1

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        prompt = self.request.prompt_ids
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return (prompt[start:stop] + self.output_ids)[: stop - start]


@dataclass(frozen=True)
class Scheduled:
    """One sequence's part of a step, and the sequence it belongs to."""

    sequence: Sequence
    step: SequenceStep


@dataclass
class _Budget:
    """Tokens that a step may still compute, and of how many of them all logits may be wanted."""

    tokens: int
    scored: int = SCORED_TOKENS

    def allows(self, sequence: Sequence) -> int:
        """How many of a sequence's due tokens fit."""
        limit = min(self.tokens, self.scored) if sequence.scores_prompt else self.tokens
        return min(sequence.num_tokens - sequence.num_computed, limit)

    def spend(self, sequence: Sequence, count: int) -> None:
        """Take `count` tokens of a sequence."""
        self.tokens -= count
        self.scored -= count if sequence.scores_prompt else 0


class Scheduler:
    """First come, first served. Running sequences go first, then waiting ones as long as slots, blocks and tokens last.

    When blocks run out, the youngest running sequence gives its blocks back and is computed again later.
    """

    def __init__(
        self, pools: list[BlockPool], max_num_seqs: int, max_batch_tokens: int, *, prefix_caching: bool = False
    ) -> None:
        self.pools, self.max_batch_tokens = pools, max_batch_tokens
        self.prefix_caching = prefix_caching and bool(pools)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._computed: list[tuple[Sequence, int, int]] = []  # what the last step wrote, not yet findable
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of all sequences admitted so far
        self.num_cached_tokens = 0  # of these, found in the cache
        self.queue_seconds: list[float] = []  # how long the sequences admitted since the last report had waited

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(Sequence(request, len(self.pools)))

    def clear_cache(self) -> None:
        """Make nothing findable that has been computed so far; sequences keep the blocks that they hold."""
        self._computed.clear()
        for pool in self.pools:
            pool.forget_all()

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; unknown ids are ignored."""
        self._publish()
        for sequence in [s for s in (*self.running, *self.waiting) if s.request.id == request_id]:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it may have been preempted while its last token was on its way."""
        self._publish()
        sequence.is_finished = True
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step's work. Empty only when there is none."""
        self._publish()
        self._drop_unseen()
        budget, scheduled = _Budget(self.max_batch_tokens), []
        for sequence in list(self.running):
            if sequence.slot < 0 or sequence.is_full:
                continue  # preempted by an older one in this very loop, or about to end
            count = budget.allows(sequence)
            if count > 0 and self._make_room(sequence, sequence.num_computed + count):
                scheduled.append(self._take(sequence, count))
                budget.spend(sequence, count)
        while self.waiting and self._free_slots and budget.tokens > 0:
            sequence = self.waiting[0]
            if sequence.awaits_token:
                break  # preempted: all of its tokens are needed to compute it again
            self._find_prefix(sequence)
            count = budget.allows(sequence)
            if count == 0 or not self._fits(sequence, sequence.num_computed + count):
                self._let_go(sequence)
                break
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            if not sequence.was_admitted:
                self.queue_seconds.append(time.monotonic() - sequence.arrived)
                sequence.was_admitted = True
            self.num_prompt_tokens += sequence.num_tokens
            self.num_cached_tokens += sequence.num_computed
            scheduled.append(self._take(sequence, count))
            budget.spend(sequence, count)
        return scheduled

    def _find_prefix(self, sequence: Sequence) -> None:
        """Give `sequence` the longest beginning that is in the cache; its last token is always computed."""
        if not self.prefix_caching or sequence.scores_prompt:
            return
        size = self.pools[0].block_size
        self._name_blocks(sequence, sequence.num_tokens)
        for count in range((sequence.num_tokens - 1) // size, 0, -1):
            if all(pool.usable_prefix(sequence.digests, count) for pool in self.pools):
                for pool, table in zip(self.pools, sequence.tables, strict=True):
                    pool.adopt(table, sequence.digests, count)
                sequence.num_computed = sequence.num_cached = count * size
                return

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Work out the names of the full blocks among the first `num_tokens` tokens."""
        size = self.pools[0].block_size
        for i in range(len(sequence.digests), num_tokens // size):
            parent = sequence.digests[-1] if sequence.digests else b""
            sequence.digests.append(chain_hash(parent, sequence.token_ids(i * size, (i + 1) * size)))

    def _publish(self) -> None:
        """Make the blocks that the last step filled up findable: only a later step may read what it has written."""
        for sequence, start, stop in self._computed:
            self._name_blocks(sequence, stop)
            size = self.pools[0].block_size
            for i in range(start // size, stop // size):
                for pool, table in zip(self.pools, sequence.tables, strict=True):
                    pool.name(table[i], sequence.digests[i])
        self._computed.clear()

    def _drop_unseen(self) -> None:
        """Let go of what has left windows, before it is asked what fits: else a sequence could be in its own way."""
        for sequence in self.running:
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.drop_unseen(table, sequence.num_computed)

    def _take(self, sequence: Sequence, count: int) -> Scheduled:
        """Give `sequence` blocks for `count` more tokens and describe the step."""
        start, stop = sequence.num_computed, sequence.num_computed + count
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.extend(table, stop)
        sequence.num_computed = stop
        if self.prefix_caching:
            self._computed.append((sequence, start, stop))
        is_last = stop == sequence.num_tokens
        ids = [] if sequence.is_sampled else sequence.token_ids(start, stop)
        sequence.is_sampled = is_last
        tables = [list(table) for table in sequence.tables]
        prompt_len = len(sequence.request.prompt_ids)
        score = sequence.scores_prompt and start < prompt_len - 1
        step = SequenceStep(sequence.slot, start, ids, prompt_len, is_last, tables, score)
        return Scheduled(sequence, step)

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        return all(p.missing(t, num_tokens) <= p.num_free for p, t in zip(self.pools, sequence.tables, strict=True))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt younger sequences, then the sequence itself, until its blocks fit; false when it had to go."""
        while not self._fits(sequence, num_tokens):
            victim = self.running[-1]
            self.running.remove(victim)
            self._release(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        """Take slot and blocks back; the sequence would have to be computed again."""
        self._let_go(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _let_go(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table)
        sequence.num_computed, sequence.is_sampled = 0, False
