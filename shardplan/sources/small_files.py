"""The small files of a checkpoint folder: config, tokenizer and chat template, carried along verbatim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import located, text_config
from ..errors import CheckpointError
from .files import DOWNLOAD_AGAIN, FileStamp, parse_json_object, read_small_file, wrong_content
from .tokenizer_check import check_tokenizer

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
)
"""What a shard set carries along, as far as the checkpoint has it."""


@dataclass(frozen=True)
class SmallFiles:
    """`config` is the content of config.json, `files` every small file verbatim, `stamps` when they were read."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    stamps: Mapping[str, FileStamp]
    notes: tuple[str, ...]


def read_small_files(folder: Path) -> SmallFiles:
    """Read and check the small files of a checkpoint folder.

    Raises CheckpointError for a config.json that is missing or not an object, for any other file that is malformed
    or too large, and for a tokenizer that does not fit the embedding.
    """
    if not os.path.lexists(folder / CONFIG_FILE):
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} is missing", "take it from the model's repository in the Hugging Face format"
        )
    files: dict[str, bytes] = {}
    stamps: dict[str, FileStamp] = {}
    for name in SMALL_FILES:
        if os.path.lexists(folder / name):
            files[name], stamps[name] = read_small_file(folder / name)
    config = parse_json_object(files[CONFIG_FILE], str(folder / CONFIG_FILE))
    with located(str(folder / CONFIG_FILE)):
        vocab_size = text_config(config).get("vocab_size")
    notes: list[str] = []
    for name, content in files.items():
        where = str(folder / name)
        if name == TOKENIZER_FILE:
            notes += check_tokenizer(content, vocab_size, where)
        elif name.endswith(".json"):
            parse_json_object(content, where)
        else:
            _check_plain(content, where, text=name.endswith(".jinja"))
    return SmallFiles(config, files, stamps, tuple(notes))


def _check_plain(content: bytes, where: str, *, text: bool) -> None:
    """A file that is not JSON: not something else under its name and, for a template, UTF-8."""
    reason, hint = wrong_content(content) or ("", DOWNLOAD_AGAIN)
    if not reason and text:
        try:
            content.decode()
        except ValueError as error:
            reason = f"not UTF-8 text: {error}"
    if reason:
        raise CheckpointError(f"{where}: {reason}", hint)
