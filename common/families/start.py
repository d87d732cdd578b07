"""A drafter with the weights it starts from."""

import re

import torch

from common.drafter.export import split
from common.families.registry import FAMILIES, load_exported
from common.target.files import Tensors


def make_drafter(config, spec, target_folder, device, seed):
    """A drafter with its first weights, as `config` (the `drafter` section) asks: equal for equal seeds on equal devices.

    Raises: UserError if the weights to start from do not fit.
    """
    drafter = FAMILIES[spec.family].build(spec, getattr(torch, config.dtype), device, config.activation_checkpointing)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, spec.initializer_range, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        for layer in drafter.layers:
            for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
                if linear.bias is not None:
                    linear.bias.zero_()
    if config.init == "target_layers":
        _copy_target_layers(drafter, Tensors(target_folder))
    elif config.init != "random":
        drafter.load_state_dict(load_exported(config.init)[1])
    if config.zero_features:
        torch.nn.init.zeros_(drafter.fc.weight)  # without features it gets no gradient: the drafter that is served sees none either
    return drafter


@torch.no_grad()
def _copy_target_layers(drafter, tensors):
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
