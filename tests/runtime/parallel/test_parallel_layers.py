"""Linear layers, embeddings and norms that are cut over ranks: results and gradients of one device, in float64.

Guards against gradients that are added up over ranks twice or not at all, and against uneven cuts put together wrongly.
"""

import pytest
import torch
import torch.nn.functional as F

from mgtp.runtime.parallel.ranges import even_ranges
from tests.parallel_jobs import embed_and_score, gradient, leaf, loss, mlp, norm, random

SIZES = (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.soak))


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
def test_column_then_row(size, world):
    x, up, down, bias = random(5, 6), random(11, 6, seed=1), random(7, 11, seed=2), random(7, seed=3)
    whole = [leaf(t) for t in (x, up, down, bias)]
    y = F.linear(torch.tanh(F.linear(whole[0], whole[1])), whole[2], whole[3])
    loss(y).backward()
    for rank, (ours, *grads) in enumerate(world.run(size, mlp, x, up, down, bias)):
        start, stop = even_ranges(11, size)[rank]
        dx, dup, ddown, dbias = map(gradient, whole)
        assert_same(ours, y)
        for own, expected in zip(grads, (dx, dup[start:stop], ddown[:, start:stop], dbias), strict=True):
            assert_same(own, expected)


@pytest.mark.parametrize("vocab", (13, 2))  # 2: most ranks have no row
@pytest.mark.parametrize("size", SIZES)
def test_embedding_and_head(size, vocab, world):
    ids, table, head = torch.tensor([0, 12, 5, 5, 8]) % vocab, random(vocab, 6), random(vocab, 6, seed=1)
    whole = leaf(table), leaf(head)
    logits = F.linear(torch.tanh(F.embedding(ids, whole[0])), whole[1])
    loss(logits).backward()
    for rank, (ours, dtable, dhead) in enumerate(world.run(size, embed_and_score, ids, table, head)):
        start, stop = even_ranges(vocab, size)[rank]
        assert_same(ours, logits)
        assert_same(dtable, gradient(whole[0])[start:stop])
        assert_same(dhead, gradient(whole[1])[start:stop])


@pytest.mark.parametrize("size", SIZES)
def test_norm_over_a_split_width(size, world):
    x, z, w = random(4, 11), random(4, 11, seed=1), random(11, seed=2)
    whole = leaf(x), leaf(w)
    y = torch.cat([F.rms_norm(t, (11,), whole[1], 1e-6) for t in (whole[0], z)])
    loss(y).backward()
    for rank, (ours, dx, dw) in enumerate(world.run(size, norm, x, z, w)):
        start, stop = even_ranges(11, size)[rank]
        assert_same(ours, y)
        assert_same(dx, gradient(whole[0])[:, start:stop])
        assert_same(dw, gradient(whole[1])[start:stop])
