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
from common.target.roles import LAST, Roles, Source


def make_drafter(
    config: DrafterConfig,
    spec: DrafterSpec,
    target_folder: str | Path,
    device: torch.device | str,
    seed: int,
    trust_remote_code: bool = False,
) -> Drafter:
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
        _copy_target_layers(drafter, target_folder, trust_remote_code)
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


def target_layer_sources(spec: DrafterSpec, folder: str | Path, trust_remote_code: bool = False) -> dict[str, Source | None]:
    """For each part of a drafter's layers, and its last norm, the target's weights of the same role; None where there are none."""
    parts = split(spec, FAMILIES[spec.family].build(spec, torch.bfloat16, "meta").state_dict())
    shapes = {re.sub(r"^layers\.\d+\.", "", name): tuple(part.shape) for name, part in parts.items()}
    roles, depth = Roles(folder, trust_remote_code), [spec.taps[min(i, len(spec.taps) - 1)] for i in range(spec.layers)]
    named = ((name, re.fullmatch(r"layers\.(\d+)\.(.*)", name)) for name in parts)
    sources = {name: roles.source(layer[2], depth[int(layer[1])], shapes) for name, layer in named if layer is not None}
    return sources | {LAST: roles.source(LAST, 0, shapes)}


@torch.no_grad()
def _copy_target_layers(drafter: Drafter, folder: str | Path, trust_remote_code: bool) -> None:
    """Start each layer and the last norm from the target's tapped layer, wherever role and shape agree."""
    parts, tensors = split(drafter.spec, drafter.state_dict()), Tensors(folder)  # views: what is copied into them arrives in the drafter
    for name, source in target_layer_sources(drafter.spec, folder, trust_remote_code).items():
        if source is not None:
            parts[name].copy_(source.load(tensors))
