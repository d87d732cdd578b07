"""A target's folder read without loading the model: its config as a TargetSpec, single tensors out of its safetensors.

Drafter ranks take the embedding and the head from here; the whole target is loaded by `target` alone.
Legend: V rows of the embedding, D hidden size.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.errors import UserError


@dataclass(frozen=True)
class TargetSpec:
    """The numbers of a target's config.json that a drafter is built from."""

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
    rope_scaling: dict | None
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple
    pad_token_id: int | None
    initializer_range: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    fingerprint: str


def resolve(path, revision=None):
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


def read_spec(folder):
    """Read config.json (and generation_config.json's stop tokens) into a TargetSpec.

    Raises: UserError if the file is missing, is not JSON, or lacks a field.
    """
    folder = Path(folder)
    whole = read_json(folder / "config.json")
    config = whole.get("text_config", whole)
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        rope = config.get("rope_parameters") or {}
        if "full_attention" in rope:  # one table per layer type
            rope = rope["full_attention"]
        scaling = config.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        gemma = config["model_type"].startswith("gemma")
        return TargetSpec(
            model_type=config["model_type"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rope_scaling=None if kind == "default" else dict(scaling),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            attention_bias=bool(config.get("attention_bias", False)),
            tie_word_embeddings=bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            bos_token_id=_first(config.get("bos_token_id")),
            eos_token_ids=_stop_tokens(folder, config),
            pad_token_id=_first(config.get("pad_token_id")),
            initializer_range=config.get("initializer_range", 0.02),
            embedding_scale=float(hidden**0.5) if gemma else float(config.get("embedding_multiplier", 1.0)),
            logit_scale=(config.get("logit_scale") or 1.0) / (config.get("logits_scaling") or 1.0),  # Cohere's and Granite's names
            logit_softcap=config.get("final_logit_softcapping"),
            fingerprint=fingerprint(folder),
        )
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} lacks {error}: this suite trains for dense decoder language models") from None


def fingerprint(folder):
    """Hash of config.json and of every weight file's name, size and header: equal for equal checkpoints, read in milliseconds."""
    folder, digest = Path(folder), hashlib.sha256()
    config = read_json(folder / "config.json")
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}{file.stat().st_size}".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(min(1 << 20, file.stat().st_size)))
    return digest.hexdigest()[:16]


class Tensors:
    """Single tensors of a folder of safetensors, read when asked for.

    Raises: UserError if the folder holds none or a file is damaged.
    """

    def __init__(self, folder):
        self.folder, self._home = Path(folder), {}
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as reader:
                    self._home |= dict.fromkeys(reader.keys(), file)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or incomplete ({error}): fetch it again") from None
        if not self._home:
            raise UserError(f"{folder} holds no *.safetensors: convert or download the weights in that form")

    def names(self):
        return list(self._home)

    def shape(self, name):
        with safe_open(self._home[name], framework="pt") as reader:
            return tuple(reader.get_slice(name).get_shape())

    def load(self, name, dtype=None, device="cpu"):
        with safe_open(self._home[name], framework="pt") as reader:
            return reader.get_tensor(name).to(device=device, dtype=dtype)


def read_json(path):
    try:
        value = json.loads(Path(path).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; a model folder holds config.json beside its safetensors") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _first(value):
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def _stop_tokens(folder, config):
    """Stop tokens as generation uses them: generation_config.json first, then config.json."""
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)
