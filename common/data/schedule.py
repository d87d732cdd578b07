"""Who reads which row when: a pure function of the config's numbers that every rank computes for itself."""

import functools
from typing import NamedTuple

from common.data.rows import EMPTY_ROW
from common.errors import UserError
from common.seeds import STREAM_ORDER, generator

TRAIN, VALIDATE = 0, 1


class Assignment(NamedTuple):
    """One packet's place in the run: the optimiser step it belongs to (from 1), its number among its kind, and the drafter it goes to."""

    kind: int
    step: int
    number: int
    drafter: int


def serving_target(assignment, drafter_in_group, group_drafters, group_targets, drafters):
    """Which of its exchange group's targets computes a packet: the exchange group's packets go round them in turn.

    `drafter_in_group` is the assignment's drafter counted within its group; `drafters` counts all exchange groups'.
    """
    return (assignment.number // drafters * group_drafters + drafter_in_group) % group_targets


class Schedule:
    """Who gets which row when: a pure function of the config's numbers, so every rank computes the same and nobody negotiates.

    At micro-step u drafter d of D consumes packet u*D + d. An epoch's rows are shuffled anew, and its trailing round of fewer than
    D x accumulate rows is dropped. `validation_every` steps, and after the last, all validation rows are scheduled the same way.

    Raises: UserError when the rows do not fill one step.
    """

    def __init__(self, rows, drafters, accumulate, seed, steps=None, epochs=None, validation_rows=0, validation_every=1):
        self.rows, self.drafters, self.accumulate, self.seed = rows, drafters, accumulate, seed
        self.step_packets = drafters * accumulate
        self.steps_per_epoch = rows // self.step_packets
        self.dropped_rows = rows % self.step_packets  # per epoch
        self.validation_rows, self.validation_every = validation_rows, validation_every
        if not self.steps_per_epoch:
            raise UserError(
                f"the data fill {rows} rows, one step takes {drafters} drafters x optim.accumulate={accumulate} = {self.step_packets}; "
                "use more data, a smaller data.pack_tokens or fewer drafters"
            )
        self.steps = steps if steps is not None else max(1, round(epochs * self.steps_per_epoch))
        self._order = functools.lru_cache(2)(lambda epoch: generator(seed, STREAM_ORDER, epoch).permutation(rows))

    def validates(self, step):
        return self.validation_rows > 0 and (step % self.validation_every == 0 or step == self.steps)

    def assignments(self, completed_steps=0):
        """The Items of all steps after `completed_steps`, in the order in which everybody works through them."""
        for step in range(completed_steps + 1, self.steps + 1):
            first = (step - 1) * self.step_packets
            for number in range(first, first + self.step_packets):
                yield Assignment(TRAIN, step, number, number % self.drafters)
            if self.validates(step):
                for number in range(-(-self.validation_rows // self.drafters) * self.drafters):
                    yield Assignment(VALIDATE, step, number, number % self.drafters)

    def row_of(self, assignment):
        """(epoch, row) of an assignment; the row is EMPTY_ROW where a validation's last round has none left."""
        if assignment.kind == VALIDATE:
            return 0, assignment.number if assignment.number < self.validation_rows else EMPTY_ROW
        epoch, place = divmod(assignment.number, self.steps_per_epoch * self.step_packets)
        return epoch, int(self._order(epoch)[place])
