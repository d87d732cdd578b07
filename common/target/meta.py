"""How large a target is, read off the model that transformers builds on the meta device: shapes of all parameters, and no memory.

So mixtures of experts, odd widths and families to come are counted as they are, and no formula has to know them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from common.target.adapters import auto_class, decoder_layers, decoder_of

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnknownSize(Exception):
    """A target whose size cannot be told without loading it; the message says why."""


@dataclass(frozen=True)
class TargetSize:
    """Parameters of the part of a target that runs while drafters are trained.

    `held` counts everything that lies in memory, `active` what a token goes through in the layers, of mixtures only the chosen experts.
    """

    held: int
    active: int

    def __add__(self, other: "TargetSize") -> "TargetSize":
        return TargetSize(self.held + other.held, self.active + other.active)


def part_sizes(folder: Path, trust_remote_code: bool = False) -> tuple[TargetSize, list[TargetSize]]:
    """What lies in a target's decoder beside its layers (the embedding, mostly), and each of its layers, in order.

    Raises: UnknownSize for a family that cannot be built on the meta device, or whose experts' use its config does not tell.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            decoder = decoder_of(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))
    except Exception as error:  # the code of any family runs here
        raise UnknownSize(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    layers = [_layer_size(layer, config) for layer in decoder_layers(decoder)]
    held = sum(p.numel() for p in decoder.parameters())
    return TargetSize(held - sum(layer.held for layer in layers), 0), layers


def target_size(folder: Path, layers: int | None, trust_remote_code: bool = False) -> TargetSize:
    """The size of a target that stops after its first `layers` layers (None: all of them), with its embedding and without its head.

    Raises: UnknownSize, as `part_sizes` does.
    """
    rest, sizes = part_sizes(folder, trust_remote_code)
    return sum(sizes[:layers], rest)


def _layer_size(layer: nn.Module, config: PreTrainedConfig) -> TargetSize:
    held = sum(p.numel() for p in layer.parameters())
    experts = sum(p.numel() for name, p in layer.named_parameters() if "experts" in name.split("."))
    return TargetSize(held, held - round(experts * (1 - _used_share(config))) if experts else held)


def _used_share(config: PreTrainedConfig) -> float:
    """The share of its routed experts that a token goes through."""
    text = config.get_text_config()
    used, all_ = (next((n for name in names if (n := getattr(text, name, None))), None) for names in (EXPERTS_PER_TOKEN, EXPERTS))
    if used is None or all_ is None:
        raise UnknownSize(f"config.json of {text.model_type} does not tell how many experts there are and how many a token goes to")
    return used / all_
