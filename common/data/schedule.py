"""Who reads which row when: a pure function of the config's numbers and the rows, which every rank computes for itself."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from common.data.rows import EMPTY_ROW
from common.errors import UserError

TRAIN, VALIDATE = 0, 1
PATIENCE_EPOCHS = 100
"""Epochs in a row that may fill no step before the data are said to be too few."""


class Assignment(NamedTuple):
    """Where a packet belongs in the run: its optimiser step (from 1), its number among its kind, and the drafter it goes to."""

    kind: int
    step: int
    number: int
    drafter: int


def serving_target(assignment: Assignment, drafter_in_group: int, group_drafters: int, group_targets: int, drafters: int) -> int:
    """Which of its exchange group's targets computes a packet: the group's packets go round them in turn.

    `drafter_in_group` is the assignment's drafter counted within its group; `drafters` counts all groups'.
    """
    return (assignment.number // drafters * group_drafters + drafter_in_group) % group_targets


class Schedule:
    """Who gets which row when, so that every rank computes the same and nobody negotiates.

    At micro-step u drafter d of D consumes packet u*D + d. Packets are numbered over all epochs; an epoch has the rows that
    `rows(epoch)` counts, in order, and its trailing round of fewer than D x accumulate rows is dropped. `epochs` counts by the first
    epoch's steps. `validation_every` steps, and after the last, all validation rows are scheduled the same way.

    Raises: UserError when the rows do not fill one step.
    """

    def __init__(
        self,
        rows: Callable[[int], int],
        drafters: int,
        accumulate: int,
        steps: int | None = None,
        epochs: float = 1.0,
        validation_rows: int = 0,
        validation_every: int = 1,
    ):
        self.drafters, self.accumulate, self.step_packets = drafters, accumulate, drafters * accumulate
        self.steps_per_epoch, self.dropped_rows = divmod(rows(0), self.step_packets)  # of the first epoch
        self.validation_rows, self.validation_every = validation_rows, validation_every
        if not self.steps_per_epoch:
            raise UserError(
                f"the data fill {rows(0)} rows, one step takes {drafters} drafters x optim.accumulate={accumulate} = {self.step_packets}; "
                "use more data, a smaller data.pack_tokens or fewer drafters"
            )
        self.steps = steps if steps is not None else max(1, round(epochs * self.steps_per_epoch))
        self._rows, self._lock = rows, threading.Lock()
        self._firsts = [0, self.steps_per_epoch * self.step_packets]  # each epoch's first packet, as far as they were asked for

    def validates(self, step: int) -> bool:
        return self.validation_rows > 0 and (step % self.validation_every == 0 or step == self.steps)

    def assignments(self, completed_steps: int = 0) -> Iterator[Assignment]:
        """The Assignments of all steps after `completed_steps`, in the order in which everybody works through them."""
        for step in range(completed_steps + 1, self.steps + 1):
            first = (step - 1) * self.step_packets
            for number in range(first, first + self.step_packets):
                yield Assignment(TRAIN, step, number, number % self.drafters)
            if self.validates(step):
                for number in range(-(-self.validation_rows // self.drafters) * self.drafters):
                    yield Assignment(VALIDATE, step, number, number % self.drafters)

    def row_of(self, assignment: Assignment) -> tuple[int, int]:
        """(epoch, row) of an assignment; the row is EMPTY_ROW where a validation's last round has none left."""
        if assignment.kind == VALIDATE:
            return 0, assignment.number if assignment.number < self.validation_rows else EMPTY_ROW
        epoch = self.epoch_of(assignment.number)
        return epoch, assignment.number - self._firsts[epoch]

    def epoch_of(self, number: int) -> int:
        """The epoch of a training packet. Raises: UserError if the data do not fill a step over and over again."""
        with self._lock:
            while self._firsts[-1] <= number:
                packets = self._rows(len(self._firsts) - 1) // self.step_packets * self.step_packets
                self._firsts.append(self._firsts[-1] + packets)
                if len(self._firsts) > PATIENCE_EPOCHS and self._firsts[-1] == self._firsts[-PATIENCE_EPOCHS]:
                    raise UserError(f"{PATIENCE_EPOCHS} epochs in a row did not fill a step of {self.step_packets} rows: use more data")
            return bisect_right(self._firsts, number) - 1
