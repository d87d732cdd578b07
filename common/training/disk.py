"""Writing so that a crash leaves the old or the new, never a half: temporary name, fsync, rename."""

import contextlib
import os
import shutil

import safetensors.torch

from common.training.checkpoint import MARKER, CheckpointError


@contextlib.contextmanager
def io_errors(what):
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{what}: {error}") from error


def write_atomically(path, text):
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def replace_folder(folder, final):
    """Rename `folder` to `final`; an older `final` is out of the way before and gone after."""
    sync(folder)
    old = final.with_name(f".{final.name}.old")
    remove(old)
    if final.exists():
        final.rename(old)
    folder.rename(final)
    sync(final.parent)
    remove(old)


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path):
    """Remove a file or folder as far as it goes; of a checkpoint the marker goes first."""
    with contextlib.suppress(OSError):
        (path / MARKER).unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
