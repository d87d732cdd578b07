"""How a run opens: its directory is taken, the checkpoint that it goes on from is chosen and compared, and every rank is told.

All of it comes before any model is loaded, so that a mistake, or a run that is finished already, costs seconds.
"""

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from common import config_reader
from common.config import OptimConfig
from common.distributed.job import Job
from common.distributed.layout import DRAFTER
from common.errors import UserError
from common.families.registry import FAMILIES
from common.training.checkpoint import Checkpoint, CheckpointError, compare_configs
from common.training.costs import on_meta
from common.training.disk import going_on
from common.training.learner import export_drafter
from common.training.optim import moment_elements, schedule
from common.training.plan import RunPlan
from common.training.run_directory import RunDirectory

NOTE = "start"
"""The key of the note that the main drafter leaves for all ranks: where the run starts, or why it does not."""
WEIGHTS = "drafter.safetensors"
RATE_TOLERANCE = 0.02
"""Share of the peak learning rate by which a resume may change the next step's without a word."""


def optimizer_file(drafter: int) -> str:
    """The name of the file that holds one drafter's moments."""
    return f"optim_drafter{drafter}.safetensors"


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
    return {"data.path": plan.rows.store.fingerprint, "target.path": plan.target.fingerprint} | {
        f"data.path ({what})": found for what, found in plan.rows.store.packed_with.items()
    }


def _decide(plan: RunPlan, job: Job, directory: RunDirectory) -> dict[str, Any]:
    """Lock, choose, compare; then, and not for a finished run, change the directory. Returns the note. Raises: UserError."""
    directory.lock()
    point = directory.resume_point(plan.config.checkpoint.resume, job.contexts[0].restarted)
    checkpoint = point.checkpoint
    step, probe = (0 if checkpoint is None else checkpoint.step), f"{time.time_ns():x}"
    if checkpoint is not None:
        notes = _compare(plan, job.drafters, checkpoint)
        notes += _rate_change(plan, job.drafters, checkpoint, directory)
        print("\n".join([f"resuming from {checkpoint.path} (step {step})", *notes]), flush=True)
    finished = step >= plan.schedule.steps
    if not finished:
        directory.prepare(point)
        directory.write_probe(probe)
    if checkpoint is not None:
        _make_up_export(plan, directory, checkpoint, finished)
    if finished:
        print(
            f"{directory.path} is finished (step {step} of {plan.schedule.steps}): nothing to do; name a new log.dir=DIR, "
            f"{_longer(plan.config.optim, plan.schedule.steps, directory)}, or start over with checkpoint.resume=never",
            flush=True,
        )
    return {"step": step, "checkpoint": None if checkpoint is None else str(checkpoint.path), "probe": probe}


def _make_up_export(plan: RunPlan, directory: RunDirectory, checkpoint: Checkpoint, finished: bool) -> None:
    """Write what the last job died before: the checkpoint's export, or the link to it. Raises: UserError if no later step would do it."""
    with going_on(f"no export of step {checkpoint.step}"):
        if not directory.has_export(checkpoint.step):
            weights = checkpoint.tensors(WEIGHTS)
            directory.save_export(checkpoint.step, lambda folder: export_drafter(plan, weights, folder))
        directory.mend_latest()
        return
    if finished:
        raise UserError(
            f"{directory.path} is trained to its last step, but its drafter {directory.exports}/latest could not be written (the warning "
            "above says why); make room or mend the directory, and start the same command again"
        )


def _compare(plan: RunPlan, drafters: int, checkpoint: Checkpoint) -> list[str]:
    """Refuse a checkpoint that this run may not go on from; returns a sentence for each change that is taken over. Raises: UserError."""
    allowed = plan.config.checkpoint.allow_changes
    notes = compare_configs(checkpoint.config, config_reader.to_dict(plan.config), allowed)
    for key, found in fingerprints(plan).items():
        saved, path = checkpoint.state["inputs"].get(key, found), key.partition(" ")[0]  # earlier releases did not save all of them
        if saved != found and path not in allowed:
            raise UserError(
                f"{key}: its content changed since {checkpoint.path} was written (fingerprint {saved}, now {found}); restore it, "
                f"allow it with checkpoint.allow_changes=[{path}], or start elsewhere with log.dir=DIR"
            )
    if (old := checkpoint.state["drafters"]) != drafters:
        changes = "weights go on from the average, rows are scheduled anew, moments are shared out"
        notes.append(f"{old} drafters were, {drafters} are: {changes}")
    _check_shapes(plan, checkpoint)
    return notes


def _check_shapes(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are not this drafter's and its optimiser's, whatever changes are allowed. Raises: UserError."""
    mine = {name: tuple(p.shape) for name, p in on_meta(plan.drafter).named_parameters() if p.requires_grad}
    try:
        theirs, state = checkpoint.shapes(WEIGHTS), checkpoint.shapes(optimizer_file(0))
    except CheckpointError as error:
        raise UserError(f"{error}; restore it, or name another checkpoint with checkpoint.resume=FOLDER") from None
    elements = moment_elements(mine, plan.config.optim, FAMILIES[plan.drafter.family].is_matrix)
    mine |= {name: (count,) for name, count in zip(("exp_avg", "exp_avg_sq"), elements, strict=True)}
    theirs |= {name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        shown = "; ".join(f"{name} is {theirs.get(name, 'absent')} there, {mine.get(name, 'absent')} here" for name in wrong[:3])
        raise UserError(
            f"{checkpoint.path} does not fit this drafter or its optimiser: {shown}{'; ...' if wrong[3:] else ''}. Restore "
            "the old values of drafter.* and optim.name, or start elsewhere with log.dir=DIR (drafter.init=FOLDER begins at an export)"
        )


def _rate_change(plan: RunPlan, drafters: int, checkpoint: Checkpoint, directory: RunDirectory) -> list[str]:
    """A sentence if the next step's learning rate is another than before the config changed, and what would have none of it."""
    step, new = checkpoint.step, plan.config.optim
    saved = config_reader.with_defaults(checkpoint.config, config_reader.to_dict(plan.config))["optim"]
    old, known = OptimConfig(**saved), checkpoint.state.get("steps")
    if known is None and checkpoint.state["drafters"] == drafters:  # a checkpoint of an earlier release does not know
        known = old.steps or max(1, round(old.epochs * plan.schedule.steps_per_epoch))
    if known is None or step >= plan.schedule.steps:
        return []
    last, was = old.lr * schedule(old, known, step), old.lr * schedule(old, known, step + 1)
    now = new.lr * schedule(new, plan.schedule.steps, step + 1)
    if abs(now - was) <= RATE_TOLERANCE * max(old.lr, new.lr):
        return []
    return [
        f"WARNING: the learning rate goes from {last:.2g} at step {step} to {now:.2g} at step {step + 1}: it was to fall to step {known}, "
        f"the run now has {plan.schedule.steps} steps. What was learnt as it fell may be lost; instead, {_longer(old, known, directory)}"
    ]


def _longer(config: OptimConfig, steps: int, directory: RunDirectory) -> str:
    """How a run is trained for longer: without a jump of the learning rate, where its schedule lets it fall."""
    if config.schedule == "constant":
        return "raise optim.steps"
    afresh = f"train on with a fresh warm-up and decay (drafter.init={directory.exports}/latest log.dir=DIR)"
    stable = [step for step in directory.checkpoint_steps() if schedule(config, steps, step + 1) == 1.0]
    if config.schedule == "wsd" and stable:
        return f"raise optim.steps from before the decay (checkpoint.resume={directory.checkpoints}/step_{stable[-1]:08d}), or {afresh}"
    return afresh
