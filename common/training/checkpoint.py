"""The format of a checkpoint: parts in the safetensors format with a size and a checksum each, and a marker that names them."""

import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from common.config_reader import with_defaults
from common.errors import UserError
from common.trees import differences, digest

MARKER = "state.json"
VERSION = 1
MAX_STATE_BYTES = 1 << 24
CHUNK_BYTES = 1 << 24
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
STEERING = (
    "target.stages",
    "target.balance",
    "optim.steps",
    "optim.epochs",
    "optim.max_skipped",
    "topology.",
    "link.",
    "checkpoint.",
    "validation.",
    "log.",
)
"""Keys that steer the run but not what a step learns; those ending in a dot stand for their whole section."""


class CheckpointError(Exception):
    """A checkpoint or export could not be written or read; training goes on and the previous one stays valid."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker was read and whose files have the sizes it names."""

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]
    """Size and checksum by name."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU.

        Raises: CheckpointError if the file is not part of the checkpoint or is not safetensors.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.path} has no {name}; it holds {', '.join(sorted(self.files))}")
        try:
            return safetensors.torch.load_file(self.path / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of one file's tensors, by name, from its header alone. Raises: CheckpointError."""
        try:
            with safetensors.safe_open(self.path / name, framework="pt") as file:
                return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error

    def verify(self) -> None:
        """Compare every file's checksum with the marker's; raises CheckpointError."""
        for name, (_, checksum) in self.files.items():
            try:
                found = _checksum(self.path / name)
            except OSError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
            if found != checksum:
                raise CheckpointError(f"{self.path / name} has checksum {found:08x}, its {MARKER} says {checksum:08x}")


def open_checkpoint(folder: str | Path) -> Checkpoint:
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


def compare_configs(saved: Mapping[str, Any], current: Mapping[str, Any], allow_changes: Collection[str] = ()) -> list[str]:
    """Refuse a resume whose config would change what is learnt; returns a sentence for each change that is taken over.

    Keys that the saved config does not have yet count as what the suite did when it was saved.

    Raises: UserError with old and new values.
    """
    notes, refused = [], []
    for key, (old, new) in differences(with_defaults(saved, current), current).items():
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


def _parse_marker(folder: Path, text: bytes) -> Checkpoint:
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


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
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


def _raw(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(data, checksum)
    return checksum


def sidecar(path: Path) -> Path:
    """The file beside a part that holds its size and checksum until the marker does."""
    return path.with_suffix(".sum")


def read_sidecar(path: Path) -> dict[str, int]:
    """Size and checksum of a part. Raises: CheckpointError if the part was not written."""
    try:
        return json.loads(sidecar(path).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} of {path.parent} was not written; the drafter that writes it says why") from None


def step_name(step: int) -> str:
    """The name of a step's checkpoint and of its export."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a folder of such a name."""
    return int(folder.name.removeprefix("step_"))


def step_folders(parent: Path) -> list[Path]:
    """The `step_N` folders of a directory in the order of their steps."""
    folders = [path for path in parent.glob("step_*") if re.fullmatch(r"step_\d{8,15}", path.name)]
    return sorted(folders, key=step_of)
