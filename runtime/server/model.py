"""The served model on the front's side: tokenizer, chat template, defaults and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ...shardplan.errors import UsageError
from ...shardplan.shard_set import ShardSet
from ...shardplan.values import counted
from ..generation_defaults import checked_defaults
from ..grammar_tokenizer import load_tokenizer
from ..messages import Ready
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from .errors import ApiError, unavailable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")

_LONG_TEXT = 1 << 12
"""Characters, or tokens, beyond which work on them is left to another thread, so that streams go on."""

_THREADS = 4
"""For long texts of one model: more of them wait, while short ones are done at once."""

MAX_NAME_CHARACTERS = 200


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
    threads: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder = self.shard_set.path
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self.tokenizer = Tokenizer.load(folder, self.shard_set.config)
        self.template = ChatTemplate.load(folder)
        self.defaults = checked_defaults(folder)
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

    async def encode(self, texts: list[str], param: str, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of texts, each of which must fit the context; raises ApiError at once for one that cannot."""
        if texts and not self.tokenizer.has_text:
            raise ApiError(400, "this model has no tokenizer: send token ids", param=param)
        for text in texts:
            if len(text) > _LONG_TEXT:
                self._check_length(text, param)
        size = sum(map(len, texts))
        return await self.off_loop(size, lambda: [self.tokenizer.encode(text, add_special_tokens) for text in texts])

    def _check_length(self, text: str, param: str) -> None:
        least = self.tokenizer.least_tokens(text)
        if least > self.max_model_len:
            raise ApiError(
                400,
                f"{len(text)} characters are at least {least} tokens and exceed the context of "
                f"{counted(self.max_model_len, 'token')}",
                param=param,
                code="context_length_exceeded",
            )

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, in another thread when its input, of `size` characters or tokens, is long."""
        if size <= _LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


def check_name(name: str) -> None:
    """Raise UsageError for what cannot be a model's name: it stands in URLs, logs and metrics."""
    if not (name.isprintable() and 0 < len(name) <= MAX_NAME_CHARACTERS):
        raise UsageError(
            f"the model's name {name[:50]!r} is not printable, or not 1 to {MAX_NAME_CHARACTERS} characters long",
            "choose another name",
        )
