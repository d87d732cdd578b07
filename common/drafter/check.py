"""Looks at an exported drafter with the eyes of the engines that would load it; what they do in silence stands in engines.md."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.drafter.mask_token import mask_objection
from common.drafter.rope import rope_kind
from common.drafter.spec import FULL, SLIDING, DrafterSpec
from common.errors import UserError
from common.target.files import TargetSpec, read_json

ENGINES_PAGE = Path(__file__).with_name("engines.md")


@dataclass
class Report:
    """What `check` found: errors that keep a drafter from being served, and per engine what it refuses or ignores without a word."""

    errors: list[str]
    notes: dict[str, list[str]]

    def lines(self) -> list[str]:
        """The report for a person, the verdict last."""
        engines = [f"{engine}: {note}" for engine, notes in self.notes.items() for note in notes]
        return [*(f"error: {error}" for error in self.errors), *engines, "not loader-ready" if self.errors else "loader-ready"]


def config_errors(config: Mapping[str, Any], spec: DrafterSpec, target: TargetSpec, architecture: str) -> list[str]:
    """What in an exported config.json keeps the drafter from being served with this target, in words."""
    inner, errors = config.get("dflash_config") or {}, []
    try:
        spec.validate(target)
    except UserError as error:
        errors.append(str(error))
    if (reason := mask_objection(spec.mask_token_id, target)) is not None:
        errors.append(f"dflash_config.mask_token_id={spec.mask_token_id} {reason}")
    if config.get("block_size", spec.block_size) != inner.get("block_size", spec.block_size):
        errors.append(
            f"block_size is {config['block_size']} at top level and {inner['block_size']} in dflash_config: engines read one or the other"
        )
    if config.get("model_type") != "qwen3":
        errors.append(f"model_type={config.get('model_type')!r} must be 'qwen3': transformers chooses the config's class by it")
    if architecture not in architectures(config):
        errors.append(f"architectures={config.get('architectures')} must be [{architecture!r}]: vLLM and SGLang choose the class by it")
    if config.get("hidden_act", "silu") != "silu":
        errors.append(f"hidden_act={config['hidden_act']}: the drafter's MLP is a SwiGLU; SGLang refuses anything but silu")
    parameters = config.get("rope_parameters") or {}
    thetas = [r["rope_theta"] for r in (config, parameters) if "rope_theta" in r]
    if thetas[0] != thetas[-1] or (
        parameters and rope_kind(parameters) != rope_kind(config.get("rope_scaling")) and "rope_theta" in config
    ):
        errors.append("rope_theta and rope_scaling do not say what rope_parameters says: transformers 4 and 5 would rotate differently")
    return errors


def architectures(config: Mapping[str, Any]) -> list[Any]:
    """The classes that a config.json names, whatever else stands there."""
    named = config.get("architectures")
    return named if isinstance(named, list) else []


def shape_errors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps the tensors that were found from being those of the exported form, as {key: shape}, in words."""
    missing = [f"{key} is missing" for key in expected if key not in found]
    unknown = [f"{key} is unknown" for key in found if key not in expected]
    shared = [key for key in expected if key in found]
    return missing + unknown + [f"{k} is {found[k]}, not {expected[k]}" for k in shared if tuple(found[k]) != tuple(expected[k])]


def engine_notes(config: Mapping[str, Any], spec: DrafterSpec, target: TargetSpec) -> dict[str, list[str]]:
    """The rows of engines.md that apply to a drafter which is otherwise in order, by engine."""
    inner, dtype = config.get("dflash_config") or {}, config.get("dtype", config.get("torch_dtype"))
    feature_dtype, candidates = inner.get("feature_dtype", "bfloat16"), inner.get("selector_top_k", config.get("selector_top_k", 0))
    holds = {
        "always": True,
        "no block size": "block_size" not in config and "block_size" not in inner,
        "no rope_parameters": "rope_parameters" not in config,
        "rope inside dflash_config": any("rope" in key for key in inner),
        "full and sliding layers": SLIDING in spec.layer_types and FULL in spec.layer_types,
        "no is_causal": "is_causal" not in config,
        "only dflash_config.causal": "is_causal" not in config and "causal" in inner and SLIDING in spec.layer_types,
        "speculators format": "speculators_model_type" in config,
        "selector": candidates > 0,
        "lattice": "lilicorr_candidate_topk" in inner,
        "Markov head": "markov_rank" in config,
        "narrow for its candidates": spec.hidden_size < candidates * (candidates + 1),
        "last layer tapped": target.layers - 1 in spec.taps,
        "scaled embedding": spec.embedding_scale != 1.0,
        "not bfloat16": dtype != "bfloat16",
        "features not bfloat16": feature_dtype != "bfloat16",
    }
    values = {"drafts": spec.proposals, "last_layer": target.layers - 1, "dtype": dtype, "feature_dtype": feature_dtype}
    values |= {"candidates": candidates, "hidden": spec.hidden_size}
    notes = tap_notes(target)
    for engine, when, what in _rows():
        if holds.get(when):
            notes.setdefault(engine, []).append(what.format(**values))
    return notes


def tap_notes(target: TargetSpec) -> dict[str, list[str]]:
    """Whether each engine whose list was read can tap this target at all, and in which version it was read."""
    architectures = read_json(target.folder / "config.json").get("architectures") or []
    notes = {}
    for engine, version, listed in _rows():
        if version.startswith("version "):
            can = "can tap" if set(architectures) & set(listed.split()) else "has no class that can tap"
            notes[engine] = [f"{version} {can} this target ({', '.join(architectures) or 'its config.json names no architectures'})"]
    return notes


def _rows() -> Iterator[tuple[str, str, str]]:
    """The rows of the page's tables of three columns."""
    for line in ENGINES_PAGE.read_text().splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if len(parts) == 3:
            yield parts[0], parts[1], parts[2]
