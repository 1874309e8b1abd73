"""`mgtp generate` for one prompt: where it comes from, and presenting its text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shardplan.errors import UsageError

if TYPE_CHECKING:
    from ..runtime.launch.client import Generation
    from ..runtime.launch.start import LaunchOptions, StartedGroup
    from ..runtime.sampling_params import SamplingParams
    from ..runtime.text.tokenizer import Tokenizer
    from ..shardplan.config import ModelConfig
    from ..shardplan.shard_set import ShardSet
    from ..shardplan.sources.base import Source


@dataclass(frozen=True)
class PromptSource:
    """The options that say where a prompt comes from; `argument` is '-' for standard input."""

    argument: str | None
    prompt: str | None
    file: Path | None
    ids: str | None
    chat: bool
    system: str | None

    def read(self) -> str | None:
        """The prompt's text; None when ids are given. Raises UsageError unless exactly one source is named."""
        if self.argument not in (None, "-"):
            raise UsageError(
                f"unexpected argument {self.argument!r}", "give the prompt with --prompt, or - for standard input"
            )
        given = self._given()
        if len(given) != 1:
            wrong = "no prompt was given" if not given else f"{' and '.join(given)} both give a prompt"
            raise UsageError(
                wrong, "give one of --prompt, --prompt-file, --prompt-ids, --prompts, or - for standard input"
            )
        try:
            if self.argument == "-":
                if sys.stdin is None:
                    raise UsageError("standard input is closed", "give the prompt with --prompt")
                return sys.stdin.buffer.read().decode()
            return self.file.read_bytes().decode() if self.file is not None else self.prompt
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt is not UTF-8: {error}", "convert it, for instance with iconv") from None
        except OSError as error:
            raise UsageError(f"--prompt-file {self.file}: {error.strerror}", "check the path") from None

    def refuse_beside_prompts(self) -> None:
        """Raise UsageError when there is a prompt, or what goes with one, beside a file of requests."""
        flags = (("--chat", self.chat or None), ("--system", self.system))
        other = [*self._given(), *(name for name, value in flags if value is not None)]
        if other:
            raise UsageError(f"{other[0]} does not go with --prompts", "put prompts and messages into the file")

    def _given(self) -> list[str]:
        values = (("-", self.argument), ("--prompt", self.prompt), ("--prompt-file", self.file))
        return [name for name, value in (*values, ("--prompt-ids", self.ids)) if value is not None]

    def encode(self, tokenizer: Tokenizer, folder: Path, text: str | None) -> list[int]:
        """The prompt's ids: as given, or through the chat template of `folder`, or as plain text."""
        if self.system is not None and not self.chat:
            raise UsageError("--system needs --chat", "add --chat")
        if self.ids is not None:
            if self.chat:
                raise UsageError("--chat needs text, not --prompt-ids", "leave one of the two out")
            parts = self.ids.split(",")
            bad = next((p for p in parts if not p.strip().isdecimal()), None)
            if bad is not None:
                raise UsageError(f"--prompt-ids: {bad!r} is not a token id", "give ids such as 1,2,3")
            return [int(p) for p in parts]
        assert text is not None
        if not self.chat:
            return tokenizer.encode(text)
        from ..runtime.text.chat import ChatTemplate

        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        rendered = ChatTemplate.load(folder).render([*messages, {"role": "user", "content": text}])
        return tokenizer.encode(rendered, add_special_tokens=False)


def prepare(
    folder: Path,
    config: Mapping[str, Any],
    model: ModelConfig,
    source: PromptSource,
    text: str | None,
    given: Mapping[str, Any],
) -> tuple[Tokenizer, list[int], SamplingParams]:
    """Tokenizer, prompt and sampling for a model whose small files are in `folder`; raises what is wrong with them."""
    from ..runtime.launch.client import check_prompt
    from ..runtime.text.tokenizer import Tokenizer
    from .sampling_options import sampling_params

    tokenizer = Tokenizer.load(folder, config)
    ids = source.encode(tokenizer, folder, text)
    sampling = sampling_params(folder, model.vocab_size, given)
    check_prompt(ids, sampling.max_tokens if "max_tokens" in given else 1, sys.maxsize, model.vocab_size)
    return tokenizer, ids, sampling


def check_checkpoint(checkpoint: Source, source: PromptSource, text: str | None, given: Mapping[str, Any]) -> None:
    """Raise what `prepare` will find wrong with the set of a checkpoint, before it is sharded."""
    from ..shardplan.families import parse_config
    from .before_sharding import small_files

    model = parse_config(checkpoint.config, f"{checkpoint.label}: config.json")
    with small_files(checkpoint) as folder:
        prepare(folder, checkpoint.config, model, source, text, given)


class GenerateOne:
    """One generation. Making it checks everything that can be checked before ranks are started; raises UsageError."""

    def __init__(
        self, shard_set: ShardSet, source: PromptSource, text: str | None, given: Mapping[str, Any], stop: list[str]
    ) -> None:
        """`given`: the sampling options that the user gives."""
        self._shard_set, self._chat, self._stop = shard_set, source.chat, stop
        self._has_limit = "max_tokens" in given
        self._tokenizer, self._ids, self._sampling = prepare(
            shard_set.path, shard_set.config, shard_set.model, source, text, given
        )

    @property
    def _wanted(self) -> int:
        """Tokens that must fit behind the prompt."""
        return self._sampling.max_tokens if self._has_limit else 1

    def run(self, launch: LaunchOptions, *, as_json: bool) -> None:
        """Start ranks and generate, writing text as it comes or one JSON document at the end."""
        from ..runtime.launch.client import check_prompt
        from .launching import running

        context = launch.max_model_len or self._shard_set.model.max_position
        check_prompt(self._ids, self._wanted, context, sys.maxsize)
        with running(self._shard_set, launch) as started:
            self._limit(started.ready[0].max_model_len)
            self._write(started, as_json)

    def _limit(self, context: int) -> None:
        """Set max_tokens for the context that the ranks really have."""
        import msgspec

        from ..runtime.launch.client import check_prompt, default_max_tokens

        limit = self._sampling.max_tokens if self._has_limit else default_max_tokens(len(self._ids), context)
        check_prompt(self._ids, limit, context, sys.maxsize)
        self._sampling = msgspec.structs.replace(self._sampling, max_tokens=limit)

    def _write(self, started: StartedGroup, as_json: bool) -> None:
        from ..runtime.launch.client import Generation, generate
        from .background import watched_stdout
        from .console import json_line

        result = Generation(self._ids)
        pieces = generate(
            started,
            self._tokenizer,
            self._ids,
            self._sampling,
            self._stop,
            result=result,
            continues_text=not self._chat,
        )
        with watched_stdout(started.group.check) as write, closing(pieces):
            for piece in pieces:
                if not as_json:
                    write(piece)
            if as_json:
                write(json_line(_document(started, self._shard_set, self._tokenizer, result, self._sampling)))
            elif self._tokenizer.has_text:
                write("\n")
            else:
                write(",".join(map(str, result.token_ids)) + "\n")


def _document(
    started: StartedGroup, shard_set: ShardSet, tokenizer: Tokenizer, result: Generation, options: SamplingParams
) -> dict[str, Any]:
    """The JSON document of one generation."""
    from ..runtime.launch.client import token_logprobs

    document: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_ids,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": len(result.prompt_ids),
            "completion_tokens": len(result.token_ids),
            "total_tokens": len(result.prompt_ids) + len(result.token_ids),
        },
        "timing": {
            "ready_s": started.seconds,
            "ttft_s": result.first_token_seconds,
            "decode_tokens_per_s": result.decode_tokens_per_second,
        },
        "ranks": rank_documents(started, shard_set),
    }
    if options.logprobs is not None:
        pairs = zip(result.token_ids, result.logprobs, strict=True)
        document["logprobs"] = token_logprobs(tokenizer, pairs)
    return document


def rank_documents(started: StartedGroup, shard_set: ShardSet) -> list[dict[str, Any]]:
    """Who has computed it."""
    files = [rank.file for rank in shard_set.plan.ranks]
    return [
        {
            "rank": r.rank,
            "pid": r.pid,
            "device": r.device,
            "file": files[r.rank % len(files)],
            "weight_bytes": r.weight_bytes,
        }
        for r in started.ready
    ]
