"""Times loading a file from the page cache to this GPU, for chunk sizes and numbers of threads.

python benchmarks/load_timing.py [FOLDER] (default /dev/shm; 16 GB are written there and removed)
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mgtp.runtime import loader

SIZE = 16 << 30
PIECE = 1 << 28


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm") / "mgtp-load-timing"
    noise = os.urandom(1 << 20) * (PIECE >> 20)
    device = torch.device("cuda", 0)
    try:
        with path.open("wb+") as file:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda at: os.pwrite(file.fileno(), noise, at), range(0, SIZE, PIECE)))
            loader.load_block(file.fileno(), 0, 1 << 20, device)
            for chunk in (4, 8, 16, 64):
                for threads in (8, 16):
                    loader.CHUNK, loader.MAX_THREADS = chunk << 20, threads
                    torch._C._host_emptyCache()
                    begin = time.perf_counter()
                    block = loader.load_block(file.fileno(), 0, SIZE, device)
                    took = time.perf_counter() - begin
                    begin = time.perf_counter()
                    pinned = torch.empty((threads, 2, chunk << 20), dtype=torch.uint8, pin_memory=True)
                    again = time.perf_counter() - begin
                    right = bytes(block[-64:].cpu().tolist()) == noise[-64:]
                    print(f"chunk {chunk} MiB, {threads} threads: {took:.3f} s, {SIZE / took / 1e9:.1f} GB/s, "
                          f"right: {right}, pinned again in {again * 1e3:.1f} ms", flush=True)  # fmt: skip
                    del block, pinned
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
