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


def random_row(generator, spec):
    """Sorted anchors with their documents' starts on a random packed row, and a keep mask whose empty slots come last."""
    starts = np.sort(generator.choice(spec.row_tokens, size=generator.integers(1, 9), replace=False)).astype(np.int32)
    starts[0] = 0
    count = int(generator.integers(0, spec.anchors + 1))
    anchor = np.full(spec.anchors, spec.row_tokens, np.int32)
    anchor[:count] = np.sort(generator.choice(spec.row_tokens, size=count, replace=False))
    lo = np.where(anchor < spec.row_tokens, starts[np.searchsorted(starts, anchor, side="right") - 1], spec.row_tokens).astype(np.int32)
    return anchor, lo, np.arange(spec.anchors) < count
