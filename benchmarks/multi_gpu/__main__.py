"""Runs the project's commands on several GPUs and leaves one JSON document.

OUT.json holds date, commit (and whether the tree differs from it), hardware and this command; of every part what it found (figures), what it checked, and its
commands with exit code, seconds and the end of stderr. It is written anew after every part, so a run that is cut short
leaves what it has done. A part that fails or runs out of time is noted and the next one runs.

Exits with 0 when every check holds, 1 when one does not or a part was left out, 2 on wrong usage. MGTP in the
environment is the command to run (default: mgtp).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from commands import Commands, cards
from parts import PARTS, Part
from shapes import Shapes, full_shapes, small_shapes


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends with 2 and a line for anything wrong."""
    names = ",".join(PARTS)
    parser = argparse.ArgumentParser("benchmarks/multi_gpu.sh", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--parts", default=names, help=f"which, in this order; default: {names}")
    parser.add_argument(
        "--tp-size", type=int, default=2, help="ranks, where a part does not find out itself; default: 2"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script out")
    parser.add_argument("--shared", action="store_true", help="put all ranks on the first GPU")
    parser.add_argument(
        "--small", action="store_true", help="small shapes, to try the script out; always so on the CPU"
    )
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all parts together; default: 3600")
    options = parser.parse_args(argv)
    unknown = [name for name in options.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts {options.parts}: {unknown[0]!r} is none of {names}")
    return options


def main(argv: list[str]) -> int:
    """Run the parts; the exit code."""
    options = parse(argv)
    end = time.monotonic() + options.budget
    work = Path(tempfile.mkdtemp(prefix="mgtp-multi-", dir="/tmp"))
    try:
        shapes = (small_shapes if options.small or options.device == "cpu" else full_shapes)(work)
        document = {**describe(argv), "parts": {}}
        for name in options.parts.split(","):
            document["parts"][name] = run_part(name, options, shapes, work, end)
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    parts = document["parts"].values()
    failed = [c["what"] for p in parts for c in p["checks"] if not c["holds"]] + [
        p["error"] for p in parts if p["error"]
    ]
    print(f"{sum(len(p['checks']) for p in parts)} checks, {len(failed)} failed or left out", *failed, sep="\n  ")
    return 1 if failed else 0


def run_part(name: str, options: argparse.Namespace, shapes: Shapes, work: Path, end: float) -> dict[str, Any]:
    """One part, within its own limit and what is left of the whole; a failure becomes its `error`."""
    function, limit = PARTS[name]
    begin = time.monotonic()
    place, backends = placement(options)
    mgtp = shlex.split(os.environ.get("MGTP", "mgtp"))
    commands = Commands(mgtp, options.device, place, work, min(end, begin + limit))
    part = Part(commands, shapes, options.tp_size, backends)
    print(f"{name}: at most {max(0.0, commands.end - begin):.0f} s", flush=True)
    error = ""
    try:
        function(part)
    except Exception as failure:
        error = f"{name}: {type(failure).__name__}: {failure}"
        print("".join(traceback.format_exc(limit=-3)), flush=True)
    finally:
        commands.stop_all()
    seconds = round(time.monotonic() - begin, 1)
    runs = [run.document() for run in commands.runs]
    for run in runs:
        if isinstance(run["output"], dict):
            run["output"] = "JSON"  # what matters of it is in the figures
    return {"seconds": seconds, "error": error, "checks": part.checks, "figures": part.figures, "runs": runs}


def placement(options: argparse.Namespace) -> tuple[list[str], tuple[str, ...]]:
    """Options of several ranks, and the backends that there are for them."""
    if options.device == "cpu":
        return ["--device", "cpu"], ("host",)
    if options.shared:
        return ["--device", "cuda", "--devices", "0", "--allow-shared-device"], ("host", "oneshot")
    return ["--device", "cuda"], ("oneshot", "nccl")


def describe(argv: list[str]) -> dict[str, Any]:
    """When, what and on what."""
    git = "git", "-C", str(Path(__file__).parent)
    commit, changed = _output(*git, "rev-parse", "HEAD"), bool(_output(*git, "status", "--porcelain"))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "gpus": cards()}
    return {"date": now, "commit": commit, "tree_changed": changed, "command": argv, "hardware": hardware}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
