"""The drafter: a few transformer layers that propose a whole block of tokens from the target's hidden states.

Training and decoding run the same layers: `forward` on all blocks of a packet, `extend` and `draft` on one block behind a cache of
context keys. Source: DFlash (arXiv 2602.06036).

Legend: T context tokens, A anchors, K block slots, U = A + 1 distinct inputs of a packet's blocks (the anchors' tokens and the mask token),
D hidden, M taps, F = M*D, H heads, G key/value heads, d head dimension, L layers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.drafter import attention
from common.drafter.rope import inverse_frequencies, rotate, rotations
from common.drafter.spec import FULL, SLIDING


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, rounded to the input's type before the weight, as the engines do."""

    def __init__(self, size, eps, **kind):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size, **kind)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    """Queries from the block, keys and values from context and block through the same weights; q, k and v in one matrix."""

    def __init__(self, spec, **kind):
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = spec.head_dim, spec.heads, spec.kv_heads
        self.qkv_proj = nn.Linear(spec.hidden_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.attention_bias, **kind)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, spec.attention_bias, **kind)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **kind)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **kind)

    def context(self, context_TD, rope):
        """Keys (normed and rotated) and values of the context: 2 x [T, G, d]."""
        first = self.heads * self.head_dim
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[first:]
        pair = F.linear(context_TD, self.qkv_proj.weight[first:], bias).unflatten(-1, (2 * self.kv_heads, self.head_dim))
        key, value = pair.split(self.kv_heads, dim=1)
        return rotate(self.k_norm(key), rope), value

    def forward(self, x_ND, rope, context, mask, expand, select):
        qkv = self.qkv_proj(x_ND).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(expand(self.q_norm(query)), rope), rotate(expand(self.k_norm(key)), rope)
        return self.o_proj(select(attention.attend(query, context, (key, expand(value)), mask).flatten(1)))


@torch.library.custom_op("drafter::swiglu_backward", mutates_args=())
def swiglu_backward(act_gradient_NI: torch.Tensor, gate_up_N2I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of gate and up [N, 2I], and the activation silu(gate) * up [N, I] that the forward pass did not keep."""
    if gate_up_N2I.is_cuda and gate_up_N2I.dtype != torch.float64:
        from common.drafter import swiglu_kernel  # Triton comes with torch for CUDA only

        return swiglu_kernel.swiglu_backward(act_gradient_NI, gate_up_N2I)
    gate, up = gate_up_N2I.chunk(2, dim=-1)
    sigmoid, silu = gate.sigmoid(), F.silu(gate)
    gate_gradient = act_gradient_NI * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((gate_gradient, act_gradient_NI * silu), dim=-1), silu * up


@swiglu_backward.register_fake
def _(act_gradient_NI, gate_up_N2I):
    return torch.empty_like(gate_up_N2I), torch.empty_like(act_gradient_NI)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up times the down projection; keeps gate and up alone, and reads them once for all that the backward pass needs."""

    @staticmethod
    def forward(ctx, gate_up_N2I, weight_DI):
        ctx.save_for_backward(gate_up_N2I, weight_DI)
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight_DI)

    @staticmethod
    def backward(ctx, gradient_ND):
        gate_up_N2I, weight_DI = ctx.saved_tensors
        gate_up_gradient, act_NI = torch.ops.drafter.swiglu_backward(gradient_ND @ weight_DI, gate_up_N2I)
        return gate_up_gradient, gradient_ND.T @ act_NI


class MLP(nn.Module):
    def __init__(self, spec, **kind):
        super().__init__()
        self.gate_up_proj = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False, **kind)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False, **kind)

    def forward(self, x_ND):
        return SwiGLU.apply(self.gate_up_proj(x_ND), self.down_proj.weight)


def every_row(x_ND):
    return x_ND


def add(x_ND, y_ND):
    """Their sum, rounded once. In float32, since inductor would make an addmm of the product before it, which copies x first."""
    return (x_ND.float() + y_ND.float()).to(x_ND.dtype)


class Layer(nn.Module):
    def __init__(self, spec, **kind):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.self_attn = SelfAttention(spec, **kind)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.mlp = MLP(spec, **kind)

    def forward(self, x, rope, context, mask, expand=every_row, select=every_row):
        """The layer's output of the `select` rows; attention alone needs them all. `expand` makes them of the distinct ones that come in.

        Shapes: x [N, D], or [U, D] where `expand` makes N rows of U; rope [N, 2, 2, d/2] -> [select N, D].
        """
        x_ND = add(select(expand(x)), self.self_attn(self.input_layernorm(x), rope, context, mask, expand, select))
        return add(x_ND, self.mlp(self.post_attention_layernorm(x_ND)))


class Drafter(nn.Module):
    """The drafter's layers. Embedding and vocabulary head are the target's and stay outside.

    A context feature enters as keys and values of every layer; a block of embeddings runs through the layers.
    """

    def __init__(self, spec, dtype, device, checkpointing=False):
        super().__init__()
        kind = {"dtype": dtype, "device": device}
        self.spec, self.checkpointing = spec, checkpointing
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False, **kind)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.layers = nn.ModuleList(Layer(spec, **kind) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        frequencies, self.table_factor = inverse_frequencies(spec)
        self.frequencies = frequencies.to(device)  # no buffer: a cast of the module must not round it

    def forward(self, embeddings_UD, positions_AK, features_TF, context_positions_T, packet_mask):
        """Hidden states of the predicted slots (all but the first) of a packet's blocks, ready for the head: [A, K - 1, D].

        embeddings_UD are those of the anchors' tokens and, last, of the mask token, which all other slots hold: the first layer projects
        it once. `packet_mask` is the packet's attention.PacketMask; positions count in each token's own document.
        """
        A, K = positions_AK.shape
        mask_spec = attention.MaskSpec(features_TF.shape[0], A, K)
        windows = {t: self.spec.window if t == SLIDING else None for t in dict.fromkeys(self.spec.layer_types)}
        masks = {t: attention.mask_of(mask_spec, packet_mask, window) for t, window in windows.items()}
        contexts = self._contexts(features_TF, context_positions_T)

        def expand(x_U):  # every slot of every block, the first with its anchor's row, the others with the mask token's
            first_K = (torch.arange(K, device=x_U.device) == 0).unflatten(0, (K, *[1] * (x_U.dim() - 1)))
            return torch.where(first_K, x_U[:A, None], x_U[A:, None]).flatten(0, 1)

        def predicted(x_ND):
            return x_ND.unflatten(0, (A, K))[:, 1:].flatten(0, 1)

        hidden = self._blocks(embeddings_UD, positions_AK.flatten(), contexts, masks, expand, predicted)
        return hidden.unflatten(0, (A, K - 1))

    def new_cache(self):
        """An empty cache of context keys and values per layer, for `extend` and `draft`."""
        empty = self.fc.weight.new_empty(0, self.spec.kv_heads, self.spec.head_dim)
        return [(empty, empty) for _ in self.layers]

    @torch.no_grad()
    def extend(self, cache, features_NF, positions_N):
        """Add the features of newly accepted tokens, the next positions in order."""
        for i, new in enumerate(self._contexts(features_NF, positions_N)):
            cache[i] = tuple(torch.cat(pair) for pair in zip(cache[i], new, strict=True))

    @torch.no_grad()
    def draft(self, cache, block_embeddings_KD, positions_K):
        """Hidden states [K, D] of one block behind the cached context. The cache stays as it is: a block leaves no trace."""
        n, K = len(cache[0][0]), len(positions_K)
        end = torch.tensor([n], device=positions_K.device)
        mask_spec = attention.MaskSpec(row_tokens=n, anchors=1, block_size=K)
        sliding = attention.dense_mask(mask_spec, end, end * 0, end == n, self.spec.window) if SLIDING in self.spec.layer_types else None
        return self._blocks(block_embeddings_KD, positions_K, cache, {FULL: None, SLIDING: sliding})

    def _rope(self, positions_N):
        return rotations(positions_N.float()[:, None] * self.frequencies, self.table_factor)

    def _contexts(self, features_NF, positions_N):
        context = self.hidden_norm(self.fc(features_NF.to(self.fc.weight.dtype)))
        rope = self._rope(positions_N)
        return [layer.self_attn.context(context, rope) for layer in self.layers]

    def _blocks(self, x, positions_N, contexts, masks, expand=every_row, select=every_row):
        """Hidden states after the norm. The first layer takes what `expand` makes the rows of, the last gives the `select` rows alone."""
        x, rope, last = x.to(self.fc.weight.dtype), self._rope(positions_N), len(self.layers) - 1
        for i, (layer, kind, context) in enumerate(zip(self.layers, self.spec.layer_types, contexts, strict=True)):
            inputs = x, rope, context, masks[kind], expand if i == 0 else every_row, select if i == last else every_row
            x = checkpoint(layer, *inputs, use_reentrant=False) if self.checkpointing and self.training else layer(*inputs)
        return self.norm(x)
