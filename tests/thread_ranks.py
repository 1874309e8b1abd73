"""Ranks as threads of one process, for tests that change what ranks do: no files, no processes, no pickling.

ranks = ThreadRanks(folder, tp_size=3)
ranks.full(prompt), ranks.cached(prompt, first=5), ranks.chunked(prompt, size=7)      rank 0's logits
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mgtp.runtime.cache_layout import cache_groups
from mgtp.runtime.messages import SequenceStep, Step
from mgtp.runtime.place import Place
from mgtp.runtime.runner import Runner
from mgtp.runtime.weights import TORCH_DTYPE, Weights
from mgtp.shardplan.families import parse_config
from mgtp.shardplan.plan import RankPlan, effective_model
from mgtp.shardplan.planner import make_plan
from mgtp.shardplan.sources import open_source

BLOCK_SIZE = 16
SECONDS = 60


class ThreadCommunicator:
    """Collectives between threads: everybody puts a tensor down, then takes all of them up."""

    backend, capturable = "threads", False

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self.barrier, self.table = rank, size, barrier, table

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added up in rank order."""
        return self.all_gather(tensor).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape] in rank order."""
        self.table[self.rank] = tensor.clone()
        self.barrier.wait(SECONDS)
        gathered = torch.stack(self.table)
        self.barrier.wait(SECONDS)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`source`'s tensor."""
        return self.all_gather(tensor)[source]

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before."""
        return self.all_gather(tensor)[self.rank - 1]


class ThreadRanks:
    """A checkpoint cut for `tp_size` ranks, in memory."""

    def __init__(self, folder: Path, tp_size: int, dtype: str = "float32", max_num_seqs: int = 4) -> None:
        source = open_source(str(folder))
        plan = make_plan(source, tp_size, dtype)
        model = effective_model(parse_config(source.config), plan)
        tensors = {k: v.to(TORCH_DTYPE[dtype]) for k, v in load_file(folder / "model.safetensors").items()}
        self.num_groups = len(cache_groups(model))
        self.barrier, table = threading.Barrier(tp_size), [None] * tp_size
        self.runners = []
        for rank in plan.ranks:
            place = Place(torch.device("cpu"), ThreadCommunicator(rank.rank, tp_size, self.barrier, table))
            runner = Runner(model, plan, Weights(rank_block(rank, tensors), rank), place)
            runner.allocate([1 + 16 * max_num_seqs] * self.num_groups, BLOCK_SIZE, max_num_seqs, 256)
            self.runners.append(runner)

    def run(self, job: Callable[[Runner], torch.Tensor]) -> torch.Tensor:
        """Let every rank do `job`; rank 0's result. Raises what a rank raised."""
        results: dict[int, torch.Tensor] = {}
        errors: list[BaseException] = []

        def work(runner: Runner) -> None:
            try:
                results[runner.place.communicator.rank] = job(runner)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(runner,)) for runner in self.runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def full(self, prompt: list[int], slot: int = 0) -> torch.Tensor:
        """[T, V] in one pass."""
        return self.chunked(prompt, len(prompt), slot)

    def chunked(self, prompt: list[int], size: int, slot: int = 0) -> torch.Tensor:
        """[T, V], `size` tokens a pass."""
        steps = [self.step(prompt, a, min(a + size, len(prompt)), slot) for a in range(0, len(prompt), size)]
        return self.run(lambda runner: torch.cat([runner.forward(step, all_logits=True) for step in steps]))

    def cached(self, prompt: list[int], first: int, slot: int = 0) -> torch.Tensor:
        """[T - first + 1, V] after `first` tokens at once, then token by token."""
        spans = [(0, first), *((i, i + 1) for i in range(first, len(prompt)))]
        steps = [self.step(prompt, a, b, slot, first) for a, b in spans]
        return self.run(lambda runner: torch.cat([runner.forward(step) for step in steps]))

    def step(self, prompt: list[int], start: int, stop: int, slot: int = 0, prompt_len: int = 0) -> Step:
        """A step that computes tokens [start, stop) of one sequence in `slot`, in blocks of its own.

        The first `prompt_len` tokens (0: all) count as given, the others as generated.
        """
        return Step([self.part(prompt, start, stop, slot, prompt_len)])

    def part(self, prompt: list[int], start: int, stop: int, slot: int, prompt_len: int = 0) -> SequenceStep:
        """What `step` holds."""
        table = [1 + 16 * slot + i for i in range(-(-len(prompt) // BLOCK_SIZE))]
        return SequenceStep(slot, start, prompt[start:stop], prompt_len or len(prompt), True, [table] * self.num_groups)


def rank_block(rank: RankPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a rank's file, put together from the whole tensors by the plan's slices."""
    block = torch.zeros(rank.bytes - rank.data_offset, dtype=torch.uint8)
    for t in rank.tensors:
        if t.source is None:
            continue
        part = tensors[t.name]
        if t.source.dim is not None:
            part = torch.cat([part.narrow(t.source.dim, a, b - a) for a, b in t.source.ranges], dim=t.source.dim)
        block[t.offset : t.offset + t.bytes] = part.contiguous().flatten().view(torch.uint8)
    return block
