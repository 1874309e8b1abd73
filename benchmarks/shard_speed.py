"""How fast `mgtp shard` writes, and how much memory it takes, against `cp` and `sync` of the same bytes.

usage: python benchmarks/shard_speed.py [--gigabytes 2] [--tp-size 2] [--runs 5] [--dtype auto] [--folder DIR] [--cold]

Runs alternate, so that both meet the same state of the disk. Prints the plain copy first, as the ceiling, and one JSON
document last. `--cold` drops the source from the page cache before every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, FFN, LAYER_BYTES = 2048, 8192, 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192)

DUMMY = """
import sys, pathlib
import numpy as np
sys.path.insert(0, sys.argv[4])
from tests.tiny import llama_config, llama_tensors, write_json, write_weights, edit_json
folder, layers, files = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True)
config = llama_config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, vocab_size=32000,
                      num_attention_heads=16, num_key_value_heads=16, torch_dtype="bfloat16")
one = llama_tensors(config, "bfloat16")
tensors = {n: v for n, v in one.items() if ".layers." not in n}
for i in range(layers):
    tensors |= {n.replace(".0.", f".{i}."): v for n, v in one.items() if ".layers." in n}
write_json(folder / "config.json", {**config, "num_hidden_layers": layers})
write_weights(folder, tensors, files)
"""


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="mgtp-bench-", dir=options.folder) as name:
        folder = Path(name)
        source, size = make_checkpoint(folder / "source", options.gigabytes)
        shard = [sys.executable, "-m", "mgtp.cli", "--log-level", "warning", "shard", str(source)]
        shard += ["--tp-size", str(options.tp_size), "--dtype", options.dtype, "--out"]
        copies, shards, peaks = [], [], []
        copy = ["sh", "-c", f"cp -r {source} {folder}/out && sync -f {folder}/out"]
        for run in range(options.runs + 1):
            taken = {}
            for what in ("copy", "shard")[:: 1 if run % 2 else -1]:  # whichever is second may pay for memory
                command = copy if what == "copy" else [*shard, f"{folder}/out"]
                taken[what] = timed(command, folder, options.cold)
            if run:  # the first of each only warms up
                copies.append(taken["copy"][0])
                shards.append(taken["shard"][0])
                peaks.append(taken["shard"][1])
    report(options, size, copies, shards, peaks)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true")
    return parser.parse_args()


def make_checkpoint(folder: Path, gigabytes: float) -> tuple[Path, int]:
    """A Llama of that size with random bfloat16 weights, made by a process of its own: ours stays small."""
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    root = str(Path(__file__).resolve().parent.parent)
    subprocess.run([sys.executable, "-c", DUMMY, str(folder), str(layers), "2", root], check=True)
    return folder, sum(f.stat().st_size for f in folder.iterdir())


def timed(command: list[str], folder: Path, cold: bool) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command that reads folder/source and writes folder/out, which is removed.

    So each command starts with the same free memory and an idle disk, whichever ran before.
    """
    if cold:
        for file in (folder / "source").iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with {process.returncode}")
    shutil.rmtree(folder / "out")
    os.sync()
    return seconds, usage.ru_maxrss * 1024


def report(options: argparse.Namespace, size: int, copies: list[float], shards: list[float], peaks: list[int]) -> None:
    copy, cut = statistics.median(copies), statistics.median(shards)
    print(f"cp + sync   {copy:6.2f} s  {size / copy / 1e9:5.2f} GB/s   (the ceiling: reads and writes the same bytes)")
    print(
        f"mgtp shard  {cut:6.2f} s  {size / cut / 1e9:5.2f} GB/s   {cut / copy:.2f} x, peak {max(peaks) / 1e6:.0f} MB"
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    document = {
        "benchmark": "shard_speed",
        "bytes": size,
        "tp_size": options.tp_size,
        "dtype": options.dtype,
        "cold": options.cold,
        "cp_sync_s": copies,
        "shard_s": shards,
        "ratio_of_medians": cut / copy,
        "peak_rss_bytes": max(peaks),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
