"""What /metrics tells Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..messages import RankMemory, Ready, Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mgtp_requests", "HTTP requests by path and status.", ["path", "status"], registry=registry
        )
        self.finished = Counter(
            "mgtp_sequences_finished", "Sequences by how they ended.", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter("mgtp_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generated_tokens = Counter("mgtp_generated_tokens", "Tokens generated.", registry=registry)
        self.first_token = Histogram(
            "mgtp_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "mgtp_time_between_tokens_seconds",
            "Between two tokens of a sequence.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "mgtp_request_seconds",
            "From a request's arrival to its last token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "mgtp_queue_seconds",
            "How long a sequence waited for its first step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.step_seconds = Histogram(
            "mgtp_step_seconds", "Duration of a step.", buckets=_STEP_SECONDS, registry=registry
        )
        self.sequences = Gauge("mgtp_sequences", "Sequences by state.", ["state"], registry=registry)
        self.blocks = Gauge("mgtp_kv_blocks", "Blocks of the KV cache by state.", ["state"], registry=registry)
        self.scheduled_tokens = Gauge(
            "mgtp_scheduled_prompt_tokens", "Prompt tokens that were scheduled since the start.", registry=registry
        )
        self.cached_tokens = Gauge(
            "mgtp_prefix_cache_hit_tokens", "Of these, those found in the prefix cache.", registry=registry
        )
        self.preemptions = Gauge(
            "mgtp_preemptions", "Sequences that gave their blocks back, since the start.", registry=registry
        )
        self.restarts = Counter(
            "mgtp_restarts", "Times that a model's ranks were started again.", ["model"], registry=registry
        )
        self.rank_weights = Gauge(
            "mgtp_rank_weight_bytes", "Weights a rank holds.", ["rank", "device"], registry=registry
        )
        self.rank_private = Gauge(
            "mgtp_rank_private_bytes", "Host memory of a rank's process.", ["rank", "device"], registry=registry
        )
        self.rank_memory = Gauge(
            "mgtp_rank_device_bytes", "Memory of a rank's device.", ["rank", "device", "kind"], registry=registry
        )
        self.collectives = Gauge(
            "mgtp_collective_backend_info",
            "1 for the backend in use, of every mesh axis.",
            ["axis", "size", "backend"],
            registry=registry,
        )

    def observe_ready(self, ready: Sequence[Ready]) -> None:
        """What ranks said when they were ready."""
        self._devices = {rank.rank: rank.device for rank in ready}
        for rank in ready:
            self._observe_rank(rank)
        for axis in ready[0].axes:
            self.collectives.labels(axis.axis, str(axis.size), axis.backend).set(1)

    def observe_memory(self, memory: RankMemory) -> None:
        """What a rank holds now."""
        self._observe_rank(memory)
        device = self._devices[memory.rank]
        self.rank_private.labels(str(memory.rank), device).set(memory.private_bytes)

    def _observe_rank(self, rank: Ready | RankMemory) -> None:
        labels = (str(rank.rank), self._devices[rank.rank])
        self.rank_weights.labels(*labels).set(rank.weight_bytes)
        self.rank_memory.labels(*labels, "used").set(rank.device_used_bytes)
        self.rank_memory.labels(*labels, "total").set(rank.device_total_bytes)

    def observe_stats(self, stats: Stats) -> None:
        """The leader's report."""
        self.sequences.labels("running").set(stats.running)
        self.sequences.labels("waiting").set(stats.waiting)
        self.blocks.labels("used").set(stats.used_blocks)
        self.blocks.labels("free").set(stats.total_blocks - stats.used_blocks)
        self.scheduled_tokens.set(stats.prompt_tokens)
        self.cached_tokens.set(stats.cached_tokens)
        self.preemptions.set(stats.preemptions)
        for seconds in stats.queue_seconds:
            self.queue_seconds.observe(seconds)
        for seconds in stats.step_seconds:
            self.step_seconds.observe(seconds)

    def page(self) -> bytes:
        """The page in Prometheus' text form."""
        return generate_latest(self.registry)
