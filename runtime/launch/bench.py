"""Measuring a running engine from the front: what a client would see, beside what the device could do at best."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from ...shardplan.config import ModelConfig
from ...shardplan.errors import MgtpError, RankError
from ...shardplan.shard_set import ShardSet
from ..cache_layout import cache_groups, kv_shape
from ..messages import CeilingReport, MeasureCeiling, Request, RequestFailed, Tokens
from ..sampling_params import SamplingParams
from .collective_share import CollectiveShare, measure_share
from .start import StartedGroup

log = logging.getLogger("mgtp.bench")

TIMEOUT_SECONDS = 300.0

FEWEST_STEPS = 8
"""Decode steps that must be timed before something is said to be a part of one."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class BenchOptions(msgspec.Struct, frozen=True):
    """What is measured: batch sizes of decode steps, prefills as (requests, tokens of each), and the offline run."""

    batches: list[int]
    prefills: list[tuple[int, int]]
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    collectives: bool = False


class Ceiling(msgspec.Struct):
    """The slowest rank's limits: bytes moved a second by a copy, floating-point operations a second by a product."""

    copy_bytes_per_s: float
    product_flops: float


class DecodeFigure(msgspec.Struct):
    """Steps of `batch` sequences, `timed_steps` of them.

    `share_of_ceiling`: the time that reading weights and cache takes, over `step_ms`.
    """

    batch: int
    context: int
    timed_steps: int
    step_ms: float
    slowest_step_ms: float
    tokens_per_s: float
    bytes_per_step: int
    floor_ms: float
    share_of_ceiling: float


class PrefillFigure(msgspec.Struct):
    """`requests` prompts sent at once: the time until the last one's first token; the floor is their arithmetic."""

    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    floor_seconds: float
    share_of_ceiling: float


class ThroughputFigure(msgspec.Struct):
    """All requests sent at once: seconds until the last token, and output tokens a second."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    median_first_token_s: float


class FirstTokenFigure(msgspec.Struct):
    """The same time as a PrefillFigure's, of ranks that were started with another cp size."""

    cp_size: int
    requests: int
    tokens: int
    seconds: float


class BenchReport(msgspec.Struct):
    """Everything that was measured; times in seconds unless named otherwise."""

    device: str
    tp_size: int
    cp_size: int
    dtype: str
    weight_bytes: int
    ready_s: float
    load_s: float
    load_bytes_per_s: float
    ceiling: Ceiling
    decode: list[DecodeFigure]
    prefill: list[PrefillFigure]
    throughput: ThroughputFigure | None
    collectives: list[CollectiveShare]
    first_token: list[FirstTokenFigure] = []


class Arrivals(msgspec.Struct):
    """When tokens came, in seconds since the requests were sent: of every step its time and how many tokens."""

    steps: list[tuple[float, int]]
    first_tokens: dict[str, float]

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return self.steps[-1][0]


class Bench:
    """Sends requests with random prompts to the ranks and notes when their tokens come."""

    def __init__(self, started: StartedGroup, shard_set: ShardSet) -> None:
        self.started, self.model, self.plan = started, shard_set.model, shard_set.plan
        self.cp_size = len(started.ready) // self.plan.tp_size
        self._random = random.Random(0)
        self._count = 0

    def run(self, options: BenchOptions) -> BenchReport:
        """Measure everything, the limits first."""
        ready = self.started.ready
        ceiling = self._ceiling()
        log.info("copy %.2f TB/s, product %.0f TFLOP/s", ceiling.copy_bytes_per_s / 1e12, ceiling.product_flops / 1e12)
        self._send(
            [(options.prompt_tokens, min(8, options.output_tokens))]
        )  # what the first request of all sets up is no one's figure
        decode = [self._decode(batch, options, ceiling) for batch in options.batches]
        prefill = [self._prefill(*shape, ceiling) for shape in options.prefills]
        load = max(r.load_seconds for r in ready)
        weights = sum(r.weight_bytes for r in ready)
        return BenchReport(
            device=ready[0].device,
            tp_size=self.plan.tp_size,
            cp_size=self.cp_size,
            dtype=self.plan.dtype,
            weight_bytes=weights,
            ready_s=self.started.seconds,
            load_s=load,
            load_bytes_per_s=weights / load,
            ceiling=ceiling,
            decode=decode,
            prefill=prefill,
            throughput=self._throughput(options) if options.num_requests else None,
            collectives=[self._share(figure) for figure in decode] if options.collectives else [],
        )

    def _ceiling(self) -> Ceiling:
        self.started.group.send(MeasureCeiling())
        reports: dict[int, CeilingReport] = {}
        while len(reports) < len(self.started.ready):
            message = self.started.group.receive(TIMEOUT_SECONDS)
            if message is None:
                raise RankError("a rank did not report its device's limits", "run again with --debug")
            if isinstance(message, CeilingReport):
                reports[message.rank] = message
        found = reports.values()
        return Ceiling(min(r.copy_bytes_per_s for r in found), min(r.product_flops for r in found))

    def _decode(self, batch: int, options: BenchOptions, ceiling: Ceiling) -> DecodeFigure:
        """The time between steps in which all of `batch` sequences got a token."""
        arrivals = self._send([(options.prompt_tokens, options.output_tokens)] * batch)
        times = [at for at, count in arrivals.steps if count == batch]
        steps = [b - a for a, b in pairwise(times)]
        # The second half: in the first, prompts may still be under way. A mean, since arrivals can bunch.
        later = steps[len(steps) // 2 :]
        if not later:
            raise MgtpError(
                f"{options.output_tokens} output token(s) of {batch} request(s): no step to time", "ask for more tokens"
            )
        step = sum(later) / len(later)
        context = options.prompt_tokens + options.output_tokens // 2
        size = step_bytes(self.model, self.plan, batch, context, self.cp_size)
        floor = size / ceiling.copy_bytes_per_s
        log.info("decode, batch %d: %.3f ms a step, %.0f %% of the ceiling", batch, step * 1e3, 100 * floor / step)
        return DecodeFigure(
            batch, context, len(later), step * 1e3, max(later) * 1e3, batch / step, size, floor * 1e3, floor / step
        )

    def _share(self, figure: DecodeFigure) -> CollectiveShare:
        """What collectives take of a step; of too few steps the mean says little, arrivals being bunched."""
        step_ms = figure.step_ms if figure.timed_steps >= FEWEST_STEPS else None
        return measure_share(self.started, figure.batch, step_ms)

    def _prefill(self, requests: int, tokens: int, ceiling: Ceiling) -> PrefillFigure:
        seconds = self._first_token_seconds(requests, tokens)
        floor = prefill_flops(self.model, self.plan, requests, tokens) / self.cp_size / ceiling.product_flops
        log.info("prefill, %d x %d: %.4f s, %.0f %% of the ceiling", requests, tokens, seconds, 100 * floor / seconds)
        return PrefillFigure(requests, tokens, seconds, requests * tokens / seconds, floor, floor / seconds)

    def first_tokens(self, prefills: Sequence[tuple[int, int]]) -> list[FirstTokenFigure]:
        """The prefills alone, to compare cp sizes by."""
        self._send([(min(tokens for _, tokens in prefills), 1)])
        return [FirstTokenFigure(self.cp_size, n, t, self._first_token_seconds(n, t)) for n, t in prefills]

    def _first_token_seconds(self, requests: int, tokens: int) -> float:
        """Until the last request's first token: the median of three times."""
        return statistics.median(self._send([(tokens, 1)] * requests).seconds for _ in range(3))

    def _throughput(self, options: BenchOptions) -> ThroughputFigure:
        shape = (options.prompt_tokens, options.output_tokens)
        arrivals = self._send([shape] * options.num_requests)
        rate = options.num_requests * options.output_tokens / arrivals.seconds
        first = statistics.median(arrivals.first_tokens.values())
        log.info("%d requests: %.2f s, %.0f output tokens/s", options.num_requests, arrivals.seconds, rate)
        return ThroughputFigure(options.num_requests, *shape, arrivals.seconds, rate, first)

    def _send(self, shapes: Sequence[tuple[int, int]]) -> Arrivals:
        """Run requests of (prompt tokens, output tokens), all sent at once; no two prompts begin alike."""
        requests = []
        for prompt, output in shapes:
            self._count += 1
            ids = self._random.choices(range(self.model.vocab_size), k=prompt)
            sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            requests.append(Request(str(self._count), ids, sampling, []))
        open_requests = {request.id for request in requests}
        arrivals = Arrivals([], {})
        begin = time.perf_counter()
        for request in requests:
            self.started.group.send(request)
        while open_requests:
            message = self.started.group.receive_step()
            if isinstance(message, RequestFailed):
                raise MgtpError(message.message, "run again with --debug")
            if isinstance(message, Tokens):
                now = time.perf_counter() - begin
                arrivals.steps.append((now, len(message.outputs)))
                for output in message.outputs:
                    arrivals.first_tokens.setdefault(output.id, now)
                    if output.finish_reason is not None:
                        open_requests.discard(output.id)
        return arrivals


def step_bytes(model: ModelConfig, plan, batch: int, context: int, cp_size: int = 1) -> int:
    """Bytes that the rank with the most to do must read in a decode step: its weights once, and all tokens it caches."""
    axes = plan.shared_axes()
    most = 0
    for rank in plan.ranks:
        sizes = {t.name: t.bytes for t in rank.tensors if t.source is not None}
        weights = sum(sizes.values()) - (0 if model.tie_word_embeddings else sizes.get(EMBEDDING, 0))
        item = sizes[EMBEDDING] // max(1, _elements(rank, EMBEDDING))
        cached = 0
        for group in cache_groups(model):
            seen = context if group.window is None else min(context, group.window)
            for layer in group.layers:
                heads, dim = kv_shape(model, axes, rank.rank, layer)
                cached += 2 * heads * dim * seen * item
        most = max(most, weights + batch * cached // cp_size)
    return most


def prefill_flops(model: ModelConfig, plan, requests: int, tokens: int) -> float:
    """Floating-point operations of the slowest rank: two a weight and token (head: once a request), and attention."""
    most = 0.0
    for rank in plan.ranks:
        elements = {t.name: _elements(rank, t.name) for t in rank.tensors if t.source is not None}
        head = elements.pop(HEAD, 0) or elements.get(EMBEDDING, 0)
        elements.pop(EMBEDDING, 0)
        attention = 0.0
        for layer in model.layers:
            if layer.attention is not None:
                a = layer.attention
                seen = tokens if a.window is None else min(tokens, 2 * a.window)
                attention += 2 * tokens * seen * a.num_heads * a.head_dim / plan.tp_size
        most = max(most, requests * (2.0 * sum(elements.values()) * tokens + 2.0 * head + attention))
    return most


def _elements(rank, name: str) -> int:
    """Elements that a rank holds of a tensor."""
    import math

    return next(math.prod(t.shape) for t in rank.tensors if t.name == name)
