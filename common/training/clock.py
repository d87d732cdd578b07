"""Where a run's time goes: training, and apart from it validations and checkpoints; and how much of it is left."""

import contextlib
import time
from collections.abc import Generator

import torch

from common.data.schedule import Schedule

VALIDATION, CHECKPOINT = "validation", "checkpoint"
STOP_MARGIN, UNSEEN_S = 1.5, 20.0


class RunClock:
    """Measures laps of training without what happens beside it, and tells from both when the run ends."""

    def __init__(self, device: torch.device, schedule: Schedule, checkpoint_every: int):
        self._device, self._schedule, self._checkpoint_every = device, schedule, checkpoint_every
        self._durations_s: dict[str, list[float]] = {VALIDATION: [], CHECKPOINT: []}
        self._training_s, self._first_step = 0.0, 0
        self._first_record: tuple[int, float] | None = None  # its step and the seconds trained until then
        self.reset()

    def begin(self, step: int) -> None:
        """Begin the first lap, at so many completed steps."""
        self._first_step = step
        self.reset()

    def reset(self) -> None:
        """Begin a lap now."""
        self._lap_begin_s, self._apart_s = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def apart(self, what: str) -> Generator[None, None, None]:
        """Time a validation or a checkpoint, which then does not count as training."""
        begin_s = self._device_time_s()
        try:
            yield
        finally:
            seconds = self._device_time_s() - begin_s
            self._durations_s[what].append(seconds)
            self._apart_s += seconds

    def lap(self) -> tuple[float, float]:
        """Seconds of training, and all seconds, since the last lap; then begin another."""
        all_s = max(time.perf_counter() - self._lap_begin_s, 1e-9)
        training_s = max(all_s - self._apart_s, 1e-9)
        self._training_s += training_s
        self.reset()
        return training_s, all_s

    def left_s(self, step: int) -> float | None:
        """Seconds to the end of the run from a record at this step, before its checkpoint: steps, validations and checkpoints to come.

        A step is taken to last as those since the first record, which bore the start; until the second record there is no answer. What
        has not happened yet is taken to last no time.
        """
        if self._first_record is None:
            self._first_record = (step, self._training_s)
        first_step, first_s = self._first_record
        if step == first_step:
            return None
        steps, every = self._schedule.steps, self._schedule.validation_every
        step_s = (self._training_s - first_s) / (step - first_step)
        validations = _events(step, steps, every) if self._schedule.validation_rows else 0
        checkpoints = _events(step - 1, steps, self._checkpoint_every)
        return (steps - step) * step_s + validations * self._mean_s(VALIDATION) + checkpoints * self._mean_s(CHECKPOINT)

    def stop_s(self, step: int, interval: int) -> float:
        """Seconds that a wish to stop takes at most, at a record of this step: `interval` steps, a validation and a checkpoint.

        By the longest that were seen, and half as much again; a checkpoint of which none was seen is taken to last UNSEEN_S.
        """
        step_s = self._training_s / max(1, step - self._first_step)
        validation_s = max(self._durations_s[VALIDATION], default=0.0)
        return STOP_MARGIN * (interval * step_s + validation_s + max(self._durations_s[CHECKPOINT], default=UNSEEN_S))

    def _mean_s(self, what: str) -> float:
        durations_s = self._durations_s[what]
        return sum(durations_s) / len(durations_s) if durations_s else 0.0

    def _device_time_s(self) -> float:
        """The time when the device has done what was launched: the host may be a step ahead of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _events(after: int, last: int, every: int) -> int:
    """How often something that happens every so many steps, and at the last, happens after a step."""
    return last // every - after // every + (last % every > 0 and after < last)
