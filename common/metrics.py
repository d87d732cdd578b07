"""Metrics stay (sum, count) on the device until they are written; then one record goes to console, TensorBoard and metrics.jsonl."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]
"""(sum, count) by name; a tensor's count has its shape."""


class Sums(Protocol):
    """What adds up tensors over all drafters."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum, in place."""
        ...


class Meters:
    """(sum, count) accumulators, one pair per name, on the device; nothing waits for the device before `drain`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        """Add {name: (sum, count)}; both are tensors of one shape, or numbers. What is not finite is not counted."""
        for name, pair in metrics.items():
            both = torch.stack([self._tensor(x) for x in pair])
            both = torch.where(torch.isfinite(both).all(0), both, 0.0)
            if name in self._totals:
                self._totals[name] += both
            else:
                self._totals[name] = both.clone()

    def _tensor(self, value: Tensor | float) -> Tensor:
        if isinstance(value, torch.Tensor):
            return value.double()
        return torch.full((), value, dtype=torch.float64, device=self._device)  # a fill: copying a number to CUDA would wait

    def state_tensors(self) -> dict[str, Tensor]:
        """What has been counted since the last record, so that a resumed run writes the same one."""
        return {f"meter/{name}": total for name, total in self._totals.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_tensors` gave, out of all tensors of a checkpoint's file."""
        self._totals = {
            name.removeprefix("meter/"): tensor.to(self._device) for name, tensor in tensors.items() if name.startswith("meter/")
        }

    def drain(self, comm: Sums) -> dict[str, Any]:
        """Sum over all drafters, start anew, and return {name: mean} (a list for vectors); None where nothing was counted."""
        names = sorted(self._totals)
        if not names:
            return {}
        flat = comm.sum_(torch.cat([self._totals[name].flatten() for name in names]).cpu())
        values, at = {}, 0
        for name in names:
            shape = self._totals[name].shape
            sums, counts = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
            means = [
                total / count if count > 0 else None
                for total, count in zip(sums.flatten().tolist(), counts.flatten().tolist(), strict=True)
            ]
            values[name] = means if len(shape) > 1 else means[0]
            self._totals[name].zero_()
        return values


class Faults:
    """Features and steps that were not finite: noted on the device, read when a record is written, so that no step waits.

    Legend: T tokens of a row, S sources of features (the taps, and the final hidden state where it travels), D hidden.
    """

    def __init__(self, sources: Sequence[str], device: torch.device):
        self._sources = sources
        self._packets_S = torch.full((len(sources),), -1, device=device)  # the last bad packet of each source
        self._skipped = torch.zeros(2, dtype=torch.int64, device=device)  # steps since the last reading, and the last of them

    def packet(self, number: int, features_TF: Tensor) -> None:
        """Note which sources of a packet are not finite."""
        sums_S = features_TF.view(len(features_TF), len(self._sources), -1).sum((0, 2), dtype=torch.float32)
        self._packets_S = torch.where(torch.isfinite(sums_S), self._packets_S, number)

    def step(self, step: int, skipped: Tensor) -> None:
        """Note a step, and whether it was skipped (bool, 0-d on the device)."""
        count, last = self._skipped
        self._skipped = torch.stack([count + skipped, torch.where(skipped, step, last)])

    def read(self) -> tuple[int, int, dict[str, int]]:
        """(skipped steps since the last reading, the last of them, {source: its last bad packet})."""
        *packets, count, last = torch.cat([self._packets_S, self._skipped]).tolist()
        self._packets_S.fill_(-1)
        self._skipped[0] = 0
        return count, last, {source: packet for source, packet in zip(self._sources, packets, strict=True) if packet >= 0}


class DeviceClock:
    """Adds up the time between entering and leaving it, on the device: on CUDA read from events once they have passed, without waiting."""

    def __init__(self, device: torch.device):
        self._cuda, self._seconds = device.type == "cuda", 0.0
        self._pending: deque[tuple[Any, Any]] = deque()

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._pending.append((self._start, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_seconds(self) -> float:
        """Seconds since the last call, as far as the device has got."""
        while self._pending and (not self._cuda or self._pending[0][1].query()):
            start, end = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        seconds, self._seconds = self._seconds, 0.0
        return seconds
