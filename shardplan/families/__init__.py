"""The supported model families. One module each: ARCHITECTURES, parse(config), tensors(model).

The forward pass of a family lives in the module of the same name in runtime/models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..config import ModelConfig, located, text_config
from ..errors import CheckpointError
from ..partition import TensorSpec
from ..values import shown
from .common import architecture

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma4",
    "ernie4_5",
    "hunyuan_v1_dense",
    "phi3",
    "granite",
    "glm4",
    "qwen3_5",
    "olmo2",
    "olmo3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
)


def family_module(name: str) -> ModuleType:
    """The shardplan module of a family."""
    return import_module(f"{__name__}.{name}")


def parse_config(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that config.json describes.

    Raises CheckpointError, starting with `where` and naming the key, for an unknown architecture, an option that is not
    implemented, or a bad value.
    """
    with located(where):
        return _parse(config)


def _parse(config: Mapping[str, Any]) -> ModelConfig:
    name = architecture(config)
    for level in (config, text_config(config)):
        settings = level.get("quantization_config")
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else settings
            raise CheckpointError(
                f"quantised checkpoints are not supported (quantization_config: {shown(method)})",
                "use the model's unquantised weights",
            )
    for family in FAMILIES:
        module = family_module(family)
        if name in module.ARCHITECTURES:
            return module.parse(config)
    supported = sorted(a for f in FAMILIES for a in family_module(f).ARCHITECTURES)
    raise CheckpointError(f"architectures: {shown(name)} is not supported", f"supported: {', '.join(supported)}")


def model_tensors(model: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of `model` in the order of use, with the way it is cut."""
    return family_module(model.family).tensors(model)


def is_unused(model: ModelConfig, name: str) -> bool:
    """Whether a checkpoint of `model` may hold the tensor `name` (canonical) without it playing a part."""
    family = family_module(model.family)
    return hasattr(family, "is_unused") and family.is_unused(model, name)
