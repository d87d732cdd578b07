"""Which tensors of a target's layers do what a drafter's do, seen on a miniature of its family instead of guessed by name.

A norm's role is what reads it: attention or the MLP. Families that norm what their sublayers give out, or rotate pairs of neighbours,
have the same names with other roles.

Legend: D hidden size.
"""

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.target.adapters import decoder_layers, decoder_of, miniature, relative_distance, through_model
from common.target.files import Tensors
from common.target.vocabulary import PLAIN

INPUT, BEFORE_MLP, LAST = "input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"
"""What a drafter calls the norms before its attention, before its MLP and behind its layers."""
MLP_PART = re.compile(r"(gate|up|experts|fc1|fc_in|h_to_4h|w1)")
FUSED = {"q": ("qkv_proj", 0), "k": ("qkv_proj", 1), "v": ("qkv_proj", 2), "gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1)}
"""By a projection's name, the name of the one that may hold it, and its place there."""


@dataclass(frozen=True)
class Source:
    """Rows of a target's tensor, and what to add to them: families that scale by 1 + weight store norms around zero."""

    tensor: str
    rows: slice
    offset: float

    def load(self, tensors: Tensors) -> Tensor:
        """The weights as a drafter has them."""
        return tensors.load(self.tensor)[self.rows] + self.offset


class Roles:
    """Finds the source of a drafter's parameter in the files of a target."""

    def __init__(self, folder: str | Path, trust_remote_code: bool = False):
        self.tensors = Tensors(folder)
        self.norms = norms(Path(folder), trust_remote_code)

    def source(self, part: str, layer: int, shapes: dict[str, tuple[int, ...]]) -> Source | None:
        """Where a part of a drafter's layer comes from in a target's layer; `shapes` are those of all of the layer's parts.

        `part` is a name without its layer, as the drafter has it. None where nothing in the target has its role and shape.
        """
        if part.endswith("norm.weight"):
            if part not in self.norms:
                return None
            name, offset = self.norms[part]
            return self._fitting(name if part == LAST else f"layers.{layer}.{name}", shapes[part], slice(None), offset)
        if re.search(r"\.[qk]_proj\.", part) and "rotates neighbours" in self.norms:
            return None
        if (whole := self._fitting(f"layers.{layer}.{part}", shapes[part], slice(None), 0.0)) is not None:
            return whole
        named = re.fullmatch(r"(.*)\.(\w+)_proj\.(\w+)", part)
        if named is None or named[2] not in FUSED:
            return None
        sublayer, projection, kind = named.groups()
        fused, place = FUSED[projection]
        heights = [shapes[f"{sublayer}.{name}_proj.{kind}"][0] for name in FUSED if FUSED[name][0] == fused]
        begin = sum(heights[:place])
        shape = (sum(heights), *shapes[part][1:])
        return self._fitting(f"layers.{layer}.{sublayer}.{fused}.{kind}", shape, slice(begin, begin + heights[place]), 0.0)

    def _fitting(self, name: str, shape: tuple[int, ...], rows: slice, offset: float) -> Source | None:
        known = re.compile(rf"((language_)?model\.)*{re.escape(name)}")
        found = next((n for n in self.tensors.names() if known.fullmatch(n)), None)
        if found is None or self.tensors.shape(found) != shape or self.tensors.dtype(found) not in PLAIN:
            return None
        return Source(found, rows, offset)


@functools.lru_cache(8)
@torch.no_grad()
def norms(folder: Path, trust_remote_code: bool) -> dict[str, tuple[str, float]]:
    """By a drafter's name, the target's norm of that role and its offset: only RMS norms, which the drafter's are.

    `rotates neighbours` is among the names if the family's rotary embedding turns neighbouring channels instead of the two halves.
    """
    model = miniature(folder, trust_remote_code)
    decoder = decoder_of(model)
    layer, calls = decoder_layers(decoder)[0], list[tuple[str, Any, Any]]()
    hooks = [
        child.register_forward_hook(
            lambda _, inputs, kwargs, output, name=name: calls.append((name, (*inputs, *kwargs.values()), output)), with_kwargs=True
        )
        for name, child in layer.named_children()
    ]
    through_model(model, torch.arange(8))
    for hook in hooks:
        hook.remove()
    found: dict[str, tuple[str, float]] = {}
    for name, _, output in calls:
        if (offset := _rms_offset(getattr(layer, name))) is None:
            continue
        readers = [getattr(layer, reader) for reader, inputs, _ in calls if reader != name and any(given is output for given in inputs)]
        for reader in readers:
            role = BEFORE_MLP if any(MLP_PART.search(part) for part, _ in reader.named_parameters()) else INPUT
            found[role] = f"{name}.weight", offset
    for path, module in layer.named_modules():
        if path.endswith(("q_norm", "k_norm")) and (offset := _rms_offset(module)) is not None:
            found[f"{path}.weight"] = f"{path}.weight", offset
    if (offset := _rms_offset(getattr(decoder, "norm", nn.Identity()))) is not None:
        found[LAST] = LAST, offset
    rotate = getattr(sys.modules[type(layer).__module__], "rotate_half", None)
    if rotate is not None and rotate(torch.arange(4.0)).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        found = {name: norm for name, norm in found.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
        found["rotates neighbours"] = "", 0.0
    return found


def _rms_offset(module: nn.Module) -> float | None:
    """What a module adds to its weight where it is an RMS norm: 0 or 1; None where it is something else."""
    weights = dict(module.named_parameters())
    if list(weights) != ["weight"] or weights["weight"].dim() != 1:
        return None
    weight = weights["weight"]
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)) + 1.0
    kept = weight.clone()
    for offset in (0.0, 1.0):
        weight.fill_(2.0 - offset)
        expected = 2.0 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        fits = relative_distance(module(x), expected) < 1e-2
        weight.copy_(kept)
        if fits:
            return offset
    return None
