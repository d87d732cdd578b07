"""The target's frozen head over every slot of every block, chunk by chunk: where most of a drafter step's arithmetic is.

Two implementations of one function. `fused` computes the gradient with respect to the hidden states in the forward pass (by autograd
over a chunk's logits, by hand where the loss says so) and keeps it: two products a row, no logits survive a chunk. `checkpoint` is the
plain twin that autograd differentiates and recomputes: three products. Slots that predict nothing have no hidden state here; a block is
never split over two chunks. A family that chooses among a slot's best tokens gets them with their logits, differentiable, as candidates.

Legend: A anchors, J predicted slots of a block, D hidden, V vocabulary, T tokens, R = rows of a chunk, C loss terms, k candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common import compile_cache
from common.objective.losses import Loss, cross_entropy, cross_entropy_gradient
from common.target.vocabulary import Vocabulary

CHUNK_LOGITS = 4080 * 151936
"""Logits of a chunk: 272 blocks of 16, whose products just fill the multiprocessors of an H200; 1.2 GiB in bfloat16."""

TOP_TILE = 128
"""Logits of a tile in the search for the largest ones."""

LogitBias = Callable[[slice], Tensor]
"""What a drafter family adds to the logits of some anchors' slots: (slice of A) -> [R, V], differentiable in the family's parameters."""

Values = tuple[Tensor, Tensor, Tensor]
"""Loss terms [C, R], the labels' negative log-likelihoods [R], whether the best token is the label, bool [R]."""


class SlotTerms(NamedTuple):
    """What the head gives for every slot.

    Shapes: terms [C, A, J], nll [A, J] and hit bool [A, J] as in Values; tokens int64 [k, A, J] and logits [k, A, J], the slot's k best
    tokens, best first. Within a chunk [R] instead of [A, J].
    """

    terms: Tensor
    nll: Tensor
    hit: Tensor
    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Teacher:
    """Where the target's own distribution comes from: its final hidden states and, per slot, the row index before the label.

    Shapes: hidden_TD [T, D], index_AJ [A, J].
    """

    hidden_TD: Tensor
    index_AJ: Tensor


def slot_terms(
    hidden_AJD: Tensor,
    vocabulary: Vocabulary,
    labels_AJ: Tensor,
    loss: Loss,
    head: str,
    teacher: Teacher | None = None,
    bias: LogitBias | None = None,
    chunk_anchors: int | None = None,
    candidates: int = 0,
) -> SlotTerms:
    """Loss terms of each predicted slot, differentiable in hidden_AJD, with the label's nll and whether the best token is the label; and
    the slot's best tokens, `candidates` of them, with their logits (capped, without the bias), differentiable, too.

    With a bias every head is `checkpoint`: the gradient of the bias's own parameters needs the slots' weights, which come later.
    Shapes: hidden_AJD [A, J, D], labels_AJ int64 [A, J]. Units: nats.
    """
    A, J = labels_AJ.shape
    chunks = spans(A, J * vocabulary.head.shape[0], chunk_anchors)
    if head == "fused" and bias is None:
        return SlotTerms(*_FusedHead.apply(hidden_AJD, vocabulary, labels_AJ, loss, teacher, candidates, chunks))
    parts = []
    for span in chunks:
        inputs = hidden_AJD[span], vocabulary, labels_AJ[span], loss, teacher, candidates, span, bias
        parts.append(checkpoint(_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    return _joined(parts, A, J)


def _joined(parts: Sequence[SlotTerms], A: int, J: int) -> SlotTerms:
    """The chunks' results as one."""
    return SlotTerms(*(torch.cat(part, dim=-1).unflatten(-1, (A, J)) for part in zip(*parts, strict=True)))


@torch.no_grad()
def best_tokens(hidden_AJD: Tensor, vocabulary: Vocabulary, width: int, chunk_anchors: int | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of each predicted slot's best tokens: [A, J, width] each, best first."""
    A, J = hidden_AJD.shape[:2]
    parts = []
    for span in spans(A, J * vocabulary.head.shape[0], chunk_anchors):
        logits_RV = vocabulary.logits(hidden_AJD[span].flatten(0, 1)).to(_wide(hidden_AJD.dtype))
        parts.append(logits_RV.log_softmax(-1).topk(min(width, logits_RV.shape[1]), dim=-1))
    logprobs, tokens = (torch.cat(part).unflatten(0, (A, J)) for part in zip(*parts, strict=True))
    return logprobs, tokens


@torch.no_grad()
def best_logits(hidden_AJD: Tensor, vocabulary: Vocabulary, count: int, chunk_anchors: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids and capped logits of each predicted slot's best tokens, chosen as `slot_terms` chooses candidates: [A, J, count] each."""
    A, J = hidden_AJD.shape[:2]
    chunks = spans(A, J * vocabulary.head.shape[0], chunk_anchors)
    parts = [_candidates(hidden_AJD[span].flatten(0, 1) @ vocabulary.head.T, count, vocabulary.softcap) for span in chunks]
    tokens_AJk, logits_AJk = (torch.cat(part, dim=-1).T.unflatten(0, (A, J)) for part in zip(*parts, strict=True))
    return tokens_AJk, logits_AJk


def _candidates(logits_RV: Tensor, count: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Ids and capped logits [count, R] of the best tokens by uncapped logits, best first."""
    logits_Rk, tokens_Rk = largest(logits_RV, count) if count else (logits_RV[:, :0], logits_RV[:, :0].long())
    return tokens_Rk.T, _cap(logits_Rk, softcap).T


def largest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `topk`, but a large vocabulary is read once: the best tokens lie in the tiles of the largest maxima, `count` of them.

    Of equal logits any may be chosen, as by `topk`.
    """
    tiles, rest = divmod(logits_RV.shape[1], TOP_TILE)
    if tiles < 4 * count:
        return logits_RV.topk(count)
    tiled_RNt = logits_RV[:, : tiles * TOP_TILE].unflatten(1, (tiles, TOP_TILE))
    best_Rk = tiled_RNt.amax(-1).topk(count).indices
    found_RF = tiled_RNt.gather(1, best_Rk[..., None].expand(-1, -1, TOP_TILE)).flatten(1)
    tokens_RF = (best_Rk[..., None] * TOP_TILE + torch.arange(TOP_TILE, device=logits_RV.device)).flatten(1)
    if rest:
        found_RF = torch.cat((found_RF, logits_RV[:, -rest:]), dim=1)
        last = torch.arange(tiles * TOP_TILE, logits_RV.shape[1], device=logits_RV.device)
        tokens_RF = torch.cat((tokens_RF, last.expand(len(tokens_RF), -1)), dim=1)
    logits_Rk, at_Rk = found_RF.topk(count)
    return logits_Rk, tokens_RF.gather(1, at_Rk)


def spans(anchors: int, logits_per_anchor: int, chunk_anchors: int | None) -> list[slice]:
    """Slices of anchors, all but the last of equal length."""
    chunk_anchors = chunk_anchors or max(1, CHUNK_LOGITS // logits_per_anchor)
    return [slice(start, min(start + chunk_anchors, anchors)) for start in range(0, anchors, chunk_anchors)]


def _chunk(
    hidden_AJD: Tensor,
    vocabulary: Vocabulary,
    labels_AJ: Tensor,
    loss: Loss,
    teacher: Teacher | None,
    candidates: int,
    span: slice,
    bias: LogitBias | None,
) -> SlotTerms:
    logits_RV, teacher_RV = _logits(hidden_AJD, vocabulary, teacher, span)
    bias_RV = None if bias is None else bias(span)
    terms_CR, nll_R, hit_R = slot_values(logits_RV, labels_AJ.flatten(), teacher_RV, loss, vocabulary.softcap, bias_RV)
    return SlotTerms(terms_CR, nll_R.detach(), hit_R, *_candidates(logits_RV, candidates, vocabulary.softcap))


def _logits(hidden_AJD: Tensor, vocabulary: Vocabulary, teacher: Teacher | None, span: slice) -> tuple[Tensor, Tensor | None]:
    """Uncapped logits of the drafter and, if it is asked, of the target."""
    logits_RV = vocabulary.uncapped(hidden_AJD.flatten(0, 1))
    if teacher is None:
        return logits_RV, None
    return logits_RV, vocabulary.uncapped(teacher.hidden_TD[teacher.index_AJ[span].flatten()].to(vocabulary.head.dtype))


def _fused_chunk(
    hidden_AJD: Tensor,
    vocabulary: Vocabulary,
    labels_AJ: Tensor,
    loss: Loss,
    teacher: Teacher | None,
    candidates: int,
    span: slice,
    kept: Sequence[Tensor],
) -> SlotTerms:
    """`_chunk`, and the gradient of each term with respect to its row's hidden state into the tensors of `kept` [R, D], if any."""
    logits_RV, teacher_RV = _logits(hidden_AJD, vocabulary, teacher, span)
    best = _candidates(logits_RV, candidates, vocabulary.softcap)  # before the gradient, which may overwrite the logits
    if loss.gradient is not None:
        terms_CR, nll_R, hit_R, gradient_RV = _with_gradient_by_hand(
            logits_RV, labels_AJ.flatten(), loss.gradient, loss, vocabulary.softcap
        )
        for kept_RD in kept:
            torch.mm(gradient_RV, vocabulary.head, out=kept_RD)
        return SlotTerms(terms_CR, nll_R, hit_R, *best)
    signature = (loss, tuple(logits_RV.shape), logits_RV.dtype, vocabulary.softcap)
    values = compile_cache.handle("head", slot_values, logits_RV.device, signature)
    inputs = logits_RV, labels_AJ.flatten(), teacher_RV, loss, vocabulary.softcap
    with torch.set_grad_enabled(bool(kept)):
        logits_RV.requires_grad_(bool(kept))
        terms_CR, nll_R, hit_R = values(*inputs)
        for term, kept_RD in enumerate(kept):
            if term > 0:  # once more: a compiled backward pass frees its graph
                terms_CR, nll_R, hit_R = values(*inputs)
            (gradient_RV,) = torch.autograd.grad(terms_CR[term].sum(), logits_RV)
            torch.mm(gradient_RV, vocabulary.head, out=kept_RD)
    return SlotTerms(terms_CR.detach(), nll_R.detach(), hit_R, *best)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AJD: Tensor,
        vocabulary: Vocabulary,
        labels_AJ: Tensor,
        loss: Loss,
        teacher: Teacher | None,
        candidates: int,
        chunks: Sequence[slice],
    ) -> tuple[Tensor, ...]:
        A, J, D = *labels_AJ.shape, hidden_AJD.shape[-1]
        kept_CAJD = hidden_AJD.new_empty(loss.count, A, J, D) if ctx.needs_input_grad[0] else ()
        parts = []
        for span in chunks:
            kept = [kept_AJD[span].flatten(0, 1) for kept_AJD in kept_CAJD]
            parts.append(_fused_chunk(hidden_AJD[span], vocabulary, labels_AJ[span], loss, teacher, candidates, span, kept))
        found = _joined(parts, A, J)
        ctx.kept_CAJD, ctx.vocabulary = kept_CAJD, vocabulary
        ctx.save_for_backward(found.tokens, found.logits)
        ctx.mark_non_differentiable(found.nll, found.hit, found.tokens)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  (the decorator's type)
        scale_CAJ, *_, logits_gradient_kAJ = scales
        kept_CAJD, ctx.kept_CAJD = ctx.kept_CAJD, None
        gradient_AJD = kept_CAJD[0].mul_(scale_CAJ[0, ..., None])
        for kept_AJD, scale_AJ in zip(kept_CAJD[1:], scale_CAJ[1:], strict=True):
            gradient_AJD += kept_AJD * scale_AJ[..., None]
        if logits_gradient_kAJ is not None:
            tokens_kAJ, logits_kAJ = ctx.saved_tensors
            gradient_AJD += _through_candidates(logits_gradient_kAJ, tokens_kAJ, logits_kAJ, ctx.vocabulary)
        return gradient_AJD, *[None] * 6


def _through_candidates(gradient_kAJ: Tensor, tokens_kAJ: Tensor, logits_kAJ: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Gradient with respect to the hidden states [A, J, D] of a gradient with respect to the candidates' logits: few rows of the head."""
    if vocabulary.softcap is not None:
        gradient_kAJ = gradient_kAJ * (1 - (logits_kAJ / vocabulary.softcap) ** 2)
    tokens_Rk, weights_Rk = tokens_kAJ.flatten(1).T.contiguous(), gradient_kAJ.flatten(1).T.contiguous().to(vocabulary.head.dtype)
    bags_RD = F.embedding_bag(tokens_Rk, vocabulary.head, per_sample_weights=weights_Rk, mode="sum")
    return bags_RD.unflatten(0, tokens_kAJ.shape[1:])


def _with_gradient_by_hand(
    logits_RV: Tensor, labels_R: Tensor, gradient: Callable[[Tensor, Tensor], Tensor], loss: Loss, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Terms [1, R], nll [R], hit [R] and the gradient [R, V]; cross entropy is one kernel on CUDA, where the logits are overwritten."""
    if gradient is cross_entropy_gradient and logits_RV.is_cuda and logits_RV.dtype != torch.float64:
        from common.objective.head_kernel import cross_entropy_  # Triton comes with torch for CUDA only

        nll_R, hit_R = cross_entropy_(logits_RV, labels_R, softcap)
        return nll_R[None], nll_R, hit_R, logits_RV
    capped_RV = _cap(logits_RV, softcap)
    gradient_RV = gradient(capped_RV.softmax(-1), labels_R)
    if softcap is not None:
        gradient_RV = gradient_RV * (1 - (capped_RV / softcap) ** 2)
    return *slot_values(logits_RV, labels_R, None, loss, softcap), gradient_RV.to(logits_RV.dtype)


def slot_values(
    logits_RV: Tensor, labels_R: Tensor, teacher_RV: Tensor | None, loss: Loss, softcap: float | None, bias_RV: Tensor | None = None
) -> Values:
    """Terms [C, R], the label's nll [R] and hit [R] from uncapped logits, in float32 (float64 where those are).

    `bias_RV` is added to the drafter's capped logits.
    """
    capped_RV = _cap(logits_RV, softcap)
    if bias_RV is not None:
        capped_RV = capped_RV + bias_RV.to(capped_RV.dtype)
    log_q_RV = capped_RV.log_softmax(-1)
    log_p_RV = None if teacher_RV is None else _cap(teacher_RV, softcap).log_softmax(-1)
    (nll_R,) = cross_entropy(log_q_RV, labels_R)
    return torch.stack(loss.terms(log_q_RV, labels_R, log_p_RV)), nll_R, capped_RV.argmax(-1) == labels_R


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.to(_wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
