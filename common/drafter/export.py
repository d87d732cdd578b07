"""The exported form that all families share: config.json and model.safetensors, as z-lab's transformers class, vLLM and SGLang load them.

`split` and `fuse` translate between the exported tensors and the drafter's fused projections. Source: DFlash (arXiv 2602.06036).
"""

import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.drafter.folder import read_config
from common.drafter.rope import rope_kind
from common.drafter.spec import FULL, SLIDING, DrafterSpec, auto_taps
from common.errors import UserError
from common.target.files import TargetSpec, Tensors

OWN_VOCABULARY = "{folder} proposes from a vocabulary of its own ({what}): only drafters that use the target's whole head are supported"

TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of the target's that some trainers write beside the drafter's."""

OF_A_LAYER = re.compile(r"(layers\.\d+\.)(.+)(\.weight|\.bias)")
"""A layer of the backbone, the module in it, and which of its tensors."""


ADDED = re.compile(r"layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.(weight|bias)")
"""What a layer adds to the residual stream by."""


OF_WRAPPERS = re.compile(
    r"^(?:(?:module|model|draft_model|drafter|_fsdp_wrapped_module|_orig_mod)\.)+"
    r"|(?<=\.)(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\."
)
"""What FSDP, DDP, torch.compile, checkpointed layers and a trainer's own class put into the names of a drafter's tensors."""


def _fused(spec: DrafterSpec) -> dict[str, dict[str, int]]:
    """{fused projection of a layer: {its part: rows}}."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "self_attn.qkv_proj": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
        "mlp.gate_up_proj": {"mlp.gate_proj": spec.intermediate_size, "mlp.up_proj": spec.intermediate_size},
    }


def split(spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's tensors under their exported names: fused projections become views of their parts."""
    fused, parts = _fused(spec), {}
    for name, tensor in tensors.items():
        layer = OF_A_LAYER.fullmatch(name)
        if layer is None or (rows := fused.get(layer[2])) is None:
            parts[name] = tensor
            continue
        for part, piece in zip(rows, tensor.split(list(rows.values())), strict=True):
            parts[layer[1] + part + layer[3]] = piece
    return parts


def fuse(spec: DrafterSpec, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split`."""
    fused, tensors = _fused(spec), {}
    whole = {part: projection for projection, rows in fused.items() for part in rows}
    for name, tensor in parts.items():
        layer = OF_A_LAYER.fullmatch(name)
        if layer is None or (projection := whole.get(layer[2])) is None:
            tensors[name] = tensor
        elif (fused_name := layer[1] + projection + layer[3]) not in tensors:
            tensors[fused_name] = torch.cat([parts[layer[1] + part + layer[3]] for part in fused[projection]])
    return tensors


def unscaled(spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """The same drafter on embeddings that are not scaled, as the engines' plain class feeds it.

    With the scale s, what enters the residual stream is s times smaller, so what is added to it is divided by s, and norms that must not
    notice add s * s times less. Source: a residual stream behind norms is known but for its scale.
    """
    scale = spec.embedding_scale
    if scale == 1.0:
        return spec, dict(tensors)
    written = {name: tensor / scale if ADDED.search(name) else tensor for name, tensor in tensors.items()}
    return replace(spec, embedding_scale=1.0, rms_norm_eps=spec.rms_norm_eps / scale**2), written


def exported_config(spec: DrafterSpec, target: TargetSpec, architecture: str, dtype: str, feature_dtype: str) -> dict[str, Any]:
    """config.json of the exported form.

    `architecture` is the class that engines look up, `dtype` the type of the weights and `feature_dtype` that of the features they were
    trained on, as names.
    """
    rules = target.vocabulary
    scaled = {} if spec.embedding_scale == 1.0 else {"input_embedding_scale": spec.embedding_scale}
    capped = {} if rules.logit_softcap is None else {"final_logit_softcapping": rules.logit_softcap}
    rope = {"rope_type": "default", **(spec.rope_scaling or {}), "rope_theta": spec.rope_theta}
    causal = {kind == SLIDING and spec.sliding_causal for kind in spec.layer_types}  # one word for all layers, or none: then by their types
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.taps),
            "feature_dtype": feature_dtype,
            **scaled,
            **capped,
        },
        "num_target_layers": spec.target_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "layer_types": list(spec.layer_types),
        "max_window_layers": spec.layers,
        "sliding_window": spec.window if SLIDING in spec.layer_types else None,
        "use_sliding_window": SLIDING in spec.layer_types,
        **({"is_causal": causal.pop()} if len(causal) == 1 else {}),
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "rope_parameters": rope,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else list(spec.eos_token_ids),
        "dtype": dtype,
    }


def read_spec(folder: str | Path, config: Mapping[str, Any], family: str, options: Any, sample_from_anchor: bool) -> DrafterSpec:
    """The DrafterSpec in an exported drafter's config.json, ours or another trainer's.

    `config` is the parsed file, `family` the family's name, `options` its own settings and `sample_from_anchor` its way.
    Raises: UserError if a field is missing or the drafter has a vocabulary of its own.
    """
    path = Path(folder) / "config.json"
    inner, rope, scaling = (json_objects(path, config, key) for key in ("dflash_config", "rope_parameters", "rope_scaling"))
    if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise UserError(OWN_VOCABULARY.format(folder=folder, what="draft_vocab_size"))
    number = functools.partial(_number, path)
    try:
        layers = number(config, "num_hidden_layers", most=1000)
        given_depth = config.get("num_target_layers") or not inner.get("target_layer_ids")
        depth = number(config, "num_target_layers", most=1000) if given_depth else None
        if config.get("rope_theta") is not None:  # engines read it beside rope_parameters, too
            number(config, "rope_theta", float)
        rope = rope or scaling
        rope = rope if "rope_theta" in rope else rope | {"rope_theta": config["rope_theta"]}
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise UserError(f"{folder} rotates a share of each head ({rope['partial_rotary_factor']}), which engines do not read alike")
        kind, scaling = rope_kind(rope), {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}
        eos = config.get("eos_token_id")
        layer_types = _list(path, config, "layer_types", lambda kind: kind in (FULL, SLIDING)) or (FULL,) * layers
        ends = {"eos_token_id": eos if isinstance(eos, list) else [] if eos is None else [eos]}
        return DrafterSpec(
            family=family,
            options=options,
            sample_from_anchor=sample_from_anchor,
            sliding_causal=_sliding_causal(path, config, inner, layer_types),
            hidden_size=number(config, "hidden_size"),
            intermediate_size=number(config, "intermediate_size"),
            layers=layers,
            heads=number(config, "num_attention_heads", most=10_000),
            kv_heads=number(config, "num_key_value_heads", most=10_000),
            head_dim=number(config, "head_dim", most=10_000),
            layer_types=layer_types,
            window=config.get("sliding_window") and number(config, "sliding_window", most=10**9),
            block_size=number(inner if inner.get("block_size") else config, "block_size"),
            mask_token_id=number(inner, "mask_token_id", least=0, most=10**8),
            taps=_list(path, inner, "target_layer_ids", lambda tap: type(tap) is int) or auto_taps(layers, depth or 0),
            target_layers=depth,
            vocab_size=number(config, "vocab_size", most=10**8),
            rms_norm_eps=number(config, "rms_norm_eps", float),
            rope_theta=number(rope, "rope_theta", float),
            rope_scaling=None if kind == "default" else {"rope_type": kind, **scaling},
            max_position_embeddings=number(config, "max_position_embeddings", most=10**9),
            attention_bias=bool(config.get("attention_bias", False)),
            initializer_range=number({"initializer_range": 0.02, **config}, "initializer_range", float),
            bos_token_id=None if config.get("bos_token_id") is None else number(config, "bos_token_id", least=0, most=10**8),
            eos_token_ids=_list(path, ends, "eos_token_id", lambda token: type(token) is int),
            embedding_scale=number({"input_embedding_scale": 1.0, **inner}, "input_embedding_scale", float),
        )
    except KeyError as missing:
        raise UserError(f"{path} lacks {missing}: this is no exported block drafter") from None


def _sliding_causal(path: Path, config: Mapping[str, Any], inner: Mapping[str, Any], layer_types: Sequence[str]) -> bool:
    """Whether a drafter's sliding layers are causal within a block: as its config says, or they are. Raises: UserError."""
    causal = config.get("is_causal", inner.get("causal"))
    if causal not in (None, True, False):
        raise UserError(f"{path}: is_causal={causal!r} must be true or false")
    if config.get("is_causal") and FULL in layer_types:
        raise UserError(f"{path}: is_causal=true makes its full_attention layers causal, too: no drafter of this suite is; leave it out")
    return causal is not False or SLIDING not in layer_types


def read_feature_dtype(folder: str | Path) -> str:
    """Name of the features' type that an exported drafter was trained on; bfloat16 where it does not say.

    Raises: UserError if it names another type.
    """
    path = Path(folder) / "config.json"
    name = json_objects(path, read_config(folder), "dflash_config").get("feature_dtype", "bfloat16")
    if name not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{path}: dflash_config.feature_dtype={name!r} must be bfloat16, float16 or float32")
    return name


def json_objects(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON object under a key of the config at `path`, empty where there is none. Raises: UserError for any other value."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key}={value!r} must be a JSON object")
    return value


def _list(path: Path, config: Mapping[str, Any], key: str, is_one: Callable[[Any], bool]) -> tuple[Any, ...]:
    """The list under a key of a config, empty where there is none. Raises: UserError for anything else than a list of such values."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(map(is_one, value)):
        raise UserError(f"{path}: {key}={str(value)[:200]} is not understood: it must be a list of the values that engines know")
    return tuple(value)


def _number(path: Path, config: Mapping[str, Any], key: str, kind: type = int, least: int = 1, most: int = 10**6) -> Any:
    """A number of a config: whole and within its bounds, or for `float` any above 0."""
    value = config[key]
    is_one = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_one or not (0 < value < 1e30 if kind is float else least <= value <= most):
        expected = "number above 0" if kind is float else f"whole number from {least} to {most:,}"
        raise UserError(f"{path}: {key}={str(value)[:200]} must be a {expected}")
    return kind(value)


def exported_tensors(folder: str | Path) -> tuple[dict[str, str], Tensors]:
    """{exported key: the name it has in the folder}, the names of what wraps a module taken off, and the folder's Tensors.

    Raises: UserError for a drafter with a vocabulary of its own, or two tensors of one name. Copies of the target's embedding and head are
    left out with a warning.
    """
    tensors = Tensors(folder)
    keys = {OF_WRAPPERS.sub("", name): name for name in tensors.names()}
    if len(keys) < len(tensors.names()):
        twice = next(name for name in tensors.names() if name not in keys.values())
        raise UserError(f"{folder} holds {twice} and {keys[OF_WRAPPERS.sub('', twice)]}, which are one tensor's names: keep one of them")
    if own := sorted({"d2t", "t2d"} & set(keys)):
        raise UserError(OWN_VOCABULARY.format(folder=folder, what=", ".join(own)))
    if copies := [k for k in keys if k in TARGETS_OWN]:
        warnings.warn(f"{folder}: {', '.join(copies)} ignored, the target's own are used", stacklevel=2)
    return {key: name for key, name in keys.items() if key not in copies}, tensors


def write_exported(
    folder: str | Path,
    config: Mapping[str, Any],
    parts: Mapping[str, Tensor],
    dtype: torch.dtype,
    check: Callable[[Path], Sequence[str]],
) -> Path:
    """Write config.json and model.safetensors, whole or not at all.

    `parts` are the tensors under their exported names, `dtype` the type they are written in; `check(folder)` returns what is wrong with
    what was written. Raises: UserError if it finds anything.
    """
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        written = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in parts.items()}
        save_file(written, temporary / "model.safetensors", metadata={"format": "pt"})
        if errors := check(temporary):
            raise UserError(f"the drafter cannot be exported to {folder}: {'; '.join(errors)}")
        for path in (*temporary.iterdir(), temporary):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder
