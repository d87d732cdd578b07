"""A target that verifies: rows of proposed tokens run behind a cache that forgets what was rejected.

Legend: R rows of a verification, S cached positions, F features of a position, V vocabulary.
"""

import inspect

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from common.errors import UserError
from common.target.vocabulary import Vocabulary


class DecodingTarget:
    """A transformers causal LM that verifies rows and gives out the features of its tapped layers.

    Raises: UserError for families whose cache cannot be rolled back, and for taps out of range.
    """

    def __init__(self, model, taps):
        self.model, self.device, self.windows = model, model.device, cache_windows(model)
        # named `cache` since transformers 5.2x
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        layers = model.get_decoder().layers
        if not all(0 <= tap < len(layers) for tap in taps):
            raise UserError(
                f"the drafter taps layers {list(taps)} but this target has layers 0 to {len(layers) - 1}: it belongs to another target"
            )
        self.features = [None] * len(taps)
        for i, tap in enumerate(taps):
            layers[tap].register_forward_hook(lambda _, __, output, i=i: self._take(i, output))

    def vocabulary(self, spec):
        """The model's own embedding and head, scaled and capped as its TargetSpec says."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return Vocabulary.of(spec, embedding.weight, head.weight)

    def _take(self, i, output):
        self.features[i] = (output[0] if isinstance(output, tuple) else output)[0]

    def forward(self, tokens, start, cache, parents=None, last_only=False):
        """Run rows that follow `start` cached positions; `parents` makes them a tree.

        Shapes: logits [R, V] ([1, V] if last_only), features [R, F].
        """
        depths = range(len(tokens)) if parents is None else tree_depths(parents)
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([[start + depth for depth in depths]], device=self.device),
            attention_mask=None if parents is None else self._tree_masks(parents, start),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.cache_argument: cache},
        )
        return output.logits[0, -1:] if last_only else output.logits[0], torch.cat(self.features, dim=-1)

    def _tree_masks(self, parents, start):
        """Additive masks [1, 1, R, S + R] by layer type; families with one type take the mask itself."""
        masks, kind = {}, {"dtype": self.model.dtype, "device": self.device}
        for layer_type, window in self.windows.items():
            hidden = ~tree_mask(parents, start, window).to(self.device)[None, None]
            masks[layer_type] = torch.zeros(hidden.shape, **kind).masked_fill_(hidden, torch.finfo(self.model.dtype).min)
        return masks if len(masks) > 1 else masks.popitem()[1]


def load_target(folder, taps, dtype, device):
    """A folder's causal LM, ready to verify. Raises: UserError if it does not load or cannot verify."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--target {folder} does not load as a causal language model: {str(error).strip().splitlines()[0]}") from None
    return DecodingTarget(model.to(device).eval().requires_grad_(False), taps)


def cache_windows(model):
    """The window of each layer type of a model (None: full attention).

    Raises: UserError for recurrent, chunked, compressed or shared caches: a rejected draft could not be taken back.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or []
    try:
        kinds = {type(layer): layer for layer in DynamicCache(config=config).layers}
    except Exception:  # the family brings a cache of its own
        kinds = {}
    rolls_back = set(kinds) <= {DynamicLayer, DynamicSlidingWindowLayer} and not getattr(model, "_is_stateful", False)
    if not kinds or not rolls_back or getattr(config, "attention_chunk_size", None):
        raise UserError(
            f"target family {config.model_type}: its cache ({', '.join(sorted(set(layer_types))) or 'no attention layers'}) cannot drop "
            "rejected drafts; use a target of full or sliding-window attention layers"
        )
    return {
        "sliding_attention" if issubclass(kind, DynamicSlidingWindowLayer) else "full_attention": getattr(layer, "sliding_window", None)
        for kind, layer in kinds.items()
    }


def new_cache():
    """A cache that keeps every position, of sliding layers too: their window lies in the mask, so any rejected row can be dropped."""
    return DynamicCache()


def keep_rows(cache, start, rows):
    """Of the rows verified after `start`, keep `rows` (ascending, row 0 first) and drop the others."""
    end = start + len(rows)
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            if rows[-1] != len(rows) - 1:
                states[..., start:end, :] = states[..., [start + row for row in rows], :]
            setattr(layer, name, states[..., :end, :])


def tree_depths(parents):
    """Depth of every row below the root: [R]."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def tree_mask(parents, start, window=None):
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
