"""What the ranks of tests/cuda/test_collectives.py do; each job raises where something is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from mgtp.runtime.collectives.oneshot import OneShotCommunicator
from mgtp.runtime.communicator import Communicator
from mgtp.runtime.mesh import create_mesh

HIDDEN = 1024
BATCHES = (1, 2, 4, 8, 12, 16, 32, 64)
REPLAYS = 10
HAMMER_REPLAYS = 4000  # of 24 sums and 8 gathers


def with_oneshot(world: Communicator, devices: list[int], job: Callable[[OneShotCommunicator], Any]) -> Any:
    """job(communicator) over symmetric memory, rank r on GPU devices[r]."""
    device = torch.device("cuda", devices[world.rank])
    torch.cuda.set_device(device)
    shared = len(set(devices)) < len(devices)
    with torch.inference_mode():
        mesh = create_mesh({"tp": world.size}, device, backends={"tp": "oneshot"}, allow_shared_device=shared)
        assert isinstance(mesh.tp, OneShotCommunicator)
        mesh.tp.trust(fuses=True)  # the kernel that norms is to be right also where it was measured not to pay
        result = job(mesh.tp)
        torch.cuda.synchronize()
        mesh.close()
    return result


def parts(communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's tensor, the same in every process, on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for _ in range(communicator.size)]


def float32_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, not rounded."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def close(found: torch.Tensor, exact: torch.Tensor, roundings: int) -> None:
    """Within so many roundings of the dtype, relative to the largest partial sum."""
    eps = torch.finfo(found.dtype).eps
    assert not found.isnan().any(), "NaN: a rank did not come"
    assert (found.float() - exact).abs().max() <= roundings * eps * exact.abs().max()


def sums(world: Communicator, devices: list[int]) -> None:
    """Every dtype and way: one-shot, two-shot, fallback for what is too large, flat, or not a float."""

    def job(c: OneShotCommunicator) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((1, HIDDEN), (3, 104), (64, HIDDEN)):
                tensors = parts(c, shape, dtype, 1)
                assert c.method(tensors[c.rank]) == "one-shot"
                found = c.all_reduce(tensors[c.rank].clone())
                assert torch.equal(found, float32_sum(tensors).to(dtype)), (shape, dtype)
                roundings = 1 if c.fallback.backend == "host" else c.size
                close(c.fallback.all_reduce(tensors[c.rank].clone()), float32_sum(tensors), roundings)
        for shape, dtype in (
            ((1, HIDDEN), torch.bfloat16),
            ((6,), torch.int64),
            ((3, 129, 4), torch.float16),  # not of whole packets
            ((1 << 21,), torch.float32),  # too large
        ):
            tensors = [each.mul(100).to(dtype) for each in parts(c, shape, torch.float32, 3)]
            assert torch.equal(c.all_gather(tensors[c.rank]), torch.stack(tensors)), (shape, dtype)
        for shape, dtype, method in (
            ((1024, HIDDEN), torch.bfloat16, "two-shot"),
            ((8192, HIDDEN), torch.bfloat16, "fallback"),
            ((HIDDEN,), torch.bfloat16, "fallback"),
            ((3, 5), torch.bfloat16, "fallback"),
        ):
            tensors = parts(c, shape, dtype, 2)
            assert c.method(tensors[c.rank]) == method, (shape, c.method(tensors[c.rank]))
            close(c.all_reduce(tensors[c.rank].clone()), float32_sum(tensors), c.size)

    with_oneshot(world, devices, job)


def sent_or_not(c: OneShotCommunicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the norm is given of x W^T, of which up to 64 tokens in two bytes are sent."""
    from mgtp.runtime.kernels.linear import linear

    sent = c.send_product(x, weight)
    assert sent == (len(x) == 1 or (len(x) <= 64 and x.element_size() == 2))
    return x.new_empty((len(x), 0)) if sent else linear(x, weight)


def fused(world: Communicator, devices: list[int]) -> None:
    """Sum, residual add and norm in one kernel, against separate ones; the same of products that send themselves."""
    from mgtp.runtime.kernels.linear import linear
    from mgtp.runtime.kernels.norm import add_rms_norm

    def job(c: OneShotCommunicator) -> None:
        none = torch.ones(0, HIDDEN, dtype=torch.bfloat16, device="cuda")
        assert not c.send_product(none, torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda"))
        assert c.all_reduce_add_rms_norm(none, none, None, 1e-5, False, True)[1].shape == none.shape
        for dtype in (torch.bfloat16, torch.float32):
            for tokens in (1, 7, 64):
                tensors = parts(c, (tokens, HIDDEN), dtype, tokens)
                residual = parts(c, (tokens, HIDDEN), dtype, 90)[0]
                weight = parts(c, (1, HIDDEN), dtype, 91)[0][0]
                normed, total = c.all_reduce_add_rms_norm(tensors[c.rank], residual, weight, 1e-5, False, True)
                summed = float32_sum(tensors).to(dtype)
                expected, expected_total = add_rms_norm(summed, residual, weight, 1e-5)
                assert torch.equal(total, expected_total), (dtype, tokens)
                close(normed, expected.float(), 2)

                weights = [w * HIDDEN**-0.5 for w in parts(c, (2 * HIDDEN, HIDDEN), dtype, 92)]
                residual = parts(c, (tokens, 2 * HIDDEN), dtype, 93)[0]
                part = sent_or_not(c, tensors[c.rank], weights[c.rank])
                total = c.all_reduce_add_rms_norm(part, residual, None, 1e-5, False, True)[1]
                summed = float32_sum([linear(x, w) for x, w in zip(tensors, weights, strict=True)]).to(dtype)
                assert torch.equal(total, add_rms_norm(summed, residual, None, 1e-5)[1]), (dtype, tokens)

    with_oneshot(world, devices, job)


def replays(world: Communicator, devices: list[int]) -> None:
    """Graphs of both kernels for every batch size, replayed with changing inputs, against fresh sums."""

    def job(c: OneShotCommunicator) -> None:
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        graphs = {}
        for batch in BATCHES:
            x = torch.zeros(batch, HIDDEN, dtype=torch.bfloat16, device="cuda")

            def step(x: torch.Tensor = x) -> tuple[torch.Tensor, torch.Tensor]:
                total = c.all_reduce(x)
                return total, c.all_reduce_add_rms_norm(x, total, weight, 1e-5, False, True)[1]

            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # A stream of its own: torch's default one stays on the device where this process captured first.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                outcome = step()
            graphs[batch] = graph, x, outcome
        for seed in range(REPLAYS):
            for batch, (graph, x, (total, twice)) in graphs.items():
                tensors = parts(c, (batch, HIDDEN), torch.bfloat16, seed)
                x.copy_(tensors[c.rank])
                graph.replay()
                expected = float32_sum(tensors).bfloat16()
                assert torch.equal(total, expected), (batch, seed)
                assert torch.equal(twice, expected + expected), (batch, seed)

    with_oneshot(world, devices, job)


def hammer(world: Communicator, devices: list[int]) -> None:
    """Many sums one right after another, by ranks that are out of step at random, every one of them checked.

    Guards against packets that are overwritten before they are read, or taken for those of another call.
    """
    from mgtp.runtime.kernels.linear import linear

    shared = len(set(devices)) < len(devices)  # ranks that share a GPU wait for their turn at every sum

    def job(c: OneShotCommunicator) -> None:
        generator = torch.Generator("cuda").manual_seed(7)  # every rank knows what all ranks add
        sizes = (1, 64, 2, 128, 16, 1, 5, 32)
        adds = [torch.randn(c.size, n, HIDDEN, device="cuda", generator=generator).bfloat16() for n in sizes]
        states, weight = [a.clone() for a in adds], torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        matrix = torch.randn(HIDDEN, HIDDEN, device="cuda", generator=generator).mul(HIDDEN**-0.5).bfloat16()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def step() -> None:
            for state, add in zip(states, adds, strict=True):
                expected = float32_sum(list(state)).bfloat16()
                total = c.all_reduce(state[c.rank])
                twice = c.all_reduce_add_rms_norm(state[c.rank], total, weight, 1e-5, False, True)[1]
                # As in a model: one kernel makes the residual, the next one sends, then both are added.
                part = sent_or_not(c, state[c.rank], matrix)
                made = c.all_reduce_add_rms_norm(part, twice, weight, 1e-5, False, True)[1]
                wrong.add_((made != float32_sum([linear(x, matrix) for x in state]).bfloat16() + twice).sum())
                wrong.add_((total != expected).sum() + (twice != expected + expected).sum())
                wrong.add_((c.all_gather(state[c.rank]) != state).sum())
                state.copy_(expected * 0.5 + add)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            step()
        delays = random.Random(c.rank)
        for _ in range(10 if shared else HAMMER_REPLAYS):
            torch.cuda._sleep(delays.choice((0, 0, 1000, 100_000)))  # type: ignore[no-untyped-call]
            graph.replay()
        assert wrong.item() == 0
        graph.reset()

    with_oneshot(world, devices, job)


def refused(world: Communicator, devices: list[int]) -> str:
    """What a rank hears when ranks share a device and nobody allowed it."""
    from mgtp.shardplan.errors import MgtpError

    torch.cuda.set_device(devices[world.rank])
    device = torch.device("cuda", devices[world.rank])
    try:
        create_mesh({"tp": world.size}, device, backends={"tp": "oneshot"})
    except MgtpError as error:
        return error.message
    return ""
