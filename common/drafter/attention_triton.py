"""Triton kernels of the drafter's attention, forward and backward, made for the mask of block_mask.py; attention_kernel.py launches them.

What they know that a general block-sparse kernel does not:
- a query's context is an interval of keys, so a tile of queries goes through a range of tiles: mostly full ones, at the edges masked ones;
- anchors are sorted, so the queries that see a tile of keys are a range, too (`block_mask.key_ranges`, listed on the host);
- a program takes all query heads of one key/value head at once. A tile then spans few anchors: little is masked, a block's own keys are
  as few as its tokens, and their gradients belong to one program alone.
The backward pass is two kernels without atomics: by tile of queries (gradients of the queries and of the blocks' own keys and values),
and by tile of context keys for each query head, to be summed over the heads that share them.

Legend: T context tokens, Q = A*K queries, A anchors, K slots, H query heads, G key/value heads, R = H/G, SHARED the power of 2 from R,
d head dimension. Names such as `query_n`, `query_h` are a tensor's strides by row and by head.
Needs Triton, which comes with torch for CUDA.
"""

import triton
import triton.language as tl

LISTED_TILE = tl.constexpr(128)
"""Context keys of a tile of the tiles listed on the host."""

NOWHERE = tl.constexpr(1 << 30)
"""A key index behind every key."""


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
    """Tiles of keys that a tile of queries needs: [first, first + before) and [full_end, full_end + after) masked, [full, full_end) not."""
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
    ranges += tile * TILE_N // LISTED_TILE * 4
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


FORWARD, QUERIES, KEYS = "forward", "queries", "keys"
KERNELS = {FORWARD: _attention_forward, QUERIES: _attention_backward_queries, KEYS: _attention_backward_keys}
"""The forward pass, the backward pass by tile of queries, and the backward pass by tile of context keys."""
