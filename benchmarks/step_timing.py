# pyright: basic, reportArgumentType=false, reportOptionalIterable=false
"""Times whole decode and prefill steps of the engine's runner on this GPU, with random Llama-3.1-8B weights.

python benchmarks/step_timing.py [--profile] [--tp N]: of one of N ranks, what it computes without its collectives.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from timing import seconds

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.dummy import dummy_shard_set, random_block
from mgtp.runtime.graphs import DecodeGraphs
from mgtp.runtime.messages import SequenceStep, Step
from mgtp.runtime.place import Place
from mgtp.runtime.runner import Runner
from mgtp.runtime.weights import Weights

CONFIG = Path(__file__).with_name("llama_8b.json")
SIZE, CONTEXT = 16, 640


class Alone(SingleRank):
    """The first of `size` ranks whose collectives take no time: the others have what it has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape]"""
        return tensor.expand(self.size, *tensor.shape)


def make_runner(max_num_seqs: int, blocks: int, tp_size: int = 1) -> Runner:
    shard_set = dummy_shard_set(CONFIG, tp_size)
    device = torch.device("cuda", 0)
    rank = shard_set.plan.ranks[0]
    runner = Runner(
        shard_set.model, shard_set.plan, Weights(random_block(rank, device), rank), Place(device, Alone(tp_size))
    )
    runner.allocate([blocks], SIZE, max_num_seqs, 8192 + SIZE)
    runner.last_ids.random_(0, 128000 // tp_size)
    return runner


def decode_step(batch: int, context: int) -> Step:
    """Every sequence has `context` tokens and gets one more."""
    per = -(-(context + 1) // SIZE)
    tables = [[1 + s * per + i for i in range(per)] for s in range(batch)]
    return Step([SequenceStep(s, context, [], context, True, [tables[s]]) for s in range(batch)])


def prefill_step(sequences: int, tokens: int) -> Step:
    per = -(-tokens // SIZE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16000, (sequences, tokens), generator=generator).tolist()
    tables = [[1 + s * per + i for i in range(per)] for s in range(sequences)]
    return Step([SequenceStep(s, 0, ids[s], tokens, True, [tables[s]]) for s in range(sequences)])


def profile(run, label: str) -> None:
    """Where the device's time goes, by kernel."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    kernels = sorted((e for e in prof.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    total: dict[str, list[float]] = defaultdict(list)
    for e in kernels:
        total[e.name[:60]].append(e.time_range.elapsed_us())
    span = kernels[-1].time_range.end - kernels[0].time_range.start
    print(f"{label}: span {span:.0f} us, {len(kernels)} kernels, sum {sum(map(sum, total.values())):.0f} us")
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"  {sum(times):9.1f} us {len(times):5} x {sum(times) / len(times):7.2f}  {name}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    runner = make_runner(128, 128 * 50, options.tp)
    steps = runner.paged_steps
    assert steps is not None
    runner.forward(decode_step(1, CONTEXT))
    DecodeGraphs.__init__.__globals__["bucket_sizes"] = lambda most: [1, 2, 4, 8, 16, 32, 64, 128]
    runner.capture()
    assert steps.graphs is not None, "the decode step could not be captured"
    for batch, context in ((1, CONTEXT), (1, 8192), (2, CONTEXT), (4, CONTEXT), (8, CONTEXT), (16, CONTEXT),
                           (32, CONTEXT), (64, CONTEXT), (128, CONTEXT)):  # fmt: skip
        step = decode_step(batch, context)
        ids = runner.last_ids.clone()
        out = runner.forward(step).clone()
        runner.last_ids.copy_(ids)  # a step leaves the likeliest tokens there
        same = torch.equal(out, steps.graphs.eager(step)[0])
        graph = steps.graphs._graphs[batch][0]
        print(
            f"decode batch {batch} context {context}: {seconds(graph.replay) * 1e3:.3f} ms, replay = eager: {same}",
            flush=True,
        )
    for sequences, tokens in ((1, 512), (16, 512), (1, 8000)):
        step = prefill_step(sequences, tokens)
        print(
            f"prefill {sequences} x {tokens}: {seconds(lambda s=step: runner.forward(s), 3) * 1e3:.1f} ms", flush=True
        )
    if options.profile:
        for batch in (1, 8, 32, 128):
            runner.forward(decode_step(batch, CONTEXT))
            profile(steps.graphs._graphs[batch][0].replay, f"decode batch {batch}")
        for sequences, tokens in ((1, 512), (16, 512), (1, 8000)):
            step = prefill_step(sequences, tokens)
            profile(lambda s=step: runner.forward(s), f"prefill {sequences} x {tokens}")


if __name__ == "__main__":
    main()
