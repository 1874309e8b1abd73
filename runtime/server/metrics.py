"""What /metrics tells Prometheus: HTTP requests of the server, and for every model what its ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..messages import RankMemory, Ready, Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)

_COUNTERS = {
    "sequences_finished": ("Sequences by how they ended.", ["reason"]),
    "prompt_tokens": ("Tokens of prompts.", []),
    "generated_tokens": ("Tokens generated.", []),
    "restarts": ("Times that the ranks were started again after a failure.", []),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "time_between_tokens_seconds": ("Between two tokens of a sequence.", _STEP_SECONDS),
    "request_seconds": ("From a request's arrival to its last token.", _SECONDS),
    "queue_seconds": ("How long a sequence waited for its first step.", _SECONDS),
    "step_seconds": ("Duration of a step.", _STEP_SECONDS),
}
_GAUGES = {
    "sequences": ("Sequences by state.", ["state"]),
    "kv_blocks": ("Blocks of the KV cache by state.", ["state"]),
    "scheduled_prompt_tokens": ("Prompt tokens that were scheduled since the ranks' start.", []),
    "prefix_cache_hit_tokens": ("Of these, those found in the prefix cache.", []),
    "preemptions": ("Sequences that gave their blocks back, since the ranks' start.", []),
    "rank_weight_bytes": ("Weights a rank holds.", ["rank", "device"]),
    "rank_private_bytes": ("Host memory of a rank's process.", ["rank", "device"]),
    "rank_device_bytes": ("Memory of a rank's device.", ["rank", "device", "kind"]),
    "collective_backend_info": ("1 for the backend in use, of every mesh axis.", ["axis", "size", "backend"]),
}


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mgtp_requests", "HTTP requests by path and status.", ["path", "status"], registry=registry
        )
        self.counters = {
            name: Counter(f"mgtp_{name}", text, ["model", *labels], registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(f"mgtp_{name}", text, ["model"], buckets=buckets, registry=registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.gauges = {
            name: Gauge(f"mgtp_{name}", text, ["model", *labels], registry=registry)
            for name, (text, labels) in _GAUGES.items()
        }

    def page(self) -> bytes:
        """The page in Prometheus' text form."""
        return generate_latest(self.registry)


class ModelMetrics:
    """One model's part of the metrics. Counters of a name go on when another model takes it over."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._set_gauges: set[tuple[str, tuple[str, ...]]] = set()
        self._devices: dict[int, str] = {}
        self.prompt_tokens = metrics.counters["prompt_tokens"].labels(model)
        self.generated_tokens = metrics.counters["generated_tokens"].labels(model)
        self.restarts = metrics.counters["restarts"].labels(model)
        self.first_token = metrics.histograms["time_to_first_token_seconds"].labels(model)
        self.between_tokens = metrics.histograms["time_between_tokens_seconds"].labels(model)
        self.request_seconds = metrics.histograms["request_seconds"].labels(model)
        self.queue_seconds = metrics.histograms["queue_seconds"].labels(model)
        self.step_seconds = metrics.histograms["step_seconds"].labels(model)

    def note_finished(self, reason: str) -> None:
        """A sequence has ended."""
        self._metrics.counters["sequences_finished"].labels(self._model, reason).inc()

    def _set(self, name: str, value: float, *labels: Any) -> None:
        key = (self._model, *map(str, labels))
        self._set_gauges.add((name, key))
        self._metrics.gauges[name].labels(*key).set(value)

    def observe_ready(self, ready: Sequence[Ready]) -> None:
        """What ranks said when they were ready."""
        self._devices = {rank.rank: rank.device for rank in ready}
        for rank in ready:
            self._observe_rank(rank)
        for axis in ready[0].axes:
            self._set("collective_backend_info", 1, axis.axis, axis.size, axis.backend)

    def observe_memory(self, memory: RankMemory) -> None:
        """What a rank holds now; nothing before `observe_ready` has shown it."""
        if memory.rank in self._devices:
            self._observe_rank(memory)
            self._set("rank_private_bytes", memory.private_bytes, memory.rank, self._devices[memory.rank])

    def _observe_rank(self, rank: Ready | RankMemory) -> None:
        labels = (rank.rank, self._devices[rank.rank])
        self._set("rank_weight_bytes", rank.weight_bytes, *labels)
        self._set("rank_device_bytes", rank.device_used_bytes, *labels, "used")
        self._set("rank_device_bytes", rank.device_total_bytes, *labels, "total")

    def observe_stats(self, stats: Stats) -> None:
        """The leader's report."""
        self._set("sequences", stats.running, "running")
        self._set("sequences", stats.waiting, "waiting")
        self._set("kv_blocks", stats.used_blocks, "used")
        self._set("kv_blocks", stats.total_blocks - stats.used_blocks, "free")
        self._set("scheduled_prompt_tokens", stats.prompt_tokens)
        self._set("prefix_cache_hit_tokens", stats.cached_tokens)
        self._set("preemptions", stats.preemptions)
        for seconds in stats.queue_seconds:
            self.queue_seconds.observe(seconds)
        for seconds in stats.step_seconds:
            self.step_seconds.observe(seconds)

    def forget_ranks(self) -> None:
        """The ranks are gone, and with them what gauges said of them."""
        for name, labels in self._set_gauges:
            self._metrics.gauges[name].remove(*labels)
        self._set_gauges.clear()
        self._devices.clear()
