"""What every benchmark shares: the ceiling it is compared with, the clock, and the form of its answer."""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from common.errors import UserError


class Times(NamedTuple):
    """Of the calls that were timed."""

    median_ms: float
    min_ms: float
    max_ms: float


def timed(function: Callable[[], object], device: torch.device, warmup: int = 3, repeats: int = 10) -> Times:
    """Run `function` and time each of `repeats` calls.

    On CUDA by the device's own clock and without waiting in between, as training runs: the host is ahead, or its delay counts.
    """
    for _ in range(warmup):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
        for mark in marks[:-1]:
            mark.record()
            function()
        marks[-1].record()
        marks[-1].synchronize()
        times_ms = [start.elapsed_time(end) for start, end in itertools.pairwise(marks[1:])]  # in the first the device still waits
    else:
        times_ms = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            function()
            times_ms.append(1e3 * (time.perf_counter() - start_s))
    return Times(statistics.median(times_ms), min(times_ms), max(times_ms))


def ceiling_tflops(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Rate of a size-cubed product of random matrices, the most that a step made of products could reach here."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return tflops(2 * size**3, timed(lambda: one @ other, device))


def sustained_tflops(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192, seconds: float = 2.0) -> float:
    """The ceiling's product again, after `seconds` of nothing else: what the chip's power limit leaves of it for as long as it takes."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    once_s = timed(lambda: one @ other, device).median_ms / 1e3
    return tflops(2 * size**3, timed(lambda: one @ other, device, warmup=int(seconds / once_s), repeats=50))


def copy_bytes_per_s(device: torch.device, size_bytes: int = 2**31) -> float:
    """Rate of a copy on the device (bytes read plus bytes written), the most that an elementwise pass could reach here."""
    one, other = (torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size_bytes / timed(lambda: one.copy_(other), device).median_ms * 1e3


def tflops(flop: float, times: Times) -> float:
    """The rate at which the median call did that work."""
    return flop / times.median_ms / 1e9


def peak_gib(function: Callable[[], object], device: torch.device) -> float:
    """Most memory allocated while `function` runs, what was there before included; 0 on CPU."""
    if device.type != "cuda":
        function()
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def report(device: torch.device, **case: Any) -> None:
    """Print one case as a JSON line, with the device and the versions it was measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in case.items()}
    print(json.dumps(rounded | {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}), flush=True)


def device_of(tiny: bool) -> torch.device:
    """The CPU for a tiny run, else the GPU that the numbers are about. Raises: UserError if there is none."""
    if not (tiny or torch.cuda.is_available()):
        raise UserError("this benchmark measures a GPU and finds none; use --tiny to see it run on the CPU")
    return torch.device("cpu" if tiny else "cuda")
