"""Attention of a packet's blocks under the mask of block_mask.py: dense on every device, by tiles on CUDA.

Three implementations of one function: `attend_dense` (the reference, and what runs on the CPU), `attend_kernel` (kernels made for this
mask, on the usual shapes) and `attend_flex` (torch's own block-sparse attention, for any shape in whole tiles).

Legend: T tokens of the row, A anchors, K block slots, Q = A*K queries, H heads, G key/value heads, d head dimension.
"""

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from common.drafter.block_mask import TILE, MaskSpec, PacketMask, Tiles, dense_mask, visible
from common.errors import UserError

if importlib.util.find_spec("triton"):  # comes with torch for CUDA
    from common.drafter import attention_kernel

KeysValues = tuple[Tensor, Tensor]


def check_tiles(spec: MaskSpec, device: torch.device) -> None:
    """Refuse shapes that would leave CUDA to the dense attention unasked: its mask alone is [Q, T + Q].

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


def slow_path(spec: MaskSpec, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why attention on CUDA is not that of the kernels made for it, if so; `heads` are query heads, key heads and their size."""
    if device.type != "cuda":
        return None
    H, G, d = heads
    if TILE % spec.block_size:
        return f"its attention is dense: blocks of {spec.block_size} do not fill tiles of {TILE}"
    nothing = torch.empty(1, 1, 1, dtype=dtype, device=device)
    if attention_kernel.fits(nothing.expand(spec.anchors * spec.block_size, H, d), nothing.expand(spec.row_tokens, G, d), spec.block_size):
        return None
    return (
        f"its attention is torch's FlexAttention: heads of {d}, {H} over {G}, and blocks of {spec.block_size} have no kernel of their own"
    )


class SparseMask(NamedTuple):
    """What the kernels on CUDA need of a packet's mask, for layers with one window."""

    spec: MaskSpec
    packet: PacketMask
    tiles: Tiles
    window: int | None


Mask = SparseMask | Tensor | None
"""What `attend` takes: tiles, a dense mask bool [Q, T + Q], or None where everything is visible."""


def mask_of(spec: MaskSpec, packet: PacketMask, window: int | None) -> SparseMask | Tensor:
    """A packet's mask for layers with this window (None: full layers): tiles on CUDA, else the dense mask."""
    tiles = packet.full_tiles if window is None else packet.sliding_tiles
    if tiles is None or packet.anchor_A.device.type != "cuda":
        return dense_mask(spec, packet.anchor_A, packet.lo_A, packet.keep_A, window)
    return SparseMask(spec, packet, tiles, window)


def attend(query: Tensor, context: KeysValues, block: KeysValues, mask: Mask) -> Tensor:
    """Attention of block queries over context and block keys; grouped heads, scale d**-0.5.

    Shapes: query [Q, H, d]; context = (keys, values) [T, G, d]; block = (keys, values) [Q, G, d] -> [Q, H, d].
    """
    if not isinstance(mask, SparseMask):
        return attend_dense(query, context, block, mask)
    causal = mask.window is None or mask.spec.sliding_causal  # the kernels know no other sliding layer
    if causal and attention_kernel.fits(query, context[0], mask.spec.block_size):
        return attend_kernel(query, context, block, mask)
    return attend_flex(query, context, block, mask)


def attend_dense(query: Tensor, context: KeysValues, block: KeysValues, mask: Tensor | None) -> Tensor:
    """The reference: every pair is computed, hidden ones are masked."""
    query, key, value = _stacked(query, context, block)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def attend_flex(query: Tensor, context: KeysValues, block: KeysValues, mask: SparseMask) -> Tensor:
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


def attend_kernel(query: Tensor, context: KeysValues, block: KeysValues, mask: SparseMask) -> Tensor:
    """The kernels made for this mask, on the usual shapes."""
    packet, block_size, window = mask.packet, mask.spec.block_size, mask.window or 0
    return attention_kernel.attention(
        query, *context, *block, packet.anchor_A, packet.lo_A, packet.keep_A, mask.tiles.key_ranges, block_size, window
    )[0]


def _stacked(query: Tensor, context: KeysValues, block: KeysValues) -> Iterator[Tensor]:
    """Query, keys and values as [1, heads, rows, d], block keys behind the context's."""
    return (x.transpose(0, 1)[None] for x in (query, *(torch.cat(pair) for pair in zip(context, block, strict=True))))
