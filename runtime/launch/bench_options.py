"""What `mgtp bench` measures, checked against the model before anything is started."""

from __future__ import annotations

import msgspec

from ...shardplan.errors import UsageError
from .start import LaunchOptions

PREFILLS = ((1, 512), (32, 512), (1, 8000))
"""Prompts at once and tokens of each, where nobody says otherwise."""


class BenchOptions(msgspec.Struct, frozen=True):
    """What is measured: batch sizes of decode steps, prefills as (requests, tokens of each), and the offline run."""

    batches: list[int]
    prefills: list[tuple[int, int]]
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    collectives: bool = False

    @property
    def request_tokens(self) -> int:
        """Context that a request needs, but for prefills."""
        return self.prompt_tokens + self.output_tokens

    @property
    def longest(self) -> int:
        """Context that the longest of all requests needs."""
        own = [self.request_tokens] if self.batches or self.num_requests else []
        return max(own + [tokens + 1 for _, tokens in self.prefills])

    @property
    def most_at_once(self) -> int:
        """Sequences that run at once at most, if they may."""
        return max([self.num_requests, *self.batches, *(count for count, _ in self.prefills)])


def fitting_options(
    context: int,
    batches: list[int],
    prefills: list[tuple[int, int]] | None,
    num_requests: int,
    prompt_tokens: int | None,
    output_tokens: int | None,
    collectives: bool = False,
) -> BenchOptions:
    """What is measured of a model with `context` positions. What is None is chosen so that it fits.

    Raises UsageError for what cannot be measured, before anything is started.
    """
    output = output_tokens or min(128, max(2, context // 5 if prompt_tokens is None else context - prompt_tokens))
    prompt = prompt_tokens or min(512, max(1, context - output))
    if prefills is None:
        prefills = list(dict.fromkeys((count, min(tokens, context - 1)) for count, tokens in PREFILLS))
    options = BenchOptions(batches, prefills, num_requests, prompt, output, collectives)
    if not (batches or prefills or num_requests):
        raise UsageError("nothing is left to measure", "give --batches, --prefills or --requests")
    for count, tokens in prefills:
        if tokens + 1 > context:
            raise UsageError(
                f"--prefills {count}x{tokens} and a first token need {tokens + 1} tokens of context, "
                f"the model has {context}",
                f"use {count}x{context - 1} or less",
            )
    if options.longest > context:
        raise UsageError(
            f"--prompt-tokens {prompt} and --output-tokens {output} need {prompt + output} tokens of context, "
            f"the model has {context}",
            "lower one of the two",
        )
    if batches and output < 2:
        raise UsageError(f"--output-tokens {output}: a decode step lies between two tokens", "ask for 2 or more")
    return options


def check_at_once(options: BenchOptions, launch: LaunchOptions) -> None:
    """Raise UsageError for a batch that would never run as one."""
    if (most := max(options.batches, default=0)) > launch.max_num_seqs:
        raise UsageError(
            f"--batches {most}: with --max-num-seqs {launch.max_num_seqs} fewer run at once",
            "raise it, or leave it out",
        )
