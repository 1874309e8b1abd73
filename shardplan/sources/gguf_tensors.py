"""Tensors of a GGUF file as Hugging Face checkpoints have them: names, row order, values.

llama.cpp's converter renames tensors and changes some of their values; both are undone here. D is the head dimension.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ..dtypes import numpy_dtype
from ..errors import CheckpointError
from .base import TensorInfo
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
    stored in the order in which llama.cpp rotates them; with `norms_plus_one` norm weights are stored as 1 + weight.
    """

    architecture: str
    model_type: str
    weights: Mapping[str, str]
    biases: Mapping[str, str] = field(default_factory=dict)
    interleaved_heads: bool = False
    norms_plus_one: bool = False

    def block_names(self) -> dict[str, str]:
        """GGUF name within a block -> Hugging Face name within a layer."""
        return {f"{a}.weight": f"{b}.weight" for a, b in self.weights.items()} | {
            f"{a}.bias": f"{b}.bias" for a, b in self.biases.items()
        }


_QKV = {name: _ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v")}

ARCHS = {
    "llama": Arch(
        "LlamaForCausalLM", "llama", _PRE_NORMS | _ATTENTION | _MLP, _ATTENTION | _MLP, interleaved_heads=True
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
        if tensor.name == ROPE_FACTORS and arch.interleaved_heads:
            continue
        name = _hugging_face_name(tensor.name, block_names, num_layers)
        if name is None:
            raise metadata.error(
                f"tensor {tensor.name!r} is not one that a {arch.architecture} with {num_layers} layers has",
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
        raise metadata.error(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, not {dims} dimensions")
    interleaved = 0
    if arch.interleaved_heads and (".q_proj." in name or ".k_proj." in name):
        interleaved = head_dim
        if head_dim % 2 or tensor.shape[0] % head_dim:
            raise metadata.error(f"tensor {tensor.name!r} has {tensor.shape[0]} rows, not whole heads of {head_dim}")
    offset = -1.0 if arch.norms_plus_one and is_norm else 0.0
    # A norm less one is exact in f32 only.
    dtype = "F32" if offset else _PLAIN.get(tensor.type, "F32")
    return Weight(TensorInfo(name, dtype, tensor.shape), tensor, interleaved, offset)


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
            f"tensor {tensor.name!r} has type {tensor.type.name}, which cannot be turned into values",
            "use another quantisation of the model, such as Q4_K_M, Q8_0 or BF16",
        ) from None


class TensorReader:
    """Reads rows of weights from an open file, which stays the caller's; errors name `label`."""

    def __init__(self, fd: int, label: str) -> None:
        self._fd = fd
        self._label = label

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
        if len(stored.shape) == 1:  # one run of elements, each of which counts as a row
            whole = _decode(self._bytes(stored, 0, 1), stored.type)
            return whole.reshape(-1, 1)[start:stop].copy()
        return _decode(self._bytes(stored, start, stop), stored.type)

    def _bytes(self, stored: GgufTensor, start: int, stop: int) -> np.ndarray:
        """The bytes of stored rows [start, stop), as [rows, row_bytes].

        Read, not mapped: pages of a mapping would count as this process's memory for as long as it is open.
        """
        data = np.empty((stop - start, stored.row_bytes), np.uint8)
        view = data.data.cast("B") if data.size else memoryview(b"")
        offset, done = stored.offset + start * stored.row_bytes, 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                reason = f"{self._label}: tensor {stored.name!r} cannot be read: {error.strerror}"
                raise CheckpointError(reason, "check the disk and the file") from None
            if count == 0:
                reason = f"{self._label}: tensor {stored.name!r} ends early, the file was cut while it was read"
                raise CheckpointError(reason, "leave the file alone while it is read, and start again")
            done += count
        return data


def _stored_rows(start: int, stop: int, head_dim: int) -> np.ndarray:
    """Where rows [start, stop) of a q or k projection are stored.

    Rotation pairs rows (i, i + D/2) of a head in Hugging Face checkpoints, rows (2i, 2i + 1) in llama.cpp.
    """
    head, within = np.divmod(np.arange(start, stop), head_dim)
    half, i = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * i + half


def _decode(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Values of raw rows [n, row_bytes]."""
    if kind in _PLAIN:
        return data.view(numpy_dtype(_PLAIN[kind]))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if len(data) == 0:
        return np.empty((0, data.shape[1] // block_bytes * block), np.float32)
    with np.errstate(all="ignore"):  # a damaged scale gives Inf or NaN, which whoever takes the values looks for
        return dequantize(data, kind)
