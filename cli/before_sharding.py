"""Checks of a checkpoint's small files before it is sharded: what its shard set would be refused for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..shardplan.errors import MgtpError

if TYPE_CHECKING:
    from ..shardplan.sources.base import Source


@contextmanager
def small_files(checkpoint: Source) -> Iterator[Path]:
    """A folder with a checkpoint's config, tokenizer and template. Errors in the block name the checkpoint instead."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        for name, content in checkpoint.files.items():
            Path(folder, name).write_bytes(content)
        try:
            yield Path(folder)
        except MgtpError as error:
            message, hint = (text.replace(folder, checkpoint.label) for text in (error.message, error.hint))
            raise type(error)(message, hint) from None
