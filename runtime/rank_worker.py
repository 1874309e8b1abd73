"""What a rank does from the first import of torch to the last step: load, warm up, serve steps."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import torch

from ..shardplan.errors import DeviceError
from ..shardplan.fit import StepSize, cache_budget, workspace_bytes
from ..shardplan.shard_set import ShardSet
from ..shardplan.values import counted
from . import memory, mesh, sampling, stages
from .blocks import SCRATCH_BLOCK, BlockPool
from .cache_layout import cache_groups
from .capacity import CacheDemand, longest_context, plan_blocks
from .dummy import dummy_shard_set, random_block
from .engine import Engine
from .engine_stats import StatsReporter
from .messages import (
    Abort,
    ClearCache,
    FrontMessage,
    Measure,
    Notice,
    Ready,
    Request,
    SequenceStep,
    Step,
    StepMessage,
    Stop,
    Tokens,
)
from .place import Place
from .rank_link import RankLink
from .rank_measures import answer
from .runner import Runner
from .scheduler import Scheduler
from .self_test import check_collectives, unequal_memory
from .weights import Weights, map_file, read_to_device

CONTEXT_SAMPLE_BYTES = 1 << 20
"""What is read of the file to make CUDA set up all that loading needs, before memory is first measured."""

WARM_UP_TOKENS = 1024
"""The longest prompt that warms up a device: all of it falls into the scratch block."""

CPU_MEMORY_FRACTION = 0.5
"""Part of the host's available memory that the KV caches of all ranks together may take."""


class RankWorker:
    """One rank at work."""

    def __init__(self, link: RankLink) -> None:
        self.link, self.options, self.rank = link, link.options, link.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        path, tp_size = Path(self.options.shard_set), self.options.tp_size
        dummy = self.options.dummy_dtype
        self.tp_rank = self.rank % tp_size  # ranks with the same one hold the same weights
        self.shard_set = dummy_shard_set(path, tp_size, dummy) if dummy else ShardSet.open(path, ranks=[self.tp_rank])
        self.plan = self.shard_set.plan
        self.file = self.shard_set.rank_path(self.tp_rank)
        self.shares_device = len(set(self.options.devices)) < len(self.options.devices)

    def run(self) -> None:
        """Start up, then serve until told to stop."""
        self.link.stage(stages.DEVICE)
        device = mesh.bind_device(self.options, self.local_rank)
        self.link.stage(stages.RENDEZVOUS)
        self.mesh = mesh.join(self.options, self.rank, device, self.link.folder)
        self.place = Place(device, self.mesh.tp, self.mesh.cp)
        self.link.stage(stages.SELF_TEST)
        for communicator in dict.fromkeys(self.mesh.axes.values()):
            check_collectives(communicator, device)
        self.compare_memory()
        self.link.stage(stages.LOAD)
        begin = time.monotonic()
        self.load()
        seconds = time.monotonic() - begin
        self.link.stage(stages.WARM_UP)
        self.allocate()
        self.warm_up()
        now = memory.take_snapshot(device)
        self.link.send(
            Ready(
                rank=self.rank,
                pid=os.getpid(),
                device=self.device_name(),
                weight_bytes=self.loaded_bytes,
                kv_cache_tokens=self.kv_cache_tokens,
                max_model_len=self.demand.max_model_len,
                load_seconds=seconds,
                device_used_bytes=now.total - now.free,
                device_total_bytes=now.total,
                axes=self.mesh.describe(),
            )
        )
        self.link.enter(stages.RUNNING)
        # What start-up made stays: looking through it for garbage would hold a step up for 100 ms now and then.
        gc.collect()
        gc.freeze()
        self.lead() if self.rank == 0 else self.follow()
        self.end()

    def end(self) -> None:
        """Leave the other ranks, once graphs are gone that hold on to their collectives."""
        self.runner.close()
        self.mesh.close()

    def compare_memory(self) -> None:
        """Leader: tell the user when other programs hold memory of some ranks' GPUs."""
        if self.place.device.type == "cuda" and not self.shares_device:
            free = torch.tensor([memory.take_snapshot(self.place.device).free], device=self.place.device)
            text = unequal_memory(self.mesh.gather(free).flatten().tolist())
            if text is not None and self.rank == 0:
                self.link.send(Notice(text))

    def load(self) -> None:
        """Map the rank's file (CPU) or copy it to the device as one block, and build the model on it."""
        device, rank_plan = self.place.device, self.plan.ranks[self.tp_rank]
        if device.type == "cuda" and self.shard_set.has_weights:
            # What streams, copies and pinned memory take of the device is the context's own, not the weights'.
            read_to_device(self.file, rank_plan, device, limit=CONTEXT_SAMPLE_BYTES)
            torch.cuda.empty_cache()
        self.before_load = self.memory_in_use()
        if not self.shard_set.has_weights:
            self.block = random_block(rank_plan, device)
        elif device.type == "cpu":
            self.block = map_file(self.file, rank_plan)
        else:
            self.block = read_to_device(self.file, rank_plan, device)
        self.runner = Runner(self.shard_set.model, self.plan, Weights(self.block, rank_plan), self.place)
        self.load_growth = self.memory_in_use() - self.before_load

    def memory_in_use(self) -> int:
        """Bytes, to be compared with what it is at another time."""
        return memory.take_snapshot(self.place.device, self.shares_device).used

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights that this rank holds now: what loading took, and on the CPU what is resident of the file."""
        return self.load_growth + self.mapped_bytes

    @property
    def mapped_bytes(self) -> int:
        """What is resident of the file, where it is used in place."""
        in_place = self.place.device.type == "cpu" and self.shard_set.has_weights
        return memory.resident_bytes(self.file) if in_place else 0

    def allocate(self) -> None:
        """Size the KV cache to the rank with the least room, and make it."""
        options, model, axes = self.options, self.shard_set.model, self.plan.shared_axes()
        itemsize = self.runner.dtype.itemsize
        budget = self.cache_budget()
        wanted = options.max_model_len or model.max_position
        sizes = options.max_batch_tokens, options.block_size, options.cp_size
        demand = CacheDemand(options.max_num_seqs, wanted, *sizes)
        if options.max_model_len is None:
            longest = longest_context(model, axes, self.tp_rank, demand, budget, itemsize)
            wanted = self.least(max(longest, min(options.block_size, model.max_position)))
        self.demand = CacheDemand(options.max_num_seqs, wanted, *sizes)
        blocks = plan_blocks(model, axes, self.tp_rank, self.demand, budget, itemsize)
        self.num_blocks = [self.least(count) for count in blocks]
        self.kv_cache_tokens = (self.num_blocks[0] - 1) * self.demand.block_span if self.num_blocks else wanted
        self.runner.allocate(self.num_blocks, options.block_size, options.max_num_seqs, wanted)

    def cache_budget(self) -> int:
        """Bytes that this rank's KV cache may take: as asked for, else a part of what is free."""
        free, on_cpu = memory.take_snapshot(self.place.device).free, self.place.device.type == "cpu"
        sharers = (
            self.options.num_ranks if on_cpu else self.options.devices.count(self.options.devices[self.local_rank])
        )
        asked = self.options.kv_cache_bytes
        if asked is None and on_cpu:
            return int(free * CPU_MEMORY_FRACTION) // sharers
        if asked is None:
            return self.gpu_budget(free // sharers)
        if asked > free // sharers:
            raise DeviceError(
                f"--kv-cache-memory asks for {asked} bytes, {free // sharers} are free",
                f"ask for less, or leave it out; {counted(sharers, 'rank')} on this memory",
            )
        return asked

    def gpu_budget(self, free: int) -> int:
        """What `mgtp plan` promises for the cache, of `free` bytes: a step needs memory too."""
        options, model, itemsize = self.options, self.shard_set.model, self.runner.dtype.itemsize
        length = options.max_model_len or model.max_position
        step = StepSize(options.max_batch_tokens, options.max_num_seqs, options.cp_size, length)
        workspace = workspace_bytes(model, self.plan.shared_axes(), self.tp_rank, itemsize, step)
        return cache_budget(free, workspace)

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        values = torch.tensor([value], dtype=torch.int64, device=self.place.device)
        for communicator in (self.place.communicator, self.place.context):
            values = communicator.all_gather(values).amin(0)
        return int(values)

    def warm_up(self) -> None:
        """Tokens through every layer, so that the first request finds everything in place, kernels compiled too."""
        logits = self.runner.forward(self.scratch_step(1))
        if self.place.device.type == "cuda":
            if self.rank == 0:
                sampling.warm_up(logits)
            self.runner.forward(self.largest_step())
            goes_on = self.scratch_step(1, max(1, self.longest_scratch - 1), start=1)  # a kernel of its own
            self.runner.forward(goes_on)
            torch.cuda.synchronize()
            if not self.options.enforce_eager:
                self.runner.capture()

    def scratch_step(self, batch: int, tokens: int = 1, start: int = 0) -> Step:
        """`tokens` of `batch` sequences in the slot behind those of all others, some of which may be running."""
        end = start + tokens
        blocks = [SCRATCH_BLOCK] * -(-end // self.demand.block_span)
        tables = [blocks for _ in cache_groups(self.shard_set.model)]
        return Step([SequenceStep(self.options.max_num_seqs, start, [0] * tokens, end, True, tables)] * batch)

    @property
    def longest_scratch(self) -> int:
        """Tokens of the prompts that warm the device up."""
        return min(WARM_UP_TOKENS, self.options.max_batch_tokens, self.demand.max_model_len)

    def largest_step(self) -> Step:
        """As many tokens as a step may have, in prompts that fall into the scratch block, behind a decoding sequence.

        It needs the memory that steps will need, and the kernels.
        """
        prompt = self.longest_scratch
        prompts = min(self.options.max_batch_tokens // prompt, self.options.max_num_seqs)
        return Step([*self.scratch_step(1).sequences, *self.scratch_step(prompts, prompt).sequences])

    def device_name(self) -> str:
        """'cpu', or 'cuda:0 (NVIDIA H200)'."""
        device = self.place.device
        return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"

    def lead(self) -> None:
        """Run the engine: take requests in between steps, hand out tokens, wait when there is nothing to do."""
        engine = self.make_engine()
        stats = StatsReporter(engine.scheduler, self.link.send)
        while True:
            message = self.link.receive(0 if engine.has_work else None)
            while message is not None:
                if isinstance(message, Stop):
                    self.link.send_step(message)
                    return
                self.obey(engine, message)
                message = self.link.receive(0)
            begin = time.monotonic()
            outputs, failures = engine.step()
            for failure in failures:
                self.link.send(failure)
            if outputs:
                self.link.send(Tokens(outputs))
            stats.note_step(begin, time.monotonic())

    def obey(self, engine: Engine, message: FrontMessage | StepMessage) -> None:
        """Do what the front says, between two steps."""
        if isinstance(message, Request):
            engine.add(message)
        elif isinstance(message, Abort):
            engine.abort(message.id)
        elif isinstance(message, ClearCache):
            engine.scheduler.clear_cache()
        elif isinstance(message, Measure):
            self.link.send_step(message)
            answer(self, message)

    def make_engine(self) -> Engine:
        """The leader's engine over all of the cache's blocks."""
        options = self.options
        pools = [
            BlockPool(group, count, self.demand.block_span)
            for group, count in zip(cache_groups(self.shard_set.model), self.num_blocks, strict=True)
        ]
        model = self.shard_set.model
        # A prefix can be shared only where its keys do not depend on what follows, and where all state is in blocks.
        sharable = not model.rope_depends_on_length and all(layer.delta_net is None for layer in model.layers)
        scheduler = Scheduler(pools, options.max_num_seqs, options.max_batch_tokens, prefix_caching=sharable)
        tokenizer = self.shard_set.files.get("tokenizer.json")
        on_gpu = self.place.device.type == "cuda"
        return Engine(self.runner, scheduler, self.demand.max_model_len, self.link.send_step, tokenizer, overlap=on_gpu)

    def follow(self) -> None:
        """Do what the leader says."""
        while not isinstance(message := self.link.receive(), Stop):
            if isinstance(message, Measure):
                answer(self, message)
            elif isinstance(message, Step):
                self.runner.forward(message)
                decided = message.greedy and self.runner.likeliest is not None
                if not decided and any(s.sample for s in message.sequences):
                    self.runner.settle(message, None)
