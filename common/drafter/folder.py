"""An exported drafter's config.json, in z-lab's form whichever trainer wrote it: the speculators format is translated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.target.files import read_json, with_defaults

KINDS = {"dflash": ("DFlashDraftModel", False), "dflash2": ("DFlash2DraftModel", False), "dspark": ("Qwen3DSparkModel", True)}
"""Kinds of drafters in the speculators format: the class that z-lab's form names, and whether the anchor's own slot predicts."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of an exported drafter. Raises: UserError if there is none, or one of the speculators format that is not known."""
    path = Path(folder) / "config.json"
    if (other := _not_exported(Path(folder))) is not None:
        raise UserError(f"{folder} is {other}")
    config = read_json(path)
    if not isinstance(config.get("dflash_config", {}), dict):
        raise UserError(f"{path}: dflash_config={str(config['dflash_config'])[:100]} must be a JSON object")
    if "speculators_model_type" in config:
        return _from_speculators(path, config)
    if (other := _other_kind(config)) is not None:
        raise UserError(f"{folder} is {other}: only block drafters of this suite's families are read")
    return config


def _not_exported(folder: Path) -> str | None:
    """What a folder is that holds a drafter in another form than an exported one, and what to do; None for all others."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "config.json" not in names:
        if "state.json" in names:
            return f"a checkpoint of this suite; give its drafter, {folder.parent.parent}/export/{folder.name}"
        if "adapter_config.json" in names:
            return "a LoRA adapter; merge it into a drafter and give that"
        if any(name.endswith(".distcp") for name in names):
            return "a sharded checkpoint of torch.distributed; gather it into safetensors beside the drafter's config.json"
        if any(name.endswith(".gguf") for name in names):
            return "a GGUF file's; give the drafter that it was converted from"
    elif not any(name.endswith(".safetensors") for name in names) and (
        pickled := [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    ):
        return f"a drafter whose weights are pickled ({sorted(pickled)[0]}), which is never read; save them as safetensors"
    return None


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """What a config describes that is no block drafter, None where it may be one."""
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    if {"dflash_config", "block_size", "target_layer_ids"} & set(config):
        return None
    for mark, what in OTHERS.items():
        if any(mark in name.lower() for name in (*architectures, str(config.get("model_type")))):
            return f"{what} ({', '.join(architectures) or config.get('model_type')})"
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        return f"a whole language model ({', '.join(architectures)}), such as a target is"
    return None


OTHERS = {"eagle": "an EAGLE drafter, which drafts one token after another", "medusa": "a set of Medusa heads", "mtp": "an MTP head"}
"""Other kinds of drafters, by a word in the name of their class."""


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
    layer = with_defaults(layer.get("model_type", "qwen3"), layer)  # what is its class's default was not saved
    return layer | {name: value for name, value in config.items() if value is not None} | form
