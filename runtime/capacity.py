"""How many cache blocks a rank can afford, and the context length that follows. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..shardplan.config import ModelConfig
from ..shardplan.errors import DeviceError
from ..shardplan.partition import Axis
from ..shardplan.recurrent_state import state_bytes
from .cache_layout import CacheGroup, block_bytes, cache_groups


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

    def blocks_per_sequence(self, group: CacheGroup) -> int:
        """Blocks that one sequence of full length can own: a window keeps what one step's queries can see."""
        tokens = self.max_model_len
        if group.window is not None:
            tokens = min(tokens, group.window + min(self.max_batch_tokens, self.max_model_len) + self.block_span)
        return -(-tokens // self.block_span)


def plan_blocks(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, demand: CacheDemand, budget: int, itemsize: int
) -> list[int]:
    """Blocks of every cache group, the scratch block included, that fit in `budget` bytes beside the recurrent states.

    Enough for max_num_seqs full sequences when that fits, else a proportional part of it, at least one sequence.
    Raises DeviceError, with the length that would fit, when not even one does.
    """
    groups = cache_groups(model)
    size = [block_bytes(model, axes, rank, g, demand.block_size, itemsize) for g in groups]
    one = [demand.blocks_per_sequence(g) + 1 for g in groups]
    wanted = [demand.blocks_per_sequence(g) * demand.max_num_seqs + 1 for g in groups]
    floor, full = _cost(one, size), _cost(wanted, size)
    states = states_bytes(model, axes, rank, demand.max_num_seqs, itemsize)
    if states > max(budget, 0):
        sequences = max(0, budget) // state_bytes(model, axes, rank, itemsize) - 1
        raise DeviceError(
            f"rank {rank}: the recurrent states of {demand.max_num_seqs} sequences need {states} bytes, "
            f"there are {max(budget, 0)}",
            f"lower --max-num-seqs to {sequences}, or use more ranks" if sequences > 0 else "use more ranks",
        )
    if floor > budget - states:
        longest = longest_context(model, axes, rank, demand, budget, itemsize)
        fits = f"lower --max-model-len to {longest}" if longest else "lower --max-num-seqs or --block-size"
        raise DeviceError(
            f"rank {rank}: one sequence of {demand.max_model_len} tokens needs {floor} bytes of KV cache"
            f"{f' beside {states} of recurrent states' if states else ''}, there are {max(budget, 0)}",
            f"{fits}, give {floor + states} bytes or more with --kv-cache-memory, or use more ranks",
        )
    budget -= states
    if full <= budget:
        return wanted
    share = (budget - floor) / (full - floor)
    return [a + int((b - a) * share) for a, b in zip(one, wanted, strict=True)]


def longest_context(
    model: ModelConfig, axes: Mapping[str, Axis], rank: int, demand: CacheDemand, budget: int, itemsize: int
) -> int:
    """The longest sequence, at most demand.max_model_len tokens, whose cache fits in `budget` bytes; 0 if none does."""
    budget -= states_bytes(model, axes, rank, demand.max_num_seqs, itemsize)
    groups = cache_groups(model)
    size = [block_bytes(model, axes, rank, g, demand.block_size, itemsize) for g in groups]

    def fits(blocks: int) -> bool:
        d = replace(demand, max_model_len=blocks * demand.block_span)
        return _cost([d.blocks_per_sequence(g) + 1 for g in groups], size) <= budget

    low, high = 0, -(-demand.max_model_len // demand.block_span)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * demand.block_span, demand.max_model_len)


def states_bytes(model: ModelConfig, axes: Mapping[str, Axis], rank: int, max_num_seqs: int, itemsize: int) -> int:
    """Bytes of the recurrent states of all sequences, and of the scratch slot; the same at any context length."""
    return (max_num_seqs + 1) * state_bytes(model, axes, rank, itemsize)


def _cost(blocks: list[int], size: list[int]) -> int:
    return sum(b * s for b, s in zip(blocks, size, strict=True))
