"""The served model on the front's side: tokenizer, chat template, defaults and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ...shardplan.shard_set import ShardSet
from ..generation_defaults import generation_defaults
from ..grammar_tokenizer import load_tokenizer
from ..messages import Ready
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from .errors import ApiError, unavailable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")

_LONG_TEXT = 1 << 14
"""Characters beyond which tokenising is left to another thread, so that streams go on."""


@dataclass
class ServedModel:
    """One shard set as requests see it. `ready` is empty until the ranks are."""

    name: str
    shard_set: ShardSet
    created: int
    tokenizer: Tokenizer = field(init=False)
    template: ChatTemplate = field(init=False)
    defaults: dict[str, Any] = field(init=False)
    eos_ids: list[int] = field(init=False)
    ready: list[Ready] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.shard_set.path
        self.tokenizer = Tokenizer.load(folder, self.shard_set.config)
        self.template = ChatTemplate.load(folder)
        self.defaults = generation_defaults(folder)
        self.eos_ids = sorted(self.tokenizer.eos_ids)
        if self.tokenizer.has_text:
            self.tokenizer.encode("warm")  # what is made on first use is made now

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that the model knows."""
        return self.shard_set.model.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        if not self.ready:
            raise unavailable("the model is being loaded", code="loading")
        return self.ready[0].max_model_len

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: names the weights."""
        return f"fp_{self.shard_set.plan.fingerprint[-12:]}"

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer for checking grammars, made on first use; raises UsageError where the model's cannot be used."""
        return load_tokenizer(self.shard_set.files.get("tokenizer.json"), self.vocab_size, self.eos_ids)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        if not self.tokenizer.has_text:
            raise ApiError(400, "this model has no tokenizer: send token ids", param="prompt")
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in another thread when its input is long."""
    return await asyncio.to_thread(work) if size > _LONG_TEXT else work()
