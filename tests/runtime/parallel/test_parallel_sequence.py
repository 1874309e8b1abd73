"""A sequence shared out over ranks: scattered, gathered and attended to, with the results and gradients of one device.

Guards against positions lost or doubled in uneven cuts (fewer of them than ranks included), masks by the wrong
positions, queries that see nothing of a part, sinks counted once a rank, and gradients that stay where they arose.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgtp.runtime.parallel.attention import KeyPart, Visibility, attend
from mgtp.runtime.parallel.ranges import SequenceLayout, even_ranges, head_and_tail, one_after_another
from mgtp.runtime.parallel.sequence import restored_order
from tests.parallel_jobs import attention, attention_to_own_keys, gradient, leaf, loss, random, there_and_back

SIZES = (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.soak))


def uneven(size: int) -> SequenceLayout:
    """13 positions, of which the first rank has five in two pieces and the others what is left, the last ones none."""
    pieces = [((0, 2), (10, 13)), *[((2 + 4 * i, 6 + 4 * i),) for i in range(2)], *[()] * size][:size]
    missing = sorted(set(range(13)) - {i for own in pieces for p in own for i in range(*p)})
    if missing:
        pieces[-1] = (*pieces[-1], (missing[0], missing[-1] + 1))
    return SequenceLayout(13, tuple(pieces))


@given(length=st.integers(0, 60), ranks=st.integers(1, 9))
def test_head_and_tail_covers_once_and_balances(length, ranks):
    layout = head_and_tail(length, ranks)
    positions = [p for own in layout.pieces for start, stop in own for p in range(start, stop)]
    assert sorted(positions) == list(range(length))
    assert [positions[i] for i in restored_order(layout)] == list(range(length))
    work = [sum(p + 1 for start, stop in own for p in range(start, stop)) for own in layout.pieces]
    # Pieces differ by a position at most, and no position is more work than the last.
    assert max(work) - min(work) <= 2 * length


def test_sequences_one_after_another():
    layout = one_after_another([head_and_tail(4, 2), head_and_tail(5, 2)], 2)
    assert layout.length == 9
    assert layout.pieces == (((0, 1), (3, 4), (4, 5), (7, 9)), ((1, 2), (2, 3), (5, 6), (6, 7)))


@pytest.mark.parametrize("dim", (0, -1))
@pytest.mark.parametrize("size", SIZES)
def test_scatter_and_gather(size, dim, world):
    for layout in (head_and_tail(13, size), head_and_tail(2, size), uneven(size)):
        x = random(layout.length, layout.length)
        whole = leaf(x)
        loss(whole.square()).backward()
        for rank, (part, gathered, grad) in enumerate(world.run(size, there_and_back, x, layout, dim)):
            own = torch.tensor([i for p in layout.pieces[rank] for i in range(*p)], dtype=torch.int64)
            assert torch.equal(part, x.index_select(dim, own))
            assert torch.equal(gathered, x.square())
            assert torch.equal(grad, gradient(whole))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None = None):
    """Attention of a sequence's last tokens with sinks, in the plainest way."""
    at = torch.arange(k.shape[-2])
    queries = at[len(at) - q.shape[-2] :, None]
    seen = (at <= queries) & (at > queries - (window or len(at)))
    scores = (q @ k.unsqueeze(1).transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    scores = torch.cat([scores, sinks[..., None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v.unsqueeze(1)


@pytest.mark.parametrize("gather_bytes", (0, 1 << 30), ids=("ring", "gather"))
@pytest.mark.parametrize("size", SIZES)
def test_attention(size, gather_bytes, world):
    for layout, window in (
        (head_and_tail(13, size), None),
        (head_and_tail(13, size), 4),
        (uneven(size), 5),
        (head_and_tail(1, size), None),
        (head_and_tail(0, size), None),
    ):
        n = layout.length
        tensors = [random(2, 3, n, 8), random(2, n, 8, seed=1), random(2, n, 8, seed=2), random(2, 3, seed=3)]
        whole = [leaf(t) for t in tensors]
        out = reference(whole[0], whole[1], whole[2], whole[3], window)
        loss(out).backward()
        for ours, *grads in world.run(size, attention, tensors, layout, window, gather_bytes):
            torch.testing.assert_close(ours, out, rtol=1e-11, atol=1e-11)
            for own, t in zip(grads, whole, strict=True):
                torch.testing.assert_close(own, gradient(t), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
def test_attention_of_queries_that_every_rank_has(size, world):
    for n, length in ((2, 13), (1, 1), (1, 3)):  # fewer keys than ranks: some have none
        tensors = [random(2, 3, n, 8), random(2, length, 8, seed=1), random(2, length, 8, seed=2), random(2, 3, seed=3)]
        whole = [leaf(t) for t in tensors]
        out = reference(whole[0], whole[1], whole[2], whole[3])
        loss(out).backward()
        dq, dk, dv, dsinks = map(gradient, whole)
        for rank, (ours, *grads) in enumerate(world.run(size, attention_to_own_keys, tensors)):
            own = slice(*even_ranges(length, size)[rank])
            torch.testing.assert_close(ours, out, rtol=1e-11, atol=1e-11)
            for mine, expected in zip(grads, (dq, dk[..., own, :], dv[..., own, :], dsinks), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-11)


def test_keys_in_chunks(monkeypatch):
    """A long part is attended to a chunk at a time, which must not show, whatever its last chunk's size."""
    q, k, v, sinks = random(2, 3, 13, 8), random(2, 13, 8, seed=1), random(2, 13, 8, seed=2), random(2, 3, seed=3)
    monkeypatch.setattr("mgtp.runtime.parallel.attention.KEY_CHUNK", 3)
    monkeypatch.setattr("mgtp.runtime.parallel.attention.CHUNK_NUMBERS", 0)
    at = torch.arange(13)
    ours = attend(q, Visibility(at, 6), [KeyPart(k, v, at)], 8**-0.5, sinks)
    torch.testing.assert_close(ours, reference(q, k, v, sinks, 6))
