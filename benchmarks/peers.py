"""Generation speed beside transformers, vLLM and llama.cpp, where these are installed: one run, turn and turn about.

    python benchmarks/peers.py MODEL [--device cpu|cuda] [--batches 1 16] [--prompt-tokens 64] [--new-tokens 64] [--rounds 3]

MODEL is a Hugging Face folder or a .gguf file. The time is that from sending a batch of random prompts to its last token,
prompts included. Prints a line per batch size and one JSON line last: tokens per second of each (median over rounds), ours
over theirs, and which peers are missing, and why.

* transformers runs the same weights in the same dtype, its `generate` with sdpa.
* vLLM runs the same weights in the same dtype, written as a plain checkpoint, without prefix caching.
* llama.cpp needs MODEL to be a .gguf file, whose quantised weights it keeps while mgtp runs what they stand for: it reads
  fewer bytes. Of its programs llama-batched-bench is taken; else llama-cpp-python, which takes one sequence at a time.

peer_transformers.py also compares the tokens. Run so far: transformers, on the CPU. What is here of vLLM and llama.cpp follows
their documentation (vLLM's LLM.generate with prompt_token_ids, llama-batched-bench with --output-format jsonl) and was tried with
stand-ins only: neither was installed where this was written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peer_transformers import load_theirs, run_theirs

from mgtp.runtime.launch.bench import Bench
from mgtp.runtime.launch.start import LaunchOptions, start_ranks
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.shard_set import ShardSet
from mgtp.shardplan.sources import open_source
from mgtp.shardplan.writer import write_shards


@dataclass(frozen=True)
class Job:
    """What everybody runs: a checkpoint as its source, as a shard set of one rank, and where."""

    model: Path
    folder: Path
    dtype: str
    device: str
    prompt_tokens: int
    new_tokens: int
    most: int

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.new_tokens

    def prompts(self, batch: int) -> torch.Tensor:
        """Random ids, the same for everybody."""
        vocab = json.loads((self.folder / "set" / "config.json").read_text())["vocab_size"]
        generator = torch.Generator().manual_seed(batch)
        return torch.randint(0, vocab, (batch, self.prompt_tokens), generator=generator)


Run = Callable[[int], float]
"""Runs a batch of so many sequences, and says how many seconds it took."""


class Missing(Exception):
    """Why a peer is not compared."""


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as name:
        job = prepare(arguments, Path(name))
        runs: dict[str, Run] = {}
        missing: dict[str, str] = {}
        for peer, load in (("transformers", transformers), ("vllm", vllm), ("llama.cpp", llama_cpp)):
            try:
                runs[peer] = load(job)
            except Missing as reason:
                missing[peer] = str(reason)
                print(f"{peer}: {reason}")
        shard_set = ShardSet.open(job.folder / "set")
        launch = LaunchOptions(device=job.device, max_model_len=job.length, max_num_seqs=job.most, log_level="warning")
        started = start_ranks(shard_set, launch)
        with started.group:
            bench = Bench(started, shard_set, launch)
            runs = {"mgtp": lambda batch: bench.seconds([(job.prompt_tokens, job.new_tokens)] * batch), **runs}
            results = [compare(runs, batch, job, arguments.rounds) for batch in arguments.batches]
    where = {"device": started.ready[0].device, "dtype": job.dtype, "cores": len(os.sched_getaffinity(0))}
    print(json.dumps({**where, "machine": platform.processor(), "results": results, "missing": missing}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, folder: Path) -> Job:
    """Cut the checkpoint for one rank: float32 on the CPU, as it is on a GPU."""
    source = open_source(str(arguments.model))
    plan = make_plan(source, 1, "float32" if arguments.device == "cpu" else "auto")
    write_shards(source, plan, folder / "set")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    shape = arguments.prompt_tokens, arguments.new_tokens, max(arguments.batches)
    return Job(arguments.model, folder, plan.dtype, arguments.device, *shape)


def compare(runs: dict[str, Run], batch: int, job: Job, rounds: int) -> dict[str, Any]:
    """Tokens per second of all at one batch size, and ours over theirs."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = run(batch)
            if number:  # the first round warms up
                times[name].append(seconds)
    rates = {name: batch * job.new_tokens / statistics.median(found) for name, found in times.items()}
    known = {name: rate for name, rate in rates.items() if rate == rate}  # what cannot run a batch says NaN
    result = {
        "batch": batch,
        "tokens_per_s": {name: round(rate, 1) for name, rate in known.items()},
        "ratio": {name: round(known["mgtp"] / rate, 2) for name, rate in known.items() if name != "mgtp"},
    }
    print(result)
    return result


def transformers(job: Job) -> Run:
    if find_spec("transformers") is None:
        raise Missing("not installed")
    model = load_theirs(job.folder / "set", getattr(torch, job.dtype), job.device)

    def run(batch: int) -> float:
        prompts = job.prompts(batch).to(job.device)
        return timed(lambda: run_theirs(model, prompts, job.new_tokens))

    return run


def vllm(job: Job) -> Run:
    if find_spec("vllm") is None:
        raise Missing("not installed")
    module = import_module("vllm")
    llm = module.LLM(
        model=str(plain_checkpoint(job.folder)),
        dtype=job.dtype,
        max_model_len=job.length,
        max_num_seqs=job.most,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,  # mgtp is on the same card
    )
    count = job.new_tokens
    params = module.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    def run(batch: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in job.prompts(batch).tolist()]
        return timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    return run


def plain_checkpoint(folder: Path) -> Path:
    """The set of one rank as a Hugging Face folder: the same tensors without padding."""
    from safetensors.torch import load_file, save_file

    plain = folder / "plain"
    plain.mkdir()
    tensors = load_file(folder / "set" / "rank-0-of-1.safetensors")
    named = {n: t.clone() for n, t in tensors.items() if not n.startswith("_pad.")}
    save_file(named, plain / "model.safetensors", metadata={"format": "pt"})
    for path in (folder / "set").glob("*config.json"):
        shutil.copy(path, plain)
    return plain


def llama_cpp(job: Job) -> Run:
    if job.model.suffix.lower() != ".gguf":
        raise Missing("MODEL is not a .gguf file")
    if program := shutil.which("llama-batched-bench"):
        return lambda batch: batched_bench(program, job, batch)
    if find_spec("llama_cpp") is None:
        raise Missing("neither llama-batched-bench nor llama-cpp-python is installed")
    llama = import_module("llama_cpp").Llama(
        model_path=str(job.model),
        n_ctx=job.length,
        n_threads=len(os.sched_getaffinity(0)),
        n_gpu_layers=-1 if job.device == "cuda" else 0,
        verbose=False,
    )

    def run(batch: int) -> float:
        if batch > 1:
            return float("nan")
        tokens = llama.generate(job.prompts(1)[0].tolist(), temp=0.0, repeat_penalty=1.0)
        return timed(lambda: [next(tokens) for _ in range(job.new_tokens)])

    return run


def batched_bench(program: str, job: Job, batch: int) -> float:
    """Seconds of a batch, prompts included, as llama.cpp's own program measures them; it makes its own random prompts."""
    sizes = {"-npp": job.prompt_tokens, "-ntg": job.new_tokens, "-npl": batch, "-c": batch * job.length}
    sizes |= {"-t": len(os.sched_getaffinity(0)), "-ngl": 99 if job.device == "cuda" else 0}
    words = [word for name, value in sizes.items() for word in (name, str(value))]
    command = [program, "-m", str(job.model), *words, "--output-format", "jsonl"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{") and '"t_tg"' in line]
    return float(json.loads(lines[-1])["t"])


def timed(run: Callable[[], Any]) -> float:
    """Seconds that `run` takes; it ends with tokens that the CPU has seen."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
