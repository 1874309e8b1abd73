"""The one-shot all-reduce, with and without the norm: ranks are forked processes over shared memory, interpreted.

On GPUs tests/cuda/test_collectives.py runs the same kernel over symmetric memory.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.kernels import references

SECONDS = 120
MOST_BYTES = 1 << 16
BEFORE_THE_TURN = (1 << 31) - 3
"""Calls so far, as after a day of decoding: the third from now has the number -2^31."""
HELD_COLUMNS = (40, 0, 24)
"""Of a product's matrix, by rank: one holds no head."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in test_interpreted.py's own process")
    from mgtp.runtime.kernels import all_reduce

    monkeypatch.setattr(all_reduce, "MOST_PROGRAMS", 2)  # so that programs take several rows


def run_ranks(world: int, job: Callable, *args, absent: tuple[int, ...] = ()) -> None:
    """job(rank, workspace, *args) in a process a rank, but for `absent` ones; raises when one of them did."""
    from mgtp.runtime.kernels.all_reduce import MOST_PROGRAMS
    from mgtp.runtime.kernels.packets import Workspace, packet_area

    shared = [torch.zeros(packet_area(MOST_BYTES, world), dtype=torch.uint8).share_memory_() for _ in range(world)]
    addresses = torch.tensor([area.data_ptr() for area in shared])
    context = multiprocessing.get_context("fork")  # so that addresses are the same in every rank
    failures = context.SimpleQueue()

    def work(rank: int) -> None:
        try:
            counts = torch.full((MOST_PROGRAMS,), BEFORE_THE_TURN, dtype=torch.int32)
            job(rank, Workspace(addresses, counts, rank, MOST_BYTES), *args)
        except BaseException:
            failures.put(traceback.format_exc())

    ranks = [context.Process(target=work, args=(r,), daemon=True) for r in range(world) if r not in absent]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        assert not process.is_alive(), "a rank waits for ever"
    assert failures.empty(), failures.get()


def parts(world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def sums(rank: int, workspace, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    from mgtp.runtime.kernels.all_reduce import all_reduce

    for seed, shape in enumerate(shapes):
        tensors = parts(workspace.size, shape, dtype, seed)
        total = all_reduce(tensors[rank], workspace)
        expected = tensors[0].float()
        for t in tensors[1:]:
            expected = expected + t.float()
        if dtype == torch.bfloat16:  # the interpreter cuts bfloat16 off instead of rounding it
            assert ((total.float() - expected).abs() <= expected.abs() * torch.finfo(dtype).eps).all()
        else:
            assert torch.equal(total, expected.to(dtype)), (shape, dtype)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_sum_is_the_float32_sum_in_rank_order_rounded_once(world, kind):
    run_ranks(world, sums, DTYPES[kind], [(1, 8), (3, 104), (3, 4096), (1, 8), (2, 4100)])


def gathers(rank: int, workspace) -> None:
    from mgtp.runtime.kernels.all_reduce import all_gather, all_reduce

    for seed, (shape, dtype) in enumerate([((3,), torch.int32), ((2, 1028), torch.float32), ((1, 2), torch.bfloat16)]):
        tensors = [t.mul(100).to(dtype) for t in parts(workspace.size, shape, torch.float32, seed)]
        assert torch.equal(all_gather(tensors[rank], workspace), torch.stack(tensors))
        assert all_reduce(torch.ones(1, 8), workspace).eq(workspace.size).all()  # they take turns with sums


@pytest.mark.parametrize("world", [2, 3])
def test_gather_float32(world):
    run_ranks(world, gathers)


def broadcasts(rank: int, workspace) -> None:
    from mgtp.runtime.collectives.oneshot import OneShotCommunicator

    memory = SimpleNamespace(kernels=workspace, two_shot=False)
    communicator = OneShotCommunicator(memory, SimpleNamespace(rank=rank, size=workspace.size, capturable=True))  # type: ignore[arg-type]
    whole = torch.tensor([[1, 0, -5, 1 << 40], [7, 2, -(1 << 62), 0]])
    for value in (whole[0, 3], whole[1, 2:3], whole.t(), whole[:, 1].int(), whole != 0, (whole != 0)[1].to(torch.int8)):
        tensor = value.clone() if rank == 1 else torch.empty_like(value).fill_(1)
        assert communicator.broadcast(tensor, 1) is tensor and torch.equal(tensor, value)


def test_broadcast_of_any_dtype_is_in_place():
    run_ranks(2, broadcasts)


TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Relative errors below what the dtype's rounding explains; NaN never passes."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs).norm() / theirs.norm() < TOLERANCES[ours.dtype]


def norms(rank: int, workspace, dtype: torch.dtype) -> None:
    from mgtp.runtime.kernels.all_reduce import all_reduce_add_rms_norm

    for seed in range(3):
        tensors = parts(workspace.size, (3, 104), dtype, seed)
        residual, weight = parts(1, (3, 104), dtype, 50)[0], parts(1, (104,), dtype, 51)[0]
        for r, w, one_plus in ((residual, weight, False), (None, weight, True), (residual, None, False)):
            normed, total = all_reduce_add_rms_norm(tensors[rank], r, w, 1e-5, workspace, one_plus=one_plus)
            s = torch.stack([t.float() for t in tensors]).sum(0).to(dtype)
            close((normed, total), references.add_rms_norm(s, r, w, 1e-5, one_plus=one_plus))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_all_reduce_add_rms_norm(kind):
    run_ranks(2, norms, DTYPES[kind])


def sent_products(rank: int, workspace, dtype: torch.dtype) -> None:
    from mgtp.runtime.kernels.all_reduce import all_reduce_add_rms_norm
    from mgtp.runtime.kernels.linear import row_products, tile_products
    from mgtp.runtime.kernels.tilings import Tiling

    ways = [(1, row_products, Tiling(2, 16, 1)), (1, row_products, Tiling(8, 16, 1))]
    ways += [(3, tile_products, Tiling(16, 16, 1, 1, splits)) for splits in (1, 2)]
    for seed, (tokens, products, tiling) in enumerate(ways):
        xs, ws = (
            [x[:, :held].contiguous() for x, held in zip(parts(3, (n, 40), dtype, seed + n), HELD_COLUMNS, strict=True)]
            for n in (tokens, 52)
        )
        residual = parts(1, (tokens, 52), dtype, 50)[0]
        if (rank + seed) % 2:  # ranks may differ in who sends
            part = products(xs[rank], ws[rank], None, tiling)
        else:
            part = None
            assert products(xs[rank], ws[rank], None, tiling, to=workspace).shape == (tokens, 0)
        normed, total = all_reduce_add_rms_norm(part, residual, None, 1e-5, workspace)
        products_of_all = [(x.float() @ w.float().T).to(dtype).float() for x, w in zip(xs, ws, strict=True)]
        s = torch.stack(products_of_all).sum(0).to(dtype)
        close((normed, total), references.add_rms_norm(s, residual, None, 1e-5))


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_sum_of_what_products_have_sent(kind):
    run_ranks(3, sent_products, DTYPES[kind])


def test_sum_is_not_sent_where_another_product_is_faster_or_a_packet_takes_two_programs():
    from mgtp.runtime.kernels.linear import send_linear
    from mgtp.runtime.kernels.packets import Workspace

    nowhere = Workspace(torch.zeros(2), torch.zeros(1), 0, MOST_BYTES)
    assert not send_linear(torch.zeros(3, 64), torch.zeros(64, 64), nowhere), "several tokens of float32"
    assert not send_linear(torch.zeros(1, 4096).half(), torch.empty(8192, 4096, device="meta").half(), nowhere), (
        "single rows"
    )


def impatient(rank: int, workspace) -> None:
    from mgtp.runtime.kernels.all_reduce import all_gather, all_reduce

    assert all_reduce(torch.ones(1, 8), workspace, patience=3).isnan().all()
    found = all_gather(torch.ones(1, 8), workspace, patience=3)
    assert found[1].isnan().all()
    assert found[rank].eq(1).all()


def test_a_rank_that_does_not_come_makes_nan_not_a_wrong_sum():
    run_ranks(3, impatient, absent=(1,))
