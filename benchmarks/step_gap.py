# pyright: basic, reportArgumentType=false, reportOptionalIterable=false
"""How much of the time between decode steps the GPU stands idle, in the engine that serves, by a profiler's trace.

python benchmarks/step_gap.py [CONFIG]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.messages import Request
from mgtp.runtime.options import RankOptions
from mgtp.runtime.place import Place
from mgtp.runtime.rank_worker import RankWorker
from mgtp.runtime.sampling_params import SamplingParams

CONFIG = Path(__file__).with_name("llama_8b.json")
STEPS = 40
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
    {"temperature": 0.6, "top_p": 0.9},
]


class NoLink:
    """Stands for a rank's sockets: there is only one rank, and nobody listens."""

    rank = 0

    def __init__(self, options: RankOptions) -> None:
        self.options = options

    def send_step(self, message: Any) -> None:
        """There are no followers."""


def busy(events: list[tuple[float, float]]) -> float:
    """Microseconds covered by at least one of `events` (begin, end)."""
    total, end = 0.0, 0.0
    for begin, stop in sorted(events):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def measure(worker: RankWorker, batch: int, options: dict[str, Any]) -> str:
    engine = worker.make_engine()
    rng = random.Random(batch)
    for i in range(batch):
        sampling = SamplingParams(**options, max_tokens=3 * STEPS, ignore_eos=True, seed=i)
        engine.add(Request(f"{batch}-{i}", rng.choices(range(1000), k=512), sampling, []))
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = [(e.time_range.start, e.time_range.end) for e in prof.events() if e.device_type.name == "CUDA"]
    span = max(stop for _, stop in events) - min(begin for begin, _ in events)
    while engine.has_work:
        engine.step()
    case = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"batch {batch}, {case}: {span / STEPS:.0f} us a step, idle {1 - busy(events) / span:.2%}"


def main() -> None:
    config = sys.argv[1] if len(sys.argv) > 1 else str(CONFIG)
    options = RankOptions(
        config, 1, "cuda", [0], max_model_len=1024, max_num_seqs=128, max_batch_tokens=8192, dummy_dtype="bfloat16"
    )
    worker = RankWorker(NoLink(options))  # type: ignore[arg-type]
    worker.place = Place(torch.device("cuda", 0), SingleRank())
    worker.load()
    worker.allocate()
    worker.warm_up()
    for batch in (1, 8, 32, 128):
        for case in CASES:
            print(measure(worker, batch, case), flush=True)


if __name__ == "__main__":
    main()
