"""The run directory: who may write it, checkpoints that are whole or absent, exports, and where a run resumes.

A checkpoint is written as parts into a hidden folder that all drafters share. Each drafter writes its own part with a sidecar that
holds its size and checksum; after a barrier the first drafter writes state.json, the marker, from the sidecars and renames the
folder. So a crash at any point leaves the previous checkpoint valid and at most a hidden folder to clear away.
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from common.errors import UserError
from common.training.checkpoint import (
    MARKER,
    VERSION,
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    read_sidecar,
    sidecar,
    step_folders,
    step_name,
    step_of,
    write_safetensors,
)
from common.training.disk import io_errors, must_write, remove, remove_whole, replace_folder, sync, write_atomically
from common.training.lock import DirectoryLock
from common.trees import digest

PROBE_WAIT_S = 10.0
LEFTOVER = re.compile(r"\.{1,2}step_\d{8,15}(\.old|\.partial)?")
"""Names that an interrupted job of ours leaves behind; other hidden files are the user's."""


class ResumePoint(NamedTuple):
    """Where a run starts: at a checkpoint, or anew (None). Steps after `last_kept` are another future: set aside (None: nothing is)."""

    checkpoint: Checkpoint | None
    last_kept: int | None


class RunDirectory:
    """`runs/<name>`: every path of a run and every change to them.

    All drafters may read, and write parts of a checkpoint; all else only the first drafter does, who holds the lock. Nothing but the
    lock's file changes before `prepare`. `say` takes the messages that a user must see.
    """

    def __init__(self, path: str | Path, say: Callable[[str], None] = print):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.exports = self.path / "export"
        self.tensorboard = self.path / "tensorboard"
        self.metrics = self.path / "metrics.jsonl"
        self.stop_file = self.path / "STOP"
        self._say = say
        self._lock = DirectoryLock(self.path, say)

    def lock(self) -> None:
        """Take the directory for this job. Raises: UserError naming the job that holds it, or why it cannot be written."""
        self._lock.take()

    def unlock(self) -> None:
        """Give the directory back."""
        self._lock.drop()

    def prepare(self, point: ResumePoint) -> None:
        """Make the directory ready for a run from this point: what an interrupted job left half-written and an old STOP are cleared away,
        and what lies after the point is set aside.

        Raises: UserError if the directory cannot be written.
        """
        self.clear_stop()
        with must_write(self.path):
            for folder in (self.checkpoints, self.exports, self.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in [*self.checkpoints.glob(".*"), *self.exports.glob(".*")]:
                if LEFTOVER.fullmatch(leftover.name) or (leftover.name == ".latest" and leftover.is_symlink()):
                    remove(leftover)
            write_atomically(self.path / ".launch", _launch())
            if point.last_kept is not None:
                self._set_aside_after(point.last_kept)

    def write_probe(self, token: str) -> None:
        """Leave `token`, which all ranks know, for the other drafters to find. Raises: UserError if it cannot be written."""
        with must_write(self.path):
            write_atomically(self.path / ".probe", token)

    def check_probe(self, token: str) -> None:
        """Refuse a run directory that this drafter does not share with the first one; raises UserError."""
        deadline = time.monotonic() + PROBE_WAIT_S  # network file systems show a new file late
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if (self.path / ".probe").read_text() == token:
                    return
            time.sleep(0.1)
        raise UserError(
            f"log.dir={self.path} on {socket.gethostname()} is not the first drafter's directory; "
            "all drafters need one shared file system: name a shared folder with log.dir=DIR"
        )

    def write_config(self, text: str) -> None:
        """Write the resolved config for the user to read. Raises: UserError if it cannot be written."""
        with must_write(self.path):
            write_atomically(self.path / "config.yaml", text)

    def stop_requested(self) -> bool:
        """Whether the user has asked for a stop by the file STOP."""
        return self.stop_file.exists()

    def clear_stop(self) -> None:
        """Forget a request to stop, or the next start would end at once. Raises: UserError if it stays."""
        try:
            self.stop_file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.stop_file} cannot be removed ({error.strerror}) and would stop the next start: remove it") from None

    def begin(self, step: int) -> Path:
        """The hidden folder into which every drafter writes its parts of the checkpoint of `step`."""
        folder = self.checkpoints / f".{step_name(step)}"
        with io_errors(f"{folder} cannot be created"):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_part(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one safetensors file of the checkpoint of `step`, and its sidecar.

        Raises: CheckpointError; the part is then absent, and `commit` refuses the checkpoint.
        """
        path = self.begin(step) / name
        with io_errors(f"{path} cannot be written"):
            try:
                size, checksum = write_safetensors(path, tensors)
                write_atomically(sidecar(path), json.dumps({"bytes": size, "crc32": checksum}))
            except BaseException:
                remove(path)
                raise

    def commit(self, step: int, names: Iterable[str], config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Make the parts `names` the checkpoint of `step`; every drafter has returned from `write_part` before.

        Raises: CheckpointError; the parts are then gone and the previous checkpoint is what it was.
        """
        folder, final, names = self.begin(step), self.checkpoints / step_name(step), list(names)
        try:
            with io_errors(f"{final} cannot be written"):
                files = {name: read_sidecar(folder / name) for name in names}
                for path in set(folder.iterdir()) - {folder / name for name in names}:
                    remove(path)
                marker = {"version": VERSION, "step": step, "files": files, "state": state, "config": config}
                write_atomically(folder / MARKER, json.dumps(marker | {"digest": digest(marker)}, indent=1))
                replace_folder(folder, final)
        except BaseException:
            remove(folder)
            raise

    def save_export(self, step: int, write: Callable[[Path], object]) -> None:
        """Let `write(folder)` fill a hidden folder, then make it `export/step_N` and point `export/latest` at it.

        Raises: CheckpointError on an I/O error; the previous export is then still the latest.
        """
        folder, final = self.exports / f".{step_name(step)}", self.exports / step_name(step)
        try:
            with io_errors(f"{final} cannot be written"):
                remove(folder)
                folder.mkdir(parents=True)
                write(folder)
                for path in folder.iterdir():
                    sync(path)
                replace_folder(folder, final)
                self._point_latest(final.name)
        except BaseException:
            remove(folder)
            raise

    def has_export(self, step: int) -> bool:
        """Whether the drafter of this step was exported."""
        return (self.exports / step_name(step)).exists()

    def checkpoint_steps(self) -> list[int]:
        """The steps of all checkpoints that lie here, ascending; whether they can be read is not looked at."""
        return [step_of(folder) for folder in step_folders(self.checkpoints)]

    def has_checkpoint(self, step: int) -> bool:
        """Whether the checkpoint of this step is there."""
        return (self.checkpoints / step_name(step) / MARKER).exists()

    def mend_latest(self) -> None:
        """Let `export/latest` lead to the newest export, if the last job died between the two. Raises: CheckpointError."""
        if (exports := step_folders(self.exports)) and not self.latest_is(step_of(exports[-1])):
            with io_errors(f"{self.exports}/latest cannot be written"):
                self._point_latest(exports[-1].name)

    def latest_is(self, step: int) -> bool:
        """Whether `export/latest` leads to the export of this step."""
        return (self.exports / "latest").resolve() == (self.exports / step_name(step)).resolve()

    def resume_point(self, resume: str = "auto", restarted: bool = False) -> ResumePoint:
        """Where a run starts; nothing changes before `prepare`.

        `resume` is `auto` (the newest valid checkpoint), `never`, or a checkpoint folder. A job that its launcher restarted goes on from
        its own newest checkpoint whatever `resume` says, unless it died before it had chosen: then the newest is another job's.
        Raises: UserError if the named folder is no valid checkpoint.
        """
        again = restarted and self._last_launch() == _launch()
        newest = self.newest_valid() if again or resume == "auto" else None
        if newest is not None:
            passed_over = newest.path != step_folders(self.checkpoints)[-1]
            return ResumePoint(newest, newest.step if passed_over else None)
        if resume == "auto":
            return ResumePoint(None, None)
        if resume == "never":
            return ResumePoint(None, -1)
        try:
            checkpoint = open_checkpoint(resume)
            checkpoint.verify()
        except CheckpointError as error:
            raise UserError(f"checkpoint.resume={resume}: {error}; name a folder such as {self.checkpoints}/step_00000500") from None
        own = checkpoint.path.resolve().parent == self.checkpoints.resolve()
        return ResumePoint(checkpoint, checkpoint.step if own else -1)

    def newest_valid(self) -> Checkpoint | None:
        """The newest checkpoint whose sizes and checksums hold, None if there are no checkpoints; invalid ones are passed over with a word.

        Raises: UserError if there are checkpoints and none is valid: to start over would be to lose them.
        """
        problem = None
        for folder in reversed(step_folders(self.checkpoints)):
            try:
                checkpoint = open_checkpoint(folder)
                checkpoint.verify()
                return checkpoint
            except CheckpointError as error:
                problem = problem or error
                self._say(f"checkpoint passed over: {error}")
        if problem is not None:
            raise UserError(
                f"log.dir={self.path} holds checkpoints and none can be read ({problem}): restore them, name another log.dir=DIR, or start "
                "over with checkpoint.resume=never, which sets them aside"
            )
        return None

    def retain(self, keep: int, keep_best: bool) -> None:
        """Remove all but the newest `keep` checkpoints and exports and, if asked, those with the best `heldout_tau` in their state.

        What cannot be read is left alone: this release did not write it.
        """
        taus, valid = {}, []
        folders = step_folders(self.checkpoints)
        for folder in folders:
            with contextlib.suppress(CheckpointError):
                tau = open_checkpoint(folder).state.get("heldout_tau")
                valid.append(folder.name)
                if isinstance(tau, (int, float)) and math.isfinite(tau):
                    taus[folder.name] = tau
        best = {max(taus, key=lambda name: taus[name])} if keep_best and taus else set()
        unread = {folder.name for folder in folders} - set(valid)
        exports = [folder for folder in step_folders(self.exports) if folder.name not in unread]
        for folder in [folder for folder in folders if folder.name in valid[:-keep]] + exports[:-keep]:
            if folder.name not in best and not folder.is_symlink():
                remove_whole(folder)

    def rewind_log(self, step: int) -> None:
        """Drop the records after `step` (and a torn last line) from metrics.jsonl: the steps are run again and logged again.

        Raises: UserError if it cannot be written.
        """
        kept = []
        with must_write(self.path), contextlib.suppress(FileNotFoundError):
            for line in self.metrics.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
            write_atomically(self.metrics, "".join(kept))

    def _last_launch(self) -> str | None:
        with contextlib.suppress(OSError):
            return (self.path / ".launch").read_text()
        return None

    def _set_aside_after(self, step: int) -> None:
        for parent in (self.checkpoints, self.exports):
            for folder in step_folders(parent):
                if step_of(folder) > step:
                    self._set_aside(folder)
        if step < 0 and self.metrics.exists():
            self._set_aside(self.metrics)
        remaining = step_folders(self.exports)
        if remaining:
            self._point_latest(remaining[-1].name)
        elif (self.exports / "latest").is_symlink():
            (self.exports / "latest").unlink()

    def _set_aside(self, path: Path) -> None:
        """Rename what another run may still want; nothing that was set aside before is touched."""
        names = itertools.chain([f"abandoned_{path.name}"], (f"abandoned_{n}_{path.name}" for n in itertools.count(2)))
        aside = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
        path.rename(aside)
        self._say(f"{path} set aside as {aside.name}; remove it when you like")

    def _point_latest(self, name: str) -> None:
        if (self.exports / "latest").is_dir() and not (self.exports / "latest").is_symlink():
            self._set_aside(self.exports / "latest")  # a copy that followed the link: it would stay as it is for ever
        link = self.exports / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        os.replace(link, self.exports / "latest")


def _launch() -> str:
    """What a launch and its restarts have in common: Slurm's job, else the process that starts the ranks."""
    return os.environ.get("SLURM_JOB_ID") or f"{socket.gethostname()}/{os.getppid()}"
