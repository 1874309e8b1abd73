"""What ranks send each other from within kernels: packets of 8 bytes, written straight into the others' memory.

A packet has 4 bytes of data (one float32, or two numbers of 16 bits) and the number of the call. The hardware moves 8
aligned bytes in one piece, so a packet with the right number has its data: nothing else needs to be signalled, and what
is sent takes one way over the link (the idea of NCCL's LL protocol).

Two sets of packets take turns. A rank that sends call n + 2 has got call n + 1 of every rank, each of which had ended
call n by then: nobody reads what is overwritten. Calls are counted on the device, so that graphs can be replayed, and
the count comes round after four thousand million calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

DATA_BYTES, PACKET_BYTES, TURNS = 4, 8, 2


def packet_area(num_bytes: int, num_ranks: int) -> int:
    """Bytes that every rank has to share for messages of up to `num_bytes`."""
    return TURNS * num_ranks * num_bytes // DATA_BYTES * PACKET_BYTES


@dataclass(frozen=True)
class Workspace:
    """What kernels need of a group.

    `buffers`: addresses of every rank's `packet_area`, zero at first, int64 [ranks]. `counts`: calls so far, int32,
    one for every program that may receive, zero at first, this rank's alone. `most_bytes`: the largest message.
    """

    buffers: torch.Tensor
    counts: torch.Tensor
    rank: int
    most_bytes: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.buffers)

    @property
    def most_packets(self) -> int:
        """Packets of the largest message: where the next rank's begin."""
        return self.most_bytes // DATA_BYTES


@triton.jit
def as_numbers(data, half, HALVES: tl.constexpr, DTYPE: tl.constexpr):
    """float32 of the lower (0) or upper (1) half of int32 `data`, or of all of it where numbers have 32 bits."""
    if HALVES == 1:
        numbers = data.to(tl.float32, bitcast=True)
    else:
        numbers = (data >> (16 * half)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def as_data(low, high, HALVES: tl.constexpr, DTYPE: tl.constexpr):
    """int32 of numbers that are rounded to DTYPE: the opposite of `as_numbers`."""
    if HALVES == 1:
        data = low.to(tl.int32, bitcast=True)
    else:
        data = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        data = data | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return data


@triton.jit
def packets_of(buffers, rank):
    """Where a rank's packets begin: a pointer that is known to be aligned, for wide stores."""
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def send(data, at, inside, buffers, count, rank, most, WORLD: tl.constexpr):
    """int32 `data` as packets `at` of call `count`, to every rank."""
    packet = (data.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32)
    for ahead in tl.static_range(1, WORLD + 1):  # everyone begins with another rank, and ends with itself
        place = packets_of(buffers, (rank + ahead) % WORLD) + ((count & 1) * WORLD + rank) * most
        tl.store(place + at, packet, mask=inside)


@triton.jit
def receive(buffers, count, at, inside, most, patience, WORLD: tl.constexpr, HALVES: tl.constexpr, DTYPE: tl.constexpr):
    """(sums over ranks of the numbers in lower halves, in upper halves, whether all ranks have come), float32."""
    arrived, looks = 0, 0
    low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    while (arrived == 0) & (looks < patience):
        low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        right = inside
        for sender in tl.static_range(WORLD):
            place = buffers + ((count & 1) * WORLD + sender) * most + at
            packet = tl.load(place, mask=inside, other=0, volatile=True)
            right = right & ((packet >> 32).to(tl.int32) == count)
            low += as_numbers(packet.to(tl.int32), 0, HALVES, DTYPE)
            if HALVES == 2:
                high += as_numbers(packet.to(tl.int32), 1, HALVES, DTYPE)
        arrived = tl.min((right | (inside == 0)).to(tl.int32), 0)
        looks += 1
    return low, high, arrived


@triton.jit
def send_products(
    y, pair, tokens, inside, N, buffers, counts, rank, most,
    ROWS: tl.constexpr, WORLD: tl.constexpr, HALVES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Of y [ROWS, TOKENS], rounded to DTYPE, to every rank as its part of the next call's sum [tokens, N].

    `pair` [ROWS / HALVES]: where in a row of packets these rows of y are; `inside` [ROWS / HALVES, TOKENS].
    """
    low, high = y, y
    if HALVES == 2:
        low, high = tl.split(tl.permute(tl.reshape(y, [ROWS // 2, 2, y.shape[1]]), (0, 2, 1)))
    count = tl.load(counts) + 1
    at = tokens[None, :] * (N // HALVES) + pair[:, None]
    send(as_data(low, high, HALVES, DTYPE), at, inside, buffers, count, rank, most, WORLD)
