"""The loss of a packet's blocks by the drafter's shared head, and how well its proposals do while it learns.

Legend: A anchors, K block slots, J = K - 1 predicted slots, D hidden, T tokens of the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import ObjectiveConfig
from common.objective.blocks import Blocks
from common.objective.head import Teacher, slot_terms
from common.objective.losses import LOSSES, confidence_weights
from common.target.vocabulary import Vocabulary

Metrics = dict[str, tuple[Tensor, Tensor]]


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
) -> Result:
    """Weighted loss of all blocks, every slot by itself, to be divided by the weights of the whole optimiser step.

    Shapes: hidden_AJD [A, J, D]; final_hidden_TD [T, D], the target's hidden states after its norm (for losses that distil). Units: nats.
    Metrics: loss (weighted), nll (plain mean over valid slots), and those of `acceptance_metrics`.
    """
    loss, labels_AJ, valid_AJ = LOSSES[config.loss], blocks.labels_AK[:, 1:], blocks.valid_AK[:, 1:]
    teacher = Teacher(final_hidden_TD, _index_before(blocks, labels_AJ, len(final_hidden_TD))) if loss.distils else None
    terms_CAJ, nll_AJ, hit_AJ = slot_terms(hidden_AJD, vocabulary, labels_AJ, loss, config.head, teacher, chunk_anchors)
    return weighted(loss.combine(terms_CAJ, valid_AJ), nll_AJ, hit_AJ, blocks, config)


def weighted(value_AJ: Tensor, nll_AJ: Tensor, hit_AJ: Tensor, blocks: Blocks, config: ObjectiveConfig) -> Result:
    """The Result of slots' values: weighted, summed and measured. `hit_AJ` says where the proposed token is the label."""
    valid_AJ = blocks.valid_AK[:, 1:]
    weights_AJ = blocks.weights_AK[:, 1:] if config.weights == "decay" else confidence_weights(nll_AJ, valid_AJ, config.alpha)
    loss_sum, weight_sum = (weights_AJ * value_AJ).sum(), weights_AJ.sum()
    metrics = {
        "loss": (loss_sum.detach(), weight_sum),
        "nll": ((nll_AJ * valid_AJ).sum(), valid_AJ.sum()),
        **acceptance_metrics(hit_AJ & valid_AJ, blocks),
    }
    return Result(loss_sum, weight_sum, metrics)


def acceptance_metrics(correct_AJ: Tensor, blocks: Blocks) -> Metrics:
    """Where proposals agree with the labels: accuracy and accepted (unbroken) [J], tau (1 + accepted, per anchor), and the share of
    packets that are empty, without an anchor."""
    accepted_AJ, kept, valid_J = correct_AJ.int().cumprod(1), blocks.keep_A.sum(), blocks.valid_AK[:, 1:].sum(0)
    return {
        "accuracy": (correct_AJ.sum(0), valid_J),
        "accepted": (accepted_AJ.sum(0), valid_J),
        "tau": (accepted_AJ.sum() + kept, kept),
        "empty": ((kept == 0).float(), torch.ones_like(kept)),
    }


def _index_before(blocks: Blocks, labels_AJ: Tensor, row_tokens: int) -> Tensor:
    """Row index of the token before each label: where the target's own distribution over the label lies."""
    slots = torch.arange(labels_AJ.shape[1], device=labels_AJ.device)
    return (blocks.anchor_A[:, None] + slots).clamp(max=row_tokens - 1)
