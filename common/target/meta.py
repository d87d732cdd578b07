"""How large a target is, read off the model that transformers builds on the meta device: shapes of all parameters, and no memory.

So mixtures of experts, odd widths and families to come are counted as they are, and no formula has to know them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from common.target.adapters import auto_class, decoder_layers, decoder_of, set_layers

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


def target_size(folder: Path, layers: int | None, trust_remote_code: bool = False) -> TargetSize:
    """The size of a target that stops after its first `layers` layers (None: all of them), with its embedding and without its head.

    Raises: UnknownSize for a family that cannot be built on the meta device, or whose experts' use its config does not tell.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        decoder = decoder_of(model)
        set_layers(decoder, decoder_layers(decoder)[:layers])
    except Exception as error:  # the code of any family runs here
        raise UnknownSize(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    held = sum(p.numel() for p in decoder.parameters())
    layers_kept = decoder_layers(decoder)
    active = sum(p.numel() for p in layers_kept.parameters())
    experts = sum(p.numel() for name, p in layers_kept.named_parameters() if "experts" in name.split("."))
    if experts:
        active -= round(experts * (1 - _used_share(config)))
    return TargetSize(held, active)


def _used_share(config: PreTrainedConfig) -> float:
    """The share of its routed experts that a token goes through."""
    text = config.get_text_config()
    used, all_ = (next((n for name in names if (n := getattr(text, name, None))), None) for names in (EXPERTS_PER_TOKEN, EXPERTS))
    if used is None or all_ is None:
        raise UnknownSize(f"config.json of {text.model_type} does not tell how many experts there are and how many a token goes to")
    return used / all_
