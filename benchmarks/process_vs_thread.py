"""Several GPUs from one process, or one process per GPU: what Python's interpreter lock costs a decode loop.

A decode step is a few hundred small operators that Python launches one after the other, the same on every rank. This
runs such a step in a loop on W workers at once, as threads of one process and as W processes, in turns, and compares
their speed with one worker alone. It also measures what processes cost: the time until torch is imported in all of
them, the host memory each has for itself then, and a message to another process and back.

usage: python benchmarks/process_vs_thread.py [--workers 2] [--device cpu|cuda] [--graph] [--hidden 64] [--rounds 5]

The ceiling is printed first: W workers that do not disturb each other run W times the steps of one. On the CPU that
needs W idle cores; every worker computes with one thread. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

LAYERS = 24  # of 10 operators each


def main() -> None:
    options = parse()
    if options.worker is not None:
        worker_process(options)
        return
    import torch

    torch.set_num_threads(1)
    measure: dict[str, Callable[[], float]] = {
        "alone": lambda: in_threads(options, 1),
        "threads": lambda: in_threads(options, options.workers),
        "processes": lambda: in_processes(options, options.workers),
    }
    speeds: dict[str, list[float]] = {name: [] for name in measure}
    for round_number in range(options.rounds):
        for name, run in measure.items():
            speeds[name].append(run())
        print(f"round {round_number + 1} of {options.rounds}", file=sys.stderr)
    steps = {name: statistics.median(values) for name, values in speeds.items()}
    spread = {name: max(values) / min(values) - 1 for name, values in speeds.items()}
    report(options, steps, spread)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graph", action="store_true", help="on cuda: record the step once, then replay it")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model; small: Python is the limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(options: argparse.Namespace, steps: dict[str, float], spread: dict[str, float]) -> None:
    import torch

    hardware = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    ceiling = options.workers * steps["alone"]
    print(
        f"{options.workers} workers on {options.device}: {hardware}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"ceiling     {ceiling:8.1f} steps/s  ({options.workers} x one worker alone, {steps['alone']:.1f})")
    for name in ("threads", "processes"):
        print(f"{name:11} {steps[name]:8.1f} steps/s  {steps[name] / ceiling:4.0%} of it, spread {spread[name]:.0%}")
    imports = {count: import_cost(count) for count in (1, options.workers)}
    for count, (seconds, private) in imports.items():
        print(f"torch imported in {count} process(es) after {seconds:.2f} s, {private / 1e6:.0f} MB private to each")
    message = message_seconds()
    print(f"a message to another process and back takes {message * 1e6:.0f} us")
    document = {
        "workers": options.workers,
        "device": options.device,
        "hardware": hardware,
        "hidden": options.hidden,
        "graph": options.graph,
        "steps_per_s": steps,
        "of_ceiling": {name: steps[name] / ceiling for name in ("threads", "processes")},
        "import_s": {count: seconds for count, (seconds, _) in imports.items()},
        "import_private_bytes": imports[1][1],
        "message_round_trip_s": message,
    }
    print(json.dumps(document))


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def in_threads(options: argparse.Namespace, workers: int) -> float:
    """Steps a second of all `workers` threads of this process together."""
    barrier = threading.Barrier(workers)
    speeds = [0.0] * workers

    def work(index: int) -> None:
        step = make_step(options, index)
        step()
        barrier.wait()
        speeds[index] = speed(step, options.seconds)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(speeds)


def in_processes(options: argparse.Namespace, workers: int) -> float:
    """The same of `workers` processes: each says when it is ready, and all start on the same word."""
    arguments = ["--device", options.device, "--hidden", str(options.hidden), "--seconds", str(options.seconds)]
    if options.graph:
        arguments.append("--graph")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(index), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(workers)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes)


def worker_process(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    step = make_step(options, options.worker)
    step()
    print("ready", flush=True)
    sys.stdin.readline()
    print(speed(step, options.seconds))


def speed(step: Callable[[], None], seconds: float) -> float:
    start, steps = time.perf_counter(), 0
    while (now := time.perf_counter()) - start < seconds:
        step()
        steps += 1
    return steps / (now - start)


def make_step(options: argparse.Namespace, index: int) -> Callable[[], None]:
    """A decode step at batch 1: the operators of a gated feed-forward block, `LAYERS` times, then the wait for it."""
    import torch

    device = torch.device(f"cuda:{index % torch.cuda.device_count()}" if options.device == "cuda" else "cpu")
    hidden = options.hidden
    generator = torch.Generator().manual_seed(index)
    gate, up = (torch.randn(hidden, hidden, generator=generator).mul_(hidden**-0.5).to(device) for _ in range(2))
    state = torch.randn(1, hidden, generator=generator).to(device)

    @torch.inference_mode()
    def launch() -> None:
        x = state
        for _ in range(LAYERS):
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            x = x + torch.nn.functional.silu(normed @ gate) * (normed @ up)

    if device.type == "cpu":
        return launch
    torch.cuda.set_device(device)
    launch()
    replay = launch
    if options.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        replay = graph.replay

    def step() -> None:
        replay()
        torch.cuda.synchronize(device)

    return step


IMPORTER = """
import torch
fields = (line.split() for line in open("/proc/self/smaps_rollup"))
print(1024 * sum(int(field[1]) for field in fields if field[0].startswith("Private_")), flush=True)
input()
"""


def import_cost(count: int) -> tuple[float, int]:
    """Seconds until the last of `count` processes started together has imported torch; private bytes of one then."""
    start = time.perf_counter()
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", IMPORTER]
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    private = [int(process.stdout.readline()) for process in processes if process.stdout]
    seconds = time.perf_counter() - start
    for process in processes:
        process.communicate("\n")
    return seconds, max(private)


ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(sys.argv[1])
while message := socket.recv():
    socket.send(message)
"""


def message_seconds(messages: int = 2000) -> float:
    """Median round trip of a step-sized message (512 bytes) over a Unix socket, through ZeroMQ."""
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        address = f"ipc://{folder}/socket"
        socket.bind(address)
        echo = subprocess.Popen([sys.executable, "-c", ECHO, address])
        times = []
        for _ in range(messages):
            start = time.perf_counter()
            socket.send(bytes(512))
            socket.recv()
            times.append(time.perf_counter() - start)
        socket.send(b"")
        echo.wait()
    return statistics.median(times)


if __name__ == "__main__":
    main()
