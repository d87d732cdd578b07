"""The drafter's attention on CUDA as an operator: which shapes its kernels take, how they are launched, how it is differentiated.

Legend: T context tokens, Q = A*K queries, A anchors, K slots, H query heads, G key/value heads, d head dimension.
Needs Triton, which comes with torch for CUDA. Twin: `attention.attend_dense`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.drafter.attention_triton import FORWARD, KERNELS, KEYS, QUERIES

TILING = {FORWARD: (128, 64, 8, 3, 3), QUERIES: (128, 64, 8, 3, 1), KEYS: (64, 128, 8, 3, 1)}
"""Per kernel: queries and keys of a tile, warps, stages, stages over masked tiles (benchmarks/drafter_step.py --sweep)."""

WIDE_TILING = {FORWARD: (64, 32, 4, 1, 1), QUERIES: (64, 32, 4, 1, 1), KEYS: (32, 64, 4, 1, 1)}
"""The same for float32: small models and the parity tests."""

LOG2E = 1.4426950408889634


def fits(query: Tensor, context_key: Tensor, block_size: int) -> bool:
    """Whether the kernels take these shapes: whole tiles, and whole blocks with all heads that share their keys in a tile of queries."""
    Q, H, d = query.shape
    T, G, _ = context_key.shape
    tokens = min(_tiling(kernel, query)[0] for kernel in (FORWARD, QUERIES)) // _power_of_2(H // G)
    return T % 128 == 0 and Q % 128 == 0 and d in (32, 64, 128) and tokens >= 16 and tokens % block_size == 0


@torch.library.custom_op("drafter::attention", mutates_args=())
def attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    anchor_A: Tensor,
    lo_A: Tensor,
    keep_A: Tensor,
    key_ranges: Tensor,
    block_size: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output [Q, H, d] and log2 of the softmax's sum, float32 [H, Q]; tensors as in `attention.attend`, window 0 is a full layer."""
    Q, H, d = query.shape
    G = context_key.shape[1]
    out, lse_HQ = query.new_empty(Q, H, d), query.new_empty(H, Q, dtype=torch.float32)
    tile_m, tile_n, warps, stages, masked = _tiling(FORWARD, query)
    shared = _power_of_2(H // G)
    inputs = query, context_key, context_value, block_key, block_value
    with torch.cuda.device_of(query):
        KERNELS[FORWARD][(Q * shared // tile_m * G,)](
            *inputs, out, lse_HQ, anchor_A, lo_A, keep_A, *_strides(*inputs), Q, H // G, shared, G, block_size, window, LOG2E * d**-0.5,
            tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse_HQ


@attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    Q, H, d = query.shape
    return query.new_empty(Q, H, d), query.new_empty(H, Q, dtype=torch.float32)


@torch.library.custom_op("drafter::attention_backward", mutates_args=())
def attention_backward(
    out_gradient: Tensor,
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    anchor_A: Tensor,
    lo_A: Tensor,
    keep_A: Tensor,
    key_ranges: Tensor,
    out: Tensor,
    lse_HQ: Tensor,
    block_size: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, context keys and values ([T, H, d], to be summed over the heads that share them), block keys and values."""
    inputs, mask = (query, context_key, context_value, block_key, block_value), (anchor_A, lo_A, keep_A)
    query_gradient, bk_gradient, bv_gradient, delta_HQ = backward_queries(out_gradient, inputs, mask, out, lse_HQ, block_size, window)
    ck_gradient, cv_gradient = backward_keys(out_gradient, inputs, mask, key_ranges, lse_HQ, delta_HQ, block_size, window)
    return query_gradient, ck_gradient, cv_gradient, bk_gradient, bv_gradient


@attention_backward.register_fake
def _(out_gradient: Tensor, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, *_: Any) -> tuple[Tensor, ...]:
    context = context_key.new_empty(len(context_key), *query.shape[1:])
    block = block_key.new_empty(block_key.shape)
    return query.new_empty(query.shape), context, torch.empty_like(context), block, torch.empty_like(block)


def backward_queries(
    out_gradient: Tensor, inputs: Sequence[Tensor], mask: Sequence[Tensor], out: Tensor, lse_HQ: Tensor, block_size: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, block keys and block values, and each query's sum of output times gradient, float32 [H, Q]."""
    query, context_key, _, block_key, _ = inputs
    Q, H, d = query.shape
    G = context_key.shape[1]
    query_gradient, bk_gradient, bv_gradient = (x.new_empty(x.shape) for x in (query, block_key, block_key))
    delta_HQ = torch.empty_like(lse_HQ)
    tile_m, tile_n, warps, stages, masked = _tiling(QUERIES, query)
    shared = _power_of_2(H // G)
    with torch.cuda.device_of(query):
        KERNELS[QUERIES][(Q * shared // tile_m * G,)](
            *inputs, out, out_gradient, lse_HQ, delta_HQ, query_gradient, bk_gradient, bv_gradient, *mask,
            *_strides(*inputs, out_gradient), Q, H // G, shared, G, block_size, window, LOG2E * d**-0.5, d**-0.5,
            tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return query_gradient, bk_gradient, bv_gradient, delta_HQ


def backward_keys(
    out_gradient: Tensor,
    inputs: Sequence[Tensor],
    mask: Sequence[Tensor],
    key_ranges: Tensor,
    lse_HQ: Tensor,
    delta_HQ: Tensor,
    block_size: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of context keys and values by query head: [T, H, d]."""
    query, context_key, context_value, _, _ = inputs
    Q, H, d = query.shape
    T, G, _ = context_key.shape
    ck_gradient, cv_gradient = query.new_empty(T, H, d), query.new_empty(T, H, d)
    tile_m, tile_n, warps, stages, masked = _tiling(KEYS, query)
    with torch.cuda.device_of(query):
        KERNELS[KEYS][(T // tile_n * H,)](
            query, context_key, context_value, out_gradient, lse_HQ, delta_HQ, ck_gradient, cv_gradient, *mask, key_ranges,
            *_strides(query, context_key, context_value, out_gradient), Q, H, H // G, block_size, window, LOG2E * d**-0.5, d**-0.5,
            tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return ck_gradient, cv_gradient


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, out_gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    context_key = ctx.saved_tensors[1]
    if out_gradient.stride(-1) != 1:
        out_gradient = out_gradient.contiguous()
    gradients = torch.ops.drafter.attention_backward(out_gradient, *ctx.saved_tensors, ctx.block_size, ctx.window)
    summed = [g.unflatten(1, (context_key.shape[1], -1)).sum(2) for g in gradients[1:3]]
    return gradients[0], *summed, *gradients[3:], *[None] * 6


attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _tiling(kernel: str, query: Tensor) -> tuple[int, int, int, int, int]:
    return (WIDE_TILING if query.dtype == torch.float32 else TILING)[kernel]


def _power_of_2(count: int) -> int:
    """The smallest power of 2 from `count`."""
    return 1 << (count - 1).bit_length()


def _strides(*tensors: Tensor) -> list[int]:
    """Of every tensor the strides by row and by head."""
    return [stride for x in tensors for stride in x.stride()[:2]]
