"""Which parts of a causal language model are read from its safetensors, and the device that each goes to without a stop on another.

A stage of a chain reads its own layers alone; a model that decodes on several devices has its layers spread over them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.target.adapters import auto_class, decoder_layers, decoder_of


@dataclass(frozen=True)
class Placement:
    """Where a model's parts go. What lies in the decoder beside its layers, and is not named here, goes to `device`."""

    device: torch.device
    layers: Mapping[int, torch.device] | None = None
    """The device of each layer; layers that are not named are not read. None: all of them, to `device`."""
    embedding: bool = True
    outside: bool = True
    """Whether what lies outside the decoder is read: the head, and towers for other media."""

    def of(self, model: PreTrainedModel) -> "Placed":
        """This placement by the names of a model's parameters."""
        decoder = decoder_of(model)
        names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        unread = [] if self.embedding else [names[id(decoder.get_input_embeddings())]]
        layers = {} if self.layers is None else {names[id(layer)]: self.layers.get(i) for i, layer in enumerate(decoder_layers(decoder))}
        unread += [name for name, device in layers.items() if device is None]
        return Placed(self, names[id(decoder)], tuple(unread), {name: device for name, device in layers.items() if device is not None})


@dataclass(frozen=True)
class Placed:
    """A placement in one model: names end in a dot."""

    placement: Placement
    decoder: str
    unread: tuple[str, ...]
    layers: dict[str, torch.device]

    def reads(self, name: str) -> bool:
        """Whether a parameter is read."""
        return (self.placement.outside or name.startswith(self.decoder)) and not name.startswith(self.unread)

    def device_of(self, name: str) -> torch.device:
        """The device of a parameter or buffer that is kept."""
        return next((device for layer, device in self.layers.items() if name.startswith(layer)), self.placement.device)

    @property
    def device_map(self) -> dict[str, torch.device]:
        """For transformers, whose names end without a dot and stand for whatever begins with them."""
        return {"": self.placement.device} | {name.removesuffix("."): device for name, device in self.layers.items()}


def load_placed(
    folder: str | Path, config: PreTrainedConfig, placement: Placement, trust_remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The parts of a folder's model that a placement names, on their devices, and transformers' report on what it found.

    Parameters that are not read are None in the model, and are left out of the report.
    """
    with torch.device("meta"):
        whole: Any = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    family, left_out = type(whole), set[str]()

    class Part(family):
        """The family's own class, whose parameters are gone where they are not to be read."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            left_out.update(_leave_out(self, placement.of(self)))
            tied = getattr(self, "all_tied_weights_keys", {})
            self.all_tied_weights_keys = {one: other for one, other in tied.items() if not {one, other} & left_out}

        @staticmethod
        def _load_pretrained_model(model: Any, state: Any, files: Any, how: Any, *rest: Any) -> Any:
            # what `device_map` would do, which wants another package for it
            return family._load_pretrained_model(model, state, files, replace(how, device_map=placement.of(model).device_map), *rest)

    Part.__name__, Part.__qualname__, Part.__module__ = family.__name__, family.__qualname__, family.__module__
    model, report = Part.from_pretrained(str(folder), config=whole.config, use_safetensors=True, output_loading_info=True, **options)
    model.__class__ = family
    placed, prefix = placement.of(model), f"{model.base_model_prefix}."
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data = tensor.data.to(placed.device_of(name))  # buffers that no file holds were made on the CPU
    unexpected = {key for key in report["unexpected_keys"] if not {key, prefix + key, key.removeprefix(prefix)} & left_out}
    return model, report | {"unexpected_keys": unexpected}


def _leave_out(model: nn.Module, placed: Placed) -> set[str]:
    """Take away the parameters that are not read, and what would initialise them; returns their names."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    gone = {name for name in names if not placed.reads(name)}
    for name in gone:
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._parameters[own] = None
    for name in _modules_of(gone) - _modules_of(set(names) - gone):  # some modules initialise what lies deeper inside them
        module: Any = model.get_submodule(name)
        module._is_hf_initialized = True
    return gone


def _modules_of(names: Iterable[str]) -> set[str]:
    """The modules, at any depth, that hold these parameters."""
    return {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
