"""The target's frozen head with a correction of low rank on its logits, which is learnt: the loss of all slots and every gradient.

The correction's table has a row for each token, so its gradient is a product over all slots with their weights: these are found in the
forward pass, too, block by block, and all gradients come out of one pass over the logits, chunk by chunk. `objective.head: checkpoint` is
the plain twin, autograd through `slot_terms`.

Legend: A anchors, J predicted slots, D hidden, V vocabulary, S rank of the correction, R rows of a chunk.
Source: DSpark, arXiv 2607.05147.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import compile_cache
from common.config import ObjectiveConfig
from common.objective.blocks import Blocks
from common.objective.head import CHUNK_LOGITS, Teacher, slot_terms, spans
from common.objective.losses import Loss, cross_entropy, total_variation, weigh
from common.target.vocabulary import Vocabulary

TILE = 128
"""Rows of a tile of the products: whole tiles, or the blocks of a packet leave a chunk of a few rows over."""


@dataclass(frozen=True)
class Mixture:
    """A slot's loss: `nll` times its label's negative log-likelihood plus `variation` times its total variation to the target."""

    nll: float
    variation: float


class Corrected(NamedTuple):
    """The loss of all slots as a sum, with gradient, and what it is made of, without.

    Shapes: loss_sum []; weights, nll, variation (zero without a teacher) [A, J]; hit bool [A, J].
    """

    loss_sum: Tensor
    weights_AJ: Tensor
    nll_AJ: Tensor
    variation_AJ: Tensor
    hit_AJ: Tensor


def corrected_loss(
    hidden_AJD: Tensor,
    before_AJS: Tensor,
    table_VS: Tensor,
    vocabulary: Vocabulary,
    blocks: Blocks,
    mixture: Mixture,
    config: ObjectiveConfig,
    teacher: Teacher | None,
    chunk_anchors: int | None = None,
) -> Corrected:
    """The weighted loss by logits = head(hidden) + table @ before, differentiable in hidden, before and table. Without a teacher it is nll
    alone. The target's logits must be neither scaled nor capped.

    Shapes: hidden [A, J, D], before [A, J, S], table [V, S]. Units: nats.
    """
    if config.head == "checkpoint":
        return _by_autograd(hidden_AJD, before_AJS, table_VS, vocabulary, blocks, mixture, config, teacher, chunk_anchors)
    slots, tokens = hidden_AJD.shape[1], vocabulary.head.shape[0]
    rows = -(-CHUNK_LOGITS // tokens // TILE) * TILE
    chunks = spans(len(hidden_AJD), slots * tokens, chunk_anchors or max(1, rows // slots))
    return Corrected(*_CorrectedHead.apply(hidden_AJD, before_AJS, table_VS, vocabulary, blocks, mixture, config, teacher, chunks))


def _by_autograd(
    hidden_AJD: Tensor,
    before_AJS: Tensor,
    table_VS: Tensor,
    vocabulary: Vocabulary,
    blocks: Blocks,
    mixture: Mixture,
    config: ObjectiveConfig,
    teacher: Teacher | None,
    chunk_anchors: int | None,
) -> Corrected:
    loss = NLL_ALONE if teacher is None else NLL_AND_VARIATION
    bias = lambda span: before_AJS[span].flatten(0, 1) @ table_VS.T  # noqa: E731
    terms_CAJ, nll_AJ, hit_AJ, *_ = slot_terms(hidden_AJD, vocabulary, blocks.labels_AJ, loss, config.head, teacher, bias, chunk_anchors)
    value_AJ, variation_AJ = terms_CAJ[0], torch.zeros_like(nll_AJ)
    if teacher is not None:
        value_AJ, variation_AJ = mixture.nll * terms_CAJ[0] + mixture.variation * terms_CAJ[1], terms_CAJ[1].detach()
    weights_AJ = weigh(nll_AJ, blocks.valid_AJ, blocks.weights_AJ, config)
    return Corrected((weights_AJ * value_AJ).sum(), weights_AJ, nll_AJ, variation_AJ, hit_AJ)


NLL_ALONE = Loss(1, cross_entropy, lambda terms_CAJ, valid_AJ: terms_CAJ[0], distils=False)
NLL_AND_VARIATION = Loss(
    2,
    lambda log_q, labels, log_p: (*cross_entropy(log_q, labels), *total_variation(log_q, labels, log_p)),
    lambda terms_CAJ, valid_AJ: terms_CAJ[0],
)


class _CorrectedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AJD: Tensor,
        before_AJS: Tensor,
        table_VS: Tensor,
        vocabulary: Vocabulary,
        blocks: Blocks,
        mixture: Mixture,
        config: ObjectiveConfig,
        teacher: Teacher | None,
        chunks: Sequence[slice],
    ) -> tuple[Tensor, ...]:
        kept = any(ctx.needs_input_grad[:3])
        kept_hidden, kept_before = (torch.empty_like(x) if kept else None for x in (hidden_AJD, before_AJS))
        kept_table = torch.zeros_like(table_VS, dtype=torch.promote_types(table_VS.dtype, torch.float32)) if kept else None
        parts, losses = [], []
        for span in chunks:
            hidden_RD, before_RS, labels_AJ = hidden_AJD[span].flatten(0, 1), before_AJS[span].flatten(0, 1), blocks.labels_AJ[span]
            logits_RV = torch.addmm(hidden_RD @ vocabulary.head.T, before_RS, table_VS.T)
            teacher_RV = None
            if teacher is not None:
                teacher_RV = teacher.hidden_TD[teacher.index_AJ[span].flatten()].to(vocabulary.head.dtype) @ vocabulary.head.T
            signature = (mixture, tuple(logits_RV.shape), logits_RV.dtype, teacher is None)
            values = compile_cache.handle("corrected_head", mixed_values, logits_RV.device, signature)
            *found_R, gradient_RV = values(logits_RV, labels_AJ.flatten(), teacher_RV, mixture)
            value, nll, variation, hit = (x.unflatten(0, labels_AJ.shape) for x in found_R)
            weights = weigh(nll, blocks.valid_AJ[span], blocks.weights_AJ[span], config)
            losses.append((weights * value).sum())
            parts.append((weights, nll, variation, hit))
            if kept_hidden is not None and kept_before is not None and kept_table is not None:
                weights_R1 = weights.flatten()[:, None].to(gradient_RV.dtype)
                torch.mul(gradient_RV @ vocabulary.head, weights_R1, out=kept_hidden[span].flatten(0, 1))
                torch.mul(gradient_RV @ table_VS, weights_R1, out=kept_before[span].flatten(0, 1))
                kept_table += gradient_RV.T @ (weights_R1 * before_RS)
        outputs = [torch.cat(part) for part in zip(*parts, strict=True)]
        ctx.kept = kept_hidden, kept_before, None if kept_table is None else kept_table.to(table_VS.dtype)
        ctx.mark_non_differentiable(*outputs)
        ctx.set_materialize_grads(False)
        return torch.stack(losses).sum(), *outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  (the decorator's type)
        kept, ctx.kept = ctx.kept, None
        return *(gradient.mul_(scales[0]) for gradient in kept), *(None,) * 6


def mixed_values(
    logits_RV: Tensor, labels_R: Tensor, teacher_RV: Tensor | None, mixture: Mixture
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Value, nll, variation and hit of each row [R], and the value's gradient with respect to its logits [R, V], by hand.

    With q the drafter's and p the target's distribution, the total variation 1 - sum min(p, q) has the gradient q (s - [q < p]), where s is
    the mass of q that lies on tokens with q < p.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    log_q_RV = logits_RV.to(wide).log_softmax(-1)
    q_RV, (nll_R,) = log_q_RV.exp(), cross_entropy(log_q_RV, labels_R)
    hit_R = logits_RV.argmax(-1) == labels_R
    is_label_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == labels_R[:, None]
    gradient_RV = q_RV - is_label_RV.to(wide)
    if teacher_RV is None:
        return nll_R, nll_R, torch.zeros_like(nll_R), hit_R, gradient_RV.to(logits_RV.dtype)
    p_RV = teacher_RV.to(wide).softmax(-1)
    below_RV = (q_RV < p_RV).to(wide)
    variation_R = 1 - torch.minimum(p_RV, q_RV).sum(-1)
    of_variation_RV = q_RV * ((q_RV * below_RV).sum(-1, keepdim=True) - below_RV)
    gradient_RV = mixture.nll * gradient_RV + mixture.variation * of_variation_RV
    value_R = mixture.nll * nll_R + mixture.variation * variation_R
    return value_R, nll_R, variation_R, hit_R, gradient_RV.to(logits_RV.dtype)
