"""The replay of a row: what a drafter proposes at every anchor, beside what was written there. Validation and evaluation share it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.data.rows import Row
from common.families.family import Proposer
from common.objective.acceptance import Replay
from common.objective.blocks import Blocks, every_anchor


@torch.no_grad()
def replay_row(
    row: Row,
    anchors: int,
    blocks_of: Callable[[np.ndarray, np.ndarray], Blocks],
    hidden_of: Callable[[Blocks], Tensor],
    proposer: Proposer,
    tree_width: int | None,
) -> Replay:
    """Replay all anchors of a row, `anchors` of them a forward.

    `blocks_of` builds the blocks of (anchor, keep) on the device, `hidden_of` runs the drafter on them. A replay of trees needs the
    `tree_width` best tokens of a node; None is for chains alone.
    """
    accepted, labels, tokens, children = [np.zeros(0, np.int64)], [], [np.zeros(0, np.int64)], []
    for anchor, keep in every_anchor(row, anchors):
        blocks, kept = blocks_of(anchor, keep), int(keep.sum())
        hidden, anchors_A = hidden_of(blocks), blocks.tokens_U[:-1]
        labels_AJ = blocks.labels_AJ.masked_fill(~blocks.valid_AJ, -1)
        right_AJ = proposer.chain(hidden, anchors_A) == labels_AJ
        accepted.append(right_AJ.int().cumprod(1).sum(1)[:kept].cpu().numpy())
        labels.append(labels_AJ[:kept].cpu().numpy())
        tokens.append(anchors_A[:kept].cpu().numpy())
        if tree_width is not None:
            children += proposer.children(hidden, anchors_A, tree_width)[:kept]
    slots = labels[0].shape[1] if labels else 0
    labels.append(np.zeros((0, slots), np.int64))
    return Replay(np.concatenate(accepted), np.concatenate(tokens), np.concatenate(labels), children)
