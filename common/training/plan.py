"""What every rank derives from the config before it starts: specs, stores, the schedule, the packets' shape."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import config_reader
from common.config import Config
from common.config_reader import check_averaging
from common.data.packing import PackedRows, pack_rows
from common.data.rows import Row, RowLoader
from common.data.schedule import TRAIN, Assignment, Schedule
from common.data.store import TokenStore
from common.distributed.job import Job
from common.distributed.packet import PacketShape
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.registry import FAMILIES, resolve_spec
from common.objective.blocks import default_anchors
from common.objective.losses import LOSSES
from common.target.files import TargetSpec, read_spec, resolve
from common.target.stages import Stage, cut, layer_costs, make_stages
from common.training.optim import check_warmup


@dataclass(frozen=True)
class RunPlan:
    """Everything about a run that is the same on all ranks."""

    config: Config
    folder: Path
    target: TargetSpec
    drafter: DrafterSpec
    rows: RowLoader
    heldout: RowLoader | None
    schedule: Schedule
    shape: PacketShape
    anchors: int
    stages: tuple[Stage, ...]
    stages_even_in: str
    """In words, what the stages of a target were made even in."""

    def load_row(self, assignment: Assignment) -> tuple[int, int, Row]:
        """(epoch, row index, Row) of an assignment."""
        epoch, index = self.schedule.row_of(assignment)
        loader = self.rows if assignment.kind == TRAIN else self.heldout
        assert loader is not None, "only a run with held-out rows schedules validations"
        return epoch, index, loader.row(epoch, index)

    @property
    def stage_shapes(self) -> list[PacketShape]:
        """What each stage of a target gives out; the last one's is the packets'."""
        return [replace(self.shape, width=stage.hidden_states * self.target.hidden_size) for stage in self.stages]

    @property
    def run_folder(self) -> Path:
        """The run directory."""
        assert self.config.log.dir is not None, "config_reader.load gives every run a directory"
        return Path(self.config.log.dir)

    @property
    def row_documents(self) -> int:
        """Most documents that any row may hold."""
        return max(loader.packed().most_documents for loader in (self.rows, self.heldout) if loader is not None)

    @property
    def final_hidden(self) -> bool:
        return needs_final_hidden(self.config)

    @property
    def distils(self) -> bool:
        """Whether the target's distribution is computed at every slot."""
        return LOSSES[self.config.objective.loss].distils or own_teacher(self.config) == "all"

    def agreement(self) -> dict[str, Any]:
        """What all ranks must have in common, as a tree whose differing keys can be named."""
        data = {"path": self.rows.store.fingerprint, "validation": self.heldout.store.fingerprint if self.heldout else None}
        data |= self.rows.store.packed_with
        return config_reader.to_dict(self.config) | {
            "data fingerprint": data,
            "target fingerprint": self.target.fingerprint,
            "release": {"torch": torch.__version__},
        }


def own_teacher(config: Config) -> str:
    """What of the target's distribution the family's own loss compares with: nothing, the candidates, or all."""
    return FAMILIES[config.drafter.family].teaches if config.objective.teacher else "nothing"


def needs_final_hidden(config: Config) -> bool:
    """Whether the loss compares with the target's own distribution."""
    return LOSSES[config.objective.loss].distils or own_teacher(config) != "nothing"


def make_plan(config: Config, job: Job) -> RunPlan:
    """Open target, stores and schedule. Raises: UserError for whatever does not fit together."""
    folder = job.first_per_host(lambda: resolve(config.target.path, config.target.revision))
    target = read_spec(folder, config.target.trust_remote_code)
    if needs_final_hidden(config) and config.drafter.zero_features:
        raise UserError(
            f"drafter.zero_features=true takes the target's hidden states away, but the loss (drafter.family={config.drafter.family}, "
            f"objective.loss={config.objective.loss}) compares with them; write objective.loss=ce objective.teacher=false, or drop it"
        )
    FAMILIES[config.drafter.family].check_objective(config.objective)
    rows = _open_rows(config, config.data.path, folder, target)
    heldout = _open_heldout(config, rows.store, folder, target)
    if heldout:
        check_averaging(config, job.drafters, "validation.every")
    used_ids = np.concatenate([loader.store.used_ids for loader in (rows, heldout) if loader is not None])
    drafter = resolve_spec(config.drafter, target, folder, used_ids)
    validation_rows = min(heldout.count(), config.validation.rows or heldout.count()) if heldout else 0
    schedule = Schedule(
        rows.count,
        job.drafters,
        config.optim.accumulate,
        config.optim.steps,
        config.optim.epochs,
        validation_rows,
        config.validation.every,
    )
    check_warmup(config.optim, schedule.steps)
    stages, even_in = _cut_target(config, folder, target, drafter)
    width = stages[-1].hidden_states * target.hidden_size
    shape = PacketShape(config.data.pack_tokens, width, getattr(torch, config.target.dtype))
    anchors = config.objective.anchors or default_anchors(config.data.pack_tokens, drafter.block_size)
    return RunPlan(config, folder, target, drafter, rows, heldout, schedule, shape, anchors, stages, even_in)


def _cut_target(config: Config, folder: Path, target: TargetSpec, drafter: DrafterSpec) -> tuple[tuple[Stage, ...], str]:
    """The target's stages, and what they were made even in. Raises: UserError where it has fewer layers."""
    chosen, final_hidden = config.target, needs_final_hidden(config)
    layers = target.layers if final_hidden else max(drafter.taps) + 1
    if chosen.stages == 1:
        return make_stages(drafter.taps, final_hidden, [layers]), "nothing"
    costs, even_in = layer_costs(folder, layers, chosen.balance, chosen.trust_remote_code)
    return make_stages(drafter.taps, final_hidden, cut(costs, chosen.stages)), even_in


def _heldout_path(config: Config, store: TokenStore) -> str | None:
    """The folder of the held-out rows. Raises: UserError if the one beside the data was not held out of them."""
    if config.validation.path != "auto":
        return config.validation.path
    path = config.data.path.rstrip("/") + "-heldout"
    if not Path(path).is_dir():
        return None
    if "heldout" in store.meta and TokenStore.open(path).fingerprint != store.meta["heldout"]:  # stores of earlier versions do not know
        raise UserError(
            f"validation.path=auto: {path} is not what was held out of {config.data.path} when that was packed, so its conversations may "
            f"be trained on; pack again with --heldout, or write validation.path={path} if you know better, or validation.path=null"
        )
    return path


def _open_heldout(config: Config, store: TokenStore, folder: Path, target: TargetSpec) -> RowLoader | None:
    """The held-out rows, if there are any. Raises: UserError that says where the store comes from, which a preset may have named."""
    path = _heldout_path(config, store)
    if not path:
        return None
    try:
        return _open_rows(config, path, folder, target)
    except UserError as error:
        raise UserError(
            f"validation.path={path}: {error}; or write validation.path=auto for the store beside data.path "
            f"({config.data.path.rstrip('/')}-heldout, if it is there), or validation.path=null for none"
        ) from None


def _open_rows(config: Config, path: str, folder: Path, target: TargetSpec) -> RowLoader:
    store = TokenStore.open(path)
    store.check_target(folder, target.vocab_size)
    data = config.data

    def pack(epoch: int) -> PackedRows:
        return pack_rows(store.lengths, data.pack_tokens, data.max_document_tokens, data.long_documents, config.seed, epoch)

    rows = RowLoader(store, pack)
    if not rows.count():
        limit = data.max_document_tokens or data.pack_tokens
        raise UserError(
            f"data.long_documents=drop leaves none of the {len(store):,} documents of {path}: all have more than {limit} tokens, the "
            f"shortest {min(store.lengths, default=0)}; write "
            "data.long_documents=truncate, or raise data.max_document_tokens or data.pack_tokens"
        )
    return rows
