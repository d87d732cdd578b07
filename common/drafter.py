"""The drafter: a few transformer layers that propose a whole block of tokens from the target's hidden states.

Training and decoding run the same layers: `forward` on all blocks of a packet, `extend` and `draft` on one block behind a cache of
context keys. Source: DFlash (arXiv 2602.06036).

Legend: T context tokens, A anchors, K block slots, U = A + 1 unlike inputs of a packet's blocks (the anchors' tokens and the mask token),
D hidden, M taps, F = M*D, H heads, G key/value heads, d head dimension, L layers.
"""

import argparse
import math
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import attention
from common.config import UserError, run_script
from common.drafter_files import FULL, SLIDING, DrafterSpec, check, export, load_exported, split
from common.target_files import Tensors, read_spec, resolve

__all__ = ["Drafter", "DrafterSpec", "check", "export", "load_exported", "make"]


def inverse_frequencies(spec):
    """Rotary frequencies float32 [d/2] and the factor on cos and sin, for the scalings that a valid spec may name.

    Source: transformers' modeling_rope_utils (default, linear, llama3, yarn).
    """
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / spec.rope_theta**exponent
    scaling = spec.rope_scaling or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor", 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    trained = scaling.get("original_max_position_embeddings") or spec.max_position_embeddings
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((trained * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - share) * plain / factor + share * plain, 1.0

    def dimension(rotations):  # the yarn scaling's ramp ends at the dimensions that turn this often over the trained length
        return spec.head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = ((torch.arange(spec.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    on_tables = scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return plain / factor * ramp + plain * (1 - ramp), on_tables


@torch.library.custom_op("drafter::rotations", mutates_args=())
def rotations(angles_Nd: torch.Tensor, factor: float) -> torch.Tensor:
    """Rotations by these angles, times a factor: 2 x 2 matrices [N, 2, 2, d/2]. An operator, so that no kernel computes them anew."""
    cos, sin = angles_Nd.cos() * factor, angles_Nd.sin() * factor
    return torch.stack((cos, -sin, sin, cos), dim=1).unflatten(1, (2, 2))


@rotations.register_fake
def _(angles_Nd, factor):
    return angles_Nd.new_empty(len(angles_Nd), 2, 2, angles_Nd.shape[1])


def rotate(x_NHd, rotations_N22d):
    """Rotary embedding (half-split convention) in float32: pairs times matrices, since compilers do not recompute a concatenation."""
    pairs = x_NHd.float().unflatten(-1, (1, 2, -1))
    return (pairs * rotations_N22d[:, None]).sum(-2).flatten(-2).to(x_NHd.dtype)


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

    def context(self, context_TD, turns):
        """Keys (normed and rotated) and values of the context: 2 x [T, G, d]."""
        first = self.heads * self.head_dim
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[first:]
        pair = F.linear(context_TD, self.qkv_proj.weight[first:], bias).unflatten(-1, (2 * self.kv_heads, self.head_dim))
        key, value = pair.split(self.kv_heads, dim=1)
        return rotate(self.k_norm(key), turns), value

    def forward(self, x_ND, turns, context, mask, spread, wanted):
        qkv = self.qkv_proj(x_ND).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(spread(self.q_norm(query)), turns), rotate(spread(self.k_norm(key)), turns)
        return self.o_proj(wanted(attention.attend(query, context, (key, spread(value)), mask).flatten(1)))


@torch.library.custom_op("drafter::swiglu_backward", mutates_args=())
def swiglu_backward(act_gradient_NI: torch.Tensor, gate_up_N2I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of gate and up [N, 2I], and the activation silu(gate) * up [N, I] that the forward pass did not keep."""
    if gate_up_N2I.is_cuda and gate_up_N2I.dtype != torch.float64:
        from common import swiglu_kernel  # Triton comes with torch for CUDA only

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

    def forward(self, x, turns, context, mask, spread=every_row, wanted=every_row):
        """The layer's output of the `wanted` rows; attention alone needs them all. `spread` makes them of the unlike ones that come in.

        Shapes: x [N, D], or [U, D] where `spread` makes N rows of U; turns [N, 2, 2, d/2] -> [wanted N, D].
        """
        x_ND = add(wanted(spread(x)), self.self_attn(self.input_layernorm(x), turns, context, mask, spread, wanted))
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

    def forward(self, embeddings_UD, positions_AK, features_TF, context_positions_T, plan):
        """Hidden states of the predicted slots (all but the first) of a packet's blocks, ready for the head: [A, K - 1, D].

        embeddings_UD are those of the anchors' tokens and, last, of the mask token, which all other slots hold: the first layer projects
        it once. `plan` is the packet's attention.MaskPlan; positions count in each token's own document.
        """
        A, K = positions_AK.shape
        mask_spec = attention.MaskSpec(features_TF.shape[0], A, K)
        windows = {t: self.spec.window if t == SLIDING else None for t in dict.fromkeys(self.spec.layer_types)}
        masks = {t: attention.mask_of(mask_spec, plan, window) for t, window in windows.items()}
        contexts = self._contexts(features_TF, context_positions_T)

        def spread(x_U):  # every slot of every block, the first with its anchor's row, the others with the mask token's
            first_K = (torch.arange(K, device=x_U.device) == 0).unflatten(0, (K, *[1] * (x_U.dim() - 1)))
            return torch.where(first_K, x_U[:A, None], x_U[A:, None]).flatten(0, 1)

        def predicted(x_ND):
            return x_ND.unflatten(0, (A, K))[:, 1:].flatten(0, 1)

        hidden = self._blocks(embeddings_UD, positions_AK.flatten(), contexts, masks, spread, predicted)
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

    def _rotations(self, positions_N):
        return rotations(positions_N.float()[:, None] * self.frequencies, self.table_factor)

    def _contexts(self, features_NF, positions_N):
        context = self.hidden_norm(self.fc(features_NF.to(self.fc.weight.dtype)))
        turns = self._rotations(positions_N)
        return [layer.self_attn.context(context, turns) for layer in self.layers]

    def _blocks(self, x, positions_N, contexts, masks, spread=every_row, wanted=every_row):
        """Hidden states after the norm. The first layer takes what `spread` makes the rows of, the last gives the `wanted` rows alone."""
        x, turns, last = x.to(self.fc.weight.dtype), self._rotations(positions_N), len(self.layers) - 1
        for i, (layer, kind, context) in enumerate(zip(self.layers, self.spec.layer_types, contexts, strict=True)):
            inputs = x, turns, context, masks[kind], spread if i == 0 else every_row, wanted if i == last else every_row
            x = checkpoint(layer, *inputs, use_reentrant=False) if self.checkpointing and self.training else layer(*inputs)
        return self.norm(x)


def make(config, spec, target_folder, device, seed):
    """A drafter with its first weights, as `config` (the `drafter` section) asks: equal for equal seeds on equal devices.

    Raises: UserError if the weights to start from do not fit.
    """
    drafter = Drafter(spec, getattr(torch, config.dtype), device, config.activation_checkpointing)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, spec.initializer_range, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        for layer in drafter.layers:
            for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
                if linear.bias is not None:
                    linear.bias.zero_()
    if config.init == "target_layers":
        _copy_target_layers(drafter, Tensors(target_folder))
    elif config.init != "random":
        drafter.load_state_dict(load_exported(config.init)[1])
    if config.zero_features:
        torch.nn.init.zeros_(drafter.fc.weight)  # without features it gets no gradient: the drafter that is served sees none either
    return drafter


@torch.no_grad()
def _copy_target_layers(drafter, tensors):
    """Start each layer (and the last norm) from the target's tapped layer, wherever name and shape agree."""
    spec, names = drafter.spec, tensors.names()
    parts = split(spec, drafter.state_dict())  # views: what is copied into them arrives in the drafter
    depth = [spec.taps[min(i, len(spec.taps) - 1)] for i in range(spec.layers)]
    for name, part in parts.items():
        if (layer := re.match(r"layers\.(\d+)\.", name)) is not None:
            name = f"layers.{depth[int(layer[1])]}.{name[layer.end() :]}"
        elif name != "norm.weight":
            continue
        source = next((n for n in names if re.fullmatch(rf"((language_)?model\.)*{re.escape(name)}", n)), None)
        if source is not None and tensors.shape(source) == tuple(part.shape):
            part.copy_(tensors.load(source))


def main(arguments):
    """`python -m common.drafter check DIR --target T`: is this exported drafter ready for the engines?"""
    parser = argparse.ArgumentParser(prog="python -m common.drafter", description=main.__doc__)
    check_parser = parser.add_subparsers(required=True).add_parser("check", help="look at an exported drafter as its loaders would")
    check_parser.add_argument("drafter", help="folder with config.json and model.safetensors")
    check_parser.add_argument("--target", required=True, help="the target's folder or hub id")
    asked = parser.parse_args(arguments)
    report = check(asked.drafter, read_spec(resolve(asked.target)))
    print("\n".join(report.lines()))
    if report.errors:
        raise UserError(f"{asked.drafter}: {len(report.errors)} errors; export it again or mend its config.json")


if __name__ == "__main__":
    run_script(main)
