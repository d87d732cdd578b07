"""A target's folder read without loading its weights: its config as a TargetSpec, single tensors out of its safetensors.

Drafter ranks take the embedding and the head from here; the whole target is loaded by `model` alone.
Legend: V rows of the embedding, D hidden size.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from common.errors import UserError
from common.target.adapters import VocabularyRules, first_line, vocabulary_rules

HEADER_BYTES = 100_000_000
"""The longest header of a safetensors file. Source: safetensors' own limit."""
SLICE_BYTES = 4096
"""Bytes of a tensor's beginning, middle and end that its checkpoint is known by."""


@dataclass(frozen=True)
class TargetSpec:
    """The numbers of a target that a drafter is built from, as transformers reads them."""

    folder: Path
    trust_remote_code: bool
    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    initializer_range: float
    fingerprint: str

    @property
    def vocabulary(self) -> VocabularyRules:
        """How the family scales embeddings and logits, measured when first asked for. Raises: UserError for a family that does more."""
        return vocabulary_rules(self.folder, self.trust_remote_code)


def resolve(path: str, revision: str | None = None) -> Path:
    """A local folder for a path or a hub id; a hub id is downloaded (or found in the hub's cache).

    Raises: UserError if it is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(
            f"target.path={path}: no such folder; give a folder with config.json and safetensors, or a hub id like Qwen/Qwen3-8B"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub raises many kinds; the user needs one sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"target.path={path} is no folder here and could not be fetched from the hub: {reason}") from None


def read_spec(folder: str | Path, trust_remote_code: bool = False) -> TargetSpec:
    """Read a target's config as transformers does, defaults included, and generation_config.json's stop tokens.

    Raises: UserError if there is no readable config, or one of no decoder of layers.
    """
    folder = Path(folder)
    read_json(folder / "config.json")  # one sentence for what transformers has a page for
    try:
        whole = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        config = whole.get_text_config(decoder=True)
        config.allow_global_per_layer_attribute_access = True  # where layers differ, the drafter is given the config's general number
    except Exception as error:  # the code and JSON of any family: transformers raises many kinds
        raise UserError(f"{folder / 'config.json'} is not understood by this version of transformers: {first_line(error)}") from None
    number = _Numbers(folder / "config.json", config)
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    rope, scaling = _rope(config)
    return TargetSpec(
        folder=folder,
        trust_remote_code=trust_remote_code,
        model_type=config.model_type,
        hidden_size=hidden,
        intermediate_size=_mlp_width(config, number, hidden),
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(1, hidden // heads)),
        vocab_size=number("vocab_size"),
        rms_norm_eps=_positive(getattr(config, "rms_norm_eps", None), 1e-6),
        rope_theta=_positive(rope.get("rope_theta", getattr(config, "rope_theta", None)), 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=number("max_position_embeddings", 32768),
        attention_bias=bool(getattr(config, "attention_bias", False)),
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False))),
        bos_token_id=_first(getattr(config, "bos_token_id", None)),
        eos_token_ids=_stop_tokens(folder, config),
        pad_token_id=_first(getattr(config, "pad_token_id", None)),
        initializer_range=_positive(getattr(config, "initializer_range", None), 0.02),
        fingerprint=fingerprint(folder),
    )


MOST = 10**9
"""More than any number of a config, and less than what fills memory by being counted."""


def with_defaults(model_type: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A config of which only what differs from its class's defaults was saved, whole. Raises: UserError for a class that there is not."""
    try:
        return AutoConfig.for_model(model_type, **{key: value for key, value in given.items() if key != "model_type"}).to_dict()
    except Exception as error:  # the code and JSON of any family: transformers raises many kinds
        raise UserError(f"a config of model_type={str(model_type)[:100]!r} is not understood: {first_line(error)}") from None


class _Numbers:
    """Whole numbers from 1 of a config. Raises: UserError where one is missing without a default, or is none."""

    def __init__(self, path: Path, config: PreTrainedConfig):
        self.path, self.config = path, config

    def __call__(self, name: str, default: int | None = None) -> int:
        value = getattr(self.config, name, None)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.path} lacks {name!r}: this suite trains for decoder language models made of layers")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise UserError(f"{self.path}: {name}={str(value)[:100]} must be a whole number from 1 to {MOST:,}")
        return value


def _mlp_width(config: PreTrainedConfig, number: _Numbers, hidden: int) -> int:
    """The width of the target's MLP; of layers that differ the widest, of a mixture without a dense one what a token goes through."""
    widths = getattr(config, "intermediate_size", None)
    if isinstance(widths, list) and widths and all(type(width) is int for width in widths):
        return max(widths)
    chosen = (getattr(config, "moe_intermediate_size", None) or 0) * (getattr(config, "num_experts_per_tok", None) or 0)
    return number("intermediate_size", chosen or 3 * hidden)


def _rope(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The rotary parameters of full-attention layers, and their scaling (None without one)."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else {}
    scaling = {key: value for key, value in (rope or {}).items() if key != "rope_theta"}
    return rope or {}, None if scaling.get("rope_type", "default") == "default" else scaling


def _positive(value: Any, default: float) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if usable else default


def fingerprint(folder: str | Path) -> str:
    """Hash of config.json and of a slice of every tensor: other for checkpoints that differ in any layer, read in a second.

    Raises: UserError if a file is no safetensors file.
    """
    folder, digest = Path(folder), hashlib.sha256()
    config = read_json(folder / "config.json")
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                if size > min(HEADER_BYTES, file.stat().st_size):
                    raise ValueError("its header is longer than the file, or than any header")
                header = json.loads(stream.read(size))
                for name, entry in sorted(header.items()):
                    digest.update(json.dumps([name, entry], sort_keys=True).encode())
                    if name != "__metadata__":
                        begin, end = entry["data_offsets"]
                        for at in (begin, (begin + end) // 2, max(begin, end - SLICE_BYTES)):
                            stream.seek(8 + size + at)
                            digest.update(stream.read(min(SLICE_BYTES, end - at)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"{file} is no safetensors file ({str(error)[:100]}): fetch it again; is it a git-lfs pointer?") from None
    return digest.hexdigest()[:16]


class Tensors:
    """Single tensors of a folder of safetensors, read when asked for.

    Raises: UserError if the folder holds none or a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder, self._home = Path(folder), {}  # by tensor's name, the file
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as reader:
                    self._home |= dict.fromkeys(reader.keys(), file)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or incomplete ({error}): fetch it again") from None
        if not self._home:
            raise UserError(f"{folder} holds no *.safetensors: convert or download the weights in that form")

    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._home[name], framework="pt") as reader:
            return tuple(reader.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with safe_open(self._home[name], framework="pt") as reader:
            return reader.get_slice(name)[:0].dtype

    def load(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        with safe_open(self._home[name], framework="pt") as reader:
            return reader.get_tensor(name).to(device=device, dtype=dtype)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object of a file. Raises: UserError if there is none."""
    try:
        value = json.loads(Path(path).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; a model folder holds config.json beside its safetensors") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _stop_tokens(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Stop tokens as generation uses them: generation_config.json first, then config.json."""
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.is_file() else None
    value = getattr(config, "eos_token_id", None) if value is None else value
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise UserError(f"{folder}: eos_token_id={value!r} must be token ids")
    return tuple(listed)
