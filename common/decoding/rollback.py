"""Takes rejected rows back from layers that carry a state from token to token: the state before a verification is kept, and the rows
that were accepted run once more behind it.

Legend: R rows of a verification, S cached positions.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

CROPPED = ("keys", "values")
"""What a layer keeps a position each of, so that rows can be cut off; everything else that it holds is its state."""


def family_layers(config: PreTrainedConfig) -> list[Any]:
    """Empty cache layers as a family's config asks for, but none forgets what falls out of its window: the mask hides that."""

    def whole(layer: Any) -> Any:
        if not isinstance(layer, DynamicSlidingWindowLayer):
            return layer
        if isinstance(layer, LinearAttentionLayer):
            return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        return DynamicLayer()

    return [whole(layer) for layer in DynamicCache(config=config).layers]


class Rollback:
    """Rolls the states of one cache at a time back; the first forward of a text begins with `start` 0."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        self._begin, self._rows, self._states = 0, list[int](), list[dict[str, Any]]()

    def before(self, cache: DynamicCache, start: int, rows: Sequence[int]) -> list[int]:
        """Ready the cache for rows that follow `start` positions; returns rows that must run before, to get there."""
        if start == 0:
            if not cache.layers:
                cache.layers, cache.layer_class_to_replicate = family_layers(self.config), None
            self._begin, self._rows = 0, list(rows)
            return []
        again = self._rows[: start - self._begin] if start < self._begin + len(self._rows) else []
        if again:
            _cut(cache, self._begin)
            for layer, state in zip(cache.layers, self._states, strict=True):
                vars(layer).update(state)
        return again

    def keep(self, cache: DynamicCache, start: int, rows: Sequence[int]) -> None:
        """Keep the states that `rows` are about to change."""
        self._begin, self._rows = start, list(rows)
        self._states = [
            {name: tree_map_only(Tensor, Tensor.clone, value) for name, value in vars(layer).items() if name not in CROPPED}
            for layer in cache.layers
        ]


def _cut(cache: DynamicCache, end: int) -> None:
    for layer in cache.layers:
        for name in CROPPED:
            if (held := getattr(layer, name, None)) is not None:
                setattr(layer, name, held[..., :end, :])
