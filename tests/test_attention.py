"""The mask rule: a wrong key here trains the drafter on what it cannot see when it serves."""

import numpy as np
import pytest
import torch

from common.drafter import attention, block_mask
from common.errors import UserError

# Twelve tokens in two documents (0-6, 7-11), blocks of three at anchors 2, 4 and 9, and an empty slot.
SPEC = block_mask.MaskSpec(row_tokens=12, anchors=4, block_size=3)
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
    assert torch.equal(block_mask.dense_mask(SPEC, ANCHORS, STARTS, KEEP, window), expected)


def test_attention_equals_a_softmax_over_the_visible_keys():
    """Grouped heads paired wrongly, or a wrong scale, would give a drafter that no engine computes."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, size = 4, 2, 8
    draw = lambda rows, count: torch.randn(rows, count, size, generator=generator, dtype=torch.float64)  # noqa: E731
    query, context, block = draw(12, heads), (draw(12, groups), draw(12, groups)), (draw(12, groups), draw(12, groups))
    mask = block_mask.dense_mask(SPEC, ANCHORS, STARTS, KEEP, 4)
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
    spec = block_mask.MaskSpec(row_tokens=640, anchors=256 // block_size, block_size=block_size)
    for trial in range(12):
        row = random_row(generator, spec, anchors=spec.anchors if trial < 6 else None)
        tiles = block_mask.mask_tiles(spec, *row, window)
        dense = block_mask.dense_mask(spec, *map(torch.from_numpy, row), window).numpy()
        by_tile = dense.reshape(2, block_mask.TILE, 7, block_mask.TILE)
        partial, full = marked(*tiles[0:2]), marked(*tiles[2:4])
        assert np.array_equal(partial | full, by_tile.any((1, 3))) and not (partial & full).any()
        context = np.s_[:, :5]  # a block tile may be full, and is masked all the same
        assert np.array_equal(full[context], by_tile.all((1, 3))[context])
        assert np.array_equal(marked(*tiles[4:6]), partial.T) and np.array_equal(marked(*tiles[6:8]), full.T)


def sparse_mask(spec, row, window):
    packet = block_mask.packet_mask(spec, *row, window)
    return attention.SparseMask(spec, packet, packet.full_tiles if window is None else packet.sliding_tiles, window)


def draw_inputs(generator, spec, heads, groups, size, dtype=torch.float64, device="cpu"):
    """query, (context keys, values), (block keys, values); values are views into wider tensors, as the drafter's are."""
    draw = lambda rows, count: torch.from_numpy(generator.standard_normal((rows, count, size))).to(device, dtype)  # noqa: E731
    queries = spec.anchors * spec.block_size
    pair = lambda rows: (draw(rows, groups), draw(rows, 2 * groups)[:, groups:])  # noqa: E731
    return draw(queries, heads), pair(spec.row_tokens), pair(queries)


@pytest.mark.parametrize("window", [None, 40])
def test_flex_twin_equals_the_dense_one(window):
    """The kernel of the GPU must compute what the tests on CPU prove."""
    generator = np.random.default_rng(0)
    spec = block_mask.MaskSpec(row_tokens=256, anchors=8, block_size=16)
    mask = sparse_mask(spec, random_row(generator, spec, anchors=7), window)
    inputs = draw_inputs(generator, spec, heads=4, groups=2, size=16)
    expected = attention.attend(*inputs, attention.mask_of(spec, mask.packet, window))
    torch.testing.assert_close(attention.attend_flex(*inputs, mask), expected)
    out = torch.compile(attention.attend_flex, backend="eager", fullgraph=True)(*inputs, mask)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("block_size", [4, 16])
def test_key_ranges_equal_the_predicate(window, block_size):
    """The backward kernel goes through these ranges: an anchor left out would lose a gradient."""
    generator = np.random.default_rng(block_size)
    spec = block_mask.MaskSpec(row_tokens=640, anchors=256 // block_size, block_size=block_size)
    for trial in range(12):
        row = random_row(generator, spec, anchors=spec.anchors if trial < 6 else None)
        ranges = block_mask.key_ranges(spec, *row, window)
        dense = block_mask.dense_mask(spec, *map(torch.from_numpy, row), window)[:, : spec.row_tokens]
        by_anchor = dense.view(spec.anchors, block_size, 5, block_mask.TILE)
        anchors = torch.arange(spec.anchors)
        for tile, (first, full, full_end, end) in enumerate(ranges.tolist()):
            some = by_anchor[:, :, tile].any(2).any(1)
            assert not some[(anchors < first) | (anchors >= end)].any()
            assert torch.equal(by_anchor[:, :, tile].all(2).all(1), (anchors >= full) & (anchors < full_end))


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on CUDA alone")


@CUDA
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "groups", "size", "block_size"), [(8, 2, 128, 16), (3, 1, 64, 8), (4, 4, 32, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_kernels_equal_the_dense_twin(window, heads, groups, size, block_size, dtype, tolerance):
    """Output and every gradient, on rows of several documents, with empty slots and empty contexts."""
    generator = np.random.default_rng(heads)
    spec = block_mask.MaskSpec(row_tokens=640, anchors=512 // block_size, block_size=block_size)
    mask = sparse_mask(spec, random_row(generator, spec, anchors=spec.anchors - 5), window)
    packet = mask.packet.to(torch.device("cuda"))
    mask = mask._replace(packet=packet, tiles=packet.full_tiles if window is None else packet.sliding_tiles)
    query, context, block = draw_inputs(generator, spec, heads, groups, size, dtype, "cuda")
    leaves = [x.detach().requires_grad_() for x in (query, *context, *block)]
    truth = [x.detach().double().requires_grad_() for x in leaves]
    assert attention.attention_kernel.fits(query, context[0], block_size)
    out = attention.attend(leaves[0], leaves[1:3], leaves[3:], mask)
    dense = block_mask.dense_mask(spec, *packet[:3], window)
    expected = attention.attend(truth[0], truth[1:3], truth[3:], dense)
    gradient = torch.randn_like(out)
    got = out, *torch.autograd.grad(out, leaves, gradient)
    for one, other in zip(got, (expected, *torch.autograd.grad(expected, truth, gradient.double())), strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@CUDA
def test_kernels_compile_into_the_drafters_forward():
    torch.library.opcheck(
        attention.attention_kernel.attention,
        opcheck_inputs(),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def opcheck_inputs():
    generator = np.random.default_rng(0)
    spec = block_mask.MaskSpec(row_tokens=256, anchors=8, block_size=16)
    packet = block_mask.packet_mask(spec, *random_row(generator, spec, anchors=7)).to(torch.device("cuda"))
    query, context, block = draw_inputs(generator, spec, 4, 2, 64, torch.bfloat16, "cuda")
    tensors = [x.requires_grad_() for x in (query, *context, *block)]
    return *tensors, *packet[:3], packet.full_tiles.key_ranges, 16, 0


def test_rows_that_fill_no_tiles_run_on_the_dense_twin():
    spec = block_mask.MaskSpec(row_tokens=100, anchors=8, block_size=5)
    packet = block_mask.packet_mask(spec, *random_row(np.random.default_rng(0), spec))
    assert packet.full_tiles is None and attention.mask_of(spec, packet, None).dtype == torch.bool


@pytest.mark.parametrize(
    ("spec", "words"),
    [((3000, 512, 16), r"data\.pack_tokens=3000.*2944 or 3072"), ((3072, 500, 16), r"objective\.anchors=500.*496 or 504")],
)
def test_shapes_that_fill_no_tiles_are_refused_on_cuda(spec, words):
    """Otherwise a large run falls back to a dense mask without a word, and out of memory or to a crawl."""
    with pytest.raises(UserError, match=words):
        attention.check_tiles(block_mask.MaskSpec(*spec), torch.device("cuda"))
    attention.check_tiles(block_mask.MaskSpec(*spec), torch.device("cpu"))
    attention.check_tiles(block_mask.MaskSpec(3000, 512, 10), torch.device("cuda"))
