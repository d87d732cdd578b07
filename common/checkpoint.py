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
import shutil
import socket
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from common.config import UserError, differences, digest

MARKER = "state.json"
VERSION = 1
MAX_STATE_BYTES = 1 << 24
CHUNK_BYTES = 1 << 24
LOCK_WAIT_S = 5.0
PROBE_WAIT_S = 10.0
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}

STEERING = ("optim.steps", "optim.epochs", "optim.max_skipped", "topology.", "link.", "checkpoint.", "validation.", "log.")
"""Keys that steer the run but not what a step learns; those ending in a dot stand for their whole section."""


class CheckpointError(Exception):
    """A checkpoint or export could not be written or read; training goes on and the previous one stays valid."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker was read and whose files have the sizes it names."""

    path: Path
    step: int
    config: dict
    state: dict
    files: dict

    def tensors(self, name):
        """The tensors of one file, on the CPU.

        Raises: CheckpointError if the file is not part of the checkpoint or is not safetensors.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.path} has no {name}; it holds {', '.join(sorted(self.files))}")
        try:
            return safetensors.torch.load_file(self.path / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error

    def verify(self):
        """Compare every file's checksum with the marker's; raises CheckpointError."""
        for name, (_, checksum) in self.files.items():
            try:
                found = _checksum(self.path / name)
            except OSError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
            if found != checksum:
                raise CheckpointError(f"{self.path / name} has checksum {found:08x}, its {MARKER} says {checksum:08x}")


class RunDirectory:
    """`runs/<name>`: every path of a run and every change to them.

    All drafters may read, and write parts of a checkpoint; only the first drafter calls `lock`, `commit`, `publish_export`,
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
            _remove(leftover)

    def unlock(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_probe(self, token):
        """Leave `token`, which all ranks know, for the other drafters to find."""
        _write_atomically(self.path / ".probe", token)

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
        _write_atomically(self.path / "config.yaml", text)

    def stop_requested(self):
        return self.stop_file.exists()

    def clear_stop(self):
        self.stop_file.unlink(missing_ok=True)

    def begin(self, step):
        """The hidden folder into which every drafter writes its parts of the checkpoint of `step`."""
        folder = self.checkpoints / f".{_step_name(step)}"
        with _io_errors(f"{folder} cannot be created"):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_part(self, step, name, tensors):
        """Write one safetensors file of the checkpoint of `step`, and its sidecar.

        Raises: CheckpointError; the part is then absent, and `commit` refuses the checkpoint.
        """
        path = self.begin(step) / name
        with _io_errors(f"{path} cannot be written"):
            try:
                size, checksum = _write_safetensors(path, tensors)
                _write_atomically(_sidecar(path), json.dumps({"bytes": size, "crc32": checksum}))
            except BaseException:
                _remove(path)
                raise

    def commit(self, step, names, config, state):
        """Make the parts `names` the checkpoint of `step`; every drafter has returned from `write_part` before.

        Raises: CheckpointError; the parts are then gone and the previous checkpoint is what it was.
        """
        folder, final = self.begin(step), self.checkpoints / _step_name(step)
        try:
            with _io_errors(f"{final} cannot be written"):
                files = {name: _read_sidecar(folder / name) for name in names}
                for path in set(folder.iterdir()) - {folder / name for name in names}:
                    _remove(path)
                marker = {"version": VERSION, "step": step, "files": files, "state": state, "config": config}
                _write_atomically(folder / MARKER, json.dumps(marker | {"digest": digest(marker)}, indent=1))
                _replace_folder(folder, final)
        except BaseException:
            _remove(folder)
            raise

    def publish_export(self, step, write):
        """Let `write(folder)` fill a hidden folder, then make it `export/step_N` and point `export/latest` at it.

        Raises: CheckpointError on an I/O error; the previous export is then still the latest.
        """
        folder, final = self.exports / f".{_step_name(step)}", self.exports / _step_name(step)
        try:
            with _io_errors(f"{final} cannot be written"):
                _remove(folder)
                folder.mkdir(parents=True)
                write(folder)
                for path in folder.iterdir():
                    _sync(path)
                _replace_folder(folder, final)
                self._point_latest(final.name)
        except BaseException:
            _remove(folder)
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
        _write_atomically(self.path / ".launch", _launch())
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
        """Remove all but the newest `keep` checkpoints and exports and, if asked, those with the best `walk_tau` in their state."""
        taus, valid = {}, []
        folders = _step_folders(self.checkpoints)
        for folder in folders:
            with contextlib.suppress(CheckpointError):
                tau = open_checkpoint(folder).state.get("walk_tau")
                valid.append(folder.name)
                if isinstance(tau, (int, float)) and math.isfinite(tau):
                    taus[folder.name] = tau
        best = {max(taus, key=taus.get)} if keep_best and taus else set()
        doomed = [
            folder for folder in folders if valid and _step_of(folder) < _step_of(Path(valid[-1])) and folder.name not in valid[-keep:]
        ]
        for folder in doomed + _step_folders(self.exports)[:-keep]:
            if folder.name not in best:
                _remove(folder)

    def rewind_log(self, step):
        """Drop the records after `step` (and a torn last line) from metrics.jsonl: the steps are run again and logged again."""
        kept = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.metrics.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
            _write_atomically(self.metrics, "".join(kept))

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
                    _remove(aside)
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


def open_checkpoint(folder):
    """Read a checkpoint's marker and compare the files' sizes with it. The marker is not trusted: nothing is allocated by what it says.

    Raises: CheckpointError.
    """
    folder = Path(folder)
    try:
        with open(folder / MARKER, "rb") as file:
            text = file.read(MAX_STATE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{folder} has no readable {MARKER}: {error.strerror}") from error
    try:
        checkpoint = _parse_marker(folder, text)
        sizes = {name: os.path.getsize(folder / name) for name in checkpoint.files}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MARKER} is damaged: {type(error).__name__} {error}") from error
    except OSError as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error
    for name, (expected, _) in checkpoint.files.items():
        if sizes[name] != expected:
            raise CheckpointError(f"{folder / name} has {sizes[name]} bytes, its {MARKER} says {expected}")
    return checkpoint


def compare_configs(saved, current, allow_changes=()):
    """Refuse a resume whose config would change what is learnt; returns a sentence for each change that is taken over.

    Raises: UserError with old and new values.
    """
    notes, refused = [], []
    for key, (old, new) in differences(saved, current).items():
        change = f"{key} was {old!r}, is {new!r}"
        if key in allow_changes or any(key == steer or (steer.endswith(".") and key.startswith(steer)) for steer in STEERING):
            notes.append(change)
        else:
            refused.append((key, change))
    if refused:
        keys = ",".join(key for key, _ in refused)
        raise UserError(
            f"the checkpoint was trained with another config: {'; '.join(change for _, change in refused)}. Restore the old values, "
            f"or allow the change with checkpoint.allow_changes=[{keys}], or start elsewhere with log.dir=DIR"
        )
    return notes


def _parse_marker(folder, text):
    if len(text) > MAX_STATE_BYTES:
        raise ValueError(f"it is longer than {MAX_STATE_BYTES} bytes")
    marker = json.loads(text)
    if marker["version"] != VERSION:
        raise ValueError(f"version {marker['version']!r}, this code reads {VERSION}")
    step, config, state = marker["step"], marker["config"], marker["state"]
    if marker.pop("digest") != digest(marker):
        raise ValueError("it changed after it was written")
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise ValueError(f"step {step!r}")
    if not isinstance(config, dict) or not isinstance(state, dict) or not marker["files"]:
        raise ValueError("config, state and files must be objects")
    files = {}
    for name, entry in marker["files"].items():
        size, checksum = entry["bytes"], entry["crc32"]
        if not re.fullmatch(r"[a-z0-9_]+\.safetensors", name) or type(size) is not int or type(checksum) is not int:
            raise ValueError(f"file entry {name!r}: {entry!r}"[:200])
        files[name] = (size, checksum)
    return Checkpoint(folder, step, config, state, files)


def _write_safetensors(path, tensors):
    """Write tensors in the safetensors format, one at a time, and sync; returns size and checksum of the file.

    Written here because the library's `save_file` holds a host copy of all tensors and would have to be read again for the checksum.
    Source: https://github.com/huggingface/safetensors#format
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size = checksum = 0
    with open(path, "wb") as file:
        for data in (len(text).to_bytes(8, "little"), text, *_raw(tensors)):
            file.write(data)
            checksum = zlib.crc32(data, checksum)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return size, checksum


def _raw(tensors):
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(path):
    checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(data, checksum)
    return checksum


def _sidecar(path):
    return path.with_suffix(".sum")


def _read_sidecar(path):
    try:
        return json.loads(_sidecar(path).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} of {path.parent} was not written; the drafter that writes it says why") from None


@contextlib.contextmanager
def _io_errors(what):
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{what}: {error}") from error


def _write_atomically(path, text):
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync(path.parent)


def _replace_folder(folder, final):
    """Rename `folder` to `final`; an older `final` is out of the way before and gone after."""
    _sync(folder)
    old = final.with_name(f".{final.name}.old")
    _remove(old)
    if final.exists():
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    _remove(old)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path):
    """Remove a file or folder as far as it goes; of a checkpoint the marker goes first."""
    with contextlib.suppress(OSError):
        (path / MARKER).unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _step_name(step):
    return f"step_{step:08d}"


def _step_of(folder):
    return int(folder.name.removeprefix("step_"))


def _step_folders(parent):
    """The `step_N` folders of a directory in the order of their steps."""
    folders = [path for path in parent.glob("step_*") if re.fullmatch(r"step_\d{8,15}", path.name)]
    return sorted(folders, key=_step_of)
