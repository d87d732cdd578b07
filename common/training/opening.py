"""How a run opens: its directory is taken, the checkpoint that it goes on from is chosen and compared, and every rank is told.

All of it comes before any model is loaded, so that a mistake, or a run that is finished already, costs seconds.
"""

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from common import config_reader
from common.distributed.job import Job
from common.distributed.layout import DRAFTER
from common.errors import UserError
from common.training.checkpoint import Checkpoint, compare_configs
from common.training.disk import going_on
from common.training.learner import export_drafter
from common.training.plan import RunPlan
from common.training.run_directory import RunDirectory

NOTE = "start"
"""The key of the note that the main drafter leaves for all ranks: where the run starts, or why it does not."""
WEIGHTS = "drafter.safetensors"


@dataclass(frozen=True)
class Start:
    """What every rank knows before it loads anything: the completed steps, and whether any are left."""

    step: int
    finished: bool


@contextlib.contextmanager
def open_run(plan: RunPlan, job: Job) -> Generator[Start, None, None]:
    """Open the run on every rank: the main drafter decides where it starts and holds the run directory until the end.

    Raises: UserError on every rank, for a directory in use or a checkpoint of another config; then nothing on the disk has changed.
    """
    directory, context = RunDirectory(plan.run_folder), job.contexts[0]
    try:
        if job.is_main:
            try:
                note = _decide(plan, job, directory)
            except UserError as error:
                note = {"refused": str(error)}
            context.status.put(NOTE, note)
        note = context.status.wait(NOTE)
        if "refused" in note:
            raise UserError(note["refused"])
        finished = note["step"] >= plan.schedule.steps
        if not (job.is_main or finished) and context.role == DRAFTER:
            directory.check_probe(note["probe"])
        yield Start(note["step"], finished)
    finally:
        directory.unlock()


def fingerprints(plan: RunPlan) -> dict[str, str]:
    """What the config's paths led to, by key: the same path may hold other data tomorrow."""
    return {"data.path": plan.rows.store.fingerprint, "target.path": plan.target.fingerprint}


def _decide(plan: RunPlan, job: Job, directory: RunDirectory) -> dict[str, Any]:
    """Lock, choose, compare; then, and not for a finished run, change the directory. Returns the note. Raises: UserError."""
    directory.lock()
    point = directory.resume_point(plan.config.checkpoint.resume, job.contexts[0].restarted)
    checkpoint = point.checkpoint
    step, probe = (0 if checkpoint is None else checkpoint.step), f"{time.time_ns():x}"
    if checkpoint is not None:
        notes = _compare(plan, job.drafters, checkpoint)
        print("\n".join([f"resuming from {checkpoint.path} (step {step})", *notes]), flush=True)
    if step >= plan.schedule.steps:
        print(
            f"{directory.path} is finished (step {step} of {plan.schedule.steps}): nothing to do; name a new log.dir=DIR, "
            "raise optim.steps, or start over with checkpoint.resume=never",
            flush=True,
        )
    else:
        directory.prepare(point)
        directory.write_probe(probe)
    if checkpoint is not None and not directory.has_export(step):  # the last job died between checkpoint and export
        with going_on(f"no export of step {step}"):
            weights = checkpoint.tensors(WEIGHTS)
            directory.save_export(step, lambda folder: export_drafter(plan, weights, folder))
    return {"step": step, "checkpoint": None if checkpoint is None else str(checkpoint.path), "probe": probe}


def _compare(plan: RunPlan, drafters: int, checkpoint: Checkpoint) -> list[str]:
    """Refuse a checkpoint that this run may not go on from; returns a sentence for each change that is taken over. Raises: UserError."""
    allowed = plan.config.checkpoint.allow_changes
    notes = compare_configs(checkpoint.config, config_reader.to_dict(plan.config), allowed)
    for key, found in fingerprints(plan).items():
        saved = checkpoint.state["inputs"][key]
        if saved != found and key not in allowed:
            raise UserError(
                f"{key}: its content changed since {checkpoint.path} was written (fingerprint {saved}, now {found}); restore it, "
                f"allow it with checkpoint.allow_changes=[{key}], or start elsewhere with log.dir=DIR"
            )
    if (old := checkpoint.state["drafters"]) != drafters:
        changes = "weights go on from the average, rows are scheduled anew, moments are shared out"
        notes.append(f"{old} drafters were, {drafters} are: {changes}")
    return notes
