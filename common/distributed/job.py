"""What the jobs of all modes share."""

import contextlib
import os

import torch

from common import compile_cache
from common.config_reader import check_averaging
from common.errors import UserError


class Job:
    """What all modes share. `status` is where workers leave notes for each other."""

    def __init__(self, config):
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        compile_cache.reset()  # they hold this job's models; the process, a notebook's, may run another

    def first_per_host(self, work):
        return work()

    def agree(self, tree):
        pass

    @property
    def drafters(self):
        return len(self.layout.drafters)

    def check(self):
        check_averaging(self.config, self.drafters, "checkpoint.every")


def was_restarted():
    """Whether the launcher started this job again after a death or a requeue."""
    return any(int(os.environ.get(name, 0)) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def on_device(device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def named_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is no device; write cpu or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def device_at(position):
    return torch.device("cuda", position) if torch.cuda.is_available() else torch.device("cpu")


def choose_device(position, ranks, config):
    """The device of the host's rank at `position`: CUDA devices in order, else the CPU."""
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
