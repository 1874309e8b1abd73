"""`mgtp generate`: text from one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shardplan.errors import UsageError
from .app import app
from .launching import (
    DeviceOption,
    DevicesOption,
    DtypeOption,
    JsonOption,
    MaxModelLenOption,
    RevisionOption,
    ShardSetArgument,
    SharedDeviceOption,
    TpSizeOption,
    VerifyOption,
)
from .options import flag

if TYPE_CHECKING:
    from ..runtime.launch.client import Generation
    from ..runtime.launch.start import StartedGroup
    from ..runtime.sampling_params import SamplingParams
    from ..runtime.text.tokenizer import Tokenizer
    from ..shardplan.shard_set import ShardSet


@app.command()
def generate(
    ctx: typer.Context,
    directory: ShardSetArgument,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="[-]", help="'-' reads the prompt from standard input.", show_default=False)
    ] = None,
    tp_size: TpSizeOption = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The prompt as token ids, such as 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message, with --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; default: what is left, at most 512.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's, else 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this probability; 1 keeps all.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 makes tokens seen before less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text tokens.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the K likeliest tokens.")
    ] = None,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    verify_on_load: VerifyOption = False,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    max_model_len: MaxModelLenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a prompt, one process per device. Text goes to stdout as it comes.

    JSON: text, token_ids, prompt_token_ids, finish_reason (stop or length), usage (prompt_tokens, completion_tokens,
    total_tokens), logprobs (with --logprobs: per token its id, token, logprob and top), timing (ready_s, ttft_s,
    decode_tokens_per_s), ranks (rank, pid, device, file, weight_bytes).
    """
    from ..runtime.launch.start import LaunchOptions
    from ..runtime.text.tokenizer import Tokenizer
    from .launching import open_set, parse_devices, running

    if logprobs is not None and not as_json:
        raise UsageError(f"--logprobs {logprobs} has nowhere to go", "add --json")
    if "" in (stop or []):
        raise UsageError("--stop '' would end every text at once", "give a string that is not empty")
    shard_set = open_set(directory, tp_size, dtype, revision, verify_on_load)
    tokenizer = Tokenizer.load(shard_set.path, shard_set.config)
    text = _prompt_text(prompt_argument, prompt, prompt_file, prompt_ids)
    ids = _encode(tokenizer, shard_set, text, prompt_ids, chat, system)
    options = _sampling(
        shard_set,
        dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty),
        dict(seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=logprobs),
    )
    context = max_model_len or shard_set.model.max_position
    _check(ids, options, max_tokens, context, shard_set)
    launch = LaunchOptions(
        device=device,
        devices=parse_devices(devices),
        allow_shared_device=allow_shared_device,
        max_model_len=max_model_len,
        max_num_seqs=1,
        log_level=ctx.obj.log_level,
    )
    with running(shard_set, launch) as started:
        options = _limit(ids, options, max_tokens, started)
        _run(started, shard_set, tokenizer, ids, options, stop or [], chat, as_json)


def _prompt_text(argument: str | None, prompt: str | None, file: Path | None, ids: str | None) -> str | None:
    """The prompt's text; None when ids are given. Raises UsageError unless exactly one source is named."""
    if argument not in (None, "-"):
        raise UsageError(f"unexpected argument {argument!r}", "give the prompt with --prompt, or - for standard input")
    given = [
        name
        for name, value in (("-", argument), ("--prompt", prompt), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) != 1:
        wrong = "no prompt was given" if not given else f"{' and '.join(given)} both give a prompt"
        raise UsageError(wrong, "give one of --prompt, --prompt-file, --prompt-ids, or - for standard input")
    try:
        if argument == "-":
            if sys.stdin is None:
                raise UsageError("standard input is closed", "give the prompt with --prompt")
            return sys.stdin.buffer.read().decode()
        return file.read_bytes().decode() if file is not None else prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}", "convert it, for instance with iconv") from None
    except OSError as error:
        raise UsageError(f"--prompt-file {file}: {error.strerror}", "check the path") from None


def _encode(
    tokenizer: Tokenizer, shard_set: ShardSet, text: str | None, ids: str | None, chat: bool, system: str | None
) -> list[int]:
    """The prompt's ids: as given, or through the chat template, or as plain text."""
    if system is not None and not chat:
        raise UsageError("--system needs --chat", "add --chat")
    if ids is not None:
        if chat:
            raise UsageError("--chat needs text, not --prompt-ids", "leave one of the two out")
        parts = ids.split(",")
        bad = next((p for p in parts if not p.strip().isdecimal()), None)
        if bad is not None:
            raise UsageError(f"--prompt-ids: {bad!r} is not a token id", "give ids such as 1,2,3")
        return [int(p) for p in parts]
    assert text is not None
    if not chat:
        return tokenizer.encode(text)
    from ..runtime.text.chat import ChatTemplate

    messages = [{"role": "system", "content": system}] if system is not None else []
    rendered = ChatTemplate.load(shard_set.path).render([*messages, {"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def _sampling(shard_set: ShardSet, sampled: dict[str, Any], others: dict[str, Any]) -> SamplingParams:
    """The request's options: what the user says, else what the model's generation_config says, else the defaults."""
    from ..runtime.generation_defaults import generation_defaults
    from ..runtime.sampling_params import SamplingParams

    given = {k: v for k, v in {**sampled, **others}.items() if v is not None}
    options = SamplingParams(**{**generation_defaults(shard_set.path), **given})
    return options.validate(shard_set.model.vocab_size, spelled=flag)


def _check(ids: list[int], options: SamplingParams, max_tokens: int | None, context: int, shard_set: ShardSet) -> None:
    """Refuse a prompt that cannot fit before anything is started."""
    from ..runtime.launch.client import check_prompt

    check_prompt(ids, 1 if max_tokens is None else options.max_tokens, context, shard_set.model.vocab_size)


def _limit(ids: list[int], options: SamplingParams, max_tokens: int | None, started: StartedGroup) -> SamplingParams:
    """`options` with max_tokens for the context that the ranks really have."""
    import msgspec

    from ..runtime.launch.client import check_prompt, default_max_tokens

    context = started.ready[0].max_model_len
    limit = default_max_tokens(len(ids), context) if max_tokens is None else max_tokens
    check_prompt(ids, limit, context, sys.maxsize)
    return msgspec.structs.replace(options, max_tokens=limit)


def _run(
    started: StartedGroup,
    shard_set: ShardSet,
    tokenizer: Tokenizer,
    ids: list[int],
    options: SamplingParams,
    stop: list[str],
    chat: bool,
    as_json: bool,
) -> None:
    """Generate, writing text as it comes or one JSON document at the end."""
    from ..runtime.launch.client import Generation, generate

    result = Generation(ids)
    for piece in generate(started, tokenizer, ids, options, stop, result=result, continues_text=not chat):
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        from .console import print_json

        print_json(_document(started, shard_set, tokenizer, result, options))
    elif tokenizer.has_text:
        sys.stdout.write("\n")
    else:
        print(",".join(map(str, result.token_ids)))
    sys.stdout.flush()


def _document(
    started: StartedGroup, shard_set: ShardSet, tokenizer: Tokenizer, result: Generation, options: SamplingParams
) -> dict[str, Any]:
    """The JSON document of one generation."""
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
        "ranks": [
            {
                "rank": r.rank,
                "pid": r.pid,
                "device": r.device,
                "file": shard_set.plan.ranks[r.rank].file,
                "weight_bytes": r.weight_bytes,
            }
            for r in started.ready
        ],
    }
    if options.logprobs is not None:
        document["logprobs"] = [
            {
                "token_id": token_id,
                "token": tokenizer.token_name(token_id) if tokenizer.has_text else None,
                "logprob": entry.chosen,
                "top": [{"token_id": i, "logprob": p} for i, p in zip(entry.top_ids, entry.top, strict=True)],
            }
            for token_id, entry in zip(result.token_ids, result.logprobs, strict=True)
        ]
    return document
