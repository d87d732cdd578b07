"""Which device a worker runs on."""

import contextlib

import torch

from common.config import Config
from common.errors import UserError


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make a CUDA device the calling thread's current one; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def named_device(name: str) -> torch.device:
    """The device of a name in the config. Raises: UserError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is no device; write cpu or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def device_at(position: int) -> torch.device:
    """The device that the host's rank at `position` will presumably have, to be shown."""
    return torch.device("cuda", position) if torch.cuda.is_available() else torch.device("cpu")


def choose_device(position: int, ranks: int, config: Config) -> torch.device:
    """The device of the host's rank at `position`: CUDA devices in order, else the CPU.

    Raises: UserError where `ranks` are too many for the host's devices, or NCCL is asked for and there are none.
    """
    if not torch.cuda.is_available():
        if config.link.backend == "nccl":
            raise UserError("link.backend=nccl needs CUDA devices, this host has none; use link.backend=auto")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if position >= count and config.link.backend != "staged":
        raise UserError(
            f"{ranks} ranks on a host with {count} CUDA devices: start {count} ranks, or link.backend=staged to share devices (for tests)"
        )
    return torch.device("cuda", position % count)
