"""The parts of the run: each gives figures, and what it has checked. A part that fails does not keep others from running."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import Commands, Overrun, Server, cards, end_and_watch
from shapes import Shapes

GOALS = {2: 1.75, 4: 2.8, 8: 3.8}
"""How much faster than one rank a decode step of batch 1 of the 8B is to be."""

GONE_SECONDS = 5.0

FIRST_PROMPT = range(3, 67)

TIE = 1e-3
"""Difference of two log-probabilities that float32 sums in another order may turn round in a model of random weights."""


@dataclass
class Part:
    """What a part works with, and what it leaves."""

    commands: Commands
    shapes: Shapes
    tp_size: int
    backends: tuple[str, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_gpus(self) -> bool:
        """Whether ranks have GPUs; what is about their memory makes no sense elsewhere."""
        return self.commands.device == "cuda"

    def check(self, what: str, holds: bool, found: Any = None) -> None:
        """Note whether something holds."""
        self.checks.append({"what": what, "holds": bool(holds), "found": found})
        print(f"  {'ok' if holds else 'WRONG'}: {what} {'' if holds else found}", flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What fails within the block is noted, and what comes after it is run; only the end of time ends the part."""
        try:
            yield
        except Overrun:
            raise
        except Exception as failure:
            self.check(what, False, f"{type(failure).__name__}: {failure}")

    def ranks(self, tp_size: int, cp_size: int = 1, backend: str = "auto") -> list[str]:
        """Options that say how many ranks there are, and where."""
        sizes = ["--tp-size", str(tp_size), "--cp-size", str(cp_size), "--collective", backend]
        return sizes + (self.commands.place if tp_size * cp_size > 1 else ["--device", self.commands.device])


def dummy(config: str, *more: str) -> list[str]:
    """A config.json as a model, with random weights."""
    return [config, "--dummy-weights", *more]


# ---- a model that no card holds


def large(part: Part) -> None:
    """Planned, refused on one card, loaded, served and generated from on the fewest that hold it; a rank killed."""
    c, config = part.commands, part.shapes.large
    tp_size = _plan_large(part) if part.on_gpus else part.tp_size
    ranks, length = part.ranks(tp_size), ["--max-model-len", str(part.shapes.max_model_len)]
    with part.attempt("probe-memory"):
        probe = part.figures["probe_memory"] = c.run("probe-memory", *dummy(config), *ranks, "--json").checked()
        shares = [r["share"] for r in probe["ranks"]]
        part.check("probe-memory: every rank holds its plan", probe["within_plan"])
        if part.on_gpus:  # elsewhere the model is too small to be seen
            even = all(abs(s * tp_size - 1) < 0.02 for s in shares)
            part.check(f"probe-memory: a rank holds 1/{tp_size}", even, shares)
    served: list[int] = []
    with part.attempt("serve"):
        before = [card["used_mib"] for card in cards()]
        options = ["--max-num-seqs", str(part.shapes.streams), "--tp-size", str(tp_size), *length]
        with c.server(*dummy(config), *options) as server:
            served += _first_token(part, server)
            _serve_many(part, server)
            threads = server.under_load(min(16, part.shapes.streams))
            rank = next(pid for pid, rank in server.started.pids().items() if rank == tp_size - 1)
            _note_end(part, "kill_rank", end_and_watch(server.started, rank, signal.SIGKILL, before))
            for thread in threads:
                thread.join(10)
            part.check("no stream hangs after a rank was killed", not any(t.is_alive() for t in threads))
    with part.attempt("generate"):
        options = ["--temperature", "0", "--ignore-eos", "--json", "--prompt-ids", ",".join(map(str, FIRST_PROMPT))]
        found = c.run("generate", *dummy(config), *ranks, *options, "--max-tokens", "32", *length).checked()
        part.figures["generate"] = {"timing": found["timing"], "seconds": c.runs[-1].seconds}
        part.check("generate gives what serve gave", found["token_ids"][:16] == served, [found["token_ids"], served])


def _first_token(part: Part, server: Server) -> list[int]:
    """How long it took; the first ids."""
    first = server.stream(FIRST_PROMPT, 16)
    seconds = round(server.ready_seconds + first.first, 2)
    part.figures["serve"] = {
        "ready_s": server.ready_seconds, "first_token_s": first.first, "command_to_first_token_s": seconds,
        "weights": "random, made in device memory: no file is read",
    }  # fmt: skip
    part.check("serve: the first token within 15 s of the command", seconds < 15, seconds)
    return first.ids


def _plan_large(part: Part) -> int:
    """The smallest tp size that `mgtp plan` says fits; one rank is refused by every command, with the numbers."""
    c, config = part.commands, part.shapes.large
    card = min(card["total_mib"] for card in cards())
    memory = ("--device-memory", f"{card}MiB", "--json")
    one = c.run("plan", *dummy(config), "--tp-size", "1", *memory)
    part.check("plan: one rank does not fit", one.exit_code == 4, one.stderr)
    tp_size = one.output["fit"]["smallest_tp_size"]
    plan = c.run("plan", *dummy(config), "--tp-size", str(tp_size), *memory).checked()
    part.figures["plan"] = {"tp_size": tp_size, "total_weight_bytes": plan["total_weight_bytes"], "fit": plan["fit"]}
    part.check("plan: the size it names fits", plan["fit"]["fits"])
    for command in (("generate", "--prompt-ids", "3"), ("bench", "--requests", "0"), ("probe-memory",)):
        run = c.run(command[0], *dummy(config), *part.ranks(1), *command[1:], limit=60)
        said = " ".join(run.stderr)
        part.check(f"{command[0]}: one rank is refused with the numbers", run.exit_code == 4 and "free" in said, said)
    part.check("there are enough cards", tp_size <= len(cards()), tp_size)
    return tp_size


def _serve_many(part: Part, server: Server) -> None:
    """Streams at the same time: all end, with as many tokens as were asked for."""
    s, rng = part.shapes, random.Random(1)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(8, 200))] for _ in range(s.streams)]
    begin = time.monotonic()
    streams, threads = server.streams(prompts, s.stream_tokens)
    for thread in threads:
        thread.join(part.commands.left())
    seconds = time.monotonic() - begin
    part.figures["streams"] = {
        "count": s.streams, "tokens_each": s.stream_tokens, "seconds": seconds,
        "tokens_per_s": s.streams * s.stream_tokens / seconds,
        "median_first_token_s": statistics.median(x.first for x in streams),
    }  # fmt: skip
    wrong = [x.error or len(x.ids) for x in streams if x.error or len(x.ids) != s.stream_tokens]
    part.check(f"serve: {s.streams} streams at once end with all their tokens", not wrong, wrong[:4])


# ---- the same ids


def ids(part: Part) -> None:
    """Greedy ids of every layout and backend are those of one rank, in float32, 64 sequences at once under graphs."""
    c, s, n = part.commands, part.shapes, part.tp_size
    layouts: dict[str, list[str]] = {"tp 1": part.ranks(1)}
    for backend in part.backends:
        layouts[f"tp {n} {backend}"] = part.ranks(n, 1, backend)
    layouts[f"tp {n} {part.backends[0]}, without graphs"] = [*part.ranks(n, 1, part.backends[0]), "--enforce-eager"]
    layouts[f"tp 1, cp {n}"] = part.ranks(1, n)
    many = _prompts(c.work / "many.jsonl", s.streams, 200, max_tokens=48, logprobs=2)
    few = _prompts(c.work / "few.jsonl", 8, 300, max_tokens=16, logprobs=20)
    commands = {
        ("tiny", layout): _answer(part, many, s.tiny, "float32", layout, ranks) for layout, ranks in layouts.items()
    }
    commands |= {("medium", name): _answer(part, few, s.medium, "float32", name, r) for name, r in layouts.items()}
    exact = _answers(part, commands)
    for model in ("tiny", "medium"):
        _same_ids(part, model, {layout: lines for (name, layout), lines in exact.items() if name == model})
    commands = {("medium", name): _answer(part, few, s.medium, "bfloat16", name, r) for name, r in layouts.items()}
    rounded = {layout: lines for (_, layout), lines in _answers(part, commands).items()}
    _same_logprobs(part, exact["medium", "tp 1"], rounded)


Answers = list[dict[str, Any]]
"""The lines that `generate --prompts` writes."""


def _answer(part: Part, prompts: Path, config: str, dtype: str, layout: str, ranks: Sequence[str]) -> list[str]:
    """The command that answers a file of prompts, all at once."""
    name = "-".join([Path(config).stem, dtype, *layout.replace(",", "").split()])
    options = ["--prompts", str(prompts), "--output", str(part.commands.work / f"{name}.jsonl"), "--dtype", dtype]
    options += ["--temperature", "0", "--max-num-seqs", str(len(prompts.read_text().splitlines()))]
    options += ["--max-model-len", "1024", "--kv-cache-memory", "1GiB" if part.on_gpus else "64MiB", "--json"]
    return ["generate", *dummy(config), *options, *ranks]


def _answers(part: Part, commands: dict[tuple[str, str], list[str]]) -> dict[tuple[str, str], Answers]:
    """What several commands at the same time answer; one that fails is noted and left out."""
    answers = {}
    for name, run in zip(commands, part.commands.run_all(list(commands.values())), strict=True):
        with part.attempt(", ".join(name)):
            run.checked()
            output = Path(run.arguments[run.arguments.index("--output") + 1])
            answers[name] = [json.loads(line) for line in output.read_text().splitlines()]
    return answers


def _same_ids(part: Part, name: str, answers: dict[str, Answers]) -> None:
    """All ids are those of tp 1; where two tokens are as likely as each other, an answer may go on with either."""
    first = answers.pop("tp 1")
    for layout, found in answers.items():
        margins = [_margin(one, other) for one, other in zip(first, found, strict=True)]
        wrong, ties = [m for m in margins if m >= TIE], [m for m in margins if 0 < m < TIE]
        said = f"{len(wrong)} of {len(margins)} differ, by {max(margins):.4f} at most; {len(ties)} go on after a tie"
        part.figures[f"{name}, float32, {layout}"] = said
        part.check(f"{name}, float32: ids of {layout} are those of tp 1", not wrong, said)


def _margin(one: dict[str, Any], other: dict[str, Any]) -> float:
    """By how much the first token that differs was likelier than the next best one; 0 when none does."""
    for entry, id_of_other in zip(one["logprobs"], other["token_ids"], strict=True):
        if entry["token_id"] != id_of_other:
            return max(1e-9, entry["top"][0]["logprob"] - entry["top"][1]["logprob"])
    return 0.0


def _prompts(path: Path, count: int, longest: int, **options: int) -> Path:
    rng = random.Random(count)
    prompts = [rng.choices(range(3, 500), k=rng.randrange(1, longest)) for _ in range(count)]
    lines = [json.dumps({"prompt_ids": prompt, "ignore_eos": True, **options}) for prompt in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


def _same_logprobs(part: Part, exact: Answers, answers: dict[str, Answers]) -> None:
    """In bfloat16: log-probabilities no further from float32's than twice those of one rank (root of mean squares)."""
    off = {layout: _distance(exact, found) for layout, found in answers.items()}
    part.figures["bfloat16_logprobs_off_float32"] = off
    allowed = 2 * off["tp 1"]
    for layout, difference in off.items():
        part.check(f"medium, bfloat16: {layout} is within {allowed:.3f} of float32", difference <= allowed, difference)


def _distance(exact: Answers, found: Answers) -> float:
    """Between log-probabilities of the same token at the same place, as long as ids agree."""
    squares = []
    for a, b in zip(exact, found, strict=True):
        for one, other in zip(a["logprobs"], b["logprobs"], strict=True):
            theirs = {entry["token_id"]: entry["logprob"] for entry in other["top"]}
            pairs = [(e["logprob"], theirs[e["token_id"]]) for e in one["top"] if e["token_id"] in theirs]
            squares += [(x - y) ** 2 for x, y in pairs]
            if one["token_id"] != other["token_id"]:
                break
    return math.sqrt(sum(squares) / len(squares))


# ---- how fast


def scaling(part: Part) -> None:
    """Decode steps and prefill of the model for one card, on one rank and on several over every backend."""
    one = _bench(part, part.shapes.medium, 1, "auto")
    faster = {}
    for backend in part.backends:
        with part.attempt(f"bench of the medium model over {backend}"):
            many = _bench(part, part.shapes.medium, part.tp_size, backend)
            faster[backend] = {d["batch"]: o["step_ms"] / d["step_ms"] for o, d in zip(one, many, strict=True)}
    part.figures["medium_faster_than_one_rank"] = faster
    best, goal = max(f[one[0]["batch"]] for f in faster.values()), GOALS.get(part.tp_size, 0.0)
    part.check(f"batch {one[0]['batch']} is {goal} times as fast on {part.tp_size} ranks", best >= goal, best)
    _never_slower(part, "medium")


def scaling_large(part: Part) -> None:
    """The same for the model that no card holds."""
    for backend in part.backends:
        with part.attempt(f"bench of the large model over {backend}"):
            _bench(part, part.shapes.large, part.tp_size, backend)
    _never_slower(part, "large")


def _bench(part: Part, config: str, tp_size: int, backend: str) -> list[dict[str, Any]]:
    s = part.shapes
    options = ["--batches", s.batches, "--prefills", s.prefill, "--requests", "0", "--prompt-tokens", str(s.prompt)]
    options += ["--output-tokens", str(s.output), "--json", *(["--collectives"] if tp_size > 1 else [])]
    report = part.commands.run("bench", *dummy(config), *part.ranks(tp_size, 1, backend), *options).checked()
    name = "large" if config == s.large else "medium"
    part.figures[f"{name}, tp {tp_size} {backend}"] = report
    return report["decode"]


def _never_slower(part: Part, model: str) -> None:
    """oneshot beside nccl, end to end."""
    reports = [part.figures.get(f"{model}, tp {part.tp_size} {backend}") for backend in ("oneshot", "nccl")]
    if None not in reports:
        steps = [[d["step_ms"] for d in report["decode"]] for report in reports if report]
        found = dict(zip(("oneshot", "nccl"), steps, strict=True))
        part.check(f"{model}: oneshot is never slower", all(a <= 1.02 * b for a, b in zip(*steps, strict=True)), found)


# ---- how it ends


def ends(part: Part) -> None:
    """SIGTERM to a server under load, and SIGKILL to its front: everything is gone, and the memory given back."""
    model = dummy(part.shapes.medium, "--max-num-seqs", "16", "--drain-timeout", "1", "--tp-size", str(part.tp_size))
    model += ["--max-model-len", str(part.shapes.max_model_len)]
    for name, number in (("terminate", signal.SIGTERM), ("kill_front", signal.SIGKILL)):
        before = [card["used_mib"] for card in cards()]
        with part.attempt(name), part.commands.server(*model) as server:
            server.under_load(16)
            _note_end(part, name, end_and_watch(server.started, server.started.process.pid, number, before))


def _note_end(part: Part, name: str, found: dict[str, Any]) -> None:
    part.figures[name] = found
    gone, back = found["processes_gone_s"], found["memory_back_s"]
    part.check(f"{name}: everything is gone in {GONE_SECONDS:g} s", gone is not None and gone <= GONE_SECONDS, found)
    part.check(f"{name}: memory is back in {GONE_SECONDS:g} s", back is not None and back <= GONE_SECONDS, found)
    codes = {"terminate": 0, "kill_rank": 5}
    if name in codes:
        part.check(f"{name}: exit code {codes[name]}", found["exit_code"] == codes[name], found["exit_code"])


# ---- long prompts


def context(part: Part) -> None:
    """Time to the first token of long prompts: one rank, ranks that share out weights, ranks that share out the prompt."""
    s, n = part.shapes, part.tp_size
    options = ["--batches", "1", "--prefills", s.long_prefills, "--requests", "0", "--json"]
    options += ["--prompt-tokens", str(s.prompt), "--output-tokens", str(s.output)]
    layouts = {"tp 1": part.ranks(1), f"cp {n}": part.ranks(1, n, part.backends[-1])}
    layouts[f"tp {n}"] = part.ranks(n, 1, part.backends[0])
    first_token, decode = part.figures.setdefault("first_token_s", {}), part.figures.setdefault("decode_ms", {})
    for name, ranks in layouts.items():
        with part.attempt(f"bench, {name}"):
            report = part.commands.run("bench", *dummy(s.medium), *ranks, *options).checked()
            first_token[name] = {f"{p['requests']}x{p['tokens']}": p["seconds"] for p in report["prefill"]}
            decode[name] = report["decode"][0]["step_ms"]
    probe = part.commands.run("probe-memory", *dummy(s.medium), *part.ranks(1, n), "--json").checked()
    per_token = probe["ranks"][0]["kv_cache_bytes"] / probe["ranks"][0]["kv_cache_tokens"]
    planned = json.loads(Path(s.medium).read_text())
    whole = 2 * 2 * planned["num_hidden_layers"] * planned["num_key_value_heads"] * planned["head_dim"]
    part.figures["kv_bytes_per_token_and_rank"] = {"found": per_token, "one_rank_would_have": whole}
    part.check(f"a rank of cp {n} keeps 1/{n} of every token's cache", abs(per_token * n / whole - 1) < 0.1, per_token)


# ---- loading


def load(part: Part) -> None:
    """A shard set on disk: loaded by all ranks at once, from the disk and from the page cache."""
    c, s = part.commands, part.shapes
    folder = c.work / "set"
    begin = time.monotonic()
    writer = [sys.executable, str(Path(__file__).with_name("dummy_set.py")), s.medium, str(folder), str(part.tp_size)]
    subprocess.run(writer, check=True, timeout=c.left())
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    part.figures["written"] = {"bytes": size, "seconds": time.monotonic() - begin}
    options = ["--batches", "1", "--prefills", "", "--requests", "0", "--output-tokens", "24", "--json"]
    for name in ("cold", "warm", "warm again"):
        if name == "cold":
            _drop(files)
        report = c.run("bench", str(folder), *part.ranks(part.tp_size), *options).checked()
        keys = ("ready_s", "load_s", "load_bytes_per_s", "weight_bytes")
        part.figures[name] = {key: report[key] for key in keys} | {"command_s": c.runs[-1].seconds}
    ask = ["--prompt-ids", "3,4,5,6", "--max-tokens", "16", "--temperature", "0", "--ignore-eos", "--json"]
    ask += ["--max-model-len", "1024"]
    runs = [["generate", str(folder)], ["generate", *dummy(s.medium)]]
    found = [c.run(*run, *part.ranks(part.tp_size), *ask).checked() for run in runs]
    part.figures["generate_warm"] = found[0]["timing"] | {"command_s": c.runs[-2].seconds}
    part.check("what is loaded is what was written", found[0]["token_ids"] == found[1]["token_ids"])


def _drop(files: Sequence[Path]) -> None:
    """Have the system forget what it holds of `files` in memory."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- links


def probe(part: Part) -> None:
    """Links, and every backend of the collectives from 1 KiB to 64 MiB."""
    ranks = ["--tp-size", str(part.tp_size), *part.commands.place]
    part.figures["probe"] = part.commands.run("probe", *ranks, "--json").checked()
    found = part.figures["probe"]["collectives"]
    part.check("every message was right", all(row["verified"] for row in found), len(found))


PARTS: dict[str, tuple[Callable[[Part], None], int]] = {
    "large": (large, 240),
    "ids": (ids, 180),
    "scaling": (scaling, 180),
    "context": (context, 180),
    "ends": (ends, 120),
    "scaling_large": (scaling_large, 200),
    "load": (load, 200),
    "probe": (probe, 60),
}
"""Parts by name, in the order in which they are run when time is short, and the seconds that each may take."""
