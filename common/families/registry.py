"""The families of drafters there are, by the name that `drafter.family` takes. A family is added by an entry here."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from common.config import DrafterConfig
from common.drafter.check import Report
from common.drafter.mask_token import mask_token
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.dflash import DFlash
from common.families.family import DrafterFamily
from common.target.files import TargetSpec, read_json

FAMILIES: dict[str, DrafterFamily] = {family.name: family for family in (DFlash(),)}


def family_options() -> dict[str, type | None]:
    """What `config_reader` needs to know of the families: the dataclass of settings that each has of its own."""
    return {name: family.options for name, family in FAMILIES.items()}


def family_of(folder: str | Path) -> DrafterFamily:
    """The family of an exported drafter, by its config.json's architectures; where they name none that is known it is read as DFlash."""
    architectures = read_json(Path(folder) / "config.json").get("architectures") or []
    return next((f for f in FAMILIES.values() if f.architecture in architectures), FAMILIES["dflash"])


def load_exported(folder: str | Path) -> tuple[DrafterSpec, dict[str, torch.Tensor]]:
    """Spec and state dict of an exported drafter. Raises: UserError if the folder holds none that is known."""
    return family_of(folder).load(folder)


def check(folder: str | Path, target: TargetSpec) -> Report:
    """Look at an exported drafter as the engines that would load it do. Raises: UserError if the folder is no drafter at all."""
    return family_of(folder).check(folder, target)


def resolve_spec(config: DrafterConfig, target: TargetSpec, folder: str | Path, used_ids: Iterable[int] = ()) -> DrafterSpec:
    """The drafter that the `drafter` section describes for a target whose files lie in `folder`.

    `used_ids` are token ids that occur in the data; the mask token must not be one of them.
    Raises: UserError for taps, mask tokens or dimensions that do not fit the target.
    """
    if config.init in ("random", "target_layers"):
        return DrafterSpec.resolve(config, target, folder, used_ids)
    return _continued(config, load_exported(config.init)[0], target, folder, used_ids)


def _continued(config: DrafterConfig, spec: DrafterSpec, target: TargetSpec, folder: str | Path, used_ids: Iterable[int]) -> DrafterSpec:
    """The spec of an exported drafter that training goes on from; what the config names must agree with it."""
    asked = {name: getattr(config, name) for name in ("layers", "intermediate_size", "heads", "kv_heads", "head_dim", "window")}
    asked |= {"taps": None if config.taps == "auto" else tuple(config.taps)}
    asked |= {"layer_types": config.layer_types and tuple(config.layer_types)}
    for name, value in asked.items():
        if value is not None and value != getattr(spec, name):
            raise UserError(f"drafter.{name}={value} but the drafter in drafter.init={config.init} has {getattr(spec, name)}; write that")
    wanted = spec.mask_token_id if config.mask_token == "auto" else config.mask_token
    spec = dataclasses.replace(spec, block_size=config.block_size, mask_token_id=mask_token(wanted, target, folder, used_ids))
    spec.validate(target)
    return spec
