"""How the tokens of one request are chosen, and how many: the options, their ranges and their defaults. No torch."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec

from ..shardplan.errors import UsageError
from ..shardplan.values import is_finite_number, shown


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of one request, as the front sends them to the leader.

    They act in this order: penalties and logit_bias, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 takes the likeliest token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all, as -1 does."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities add up to at least this."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of every token in the prompt or generated."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every generated token."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a generated token once for every time it was generated."""
    logit_bias: dict[int, float] = {}
    """Token id -> added to its logit."""
    seed: int | None = None
    """64 bits that, with the position, fix the random number of every token; None, or -1, until `with_seed`."""
    max_tokens: int = 512
    """Generate at most this many."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text ids."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and those of this many likeliest tokens; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def with_seed(self) -> SamplingParams:
        """These options with a seed: fresh entropy where none was asked for, for which other servers have -1."""
        return self if self.seed not in (None, -1) else msgspec.structs.replace(self, seed=secrets.randbits(64))

    def num_kept(self, vocab_size: int) -> int:
        """Of how many tokens top_k leaves the choice."""
        return min(self.top_k, vocab_size) if self.top_k > 0 else vocab_size

    def validate(self, vocab_size: int | None = None, *, spelled: Callable[[str], str] = str) -> SamplingParams:
        """These options, checked; raises UsageError naming option (as `spelled`), value and range.

        With a `vocab_size`, ids must be below it.
        """
        for name, (low, high, range_text) in _FLOAT_RANGES.items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (name == "top_p" and value == 0):
                raise _out_of_range(name, value, range_text, spelled(name))
        for name, (low, high, range_text) in _INT_RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_int(value) or not low <= value <= high:
                raise _out_of_range(name, value, range_text, spelled(name))
        self._validate_ids(vocab_size, spelled)
        return self

    def _validate_ids(self, vocab_size: int | None, spelled: Callable[[str], str]) -> None:
        """Check the options that hold token ids."""
        top = (1 << 31 if vocab_size is None else vocab_size) - 1
        for token_id in (*self.stop_token_ids, *self.logit_bias):
            name = "logit_bias" if token_id in self.logit_bias else "stop_token_ids"
            if not _is_int(token_id) or not 0 <= token_id <= top:
                raise _out_of_range(name, token_id, f"a token id from 0 to {top}", f"an id in {spelled(name)}")
        for token_id, bias in self.logit_bias.items():
            if not _is_number(bias) or not -100 <= bias <= 100:
                subject = f"{spelled('logit_bias')} of token {token_id}"
                raise _out_of_range("logit_bias", bias, "a number from -100 to 100", subject)


_LARGEST = 3.0e38  # fits float32, in which the options are used

_FLOAT_RANGES = {
    "temperature": (0, _LARGEST, "a number from 0 to 3e+38"),
    "top_p": (0, 1, "a number above 0 and at most 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100"),
    "presence_penalty": (-2, 2, "a number from -2 to 2"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2"),
}
_INT_RANGES = {
    "top_k": (-1, (1 << 31) - 1, "a whole number from 0 (off) to 2147483647"),
    "seed": (-(1 << 63), (1 << 64) - 1, "a whole number of at most 64 bits"),
    "max_tokens": (1, (1 << 31) - 1, "a whole number from 1 to 2147483647"),
    "logprobs": (0, 20, "a whole number from 0 to 20"),
    "prompt_logprobs": (0, 20, "a whole number from 0 to 20"),
}
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")

STATED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model may state in its generation_config.json."""

_DEFAULTS = {
    **{name: f"the model's own, else {getattr(SamplingParams(), name):g}" for name in STATED},
    **dict.fromkeys(("logprobs", "logit_bias", "stop_token_ids"), "none"),
    "seed": "a random one",
    "max_tokens": "what is left of the context, at most 512",
}


def _is_number(value: Any) -> TypeGuard[float]:
    return is_finite_number(value)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _out_of_range(option: str, value: Any, range_text: str, subject: str) -> UsageError:
    default = _DEFAULTS.get(option) or f"its default, {getattr(SamplingParams(), option)}"
    return UsageError(f"{subject} is {shown(value)}, it must be {range_text}", f"leave it out for {default}")
