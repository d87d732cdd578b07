"""What each worker is told: who it is, what it is connected to, and which packets are its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from common.data.schedule import Assignment, Schedule
from common.distributed.comms import Comm
from common.distributed.layout import DRAFTER, TARGET, Layout
from common.distributed.links import Receiver, Sender
from common.distributed.status import Status

Link = TypeVar("Link", bound=Sender | Receiver)


@dataclass(frozen=True)
class WorkerContext(Generic[Link]):
    """Everything a worker needs to know of where it is; a target's link is a Sender, a drafter's a Receiver.

    A stage of a target that is a chain takes what the stage before gives out from `upstream`, and sends to the stage behind it, whichever
    drafter the packet is for.
    """

    role: str
    index: int
    device: torch.device
    link: Link
    comm: Comm
    schedule: Schedule
    layout: Layout
    status: Status = field(repr=False)
    restarted: bool = False
    """Whether the launcher started this job again after a death or a requeue."""
    stage: int = 0
    upstream: Receiver | None = None

    @property
    def name(self) -> str:
        """What messages call this worker."""
        return next(m.name for m in self.layout.members if (m.role, m.index, m.stage) == (self.role, self.index, self.stage))

    def tell_chain(self, key: str, value: Any) -> None:
        """Leave a note for the other stages of this target."""
        self.status.put(f"{key}/{self.index}/{self.stage}", value)

    def told_by_chain(self, key: str) -> list[Any]:
        """The notes of all stages of this target, whenever they come."""
        return [self.status.wait(f"{key}/{self.index}/{stage}") for stage in range(self.layout.stages)]

    def packets(self, completed_steps: int = 0) -> Iterator[tuple[Assignment, int]]:
        """(assignment, index of the other side) of all packets that this worker sends or receives, in order."""
        for assignment in self.schedule.assignments(completed_steps):
            if self.role == DRAFTER and assignment.drafter != self.index:
                continue
            target = self.layout.target_of(assignment).index
            if self.role == DRAFTER:
                yield assignment, target
            elif target == self.index:
                yield assignment, assignment.drafter

    def stop_offers(self, completed_steps: int) -> Iterator[tuple[Assignment, int]]:
        """(assignment, target) of the packets to answer with STOP after `completed_steps`: each target's next one, where it is ours."""
        waiting = {m.index for m in self.layout.exchange_group(TARGET, self.layout.drafters[self.index].group)}
        for assignment in self.schedule.assignments(completed_steps):
            target = self.layout.target_of(assignment).index
            if target in waiting:
                waiting.remove(target)
                if assignment.drafter == self.index:
                    yield assignment, target
            if not waiting:
                return
