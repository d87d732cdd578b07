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

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from common.errors import UserError

attention_kernel = None

if importlib.util.find_spec("triton"):  # comes with torch for CUDA
    from common.drafter import attention_kernel


TILE = 128
"""Queries and keys of a tile of the block-sparse mask."""


@dataclass(frozen=True)
class MaskSpec:
    """The static numbers of a mask."""

    row_tokens: int
    anchors: int
    block_size: int

    @property
    def tileable(self):
        """Whether rows and blocks fill whole tiles; if not, the dense twin runs everywhere."""
        return self.row_tokens % TILE == 0 and TILE % self.block_size == 0 and self.anchors * self.block_size % TILE == 0


def check_tiles(spec, device):
    """Refuse shapes that would leave CUDA to the dense twin unasked: its mask alone is [A*K, T + A*K].

    A block size that does not divide a tile has no block-sparse form and runs dense by its own choice.
    Raises: UserError.
    """
    if device.type != "cuda" or TILE % spec.block_size:
        return
    step = TILE // spec.block_size
    for key, value, unit in (("data.pack_tokens", spec.row_tokens, TILE), ("objective.anchors", spec.anchors, step)):
        if value % unit:
            low = value // unit * unit
            advice = f"{low} or {low + unit}" if low else f"{unit}"
            raise UserError(f"{key}={value} does not fill the attention's tiles of {TILE} on CUDA; use a multiple of {unit}: {advice}")


class Tiles(NamedTuple):
    """Which tiles of the mask hold visible pairs, by query tile and (for the backward pass) by key tile; full ones apart.

    Shapes: counts int32 [1, 1, rows], indices int32 [1, 1, rows, columns], ascending, zero behind their count; key_ranges int32
    [T / TILE, 4], the same by key tile as ranges of anchors.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    full_q_num_blocks: torch.Tensor
    full_q_indices: torch.Tensor
    key_ranges: torch.Tensor


class PacketMask(NamedTuple):
    """What decides a packet's masks, as tensors of fixed shapes; built on the host, used on the device.

    Shapes: anchor_A, lo_A int32 [A], keep_A bool [A]. The tiles of full and sliding layers are None where they are not used.
    """

    anchor_A: torch.Tensor
    lo_A: torch.Tensor
    keep_A: torch.Tensor
    full_tiles: Tiles | None
    sliding_tiles: Tiles | None

    def to(self, device, non_blocking=False):
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self):
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function):
        return PacketMask(*map(function, self[:3]), *(tiles and Tiles(*map(function, tiles)) for tiles in self[3:]))


def packet_mask(spec, anchor_A, lo_A, keep_A, window=None):
    """Build a packet's PacketMask on the host from numpy arrays: anchor, lo int32 [A], keep bool [A]."""
    tiles = [None, None]
    if spec.tileable:
        tiles = [mask_tiles(spec, anchor_A, lo_A, keep_A, w) if used else None for w, used in ((None, True), (window, window))]
    return PacketMask(*(torch.from_numpy(a) for a in (anchor_A, lo_A, keep_A)), *tiles)


def mask_tiles(spec, anchor_A, lo_A, keep_A, window=None):
    """Tile lists of a packet's mask, computed from its intervals (never from its elements): a few numpy operations on [tiles, tiles]."""
    T, K = spec.row_tokens, spec.block_size
    # the context that some slot of an anchor sees is [first, anchor), the context that every slot sees [first_of_all, anchor)
    first_A, first_of_all_A = (lo_A, lo_A) if window is None else (np.maximum(lo_A, anchor_A + k + 1 - window) for k in (0, K - 1))
    start_N = np.arange(0, T, TILE)
    by_tile = (-1, TILE // K, 1)
    seen = keep_A & (first_A < anchor_A)
    first, full_first, last, seen, keep = (x.reshape(by_tile) for x in (first_A, first_of_all_A, anchor_A, seen, keep_A))
    listed_MN = (seen & (first < start_N + TILE) & (last > start_N)).any(axis=1)
    full_MN = (keep & (full_first <= start_N) & (last >= start_N + TILE)).all(axis=1)
    blocks = np.eye(len(listed_MN), dtype=bool)  # a tile of queries against its own blocks is always partial
    partial, full = np.hstack((listed_MN & ~full_MN, blocks)), np.hstack((full_MN, blocks & False))
    lists = [x for mask in (partial, full, partial.T, full.T) for x in _listed(mask)]
    return Tiles(*lists, key_ranges(spec, anchor_A, lo_A, keep_A, window))


def key_ranges(spec, anchor_A, lo_A, keep_A, window=None):
    """Which anchors see a tile of context keys, for kernels that walk them: int32 [T / TILE, 4].

    Per tile: [first, end) see some of its keys, [full, full_end) all of them, in every slot; columns first, full, full_end, end.
    Anchors are sorted and so are their intervals' ends; empty slots come last.
    """
    kept = np.count_nonzero(keep_A)
    anchor, low = anchor_A[:kept], lo_A[:kept]
    low, low_of_all = (low, low) if window is None else (np.maximum(low, anchor + k + 1 - window) for k in (0, spec.block_size - 1))
    start = np.arange(0, spec.row_tokens, TILE)
    some = np.searchsorted(anchor, start, "right"), np.searchsorted(low, start + TILE, "left")
    full = np.searchsorted(anchor, start + TILE, "left"), np.searchsorted(low_of_all, start, "right")
    return torch.from_numpy(np.stack((some[0], *full, some[1]), axis=1).astype(np.int32))


def _listed(mask):
    """A boolean matrix as counts and column indices per row."""
    rows, columns = np.nonzero(mask)
    counts = mask.sum(1)
    indices = np.zeros(mask.shape, np.int32)
    indices[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns
    return torch.from_numpy(counts.astype(np.int32))[None, None], torch.from_numpy(indices)[None, None]


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


class SparseMask(NamedTuple):
    """What the kernels on CUDA need of a packet's mask, for layers with one window."""

    spec: MaskSpec
    packet: PacketMask
    tiles: Tiles
    window: int | None


def mask_of(spec, packet, window):
    """The mask that `attend` takes, for layers with this window (None: full layers): sparse on CUDA, else the dense twin."""
    tiles = packet.full_tiles if window is None else packet.sliding_tiles
    if tiles is None or packet.anchor_A.device.type != "cuda":
        return dense_mask(spec, packet.anchor_A, packet.lo_A, packet.keep_A, window)
    return SparseMask(spec, packet, tiles, window)


def attend(query, context, block, mask):
    """Attention of block queries over context and block keys; grouped heads, scale d**-0.5.

    Shapes: query [A*K, H, d]; context = (keys, values) [T, G, d]; block = (keys, values) [A*K, G, d] -> [A*K, H, d].
    `mask` is what `mask_of` built, or None where everything is visible.
    """
    if not isinstance(mask, SparseMask):
        return attend_dense(query, context, block, mask)
    if attention_kernel.fits(query, context[0], mask.spec.block_size):
        return attend_kernel(query, context, block, mask)
    return attend_flex(query, context, block, mask)


def attend_dense(query, context, block, mask):
    query, key, value = _stacked(query, context, block)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def attend_flex(query, context, block, mask):
    """Any shape in whole tiles: the listed tiles, with the predicate inside the partial ones."""
    spec, packet = mask.spec, mask.packet
    predicate = visible(spec, packet.anchor_A, packet.lo_A, packet.keep_A, mask.window)
    query, key, value = _stacked(query, context, block)
    block_mask = BlockMask(
        seq_lengths=(query.shape[2], key.shape[2]),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=lambda batch, head, q, k: predicate(q, k),
        **{name: value for name, value in mask.tiles._asdict().items() if name != "key_ranges"},
    )
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)


def attend_kernel(query, context, block, mask):
    """The kernels made for this mask, on the usual shapes."""
    packet, block_size, window = mask.packet, mask.spec.block_size, mask.window or 0
    return attention_kernel.attention(
        query, *context, *block, packet.anchor_A, packet.lo_A, packet.keep_A, mask.tiles.key_ranges, block_size, window
    )[0]


def _stacked(query, context, block):
    """Query, keys and values as [1, heads, rows, d], block keys behind the context's."""
    return (x.transpose(0, 1)[None] for x in (query, *(torch.cat(pair) for pair in zip(context, block, strict=True))))
