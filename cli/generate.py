"""`mgtp generate`: text from one prompt, or from every line of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..shardplan.errors import UsageError
from .app import app
from .generate_batch import batch_files, run_batch
from .generate_one import GenerateOne, PromptSource, check_checkpoint
from .launching import (
    BlockSizeOption,
    CollectiveOption,
    CpSizeOption,
    DeviceOption,
    DevicesOption,
    DtypeOption,
    DummyWeightsOption,
    EnforceEagerOption,
    JsonOption,
    KvCacheMemoryOption,
    MaxModelLenOption,
    RevisionOption,
    ShardSetArgument,
    SharedDeviceOption,
    StepTimeoutOption,
    TpSizeOption,
    VerifyOption,
    launch_options,
    open_set,
)
from .options import path, positive
from .sampling_options import (
    IgnoreEosOption,
    MinPOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)


@app.command()
def generate(
    ctx: typer.Context,
    directory: ShardSetArgument,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="[-]", help="'-' reads the prompt from standard input.", show_default=False)
    ] = None,
    tp_size: TpSizeOption = None,
    cp_size: CpSizeOption = 1,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(parser=path, help="Read the prompt from a file.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The prompt as token ids, such as 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message, with --chat.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(parser=path, help="Answer every line of this JSONL file instead; needs --output.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(parser=path, help="With --prompts: write results here; those that are there already are kept."),
    ] = None,
    unordered: Annotated[
        bool, typer.Option("--unordered", help="With --prompts: write results as they finish.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; default: what is left, at most 512.")
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json or --prompts: log-probabilities of the K likeliest tokens.")
    ] = None,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    verify_on_load: VerifyOption = False,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = "auto",
    devices: DevicesOption = None,
    allow_shared_device: SharedDeviceOption = False,
    collective: CollectiveOption = "auto",
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(callback=positive, help="With --prompts: most sequences to run at once; default: 256.")
    ] = None,
    kv_cache_memory: KvCacheMemoryOption = None,
    block_size: BlockSizeOption = None,
    enforce_eager: EnforceEagerOption = False,
    step_timeout: StepTimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a prompt, one process per device. Text goes to stdout as it comes.

    JSON: text, token_ids, prompt_token_ids, finish_reason (stop or length), usage (prompt_tokens, completion_tokens,
    total_tokens), logprobs (with --logprobs: per token its id, token, logprob and top), timing (ready_s, ttft_s,
    decode_tokens_per_s), ranks (rank, pid, device, file, weight_bytes).

    With --prompts (docs/batches.md): as many lines at once as fit; a rerun goes on after an interruption. JSON: output,
    requests, skipped, failed, prompt_tokens, completion_tokens, seconds. Exits 1 when a request has failed.
    """
    source = PromptSource(prompt_argument, prompt, prompt_file, prompt_ids, chat, system)
    _check_stops(stop or [])
    sampled = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    sampled |= dict(repetition_penalty=repetition_penalty, max_tokens=max_tokens, logprobs=logprobs)
    given = {name: value for name, value in sampled.items() if value is not None}
    given |= {"ignore_eos": True} if ignore_eos else {}
    launch = launch_options(
        ctx,
        cp_size=cp_size,
        device=device,
        devices=devices,
        allow_shared_device=allow_shared_device,
        collective=collective,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs if prompts is not None else 1,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        enforce_eager=enforce_eager,
        step_timeout=step_timeout,
    )
    if prompts is None:
        _refuse_for_one(output, unordered, max_num_seqs, logprobs if not as_json else None)
        text = source.read()
        check = partial(check_checkpoint, source=source, text=text, given=given)
        shard_set = open_set(directory, tp_size, dtype, revision, verify_on_load, dummy_weights, check)
        GenerateOne(shard_set, source, text, given, stop or []).run(launch, as_json=as_json)
        return
    source.refuse_beside_prompts()
    files = batch_files(prompts, output)
    shard_set = open_set(directory, tp_size, dtype, revision, verify_on_load, dummy_weights)
    defaults = {**given, **({"stop": stop} if stop else {})}
    run_batch(shard_set, files, defaults, launch, ordered=not unordered, max_num_seqs=max_num_seqs, as_json=as_json)


def _check_stops(stop: list[str]) -> None:
    """Raise UsageError for a stop string that every text has, or none can have."""
    if "" in stop:
        raise UsageError("--stop '' would end every text at once", "give a string that is not empty")
    for each in stop:
        try:
            each.encode()
        except UnicodeEncodeError:
            raise UsageError(f"--stop {each!r} is not UTF-8", "convert it, for instance with iconv") from None


def _refuse_for_one(output: Path | None, unordered: bool, max_num_seqs: int | None, logprobs: int | None) -> None:
    """Raise UsageError for an option that does nothing for a single prompt."""
    if logprobs is not None:
        raise UsageError(f"--logprobs {logprobs} has nowhere to go", "add --json")
    for name, value in (("--output", output), ("--unordered", unordered or None), ("--max-num-seqs", max_num_seqs)):
        if value is not None:
            raise UsageError(f"{name} is for --prompts", "give the requests in a file, with --prompts FILE.jsonl")
