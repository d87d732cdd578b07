"""Anchors, and the blocks of slots behind them. Pure functions on the host.

An anchor is a supervised token whose successor is supervised too; its block holds the anchor's token and K - 1 masked slots, and J of
its slots, the last ones, predict the 1st to J-th token after the anchor: all but the anchor's own slot, or (where the drafter samples from
the anchor, too) all K. A prediction counts while the labels up to it lie unbroken in one supervised document.

Legend: T tokens of the row, A anchors, K block slots, J predicted slots (K - 1 or K).
Source: block drafting DFlash, arXiv 2602.06036.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from common.data.rows import Row
from common.drafter.block_mask import MaskSpec, PacketMask, packet_mask
from common.seeds import generator

GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
"""Decay length by block size, as DFlash trained them."""


def default_anchors(pack_tokens: int, block_size: int) -> int:
    """One anchor per six tokens, rounded up so that blocks fill tiles of 128 queries."""
    tile = 128 // block_size if 128 % block_size == 0 else 1
    return -(-pack_tokens // (6 * tile)) * tile


def candidates(row: Row) -> np.ndarray:
    """Row indices of all possible anchors: supervised, and followed by a supervised token of the same document."""
    supervised = row.loss_mask.astype(bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:] & (row.document_start[:-1] == row.document_start[1:]))


def draw_anchors(row: Row, anchors: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw up to `anchors` candidates without replacement, by a generator of (seed, packet number) alone.

    Every document of the row gets equally many, as far as it has them: drawn over the whole row, long documents would get most, and the
    drafter learns less (0.07 of held-out tau, benchmarks/README.md).
    Shapes: -> (anchor int32 [A] sorted, keep bool [A]); empty slots come last.
    """
    found = candidates(row)
    if len(found) > anchors:
        chance, tie = generator("anchors", seed, number).random((2, len(found)))
        by_document = np.lexsort((chance, row.document_start[found]))
        _, first, size = np.unique(row.document_start[found], return_index=True, return_counts=True)
        rank = np.empty(len(found))  # a candidate's number among those of its document, in the order of chance
        rank[by_document] = np.arange(len(found)) - np.repeat(first, size)
        found = np.sort(found[np.argsort(rank + tie, kind="stable")[:anchors]])
    return _padded(found, anchors, len(row.tokens))


def every_anchor(row: Row, anchors: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All candidates of a row in order, as a list of (anchor, keep) of `anchors` slots each; empty if the row has none."""
    found = candidates(row)
    return [_padded(found[start : start + anchors], anchors, len(row.tokens)) for start in range(0, len(found), anchors)]


def _padded(found: np.ndarray, anchors: int, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    anchor_A = np.full(anchors, row_tokens - 1, np.int32)
    anchor_A[: len(found)] = found
    return anchor_A, np.arange(anchors) < len(found)


@dataclass
class Blocks:
    """A packet's blocks, on the host or on a device.

    Shapes: anchor_A (row index), lo_A (first row index of the anchor's document) int32, keep_A bool; tokens_U (U = A + 1: the
    anchors' tokens, then the mask token, which every slot but the first holds) and labels_AJ int64; positions_AK and context_positions_T
    int32 (index in the document); valid_AJ bool; weights_AJ float32 (decay where valid). `mask` says which keys the slots see.
    """

    anchor_A: Tensor
    lo_A: Tensor
    keep_A: Tensor
    tokens_U: Tensor
    positions_AK: Tensor
    context_positions_T: Tensor
    labels_AJ: Tensor
    valid_AJ: Tensor
    weights_AJ: Tensor
    mask: PacketMask

    def to(self, device: torch.device | str) -> "Blocks":
        """The same blocks on a device; to CUDA from pinned memory and without waiting."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        if torch.device(device).type == "cuda":
            moved = {name: value.pin_memory() for name, value in moved.items()}
        return Blocks(**{name: value.to(device, non_blocking=True) for name, value in moved.items()})


def build_blocks(
    row: Row,
    anchor_A: np.ndarray,
    keep_A: np.ndarray,
    block_size: int,
    mask_token_id: int,
    gamma: float | None = None,
    window: int | None = None,
    sample_from_anchor: bool = False,
) -> Blocks:
    """Build the blocks of a row's anchors on the host.

    `gamma` None takes the block size's usual decay length; `window` is that of the drafter's sliding layers, if it has any;
    `sample_from_anchor` says that the anchor's own slot predicts, too.
    """
    T, slot_K, slot_J = len(row.tokens), np.arange(block_size), np.arange(block_size - 1 + sample_from_anchor)
    lo_A = np.where(keep_A, row.document_start[anchor_A], anchor_A).astype(np.int32)  # an empty slot has no context
    index_AJ = anchor_A[:, None] + 1 + slot_J
    inside_AJ = np.minimum(index_AJ, T - 1)
    counts_AJ = (index_AJ < T) & (row.document_start[inside_AJ] == lo_A[:, None]) & (row.loss_mask[inside_AJ] != 0)
    valid_AJ = np.logical_and.accumulate(counts_AJ, axis=1) & keep_A[:, None]
    gamma = gamma or np.interp(block_size, list(GAMMA), list(GAMMA.values()))
    arrays = dict(
        anchor_A=anchor_A,
        lo_A=lo_A,
        keep_A=keep_A,
        tokens_U=np.append(row.tokens[anchor_A], mask_token_id).astype(np.int64),
        positions_AK=(anchor_A - lo_A)[:, None] + slot_K.astype(np.int32),
        context_positions_T=row.positions(),
        labels_AJ=np.where(valid_AJ, row.tokens[inside_AJ], 0).astype(np.int64),
        valid_AJ=valid_AJ,
        weights_AJ=(valid_AJ * np.exp(-slot_J / gamma)).astype(np.float32),
    )
    mask = packet_mask(MaskSpec(T, len(anchor_A), block_size), anchor_A, lo_A, keep_A, window)
    return Blocks(**{name: torch.from_numpy(array) for name, array in arrays.items()}, mask=mask)
