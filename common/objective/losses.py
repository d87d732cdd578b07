"""The losses, each in one place: terms per slot from the drafter's distribution and the label or the target's distribution.

A term is differentiated by autograd, chunk by chunk of the head; a gradient by hand stands here only where it was measured to pay.
How slots are weighted stands here too.

Legend: A anchors, J predicted slots, R rows of a chunk (slots of all its blocks), C terms, V vocabulary. Units: nats.
Source: DFlash, arXiv 2602.06036; weights D-PACE, arXiv 2605.18810; lk loss, arXiv 2602.23881.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config import ObjectiveConfig

LK_SHARPNESS = 3.0
"""How fast `lk` turns from KL to TV as acceptance grows."""


@dataclass(frozen=True)
class Loss:
    """A loss as C terms per slot, `count` of them.

    terms: (log q [R, V], labels [R], log p [R, V]) -> C tensors [R]; q is the drafter's distribution, p the target's, None unless the
        loss distils.
    combine: (terms [C, A, J], valid [A, J]) -> the slots' values [A, J].
    distils: whether it compares with the target's distribution and so needs its final hidden state.
    gradient: (q [R, V], labels [R]) -> the gradient of the only term with respect to the logits, by hand.
    """

    count: int
    terms: Callable[[Tensor, Tensor, Any], tuple[Tensor, ...]]
    combine: Callable[[Tensor, Tensor], Tensor]
    distils: bool = True
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None


def cross_entropy(log_q_RV: Tensor, labels_R: Tensor, log_p_RV: Tensor | None = None) -> tuple[Tensor, ...]:
    """The label's negative log-likelihood."""
    return (-log_q_RV.gather(1, labels_R[:, None]).squeeze(1),)


def cross_entropy_gradient(q_RV: Tensor, labels_R: Tensor) -> Tensor:
    """Gradient of `cross_entropy`. By hand it takes a third of autograd's pointwise time, and one tensor of logits instead of two."""
    return q_RV - (torch.arange(q_RV.shape[1], device=q_RV.device) == labels_R[:, None]).to(q_RV.dtype)


def kl_divergence(log_q_RV: Tensor, labels_R: Tensor, log_p_RV: Tensor) -> tuple[Tensor, ...]:
    """KL(p || q)."""
    return ((log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1),)


def total_variation(log_q_RV: Tensor, labels_R: Tensor, log_p_RV: Tensor) -> tuple[Tensor, ...]:
    """1 - sum min(p, q): the share of proposals that sampling would reject."""
    return (1 - torch.minimum(log_p_RV.exp(), log_q_RV.exp()).sum(-1),)


def kl_and_variation(log_q_RV: Tensor, labels_R: Tensor, log_p_RV: Tensor) -> tuple[Tensor, ...]:
    """Both, for `by_acceptance` to mix."""
    return (*kl_divergence(log_q_RV, labels_R, log_p_RV), *total_variation(log_q_RV, labels_R, log_p_RV))


def only_term(terms_CAJ: Tensor, valid_AJ: Tensor) -> Tensor:
    """The value of a loss of one term."""
    return terms_CAJ[0]


def by_acceptance(terms_CAJ: Tensor, valid_AJ: Tensor) -> Tensor:
    """KL where the target would accept little at that slot, total variation where it accepts much."""
    kl_AJ, variation_AJ = terms_CAJ
    acceptance_J = (valid_AJ * (1 - variation_AJ.detach())).sum(0) / valid_AJ.sum(0).clamp(min=1)
    share_J = torch.exp(-LK_SHARPNESS * acceptance_J)
    return share_J * kl_AJ + (1 - share_J) * variation_AJ


LOSSES = {
    "ce": Loss(1, cross_entropy, only_term, distils=False, gradient=cross_entropy_gradient),
    "kl": Loss(1, kl_divergence, only_term),
    "tv": Loss(1, total_variation, only_term),
    "lk": Loss(2, kl_and_variation, by_acceptance),
}
"""By the name that `objective.loss` takes."""


def weigh(nll_AJ: Tensor, valid_AJ: Tensor, decay_AJ: Tensor, config: ObjectiveConfig) -> Tensor:
    """The slots' weights as `objective.weights` says; `decay_AJ` are those of `decay`."""
    return decay_AJ if config.weights == "decay" else confidence_weights(nll_AJ, valid_AJ, config.alpha)


def confidence_weights(nll_AJ: Tensor, valid_AJ: Tensor, alpha: float) -> Tensor:
    """D-PACE: w_j = sum over valid n >= j of prod_{i <= n} ((1 - alpha) q_i + alpha), q_i the label's probability; without gradient."""
    confidence_AJ = torch.where(valid_AJ, (1 - alpha) * torch.exp(-nll_AJ.detach()) + alpha, 1.0)
    reached_AJ = confidence_AJ.cumprod(1) * valid_AJ
    return reached_AJ.flip(1).cumsum(1).flip(1) * valid_AJ
