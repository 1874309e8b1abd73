# pyright: basic, reportArgumentType=false, reportOptionalIterable=false
"""Where the time of an offline run goes: every step's tokens, device and host time, and kernels of a few of them.

python benchmarks/throughput_steps.py [REQUESTS] [MAX_NUM_SEQS] [MAX_BATCH_TOKENS] [profile]

One rank, Llama-3.1-8B shapes, prompts of 512 tokens, 128 more generated. The run is made twice: the first compiles what
the warm-up has not.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import defaultdict
from itertools import pairwise

import torch
from step_gap import CONFIG, NoLink, busy

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.engine import Engine
from mgtp.runtime.landing import Landing
from mgtp.runtime.messages import Request
from mgtp.runtime.options import RankOptions
from mgtp.runtime.place import Place
from mgtp.runtime.rank_worker import RankWorker
from mgtp.runtime.sampling_params import SamplingParams

waited = [0.0]


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    requests, seqs, tokens = (numbers + [512, 512, 8192][len(numbers) :])[:3]
    options = RankOptions(
        str(CONFIG),
        1,
        "cuda",
        [0],
        max_model_len=1024,
        max_num_seqs=seqs,
        max_batch_tokens=tokens,
        dummy_dtype="bfloat16",
    )
    worker = RankWorker(NoLink(options))  # type: ignore[arg-type]
    worker.place = Place(torch.device("cuda", 0), SingleRank())
    worker.load()
    worker.allocate()
    begin = time.perf_counter()
    worker.warm_up()
    print(f"warm-up {time.perf_counter() - begin:.2f} s")
    note_waits()
    gc.collect()
    gc.freeze()  # as a rank does
    for turn in range(2):
        report(run(worker.make_engine(), requests, turn), f"run {turn}")
    if "profile" in sys.argv:
        profile_steps(worker.make_engine(), requests)


def note_waits() -> None:
    """Count the time that the host spends waiting for tokens."""
    get = Landing.get

    def timed(self: Landing) -> list[torch.Tensor]:
        begin = time.perf_counter()
        found = get(self)
        waited[0] += time.perf_counter() - begin
        return found

    Landing.get = timed  # type: ignore[method-assign]


def add_requests(engine: Engine, requests: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        engine.add(Request(f"{seed}-{i}", rng.choices(range(100000), k=512), sampling, []))


def run(engine: Engine, requests: int, seed: int) -> list[tuple[int, int, float, float]]:
    """Per step: prompt tokens, decoding sequences, seconds on the device until the next one, host seconds at work."""
    add_requests(engine, requests, seed)
    steps, events = [], []
    original = engine.send_step

    def note(step) -> None:
        single = sum(s.num_tokens == 1 for s in step.sequences)
        steps.append((sum(s.num_tokens for s in step.sequences) - single, single))
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        original(step)

    engine.send_step = note
    hosts = []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while engine.has_work:
        before, waited[0] = time.perf_counter(), 0.0
        engine.step()
        hosts.append(time.perf_counter() - before - waited[0])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    print(f"{requests} requests: {seconds:.3f} s, {requests * 128 / seconds:.0f} tokens/s, {len(steps)} steps")
    times = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return [(*step, device, host) for step, device, host in zip(steps, times, hosts, strict=False)]


def report(steps: list[tuple[int, int, float, float]], label: str) -> None:
    kinds: dict[tuple[str, int], list[tuple[int, int, float, float]]] = defaultdict(list)
    for step in steps:
        kinds["prompts" if step[0] else "decode", (step[1] + 63) // 64 * 64].append(step)
    for (kind, most), found in sorted(kinds.items()):
        n = len(found)
        tokens, device, host = (sum(step[i] for step in found) / n for i in (0, 2, 3))
        worst = max(step[2] for step in found)
        print(
            f"  {label} {kind}, up to {most} decoding: {n} steps, {tokens:.0f} prompt tokens, device {device * 1e3:.2f} ms "
            f"(worst {worst * 1e3:.1f}), host {host * 1e3:.2f} ms",
            flush=True,
        )


def profile_steps(engine: Engine, requests: int) -> None:
    """Kernels of four steps while prompts are under way, and of four after."""
    add_requests(engine, requests, 9)
    for skip, label in ((16, "with prompts"), (40, "decode only")):
        for _ in range(skip):
            engine.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(4):
                engine.step()
            torch.cuda.synchronize()
        events = [e for e in prof.events() if e.device_type.name == "CUDA"]
        spans = [(e.time_range.start, e.time_range.end) for e in events]
        span = max(b for _, b in spans) - min(a for a, _ in spans)
        total: dict[str, list[float]] = defaultdict(list)
        for e in events:
            total[e.name[:70]].append(e.time_range.elapsed_us())
        print(f"{label}: {span / 4000:.2f} ms a step, idle {1 - busy(spans) / span:.2%}")
        for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:22]:
            print(f"  {sum(times) / 4:9.1f} us a step {len(times) / 4:6.1f} x {sum(times) / len(times):8.2f}  {name}")


if __name__ == "__main__":
    main()
