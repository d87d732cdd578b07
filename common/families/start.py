"""A drafter with the weights it starts from."""

import re
from pathlib import Path

import torch

from common.config import DrafterConfig
from common.drafter.backbone import Drafter
from common.drafter.export import split
from common.drafter.spec import DrafterSpec
from common.families.family import DrafterFamily
from common.families.registry import FAMILIES, FROM_SCRATCH, load_exported
from common.target.files import Tensors


def make_drafter(config: DrafterConfig, spec: DrafterSpec, target_folder: str | Path, device: torch.device | str, seed: int) -> Drafter:
    """A drafter with its first weights, as `config` (the `drafter` section) asks: equal for equal seeds, on every device.

    Raises: UserError if the weights to start from do not fit.
    """
    family = FAMILIES[spec.family]
    drafter = family.build(spec, getattr(torch, config.dtype), device, config.activation_checkpointing)
    found, tensors = (None, {}) if config.init in FROM_SCRATCH else load_exported(config.init)
    if found is None or found.family != spec.family:
        _draw(drafter, family, torch.Generator().manual_seed(seed))
    if found is not None:
        drafter.load_state_dict(tensors, strict=found.family == spec.family)
    if config.init == "target_layers":
        _copy_target_layers(drafter, Tensors(target_folder))
    if config.zero_features:
        torch.nn.init.zeros_(drafter.fc.weight)  # without features it gets no gradient: the drafter that is served sees none either
    return drafter


@torch.no_grad()
def _draw(drafter: Drafter, family: DrafterFamily, generator: torch.Generator) -> None:
    """Draw every parameter on the CPU, whose numbers are the same beside every GPU, and copy it to its device: one at a time."""
    for name, parameter in drafter.named_parameters():
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        family.first_values(name, value, drafter.spec, generator)
        parameter.copy_(value)


@torch.no_grad()
def _copy_target_layers(drafter: Drafter, tensors: Tensors) -> None:
    """Start each layer (and the last norm) from the target's tapped layer, wherever name and shape agree."""
    spec, names = drafter.spec, tensors.names()
    parts = split(spec, drafter.state_dict())  # views: what is copied into them arrives in the drafter
    depth = [spec.taps[min(i, len(spec.taps) - 1)] for i in range(spec.layers)]
    for name, part in parts.items():
        if (layer := re.match(r"layers\.(\d+)\.", name)) is not None:
            name = f"layers.{depth[int(layer[1])]}.{name[layer.end() :]}"
        elif name != "norm.weight":
            continue
        source = next((n for n in names if re.fullmatch(rf"((language_)?model\.)*{re.escape(name)}", n)), None)
        if source is not None and tensors.shape(source) == tuple(part.shape):
            part.copy_(tensors.load(source))
