"""The mask rule: a wrong key here trains the drafter on what it cannot see when it serves."""

import numpy as np
import pytest
import torch

from common import attention

# Twelve tokens in two documents (0-6, 7-11), blocks of three at anchors 2, 4 and 9, and an empty slot.
SPEC = attention.MaskSpec(row_tokens=12, anchors=4, block_size=3)
ANCHORS, STARTS, KEEP = torch.tensor([2, 4, 9, 12]), torch.tensor([0, 0, 7, 12]), torch.tensor([True, True, True, False])
FULL = """
xx.......... xxx ... ... ...
xx.......... xxx ... ... ...
xx.......... xxx ... ... ...
xxxx........ ... xxx ... ...
xxxx........ ... xxx ... ...
xxxx........ ... xxx ... ...
.......xx... ... ... xxx ...
.......xx... ... ... xxx ...
.......xx... ... ... xxx ...
............ ... ... ... x..
............ ... ... ... .x.
............ ... ... ... ..x
"""
WINDOW_4 = """
xx.......... x.. ... ... ...
xx.......... xx. ... ... ...
.x.......... xxx ... ... ...
.xxx........ ... x.. ... ...
..xx........ ... xx. ... ...
...x........ ... xxx ... ...
.......xx... ... ... x.. ...
.......xx... ... ... xx. ...
........x... ... ... xxx ...
............ ... ... ... x..
............ ... ... ... .x.
............ ... ... ... ..x
"""


@pytest.mark.parametrize(("window", "drawn"), [(None, FULL), (4, WINDOW_4)])
def test_predicate_equals_the_mask_drawn_by_hand(window, drawn):
    expected = torch.tensor([[c == "x" for c in line.replace(" ", "")] for line in drawn.split("\n") if line])
    assert torch.equal(attention.dense_mask(SPEC, ANCHORS, STARTS, KEEP, window), expected)


def test_attention_equals_a_softmax_over_the_visible_keys():
    """Grouped heads paired wrongly, or a wrong scale, would give a drafter that no engine computes."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, size = 4, 2, 8
    draw = lambda rows, count: torch.randn(rows, count, size, generator=generator, dtype=torch.float64)  # noqa: E731
    query, context, block = draw(12, heads), (draw(12, groups), draw(12, groups)), (draw(12, groups), draw(12, groups))
    mask = attention.dense_mask(SPEC, ANCHORS, STARTS, KEEP, 4)
    keys, values = (torch.cat(pair) for pair in zip(context, block, strict=True))
    out = attention.attend(query, context, block, mask)
    for head in range(heads):
        scores = query[:, head] @ keys[:, head // 2].T / size**0.5
        expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, head // 2]
        torch.testing.assert_close(out[:, head], expected)


def random_row(generator, spec, anchors=None):
    """Sorted anchors with their documents' starts on a random packed row, and a keep mask whose empty slots come last."""
    T, A = spec.row_tokens, spec.anchors
    starts = np.unique([0, *generator.choice(T, size=generator.integers(0, 8), replace=False)])
    count = int(generator.integers(0, A + 1)) if anchors is None else anchors
    anchor = np.full(A, T - 1, np.int32)
    anchor[:count] = np.sort(generator.choice(T, size=count, replace=False))
    keep = np.arange(A) < count
    lo = np.where(keep, starts[np.searchsorted(starts, anchor, side="right") - 1], anchor).astype(np.int32)
    return anchor, lo, keep


def marked(counts, indices):
    """The boolean matrix that a pair of counts and indices lists."""
    mask = np.zeros(indices.shape[2:], bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        assert columns[:count] == sorted(set(columns[:count])), "each tile once, ascending"
        mask[row, columns[:count]] = True
    return mask


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_tile_lists_equal_the_predicate(window, block_size):
    """A tile left out hides keys, a tile wrongly called full shows another conversation: neither raises anywhere."""
    generator = np.random.default_rng(block_size)
    spec = attention.MaskSpec(row_tokens=640, anchors=256 // block_size, block_size=block_size)
    for trial in range(12):
        row = random_row(generator, spec, anchors=spec.anchors if trial < 6 else None)
        tiles = attention.plan_tiles(spec, *row, window)
        dense = attention.dense_mask(spec, *map(torch.from_numpy, row), window).numpy()
        by_tile = dense.reshape(2, attention.TILE, 7, attention.TILE)
        partial, full = marked(*tiles[0:2]), marked(*tiles[2:4])
        assert np.array_equal(partial | full, by_tile.any((1, 3))) and not (partial & full).any()
        context = np.s_[:, :5]  # a block tile may be full, and is masked all the same
        assert np.array_equal(full[context], by_tile.all((1, 3))[context])
        assert np.array_equal(marked(*tiles[4:6]), partial.T) and np.array_equal(marked(*tiles[6:8]), full.T)


@pytest.mark.parametrize("window", [None, 40])
def test_block_sparse_twin_equals_the_dense_one(window):
    """The kernel of the GPU must compute what the tests on CPU prove."""
    generator = np.random.default_rng(0)
    spec = attention.MaskSpec(row_tokens=256, anchors=8, block_size=16)
    plan = attention.plan(spec, *random_row(generator, spec, anchors=7), window)
    sparse = attention.block_mask(spec, plan, plan.full_tiles if window is None else plan.sliding_tiles, window)
    draw = lambda rows, heads: torch.from_numpy(generator.standard_normal((rows, heads, 16)))  # noqa: E731
    query, context, block = draw(128, 4), (draw(256, 2), draw(256, 2)), (draw(128, 2), draw(128, 2))
    expected = attention.attend(query, context, block, attention.mask_of(spec, plan, window))
    torch.testing.assert_close(attention.attend(query, context, block, sparse), expected)
    out = torch.compile(attention.attend, backend="eager", fullgraph=True)(query, context, block, sparse)
    torch.testing.assert_close(out, expected)


def test_rows_that_fill_no_tiles_run_on_the_dense_twin():
    spec = attention.MaskSpec(row_tokens=100, anchors=8, block_size=5)
    plan = attention.plan(spec, *random_row(np.random.default_rng(0), spec))
    assert plan.full_tiles is None and attention.mask_of(spec, plan, None).dtype == torch.bool
