"""Options that say how tokens are chosen, for the commands that generate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..runtime.sampling_params import SamplingParams

TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's, else 1.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens up to this probability; 1 keeps all.")
]
TopKOption = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
MinPOption = Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")]
RepetitionPenaltyOption = Annotated[float | None, typer.Option(help="Above 1 makes tokens seen before less likely.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed gives the same text again; -1 draws a new one.")]
StopOption = Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text tokens.")]


def sampling_params(folder: Path, vocab_size: int | None, given: Mapping[str, Any]) -> SamplingParams:
    """What the user says, else what the model's generation_config says, else the defaults; raises what is wrong."""
    from ..runtime.generation_defaults import checked_defaults
    from ..runtime.sampling_params import SamplingParams
    from .options import flag

    defaults = checked_defaults(folder, given, lambda name: f"give {flag(name)}, or ")
    return SamplingParams(**{**defaults, **given}).validate(vocab_size, spelled=flag)
