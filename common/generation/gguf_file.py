"""A GGUF file as it is, beside the model that transformers makes of it: every weight must be the file's, and every rotation.

transformers leaves out tensors that it has no name for, and then a layer keeps its random numbers. So the file is read a second time, by
the `gguf` package alone.
"""

import hashlib
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError

NORMS_LESS_ONE = {"gemma", "gemma2", "gemma3", "nemotron"}
"""Architectures whose file holds one more than the weight of a norm. Source: llama.cpp, convert_hf_to_gguf.py."""


class GgufFile:
    """A GGUF file as the `gguf` package reads it. Raises: whatever that package raises for a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path, self._gguf = path, importlib.import_module("gguf")
        self._reader = self._gguf.GGUFReader(path)

    def field(self, name: str) -> Any:
        """The value of a metadata field, None where there is none; `{arch}` stands for the architecture's name."""
        if name.startswith("{arch}"):
            name = name.replace("{arch}", self.field("general.architecture"))
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    def tensors(self) -> dict[str, Any]:
        """The tensors by their name, to be given to `values`."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def values(self, tensor: Any) -> torch.Tensor:
        """A tensor's numbers, float32."""
        return torch.from_numpy(np.array(self._gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))


def check_weights(file: GgufFile, model: torch.nn.Module) -> None:
    """Compare every weight of a model with every tensor of the file: the same numbers, in whatever order and shape each keeps them.

    Raises: UserError naming what only one of them holds.
    """
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    (dtype,) = {weight.dtype for weight in weights.values()}
    given = {}
    for name, tensor in file.tensors().items():
        if not name.startswith("rope_"):  # no weights; see `rope_parameters`
            values = file.values(tensor)
            less_one = name.endswith("norm.weight") and file.field("general.architecture") in NORMS_LESS_ONE
            given[name] = _numbers((values - 1 if less_one else values).to(dtype))
    held = {name: _numbers(weight) for name, weight in weights.items()}
    unknown = Counter(held.values()) - Counter(given.values())
    unused = Counter(given.values()) - Counter(held.values())
    if unknown or unused or not given:
        invented = [name for name, numbers in held.items() if numbers in unknown]
        left_out = [name for name, numbers in given.items() if numbers in unused]
        raise UserError(
            f"--gguf {file.path}: {len(invented)} of {len(held)} weights would not be the file's ({_some(invented)}), and {len(left_out)} "
            f"of its {len(given)} tensors would be lost ({_some(left_out)}): transformers cannot read it; use the original safetensors"
        )


def _numbers(tensor: torch.Tensor) -> str:
    """A hash of a tensor's numbers that does not depend on their order: how often each 16-bit half occurs."""
    columns = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1, tensor.element_size() // 2)
    counts = [np.bincount(column, minlength=1 << 16) for column in columns.T]
    return hashlib.sha256(np.stack(counts).tobytes()).hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "none"


def rope_parameters(file: GgufFile, config: Any) -> Any:
    """The rotations' parameters of a text model's config, which transformers has read without the file's tensor of factors: by these
    Llama 3.1 and later slow the rotations down.

    Raises: UserError for a scaling that is not taken over.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tensors = {name: tensor for name, tensor in file.tensors().items() if name.startswith("rope_")}
    kind = file.field("{arch}.rope.scaling.type")
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    taken_over = any(one.get("rope_type", "default") != "default" for one in by_layer_type)
    if taken_over or (not tensors and kind in (None, "none")):
        return getattr(config, "rope_parameters", None)
    if set(tensors) == {"rope_freqs.weight"} and "rope_theta" in rope:
        factors = file.values(tensors["rope_freqs.weight"])
        llama3 = rope | {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 3),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = _llama3_factors(llama3, 2 * len(factors))
        if torch.allclose(factors, expected, rtol=1e-3):
            return llama3
    raise UserError(
        f"--gguf {file.path}: transformers does not take over how it scales rotations ({kind or _some(list(tensors))}); use the "
        "original safetensors"
    )


def _llama3_factors(rope: dict[str, Any], rotated: int) -> torch.Tensor:
    """By how much each pair of `rotated` channels is slowed down. Source: transformers, modeling_rope_utils.py."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, rotated, 2) / rotated)
    periods = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return 1 / (kept + (1 - kept) / rope["factor"])
