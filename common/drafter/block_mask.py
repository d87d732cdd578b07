"""Which keys a drafter's block sees: one rule as a predicate, written out as a dense mask, and listed by tiles for the kernels on CUDA.

The rule, for slot k of block j at anchor a_j (a row index), in words:
- a context key p is visible iff lo_j <= p < a_j, where lo_j is the first token of the anchor's document; in a sliding layer with
  window W also a_j + k - p < W. Strictly below a_j: while decoding, the anchor's own feature does not exist yet;
- a block key is visible iff it belongs to the same block j (its index, not its positions: close anchors must not see each other);
  in a sliding layer only up to the slot itself, unless the drafter's sliding layers are not causal;
- an empty anchor slot sees itself only, so that no row of the softmax is empty.

Legend: T tokens of the row, A anchors, K block slots, Q = A*K queries. Keys are numbered T context keys first, then the Q block keys.
For the tiles M rows of query tiles, N columns of context tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TILE = 128
"""Queries and keys of a tile."""


@dataclass(frozen=True)
class MaskSpec:
    """The static numbers of a mask."""

    row_tokens: int
    anchors: int
    block_size: int
    sliding_causal: bool = True

    @property
    def tileable(self) -> bool:
        """Whether rows and blocks fill whole tiles; if not, the dense mask is used everywhere."""
        return self.row_tokens % TILE == 0 and TILE % self.block_size == 0 and self.anchors * self.block_size % TILE == 0


class Tiles(NamedTuple):
    """Which tiles of the mask hold visible pairs, by query tile and (for the backward pass) by key tile; full ones apart.

    Shapes: counts int32 [1, 1, rows], indices int32 [1, 1, rows, columns], ascending, zero behind their count; key_ranges int32
    [T / TILE, 4], the same by key tile as ranges of anchors.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    key_ranges: Tensor


class PacketMask(NamedTuple):
    """What decides a packet's masks, as tensors of fixed shapes; built on the host, used on the device.

    Shapes: anchor_A, lo_A int32 [A], keep_A bool [A]. The tiles of full and of sliding layers are None where they are not used.
    """

    anchor_A: Tensor
    lo_A: Tensor
    keep_A: Tensor
    full_tiles: Tiles | None
    sliding_tiles: Tiles | None

    def to(self, device: torch.device, non_blocking: bool = False) -> "PacketMask":
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PacketMask":
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PacketMask":
        full, sliding = (None if tiles is None else Tiles(*map(function, tiles)) for tiles in (self.full_tiles, self.sliding_tiles))
        return PacketMask(function(self.anchor_A), function(self.lo_A), function(self.keep_A), full, sliding)


def packet_mask(spec: MaskSpec, anchor_A: np.ndarray, lo_A: np.ndarray, keep_A: np.ndarray, window: int | None = None) -> PacketMask:
    """Build a packet's PacketMask on the host.

    Shapes: anchor_A, lo_A int32 [A], keep_A bool [A]. `window` is that of the sliding layers, None if there are none.
    """
    full = mask_tiles(spec, anchor_A, lo_A, keep_A) if spec.tileable else None
    sliding = mask_tiles(spec, anchor_A, lo_A, keep_A, window) if spec.tileable and window else None
    return PacketMask(torch.from_numpy(anchor_A), torch.from_numpy(lo_A), torch.from_numpy(keep_A), full, sliding)


def mask_tiles(spec: MaskSpec, anchor_A: np.ndarray, lo_A: np.ndarray, keep_A: np.ndarray, window: int | None = None) -> Tiles:
    """Tile lists of a packet's mask, computed from its intervals (never from its elements): a few numpy operations on [M, N]."""
    T, K = spec.row_tokens, spec.block_size
    # the context that some slot of an anchor sees is [first, anchor), the context that every slot sees [first_of_all, anchor)
    first_A, first_of_all_A = (lo_A, lo_A) if window is None else (np.maximum(lo_A, anchor_A + k + 1 - window) for k in (0, K - 1))
    start_N = np.arange(0, T, TILE)
    by_tile = (-1, TILE // K, 1)
    seen = keep_A & (first_A < anchor_A)
    first, full_first, last, seen, keep = (x.reshape(by_tile) for x in (first_A, first_of_all_A, anchor_A, seen, keep_A))
    listed_MN = (seen & (first < start_N + TILE) & (last > start_N)).any(axis=1)
    full_MN = (keep & (full_first <= start_N) & (last >= start_N + TILE)).all(axis=1)
    blocks = np.eye(spec.anchors * K // TILE, dtype=bool)  # a tile of queries against its own blocks is always partial
    partial, full = np.hstack((listed_MN & ~full_MN, blocks)), np.hstack((full_MN, np.zeros_like(blocks)))
    by_query, by_key = (*_listed(partial), *_listed(full)), (*_listed(partial.T), *_listed(full.T))
    return Tiles(*by_query, *by_key, key_ranges(spec, anchor_A, lo_A, keep_A, window))


def key_ranges(spec: MaskSpec, anchor_A: np.ndarray, lo_A: np.ndarray, keep_A: np.ndarray, window: int | None = None) -> Tensor:
    """Which anchors see a tile of context keys, for kernels that go through them: int32 [T / TILE, 4].

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


def _listed(mask: np.ndarray) -> tuple[Tensor, Tensor]:
    """A boolean matrix as counts and column indices per row."""
    rows, columns = np.nonzero(mask)
    counts = mask.sum(1)
    indices = np.zeros(mask.shape, np.int32)
    indices[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns
    return torch.from_numpy(counts.astype(np.int32))[None, None], torch.from_numpy(indices)[None, None]


def visible(spec: MaskSpec, anchor_A: Tensor, lo_A: Tensor, keep_A: Tensor, window: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The predicate: a function of (query index, key index), elementwise on tensors. `window` None is a full layer."""
    T, K = spec.row_tokens, spec.block_size

    def predicate(query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // K, query % K
        own = key - T - block * K  # the key's slot, if it is one of this block's
        context = (key < T) & (key >= lo_A[block]) & (key < anchor_A[block])
        inside = (own >= 0) & (own < K)
        if window is not None:
            context = context & (anchor_A[block] + slot - key < window)
            inside = inside & (own <= slot) if spec.sliding_causal else inside
        return torch.where(keep_A[block], context | inside, own == slot)

    return predicate


def dense_mask(spec: MaskSpec, anchor_A: Tensor, lo_A: Tensor, keep_A: Tensor, window: int | None = None) -> Tensor:
    """The predicate written out: bool [Q, T + Q], True where the key is visible."""
    queries = torch.arange(spec.anchors * spec.block_size, device=anchor_A.device)
    keys = torch.arange(spec.row_tokens + len(queries), device=anchor_A.device)
    return visible(spec, anchor_A, lo_A, keep_A, window)(queries[:, None], keys[None, :])
