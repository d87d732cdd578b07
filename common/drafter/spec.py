"""What a drafter is: every number of it, in one frozen dataclass, and the rules that tie it to its target."""

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import DrafterConfig
from common.drafter.mask_token import mask_token
from common.drafter.rope import ROPE_KINDS, inherited_scaling, inverse_frequencies, rope_kind
from common.errors import UserError
from common.target.files import TargetSpec

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterSpec:
    """Everything that an exported drafter's config.json says.

    `taps` are target layers, `target_layers` the target's depth, `options` the settings that only its family has (a frozen dataclass).
    `target_layers` is None where an exported drafter does not say. With `sample_from_anchor` a block's first slot, which holds the anchor's
    token, predicts the token after it; without `sliding_causal` the slots of a sliding layer see their whole block, as in full layers.
    `embedding_scale` is by how much the shared embedding is scaled for this drafter.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    window: int | None
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    target_layers: int | None
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    attention_bias: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    family: str = "dflash"
    options: Any = None
    sample_from_anchor: bool = False
    sliding_causal: bool = True
    embedding_scale: float = 1.0

    @property
    def proposals(self) -> int:
        """Predicted slots of a block: all but the anchor's own, or all where it predicts, too."""
        return self.block_size - 1 + self.sample_from_anchor

    @classmethod
    def resolve(cls, config: DrafterConfig, target: TargetSpec, folder: str | Path, used_ids: Iterable[int] = ()) -> "DrafterSpec":
        """The drafter that a `drafter` config section describes for a target whose files lie in `folder`.

        `used_ids` are token ids that occur in the data; the mask token must not be one of them.
        Raises: UserError for taps, mask tokens or dimensions that do not fit the target.
        """
        taps = auto_taps(config.layers, target.layers) if config.taps == "auto" else tuple(config.taps)
        kv_heads = config.kv_heads or (target.kv_heads if config.heads is None else config.heads)
        spec = cls(
            family=config.family,
            options=config.options,
            hidden_size=target.hidden_size,
            intermediate_size=config.intermediate_size or target.intermediate_size,
            layers=config.layers,
            heads=config.heads or target.heads,
            kv_heads=kv_heads,
            head_dim=config.head_dim or target.head_dim,
            layer_types=tuple(config.layer_types or [FULL] * config.layers),
            window=config.window,
            block_size=config.block_size,
            mask_token_id=mask_token(config.mask_token, target, folder, used_ids),
            taps=taps,
            target_layers=target.layers,
            vocab_size=target.vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=None if config.rope == "own" else inherited_scaling(target.rope_scaling, target.max_position_embeddings),
            max_position_embeddings=target.max_position_embeddings,
            attention_bias=False,
            initializer_range=target.initializer_range,
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
            embedding_scale=target.vocabulary.embedding_scale,
        )
        if config.rope == "auto" and rope_kind(target.rope_scaling) not in ROPE_KINDS:
            warnings.warn(
                f"the target's {rope_kind(target.rope_scaling)} rope scaling is not made alike by all engines: the drafter has plain "
                "rotations of its own (drafter.rope=own, to say so)",
                stacklevel=2,
            )
        spec.validate(target)
        return spec

    def validate(self, target: TargetSpec) -> None:
        """Refuse what cannot be trained or served with this target.

        Raises: UserError.
        """
        depth = target.layers if self.target_layers is None else self.target_layers
        if (self.hidden_size, depth, self.vocab_size) != (target.hidden_size, target.layers, target.vocab_size):
            raise UserError(
                f"the drafter was made for another target: (hidden size, layers, vocabulary) = "
                f"{(self.hidden_size, depth, self.vocab_size)}, the target has "
                f"{(target.hidden_size, target.layers, target.vocab_size)}; use the target it was trained with"
            )
        wrong = [t for t in self.taps if not 0 <= t < target.layers]
        if wrong or any(b <= a for a, b in itertools.pairwise(self.taps)) or not self.taps:
            raise UserError(
                f"drafter.taps={list(self.taps)} must be strictly increasing target layers in 0..{target.layers - 1}; write e.g. "
                f"drafter.taps=[{max(0, target.layers // 2 - 1)}] or other layers, fewer for a shallow target"
            )
        if target.layers - 1 in self.taps:
            warnings.warn(f"tap {target.layers - 1} is the target's last layer: some engines cannot serve it", stacklevel=2)
        if len(self.layer_types) != self.layers:
            raise UserError(f"layer_types names {len(self.layer_types)} of the drafter's {self.layers} layers; name all of them")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise UserError(
                f"drafter.heads={self.heads} must be a multiple of drafter.kv_heads={self.kv_heads}, and drafter.head_dim="
                f"{self.head_dim} even"
            )
        if SLIDING in self.layer_types and (self.window or 0) < self.block_size:
            raise UserError(f"drafter.window={self.window} is shorter than a block of {self.block_size}; use at least {self.block_size}")
        self._check_rope()

    def _check_rope(self) -> None:
        """Refuse rotations that cannot be computed. Raises: UserError."""
        if rope_kind(self.rope_scaling) not in ROPE_KINDS:
            raise UserError(
                f"this drafter was trained with {rope_kind(self.rope_scaling)!r:.100} rope scaling, of which engines make different "
                f"tables; known: {', '.join(ROPE_KINDS)}; train one with drafter.rope=own"
            )
        try:
            inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise UserError(
                f"rope scaling {str(self.rope_scaling)[:200]} cannot be computed ({type(error).__name__}: {error}); mend the target's "
                "config.json or the drafter's, or write drafter.rope=own"
            ) from None


def auto_taps(taps: int, layers: int) -> tuple[int, ...]:
    """The layers that DFlash taps: `taps` of them, evenly over a target's depth.

    Raises: UserError for targets too shallow for that many.
    """
    tapped = (layers // 2,) if taps == 1 else tuple(round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps))
    if any(b <= a for a, b in itertools.pairwise(tapped)):
        raise UserError(f"drafter.taps=auto: {layers} target layers are too few for {taps} taps; name them, e.g. drafter.taps=[0,1]")
    return tapped
