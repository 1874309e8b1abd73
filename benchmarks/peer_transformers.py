"""Decoding speed on the CPU against transformers' generate, in one process, turn and turn about.

    python benchmarks/peer_transformers.py .models/SmolLM2-135M-Instruct.Q4_1.gguf [--new-tokens 64] [--rounds 3]

Prints one JSON line last: per batch size, tokens per second of both (median over rounds) and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

PROMPT_LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        worker, model = load_ours(arguments.gguf, Path(folder)), load_theirs(Path(folder) / "set")
        results = [compare(worker, model, batch, arguments) for batch in arguments.batches]
    print(json.dumps({"cores": torch.get_num_threads(), "machine": platform.processor(), "results": results}))


def compare(worker: Any, model: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both at one batch size; checks that they give the same tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40000, (batch, PROMPT_LENGTH), generator=generator)
    ours: list[list[int]] = []
    theirs: list[list[int]] = []
    times: dict[str, list[float]] = {"mgtp": [], "transformers": []}
    for _ in range(arguments.rounds):
        begin = time.perf_counter()
        ours = run_ours(worker, prompts.tolist(), arguments.new_tokens)
        middle = time.perf_counter()
        theirs = run_theirs(model, prompts, arguments.new_tokens)
        times["mgtp"].append(middle - begin)
        times["transformers"].append(time.perf_counter() - middle)
    rate = {name: batch * arguments.new_tokens / statistics.median(seconds) for name, seconds in times.items()}
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    result = {"batch": batch, **{n: round(r, 1) for n, r in rate.items()}, "same_outputs": f"{same}/{batch}"}
    result["ratio"] = round(rate["mgtp"] / rate["transformers"], 2)
    print(result)
    return result


def load_ours(gguf: Path, folder: Path) -> Any:
    """A single rank in this process."""
    from mgtp.runtime.communicator import SingleRank
    from mgtp.runtime.options import RankOptions
    from mgtp.runtime.place import Place
    from mgtp.runtime.rank_worker import RankWorker
    from mgtp.shardplan.planner import make_plan
    from mgtp.shardplan.sources import open_source
    from mgtp.shardplan.writer import write_shards

    source = open_source(str(gguf))
    write_shards(source, make_plan(source, 1, "float32"), folder / "set")

    class NoLink:
        rank, options = 0, RankOptions(str(folder / "set"), 1, "cpu", [], max_model_len=1024)

        def send_step(self, message: Any) -> None:
            pass

    worker = RankWorker(NoLink())  # type: ignore[arg-type]
    worker.place = Place(torch.device("cpu"), SingleRank())
    worker.load()
    worker.allocate()
    return worker


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """transformers with its defaults (sdpa) on the tensors of the same shard set of one rank."""
    import transformers
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, (config.architectures or [""])[0])
    model = cls._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    tensors = load_file(folder / "rank-0-of-1.safetensors")
    model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("_pad.")}, strict=False)
    model.tie_weights()
    return model.to(device)


def run_ours(worker: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts together, through the engine that serves."""
    from mgtp.runtime.messages import Request
    from mgtp.runtime.sampling_params import SamplingParams

    engine = worker.make_engine()
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True), []))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.scheduler.has_work:
        for token in engine.step()[0]:
            outputs[token.id].append(token.token_id)
    return list(outputs.values())


@torch.inference_mode()
def run_theirs(model: Any, prompts: torch.Tensor, count: int) -> list[list[int]]:
    """Greedy tokens of all prompts as one batch."""
    mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return out[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main()
