"""What a drafter is, and the form in which it lies on disk: a DrafterSpec, config.json and model.safetensors.

The exported form is the one that z-lab's transformers class, vLLM and SGLang load; `split` and `fuse` translate between its tensors and
the drafter's fused projections. Source: DFlash (arXiv 2602.06036).
"""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.config import UserError
from common.target_files import Tensors, read_json

FULL, SLIDING = "full_attention", "sliding_attention"
OWN_VOCABULARY = "{folder} proposes from a vocabulary of its own ({what}): only drafters that use the target's whole head are supported"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Published drafters' mask tokens, by target family: https://huggingface.co/collections/z-lab/dflash
MASK_TOKENS = {
    "qwen3": 151669, "qwen3_moe": 151669, "qwen3_5": 248070, "qwen3_5_text": 248070, "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070, "gpt_oss": 200000, "minimax_m2": 200054,
}  # fmt: skip


@dataclass(frozen=True)
class DrafterSpec:
    """Everything that an exported drafter's config.json says. `taps` are target layers, `target_layers` the target's depth."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple
    window: int | None
    block_size: int
    mask_token_id: int
    taps: tuple
    target_layers: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    max_position_embeddings: int
    attention_bias: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple

    @classmethod
    def resolve(cls, config, target, folder, used_ids=()):
        """The drafter that a `drafter` config section describes for a target (TargetSpec) whose files lie in `folder`.

        `used_ids` are token ids that occur in the data; the mask token must not be one of them.
        Raises: UserError for taps, mask tokens or dimensions that do not fit the target.
        """
        if config.init not in ("random", "target_layers"):
            return _continued(config, load_exported(config.init)[0], target, folder, used_ids)
        taps = auto_taps(config.layers, target.layers) if config.taps == "auto" else tuple(config.taps)
        kv_heads = config.kv_heads or (target.kv_heads if config.heads is None else config.heads)
        spec = cls(
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
            rope_scaling=target.rope_scaling,
            max_position_embeddings=target.max_position_embeddings,
            attention_bias=False,
            initializer_range=target.initializer_range,
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
        )
        spec.validate(target)
        return spec

    def validate(self, target):
        """Refuse what cannot be trained or served with this target.

        Raises: UserError.
        """
        if (self.hidden_size, self.target_layers, self.vocab_size) != (target.hidden_size, target.layers, target.vocab_size):
            raise UserError(
                f"the drafter was made for another target: (hidden size, layers, vocabulary) = "
                f"{(self.hidden_size, self.target_layers, self.vocab_size)}, the target has "
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
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise UserError(
                f"drafter.heads={self.heads} must be a multiple of drafter.kv_heads={self.kv_heads}, and drafter.head_dim="
                f"{self.head_dim} even"
            )
        if SLIDING in self.layer_types and (self.window or 0) < self.block_size:
            raise UserError(f"drafter.window={self.window} is shorter than a block of {self.block_size}; use at least {self.block_size}")
        if _rope_kind(self.rope_scaling) not in ROPE_KINDS:
            raise UserError(
                f"rope scaling {_rope_kind(self.rope_scaling)!r} is not supported by the drafter; known: {', '.join(ROPE_KINDS)}"
            )


def _rope_kind(scaling):
    return (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))


def auto_taps(taps, layers):
    """The DFlash spread of `taps` tapped layers over a target's depth."""
    spread = (layers // 2,) if taps == 1 else tuple(round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps))
    if any(b <= a for a, b in itertools.pairwise(spread)):
        raise UserError(f"drafter.taps=auto: {layers} target layers are too few for {taps} taps; name them, e.g. drafter.taps=[0,1]")
    return spread


def mask_token(wanted, target, folder, used_ids=()):
    """The id of the token that fills unknown slots: `wanted` is an id, a token's text or `auto`.

    Raises: UserError for a token that has a meaning already, is no row of the embedding, or cannot be found.
    """
    used, added, tokens = {int(i) for i in used_ids}, *_tokenizer_tokens(folder)
    pads = _pads(folder, added)

    def objection(token):
        if token in pads:
            return "is the tokenizer's padding"
        return _mask_objection(token, target) or ("occurs in the data" if token in used else None)

    if wanted == "auto":
        reserved = [added[t] for word in ("mask", "reserved", "unused") for t in sorted(added) if word in t.lower()]
        candidates = [MASK_TOKENS.get(target.model_type, -1), *range(tokens, target.vocab_size), *reserved]
        free = next((t for t in candidates if objection(t) is None), None)
        if free is None:
            raise UserError(
                "drafter.mask_token=auto finds no unused row of the target's embedding; name a token: drafter.mask_token=<id or text>"
            )
        return free
    if isinstance(wanted, str) and wanted not in added:
        raise UserError(
            f"drafter.mask_token={wanted!r} is not an added token of the target's tokenizer; use an id, or one of {sorted(added)[:8]}"
        )
    token = added[wanted] if isinstance(wanted, str) else wanted
    if (reason := objection(token)) is not None:
        raise UserError(f"drafter.mask_token={wanted} {reason}; use an unused id or drafter.mask_token=auto")
    return token


def _mask_objection(token, target):
    """Why a token cannot be the mask token of a target's drafter, or None."""
    if not 0 <= token < target.vocab_size:
        return f"is no row of the target's embedding (0..{target.vocab_size - 1})"
    taken = {"the end of a text": target.eos_token_ids, "the start of a text": (target.bos_token_id,), "padding": (target.pad_token_id,)}
    meaning = next((m for m, ids in taken.items() if token in ids), None)
    return meaning and f"is the target's token for {meaning}"


def _tokenizer_tokens(folder):
    """({text: id} of the added tokens, number of ids the tokenizer can produce), out of tokenizer.json."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return {}, 1 << 60
    tree = read_json(file)
    added = {t["content"]: t["id"] for t in tree.get("added_tokens", [])}
    vocabulary = tree.get("model", {}).get("vocab", {})
    plain = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return added, 1 + max([*plain, *added.values()], default=-1)


def _pads(folder, added):
    file = Path(folder) / "tokenizer_config.json"
    pad = read_json(file).get("pad_token") if file.is_file() else None
    return {added.get(pad.get("content") if isinstance(pad, dict) else pad)} - {None}


def _continued(config, spec, target, folder, used_ids):
    """The spec of an exported drafter that training goes on from; what the config names must agree with it."""
    asked = {name: getattr(config, name) for name in ("layers", "intermediate_size", "heads", "kv_heads", "head_dim", "window")}
    asked |= {"taps": None if config.taps == "auto" else tuple(config.taps)}
    asked |= {"layer_types": config.layer_types and tuple(config.layer_types)}
    for name, value in asked.items():
        if value is not None and value != getattr(spec, name):
            raise UserError(f"drafter.{name}={value} but the drafter in drafter.init={config.init} has {getattr(spec, name)}; write that")
    wanted = spec.mask_token_id if config.mask_token == "auto" else config.mask_token
    spec = dataclasses.replace(spec, block_size=config.block_size, mask_token_id=mask_token(wanted, target, folder, used_ids))
    spec.validate(target)
    return spec


def _fused(spec):
    """{fused projection: {its part: rows}}."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "self_attn.qkv_proj": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
        "mlp.gate_up_proj": {"mlp.gate_proj": spec.intermediate_size, "mlp.up_proj": spec.intermediate_size},
    }


def split(spec, tensors):
    """The drafter's tensors under their exported names: fused projections become views of their parts."""
    parts = {}
    for name, tensor in tensors.items():
        fused = next((f for f in _fused(spec) if f in name), None)
        sizes = _fused(spec)[fused] if fused else {"": len(tensor)}
        for part, piece in zip(sizes, tensor.split(list(sizes.values())), strict=True):
            parts[name.replace(fused, part) if fused else name] = piece
    return parts


def fuse(spec, parts):
    """The inverse of `split`."""
    pieces = {}
    for name, tensor in parts.items():
        fused = next((f for f, sizes in _fused(spec).items() for part in sizes if part in name), None)
        part = next((p for p in _fused(spec)[fused] if p in name), "") if fused else ""
        order = list(_fused(spec)[fused]).index(part) if fused else 0
        pieces.setdefault(name.replace(part, fused) if fused else name, {})[order] = tensor
    return {name: torch.cat([group[i] for i in sorted(group)]) for name, group in pieces.items()}


def exported_shapes(spec):
    """{key: shape} of the exported form: the exact key set that the engines' loaders expect."""
    D, inner, query, key = spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {"fc.weight": (D, len(spec.taps) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(spec.layers):
        rows = {"self_attn.q_proj": (query, D), "self_attn.k_proj": (key, D), "self_attn.v_proj": (key, D), "self_attn.o_proj": (D, query)}
        biases = {f"{name}.bias": shape[:1] for name, shape in rows.items() if spec.attention_bias}
        rows |= {"mlp.gate_proj": (inner, D), "mlp.up_proj": (inner, D), "mlp.down_proj": (D, inner)}
        rows |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
        rows |= {"self_attn.q_norm": (spec.head_dim,), "self_attn.k_norm": (spec.head_dim,)}
        layer = {f"{name}.weight": shape for name, shape in rows.items()} | biases
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def exported_config(spec, target, dtype, feature_dtype):
    """config.json of the exported form; `dtype` of the weights and `feature_dtype` of the features they were trained on, as names."""
    scaled = {} if target.embedding_scale == 1.0 else {"input_embedding_scale": target.embedding_scale}
    capped = {} if target.logit_softcap is None else {"final_logit_softcapping": target.logit_softcap}
    rope = {"rope_type": "default", **(spec.rope_scaling or {}), "rope_theta": spec.rope_theta}
    return {
        "architectures": ["DFlashDraftModel"],
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


def read_exported_config(folder):
    """The DrafterSpec in an exported drafter's config.json, ours or another trainer's.

    Raises: UserError if a field is missing or the drafter has a vocabulary of its own.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    inner, rope = (_objects(path, config, key) for key in ("dflash_config", "rope_parameters"))
    if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise UserError(OWN_VOCABULARY.format(folder=folder, what="draft_vocab_size"))
    number = functools.partial(_number, path)
    try:
        layers, depth = number(config, "num_hidden_layers"), number(config, "num_target_layers")
        rope = rope or {"rope_theta": config["rope_theta"], **_objects(path, config, "rope_scaling")}
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        eos = config.get("eos_token_id")
        return DrafterSpec(
            hidden_size=number(config, "hidden_size"),
            intermediate_size=number(config, "intermediate_size"),
            layers=layers,
            heads=number(config, "num_attention_heads"),
            kv_heads=number(config, "num_key_value_heads"),
            head_dim=number(config, "head_dim"),
            layer_types=tuple(config.get("layer_types") or [FULL] * layers),
            window=config.get("sliding_window") and number(config, "sliding_window"),
            block_size=number(inner if inner.get("block_size") else config, "block_size"),
            mask_token_id=number(inner, "mask_token_id", least=0),
            taps=tuple(inner.get("target_layer_ids") or auto_taps(layers, depth)),
            target_layers=depth,
            vocab_size=number(config, "vocab_size"),
            rms_norm_eps=number(config, "rms_norm_eps", float),
            rope_theta=number(rope, "rope_theta", float),
            rope_scaling=None if _rope_kind(scaling) == "default" else scaling,
            max_position_embeddings=number(config, "max_position_embeddings"),
            attention_bias=bool(config.get("attention_bias", False)),
            initializer_range=config.get("initializer_range", 0.02),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )
    except KeyError as missing:
        raise UserError(f"{path} lacks {missing}: this is no exported block drafter") from None


def read_feature_dtype(folder):
    """Name of the features' type that an exported drafter was trained on; bfloat16 where it does not say."""
    path = Path(folder) / "config.json"
    name = _objects(path, read_json(path), "dflash_config").get("feature_dtype", "bfloat16")
    if name not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{path}: dflash_config.feature_dtype={name!r} must be bfloat16, float16 or float32")
    return name


def _objects(path, config, key):
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key}={value!r} must be a JSON object")
    return value


def _number(path, config, key, kind=int, least=1):
    """A number of a config: whole and at least `least`, or for `float` any above 0."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not (value > 0 if kind is float else value >= least):
        raise UserError(f"{path}: {key}={value!r} must be a {'number above 0' if kind is float else f'whole number from {least}'}")
    return kind(value)


def load_exported(folder):
    """(DrafterSpec, state dict) of an exported drafter, ours or another trainer's (`model.` prefixes are taken off).

    Raises: UserError if it has a vocabulary of its own, or tensors other than the exported form's.
    """
    spec, tensors = read_exported_config(folder), Tensors(folder)
    keys = {name.removeprefix("model."): name for name in tensors.names()}
    if own := sorted({"d2t", "t2d"} & set(keys)):
        raise UserError(OWN_VOCABULARY.format(folder=folder, what=", ".join(own)))
    if copies := [k for k in keys if k in ("embed_tokens.weight", "lm_head.weight")]:
        warnings.warn(f"{folder}: {', '.join(copies)} ignored, the target's own are used", stacklevel=2)
    found = {key: tensors.shape(name) for key, name in keys.items() if key not in copies}
    if errors := shape_errors(spec, found):
        raise UserError(f"{folder} does not hold a drafter of its config.json: {'; '.join(errors[:4])}")
    return spec, fuse(spec, {key: tensors.load(keys[key]) for key in found})


def shape_errors(spec, found):
    """What keeps {key: shape} from being the exported form, in words."""
    wanted = exported_shapes(spec)
    missing = [f"{key} is missing" for key in wanted if key not in found]
    extra = [f"{key} is unknown" for key in found if key not in wanted]
    return missing + extra + [f"{k} is {found[k]}, not {wanted[k]}" for k in wanted if k in found and tuple(found[k]) != wanted[k]]


@dataclass
class Report:
    """What `check` found: errors that keep a drafter from being served, and per engine what it refuses or ignores without a word."""

    errors: list
    notes: dict

    def lines(self):
        engines = [f"{engine}: {note}" for engine, notes in self.notes.items() for note in notes]
        return [*(f"error: {error}" for error in self.errors), *engines, "not loader-ready" if self.errors else "loader-ready"]


def check(folder, target):
    """Look at an exported drafter with the eyes of the engines that would load it for this target (TargetSpec).

    Raises: UserError only if the folder is no drafter at all.
    Source: z-lab/dflash dflash/model.py; vLLM models/qwen3_dflash.py; SGLang models/dflash.py and speculative/dflash_utils.py.
    """
    config, spec, tensors = read_json(Path(folder) / "config.json"), read_exported_config(folder), Tensors(folder)
    inner, names = config.get("dflash_config") or {}, tensors.names()
    errors = shape_errors(spec, {name: tensors.shape(name) for name in names})
    try:
        spec.validate(target)
    except UserError as error:
        errors.append(str(error))
    if (reason := _mask_objection(spec.mask_token_id, target)) is not None:
        errors.append(f"dflash_config.mask_token_id={spec.mask_token_id} {reason}")
    sizes = {config.get("block_size", spec.block_size), inner.get("block_size", spec.block_size)}
    if len(sizes) > 1:
        errors.append(
            f"block_size is {config['block_size']} at top level and {inner['block_size']} in dflash_config: engines read one or the other"
        )
    if config.get("model_type") != "qwen3":
        errors.append(f"model_type={config.get('model_type')!r} must be 'qwen3': transformers chooses the config's class by it")
    if "DFlashDraftModel" not in (config.get("architectures") or []):
        errors.append(f"architectures={config.get('architectures')} must be ['DFlashDraftModel']: vLLM and SGLang choose the class by it")
    if config.get("hidden_act", "silu") != "silu":
        errors.append(f"hidden_act={config['hidden_act']}: the drafter's MLP is a SwiGLU; SGLang refuses anything but silu")
    if len(spec.layer_types) != spec.layers:
        errors.append(f"layer_types names {len(spec.layer_types)} of {spec.layers} layers")
    parameters = config.get("rope_parameters") or {}
    ropes = {float(r["rope_theta"]) for r in (config, parameters) if "rope_theta" in r}
    if len(ropes) > 1 or (parameters and _rope_kind(parameters) != _rope_kind(config.get("rope_scaling")) and "rope_theta" in config):
        errors.append("rope_theta and rope_scaling do not say what rope_parameters says: transformers 4 and 5 would rotate differently")
    return Report(errors, _engine_notes(config, inner, spec, target))


def _engine_notes(config, inner, spec, target):
    """What each engine refuses or ignores silently in a drafter that is otherwise in order."""
    zlab, vllm, sglang = [], [], []
    zlab.append("a missing or unknown tensor is only a warning of transformers; layer_types, rope_parameters and dflash_config are read")
    vllm.append(f"block_size is ignored: ask for num_speculative_tokens={spec.block_size - 1}, more drafts slots that were never trained")
    sglang.append("unknown tensors are skipped and missing ones stay uninitialised, both without a word; only fc.weight's shape is checked")
    if "block_size" not in config and "block_size" not in inner:
        zlab.append("no block_size: 16 is assumed without a word")
        sglang.append("no block_size: 16 is assumed without a word")
    if "rope_parameters" not in config:
        vllm.append("no rope_parameters: the table depends on transformers' reading of rope_theta and rope_scaling")
    if any("rope" in key for key in inner):
        vllm.append("rope fields inside dflash_config are ignored")
    if SLIDING in spec.layer_types and FULL in spec.layer_types:
        vllm.append("mixed full and sliding layers are refused by the V1 runner: set VLLM_USE_V2_MODEL_RUNNER=1")
    if "is_causal" in config or "causal" in inner:
        vllm.append("is_causal / dflash_config.causal override the sliding layers' causality that was trained")
        zlab.append("is_causal overrides the sliding layers' causality that was trained")
    if target.layers - 1 in spec.taps:
        vllm.append(
            f"tap {target.layers - 1} is the last layer: targets that capture before a layer cannot give it, and fc's width fails to match"
        )
    if target.embedding_scale != 1.0:
        vllm.append("input_embedding_scale is ignored: a version that does not scale the shared embedding drafts nonsense")
        sglang.append("input_embedding_scale is ignored: a version that does not scale the shared embedding drafts nonsense")
    if config.get("dtype", config.get("torch_dtype")) != "bfloat16":
        for notes in (vllm, sglang):
            notes.append(f"weights of {config.get('dtype', config.get('torch_dtype'))} are cast to the target's type")
    if inner.get("feature_dtype", "bfloat16") != "bfloat16":
        for notes in (zlab, vllm, sglang):
            notes.append(f"feature_dtype={inner['feature_dtype']} is ignored: features come in the target's serving type")
    return {"z-lab transformers class": zlab, "vLLM": vllm, "SGLang": sglang}


def export(folder, tensors, spec, target, dtype, feature_dtype):
    """Write the exported form of a drafter's tensors ({parameter name: tensor}), checked, whole or not at all.

    `target` is the TargetSpec it must serve; `dtype` the weights' and `feature_dtype` the features' type, as names.
    Raises: UserError if what would be written is not loader-ready.
    """
    folder = Path(folder)
    parts = {name: t.detach().to("cpu", getattr(torch, dtype)).contiguous().clone() for name, t in split(spec, tensors).items()}
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(exported_config(spec, target, dtype, feature_dtype), indent=2) + "\n")
    save_file(parts, temporary / "model.safetensors", metadata={"format": "pt"})
    if errors := check(temporary, target).errors:
        raise UserError(f"the drafter cannot be exported to {folder}: {'; '.join(errors)}")
    for path in (*temporary.iterdir(), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder
