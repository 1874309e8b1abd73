"""How many cache blocks a rank can afford, and the context length that follows, by the arithmetic of `mgtp plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..shardplan.config import ModelConfig
from ..shardplan.errors import DeviceError
from ..shardplan.fit import CacheNeeds, cache_needs
from ..shardplan.partition import Axis
from ..shardplan.values import counted


@dataclass(frozen=True)
class CacheDemand:
    """What bounds the cache: sequences at once, tokens of each, tokens a step, tokens a block that one rank keeps."""

    max_num_seqs: int
    max_model_len: int
    max_batch_tokens: int
    block_size: int
    cp_size: int = 1

    @property
    def block_span(self) -> int:
        """Tokens of a block on all ranks of the cp axis together."""
        return self.block_size * self.cp_size

    def needs(self, model: ModelConfig, axes: Mapping[str, Axis], rank: int, itemsize: int) -> CacheNeeds:
        """What `rank`'s cache takes; its groups are those of cache_layout.cache_groups."""
        return cache_needs(model, axes, rank, itemsize, self.cp_size, self.block_size, self.max_batch_tokens)


def plan_blocks(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, demand: CacheDemand, budget: int, itemsize: int
) -> list[int]:
    """Blocks of every cache group, the scratch block included, that fit in `budget` bytes beside the recurrent states.

    Enough for max_num_seqs full sequences when that fits, else a proportional part of it, at least one sequence.
    Raises DeviceError, with the length that would fit, when not even one does.
    """
    needs = demand.needs(model, axes, rank, itemsize)
    one, wanted = (needs.blocks(count, demand.max_model_len) for count in (1, demand.max_num_seqs))
    floor, full, states = needs.block_bytes(one), needs.block_bytes(wanted), needs.state_bytes(demand.max_num_seqs)
    if floor + states > budget:
        what = f"one sequence of {counted(demand.max_model_len, 'token')} needs {floor} bytes of KV cache"
        beside = f" beside {states} of recurrent states of {counted(demand.max_num_seqs, 'sequence')}" if states else ""
        ways = [f"give {floor + states} bytes or more with --kv-cache-memory", "use more ranks"]
        if fewer := _what_fits(model, axes, rank, demand, budget, itemsize):
            ways.insert(0, fewer)
        raise DeviceError(f"rank {rank}: {what}{beside}, there are {max(budget, 0)}", _either(ways))
    budget -= states
    if full <= budget:
        return wanted
    share = (budget - floor) / (full - floor)
    return [a + int((b - a) * share) for a, b in zip(one, wanted, strict=True)]


def _what_fits(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, demand: CacheDemand, budget: int, itemsize: int
) -> str:
    """Which option could be lowered, and to what, so that one sequence fits; empty where no single one would do."""

    def fits(smaller: CacheDemand) -> bool:
        needs = smaller.needs(model, axes, rank, itemsize)
        one = needs.block_bytes(needs.blocks(1, smaller.max_model_len))
        return one + needs.state_bytes(smaller.max_num_seqs) <= budget

    if longest := longest_context(model, axes, rank, demand, budget, itemsize):
        return f"lower --max-model-len to {longest}"
    needs = demand.needs(model, axes, rank, itemsize)
    if needs.state and fits(replace(demand, max_num_seqs=1)):
        one = needs.block_bytes(needs.blocks(1, demand.max_model_len))
        return f"lower --max-num-seqs to {(budget - one) // needs.state - 1}"
    sizes = [demand.block_size >> n for n in range(1, demand.block_size.bit_length())]
    smaller = next((size for size in sizes if fits(replace(demand, block_size=size))), None)
    return f"lower --block-size to {smaller}" if smaller else ""


def _either(ways: Sequence[str]) -> str:
    return f"{', '.join(ways[:-1])}{',' if len(ways) > 2 else ''} or {ways[-1]}"


def longest_context(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, demand: CacheDemand, budget: int, itemsize: int
) -> int:
    """The longest sequence, at most demand.max_model_len tokens, whose cache fits in `budget` bytes; 0 if none does.

    The recurrent states of all other sequences have their place too.
    """
    needs = demand.needs(model, axes, rank, itemsize)
    others = needs.state_bytes(demand.max_num_seqs) - needs.state_bytes(1)
    return needs.longest(budget - others, demand.max_model_len)
