"""What tests let the ranks of a World do: functions of a communicator, run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgtp.runtime.communicator import Communicator, GroupCommunicator, SingleRank
from mgtp.runtime.messages import Request, SequenceStep, Step, Stop
from mgtp.runtime.options import RankOptions
from mgtp.runtime.place import Place
from mgtp.runtime.rank_worker import RankWorker
from mgtp.runtime.sampling_params import SamplingParams
from tests.pipe_communicator import PipeCommunicator
from tests.world import MeshRanks


@dataclass
class GroupLink:
    """Stands for a rank's sockets: steps reach the followers as the communicator's tensors do."""

    communicator: Communicator
    options: RankOptions

    @property
    def rank(self) -> int:
        return self.communicator.rank

    def send_step(self, message: Any) -> None:
        if isinstance(self.communicator, PipeCommunicator):
            self.communicator.broadcast_object(message)
        elif isinstance(self.communicator, GroupCommunicator):
            dist.broadcast_object_list([message], group=self.communicator.group, group_src=0)

    def receive(self, timeout: float | None = None) -> Any:
        if isinstance(self.communicator, PipeCommunicator):
            return self.communicator.broadcast_object(None)
        box = [None]
        dist.broadcast_object_list(box, group=self.communicator.group, group_src=0)  # type: ignore[attr-defined]
        return box[0]


def load_worker(ranks: Communicator | MeshRanks, shard_set: str, **options: Any) -> RankWorker:
    """A rank that is loaded and warm: on the GPU that the option `devices` has for it, or on the CPU."""
    devices: Sequence[int] = options.pop("devices", ())
    mesh = ranks if isinstance(ranks, MeshRanks) else MeshRanks(ranks, ranks, SingleRank())
    device = torch.device("cuda", devices[ranks.rank]) if devices else torch.device("cpu")
    rank_options = RankOptions(shard_set, mesh.tp.size, device.type, list(devices), mesh.cp.size, **options)
    worker = RankWorker(GroupLink(mesh.all, rank_options))  # type: ignore[arg-type]
    worker.place = Place(device, mesh.tp, mesh.cp)
    worker.load()
    worker.allocate()
    worker.warm_up()
    return worker


def full_logits(communicator: Communicator, shard_set: str, prompt: list[int]) -> torch.Tensor:
    """[T, V]: the logits of every token of one prompt, in one pass."""
    worker = load_worker(communicator, shard_set, max_num_seqs=1)
    return worker.runner.forward(prompt_step(worker, prompt, 0, len(prompt)), all_logits=True).clone()


def cached_logits(communicator: Communicator, shard_set: str, prompt: list[int], first: int) -> torch.Tensor:
    """[T - first + 1, V]: the logits after `first` tokens at once, then after each further token given one by one."""
    worker = load_worker(communicator, shard_set, max_num_seqs=1)
    steps = [(0, first), *((i, i + 1) for i in range(first, len(prompt)))]
    return torch.cat([worker.runner.forward(prompt_step(worker, prompt, a, b, first)) for a, b in steps])


def chunked_logits(communicator: Communicator, shard_set: str, prompt: list[int], size: int) -> torch.Tensor:
    """[T, V]: the logits of every token of one prompt, `size` tokens at once."""
    worker = load_worker(communicator, shard_set, max_num_seqs=1)
    spans = [(a, min(a + size, len(prompt))) for a in range(0, len(prompt), size)]
    steps = [prompt_step(worker, prompt, a, b, len(prompt)) for a, b in spans]
    return torch.cat([worker.runner.forward(step, all_logits=True) for step in steps])


def prompt_step(worker: RankWorker, prompt: list[int], start: int, stop: int, prompt_len: int = 0) -> Step:
    """A step that computes tokens [start, stop) of one prompt, with plain tables that never free a block."""
    blocks = -(-len(prompt) // worker.demand.block_span)
    tables = [list(range(1, blocks + 1)) for _ in worker.num_blocks]
    return Step([SequenceStep(0, start, prompt[start:stop], prompt_len or len(prompt), True, tables)])


def run_requests(
    communicator: Communicator, shard_set: str, prompts: list[list[int]], sampling: list[SamplingParams], **options: Any
) -> list[list[int]] | None:
    """The leader's output ids of many requests at once, all queued from the start; None on followers."""
    worker = load_worker(communicator, shard_set, **options)
    if communicator.rank > 0:
        worker.follow()
        worker.runner.close()
        return None
    engine = worker.make_engine()
    for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add(Request(str(i), prompt, params, []))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        tokens, failures = engine.step()
        assert not failures, failures
        for token in tokens:
            outputs[token.id].append(token.token_id)
    worker.link.send_step(Stop())
    worker.runner.close()
    return list(outputs.values())


def greedy(communicator: Communicator, shard_set: str, prompt: list[int], count: int, **options: Any) -> list[int]:
    """`count` greedy ids after one prompt (on followers: an empty list)."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    result = run_requests(communicator, shard_set, [prompt], [params], max_num_seqs=1, **options)
    return result[0] if result else []


def shard(model: Path | str, out: Path, tp_size: int, dtype: str = "float32") -> str:
    """A shard set of `model`, made without the command line."""
    from mgtp.shardplan.planner import make_plan
    from mgtp.shardplan.sources import open_source
    from mgtp.shardplan.writer import write_shards

    source = open_source(str(model))
    write_shards(source, make_plan(source, tp_size, dtype), out)
    return str(out)
