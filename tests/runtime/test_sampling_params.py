"""Options out of range are refused with their name, value and range; they travel and get a seed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mgtp.runtime.sampling_params import SamplingParams
from mgtp.shardplan.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 3e38, "top_k": 1, "top_p": 1e-9, "min_p": 1},
        {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"seed": -(1 << 63), "top_k": -1},
        {"seed": (1 << 64) - 1},
        {"logit_bias": {0: -100, 319: 100.0}, "stop_token_ids": (0, 319), "logprobs": 0, "max_tokens": 1},
    ],
)
def test_options_in_range(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert params.validate(vocab_size=320) is params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("option", "value", "range_text"),
    [
        *[("temperature", value, "from 0 to 3e+38") for value in (-0.1, 1e300, NAN, INF, "1", None, True)],
        *[("top_p", value, "above 0 and at most 1") for value in (0, -1, 1.5, NAN, INF)],
        *[("min_p", value, "from 0 to 1") for value in (-0.1, 1.1, NAN)],
        *[("top_k", value, "from 0 (off) to 2147483647") for value in (-2, 1.5, True, 1 << 31)],
        *[("repetition_penalty", value, "from 0.01 to 100") for value in (0, -1, NAN, INF)],
        *[("presence_penalty", value, "from -2 to 2") for value in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", value, "from -2 to 2") for value in (-INF, INF, NAN)],
        *[("seed", value, "at most 64 bits") for value in (1 << 64, -(1 << 63) - 1, 0.5)],
        *[("max_tokens", value, "from 1 to 2147483647") for value in (0, -1, 2.0, None, 1 << 31)],
        *[("logprobs", value, "from 0 to 20") for value in (-1, 21, True)],
    ],
)
def test_options_out_of_range(option: str, value: Any, range_text: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{option: value}).validate()
    assert caught.value.message.startswith(f"{option} is {value!r}, it must be ")
    assert range_text in caught.value.message
    assert "leave it out for " in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": (320,)}, "an id in stop_token_ids is 320"),
        ({"stop_token_ids": (-1,)}, "a token id from 0 to 319"),
        ({"logit_bias": {320: 1.0}}, "an id in logit_bias is 320"),
        ({"logit_bias": {1: NAN}}, "logit_bias of token 1 is nan"),
        ({"logit_bias": {1: 100.5}}, "from -100 to 100"),
    ],
)
def test_ids_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options).validate(vocab_size=320)


def test_a_seed_is_drawn_only_where_none_is_given() -> None:
    """Without a seed, or with the -1 that other servers have for it, every request is different: a fixed default would
    repeat the same 'random' text."""
    params = SamplingParams(temperature=0.5)
    seeds = {params.with_seed().seed for _ in range(8)} | {SamplingParams(seed=-1).with_seed().seed for _ in range(8)}
    assert len(seeds) == 16
    assert params.with_seed().validate().temperature == 0.5
    assert SamplingParams(seed=0).with_seed().seed == 0


def test_what_needs_the_history() -> None:
    assert not SamplingParams(logit_bias={1: 1.0}).needs_history
    penalties: list[dict[str, Any]] = [{f"{kind}_penalty": 0.5} for kind in ("repetition", "presence", "frequency")]
    assert all(SamplingParams(**penalty).needs_history for penalty in penalties)
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
