"""The families of drafters there are, by the name that `drafter.family` takes. A family is added by an entry here."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from common.config import DrafterConfig
from common.drafter.check import Report, architectures
from common.drafter.folder import read_config
from common.drafter.mask_token import mask_token
from common.drafter.rope import rope_kind
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.dflash import DFlash
from common.families.dflash2 import DFlash2
from common.families.dspark import DSpark
from common.families.family import DrafterFamily
from common.families.lilicorr import LiLiCorr
from common.target.files import TargetSpec

FAMILIES: dict[str, DrafterFamily] = {family.name: family for family in (DFlash(), DFlash2(), DSpark(), LiLiCorr())}

PLAIN = "dflash"
"""The family that any other may start from."""

FROM_SCRATCH = ("random", "target_layers")
"""Values of `drafter.init` that are no folder of an exported drafter."""


def family_options() -> dict[str, type | None]:
    """What `config_reader` needs to know of the families: the dataclass of settings that each has of its own."""
    return {name: family.options for name, family in FAMILIES.items()}


def family_of(folder: str | Path) -> DrafterFamily:
    """The family of an exported drafter, by its config.json's architectures; where they name none that is known it is read as DFlash."""
    named = architectures(read_config(folder))
    return next((f for f in FAMILIES.values() if f.architecture in named), FAMILIES[PLAIN])


def load_exported(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Spec and state dict of an exported drafter. Raises: UserError if the folder holds none that is known."""
    return family_of(folder).load(folder)


def check(folder: str | Path, target: TargetSpec) -> Report:
    """Look at an exported drafter as the engines that would load it do. Raises: UserError if the folder is no drafter at all."""
    return family_of(folder).check(folder, target)


def resolve_spec(config: DrafterConfig, target: TargetSpec, folder: str | Path, used_ids: Iterable[int] = ()) -> DrafterSpec:
    """The drafter that the `drafter` section describes for a target whose files lie in `folder`.

    `used_ids` are token ids that occur in the data; the mask token must not be one of them.
    Raises: UserError for taps, mask tokens or dimensions that do not fit the target, or the drafter that `drafter.init` names.
    """
    if config.init in FROM_SCRATCH:
        spec = DrafterSpec.resolve(config, target, folder, used_ids)
        spec = dataclasses.replace(spec, sample_from_anchor=FAMILIES[config.family].sample_from_anchor)
    else:
        spec = _continued(config, target, folder, used_ids)
    FAMILIES[config.family].validate(spec)
    FAMILIES[config.family].check_target(target)
    return spec


def _continued(config: DrafterConfig, target: TargetSpec, folder: str | Path, used_ids: Iterable[int]) -> DrafterSpec:
    """The spec of an exported drafter that training goes on from; what the config names must agree with it.

    A plain DFlash may start a drafter of any family, whose own part is then as from scratch.
    """
    family = family_of(config.init)
    spec = family.read_spec(config.init)
    found = dataclasses.asdict(spec) | ({"family": config.family} if family.name == PLAIN else {})
    asked = {name: getattr(config, name) for name in ("family", "layers", "intermediate_size", "heads", "kv_heads", "head_dim", "window")}
    asked |= {"taps": None if config.taps == "auto" else tuple(config.taps)}
    asked |= {"layer_types": config.layer_types and tuple(config.layer_types)}
    if family.name == config.family:
        recorded = family.read_options(family.read_config(config.init))
        found, asked = found | recorded, asked | {name: getattr(config.options, name) for name in recorded}
    for name, value in asked.items():
        if value is not None and value != found[name]:
            raise UserError(f"drafter.{name}={value} but the drafter in drafter.init={config.init} has {found[name]}; write that")
    if config.rope == "own" and spec.rope_scaling is not None:
        kind = rope_kind(spec.rope_scaling)
        raise UserError(f"drafter.rope=own but the drafter in drafter.init={config.init} has {kind} rope scaling; write drafter.rope=auto")
    token = mask_token(spec.mask_token_id if config.mask_token == "auto" else config.mask_token, target, folder, used_ids)
    spec = dataclasses.replace(
        spec,
        family=config.family,
        options=config.options,
        sample_from_anchor=FAMILIES[config.family].sample_from_anchor,
        block_size=config.block_size,
        mask_token_id=token,
        target_layers=target.layers if spec.target_layers is None else spec.target_layers,
    )
    spec.validate(target)
    return spec
