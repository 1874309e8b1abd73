"""Which files hold a checkpoint's weights, and which file each tensor is taken from. Names only, no file is opened.

The index is the authority: only the files it names count, and each tensor comes from the file it names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from ..errors import CheckpointError
from ..values import counted, shown
from .files import DOWNLOAD_AGAIN, is_gguf, parse_json_object

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_config.json"

_ADAPTER_WEIGHTS = re.compile(r"adapter_model.*\.safetensors")
_PART = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
_RANK = re.compile(r"rank-\d+-of-\d+\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

Entry = TypeVar("Entry")


def read_index(content: bytes, where: str) -> dict[str, str]:
    """The weight map of an index: tensor name -> file name.

    Raises CheckpointError starting with `where` for anything malformed and for a file name that leaves the folder.
    """
    weight_map = parse_json_object(content, where, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map must map tensor names to file names", DOWNLOAD_AGAIN)
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise CheckpointError(
                f"{where}: tensor {shown(tensor)} is placed in {shown(file)}, which is not a file of the folder",
                "take the index from the model's repository",
            )
    return weight_map


def choose_weights_file(names: Collection[str], where: str) -> str:
    """The one safetensors file of a checkpoint that has no index; `names` are the files beside its config.json.

    Raises CheckpointError, with the way out, when there is none or more than one.
    """
    if ADAPTER_FILE in names and WEIGHTS_FILE not in names:
        raise CheckpointError(
            f"{where}: a LoRA adapter ({ADAPTER_FILE}), not a model",
            "merge it into its base model first (PEFT: merge_and_unload, then save_pretrained)",
        )
    if WEIGHTS_FILE in names:
        return WEIGHTS_FILE
    found = sorted(n for n in names if n.endswith(".safetensors") and not _ADAPTER_WEIGHTS.fullmatch(n))
    if not found:
        raise _no_safetensors(names, where)
    if all(_RANK.fullmatch(name) for name in found):
        raise CheckpointError(
            f"{where}: rank files without plan.json: a shard set that was not finished", "run mgtp shard again"
        )
    part = _PART.fullmatch(found[0])
    if len(found) > 1 or (part and int(part[2]) > 1):
        raise CheckpointError(
            f"{where}: {INDEX_FILE} is missing, which says what to take from {', '.join(found)}",
            "download the index too; without one there must be a single safetensors file",
        )
    return found[0]


def check_files_exist(index: Mapping[str, str], names: Collection[str], where: str) -> None:
    """Raise CheckpointError listing every file that the index names and `names` lacks."""
    wanted = set(index.values())
    missing = sorted(wanted.difference(names))
    if missing:
        raise CheckpointError(
            f"{where}: missing {len(missing)} of {counted(len(wanted), 'file')} in {INDEX_FILE}: {', '.join(missing)}",
            "download the missing files",
        )


def pick_tensors(
    index: Mapping[str, str], held: Mapping[str, Mapping[str, Entry]], where: str
) -> tuple[dict[str, tuple[str, Entry]], list[str]]:
    """Take each tensor from the file that the index gives it: (tensor -> (file, entry), notes).

    `held` maps each file to the entries of its header. Raises CheckpointError listing every absent tensor.
    """
    absent = sorted(name for name, file in index.items() if name not in held[file])
    if absent:
        listed = ", ".join(f"{name} ({index[name]})" for name in absent)
        raise CheckpointError(
            f"{where}: {counted(len(absent), 'tensor')} not in the file that {INDEX_FILE} names: {listed}",
            "download the checkpoint again; index and files must belong together",
        )
    copies = sum(index.get(name, file) != file for file, entries in held.items() for name in entries)
    unknown = sum(name not in index for entries in held.values() for name in entries)
    notes = []
    if copies:
        notes.append(f"ignored {counted(copies, 'tensor')} stored again in a file other than the one the index names")
    if unknown:
        notes.append(f"ignored {counted(unknown, 'tensor')} that the index does not name")
    return {name: (file, held[file][name]) for name, file in index.items()}, notes


def unlisted_files_note(index: Mapping[str, str], names: Collection[str]) -> list[str]:
    """A note counting the safetensors files in `names` that the checkpoint does not consist of."""
    used = set(index.values())
    extra = sorted(n for n in names if n.endswith(".safetensors") and n not in used)
    return (
        [f"ignored {counted(len(extra), 'safetensors file')} outside the checkpoint: {', '.join(extra)}"]
        if extra
        else []
    )


def _stays_inside(file: str) -> bool:
    """Whether a file name from an index is a plain relative path without steps upwards."""
    parts = file.split("/")
    return bool(file) and "\0" not in file and not any(part in ("", ".", "..") for part in parts)


def _no_safetensors(names: Collection[str], where: str) -> CheckpointError:
    if any(map(is_gguf, names)):
        return CheckpointError(f"{where}: holds GGUF files only", "pass one .gguf file itself as MODEL")
    if any(name.endswith(_PICKLED) for name in names):
        return CheckpointError(
            f"{where}: holds PyTorch files (.bin, .pt) only, which can run code when they are read",
            "convert once with transformers: AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    return CheckpointError(f"{where}: no *.safetensors file", "pass a folder with config.json and safetensors weights")
