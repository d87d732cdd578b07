"""The target's frozen head over every slot of every block, chunk by chunk: where most of a drafter step's arithmetic is.

Two implementations of one function. `fused` computes the gradient with respect to the hidden states in the forward pass and keeps
it (two products a row, no logits survive a chunk); `checkpoint` is the plain twin that autograd differentiates and recomputes
(three products). Slot 0, the clean anchor, has no loss and no hidden state here; a block is never split over two chunks.

Legend: A anchors, K block slots, J = K - 1 predicted slots, D hidden, V vocabulary, T tokens, R = rows of a chunk, C loss terms.
"""

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from common import kernels

CHUNK_LOGITS = 4080 * 151936
"""Logits of a chunk: 272 blocks of 16, whose products just fill the multiprocessors of an H200; 1.2 GiB in bfloat16."""
TERMS = {"ce": ("nll",), "kl": ("kl",), "tv": ("tv",), "lk": ("kl", "tv")}
"""The per-slot terms each loss is made of, in the order of dimension C."""


@dataclass(frozen=True)
class Teacher:
    """Where the target's own distribution comes from: its final hidden states and, per slot, the row index before the label.

    Shapes: hidden_TD [T, D], index_AJ [A, J].
    """

    hidden_TD: torch.Tensor
    index_AJ: torch.Tensor


def slot_terms(hidden_AJD, vocabulary, labels_AJ, loss, head, teacher=None, chunk_anchors=None):
    """Loss terms of each predicted slot, differentiable in hidden_AJD, with the label's nll and whether the best token is the label.

    Shapes: hidden_AJD [A, J, D], labels_AJ int64 [A, J] -> terms [C, A, J], nll [A, J], hit bool [A, J] (the last two without gradient).
    Units: nats.
    """
    A, J = labels_AJ.shape
    spans = _spans(A, J * vocabulary.head.shape[0], chunk_anchors)
    if head == "fused":
        return _FusedHead.apply(hidden_AJD, vocabulary, labels_AJ, loss, teacher, spans)
    parts = [
        checkpoint(
            _chunk, hidden_AJD[span], vocabulary, labels_AJ[span], loss, teacher, span, use_reentrant=False, preserve_rng_state=False
        )
        for span in spans
    ]
    return _joined(parts, A, J)


def _joined(parts, A, J):
    """The chunks' results, each with its last dimension [R], as one: [A, J]."""
    return tuple(torch.cat(part, dim=-1).unflatten(-1, (A, J)) for part in zip(*parts, strict=True))


def slot_best(hidden_AJD, vocabulary, top_k, chunk_anchors=None):
    """Log-probabilities and ids of each predicted slot's best k tokens: [A, J, k] each, best first."""
    A, J = hidden_AJD.shape[:2]
    parts = []
    for span in _spans(A, J * vocabulary.head.shape[0], chunk_anchors):
        logits_RV, _ = _logits(hidden_AJD[span], vocabulary, None, span)
        parts.append(_cap(logits_RV, vocabulary.softcap).log_softmax(-1).topk(min(top_k, logits_RV.shape[1]), dim=-1))
    return (torch.cat(part).unflatten(0, (A, J)) for part in zip(*parts, strict=True))


def _spans(anchors, logits_per_anchor, chunk_anchors):
    """Slices of anchors, all but the last of equal length."""
    chunk_anchors = chunk_anchors or max(1, CHUNK_LOGITS // logits_per_anchor)
    return [slice(start, min(start + chunk_anchors, anchors)) for start in range(0, anchors, chunk_anchors)]


def _chunk(hidden_AJD, vocabulary, labels_AJ, loss, teacher, span):
    logits_RV, teacher_RV = _logits(hidden_AJD, vocabulary, teacher, span)
    terms_CR, nll_R, hit_R = slot_values(logits_RV, labels_AJ.flatten(), teacher_RV, loss, vocabulary.softcap)
    return terms_CR, nll_R.detach(), hit_R


def _logits(hidden_AJD, vocabulary, teacher, span):
    """Uncapped logits of the drafter and, if it is asked, of the target."""
    logits_RV = hidden_AJD.flatten(0, 1) @ vocabulary.head.T
    if teacher is None:
        return logits_RV, None
    return logits_RV, teacher.hidden_TD[teacher.index_AJ[span].flatten()].to(vocabulary.head.dtype) @ vocabulary.head.T


def _fused_chunk(hidden_AJD, vocabulary, labels_AJ, loss, teacher, span, kept):
    """`_chunk`, and the gradient of each term with respect to its row's hidden state into the tensors of `kept` [R, D], if any."""
    logits_RV, teacher_RV = _logits(hidden_AJD, vocabulary, teacher, span)
    terms_CR, nll_R, hit_R, *gradients = _pointwise(logits_RV, labels_AJ.flatten(), teacher_RV, loss, vocabulary.softcap)
    for kept_RD, gradient_RV in zip(kept, gradients, strict=False):
        torch.mm(gradient_RV, vocabulary.head, out=kept_RD)
    return terms_CR, nll_R, hit_R


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_AJD, vocabulary, labels_AJ, loss, teacher, spans):
        C, A, J, D = len(TERMS[loss]), *labels_AJ.shape, hidden_AJD.shape[-1]
        kept_CAJD = hidden_AJD.new_empty(C, A, J, D) if ctx.needs_input_grad[0] else ()
        parts = []
        for span in spans:
            kept = [kept_AJD[span].flatten(0, 1) for kept_AJD in kept_CAJD]
            parts.append(_fused_chunk(hidden_AJD[span], vocabulary, labels_AJ[span], loss, teacher, span, kept))
        terms_CAJ, nll_AJ, hit_AJ = _joined(parts, A, J)
        ctx.kept_CAJD = kept_CAJD
        ctx.mark_non_differentiable(nll_AJ, hit_AJ)
        ctx.set_materialize_grads(False)
        return terms_CAJ, nll_AJ, hit_AJ

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale_CAJ, *_):
        kept_CAJD, ctx.kept_CAJD = ctx.kept_CAJD, None
        gradient_AJD = kept_CAJD[0].mul_(scale_CAJ[0, ..., None])
        for kept_AJD, scale_AJ in zip(kept_CAJD[1:], scale_CAJ[1:], strict=True):
            gradient_AJD += kept_AJD * scale_AJ[..., None]
        return gradient_AJD, None, None, None, None, None


def _pointwise(logits_RV, labels_R, teacher_RV, loss, softcap):
    """`slot_values_and_gradients` as one kernel on CUDA; the logits may be overwritten."""
    if loss == "ce" and logits_RV.is_cuda and logits_RV.dtype != torch.float64:
        from common.head_kernel import cross_entropy_  # Triton comes with torch for CUDA only

        nll_R, hit_R = cross_entropy_(logits_RV, labels_R, softcap)
        return nll_R[None], nll_R, hit_R, logits_RV
    signature = (loss, tuple(logits_RV.shape), logits_RV.dtype, softcap)
    kernel = kernels.handle("head", slot_values_and_gradients, logits_RV.device, signature)
    return kernel(logits_RV, labels_R, teacher_RV, loss, softcap)


def slot_values(logits_RV, labels_R, teacher_RV, loss, softcap):
    """Terms [C, R], the label's nll [R] and hit [R] from uncapped logits, in float32 (float64 where those are)."""
    capped_RV = _cap(logits_RV, softcap)
    log_q_RV = capped_RV.log_softmax(-1)
    nll_R = -log_q_RV.gather(1, labels_R[:, None]).squeeze(1)
    hit_R = capped_RV.argmax(-1) == labels_R
    if loss == "ce":
        return nll_R[None], nll_R, hit_R
    log_p_RV = _cap(teacher_RV, softcap).log_softmax(-1)
    p_RV = log_p_RV.exp()
    values = {
        "kl": (p_RV * (log_p_RV - log_q_RV)).sum(-1),
        "tv": 1 - torch.minimum(p_RV, log_q_RV.exp()).sum(-1),
    }
    return torch.stack([values[term] for term in TERMS[loss]]), nll_R, hit_R


def slot_values_and_gradients(logits_RV, labels_R, teacher_RV, loss, softcap):
    """`slot_values`, then each term's gradient with respect to the logits [R, V], in their type."""
    capped_RV = _cap(logits_RV, softcap)
    q_RV = capped_RV.softmax(-1)
    if loss == "ce":
        gradients = [q_RV - (torch.arange(q_RV.shape[1], device=q_RV.device) == labels_R[:, None]).to(q_RV.dtype)]
    else:
        p_RV = _cap(teacher_RV, softcap).softmax(-1)
        lower_RV = (q_RV < p_RV).to(q_RV.dtype)
        by_term = {"kl": q_RV - p_RV, "tv": q_RV * ((q_RV * lower_RV).sum(-1, keepdim=True) - lower_RV)}
        gradients = [by_term[term] for term in TERMS[loss]]
    if softcap is not None:
        gradients = [gradient_RV * (1 - (capped_RV / softcap) ** 2) for gradient_RV in gradients]
    return *slot_values(logits_RV, labels_R, teacher_RV, loss, softcap), *(g.to(logits_RV.dtype) for g in gradients)


def _cap(logits, softcap):
    logits = logits.to(_wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)
