"""Triton kernel of the cross entropy at the head: one program a row, its logits overwritten by their gradient.

The row is read twice (once for the softmax's sum, once for the gradient, backwards, so that its tail still lies in the cache) and
written once; one program occupies a multiprocessor, so that the rows in flight fit the cache.
Legend: R rows (slots), V vocabulary; L lanes of a tile.
Needs Triton, which comes with torch for CUDA. Twin: `head.slot_values` with
`losses.cross_entropy_gradient`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILING = (512, 8, 16)
"""Lanes of a tile, neighbouring logits of a lane (reduced within a thread), warps."""


def cross_entropy_(
    logits_RV: Tensor, labels_R: Tensor, softcap: float | None, tiling: tuple[int, int, int] = TILING
) -> tuple[Tensor, Tensor]:
    """Each label's nll and hit; logits_RV is overwritten by the gradient of nll.

    Shapes: logits_RV [R, V] contiguous, labels_R int64 -> nll float32 [R], hit bool [R] (the first largest logit is the label's).
    """
    R, V = logits_RV.shape
    nll_R = torch.empty(R, device=logits_RV.device)
    hit_R = torch.empty(R, device=logits_RV.device, dtype=torch.bool)
    lanes, vector, warps = tiling
    with torch.cuda.device_of(logits_RV):
        _cross_entropy[(R,)](logits_RV, labels_R, nll_R, hit_R, V, softcap, lanes, vector, num_warps=warps)
    return nll_R, hit_R


@triton.jit
def _cap(x, CAP: tl.constexpr):
    if CAP is not None:
        x = CAP - 2 * CAP / (tl.exp(2 * x / CAP) + 1)  # CAP * tanh(x / CAP)
    return x


@triton.jit
def _cross_entropy(logits, labels, nll, hit, V, CAP: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    of_label = _cap(tl.load(logits + label).to(tl.float32), CAP)
    at_LV = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    peak_L = tl.full([LANES], -1e30, tl.float32)
    before_L = tl.full([LANES], -1e30, tl.float32)  # the largest logit in front of the label: ties go to the first
    total_L = tl.zeros([LANES], tl.float32)
    TILE: tl.constexpr = LANES * VECTOR
    tiles = tl.cdiv(V, TILE)
    for tile in range(tiles):
        index = tile * TILE + at_LV
        x = _cap(tl.load(logits + index, mask=index < V, other=-float("inf")).to(tl.float32), CAP)
        if CAP is not None:
            x = tl.where(index < V, x, -float("inf"))
        before_L = tl.maximum(before_L, tl.max(tl.where(index < label, x, -float("inf")), 1))
        top_L = tl.maximum(peak_L, tl.max(x, 1))
        total_L = total_L * tl.exp(peak_L - top_L) + tl.sum(tl.exp(x - top_L[:, None]), 1)
        peak_L = top_L
    peak = tl.max(peak_L, 0)
    logsum = peak + tl.log(tl.sum(total_L * tl.exp(peak_L - peak), 0))
    tl.store(nll + row, logsum - of_label)
    tl.store(hit + row, (of_label >= peak) & (of_label > tl.max(before_L, 0)))
    for tile in range(tiles):
        index = (tiles - 1 - tile) * TILE + at_LV
        x = _cap(tl.load(logits + index, mask=index < V, other=0.0).to(tl.float32), CAP)
        gradient = tl.exp(x - logsum) - tl.where(index == label, 1.0, 0.0)
        if CAP is not None:
            gradient *= 1 - (x / CAP) * (x / CAP)
        tl.store(logits + index, gradient.to(logits.dtype.element_ty), mask=index < V)
