"""Rotary position embedding: the frequencies of every supported scaling, and the rotation itself.

Legend: N tokens, H heads, d head dimension.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
}
"""The scalings of which all engines make one table, whatever the text's length, and the settings by which each is known."""


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """The name of a rope scaling: transformers 5's `rope_type`, older configs' `type`, `default` without one."""
    return (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))


def inherited_scaling(scaling: Mapping[str, Any] | None, max_position_embeddings: int) -> dict[str, Any] | None:
    """What of a target's rope scaling its drafter takes over, None for the plain rotation: the frequencies of ROPE_KINDS alone.

    A drafter rotates whole heads by one position, so shares of a head and axes stay the target's own, and so does what YaRN's `mscale`
    does to attention.
    """
    kind = rope_kind(scaling)
    if scaling is None or kind == "default" or kind not in ROPE_KINDS:
        return None
    taken: dict[str, Any] = {"rope_type": kind} | {key: scaling[key] for key in ROPE_KINDS[kind] if scaling.get(key) is not None}
    if "original_max_position_embeddings" in ROPE_KINDS[kind]:
        original = taken.setdefault("original_max_position_embeddings", max_position_embeddings)
        if isinstance(original, int) and original > 0:
            taken.setdefault("factor", max_position_embeddings / original)
    return taken


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

    if factor is None:
        factor = max_position_embeddings / trained
    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), scaling.get("attention_factor") or _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """By how much YaRN stretches cosine and sine where its config does not say."""

    def stretched(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, on_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return stretched(mscale) / stretched(on_all) if mscale and on_all else stretched(1.0)


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
