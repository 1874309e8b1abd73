"""Measuring a running engine from the front: what a client would see, beside what the device could do at best."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from ...shardplan.dtypes import itemsize
from ...shardplan.errors import DeviceError, MgtpError, RankError
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..capacity import CacheDemand
from ..messages import CeilingReport, MeasureCeiling, Request, RequestFailed, Tokens
from ..sampling_params import SamplingParams
from .bench_options import BenchOptions
from .bench_work import metric, prefill_flops, step_bytes
from .collective_share import CollectiveShare, measure_share
from .start import LaunchOptions, StartedGroup

log = logging.getLogger("mgtp.bench")

TIMEOUT_SECONDS = 300.0

FEWEST_STEPS = 8
"""Decode steps that must be timed before something is said to be a part of one."""


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
    flops: float
    floor_seconds: float
    share_of_ceiling: float


class ThroughputFigure(msgspec.Struct):
    """All requests sent at once: seconds until the last token, and output tokens a second.

    The floor: the prompts' arithmetic, then what decode steps of all sequences that run at once must read.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    median_first_token_s: float
    floor_seconds: float
    share_of_ceiling: float


class FirstTokenFigure(PrefillFigure):
    """A PrefillFigure of ranks that were started with another cp size, beside what those ranks' devices can do."""

    cp_size: int


class BenchReport(msgspec.Struct):
    """Everything that was measured; times in seconds unless named otherwise.

    `load_bytes_per_s` is None where nothing is brought over: on the CPU, and with made-up weights.
    """

    device: str
    tp_size: int
    cp_size: int
    dtype: str
    weight_bytes: int
    ready_s: float
    load_s: float
    load_bytes_per_s: float | None
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

    def __init__(self, started: StartedGroup, shard_set: ShardSet, launch: LaunchOptions) -> None:
        self.launch = launch
        self.started, self.model, self.plan = started, shard_set.model, shard_set.plan
        self.loads = shard_set.has_weights and started.ready[0].device != "cpu"
        self.cp_size = len(started.ready) // self.plan.tp_size
        self._random = random.Random(0)
        self._count = 0

    def run(self, options: BenchOptions) -> BenchReport:
        """Measure everything, the limits first."""
        ready = self.started.ready
        self._check_room(options)
        ceiling = self._ceiling()
        if options.batches or options.num_requests:
            # What the first request of all sets up is no one's figure.
            self._send([(options.prompt_tokens, min(8, options.output_tokens))])
        else:
            self._send([(min(tokens for _, tokens in options.prefills), 1)])
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
            load_bytes_per_s=weights / load if self.loads else None,
            ceiling=ceiling,
            decode=decode,
            prefill=prefill,
            throughput=self._throughput(options, ceiling) if options.num_requests else None,
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
        ceiling = Ceiling(min(r.copy_bytes_per_s for r in found), min(r.product_flops for r in found))
        log.info(
            "copy %s, product %s", metric(ceiling.copy_bytes_per_s, "B/s"), metric(ceiling.product_flops, "FLOP/s")
        )
        return ceiling

    def _check_room(self, options: BenchOptions) -> None:
        """Raise DeviceError for a batch whose sequences the cache cannot hold at once: some would wait."""
        launch, plan, tokens = self.launch, self.plan, options.request_tokens
        demand = CacheDemand(launch.max_num_seqs, tokens, launch.max_batch_tokens, launch.block_size, launch.cp_size)
        needs = demand.needs(self.model, plan.shared_axes(), 0, itemsize(plan.dtype))
        if not needs.groups:
            return  # recurrent layers alone
        one = needs.blocks(1, tokens)[0] - 1
        most = self.started.ready[0].kv_cache_tokens // demand.block_span // one
        for batch in options.batches:
            if batch > most:
                raise DeviceError(
                    f"--batches {batch}: the KV cache holds {counted(most, 'sequence')} of {tokens} tokens at once",
                    f"use --batches {most} or less, shorter requests, or more --kv-cache-memory",
                )

    def _decode(self, batch: int, options: BenchOptions, ceiling: Ceiling) -> DecodeFigure:
        """The time between steps in which all of `batch` sequences got a token."""
        arrivals = self._send([(options.prompt_tokens, options.output_tokens)] * batch)
        times = [at for at, count in arrivals.steps if count == batch]
        steps = [b - a for a, b in pairwise(times)]
        # The second half: in the first, prompts may still be under way. A mean, since arrivals can bunch.
        later = steps[len(steps) // 2 :]
        if not later:
            raise MgtpError(
                f"--batches {batch}: of {counted(options.output_tokens, 'output token')} a request, "
                "no step was one of all sequences",
                "ask for more with --output-tokens",
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
        flops = prefill_flops(self.model, self.plan, requests, tokens) / self.cp_size
        floor = flops / ceiling.product_flops
        log.info("prefill, %d x %d: %.4f s, %.0f %% of the ceiling", requests, tokens, seconds, 100 * floor / seconds)
        return PrefillFigure(requests, tokens, seconds, requests * tokens / seconds, flops, floor, floor / seconds)

    def first_tokens(self, prefills: Sequence[tuple[int, int]]) -> list[FirstTokenFigure]:
        """The prefills alone, to compare cp sizes by."""
        ceiling = self._ceiling()
        self._send([(min(tokens for _, tokens in prefills), 1)])
        found = [self._prefill(*shape, ceiling) for shape in prefills]
        return [FirstTokenFigure(**msgspec.structs.asdict(figure), cp_size=self.cp_size) for figure in found]

    def _first_token_seconds(self, requests: int, tokens: int) -> float:
        """Until the last request's first token: the median of three times."""
        return statistics.median(self._send([(tokens, 1)] * requests).seconds for _ in range(3))

    def _throughput(self, options: BenchOptions, ceiling: Ceiling) -> ThroughputFigure:
        shape, count = (options.prompt_tokens, options.output_tokens), options.num_requests
        arrivals = self._send([shape] * count)
        seconds = arrivals.seconds
        rate = count * options.output_tokens / seconds
        floor = self._least_seconds(options, ceiling)
        first = statistics.median(arrivals.first_tokens.values())
        log.info(
            "%s: %.2f s, %.0f output tokens/s, %.0f %% of the ceiling",
            counted(count, "request"), seconds, rate, 100 * floor / seconds,
        )  # fmt: skip
        return ThroughputFigure(count, *shape, seconds, rate, first, floor, floor / seconds)

    def _least_seconds(self, options: BenchOptions, ceiling: Ceiling) -> float:
        """What the offline run takes at best: its prompts at the ceiling, then its steps, of all that may run at once."""
        count, prompt = options.num_requests, options.prompt_tokens
        flops = prefill_flops(self.model, self.plan, count, prompt) / self.cp_size
        at_once = min(count, self.launch.max_num_seqs)
        steps = (options.output_tokens - 1) * count / at_once
        size = step_bytes(self.model, self.plan, at_once, prompt + options.output_tokens // 2, self.cp_size)
        return flops / ceiling.product_flops + steps * size / ceiling.copy_bytes_per_s

    def seconds(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Until the last token of requests of (prompt tokens, output tokens), all sent at once."""
        return self._send(shapes).seconds

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
