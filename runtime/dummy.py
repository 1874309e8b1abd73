"""A model without a checkpoint, for measuring: planned from config.json alone, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shardplan.dtypes import COMMON_NAME, safetensors_name
from ..shardplan.errors import CheckpointError
from ..shardplan.families import model_tensors, parse_config
from ..shardplan.plan import RankPlan, effective_model
from ..shardplan.planner import make_plan
from ..shardplan.shard_set import ShardSet
from ..shardplan.sources.base import TensorInfo
from ..shardplan.sources.files import parse_json_object
from ..shardplan.sources.small_files import CONFIG_FILE

if TYPE_CHECKING:
    import torch

INITIALIZER_STD = 0.02
"""Standard deviation of the random weights: what models are initialised with, so that activations keep their size."""


@dataclass
class ConfigSource:
    """A Source with every tensor that a config calls for, and no weights."""

    label: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ("random weights",)
    fingerprint: None = None
    has_weights: bool = False

    def rows(self, name: str, start: int, stop: int):
        """There are none."""
        raise CheckpointError(f"{self.label}: {name} has no weights", "name a checkpoint")

    def identity(self) -> str:
        """Nothing is cached of it."""
        return self.label

    def close(self) -> None:
        """Nothing is held open."""


def dummy_shard_set(path: Path, tp_size: int, dtype: str = "auto") -> ShardSet:
    """The set that sharding would give for the model of a config.json, or of the folder it is in; no file is written."""
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        config = parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", "name a config.json, or a folder with one") from None
    model = parse_config(config)
    stated = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = safetensors_name(stated if dtype == "auto" else dtype)
    tensors = {spec.name: TensorInfo(spec.name, name, spec.shape) for spec in model_tensors(model)}
    plan = make_plan(ConfigSource(str(path), config, tensors), tp_size, COMMON_NAME[name])  # type: ignore[arg-type]
    return ShardSet(path, plan, config, effective_model(model, plan), {CONFIG_FILE: path.read_bytes()})


def random_block(plan: RankPlan, device: torch.device) -> torch.Tensor:
    """What a rank's data section could hold: normal weights from a seed of the rank's, ones where there is one dimension."""
    import torch

    from .weights import TORCH_DTYPE

    generator = torch.Generator(device).manual_seed(plan.rank)
    block = torch.zeros(plan.bytes - plan.data_offset, dtype=torch.uint8, device=device)
    for tensor in plan.tensors:
        if tensor.source is not None:
            values = block[tensor.offset : tensor.offset + tensor.bytes].view(TORCH_DTYPE[COMMON_NAME[tensor.dtype]])
            if len(tensor.shape) == 1:
                values.fill_(1.0)
            else:
                values.normal_(0.0, INITIALIZER_STD, generator=generator)
    return block
