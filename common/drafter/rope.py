"""Rotary position embedding: the frequencies of every supported scaling, and the rotation itself.

Legend: N tokens, H heads, d head dimension.
"""

import math

import torch

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rope_kind(scaling):
    """The name of a rope scaling: transformers 5's `rope_type`, older configs' `type`, `default` without one."""
    return (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))


def inverse_frequencies(spec):
    """Rotary frequencies float32 [d/2] and the factor on cos and sin, for the scalings that a valid spec may name.

    Source: transformers' modeling_rope_utils (default, linear, llama3, yarn).
    """
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / spec.rope_theta**exponent
    scaling = spec.rope_scaling or {}
    kind, factor = rope_kind(scaling), scaling.get("factor", 1.0)
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
