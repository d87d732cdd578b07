"""What a drafter family is, and what all families have in common.

A family is one file beside this one. It may add modules to the backbone, terms to the loss, a way of proposing tokens, keys to the
exported form and settings to the `drafter` section; whatever it leaves alone is plain DFlash.

Legend: A anchors, J predicted slots, D hidden, T tokens of a row, F width of the target's features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.config import ObjectiveConfig
from common.config_reader import build
from common.drafter.backbone import Drafter
from common.drafter.check import Report, config_errors, engine_notes, shape_errors
from common.drafter.export import exported_config, exported_tensors, fuse, read_spec, split, unscaled, write_exported
from common.drafter.folder import read_config
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.objective.acceptance import Children
from common.objective.block_loss import Result
from common.objective.blocks import Blocks
from common.target.files import TargetSpec
from common.target.vocabulary import Vocabulary


@dataclass(frozen=True)
class Drafted:
    """What the loss and the proposals of blocks are made from, while training as while decoding.

    Shapes: hidden_AJD [A, J, D], the predicted slots behind the drafter's last norm; anchors_A int64 [A], the tokens before them;
    features_TF [T, F], the target's features; before_A int64 [A], the row of them just before each anchor, -1 where there is none.
    """

    hidden_AJD: Tensor
    anchors_A: Tensor
    features_TF: Tensor
    before_A: Tensor


Conditionals = Callable[[int, Tensor], Tensor]
"""(a predicted slot, the tokens before it, int64 [A]) -> the slot's logits [A, V], -inf for tokens that are never proposed."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Proposer(ABC):
    """Chooses a block's tokens from the hidden states of its slots. Chains, trees and the replay of held-out conversations all go
    through it, so that what is measured while training is what will be served.
    """

    plain: "Proposer | None" = None
    """The same drafter's proposals without what its family adds to the head, where it adds anything: to see what that brings."""

    @abstractmethod
    def chain(self, drafted: Drafted) -> Tensor:
        """The greedy proposal of every block: int64 [A, J]."""

    @abstractmethod
    def children(self, drafted: Drafted, width: int) -> list[Children]:
        """For every block a function from a tree's node to the `width` best tokens that may follow it.

        What it gives for the best token of each slot, from the anchor on, must be the chain.
        """

    @abstractmethod
    def conditionals(self, drafted: Drafted) -> Conditionals:
        """What the tokens of a block are sampled from, slot after slot; the most probable ones are the chain. Not for whole packets."""


class DrafterFamily(ABC):
    """One kind of drafter: plain DFlash in everything that it does not override.

    `name` is what `drafter.family` takes, `architecture` what an exported config.json names, and `options` the dataclass of the settings
    that only this family has: they are read as further keys of the `drafter` section and kept in `DrafterSpec.options`.
    """

    name: str
    architecture: str
    options: type | None = None
    sample_from_anchor: bool = False
    """Whether a block's first slot, which holds the anchor's token, predicts the token after it."""
    method: str = "dflash"
    """How vLLM calls this way of speculative decoding."""
    teaches: Literal["nothing", "candidates", "all"] = "nothing"
    """What of the target's own distribution its loss compares with, where `objective.teacher` allows it."""

    def modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        """Modules beside the backbone's, by the name under which their tensors are trained and exported; `kind` is dtype and device."""
        return {}

    def layer_modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        """Modules of one layer, by their names in it: `attention_conv` and `mlp_conv` are called around its sublayers (`Around`)."""
        return {}

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter is a matrix that rows are multiplied by: Muon orthogonalises it, weight decay shrinks it.

        Vectors are none, nor are tables of vectors (AdamW moves them, and nothing decays).
        """
        return len(shape) > 1

    def rows_of_block(self, name: str, shape: tuple[int, ...], spec: DrafterSpec) -> int:
        """How many rows of a block are multiplied by a parameter, for the count of useful arithmetic."""
        return spec.block_size if self.is_matrix(name, shape) else 0

    def validate(self, spec: DrafterSpec) -> None:  # noqa: B027  (most families have nothing to refuse)
        """Refuse settings of this family that do not fit the drafter. Raises: UserError."""

    def check_target(self, target: TargetSpec) -> None:  # noqa: B027
        """Refuse targets that engines cannot serve with this family. Raises: UserError."""

    def check_objective(self, config: ObjectiveConfig) -> None:  # noqa: B027
        """Refuse an objective that this family does not train by. Raises: UserError."""

    def first_values(self, name: str, value: Tensor, spec: DrafterSpec, generator: torch.Generator) -> None:
        """Fill `value`, on the CPU, with what the parameter `name` of a drafter from scratch starts with.

        Matrices are drawn with the standard deviation of the target's own, norms start as ones and biases as zeros.
        """
        if value.dim() > 1:
            value.normal_(0.0, spec.initializer_range, generator=generator)
        else:
            value.fill_(0.0 if name.endswith(".bias") else 1.0)

    @abstractmethod
    def loss(
        self,
        drafter: Drafter,
        drafted: Drafted,
        vocabulary: Vocabulary,
        blocks: Blocks,
        config: ObjectiveConfig,
        final_hidden_TD: Tensor | None,
        progress: float,
    ) -> Result:
        """The loss of all blocks of a packet, and how well the family's own proposals do.

        `progress` is the share of all steps that are done. `loss` and `nll` among the metrics are those of the head alone in every family,
        `tau` and `accuracy` those of its proposals; `tau_plain` is the head's where they differ.
        Shapes: final_hidden_TD [T, D], the target's hidden states after its norm, where the loss needs them.
        """

    def block_sizes(self, spec: DrafterSpec) -> range:
        """The sizes of blocks that a trained drafter can be served with: a token and its masked slot up to what it was trained on."""
        return range(2, spec.block_size + 1)

    @abstractmethod
    def proposer(self, drafter: Drafter, vocabulary: Vocabulary) -> Proposer:
        """How this drafter's tokens are proposed; it follows the drafter's weights while they are trained."""

    def export_config(self, spec: DrafterSpec, target: TargetSpec, dtype: str, feature_dtype: str) -> dict[str, Any]:
        """config.json of the exported form; `dtype` and `feature_dtype` are the names of the weights' and the features' type."""
        return exported_config(spec, target, self.architecture, dtype, feature_dtype)

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `options` that an exported config.json records, by name. Raises: KeyError where one is missing."""
        return {}

    def build(self, spec: DrafterSpec, dtype: torch.dtype, device: torch.device | str, checkpointing: bool = False) -> Drafter:
        """The drafter with all its modules, weights not yet set."""
        drafter = Drafter(spec, dtype, device, checkpointing)
        for name, module in self.modules(spec, dtype=dtype, device=device).items():
            drafter.add_module(name, module)
        for layer in drafter.layers:
            for name, module in self.layer_modules(spec, dtype=dtype, device=device).items():
                layer.add_module(name, module)
        return drafter

    def exported_shapes(self, spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
        """{key: shape} of the exported form: the exact key set that the engines' loaders expect."""
        parts = split(spec, self.build(spec, torch.bfloat16, "meta").state_dict())
        return {name: tuple(tensor.shape) for name, tensor in parts.items()}

    def read_config(self, folder: str | Path) -> dict[str, Any]:
        """config.json of an exported drafter of this family, as `export_config` writes it. Raises: UserError if there is none."""
        return read_config(folder)

    def read_spec(self, folder: str | Path) -> DrafterSpec:
        """The DrafterSpec of an exported drafter of this family. Settings that it does not record have their defaults.

        Raises: UserError if config.json lacks a field, or if the drafter has a vocabulary of its own.
        """
        config = self.read_config(folder)
        try:
            options = None if self.options is None else build(self.options, self.read_options(config), f"{folder}/config.json: ")
        except KeyError as missing:
            raise UserError(f"{folder}/config.json lacks {missing}: this is no exported {self.name} drafter") from None
        return read_spec(folder, config, self.name, options, self.sample_from_anchor)

    def load(self, folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
        """Spec and state dict of an exported drafter of this family, ours or another trainer's.

        Raises: UserError if it has a vocabulary of its own, or tensors other than the exported form's.
        """
        spec = self.read_spec(folder)
        names, tensors = exported_tensors(folder)
        found = {key: tensors.shape(name) for key, name in names.items()}
        if errors := shape_errors(self.exported_shapes(spec), found):
            raise UserError(f"{folder} does not hold a drafter of its config.json: {'; '.join(errors[:4])}")
        return spec, fuse(spec, {key: tensors.load(name) for key, name in names.items()})

    def check(self, folder: str | Path, target: TargetSpec) -> Report:
        """Look at an exported drafter as the engines that would load it for this target do.

        Raises: UserError only if the folder is no drafter at all.
        """
        config, spec = self.read_config(folder), self.read_spec(folder)
        names, tensors = exported_tensors(folder)
        errors = shape_errors(self.exported_shapes(spec), {name: tensors.shape(name) for name in names.values()})
        return Report(errors + config_errors(config, spec, target, self.architecture), engine_notes(config, spec, target))

    def export(
        self,
        folder: str | Path,
        tensors: Mapping[str, Tensor],
        spec: DrafterSpec,
        target: TargetSpec,
        dtype: str,
        feature_dtype: str,
        known: Mapping[str, Any] = NOTHING,
    ) -> Path:
        """Write the exported form of a drafter's tensors ({parameter name: tensor}), checked, whole or not at all.

        `target` is the target it must serve; `dtype` the weights' and `feature_dtype` the features' type, as names; `known` is what else
        the config shall say of the training, at top level.
        Raises: UserError if what would be written is not loader-ready.
        """
        spec, tensors = unscaled(spec, tensors)
        config, parts = self.export_config(spec, target, dtype, feature_dtype) | dict(known), split(spec, tensors)
        return write_exported(folder, config, parts, getattr(torch, dtype), lambda written: self.check(written, target).errors)


def check_plain_logits(family: str, target: TargetSpec) -> None:
    """Refuse targets whose logits are scaled or capped: engines compute this family's scores from the plain product with the head.

    Raises: UserError.
    """
    rules = target.vocabulary
    if rules.logit_scale != 1.0 or rules.logit_softcap is not None:
        raise UserError(
            f"drafter.family={family}: the target's logits are scaled by {rules.logit_scale} and capped at {rules.logit_softcap}, which "
            "engines leave out of this family's scores; use drafter.family=dflash"
        )
