"""A model without a checkpoint: what a config.json alone calls for, to plan it or to run it with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dtypes import safetensors_name
from ..errors import CheckpointError
from ..families import model_tensors, parse_config
from .base import TensorInfo
from .files import is_gguf, parse_json_object
from .small_files import CONFIG_FILE

if TYPE_CHECKING:
    import numpy as np


@dataclass
class ConfigSource:
    """A Source with every tensor that a config calls for, and no weights."""

    label: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: Sequence[str] = ("random weights",)
    fingerprint: str | None = None
    has_weights: bool = False

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """There are none."""
        raise CheckpointError(f"{self.label}: {name} has no weights", "name a checkpoint")

    def identity(self) -> str:
        """Nothing is cached of it."""
        return self.label

    def close(self) -> None:
        """Nothing is held open."""


def open_config(path: Path, dtype: str = "auto") -> ConfigSource:
    """The model of a config.json, or of the one in a folder; `dtype` auto: the one it names, else bfloat16."""
    path = path / CONFIG_FILE if path.is_dir() else path
    if is_gguf(path):
        raise CheckpointError(f"{path}: a GGUF file, not a config.json", "leave --dummy-weights out to use its weights")
    try:
        config = parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", "name a config.json, or a folder with one") from None
    stated = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = safetensors_name(stated if dtype == "auto" else dtype)
    tensors = {
        spec.name: TensorInfo(spec.name, name, spec.shape) for spec in model_tensors(parse_config(config, str(path)))
    }
    return ConfigSource(str(path), config, tensors)
