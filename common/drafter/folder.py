"""An exported drafter's config.json, in z-lab's form whichever trainer wrote it: the speculators format is translated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.target.files import read_json

KINDS = {"dflash": ("DFlashDraftModel", False), "dflash2": ("DFlash2DraftModel", False), "dspark": ("Qwen3DSparkModel", True)}
"""Kinds of drafters in the speculators format: the class that z-lab's form names, and whether the anchor's own slot predicts."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of an exported drafter. Raises: UserError if there is none, or one of the speculators format that is not known."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    return _from_speculators(path, config) if "speculators_model_type" in config else config


def _from_speculators(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter in z-lab's form. Layers are counted from the embedding there, so that a layer's output has the next number.

    Source: vLLM 0.32 transformers_utils/configs/speculators/algos.py.
    """
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    ids, causal = config.get("aux_hidden_state_layer_ids"), not config.get("sliding_window_non_causal", True)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{path}: speculators_model_type={kind!r} is not known; known: {', '.join(KINDS)}")
    architecture, from_anchor = KINDS[kind]
    if not isinstance(layer, dict) or not isinstance(ids, list) or not all(isinstance(i, int) and i > 0 for i in ids):
        raise UserError(f"{path} lacks transformer_layer_config or aux_hidden_state_layer_ids (whole numbers from 1): it is incomplete")
    if bool(config.get("sample_from_anchor")) != from_anchor:
        raise UserError(f"{path}: sample_from_anchor must be {str(from_anchor).lower()}: drafters of {kind} are not otherwise supported")
    inner = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": [i - 1 for i in ids], "causal": causal}
    form = {"architectures": [architecture], "model_type": "qwen3", "dflash_config": inner}
    return layer | {name: value for name, value in config.items() if value is not None} | form
