"""The replay of a row: what a drafter proposes at every anchor, beside what was written there. Validation and evaluation share it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.data.rows import Row
from common.families.family import Drafted, Proposer
from common.objective.acceptance import Replay
from common.objective.blocks import Blocks, every_anchor
from common.target.vocabulary import Vocabulary


def draft_blocks(drafter: Callable[..., Tensor], vocabulary: Vocabulary, features_TF: Tensor, blocks: Blocks) -> Drafted:
    """Run a drafter (or its compiled forward) on a packet's blocks."""
    embeddings = vocabulary.embed(blocks.tokens_U)
    hidden = drafter(embeddings, blocks.positions_AK, features_TF, blocks.context_positions_T, blocks.mask)
    before_A = torch.where(blocks.anchor_A > blocks.lo_A, blocks.anchor_A - 1, -1).long()
    return Drafted(hidden, blocks.tokens_U[:-1], features_TF, before_A)


@torch.no_grad()
def replay_row(
    row: Row,
    anchors: int,
    blocks_of: Callable[[np.ndarray, np.ndarray], Blocks],
    drafted_of: Callable[[Blocks], Drafted],
    proposer: Proposer,
    tree_width: int | None,
) -> Replay:
    """Replay all anchors of a row, `anchors` of them a forward.

    `blocks_of` builds the blocks of (anchor, keep) on the device, `drafted_of` runs the drafter on them. A replay of trees needs the
    `tree_width` best tokens of a node; None is for chains alone.
    """
    none, plain = np.zeros(0, np.int64), proposer.plain
    accepted, plain_accepted, tokens, labels, children = [none], [none], [none], [], []
    for anchor, keep in every_anchor(row, anchors):
        blocks, kept = blocks_of(anchor, keep), int(keep.sum())
        drafted, labels_AJ = drafted_of(blocks), blocks.labels_AJ.masked_fill(~blocks.valid_AJ, -1)
        accepted.append(_accepted(proposer, drafted, labels_AJ)[:kept])
        if plain is not None:
            plain_accepted.append(_accepted(plain, drafted, labels_AJ)[:kept])
        labels.append(labels_AJ[:kept].cpu().numpy())
        tokens.append(drafted.anchors_A[:kept].cpu().numpy())
        if tree_width is not None:
            children += proposer.children(drafted, tree_width)[:kept]
    slots = labels[0].shape[1] if labels else 0
    labels.append(np.zeros((0, slots), np.int64))
    plain_N = None if plain is None else np.concatenate(plain_accepted)
    return Replay(np.concatenate(accepted), np.concatenate(tokens), np.concatenate(labels), children, plain_N)


def _accepted(proposer: Proposer, drafted: Drafted, labels_AJ: Tensor) -> np.ndarray:
    """How many tokens of each block's chain would be accepted: int64 [A]."""
    return (proposer.chain(drafted) == labels_AJ).int().cumprod(1).sum(1).cpu().numpy()
