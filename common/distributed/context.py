"""What each worker is told: who it is, what it is connected to, and which packets are its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from common.data.schedule import Assignment, Schedule
from common.distributed.comms import Comm
from common.distributed.layout import DRAFTER, TARGET, Layout
from common.distributed.links import Receiver, Sender
from common.distributed.status import Status

Link = TypeVar("Link", bound=Sender | Receiver)


@dataclass(frozen=True)
class WorkerContext(Generic[Link]):
    """Everything a worker needs to know of where it is; a target's link is a Sender, a drafter's a Receiver."""

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
