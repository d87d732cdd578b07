"""Triton kernel of SwiGLU's backward pass: both halves of the gradient and the activation from one reading of gate, up and gradient.

Legend: N rows, I width of the MLP.
Needs Triton, which comes with torch for CUDA. Twin: `backbone.swiglu_backward` on the CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 1024, 4


def swiglu_backward(act_gradient_NI: Tensor, gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate and up [N, 2I], and silu(gate) * up [N, I]; float32 inside. All contiguous."""
    N, I = act_gradient_NI.shape  # noqa: E741
    gradient_N2I, act_NI = torch.empty_like(gate_up_N2I), torch.empty_like(act_gradient_NI)
    with torch.cuda.device_of(gate_up_N2I):
        _swiglu_backward[(N, triton.cdiv(I, TILE))](act_gradient_NI, gate_up_N2I, gradient_N2I, act_NI, I, TILE, num_warps=WARPS)
    return gradient_N2I, act_NI


@triton.jit
def _swiglu_backward(act_gradient, gate_up, gradient, act, I, TILE: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64) * I
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < I
    gate_at = 2 * row + column
    g = tl.load(act_gradient + row + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_up + gate_at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + gate_at + I, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    kind = act.dtype.element_ty
    tl.store(act + row + column, (silu * up).to(kind), mask=inside)
    tl.store(gradient + gate_at, (g * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(gradient + gate_at + I, (g * silu).to(kind), mask=inside)
