"""A GGUF file as a checkpoint: everything a Hugging Face folder would hold, rebuilt from the one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..values import counted, shown
from .base import TensorInfo
from .files import FileStamp, identity_of, open_regular
from .gguf_config import Shape, architecture, build_config, read_shape, unused_keys
from .gguf_header import GgufTensor, read_header
from .gguf_metadata import Metadata
from .gguf_tensors import ROPE_FACTORS, TensorReader, Weight, map_tensors
from .gguf_tokenizer import tokenizer_config, tokenizer_json
from .gguf_vocab import Vocab, read_vocab

if TYPE_CHECKING:
    import numpy as np

_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_TEMPLATE_PREFIX = "tokenizer.chat_template."


@dataclass(eq=False)
class GgufSource:
    """A Source over a GGUF file. Quantised tensors come out as float32; only the rows asked for are read."""

    label: str
    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    notes: Sequence[str]
    weights: Mapping[str, Weight]
    stamp: FileStamp
    fingerprint: str | None = None
    has_weights: bool = True

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor seen as [shape[0], product of the rest]; raises CheckpointError."""
        return TensorReader(self.path, self.stamp).rows(self.weights[name], start, stop)

    def identity(self) -> str:
        """A digest of the file's path, inode, size and mtime, as they were when it was opened."""
        return identity_of({str(self.path.absolute()): self.stamp})

    def close(self) -> None:
        """Nothing is held open."""


def open_gguf(path: Path, label: str) -> GgufSource:
    """Open a GGUF file and check its header, its tensors' names, types and places, and its vocabulary.

    Raises CheckpointError, naming `path` and the reason, for a file that is not a complete GGUF model of a supported
    architecture. Asking for `files["tokenizer.json"]` builds it, and raises CheckpointError when that fails.
    """
    with open_regular(path) as (fd, stamp), open(fd, "rb", buffering=1 << 20, closefd=False) as file:
        try:
            metadata, stored = read_header(file, stamp.size, str(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}", "check the disk") from None
    _refuse_splits(metadata)
    name, arch = architecture(metadata)
    shape = read_shape(metadata, name, len(stored))
    weights = map_tensors(arch, stored, shape.head_dim, shape.num_layers, metadata)
    factors = _rope_factors(TensorReader(path, stamp), stored, shape, metadata) if arch.rope_factors else None
    config = build_config(metadata, name, shape, weights, factors)
    vocab, notes = read_vocab(metadata)
    if len(vocab.tokens) > config["vocab_size"]:
        tokens, rows = counted(len(vocab.tokens), "token"), counted(config["vocab_size"], "row")
        raise metadata.error(f"{tokens}, but only {rows} in 'token_embd.weight'")
    # Null where the file has none: readers of a config fall back to their class's ids when the key is absent.
    config |= {f"{role}_token_id": vocab.special.get(role) for role in ("bos", "eos", "pad")}
    files = _small_files(metadata, config, vocab, notes)
    notes += [f"metadata {shown(key)} is not used" for key in unused_keys(metadata, name)]
    tensors = {name: weight.info for name, weight in weights.items()}
    return GgufSource(label, path, config, files, tensors, notes, weights, stamp)


def _refuse_splits(metadata: Metadata) -> None:
    count = metadata.integer("split.count", 1)
    if count > 1:
        raise metadata.error(
            f"this is one of {count} parts of a split model",
            "join them with `llama-gguf-split --merge` and give the result",
        )


def _rope_factors(
    reader: TensorReader, stored: Mapping[str, GgufTensor], shape: Shape, metadata: Metadata
) -> np.ndarray | None:
    """The values of rope_freqs.weight, one a pair of dimensions that rotate together."""
    tensor = stored.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape != (shape.head_dim // 2,):
        raise metadata.error(f"tensor {ROPE_FACTORS!r} has shape {list(tensor.shape)}, not [{shape.head_dim // 2}]")
    return reader.rows(Weight(TensorInfo(tensor.name, "F32", tensor.shape), tensor), 0, tensor.shape[0])


def _small_files(metadata: Metadata, config: Mapping[str, Any], vocab: Vocab, notes: list[str]) -> Mapping[str, bytes]:
    """The files of a Hugging Face folder apart from the weights."""
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(_generation_config(metadata, config, vocab)),
        "tokenizer_config.json": _json(tokenizer_config(vocab, config["max_position_embeddings"])),
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template").encode()
    notes += [
        f"{shown(key)} is left out: only the default chat template is used"
        for key in metadata.unasked(_TEMPLATE_PREFIX)
    ]
    return _Files(files, {"tokenizer.json": lambda: tokenizer_json(vocab, metadata).encode()})


class _Files(Mapping[str, bytes]):
    """Small files by name; those in `makers` are made when they are first asked for.

    tokenizer.json takes two seconds for a vocabulary of 262144 tokens, which a plan does not need.
    """

    def __init__(self, made: dict[str, bytes], makers: Mapping[str, Callable[[], bytes]]) -> None:
        self._made = made
        self._makers = makers

    def __getitem__(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._made, *self._makers}))

    def __len__(self) -> int:
        return len({*self._made, *self._makers})


def _generation_config(metadata: Metadata, config: Mapping[str, Any], vocab: Vocab) -> dict[str, Any]:
    """Ids that begin and end a reply, and how the model wants to be sampled where it says so."""
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config[key] is not None}
    ends = vocab.end_ids()
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for key, name in _SAMPLING.items():
        if f"general.sampling.{key}" in metadata:
            value = metadata.number(f"general.sampling.{key}")
            generation[name] = int(value) if name == "top_k" else value
    return generation


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
