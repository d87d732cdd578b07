"""Convolutions along the slots of a block, around a layer's attention and its MLP: neighbouring slots hear of each other's tokens.

Legend: A anchors, K block slots, N = A*K rows (one a slot), U distinct rows of the first layer, D hidden, S taps (slot t hears of slots t,
t - 1, ..., t - S + 1), G groups of channels that share a coefficient.
Source: DFlash2, z-lab/dflash; computed as vLLM 0.32 does (models/qwen3_dflash2.py): in float32, rounded once.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.drafter.backbone import Around, Slots, Sublayer, every_row
from common.drafter.spec import DrafterSpec
from common.errors import UserError

PLACES = ("attention_conv", "mlp_conv")
"""The convolutions of a layer, by their names in it."""


class Convolution(Around):
    """A sublayer between two convolutions, whose coefficients are a learnt kernel and a projection of the sublayer's normed input."""

    mixes_slots = True

    def __init__(self, hidden_size: int, taps: int, group: int, **kind: Any):
        super().__init__()
        self.taps = taps
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size, **kind))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False, **kind)

    def forward(self, sublayer: Sublayer, x: Tensor, slots: Slots, distinct: bool) -> Tensor:
        """Convolved before and after the sublayer. Shapes: as in `Around`; the output has all N rows.

        Of a block's slots the first `taps` differ from anchor to anchor, all later ones hear of the mask token alone and are alike: where
        the rows come in distinct, the sublayer gets them so, too.
        """
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        expand = every_row
        if distinct and self.taps < slots.block_size:
            short = Slots(slots.anchors, self.taps + 1)
            mixed = convolve(short.expand(x), short.expand(kernels[:, 0]), self.base_kernel[0], short.block_size)
            mixed = mixed.unflatten(0, (short.anchors, short.block_size))
            inner = torch.cat((mixed[:, : self.taps].flatten(0, 1), mixed[0, self.taps :]))
            expand = functools.partial(slots.expand, own=self.taps)
            outer_kernels = slots.expand(kernels[:, 1])
        else:
            x, kernels = (slots.expand(x), slots.expand(kernels)) if distinct else (x, kernels)
            inner, outer_kernels = convolve(x, kernels[:, 0], self.base_kernel[0], slots.block_size), kernels[:, 1]
        return convolve(sublayer(inner, expand), outer_kernels, self.base_kernel[1], slots.block_size)


def convolve(x_ND: Tensor, kernels_NSG: Tensor, base_SD: Tensor, block_size: int) -> Tensor:
    """Each row plus its predecessors in its block, weighted by tap, channel and the row's own coefficients; zero before the first slot.

    One expression of shifted products, which inductor makes one kernel of, forward and backward.
    Shapes: x [N, D], kernels [N, S, G], base [S, D] -> [N, D].
    """
    wide, groups = torch.promote_types(x_ND.dtype, torch.float32), kernels_NSG.shape[-1]
    x_AKGC = x_ND.to(wide).unflatten(0, (-1, block_size)).unflatten(-1, (groups, -1))
    kernels_AKSG1 = kernels_NSG.to(wide).unflatten(0, (-1, block_size)).unsqueeze(-1)
    base_SGC = base_SD.to(wide).unflatten(-1, (groups, -1))
    out = (base_SGC[0] + kernels_AKSG1[:, :, 0]) * x_AKGC
    for tap in range(1, min(len(base_SD), block_size)):
        before = F.pad(x_AKGC[:, :-tap], (0, 0, 0, 0, tap, 0))
        out = out + (base_SGC[tap] + kernels_AKSG1[:, :, tap]) * before
    return out.flatten(2).flatten(0, 1).to(x_ND.dtype)


def layer_convolutions(spec: DrafterSpec, taps: int, group: int, **kind: Any) -> dict[str, nn.Module]:
    """The convolutions of one layer, by their names in it; `kind` is dtype and device."""
    return {place: Convolution(spec.hidden_size, taps, group, **kind) for place in PLACES}


def start_as_identity(name: str, value: Tensor) -> bool:
    """Fill `value` with what the convolutions' parameter `name` starts with, so that they change nothing; False for other parameters."""
    if name.endswith("conv.base_kernel"):
        value.zero_()[:, 0] = 1.0
    elif name.endswith("conv.kernel_projection.weight"):
        value.zero_()
    else:
        return False
    return True


def check_convolutions(spec: DrafterSpec, taps: int, group: int) -> None:
    """Refuse convolutions that do not fit the drafter. Raises: UserError."""
    if spec.hidden_size % group:
        raise UserError(
            f"drafter.conv_group={group} does not divide the hidden size {spec.hidden_size}; use one of "
            f"{[size for size in (8, 16, 32, 64) if spec.hidden_size % size == 0] or [1]}"
        )
    if taps > spec.block_size:
        raise UserError(f"drafter.conv_taps={taps} reach beyond a block of {spec.block_size}; use at most that")
