"""The transformer of LiLiCorr: scores of all pairs of neighbouring candidates, from what the drafter says of each.

Legend: A anchors, J predicted slots, D hidden, k candidates of a slot (p: of the slot before), N = J * k candidates of a block, W width,
H heads, E length of a candidate's vectors.
Source: LiLiCorr, arXiv 2608.20530; computed and named as vLLM 0.32 does (models/lilicorr.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.drafter.backbone import RMSNorm
from common.drafter.spec import DrafterSpec

FEATURES = 5
"""What the head says of a candidate: log-probability, probability, distance to the best, rank, whether it is the best."""


class Mlp(nn.Module):
    """Two projections with a SiLU between them."""

    def __init__(self, size: int, inner: int, output: int, **kind: Any):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, inner, **kind), nn.Linear(inner, output, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Every candidate of a block sees all of them; a learnt bias tells how far apart their slots are."""

    def __init__(self, width: int, heads: int, **kind: Any):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width, **kind))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width, **kind))
        self.out_proj = nn.Linear(width, width, **kind)

    def forward(self, x_ANW: Tensor, bias_HNN: Tensor) -> Tensor:
        projected = F.linear(x_ANW, self.in_proj_weight, self.in_proj_bias)
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(query, key, value, attn_mask=bias_HNN[None]).transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """Attention and MLP, each behind its norm and added to what came in."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        width, options = spec.options.lattice_width, spec.options
        self.attn_norm, self.mlp_norm = RMSNorm(width, spec.rms_norm_eps, **kind), RMSNorm(width, spec.rms_norm_eps, **kind)
        self.attn = LatticeAttention(width, options.lattice_heads, **kind)
        self.mlp = Mlp(width, int(width * options.lattice_mlp_ratio), width, **kind)

    def forward(self, x_ANW: Tensor, bias_HNN: Tensor) -> Tensor:
        x_ANW = x_ANW + self.attn(self.attn_norm(x_ANW), bias_HNN)
        return x_ANW + self.mlp(self.mlp_norm(x_ANW))


class LatticeHead(nn.Module):
    """Scores of all pairs of neighbouring candidates."""

    layers: nn.ModuleList

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        options, D, W = spec.options, spec.hidden_size, spec.options.lattice_width
        self.block_size, self.scale, self.eps = spec.block_size, options.lattice_scale, options.lattice_eps
        self.token_proj = nn.Identity() if W == D else nn.Linear(D, W, **kind)
        self.pass_hidden_proj, self.context_proj = nn.Linear(D, W, **kind), nn.Linear(D, W, **kind)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES, **kind), Mlp(FEATURES, W, W, **kind)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, spec.block_size - 1, 1, W, **kind))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, options.lattice_candidates, W, **kind))
        self.relative_slot_bias = nn.Parameter(torch.empty(options.lattice_heads, 2 * spec.block_size - 1, **kind))
        self.same_slot_bias = nn.Parameter(torch.empty(options.lattice_heads, **kind))
        self.layers = nn.ModuleList(LatticeLayer(spec, **kind) for _ in range(options.lattice_layers))
        self.output_norm, self.anchor_norm = RMSNorm(W, spec.rms_norm_eps, **kind), RMSNorm(W, spec.rms_norm_eps, **kind)
        self.factor_input_proj = nn.Linear(3 * W, W, **kind)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(W, options.lattice_vector, **kind) for _ in range(3))

    def forward(self, rows_AJkD: Tensor, logprobs_AJk: Tensor, hidden_AJD: Tensor, context_AD: Tensor, present_A: Tensor) -> Tensor:
        """The scores of a Lattice: [A, J, p, k], float32 or wider.

        Shapes: rows_AJkD [A, J, k, D], the candidates' rows of the target's embedding; logprobs [A, J, k], best first; context_AD [A, D],
        the drafter's state of the token before the anchor; present_A bool [A], whether there is one. J may be less than was trained.
        """
        dtype, (J, k) = self.slot_embedding.dtype, logprobs_AJk.shape[1:]
        x_AJkW = self.token_proj(rows_AJkD.to(dtype)) + self.pass_hidden_proj(hidden_AJD.to(dtype))[:, :, None]
        x_AJkW = x_AJkW + self.feature_mlp(self.feature_norm(_features(logprobs_AJk).to(dtype)))
        x_AJkW = x_AJkW + self.slot_embedding[:, 0, :J] + self.rank_embedding[:, 0]
        anchor_AW = self.anchor_norm(self.context_proj(context_AD.to(dtype)) * present_A[:, None])
        x_ANW, bias_HNN = x_AJkW.flatten(1, 2), self._attention_bias(J, k)
        for layer in self.layers:
            x_ANW = layer(x_ANW, bias_HNN)
        x_AJkW, anchor = self.output_norm(x_ANW).unflatten(1, (J, k)), anchor_AW[:, None, None]
        own, of_anchor, of_both = self.factor_input_proj.weight.chunk(3, dim=1)
        joined = F.linear(x_AJkW, own, self.factor_input_proj.bias) + F.linear(anchor, of_anchor) + F.linear(x_AJkW * anchor, of_both)
        out_AJkE, in_AJkE = (self._unit(head(F.silu(joined))) for head in (self.out_head, self.in_head))
        first_A1pE = self._unit(self.anchor_out_head(anchor_AW))[:, None, None].expand(-1, 1, k, -1)
        scores_AJpk = torch.cat((first_A1pE, out_AJkE[:, :-1]), dim=1) @ in_AJkE.transpose(-1, -2)
        return self.scale * scores_AJpk.to(torch.promote_types(dtype, torch.float32))

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)

    def _attention_bias(self, J: int, k: int) -> Tensor:
        """What attention adds for the distance of two candidates' slots: [H, N, N]."""
        slot_N = torch.arange(J, device=self.same_slot_bias.device).repeat_interleave(k)
        distance_NN = slot_N[:, None] - slot_N
        return self.relative_slot_bias[:, distance_NN + self.block_size - 1] + self.same_slot_bias[:, None, None] * (distance_NN == 0)


def _features(logprobs_AJk: Tensor) -> Tensor:
    """What the head says of each candidate: [A, J, k, FEATURES]."""
    rank_k = torch.arange(logprobs_AJk.shape[-1], device=logprobs_AJk.device, dtype=logprobs_AJk.dtype)
    fraction, is_best = (x.expand_as(logprobs_AJk) for x in (rank_k / max(1, len(rank_k) - 1), (rank_k == 0).to(logprobs_AJk.dtype)))
    return torch.stack((logprobs_AJk, logprobs_AJk.exp(), logprobs_AJk - logprobs_AJk.amax(-1, keepdim=True), fraction, is_best), dim=-1)
