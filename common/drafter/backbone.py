"""The drafter: a few transformer layers that propose a whole block of tokens from the target's hidden states.

Training and decoding run the same layers: `forward` on all blocks of a packet, `extend` and `draft` on one block behind a cache of
context keys and values. Source: DFlash (arXiv 2602.06036).

A packet's blocks are computed with two savings, which change no result:
- The first slot of a block holds its anchor's token and every other slot the mask token, so only U = A + 1 of the N = A*K rows that
  enter the first layer are distinct. Its norms and projections run on the distinct rows; `Slots.expand` then gives every slot its row,
  just before the positions enter.
- Where the first slot predicts nothing, the last layer runs behind its attention on the predicted slots alone, which `Slots.select`
  picks out; where slots are mixed around the sublayers, which needs the first one too, they are picked out at the layer's end.

A family may put a module of its own around each sublayer: see `Around`.

Legend: T context tokens, A anchors, K block slots, J predicted slots, N = A*K rows (one a slot), U = A + 1 distinct rows of the first
layer, D hidden, M taps, F = M*D, H heads, G key/value heads, d head dimension, I width of the MLP.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.drafter.attention import KeysValues, Mask, attend, mask_of
from common.drafter.block_mask import MaskSpec, PacketMask, dense_mask
from common.drafter.rope import inverse_frequencies, rotate, rotations
from common.drafter.spec import FULL, SLIDING, DrafterSpec

Cache = list[KeysValues]
"""Context keys and values of each layer."""

RowMap = Callable[[Tensor], Tensor]
"""Makes other rows of a tensor's rows."""


class Slots(NamedTuple):
    """A packet's slots as rows: block after block, in each slot after slot."""

    anchors: int
    block_size: int

    def expand(self, distinct_U: Tensor, own: int = 1) -> Tensor:
        """Every slot's row out of the distinct ones: a block's first `own` slots have a row each, all later slots share the last row.

        Shapes: [A * own + 1, ...] -> [N, ...].
        """
        slot_K = torch.arange(self.block_size, device=distinct_U.device).unflatten(0, (-1, *[1] * (distinct_U.dim() - 1)))
        own_AO, rows = distinct_U[:-1].unflatten(0, (self.anchors, own)), distinct_U[-1:, None]
        for slot in range(own):
            rows = torch.where(slot_K == slot, own_AO[:, slot, None], rows)
        return rows.flatten(0, 1)

    def select(self, all_N: Tensor) -> Tensor:
        """The rows of all slots but each block's first: [N, ...] -> [A * (K - 1), ...]."""
        return all_N.unflatten(0, (self.anchors, self.block_size))[:, 1:].flatten(0, 1)


def every_row(rows: Tensor) -> Tensor:
    """The RowMap that changes nothing."""
    return rows


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, rounded to the input's type before the weight, as the engines do."""

    def __init__(self, size: int, eps: float, **kind: Any):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size, **kind)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    """Queries from the block, keys and values from context and block through the same weights; q, k and v in one matrix."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = spec.head_dim, spec.heads, spec.kv_heads
        self.qkv_proj = nn.Linear(spec.hidden_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.attention_bias, **kind)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, spec.attention_bias, **kind)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **kind)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **kind)

    def context(self, context_TD: Tensor, rope_T22d: Tensor) -> KeysValues:
        """Keys (normed and rotated) and values of the context: 2 x [T, G, d]."""
        first = self.heads * self.head_dim
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[first:]
        pair = F.linear(context_TD, self.qkv_proj.weight[first:], bias).unflatten(-1, (2 * self.kv_heads, self.head_dim))
        key, value = pair.split(self.kv_heads, dim=1)
        return rotate(self.k_norm(key), rope_T22d), value

    def forward(self, x: Tensor, rope_N22d: Tensor, context: KeysValues, mask: Mask, expand: RowMap, select: RowMap) -> Tensor:
        """Attention's output of the `select` rows.

        Shapes: x [N, D], or the distinct rows [U, D] of which `expand` makes N -> [rows of select, D].
        """
        qkv = self.qkv_proj(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(expand(self.q_norm(query)), rope_N22d), rotate(expand(self.k_norm(key)), rope_N22d)
        return self.o_proj(select(attend(query, context, (key, expand(value)), mask).flatten(1)))


@torch.library.custom_op("drafter::swiglu_backward", mutates_args=())
def swiglu_backward(act_gradient_NI: Tensor, gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate and up [N, 2I], and the activation silu(gate) * up [N, I] that the forward pass did not keep."""
    if gate_up_N2I.is_cuda and gate_up_N2I.dtype != torch.float64:
        from common.drafter import swiglu_kernel  # Triton comes with torch for CUDA only

        return swiglu_kernel.swiglu_backward(act_gradient_NI, gate_up_N2I)
    gate, up = gate_up_N2I.chunk(2, dim=-1)
    sigmoid, silu = gate.sigmoid(), F.silu(gate)
    gate_gradient = act_gradient_NI * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((gate_gradient, act_gradient_NI * silu), dim=-1), silu * up


@swiglu_backward.register_fake
def _(act_gradient_NI: Tensor, gate_up_N2I: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up_N2I), torch.empty_like(act_gradient_NI)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up times the down projection; keeps gate and up alone, and reads them once for all that the backward pass needs."""

    @staticmethod
    def forward(ctx: Any, gate_up_N2I: Tensor, weight_DI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2I, weight_DI)
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight_DI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient_ND,) = gradients
        gate_up_N2I, weight_DI = ctx.saved_tensors
        gate_up_gradient, act_NI = torch.ops.drafter.swiglu_backward(gradient_ND @ weight_DI, gate_up_N2I)
        return gate_up_gradient, gradient_ND.T @ act_NI


class MLP(nn.Module):
    """A SwiGLU with gate and up in one matrix."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        self.gate_up_proj = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False, **kind)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False, **kind)

    def forward(self, x_ND: Tensor) -> Tensor:
        return SwiGLU.apply(self.gate_up_proj(x_ND), self.down_proj.weight)


def add(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """Their sum, rounded once. In float32, since inductor would make an addmm of the product before it, which copies x first."""
    return (x_ND.float() + y_ND.float()).to(x_ND.dtype)


Sublayer = Callable[[Tensor, RowMap], Tensor]
"""Attention or MLP: (normed rows, the RowMap that gives every slot its row of them) -> its output."""


class Around(nn.Module):
    """What a layer does around a sublayer: nothing but call it. A family's module in its place changes the sublayer's input and output."""

    mixes_slots = False
    """Whether the slots of a block meet in it, so that the output of every slot is needed."""

    def forward(self, sublayer: Sublayer, x: Tensor, slots: Slots, distinct: bool) -> Tensor:
        """The sublayer's output, to be added to what came in.

        Shapes: x [N, D], the normed rows, or with `distinct` [U, D] -> [rows that the sublayer gives, D].
        """
        return sublayer(x, slots.expand if distinct else every_row)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to what came in."""

    attention_conv: Around
    mlp_conv: Around

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        self.attention_conv, self.mlp_conv = Around(), Around()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.self_attn = SelfAttention(spec, **kind)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.mlp = MLP(spec, **kind)

    def forward(
        self, x: Tensor, rope_N22d: Tensor, context: KeysValues, mask: Mask, slots: Slots, distinct: bool, predicted: bool
    ) -> Tensor:
        """The layer's output, with `predicted` of the predicted slots alone; attention needs all rows.

        Shapes: x [N, D], or with `distinct` [U, D]; rope_N22d [N, 2, 2, d/2] -> [N or A * (K - 1), D].
        """
        expand, select = slots.expand if distinct else every_row, slots.select if predicted else every_row
        mixed = self.attention_conv.mixes_slots or self.mlp_conv.mixes_slots
        early, late = (every_row, select) if mixed else (select, every_row)
        attention = lambda rows, expand: self.self_attn(rows, rope_N22d, context, mask, expand, early)  # noqa: E731
        x_ND = add(early(expand(x)), self.attention_conv(attention, self.input_layernorm(x), slots, distinct))
        mlp = lambda rows, expand: self.mlp(expand(rows))  # noqa: E731
        return late(add(x_ND, self.mlp_conv(mlp, self.post_attention_layernorm(x_ND), slots, False)))


class Drafter(nn.Module):
    """The drafter's layers. Embedding and vocabulary head are the target's and stay outside.

    A context feature enters as keys and values of every layer; a block of embeddings runs through the layers. With `checkpointing` the
    backward pass recomputes each layer.
    """

    layers: Sequence[Layer]

    def __init__(self, spec: DrafterSpec, dtype: torch.dtype, device: torch.device | str, checkpointing: bool = False):
        super().__init__()
        kind = {"dtype": dtype, "device": device}
        self.spec, self.checkpointing = spec, checkpointing
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False, **kind)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(spec, **kind) for _ in range(spec.layers)))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        frequencies, self.table_factor = inverse_frequencies(
            spec.head_dim, spec.rope_theta, spec.rope_scaling, spec.max_position_embeddings
        )
        self.frequencies = frequencies.to(device)  # no buffer: a cast of the module must not round it

    def forward(
        self, embeddings_UD: Tensor, positions_AK: Tensor, features_TF: Tensor, context_positions_T: Tensor, packet_mask: PacketMask
    ) -> Tensor:
        """Hidden states of the predicted slots of a packet's blocks, ready for the head: [A, J, D].

        embeddings_UD are those of the anchors' tokens and, last, of the mask token. Positions count in each token's own document.
        """
        slots = Slots(*positions_AK.shape)
        mask_spec = MaskSpec(features_TF.shape[0], slots.anchors, slots.block_size, self.spec.sliding_causal)
        windows = {t: self.spec.window if t == SLIDING else None for t in dict.fromkeys(self.spec.layer_types)}
        masks = {t: mask_of(mask_spec, packet_mask, window) for t, window in windows.items()}
        contexts = self._contexts(features_TF, context_positions_T)
        hidden = self._blocks(
            embeddings_UD, positions_AK.flatten(), contexts, masks, slots, distinct=True, predicted=not self.spec.sample_from_anchor
        )
        return hidden.unflatten(0, (slots.anchors, -1))

    def new_cache(self, capacity: int = 0) -> Cache:
        """Context keys and values per layer for `extend` and `draft`: an empty cache that grows, or one of fixed capacity."""
        empty = self.fc.weight.new_zeros(capacity, self.spec.kv_heads, self.spec.head_dim)
        return [(empty.clone(), empty.clone()) for _ in self.layers]

    @torch.no_grad()
    def extend(self, cache: Cache, features_NF: Tensor, positions_N: Tensor) -> None:
        """Add the features of newly accepted tokens, the next positions in order."""
        for i, (keys, values) in enumerate(self._contexts(features_NF, positions_N)):
            cache[i] = torch.cat((cache[i][0], keys)), torch.cat((cache[i][1], values))

    @torch.no_grad()
    def write(self, cache: Cache, features_NF: Tensor, positions_N: Tensor) -> None:
        """Write features at their positions into a cache of fixed capacity."""
        for cached, states in zip(cache, self._contexts(features_NF, positions_N), strict=True):
            for kept, rows in zip(cached, states, strict=True):
                kept.index_copy_(0, positions_N, rows)

    @torch.no_grad()
    def draft(self, cache: Cache, block_embeddings_KD: Tensor, positions_K: Tensor, fixed: bool = False) -> Tensor:
        """Hidden states [K, D] of one block behind the cached context, which it leaves as it is.

        A cache of `fixed` capacity holds the context up to the block's first position; what lies behind it is not seen.
        """
        K = len(positions_K)
        end = positions_K[:1] if fixed else positions_K.new_full((1,), len(cache[0][0]))
        mask_spec = MaskSpec(len(cache[0][0]), 1, K, self.spec.sliding_causal)
        masks: dict[str, Mask] = {FULL: None, SLIDING: None}
        for kind in {*self.spec.layer_types} if fixed else {*self.spec.layer_types} - {FULL}:
            masks[kind] = dense_mask(mask_spec, end, end * 0, end >= 0, self.spec.window if kind == SLIDING else None)
        return self._blocks(block_embeddings_KD, positions_K, cache, masks, Slots(1, K))

    def _rope(self, positions_N: Tensor) -> Tensor:
        return rotations(positions_N.float()[:, None] * self.frequencies, self.table_factor)

    def _contexts(self, features_NF: Tensor, positions_N: Tensor) -> list[KeysValues]:
        context_ND = self.hidden_norm(self.fc(features_NF.to(self.fc.weight.dtype)))
        rope = self._rope(positions_N)
        return [layer.self_attn.context(context_ND, rope) for layer in self.layers]

    def _blocks(
        self,
        x: Tensor,
        positions_N: Tensor,
        contexts: Sequence[KeysValues],
        masks: Mapping[str, Mask],
        slots: Slots,
        distinct: bool = False,
        predicted: bool = False,
    ) -> Tensor:
        """Hidden states behind the last norm, from the `distinct` rows alone if so, of the `predicted` slots alone if so."""
        x, rope, last = x.to(self.fc.weight.dtype), self._rope(positions_N), len(self.layers) - 1
        for i, (layer, kind, context) in enumerate(zip(self.layers, self.spec.layer_types, contexts, strict=True)):
            inputs = x, rope, context, masks[kind], slots, distinct and i == 0, predicted and i == last
            x = checkpoint(layer, *inputs, use_reentrant=False) if self.checkpointing and self.training else layer(*inputs)
        return self.norm(x)
