"""Writing so that a crash leaves the old or the new, never a half: temporary name, fsync, rename."""

import contextlib
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import safetensors

from common.errors import UserError
from common.training.checkpoint import MARKER, CheckpointError


@contextlib.contextmanager
def io_errors(what: str) -> Generator[None, None, None]:
    """Turn what the disk or the file format raises into a CheckpointError that says what was being done."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{what}: {error}") from error


@contextlib.contextmanager
def must_write(folder: Path) -> Generator[None, None, None]:
    """Turn what the disk raises before anything was learnt into a UserError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"log.dir={folder} cannot be written: {error.strerror}; make room there, or name another directory with log.dir=DIR"
        ) from None


@contextlib.contextmanager
def going_on(what: str) -> Generator[None, None, None]:
    """A disk that fails costs this checkpoint or export, not the run: the CheckpointError becomes a warning."""
    try:
        yield
    except CheckpointError as error:
        print(f"WARNING: {what}: {error}. Training goes on; the previous one stays valid.", file=sys.stderr, flush=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file: its readers find the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise
    sync(path.parent)


def replace_folder(folder: Path, final: Path) -> None:
    """Rename `folder` to `final`; an older `final` is out of the way before and gone after."""
    sync(folder)
    old = final.with_name(f".{final.name}.old")
    remove(old)
    if final.exists():
        final.rename(old)
    folder.rename(final)
    sync(final.parent)
    remove(old)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, lie on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, folder or link as far as it goes, of a checkpoint the marker first; what a link leads to stays as it is."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            (path / MARKER).unlink()
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_whole(folder: Path) -> None:
    """Remove a checkpoint or export by way of a hidden name, which the next start clears away if this process does not come to it."""
    hidden = folder.with_name(f".{folder.name}.old")
    with contextlib.suppress(OSError):
        remove(hidden)
        folder.rename(hidden)
    remove(hidden)
