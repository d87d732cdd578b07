"""The loss of a packet's blocks by the drafter's shared head, and how well its proposals do while it learns.

Legend: A anchors, J predicted slots, D hidden, T tokens of the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import ObjectiveConfig
from common.objective.blocks import Blocks
from common.objective.head import LogitBias, SlotTerms, Teacher, slot_terms
from common.objective.losses import LOSSES, weigh
from common.target.vocabulary import Vocabulary

Metrics = dict[str, tuple[Tensor, Tensor]]
"""(sum, count) by name."""


@dataclass
class Result:
    """A packet's loss as a sum (with gradient) and the sum of its weights; metrics as (sum, count) tensors."""

    loss_sum: Tensor
    weight_sum: Tensor
    metrics: Metrics


def base_loss(
    hidden_AJD: Tensor,
    vocabulary: Vocabulary,
    blocks: Blocks,
    config: ObjectiveConfig,
    final_hidden_TD: Tensor | None = None,
    chunk_anchors: int | None = None,
    bias: LogitBias | None = None,
) -> Result:
    """Weighted loss of all blocks by the target's head, to be divided by the weights of the whole optimiser step.

    `bias` is what a family adds to the logits, e.g. for the token before a slot (teacher-forced: the label before it).
    Shapes: hidden_AJD [A, J, D]; final_hidden_TD [T, D], the target's hidden states after its norm (for losses that distil). Units: nats.
    Metrics: loss (weighted), nll (plain mean over valid slots), and those of `acceptance_metrics`.
    """
    value_AJ, terms = slot_losses(hidden_AJD, vocabulary, blocks, config, final_hidden_TD, chunk_anchors, bias)
    return weighted(value_AJ, terms.nll, terms.hit, blocks, config)


def slot_losses(
    hidden_AJD: Tensor,
    vocabulary: Vocabulary,
    blocks: Blocks,
    config: ObjectiveConfig,
    final_hidden_TD: Tensor | None = None,
    chunk_anchors: int | None = None,
    bias: LogitBias | None = None,
    candidates: int = 0,
) -> tuple[Tensor, SlotTerms]:
    """Each slot's loss by the target's head [A, J], not yet weighted, and all that the head gave, `candidates` of each slot included."""
    loss, labels_AJ = LOSSES[config.loss], blocks.labels_AJ
    teacher = teacher_of(final_hidden_TD, blocks) if loss.distils else None
    terms = slot_terms(hidden_AJD, vocabulary, labels_AJ, loss, config.head, teacher, bias, chunk_anchors, candidates)
    return loss.combine(terms.terms, blocks.valid_AJ), terms


def weighted(value_AJ: Tensor, nll_AJ: Tensor, hit_AJ: Tensor, blocks: Blocks, config: ObjectiveConfig) -> Result:
    """The Result of slots' values: weighted, summed and measured. `hit_AJ` says where the proposed token is the label."""
    valid_AJ, weights_AJ = blocks.valid_AJ, slot_weights(nll_AJ, blocks, config)
    loss_sum, weight_sum = (weights_AJ * value_AJ).sum(), weights_AJ.sum()
    metrics = {
        "loss": (loss_sum.detach(), weight_sum),
        "nll": ((nll_AJ * valid_AJ).sum(), valid_AJ.sum()),
        **acceptance_metrics(hit_AJ & valid_AJ, blocks),
    }
    return Result(loss_sum, weight_sum, metrics)


def slot_weights(nll_AJ: Tensor, blocks: Blocks, config: ObjectiveConfig) -> Tensor:
    """How much each slot counts, 0 where it has no label: [A, J], without gradient."""
    return weigh(nll_AJ, blocks.valid_AJ, blocks.weights_AJ, config)


def acceptance_metrics(correct_AJ: Tensor, blocks: Blocks) -> Metrics:
    """Where proposals agree with the labels, and the share of packets that are empty, without an anchor.

    Shapes: accuracy and accepted (unbroken from the first slot) [J]; tau (1 + accepted, per anchor) and empty are scalars.
    """
    accepted_AJ, kept, valid_J = correct_AJ.int().cumprod(1), blocks.keep_A.sum(), blocks.valid_AJ.sum(0)
    return {
        "accuracy": (correct_AJ.sum(0), valid_J),
        "accepted": (accepted_AJ.sum(0), valid_J),
        "tau": (accepted_AJ.sum() + kept, kept),
        "empty": ((kept == 0).float(), torch.ones_like(kept)),
    }


def teacher_of(final_hidden_TD: Tensor | None, blocks: Blocks) -> Teacher:
    """The target's own distribution over each label lies at the token before it."""
    assert final_hidden_TD is not None, "packets carry final hidden states where the loss distils"
    slots = torch.arange(blocks.labels_AJ.shape[1], device=blocks.labels_AJ.device)
    return Teacher(final_hidden_TD, (blocks.anchor_A[:, None] + slots).clamp(max=len(final_hidden_TD) - 1))
