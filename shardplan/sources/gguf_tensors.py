"""Tensors of a GGUF file as Hugging Face checkpoints have them: names, row order, values.

llama.cpp's converter renames tensors and changes some of their values; both are undone here. D is the head dimension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ..errors import CheckpointError
from ..values import shown
from .base import TensorInfo
from .files import FileStamp, open_regular, read_bytes, read_rows
from .gguf_header import GgufTensor
from .gguf_metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: what the rotary frequencies are divided by. It ends up in the config, see gguf_config."""

_PLAIN = {
    GGMLQuantizationType.F64: "F64",
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(.+)")

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Arch:
    """A `general.architecture`: the Hugging Face class that reads its tensors, and what the converter did to them.

    `weights` and `biases` map the block tensors it may have. With `interleaved_heads` the rows of a q or k head are
    stored in the order in which llama.cpp rotates them; with `norms_plus_one` norm weights are stored as 1 + weight;
    with `rope_factors` the rotation may be scaled by a tensor.
    """

    architecture: str
    model_type: str
    weights: Mapping[str, str]
    biases: Mapping[str, str] = field(default_factory=dict)
    interleaved_heads: bool = False
    norms_plus_one: bool = False
    rope_factors: bool = False

    def block_names(self) -> dict[str, str]:
        """GGUF name within a block -> Hugging Face name within a layer."""
        return {f"{a}.weight": f"{b}.weight" for a, b in self.weights.items()} | {
            f"{a}.bias": f"{b}.bias" for a, b in self.biases.items()
        }


_QKV = {name: _ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v")}

ARCHS = {
    "llama": Arch(
        "LlamaForCausalLM",
        "llama",
        _PRE_NORMS | _ATTENTION | _MLP,
        _ATTENTION | _MLP,
        interleaved_heads=True,
        rope_factors=True,
    ),
    "qwen2": Arch("Qwen2ForCausalLM", "qwen2", _PRE_NORMS | _ATTENTION | _MLP, _QKV),
    "qwen3": Arch("Qwen3ForCausalLM", "qwen3", _PRE_NORMS | _ATTENTION | _HEAD_NORMS | _MLP, _ATTENTION),
    "gemma3": Arch(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA_NORMS | _ATTENTION | _HEAD_NORMS | _MLP, norms_plus_one=True
    ),
}


@dataclass(frozen=True)
class Weight:
    """A tensor under its Hugging Face name, and how its values come out of the file.

    `interleaved` is D when its rows are stored in rotation order, else 0; `offset` is added to every value.
    """

    info: TensorInfo
    stored: GgufTensor
    interleaved: int = 0
    offset: float = 0.0


def map_tensors(
    arch: Arch, stored: Mapping[str, GgufTensor], head_dim: int, num_layers: int, metadata: Metadata
) -> dict[str, Weight]:
    """Every weight by Hugging Face name, in file order; `rope_freqs.weight` is left out.

    Raises CheckpointError naming a tensor that `arch` does not have, whose type holds no values that can be read, or
    whose shape is wrong.
    """
    weights: dict[str, Weight] = {}
    block_names = arch.block_names()
    checked: set[GGMLQuantizationType] = set()
    for tensor in stored.values():
        if tensor.type not in checked:
            _check_type(tensor, metadata)
            checked.add(tensor.type)
        if tensor.name == ROPE_FACTORS and arch.rope_factors:
            continue
        name = _hugging_face_name(tensor.name, block_names, num_layers)
        if name is None:
            raise metadata.error(
                f"tensor {shown(tensor.name)} is not one that a {arch.architecture} with {num_layers} layers has",
                "this variant of the model cannot be read; use the original checkpoint",
            )
        weights[name] = _weight(arch, name, tensor, head_dim, metadata)
    return weights


def _hugging_face_name(name: str, block_names: Mapping[str, str], num_layers: int) -> str | None:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in block_names or int(match[1]) >= num_layers or match[1] != str(int(match[1])):
        return None
    return f"model.layers.{match[1]}.{block_names[match[2]]}"


def _weight(arch: Arch, name: str, tensor: GgufTensor, head_dim: int, metadata: Metadata) -> Weight:
    """The weight `name`, stored as `tensor`."""
    is_norm = name.endswith("norm.weight")
    dims = 1 if is_norm or name.endswith(".bias") else 2
    if len(tensor.shape) != dims:
        raise metadata.error(f"tensor {shown(tensor.name)} has shape {list(tensor.shape)}, not {dims} dimensions")
    interleaved = 0
    if arch.interleaved_heads and (".q_proj." in name or ".k_proj." in name):
        interleaved = head_dim
        if head_dim % 2 or tensor.shape[0] % head_dim:
            raise metadata.error(
                f"tensor {shown(tensor.name)} has {tensor.shape[0]} rows, not whole heads of {head_dim}"
            )
    offset = -1.0 if arch.norms_plus_one and is_norm else 0.0
    # A norm less one is exact in f32 only.
    dtype = "F32" if offset else _PLAIN.get(tensor.type, "F32")
    info = TensorInfo(name, dtype, tensor.shape, is_quantised=tensor.type not in _PLAIN)
    return Weight(info, tensor, interleaved, offset)


def _check_type(tensor: GgufTensor, metadata: Metadata) -> None:
    """Refuse a tensor type that gguf-py cannot turn into values, before anything is read."""
    if tensor.type in _PLAIN:
        return
    try:
        block = np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8)
        with np.errstate(all="ignore"):
            dequantize(block, tensor.type)
    except NotImplementedError:
        raise metadata.error(
            f"tensor {shown(tensor.name)} has type {tensor.type.name}, which cannot be turned into values",
            "use another quantisation of the model, such as Q4_K_M, Q8_0 or BF16",
        ) from None


class TensorReader:
    """Reads rows of weights. The file is open only while it is read, and must stay the one that was checked."""

    def __init__(self, path: Path, stamp: FileStamp) -> None:
        self._path = path
        self._stamp = stamp

    def rows(self, weight: Weight, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a weight seen as [shape[0], product of the rest]: a fresh array of weight.info.dtype.

        Reads and dequantises only these rows (and, in a q or k projection, up to one head more). Raises
        CheckpointError when the bytes cannot be read.
        """
        if weight.interleaved and start < stop:
            rows = _stored_rows(start, stop, weight.interleaved)
            first = int(rows.min())
            values = self._values(weight.stored, first, int(rows.max()) + 1)[rows - first]
        else:
            values = self._values(weight.stored, start, stop)
        if weight.offset:
            values = values.astype(np.float32, copy=False) + np.float32(weight.offset)
        return values

    def _values(self, stored: GgufTensor, start: int, stop: int) -> np.ndarray:
        """Stored rows [start, stop) as values, 2-D."""
        columns = math.prod(stored.shape[1:])
        if stored.type in _PLAIN:
            shape = (stored.shape[0], columns)
            return read_rows(self._path, self._stamp, stored.offset, _PLAIN[stored.type], shape, (start, stop))
        if start == stop:
            return np.empty((0, columns), np.float32)
        if len(stored.shape) == 1:  # one run of elements, each of which counts as a row
            return self._dequantised(stored, 0, 1).reshape(-1, 1)[start:stop].copy()
        return self._dequantised(stored, start, stop)

    def _dequantised(self, stored: GgufTensor, start: int, stop: int) -> np.ndarray:
        """Float32 values of the runs [start, stop) along the last dimension of a quantised tensor."""
        size = (stop - start) * stored.row_bytes
        with open_regular(self._path) as (fd, now):
            if now != self._stamp:
                raise CheckpointError(
                    f"{self._path}: the file changed while it was read", "run again when it is at rest"
                )
            raw = read_bytes(fd, self._path, stored.offset + start * stored.row_bytes, size)
        with np.errstate(all="ignore"):  # a damaged scale gives Inf or NaN, which whoever takes the values looks for
            return dequantize(np.frombuffer(raw, np.uint8).reshape(-1, stored.row_bytes), stored.type)


def _stored_rows(start: int, stop: int, head_dim: int) -> np.ndarray:
    """Where rows [start, stop) of a q or k projection are stored.

    Rotation pairs rows (i, i + D/2) of a head in Hugging Face checkpoints, rows (2i, 2i + 1) in llama.cpp.
    """
    head, within = np.divmod(np.arange(start, stop), head_dim)
    half, i = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * i + half
