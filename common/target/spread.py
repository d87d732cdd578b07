"""A whole model whose layers lie on several devices, for decoding with a target that one device cannot hold.

One process runs it, a device after the other: what a token needs on its way through the layers follows it from device to device.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from common.errors import UserError
from common.target.adapters import decoder_layers, decoder_of
from common.target.files import TargetSpec
from common.target.loading import load_causal_lm
from common.target.placement import Placement
from common.target.stages import cut, layer_costs


def load_spread(spec: TargetSpec, dtype: torch.dtype, device: torch.device, stages: int, flag: str) -> PreTrainedModel:
    """A target's causal language model, its layers on `stages` devices from `device` on, even in bytes; the rest lies on the first.

    `flag` is how the user named the folder.

    Raises: UserError if it does not load, or there are not so many devices or layers.
    """
    if stages == 1:
        return load_causal_lm(spec.folder, dtype, device, flag, spec.trust_remote_code)
    devices = _devices(device, stages)
    costs, _ = layer_costs(spec.folder, spec.layers, "bytes", spec.trust_remote_code)
    sizes = cut(costs, stages)
    where = [device for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
    model = load_causal_lm(spec.folder, dtype, Placement(devices[0], dict(enumerate(where))), flag, spec.trust_remote_code)
    layers, begin = decoder_layers(decoder_of(model)), 0
    for device, size in zip(devices, sizes, strict=True):
        follow = _Follow(device, layers[begin])
        for layer in layers[begin : begin + size]:
            layer.register_forward_pre_hook(follow, with_kwargs=True)
        begin += size
    layers[-1].register_forward_hook(lambda _, __, output: tree_map_only(Tensor, lambda x: x.to(devices[0]), output))
    return model


def _devices(first: torch.device, stages: int) -> list[torch.device]:
    """So many devices of a kind. Raises: UserError if there are fewer."""
    if first.type == "cpu":
        return [first] * stages
    begin, count = first.index or 0, torch.get_device_module(first).device_count()
    if begin + stages > count:
        raise UserError(f"--stages {stages} from {first} on: this machine has {count} such devices; use fewer stages or --device cpu")
    return [torch.device(first.type, begin + i) for i in range(stages)]


class _Follow:
    """The hook of all layers on one device: brings there what they are called with, and what they share once a forward."""

    def __init__(self, device: torch.device, first: nn.Module):
        self._device, self._first = device, first
        self._brought: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if layer is self._first:
            self._brought.clear()
        return tree_map_only(Tensor, self._bring, inputs), tree_map_only(Tensor, self._bring, kwargs)

    def _bring(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device:
            return tensor
        if id(tensor) not in self._brought:
            self._brought[id(tensor)] = tensor, tensor.to(self._device)  # kept, so that no other tensor gets its id
        return self._brought[id(tensor)][1]
