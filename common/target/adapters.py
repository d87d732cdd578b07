"""What differs from one family of targets to another, measured on a model that transformers builds instead of looked up by name.

A miniature of the target (its own classes and config, one layer, a few rows of vocabulary) is run on the CPU: what reaches its first
layer tells how it scales embeddings, what comes out of its head tells how it scales and caps logits.

Legend: N rows of the miniature's vocabulary, D hidden size.
"""

import copy
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from common.errors import UserError, first_line

ROWS, NARROW = 32, 16
TOLERANCE = 1e-3
AUTO_CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
}
"""transformers' auto classes in the order of preference, each with its table of config classes."""
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")
"""What families call the number of layers of a decoder or a tower."""
LAYER_INDICES = frozenset(("layer_idx", "layer_id", "layer_number"))
"""Settings by which alike layers differ: they are read by caches only."""


@dataclass(frozen=True)
class VocabularyRules:
    """How a family treats its vocabulary: embeddings times a scale; logits (with the head's bias) times a scale, then capped by a tanh at
    `logit_softcap`."""

    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


@functools.lru_cache(8)
def vocabulary_rules(folder: Path, trust_remote_code: bool = False) -> VocabularyRules:
    """Measured on a miniature of the target in `folder`.

    Raises: UserError where more is done to embeddings or logits than a scale and a cap, which the drafter would not learn.
    """
    model = miniature(folder, trust_remote_code)
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    embedding.normal_(generator=generator)
    embedded, _, _ = through_model(model, torch.arange(ROWS))
    scale = _slope(embedded, embedding)
    if not math.isclose(relative_distance(embedded, scale * embedding), 0.0, abs_tol=TOLERANCE):
        raise UserError(
            f"{folder}: this family does more to its embeddings than scale them, which drafters do not know; it is not supported"
        )
    parts = [part for part in (head.weight, head.bias) if part is not None]
    drawn = [torch.randn(part.shape, generator=generator) for part in parts]
    measured = []
    for size in (1e-6, 1.0, 1e6):
        for part, values in zip(parts, drawn, strict=True):
            part.copy_(values * size)
        _, hidden, logits = through_model(model, torch.arange(ROWS))
        measured.append((torch.nn.functional.linear(hidden, *parts), logits))
    logit_scale = _slope(measured[0][1], measured[0][0])
    plain, logits = (x.abs().max().item() for x in measured[2])
    softcap = logits if logits < 1e-2 * logit_scale * plain else None
    expected = logit_scale * measured[1][0]
    expected = expected if softcap is None else softcap * torch.tanh(expected / softcap)
    if not math.isclose(relative_distance(measured[1][1], expected), 0.0, abs_tol=TOLERANCE):
        raise UserError(f"{folder}: this family does more to its logits than scale and cap them, which drafters do not know")
    return VocabularyRules(_plain(scale), _plain(logit_scale), None if softcap is None else _plain(softcap))


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads a checkpoint as a language model: for text alone, or one that also takes pictures or sound."""
    for name, mapping in AUTO_CLASSES.items():
        if type(config) in getattr(transformers, mapping, ()):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM  # code that ships with a checkpoint registers itself here; the others it refuses by name


def decoder_of(model: PreTrainedModel) -> Any:
    """The decoder inside a model: what holds its layers, without towers for pictures or sound and without the head.

    Raises: UserError if none keeps a list of layers.
    """
    candidates = [model.get_decoder(), *(getattr(model, name, None) for name in ("language_model", "model"))]
    found = next((decoder for decoder in candidates if decoder is not None and _layers_name(decoder)), None)
    if found is None:
        raise UserError(f"target family {model.config.model_type}: its decoder keeps no list of layers, so none can be tapped")
    return found


def decoder_layers(decoder: Any) -> nn.ModuleList:
    """The layers of a decoder, in order."""
    return getattr(decoder, _layers_name(decoder))


def set_layers(decoder: Any, layers: nn.ModuleList) -> None:
    """Have a decoder run these layers only."""
    setattr(decoder, _layers_name(decoder), layers)


def _layers_name(decoder: Any) -> str:
    """Families call the list `layers`, `h` or `blocks`, and others keep further lists beside it; empty if there is none."""
    lists = {name: len(child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    return "layers" if "layers" in lists else max(lists, key=lambda name: lists[name], default="")


def layer_signature(layer: nn.Module) -> tuple[Any, ...]:
    """All of a layer that decides how it compiles: its modules, their settings and shapes. Layers alike in it share a compiled kernel."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(sorted((key, value) for key, value in vars(module).items() if _is_setting(key, value))),
            tuple((key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _is_setting(key: str, value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and not key.startswith("__") and key not in LAYER_INDICES


def miniature(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """The target's own classes at one layer and a few rows, in float32. What it is, is unchanged: its width, its multipliers, its norms."""
    try:
        config = first_layer_only(AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code))
        _shrink(config.get_text_config(decoder=True))
        config.dtype = torch.float32
        with torch.random.fork_rng(devices=[]):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code).eval().requires_grad_(False)
    except Exception as error:  # the code of any family runs here
        raise UserError(
            f"{folder}: its family cannot be built by this version of transformers ({first_line(error)}); try a newer one"
        ) from None


def first_layer_only(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's first layer, with its vocabulary, and of one layer of each tower for pictures or sound."""
    whole = copy.deepcopy(whole)
    text = whole.get_text_config(decoder=True)
    for config in [text, *(getattr(whole, name, None) for name in whole.sub_configs)]:
        for name in DEPTHS:
            depth = getattr(config, name, None)
            if isinstance(depth, int):
                alike = {key: value[:1] for key, value in vars(config).items() if isinstance(value, list) and len(value) == depth}
                shared = {"num_kv_shared_layers": 0} if hasattr(config, "num_kv_shared_layers") else {}  # with layers that are gone
                for key, value in ({name: 1} | (alike | shared if config is text else {})).items():
                    setattr(config, key, value)
    return whole


def _shrink(config: PreTrainedConfig) -> None:
    changes: dict[str, Any] = {"vocab_size": ROWS}
    changes |= {name: 0 if getattr(config, name, None) is not None else None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    changes |= {name: NARROW for name in ("intermediate_size", "moe_intermediate_size") if isinstance(getattr(config, name, None), int)}
    changes["tie_word_embeddings"] = False
    for name, value in changes.items():
        setattr(config, name, value)


@torch.no_grad()
def through_model(model: PreTrainedModel, ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What reaches the first layer, what the decoder gives out, and the logits, of some tokens, in float32: [N, D], [N, D], [N, V].

    Raises: UserError where the family does not run.
    """
    seen: list[Tensor] = []
    decoder = decoder_of(model)
    hooks = [
        decoder_layers(decoder)[0].register_forward_pre_hook(
            lambda _, inputs, kwargs: seen.append(inputs[0] if inputs else kwargs["hidden_states"]), with_kwargs=True
        ),
        decoder.register_forward_hook(lambda _, inputs, output: seen.append(output[0])),
    ]
    try:
        logits = model(input_ids=ids_N[None], use_cache=False).logits
    except Exception as error:  # the code of any family runs here
        raise UserError(f"target family {model.config.model_type} does not run here: {first_line(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0][0].float(), seen[1][0].float(), logits[0].float()


def _slope(y: Tensor, x: Tensor) -> float:
    """The factor by which y is x."""
    return float((y.double() * x).sum() / (x.double() * x).sum())


def relative_distance(one: Tensor, other: Tensor) -> float:
    """How far one tensor is from another, relative to the other's size."""
    return float((one - other).norm() / other.norm())


def _plain(value: float) -> float:
    """Without the rounding of the measurement: seven digits."""
    return float(f"{value:.7g}")
