"""Which keys a drafter's block sees: one predicate, its dense twin for every device, its block-sparse twin for CUDA.

The rule, for slot k of block j at anchor a_j (a row index), in words:
- a context key p is visible iff lo_j <= p < a_j, where lo_j is the first token of the anchor's document; in a sliding layer with
  window W also a_j + k - p < W. Strictly below a_j: while decoding, the anchor's own feature does not exist yet;
- a block key is visible iff it belongs to the same block j (its index, not its positions: close anchors must not see each other);
  in a sliding layer only up to the slot itself;
- an empty anchor slot sees itself only, so that no row of the softmax is empty.

Legend: T tokens of the row, A anchors, K block slots, Q = A*K queries, H heads, G key/value heads, d head dimension.
Keys are numbered T context keys first, then the A*K block keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class MaskSpec:
    """The static numbers of a mask."""

    row_tokens: int
    anchors: int
    block_size: int


class MaskPlan(NamedTuple):
    """What decides a packet's masks, as tensors of fixed shapes.

    Shapes: anchor, lo int32 [A], keep bool [A].
    """

    anchor_A: torch.Tensor
    lo_A: torch.Tensor
    keep_A: torch.Tensor

    def to(self, device):
        return MaskPlan(*(t.to(device, non_blocking=True) for t in self))

    def pin(self):
        return MaskPlan(*(t.pin_memory() for t in self))


def plan(spec, anchor, lo, keep, window=None):
    """Build a packet's MaskPlan on the host from numpy arrays: anchor, lo int32 [A] (sorted by anchor), keep bool [A]."""
    return MaskPlan(*(torch.from_numpy(a) for a in (anchor, lo, keep)))


def visible(spec, anchor_A, lo_A, keep_A, window):
    """The predicate: a function of (query index, key index), elementwise on tensors. `window` None is a full layer."""
    T, K = spec.row_tokens, spec.block_size

    def predicate(query, key):
        block, slot = query // K, query % K
        own = key - T - block * K  # the key's slot, if it is one of this block's
        context = (key < T) & (key >= lo_A[block]) & (key < anchor_A[block])
        inside = (own >= 0) & (own < K)
        if window is not None:
            context = context & (anchor_A[block] + slot - key < window)
            inside = inside & (own <= slot)
        return torch.where(keep_A[block], context | inside, own == slot)

    return predicate


def dense_mask(spec, anchor_A, lo_A, keep_A, window=None):
    """The predicate written out: bool [A*K, T + A*K], True where the key is visible."""
    queries = torch.arange(spec.anchors * spec.block_size, device=anchor_A.device)
    keys = torch.arange(spec.row_tokens + len(queries), device=anchor_A.device)
    return visible(spec, anchor_A, lo_A, keep_A, window)(queries[:, None], keys[None, :])


def mask_of(spec, plan, window):
    """The mask that `attend` takes, for layers with this window (None: full layers)."""
    return dense_mask(spec, plan.anchor_A, plan.lo_A, plan.keep_A, window)


def attend(query, context, block, mask):
    """Attention of block queries over context and block keys; grouped heads, scale d**-0.5.

    Shapes: query [A*K, H, d]; context = (keys, values) [T, G, d]; block = (keys, values) [A*K, G, d] -> [A*K, H, d].
    `mask` is what `mask_of` built, or None where everything is visible.
    """
    query, *key_value = (x.transpose(0, 1)[None] for x in (query, *(torch.cat(pair) for pair in zip(context, block, strict=True))))
    out = F.scaled_dot_product_attention(query, *key_value, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
