"""Rotary position embedding: the frequencies of every supported scaling, and the rotation itself.

Legend: N tokens, H heads, d head dimension.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """The name of a rope scaling: transformers 5's `rope_type`, older configs' `type`, `default` without one."""
    return (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Rotary frequencies float32 [d/2] and the factor on cosine and sine, for the kinds of ROPE_KINDS.

    `max_position_embeddings` is the trained length where the scaling does not name one.
    Source: transformers' modeling_rope_utils.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / theta**exponent
    scaling = scaling or {}
    kind, factor = rope_kind(scaling), scaling.get("factor", 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((trained * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - share) * plain / factor + share * plain, 1.0

    def dimension(rotations: float) -> float:  # which dimension rotates this often over the trained length
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    on_tables = scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return plain / factor * ramp + plain * (1 - ramp), on_tables


@torch.library.custom_op("drafter::rotations", mutates_args=())
def rotations(angles_Nd: Tensor, factor: float) -> Tensor:
    """Rotations by these angles, times a factor: 2 x 2 matrices [N, 2, 2, d/2]. An operator, so that no kernel computes them anew.

    Shapes: angles_Nd float32 [N, d/2].
    """
    cos, sin = angles_Nd.cos() * factor, angles_Nd.sin() * factor
    return torch.stack((cos, -sin, sin, cos), dim=1).unflatten(1, (2, 2))


@rotations.register_fake
def _(angles_Nd: Tensor, factor: float) -> Tensor:
    return angles_Nd.new_empty(len(angles_Nd), 2, 2, angles_Nd.shape[1])


def rotate(x_NHd: Tensor, rope_N22d: Tensor) -> Tensor:
    """Rotary embedding (half-split convention) in float32: pairs times matrices, since compilers do not recompute a concatenation.

    Shapes: x_NHd [N, H, d], rope_N22d as `rotations` gives it -> [N, H, d] in x's type.
    """
    pairs = x_NHd.float().unflatten(-1, (1, 2, -1))
    return (pairs * rope_N22d[:, None]).sum(-2).flatten(-2).to(x_NHd.dtype)
