"""Muon: matrices are updated by the nearest orthogonal matrix to their momentum, so that every direction moves at the same rate.

`torch.optim.Muon` is its twin in the tests. It cannot divide gradients or leave a step out on the device, so the steps stand here:
a step that must change nothing changes nothing, and nobody waits for the GPU to say so.

Legend: R rows, C columns of a matrix.
Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/; the size of an update by Moonlight, arXiv 2502.16982.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAMW_RMS = 0.2
"""Root mean square of an AdamW update, which an orthogonal one is scaled to: so learning rates and decay carry over."""


@dataclass(frozen=True)
class Matrix:
    """A matrix to be updated: float32 views [R, C] of the flat buffers."""

    master: Tensor
    gradient: Tensor
    momentum: Tensor


@torch.no_grad()
def muon_step(matrices: list[Matrix], lr: float, weight_decay: float, divisor: Tensor, unchanged: Tensor) -> None:
    """Update all matrices in place: gradients are divided by `divisor`, and where `unchanged` is 1 everything stays as it is.

    Shapes: divisor, unchanged 0-d float32 on the device.
    """
    kept = 1 - unchanged
    for matrix in matrices:
        gradient = torch.where(unchanged > 0, 0.0, matrix.gradient / divisor)
        matrix.momentum.lerp_(gradient, (1 - MOMENTUM) * kept)
        update = orthogonal(gradient.lerp(matrix.momentum, MOMENTUM)).float()
        scale = lr * ADAMW_RMS * max(update.shape) ** 0.5
        matrix.master.mul_(1 - lr * weight_decay * kept).sub_(update * (scale * kept))


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with singular values of one, by five Newton-Schulz iterations: bfloat16 on CUDA, float32 elsewhere."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
