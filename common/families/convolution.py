"""Convolutions along the slots of a block, around a layer's attention and its MLP: neighbouring slots hear of each other's tokens.

Legend: A anchors, K block slots, N = A*K rows (one a slot), U distinct rows of the first layer, D hidden, S taps (slot t hears of slots t,
t - 1, ..., t - S + 1), G groups of channels that share a coefficient.
Source: DFlash2, z-lab/dflash; computed as vLLM 0.32 does (models/qwen3_dflash2.py): in float32, rounded once.
"""

import functools
from typing import Any

import torch
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

    Shapes: x [N, D], kernels [N, S, G], base [S, D] -> [N, D].
    """
    return _Convolve.apply(x_ND, kernels_NSG, base_SD, block_size)


class _Convolve(torch.autograd.Function):
    """Pointwise work and sums of it, for inductor to fuse. The gradient is by hand, for memory: it shifts gradients instead of inputs, so
    that the inputs alone are kept, and it shifts by an index, which the compiled backward pass may do once more (a padding it may not).
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, kernels_NSG: Tensor, base_SD: Tensor, block_size: int) -> Tensor:
        ctx.save_for_backward(x_ND, kernels_NSG, base_SD)
        ctx.block_size = block_size
        x_AKGC, kernels_AKSG, base_SGC = _wide(x_ND, kernels_NSG, base_SD, block_size)
        out_AKGC = (base_SGC[0] + kernels_AKSG[:, :, 0, :, None]) * x_AKGC
        for tap in range(1, len(base_SD)):
            out_AKGC = out_AKGC + (base_SGC[tap] + kernels_AKSG[:, :, tap, :, None]) * _from_slot_before(x_AKGC, tap)
        return out_AKGC.flatten(2).flatten(0, 1).to(x_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, kernels_NSG, base_SD = ctx.saved_tensors
        x_AKGC, kernels_AKSG, base_SGC = _wide(x_ND, kernels_NSG, base_SD, ctx.block_size)
        gradient_AKGC = gradients[0].to(x_AKGC.dtype).view(x_AKGC.shape)
        of_x_AKGC, of_kernels, of_base = torch.zeros_like(x_AKGC), [], []
        for tap in range(len(base_SD)):
            later_AKGC = _from_slot_before(gradient_AKGC, -tap)  # what the slot gets back from the one that it enters by this tap
            of_x_AKGC = of_x_AKGC + (base_SGC[tap] + _from_slot_before(kernels_AKSG[:, :, tap], -tap)[..., None]) * later_AKGC
            product_AKGC = later_AKGC * x_AKGC
            of_kernels.append(_from_slot_before(product_AKGC.sum(-1), tap))
            of_base.append(product_AKGC.sum((0, 1)).flatten())
        of_kernels_NSG = torch.stack(of_kernels, dim=2).flatten(0, 1).to(kernels_NSG.dtype)
        return of_x_AKGC.view(x_ND.shape).to(x_ND.dtype), of_kernels_NSG, torch.stack(of_base).to(base_SD.dtype), None


def _wide(x_ND: Tensor, kernels_NSG: Tensor, base_SD: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """By block, slot, group and channel, in float32 (float64 where x is): x [A, K, G, C], kernels [A, K, S, G], base [S, G, C]."""
    wide, groups = torch.promote_types(x_ND.dtype, torch.float32), kernels_NSG.shape[-1]
    x_AKGC = x_ND.to(wide).unflatten(0, (-1, block_size)).unflatten(-1, (groups, -1))
    return x_AKGC, kernels_NSG.to(wide).unflatten(0, (-1, block_size)), base_SD.to(wide).unflatten(-1, (groups, -1))


def _from_slot_before(x_AK: Tensor, tap: int) -> Tensor:
    """In each slot what stands `tap` slots before it in its block (after it if negative), zero where that is outside: [A, K, ...]."""
    at_K = torch.arange(x_AK.shape[1], device=x_AK.device) - tap
    inside_K = ((at_K >= 0) & (at_K < x_AK.shape[1])).unflatten(0, (-1, *[1] * (x_AK.dim() - 2)))
    return torch.where(inside_K, x_AK[:, at_K.clamp(0, x_AK.shape[1] - 1)], 0.0)


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
