"""Triton kernels of the drafter's attention, forward and backward, made for this mask.

What they know that a general block-sparse kernel does not:
- a query's context is an interval of keys, so a tile of queries walks a range of tiles: mostly full ones, at the edges masked ones;
- anchors are sorted, so the queries that see a tile of keys are a range, too (`attention.key_ranges`, listed on the host);
- a program takes all query heads of one key/value head at once. A tile then spans few anchors: little is masked, a block's own keys are
  as few as its tokens, and their gradients belong to one program alone.
The backward pass is two kernels without atomics: by tile of queries (gradients of the queries and of the blocks' own keys and values),
and by tile of context keys for each query head, to be summed over the heads that share them.

Legend: T context tokens, Q = A*K queries, A anchors, K slots, H query heads, G key/value heads, R = H/G, d head dimension.
Needs Triton, which comes with torch for CUDA. Twin: `attention.attend` with a dense mask.
"""

import torch
import triton
import triton.language as tl

FORWARD, QUERIES, KEYS = "forward", "queries", "keys"
TILING = {FORWARD: (128, 64, 8, 3, 3), QUERIES: (128, 64, 8, 3, 1), KEYS: (64, 128, 8, 3, 1)}
"""Per kernel: queries and keys of a tile, warps, stages, stages over masked tiles (benchmarks/drafter_step.py --sweep)."""

WIDE_TILING = {FORWARD: (64, 32, 4, 1, 1), QUERIES: (64, 32, 4, 1, 1), KEYS: (32, 64, 4, 1, 1)}
"""The same for float32: small models and the parity tests."""

PLAN_TILE = tl.constexpr(128)
"""Context keys of a tile of the tiles listed on the host."""

NOWHERE = tl.constexpr(1 << 30)

LOG2E = 1.4426950408889634


def fits(query, context_key, block_size):
    """Whether the kernels take these shapes: whole tiles, and whole blocks with all heads that share their keys in a tile of queries."""
    Q, H, d = query.shape
    T, G, _ = context_key.shape
    tokens = min(_tiling(kernel, query)[0] for kernel in (FORWARD, QUERIES)) // _power_of_2(H // G)
    return T % 128 == 0 and Q % 128 == 0 and d in (32, 64, 128) and tokens >= 16 and tokens % block_size == 0


@torch.library.custom_op("drafter::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    anchor_A: torch.Tensor,
    lo_A: torch.Tensor,
    keep_A: torch.Tensor,
    key_ranges: torch.Tensor,
    block_size: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, H, d] and log2 of the softmax's sum, float32 [H, Q]; tensors as in `attention.attend`, window 0 is a full layer."""
    Q, H, d = query.shape
    G = context_key.shape[1]
    out, lse_HQ = query.new_empty(Q, H, d), query.new_empty(H, Q, dtype=torch.float32)
    tile_m, tile_n, warps, stages, masked = _tiling(FORWARD, query)
    shared = _power_of_2(H // G)
    inputs = query, context_key, context_value, block_key, block_value
    with torch.cuda.device_of(query):
        _attention_forward[(Q * shared // tile_m * G,)](
            *inputs, out, lse_HQ, anchor_A, lo_A, keep_A, *_strides(*inputs), Q, H // G, shared, G, block_size, window, LOG2E * d**-0.5,
            tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse_HQ


@attention.register_fake
def _(query, *_):
    Q, H, d = query.shape
    return query.new_empty(Q, H, d), query.new_empty(H, Q, dtype=torch.float32)


@torch.library.custom_op("drafter::attention_backward", mutates_args=())
def attention_backward(
    out_gradient: torch.Tensor,
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    anchor_A: torch.Tensor,
    lo_A: torch.Tensor,
    keep_A: torch.Tensor,
    key_ranges: torch.Tensor,
    out: torch.Tensor,
    lse_HQ: torch.Tensor,
    block_size: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, context keys and values ([T, H, d], to be summed over the heads that share them), block keys and values."""
    inputs, mask = (query, context_key, context_value, block_key, block_value), (anchor_A, lo_A, keep_A)
    query_gradient, *block_gradients, delta_HQ = backward_queries(out_gradient, inputs, mask, out, lse_HQ, block_size, window)
    context_gradients = backward_keys(out_gradient, inputs, mask, key_ranges, lse_HQ, delta_HQ, block_size, window)
    return query_gradient, *context_gradients, *block_gradients


@attention_backward.register_fake
def _(out_gradient, query, context_key, context_value, block_key, *_):
    context = context_key.new_empty(len(context_key), *query.shape[1:])
    block = block_key.new_empty(block_key.shape)
    return query.new_empty(query.shape), context, torch.empty_like(context), block, torch.empty_like(block)


def backward_queries(out_gradient, inputs, mask, out, lse_HQ, block_size, window):
    """Gradients of query, block keys and block values, and each query's sum of output times gradient, float32 [H, Q]."""
    query, context_key, _, block_key, _ = inputs
    Q, H, d = query.shape
    G = context_key.shape[1]
    gradients = [x.new_empty(x.shape) for x in (query, block_key, block_key)]
    delta_HQ = torch.empty_like(lse_HQ)
    tile_m, tile_n, warps, stages, masked = _tiling(QUERIES, query)
    shared = _power_of_2(H // G)
    with torch.cuda.device_of(query):
        _attention_backward_queries[(Q * shared // tile_m * G,)](
            *inputs, out, out_gradient, lse_HQ, delta_HQ, *gradients, *mask, *_strides(*inputs, out_gradient), Q, H // G, shared, G,
            block_size, window, LOG2E * d**-0.5, d**-0.5, tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return *gradients, delta_HQ


def backward_keys(out_gradient, inputs, mask, key_ranges, lse_HQ, delta_HQ, block_size, window):
    """Gradients of context keys and values by query head: [T, H, d]."""
    query, context_key, context_value, _, _ = inputs
    Q, H, d = query.shape
    T, G, _ = context_key.shape
    gradients = [query.new_empty(T, H, d) for _ in range(2)]
    tile_m, tile_n, warps, stages, masked = _tiling(KEYS, query)
    with torch.cuda.device_of(query):
        _attention_backward_keys[(T // tile_n * H,)](
            query, context_key, context_value, out_gradient, lse_HQ, delta_HQ, *gradients, *mask, key_ranges,
            *_strides(query, context_key, context_value, out_gradient), Q, H, H // G, block_size, window, LOG2E * d**-0.5, d**-0.5,
            tile_m, tile_n, masked, d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return gradients


def _keep_for_backward(ctx, inputs, output):
    *tensors, ctx.block_size, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, out_gradient, _):
    context_key = ctx.saved_tensors[1]
    if out_gradient.stride(-1) != 1:
        out_gradient = out_gradient.contiguous()
    gradients = torch.ops.drafter.attention_backward(out_gradient, *ctx.saved_tensors, ctx.block_size, ctx.window)
    summed = [g.unflatten(1, (context_key.shape[1], -1)).sum(2) for g in gradients[1:3]]
    return gradients[0], *summed, *gradients[3:], *[None] * 6


attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _tiling(kernel, query):
    return (WIDE_TILING if query.dtype == torch.float32 else TILING)[kernel]


def _power_of_2(count):
    return 1 << (count - 1).bit_length()


def _strides(*tensors):
    return [stride for x in tensors for stride in x.stride()[:2]]


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _add_dot(acc, a, b):
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _inside(key, low, high):
    return (key >= low) & (key < high)


@triton.jit
def _absorb(s, v, top, total, acc, SCALE: tl.constexpr):
    """A tile of unscaled scores and its values into the running softmax: its largest score, its sum, its weighted values."""
    higher = tl.maximum(top, tl.max(s, 1) * SCALE)
    p = tl.exp2(s * SCALE - higher[:, None])
    shrink = tl.exp2(top - higher)
    return higher, total * shrink + tl.sum(p, 1), _add_dot(acc * shrink[:, None], p.to(v.dtype), v)


@triton.jit
def _rows(pid, Q, R: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, TILE_M: tl.constexpr):
    """A program's queries: all heads of one key/value head, few tokens; the last tiles, which see most, first."""
    kv_head = pid % G
    first = (Q // (TILE_M // SHARED) - 1 - pid // G) * (TILE_M // SHARED)
    row = tl.arange(0, TILE_M)
    return kv_head, first, first + row // SHARED, kv_head * R + row % SHARED, row % SHARED < R


@triton.jit
def _interval(anchor, lo, keep, token, K: tl.constexpr, WINDOW: tl.constexpr):
    """The context keys [low, high) that each query sees."""
    block = token // K
    high = tl.load(anchor + block)
    low = tl.load(lo + block)
    kept = tl.load(keep + block) != 0
    if WINDOW > 0:
        low = tl.maximum(low, high + token % K + 1 - WINDOW)
    return tl.where(kept, low, NOWHERE), tl.where(kept, high, 0), kept


@triton.jit
def _walk(low, high, TILE_N: tl.constexpr):
    """Tiles of keys that a tile of queries walks: [first, first + before) and [full_end, full_end + after) masked, [full, full_end) not."""
    some = low < high
    first = tl.min(tl.where(some, low, NOWHERE)) // TILE_N
    end = (tl.max(tl.where(some, high, 0)) + TILE_N - 1) // TILE_N
    full = (tl.max(low) + TILE_N - 1) // TILE_N
    full_end = tl.min(high) // TILE_N
    none = full >= full_end
    full = tl.where(none, end, full)
    full_end = tl.where(none, end, full_end)
    return first, tl.maximum(full - first, 0), full, full_end, tl.maximum(end - full_end, 0)


@triton.jit
def _own(first, token, kept, K: tl.constexpr, WINDOW: tl.constexpr, OWN: tl.constexpr):
    """Which of the program's block keys each query sees: its own block's; in a sliding layer up to itself; an empty slot itself only."""
    key = first + tl.arange(0, OWN)
    same = key[None, :] // K == token[:, None] // K
    if WINDOW > 0:
        same = same & (key[None, :] <= token[:, None])
    return (same & kept[:, None]) | (key[None, :] == token[:, None])


@triton.jit
def _attention_forward(
    query, context_key, context_value, block_key, block_value, out, lse, anchor, lo, keep,
    query_n, query_h, ck_n, ck_h, cv_n, cv_h, bk_n, bk_h, bv_n, bv_h, Q,
    R: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED_STAGES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    kv_head, start, token, head, real = _rows(tl.program_id(0), Q, R, SHARED, G, TILE_M)
    low, high, kept = _interval(anchor, lo, keep, token, K, WINDOW)
    first, before, full, full_end, after = _walk(low, high, TILE_N)
    OWN: tl.constexpr = TILE_M // SHARED
    d = tl.arange(0, D)
    n = tl.arange(0, TILE_N)
    own = start + tl.arange(0, OWN)

    q = tl.load(query + token[:, None] * query_n + head[:, None] * query_h + d[None, :], mask=real[:, None], other=0.0)
    own_k = tl.load(block_key + own[:, None] * bk_n + kv_head * bk_h + d[None, :])
    own_v = tl.load(block_value + own[:, None] * bv_n + kv_head * bv_h + d[None, :])
    own_s = _dot(q, tl.trans(own_k)) * SCALE
    own_s = tl.where(_own(start, token, kept, K, WINDOW, OWN), own_s, -float("inf"))
    top = tl.max(own_s, 1)  # a query sees at least itself: never -inf
    own_p = tl.exp2(own_s - top[:, None])
    total = tl.sum(own_p, 1)
    acc = _dot(own_p.to(own_v.dtype), own_v)

    key_at = context_key + kv_head * ck_h + n[:, None] * ck_n + d[None, :]
    value_at = context_value + kv_head * cv_h + n[:, None] * cv_n + d[None, :]
    for tile in tl.range(full, full_end):
        s = _dot(q, tl.trans(tl.load(key_at + tile * TILE_N * ck_n)))
        top, total, acc = _absorb(s, tl.load(value_at + tile * TILE_N * cv_n), top, total, acc, SCALE)
    for step in tl.range(before + after, num_stages=MASKED_STAGES):
        tile = tl.where(step < before, first + step, full_end + step - before)
        s = _dot(q, tl.trans(tl.load(key_at + tile * TILE_N * ck_n)))
        s = tl.where(_inside(tile * TILE_N + n[None, :], low[:, None], high[:, None]), s, -float("inf"))
        top, total, acc = _absorb(s, tl.load(value_at + tile * TILE_N * cv_n), top, total, acc, SCALE)

    at = (token * (R * G) + head)[:, None] * D + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + head * Q + token, top + tl.log2(total), mask=real)


@triton.jit
def _attention_backward_queries(
    query, context_key, context_value, block_key, block_value, out, out_gradient, lse, delta, query_gradient, bk_gradient, bv_gradient,
    anchor, lo, keep, query_n, query_h, ck_n, ck_h, cv_n, cv_h, bk_n, bk_h, bv_n, bv_h, og_n, og_h, Q,
    R: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    PLAIN_SCALE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED_STAGES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    kv_head, start, token, head, real = _rows(tl.program_id(0), Q, R, SHARED, G, TILE_M)
    low, high, kept = _interval(anchor, lo, keep, token, K, WINDOW)
    first, before, full, full_end, after = _walk(low, high, TILE_N)
    OWN: tl.constexpr = TILE_M // SHARED
    d = tl.arange(0, D)
    n = tl.arange(0, TILE_N)
    own = start + tl.arange(0, OWN)

    at = (token * (R * G) + head)[:, None] * D + d[None, :]
    g = tl.load(out_gradient + token[:, None] * og_n + head[:, None] * og_h + d[None, :], mask=real[:, None], other=0.0)
    o = tl.load(out + at, mask=real[:, None], other=0.0)
    shift = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * Q + token, shift, mask=real)
    q = tl.load(query + token[:, None] * query_n + head[:, None] * query_h + d[None, :], mask=real[:, None], other=0.0)
    logsum = tl.load(lse + head * Q + token, mask=real, other=0.0)

    own_k = tl.load(block_key + own[:, None] * bk_n + kv_head * bk_h + d[None, :])
    own_v = tl.load(block_value + own[:, None] * bv_n + kv_head * bv_h + d[None, :])
    own_p = tl.exp2(_dot(q, tl.trans(own_k)) * SCALE - logsum[:, None])
    own_p = tl.where(_own(start, token, kept, K, WINDOW, OWN), own_p, 0.0)
    own_ds = (own_p * (_dot(g, tl.trans(own_v)) - shift[:, None])).to(q.dtype)
    at_own = (own * G + kv_head)[:, None] * D + d[None, :]
    tl.store(bv_gradient + at_own, _dot(tl.trans(own_p.to(g.dtype)), g).to(q.dtype))
    tl.store(bk_gradient + at_own, (_dot(tl.trans(own_ds), q) * PLAIN_SCALE).to(q.dtype))
    acc = _dot(own_ds, own_k)

    key_at = context_key + kv_head * ck_h + n[:, None] * ck_n + d[None, :]
    value_at = context_value + kv_head * cv_h + n[:, None] * cv_n + d[None, :]
    for tile in tl.range(full, full_end):
        k = tl.load(key_at + tile * TILE_N * ck_n)
        p = tl.exp2(_dot(q, tl.trans(k)) * SCALE - logsum[:, None])
        ds = p * (_dot(g, tl.trans(tl.load(value_at + tile * TILE_N * cv_n))) - shift[:, None])
        acc = _add_dot(acc, ds.to(k.dtype), k)
    for step in tl.range(before + after, num_stages=MASKED_STAGES):
        tile = tl.where(step < before, first + step, full_end + step - before)
        k = tl.load(key_at + tile * TILE_N * ck_n)
        p = tl.exp2(_dot(q, tl.trans(k)) * SCALE - logsum[:, None])
        p = tl.where(_inside(tile * TILE_N + n[None, :], low[:, None], high[:, None]), p, 0.0)
        ds = p * (_dot(g, tl.trans(tl.load(value_at + tile * TILE_N * cv_n))) - shift[:, None])
        acc = _add_dot(acc, ds.to(k.dtype), k)
    tl.store(query_gradient + at, (acc * PLAIN_SCALE).to(query_gradient.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attention_backward_keys(
    query, context_key, context_value, out_gradient, lse, delta, ck_gradient, cv_gradient, anchor, lo, keep, ranges,
    query_n, query_h, ck_n, ck_h, cv_n, cv_h, og_n, og_h, Q,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, PLAIN_SCALE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED_STAGES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // H  # the first tiles, which most queries see, first
    head = tl.program_id(0) % H
    kv_head = head // R
    d = tl.arange(0, D)
    m = tl.arange(0, TILE_M)
    at_n = tile * TILE_N + tl.arange(0, TILE_N)
    k = tl.load(context_key + at_n[:, None] * ck_n + kv_head * ck_h + d[None, :])
    v = tl.load(context_value + at_n[:, None] * cv_n + kv_head * cv_h + d[None, :])
    ranges += tile * TILE_N // PLAN_TILE * 4
    first = tl.load(ranges) * K // TILE_M
    full = (tl.load(ranges + 1) * K + TILE_M - 1) // TILE_M
    full_end = tl.load(ranges + 2) * K // TILE_M
    end = (tl.load(ranges + 3) * K + TILE_M - 1) // TILE_M
    none = full >= full_end
    full = tl.where(none, end, full)
    full_end = tl.where(none, end, full_end)
    before = tl.maximum(full - first, 0)
    after = tl.maximum(end - full_end, 0)

    query_at = query + head * query_h + m[:, None] * query_n + d[None, :]
    gradient_at = out_gradient + head * og_h + m[:, None] * og_n + d[None, :]
    lse += head * Q
    delta += head * Q
    k_acc = tl.zeros([TILE_N, D], tl.float32)
    v_acc = tl.zeros([TILE_N, D], tl.float32)
    for step in tl.range(full, full_end):
        q = tl.load(query_at + step * TILE_M * query_n)
        g = tl.load(gradient_at + step * TILE_M * og_n)
        p = tl.exp2(_dot(k, tl.trans(q)) * SCALE - tl.load(lse + step * TILE_M + m)[None, :])
        v_acc = _add_dot(v_acc, p.to(g.dtype), g)
        ds = p * (_dot(v, tl.trans(g)) - tl.load(delta + step * TILE_M + m)[None, :])
        k_acc = _add_dot(k_acc, ds.to(q.dtype), q)
    for i in tl.range(before + after, num_stages=MASKED_STAGES):
        step = tl.where(i < before, first + i, full_end + i - before)
        q = tl.load(query_at + step * TILE_M * query_n)
        g = tl.load(gradient_at + step * TILE_M * og_n)
        low, high, _ = _interval(anchor, lo, keep, step * TILE_M + m, K, WINDOW)
        p = tl.exp2(_dot(k, tl.trans(q)) * SCALE - tl.load(lse + step * TILE_M + m)[None, :])
        p = tl.where(_inside(at_n[:, None], low[None, :], high[None, :]), p, 0.0)
        v_acc = _add_dot(v_acc, p.to(g.dtype), g)
        ds = p * (_dot(v, tl.trans(g)) - tl.load(delta + step * TILE_M + m)[None, :])
        k_acc = _add_dot(k_acc, ds.to(q.dtype), q)
    at = (at_n * H + head)[:, None] * D + d[None, :]
    kind = ck_gradient.dtype.element_ty
    tl.store(ck_gradient + at, (k_acc * PLAIN_SCALE).to(kind))
    tl.store(cv_gradient + at, v_acc.to(kind))
