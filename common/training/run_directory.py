"""The run directory: who may write it, checkpoints that are whole or absent, exports, and where a run resumes.

A checkpoint is written as parts into a hidden folder that all drafters share. Each drafter writes its own part with a sidecar that
holds its size and checksum; after a barrier the first drafter writes state.json, the marker, from the sidecars and renames the
folder. So a crash at any point leaves the previous checkpoint valid and at most a hidden folder to clear away.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socket
import time
from pathlib import Path

from common.errors import UserError
from common.training.checkpoint import MARKER, VERSION, CheckpointError, open_checkpoint, read_sidecar, sidecar, write_safetensors
from common.training.disk import io_errors, remove, replace_folder, sync, write_atomically
from common.trees import digest

LOCK_WAIT_S = 5.0
PROBE_WAIT_S = 10.0


class RunDirectory:
    """`runs/<name>`: every path of a run and every change to them.

    All drafters may read, and write parts of a checkpoint; only the first drafter calls `lock`, `commit`, `save_export`,
    `retain`, `resume_point` and `rewind_log`. `say` takes the messages a user must see.
    """

    def __init__(self, path, say=print):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.exports = self.path / "export"
        self.tensorboard = self.path / "tensorboard"
        self.metrics = self.path / "metrics.jsonl"
        self.stop_file = self.path / "STOP"
        self._say = say
        self._lock = None

    def lock(self):
        """Create the directory, take it for this job, and clear away what an interrupted job left half-written.

        The kernel drops the lock with the process, so a killed job never blocks its successor.
        Raises: UserError naming the job that holds it, or why the directory cannot be written.
        """
        try:
            for folder in (self.checkpoints, self.exports, self.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (held until unlock)
        except OSError as error:
            raise UserError(f"log.dir={self.path} cannot be written: {error.strerror}; name another with log.dir=DIR") from None
        deadline = time.monotonic() + LOCK_WAIT_S  # a killed predecessor may still be tearing down its device
        while not self._try_lock():
            if time.monotonic() > deadline:
                holder = self._holder()
                self.unlock()
                raise UserError(
                    f"log.dir={self.path} is in use by another job ({holder}); "
                    f"stop that one (touch {self.stop_file}) or name another directory with log.dir=DIR"
                )
            time.sleep(0.1)
        self._lock.truncate(0)
        self._lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}))
        self._lock.flush()
        for leftover in [*self.checkpoints.glob(".*"), *self.exports.glob(".*")]:
            remove(leftover)

    def unlock(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_probe(self, token):
        """Leave `token`, which all ranks know, for the other drafters to find."""
        write_atomically(self.path / ".probe", token)

    def check_probe(self, token):
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

    def write_config(self, text):
        write_atomically(self.path / "config.yaml", text)

    def stop_requested(self):
        return self.stop_file.exists()

    def clear_stop(self):
        self.stop_file.unlink(missing_ok=True)

    def begin(self, step):
        """The hidden folder into which every drafter writes its parts of the checkpoint of `step`."""
        folder = self.checkpoints / f".{_step_name(step)}"
        with io_errors(f"{folder} cannot be created"):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_part(self, step, name, tensors):
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

    def commit(self, step, names, config, state):
        """Make the parts `names` the checkpoint of `step`; every drafter has returned from `write_part` before.

        Raises: CheckpointError; the parts are then gone and the previous checkpoint is what it was.
        """
        folder, final = self.begin(step), self.checkpoints / _step_name(step)
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

    def save_export(self, step, write):
        """Let `write(folder)` fill a hidden folder, then make it `export/step_N` and point `export/latest` at it.

        Raises: CheckpointError on an I/O error; the previous export is then still the latest.
        """
        folder, final = self.exports / f".{_step_name(step)}", self.exports / _step_name(step)
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

    def has_export(self, step):
        return (self.exports / _step_name(step)).exists()

    def resume_point(self, resume="auto", restarted=False):
        """The checkpoint a run goes on from, or None for a new run.

        `resume` is `auto` (the newest valid one), `never`, or a checkpoint folder. A job that its launcher restarted goes on from
        its own newest checkpoint whatever `resume` says, unless it died before it had chosen: then the newest is another job's.
        Where a run goes back, its later checkpoints and exports are set aside.
        Raises: UserError if the named folder is no valid checkpoint.
        """
        again = restarted and self._last_launch() == _launch()
        checkpoint = (self.newest_valid() if again else None) or self._choose(resume)
        write_atomically(self.path / ".launch", _launch())
        return checkpoint

    def _choose(self, resume):
        if resume == "auto":
            return self.newest_valid()
        checkpoint = None
        if resume != "never":
            try:
                checkpoint = open_checkpoint(resume)
                checkpoint.verify()
            except CheckpointError as error:
                raise UserError(f"checkpoint.resume={resume}: {error}; name a folder such as {self.checkpoints}/step_00000500") from None
        own = checkpoint is not None and checkpoint.path.resolve().parent == self.checkpoints.resolve()
        self._set_aside_after(checkpoint.step if own else -1)
        return checkpoint

    def newest_valid(self):
        """The newest checkpoint whose sizes and checksums hold; invalid ones are reported and passed over."""
        for folder in reversed(_step_folders(self.checkpoints)):
            try:
                checkpoint = open_checkpoint(folder)
                checkpoint.verify()
                return checkpoint
            except CheckpointError as error:
                self._say(f"checkpoint passed over: {error}")
        return None

    def retain(self, keep, keep_best):
        """Remove all but the newest `keep` checkpoints and exports and, if asked, those with the best `heldout_tau` in their state."""
        taus, valid = {}, []
        folders = _step_folders(self.checkpoints)
        for folder in folders:
            with contextlib.suppress(CheckpointError):
                tau = open_checkpoint(folder).state.get("heldout_tau")
                valid.append(folder.name)
                if isinstance(tau, (int, float)) and math.isfinite(tau):
                    taus[folder.name] = tau
        best = {max(taus, key=taus.get)} if keep_best and taus else set()
        doomed = [
            folder for folder in folders if valid and _step_of(folder) < _step_of(Path(valid[-1])) and folder.name not in valid[-keep:]
        ]
        for folder in doomed + _step_folders(self.exports)[:-keep]:
            if folder.name not in best:
                remove(folder)

    def rewind_log(self, step):
        """Drop the records after `step` (and a torn last line) from metrics.jsonl: the steps are run again and logged again."""
        kept = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.metrics.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
            write_atomically(self.metrics, "".join(kept))

    def _try_lock(self):
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            self._say(f"{self.path}: this file system has no locks ({error.strerror}); make sure that no second job uses the directory")
        return True

    def _holder(self):
        self._lock.seek(0)
        try:
            holder = json.loads(self._lock.read(4096))
            return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):
            return "which has not said who it is"

    def _last_launch(self):
        with contextlib.suppress(OSError):
            return (self.path / ".launch").read_text()

    def _set_aside_after(self, step):
        for parent in (self.checkpoints, self.exports):
            for folder in _step_folders(parent):
                if _step_of(folder) > step:
                    aside = parent / f"abandoned_{folder.name}"
                    remove(aside)
                    folder.rename(aside)
                    self._say(f"{folder} set aside as {aside.name}; remove it when you like")
        remaining = _step_folders(self.exports)
        (self.exports / "latest").unlink(missing_ok=True)
        if remaining:
            self._point_latest(remaining[-1].name)

    def _point_latest(self, name):
        link = self.exports / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        os.replace(link, self.exports / "latest")


def _launch():
    """What a launch and its restarts have in common: Slurm's job, else the process that starts the ranks."""
    return os.environ.get("SLURM_JOB_ID") or f"{socket.gethostname()}/{os.getppid()}"


def _step_name(step):
    return f"step_{step:08d}"


def _step_of(folder):
    return int(folder.name.removeprefix("step_"))


def _step_folders(parent):
    """The `step_N` folders of a directory in the order of their steps."""
    folders = [path for path in parent.glob("step_*") if re.fullmatch(r"step_\d{8,15}", path.name)]
    return sorted(folders, key=_step_of)
