"""Sizes that do not agree are refused with the numbers, before anything is exchanged.

Guards against a token that is dropped or a part of another rank that is taken for one's own without a word, and against
ranks that wait for ever for one that could not go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mgtp.runtime.communicator import SingleRank
from mgtp.runtime.parallel.attention import KeyPart, Visibility, attend, attend_to_part, exchange
from mgtp.runtime.parallel.linear import ParallelLMHead, VocabParallelEmbedding
from mgtp.runtime.parallel.norm import SplitRMSNorm
from mgtp.runtime.parallel.ranges import SequenceLayout, even_ranges, head_and_tail, one_after_another
from mgtp.runtime.parallel.sequence import gather_parts, gather_sequence, scatter_sequence
from mgtp.shardplan.errors import UsageError


class Second(SingleRank):
    """Rank 1 of 3, which must not come to exchange anything: what it would get is its own."""

    rank, size = 1, 3


COMM, LAYOUT, AT = Second(), head_and_tail(13, 3), torch.arange(3)
KEYS, QUERIES = torch.ones(2, 3, 8), torch.ones(2, 1, 3, 8)

REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: even_ranges(5, 0), "5 positions in 0 parts"),
    (lambda: head_and_tail(-5, 2), "-5 positions in 4 parts"),
    (lambda: SequenceLayout(5, (((0, 2),), ((3, 5),))), "after [0, 2) comes [3, 5)"),
    (lambda: SequenceLayout(5, (((0, 3),), ((2, 5),))), "after [0, 3) comes [2, 5)"),
    (lambda: SequenceLayout(5, (((0, 4),), ())), "they end at 4"),
    (lambda: SequenceLayout(1, (((0, 2), (2, 1)),)), "after [0, 2) comes [2, 1)"),
    (lambda: one_after_another([head_and_tail(5, 2)], 3), "ranks of a layout: 2, not 3"),
    (lambda: scatter_sequence(torch.ones(14), LAYOUT, COMM), "dimension 0 of the sequence: 14, not 13"),
    (lambda: scatter_sequence(torch.ones(13), head_and_tail(13, 4), COMM), "ranks of the layout: 4, not 3"),
    (
        lambda: scatter_sequence(torch.ones(9), head_and_tail(13, 1), SingleRank()),
        "dimension 0 of the sequence: 9, not 13",
    ),
    (lambda: gather_sequence(torch.ones(2, 5), LAYOUT, COMM, -1), "dimension -1 of the part of rank 1: 5, not 4"),
    (lambda: gather_parts(torch.ones(2), [2, 2], COMM), "sizes of parts: 2, not 3"),
    (lambda: VocabParallelEmbedding(torch.ones(5, 2), (5, 11), COMM), "rows of the embedding of rank 1: 5, not 6"),
    (
        lambda: ParallelLMHead(torch.ones(5, 2), even_ranges(18, 3), COMM)(torch.ones(1, 2)),
        "dimension -1 of the part of rank 1: 5, not 6",
    ),
    (lambda: SplitRMSNorm([torch.ones(2)] * 2, [6], 1e-6, COMM), "widths of a norm: 1, not 2"),
    (lambda: next(exchange(KEYS, KEYS, [AT], COMM)), "tensors of positions: 1, not 3"),
    (lambda: next(exchange(KEYS, KEYS, [AT[:2]] * 3, COMM)), "keys of rank 1: 3, not 2"),
    (lambda: attend(QUERIES, Visibility(AT[:1]), [KeyPart(KEYS, KEYS, AT)], 1.0), "positions of queries: 1, not 3"),
    (lambda: attend_to_part(QUERIES, Visibility(AT), KeyPart(KEYS, KEYS, AT[:1]), 1.0), "positions of keys: 1, not 3"),
    (lambda: attend_to_part(QUERIES, Visibility(AT), KeyPart(KEYS, KEYS[:, :1], AT), 1.0), "values of keys: 1, not 3"),
    (lambda: attend(QUERIES, Visibility(AT), [], 1.0), "there are no parts to attend to"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_does_not_fit_is_refused_with_the_numbers(call, message):
    with pytest.raises(UsageError) as error:
        call()
    assert message in error.value.message
    assert error.value.hint
