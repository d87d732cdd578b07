"""What a drafter learns and how well it does: anchors, blocks, labels, weights, losses, acceptance. Pure functions.

An anchor is a supervised token whose successor is supervised too; its block holds the anchor's token and K - 1 masked slots, and
slot k predicts the k-th token after the anchor. A slot counts while the labels up to it lie unbroken in one supervised document.

Legend: T tokens of the row, A anchors, K block slots, J = K - 1 predicted slots, D hidden, V vocabulary, N anchors of a whole row.
Source: block drafting DFlash, arXiv 2602.06036; weights D-PACE, arXiv 2605.18810; lk loss, arXiv 2602.23881; trees DDTree.
"""

import heapq
import itertools
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from common.head import Teacher, slot_best, slot_terms

GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
"""Decay length by block size, as DFlash trained them."""
LK_SHARPNESS = 3.0
"""How fast `lk` turns from KL to TV as acceptance grows."""


def default_anchors(pack_tokens, block_size):
    """One anchor per six tokens, rounded up so that blocks fill tiles of 128 queries."""
    tile = 128 // block_size if 128 % block_size == 0 else 1
    return -(-pack_tokens // (6 * tile)) * tile


def candidates(row):
    """Row indices of all possible anchors: supervised, and followed by a supervised token of the same document."""
    supervised = row.loss_mask.astype(bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:] & (row.document_start[:-1] == row.document_start[1:]))


def draw_anchors(row, anchors, seed, number):
    """Draw up to `anchors` candidates without replacement, by a generator of (seed, packet number) alone.

    Shapes: -> (anchor int32 [A] sorted, keep bool [A]); empty slots come last.
    """
    found = candidates(row)
    if len(found) > anchors:
        found = np.sort(np.random.default_rng((seed, number)).choice(found, anchors, replace=False))
    return _padded(found, anchors, len(row.tokens))


def every_anchor(row, anchors):
    """All candidates of a row in order, as a list of (anchor, keep) of `anchors` slots each; empty if the row has none."""
    found = candidates(row)
    return [_padded(found[start : start + anchors], anchors, len(row.tokens)) for start in range(0, len(found), anchors)]


def _padded(found, anchors, row_tokens):
    anchor_A = np.full(anchors, row_tokens - 1, np.int32)
    anchor_A[: len(found)] = found
    return anchor_A, np.arange(anchors) < len(found)


@dataclass
class Blocks:
    """A packet's blocks, on the host or on a device.

    Shapes: anchor_A (row index), lo_A (first row index of the anchor's document) int32, keep_A bool; tokens_U (U = A + 1: the
    anchors' tokens, then the mask token, which every slot but the first holds) and labels_AK int64; positions_AK and context_positions_T
    int32 (index in the document); valid_AK bool (slot 0 False); weights_AK float32 (decay where valid). `mask` is the attention's plan,
    attached by the caller.
    """

    anchor_A: torch.Tensor
    lo_A: torch.Tensor
    keep_A: torch.Tensor
    tokens_U: torch.Tensor
    positions_AK: torch.Tensor
    context_positions_T: torch.Tensor
    labels_AK: torch.Tensor
    valid_AK: torch.Tensor
    weights_AK: torch.Tensor
    mask: object = None

    def to(self, device):
        """The same blocks on a device; to CUDA from pinned memory and without waiting."""
        moved = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if torch.device(device).type == "cuda":
            moved = {name: value.pin() if name == "mask" else value.pin_memory() for name, value in moved.items()}
        return replace(
            self, **{name: value.to(device) if name == "mask" else value.to(device, non_blocking=True) for name, value in moved.items()}
        )


def build_blocks(row, anchor_A, keep_A, block_size, mask_token_id, gamma=None):
    """Build the blocks of a row's anchors on the host; `gamma` None takes the block size's usual decay length."""
    T, slot_K = len(row.tokens), np.arange(block_size)
    lo_A = np.where(keep_A, row.document_start[anchor_A], anchor_A).astype(np.int32)  # an empty slot has no context
    index_AK = anchor_A[:, None] + slot_K
    inside_AK = np.minimum(index_AK, T - 1)
    counts_AK = (index_AK < T) & (row.document_start[inside_AK] == lo_A[:, None]) & (row.loss_mask[inside_AK] != 0) & keep_A[:, None]
    valid_AK = np.logical_and.accumulate(counts_AK, axis=1)
    valid_AK[:, 0] = False
    gamma = gamma or np.interp(block_size, list(GAMMA), list(GAMMA.values()))
    arrays = dict(
        anchor_A=anchor_A,
        lo_A=lo_A,
        keep_A=keep_A,
        tokens_U=np.append(row.tokens[anchor_A], mask_token_id).astype(np.int64),
        positions_AK=(anchor_A - lo_A)[:, None] + slot_K.astype(np.int32),
        context_positions_T=row.positions(),
        labels_AK=np.where(valid_AK, row.tokens[inside_AK], 0).astype(np.int64),
        valid_AK=valid_AK,
        weights_AK=(valid_AK * np.exp(-(slot_K - 1) / gamma)).astype(np.float32),
    )
    return Blocks(**{name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass
class Result:
    """A packet's loss as a sum (with gradient) and the sum of its weights; metrics as (sum, count) tensors; accepted_A per anchor."""

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    metrics: dict
    accepted_A: torch.Tensor


def loss(hidden_AJD, vocabulary, blocks, config, final_hidden=None, chunk_anchors=None):
    """Weighted loss of all blocks, to be divided by the weights of the whole optimiser step.

    Shapes: hidden_AJD [A, J, D]; final_hidden [T, D], the target's hidden states after its norm (every loss but `ce`). Units: nats.
    Metrics: loss (weighted), nll (plain mean over valid slots), accuracy and accepted (unbroken) [J], tau (1 + accepted, per anchor),
    empty (share of packets without an anchor).
    """
    labels_AJ, valid_AJ = blocks.labels_AK[:, 1:], blocks.valid_AK[:, 1:]
    teacher = None if config.loss == "ce" else Teacher(final_hidden, _index_before(blocks, labels_AJ, len(final_hidden)))
    terms_CAJ, nll_AJ, hit_AJ = slot_terms(hidden_AJD, vocabulary, labels_AJ, config.loss, config.head, teacher, chunk_anchors)
    value_AJ = terms_CAJ[0] if config.loss != "lk" else _mixed(*terms_CAJ, valid_AJ)
    weights_AJ = blocks.weights_AK[:, 1:] if config.weights == "decay" else pace_weights(nll_AJ, valid_AJ, config.alpha)
    loss_sum, weight_sum = (weights_AJ * value_AJ).sum(), weights_AJ.sum()

    correct_AJ = hit_AJ & valid_AJ
    accepted_AJ = correct_AJ.int().cumprod(1)
    accepted_A, kept, valid_J = accepted_AJ.sum(1), blocks.keep_A.sum(), valid_AJ.sum(0)
    metrics = {
        "loss": (loss_sum.detach(), weight_sum),
        "nll": ((nll_AJ * valid_AJ).sum(), valid_J.sum()),
        "accuracy": (correct_AJ.sum(0), valid_J),
        "accepted": (accepted_AJ.sum(0), valid_J),
        "tau": (accepted_A.sum() + kept, kept),
        "empty": ((kept == 0).float(), torch.ones_like(kept)),
    }
    return Result(loss_sum, weight_sum, metrics, accepted_A)


def _index_before(blocks, labels_AJ, row_tokens):
    slots = torch.arange(labels_AJ.shape[1], device=labels_AJ.device)
    return (blocks.anchor_A[:, None] + slots).clamp(max=row_tokens - 1)


def _mixed(kl_AJ, tv_AJ, valid_AJ):
    """The lk loss: KL where the target would accept little at that slot, total variation where it accepts much."""
    acceptance_J = (valid_AJ * (1 - tv_AJ.detach())).sum(0) / valid_AJ.sum(0).clamp(min=1)
    share_J = torch.exp(-LK_SHARPNESS * acceptance_J)
    return share_J * kl_AJ + (1 - share_J) * tv_AJ


def pace_weights(nll_AJ, valid_AJ, alpha):
    """Weights by the drafter's confidence: w_j = sum over valid n >= j of prod_{i <= n} ((1 - alpha) q_i + alpha), without gradient."""
    confidence_AJ = torch.where(valid_AJ, (1 - alpha) * torch.exp(-nll_AJ.detach()) + alpha, 1.0)
    reached_AJ = confidence_AJ.cumprod(1) * valid_AJ
    return reached_AJ.flip(1).cumsum(1).flip(1) * valid_AJ


def walk(accepted_N, row):
    """Greedy speculative decoding replayed: from each assistant turn's first token, jump by accepted + 1 to the turn's end.

    Shapes: accepted_N, one number per candidate of the row, in order -> (emitted, verifications), int64 per document of the row.
    The turn's first token is the prefill's and is not counted; a turn of one token costs no verification.
    """
    return _walk(accepted_N.__getitem__, row)


def walk_tree(logprobs_NJk, ranks_NJ, row, budget):
    """The same walk when each verification checks a tree of `budget` nodes; arguments as `rank_labels` gives them."""
    return _walk(lambda n: tree_accepted(logprobs_NJk[n], ranks_NJ[n], budget), row)


def _walk(accepted, row):
    number = {at: n for n, at in enumerate(candidates(row).tolist())}
    emitted, verifications = np.zeros(row.documents, np.int64), np.zeros(row.documents, np.int64)
    for document, (first, stop) in enumerate(row.spans()):
        edges = np.flatnonzero(np.diff(row.loss_mask[first:stop] != 0, prepend=False, append=False)) + first
        for at, end in edges.reshape(-1, 2).tolist():
            while at < end - 1:
                jump = min(int(accepted(number[at])) + 1, end - 1 - at)
                emitted[document] += jump
                verifications[document] += 1
                at += jump
    return emitted, verifications


@torch.no_grad()
def rank_labels(hidden_AJD, vocabulary, blocks, top_k, chunk_anchors=None):
    """What a tree would be built from, and where in it the labels are.

    Shapes: -> logprobs [A, J, k] of each slot's best k tokens, sorted; ranks int64 [A, J] of the labels among them, k where absent.
    """
    logprobs, tokens = slot_best(hidden_AJD, vocabulary, top_k, chunk_anchors)
    match_AJk = (tokens == blocks.labels_AK[:, 1:, None]) & blocks.valid_AK[:, 1:, None]
    return logprobs, torch.where(match_AJk.any(-1), match_AJk.int().argmax(-1), logprobs.shape[-1])


def best_prefixes(logprobs_Jk):
    """Yield prefixes from the likeliest down, under the product of the slots' marginals.

    Shapes: logprobs_Jk [J, k], sorted downwards in each slot -> (parent, depth, rank): parent an earlier prefix's number or -1 (the
    root), depth from 1, rank within that slot. A yielded prefix offers its next sibling and its first child, so none is missed.
    """
    logprobs = logprobs_Jk.tolist()
    heap, offered = [(-logprobs[0][0], 0, -1, 1, 0)], 1  # earlier offers win ties: the order is the same on every machine
    for number in itertools.count():
        if not heap:
            return
        cost, _, parent, depth, rank = heapq.heappop(heap)
        yield parent, depth, rank
        slot = logprobs[depth - 1]
        if rank + 1 < len(slot):
            heapq.heappush(heap, (cost + slot[rank] - slot[rank + 1], offered, parent, depth, rank + 1))
        if depth < len(logprobs):
            heapq.heappush(heap, (cost - logprobs[depth][0], offered + 1, number, depth + 1, 0))
        offered += 2


def build_tree(logprobs_Jk, budget):
    """The `budget` likeliest prefixes as a list of (parent, depth, rank), parents first; see `best_prefixes`."""
    return list(itertools.islice(best_prefixes(logprobs_Jk), budget))


def tree_accepted(logprobs_Jk, ranks_J, budget):
    """Length of the labels' longest prefix that is in the tree of `budget` nodes."""
    absent = logprobs_Jk.shape[-1]
    ranks, tip, accepted = [*ranks_J.tolist(), absent], -1, 0
    for number, (parent, depth, rank) in enumerate(itertools.islice(best_prefixes(logprobs_Jk), budget)):
        if ranks[accepted] == absent:
            break
        if parent == tip and rank == ranks[depth - 1]:
            tip, accepted = number, depth
    return accepted
