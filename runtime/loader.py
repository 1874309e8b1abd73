"""Bringing a file's bytes to a GPU at the speed of the link: several threads, two pinned buffers each."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from ..shardplan.errors import CheckpointError

CHUNK = 64 << 20
"""Bytes a read; pinned memory is twice this a thread."""

MAX_THREADS = 16


def load_block(fd: int, offset: int, length: int, device: torch.device) -> torch.Tensor:
    """`length` bytes of `fd` from `offset` on, as a uint8 tensor [length] on `device`.

    Every thread takes every n-th chunk, so that reads stay roughly sequential on disk; host memory is bounded by
    2 * CHUNK bytes a thread. Raises CheckpointError when the file ends early.
    """
    block = torch.empty(length, dtype=torch.uint8, device=device)
    starts = range(0, length, CHUNK)
    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(starts)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: _copy_chunks(fd, offset, block, starts[i::threads]), range(threads)))
    torch.cuda.synchronize(device)
    return block


def _copy_chunks(fd: int, offset: int, block: torch.Tensor, starts: range) -> None:
    """Read chunks into two pinned buffers in turn, while the other one is on its way to the device."""
    size = min(CHUNK, block.numel())
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(min(2, len(starts)))]
    stream = torch.cuda.Stream(block.device)
    done: list[torch.cuda.Event | None] = [None] * len(buffers)
    for turn, start in enumerate(starts):
        which = turn % len(buffers)
        event = done[which]
        if event is not None:
            event.synchronize()
        count = min(CHUNK, block.numel() - start)
        buffer = buffers[which][:count]
        _read_exactly(fd, memoryview(buffer.numpy()), offset + start)
        with torch.cuda.stream(stream):
            block[start : start + count].copy_(buffer, non_blocking=True)
            done[which] = stream.record_event()
    stream.synchronize()


def _read_exactly(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"the rank file ends at byte {offset + done}", "copy the file again")
        done += count
