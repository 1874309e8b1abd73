"""Bringing a file's bytes to a GPU at the speed of the link: several threads, two pinned buffers each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from ..shardplan.errors import CheckpointError

CHUNK = 8 << 20
"""Bytes a read. Pinned memory is twice this a thread, and slow to get: 256 MiB take longer than copying as much does."""

MAX_THREADS = 16


def load_block(fd: int, offset: int, length: int, device: torch.device) -> torch.Tensor:
    """`length` bytes of `fd` from `offset` on, as a uint8 tensor [length] on `device`.

    Threads take the next chunk each, so that reads stay roughly sequential on disk; host memory is bounded by
    2 * CHUNK bytes a thread. Raises CheckpointError when the file ends early.
    """
    block = torch.empty(length, dtype=torch.uint8, device=device)
    starts = iter(range(0, length, CHUNK))
    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1, -(-length // CHUNK)))
    # One allocation for all: each is a call that stops every thread.
    buffers = torch.empty((threads, 2, min(CHUNK, max(1, length))), dtype=torch.uint8, pin_memory=True)
    # A thread begins with device 0, and going back to its stream would make a context there: half a GiB of another rank's GPU.
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        list(pool.map(lambda own: _copy_chunks(fd, offset, block, starts, own), buffers))
    torch.cuda.synchronize(device)
    return block


def _copy_chunks(fd: int, offset: int, block: torch.Tensor, starts: Iterator[int], buffers: torch.Tensor) -> None:
    """Read chunks into two pinned buffers in turn, while the other one is on its way to the device.

    `starts` is shared by all threads: each takes the next one.
    """
    stream = torch.cuda.Stream(block.device)
    views = [memoryview(buffer.numpy()) for buffer in buffers]  # type: ignore[arg-type]
    done = [torch.cuda.Event() for _ in buffers]
    with torch.cuda.stream(stream):
        for turn, start in enumerate(starts):
            which = turn % 2
            if turn >= 2:
                done[which].synchronize()
            count = min(CHUNK, block.numel() - start)
            _read_exactly(fd, views[which][:count], offset + start)
            block[start : start + count].copy_(buffers[which, :count], non_blocking=True)
            done[which].record(stream)
    stream.synchronize()


def _read_exactly(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"the rank file ends at byte {offset + done}", "copy the file again")
        done += count
