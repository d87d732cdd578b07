"""A target that verifies: rows of proposed tokens run behind a cache that forgets what was rejected.

Legend: B texts of a batch, R rows of a verification, S cached positions, F features of a position, V vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from common.decoding.rollback import CROPPED, Rollback
from common.errors import UserError
from common.target.adapters import decoder_layers, decoder_of, first_line
from common.target.files import TargetSpec
from common.target.spread import load_spread
from common.target.vocabulary import FirstLayer, Vocabulary, check_vocabulary, vocabulary_of

TRIAL_TOKENS, TRIAL_TOLERANCE = 12, {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}


class DecodingTarget:
    """A transformers causal LM that verifies rows and gives out the features of its tapped layers.

    Raises: UserError for families whose cache cannot be rolled back, and for taps out of range.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int]):
        self.model, self.device, self.windows = model, model.device, cache_windows(model)
        # named `cache` since transformers 5.2x
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        layers = decoder_layers(decoder_of(model))
        if not all(0 <= tap < len(layers) for tap in taps):
            raise UserError(
                f"the drafter taps layers {list(taps)} but this target has layers 0 to {len(layers) - 1}: it belongs to another target"
            )
        self.features: dict[int, Tensor] = {}
        for i, tap in enumerate(taps):
            layers[tap].register_forward_hook(lambda _, __, output, i=i: self._take(i, output))
        self._rollback: Rollback | None = None
        self._one_by_one = False
        if not self.windows:
            self._rollback = Rollback(model.config.get_text_config(decoder=True))
            self._try_rollback()

    def vocabulary(self, spec: TargetSpec) -> Vocabulary:
        """The model's own embedding and head, as drafters share them. Raises: UserError if the model does more to them."""
        vocabulary = vocabulary_of(spec, self.model)
        check_vocabulary(spec, FirstLayer.of(spec, self.model), vocabulary)
        return vocabulary

    def _take(self, i: int, output: Any) -> None:
        self.features[i] = output[0] if isinstance(output, tuple) else output

    def forward(
        self, tokens: Sequence[int], start: int, cache: DynamicCache, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run rows that follow `start` cached positions; `parents` makes them a tree.

        Shapes: logits [R, V] ([1, V] if last_only), features [R, F].
        Raises: UserError for a tree where layers carry a state along the rows.
        """
        if self._rollback is not None:
            if parents is not None:
                raise UserError("this target's layers carry a state from token to token, so it verifies no trees: decode with --mode chain")
            if again := self._rollback.before(cache, start, tokens):
                self._run(again, start - len(again), cache, None, last_only=True)
            if start:
                self._rollback.keep(cache, start, tokens)
        return self._run(tokens, start, cache, parents, last_only)

    def _run(
        self, tokens: Sequence[int], start: int, cache: DynamicCache, parents: Sequence[int] | None, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        if self._one_by_one and start and len(tokens) > 1:
            parts = [self._run([token], start + i, cache, None, last_only) for i, token in enumerate(tokens)]
            logits, features = (torch.cat(part) for part in zip(*parts, strict=True))
            return logits[-1:] if last_only else logits, features
        depths = range(len(tokens)) if parents is None else tree_depths(parents)
        return self.run(
            torch.tensor(tokens, device=self.device),
            torch.tensor([start + depth for depth in depths], device=self.device),
            None if parents is None else {kind: tree_mask(parents, start, window).to(self.device) for kind, window in self.windows.items()},
            cache,
            last_only,
        )

    def run(
        self, ids_R: Tensor, positions_R: Tensor, visible: Mapping[str, Tensor] | None, cache: Cache, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run rows behind a cache; `visible`, bool [R, S + R] by layer type, says who sees whom, None that all see what is before them.

        Shapes: logits [R, V] ([1, V] if last_only), features [R, F].
        """
        output = self.model(
            input_ids=ids_R if ids_R.dim() == 2 else ids_R[None],
            position_ids=positions_R[None],
            attention_mask=None if visible is None else self._additive(visible),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.cache_argument: cache},
        )
        return output.logits[0, -1:] if last_only else output.logits[0], self._taken()[0]

    @torch.no_grad()
    def _try_rollback(self) -> None:
        """Find out on a few tokens whether rejected rows can be taken back, and whether several rows may follow cached ones at once.

        Raises: UserError where neither gives what the text by itself gives.
        """
        text = [7919 * i % self.model.config.get_text_config(decoder=True).vocab_size for i in range(TRIAL_TOKENS)]
        known, accepted = TRIAL_TOKENS // 3, TRIAL_TOKENS // 2
        why = "it gives other logits after a rejection"
        for self._one_by_one in (False, True):
            try:
                whole = self._run(text, 0, self._fresh(), None, last_only=False)[0][accepted:].float()
                cache = new_cache()
                self.forward(text[:known], 0, cache)
                self.forward([*text[known:accepted], *text[:2]], known, cache)
                keep_rows(cache, known, range(accepted - known))
                found = self.forward(text[accepted:], accepted, cache)[0].float()
            except Exception as error:  # the code of any family runs here
                why = first_line(error)
                continue
            if float((found - whole).norm() / whole.norm()) <= TRIAL_TOLERANCE[self.model.dtype]:
                return
        family = self.model.config.get_text_config(decoder=True).model_type
        raise UserError(f"target family {family}: its cache cannot drop rejected drafts ({why}); it can be trained for, not decoded here")

    def _fresh(self) -> DynamicCache:
        """A cache with the family's layers."""
        cache = new_cache()
        assert self._rollback is not None, "only targets with states roll back"
        self._rollback.before(cache, 0, [])
        return cache

    @torch.no_grad()
    def capture(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The features of whole texts, in one forward without a cache: shorter ones are padded behind their end, where no token looks.

        Shapes: [N, F] for a text of N tokens.
        """
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        self.model(input_ids=ids.to(self.device), use_cache=False, logits_to_keep=1)
        return [features[: len(text)] for features, text in zip(self._taken(), texts, strict=True)]

    def _taken(self) -> Tensor:
        """What the taps gave in the last forward, in their order: [B, R, F]."""
        return torch.cat([self.features[i].to(self.device) for i in sorted(self.features)], dim=-1)

    def _additive(self, visible: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Additive masks [1, 1, R, S + R] by layer type; families with one type take the mask itself."""
        masks: dict[str, Tensor] = {}
        for kind, seen in visible.items():
            nothing = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
            masks[kind] = nothing.masked_fill_(~seen, torch.finfo(self.model.dtype).min)[None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def load_target(spec: TargetSpec, taps: Sequence[int], dtype: torch.dtype, device: torch.device, stages: int = 1) -> DecodingTarget:
    """A target's causal LM, ready to verify, on so many devices. Raises: UserError if it does not load or cannot verify."""
    return DecodingTarget(load_spread(spec, dtype, device, stages, "--target"), taps)


def cache_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The window of each layer type of a model (None: full attention), where all that its cache holds is a key and a value a position.

    Empty for others: states that run along, chunks, compressed keys.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        kinds = {type(layer): layer for layer in DynamicCache(config=config).layers}
    except Exception:  # the family brings a cache of its own
        kinds = {}
    positions_only = set(kinds) <= {DynamicLayer, DynamicSlidingWindowLayer} and not getattr(model, "_is_stateful", False)
    if not positions_only or getattr(config, "attention_chunk_size", None):
        return {}
    return {
        "sliding_attention" if issubclass(kind, DynamicSlidingWindowLayer) else "full_attention": getattr(layer, "sliding_window", None)
        for kind, layer in kinds.items()
    }


def new_cache() -> DynamicCache:
    """A cache that keeps every position, of sliding layers too: their window lies in the mask, so any rejected row can be dropped."""
    return DynamicCache()


def keep_rows(cache: DynamicCache, start: int, rows: Sequence[int]) -> None:
    """Of the rows verified after `start`, keep `rows` (ascending, row 0 first) and drop the others."""
    end = start + len(rows)
    for layer in cache.layers:
        for name in CROPPED:
            if (states := getattr(layer, name, None)) is None:
                continue
            if rows[-1] != len(rows) - 1:
                states[..., start:end, :] = states[..., [start + row for row in rows], :]
            setattr(layer, name, states[..., :end, :])


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of every row below the root: [R]."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def tree_mask(parents: Sequence[int], start: int, window: int | None = None) -> Tensor:
    """Who sees whom: a row sees all cached positions, its ancestors and itself, and of these only the last `window` positions.

    Shapes: bool [R, S + R].
    """
    ancestors_RR = np.eye(len(parents) + 1, dtype=bool)
    for row, parent in enumerate(parents, 1):
        ancestors_RR[row] |= ancestors_RR[parent]
    visible = torch.cat([torch.ones(len(parents) + 1, start, dtype=torch.bool), torch.from_numpy(ancestors_RR)], dim=1)
    if window is not None:
        positions_R = start + torch.tensor(tree_depths(parents))
        visible &= positions_R[:, None] - torch.cat([torch.arange(start), positions_R]) < window
    return visible
