"""`mgtp generate --prompts`: the answers to all requests of a file, written to another."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shardplan.errors import MgtpError, UsageError
from ..shardplan.values import counted

if TYPE_CHECKING:
    from ..runtime.launch.start import LaunchOptions
    from ..runtime.offline.request_file import RequestFile
    from ..runtime.offline.result_file import ResultFile
    from ..runtime.offline.run import Summary
    from ..shardplan.shard_set import ShardSet

log = logging.getLogger("mgtp.cli")

DEFAULT_NUM_SEQS = 256
"""Sequences at once where nobody says how many: enough to fill a GPU, if their caches fit."""


def batch_files(prompts: Path, output: Path | None) -> tuple[Path, Path]:
    """(requests, results); raises UsageError when there is nowhere to write, or that is what is read."""
    if output is None:
        raise UsageError(f"--prompts {prompts} needs a file for the results", "add --output OUT.jsonl")
    if output.exists() and prompts.exists() and output.samefile(prompts):
        raise UsageError(f"--output {output} is the file with the prompts", "name another one")
    return prompts, output


def run_batch(
    shard_set: ShardSet,
    files: tuple[Path, Path],
    defaults: Mapping[str, Any],
    launch: LaunchOptions,
    *,
    ordered: bool,
    max_num_seqs: int | None,
    as_json: bool,
) -> None:
    """Answer the requests that have no result yet. Raises MgtpError when any has failed, now or before."""
    import time

    from ..runtime.offline.request_file import OfflineModel, RequestFile
    from ..runtime.offline.result_file import ResultFile
    from .console import print_json

    model = OfflineModel(shard_set.path.name, shard_set, int(time.time()))
    model.context = launch.max_model_len or shard_set.model.max_position
    with RequestFile(files[0], model, defaults) as requests:
        longest = max(line.longest for line in requests.lines)
        seqs = max_num_seqs or min(DEFAULT_NUM_SEQS, len(requests.lines))
        launch = replace(launch, max_model_len=launch.max_model_len or longest, max_num_seqs=seqs)
        with ResultFile(files[1], requests.lines, ordered=ordered) as results:
            summary = _run(shard_set, requests, results, launch, ordered)
    if as_json:
        print_json(summary)
    if summary.failed:
        raise MgtpError(
            f"{summary.failed} of {counted(summary.requests, 'request')} failed",
            f"{summary.output} says why; without these lines, a rerun tries them again",
        )


def _run(
    shard_set: ShardSet, requests: RequestFile, results: ResultFile, launch: LaunchOptions, ordered: bool
) -> Summary:
    from ..runtime.offline.run import OfflineRun, Summary
    from .launching import running
    from .progress import requests_progress

    total, done = len(requests.lines), len(results.done)
    if done == total:
        log.info("%s has all of %s", results.path, counted(total, "result"))
        return Summary(str(results.path), total, done, results.num_failed)
    if done:
        log.info("%s has %d of %d results, going on", results.path, done, total)
    try:
        with running(shard_set, launch) as started:
            run = OfflineRun(started, requests, results, max_num_seqs=launch.max_num_seqs, ordered=ordered)
            with requests_progress(total) as note:
                summary = run.run(note)
    except BaseException:
        log.info("the results so far are in %s: the same command goes on from there", results.path)
        raise
    log.info(
        "%s in %s: %s in %.1f s, %.0f tokens/s",
        counted(total, "result"),
        results.path,
        counted(summary.completion_tokens, "token"),
        summary.seconds,
        summary.tokens_per_second,
    )
    return summary
