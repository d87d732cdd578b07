"""Which workers there are, which exchange packets, and what each of them is told about its place."""

from dataclasses import dataclass, field

import torch

from common.data.schedule import Schedule, serving_target
from common.errors import UserError

TARGET, DRAFTER = "target", "drafter"


@dataclass(frozen=True)
class Member:
    """One worker. `index` counts its role over all exchange groups, `index_in_group` in its own; `rank` is the process's (0 in threads)."""

    role: str
    index: int
    index_in_group: int
    group: int
    rank: int
    host: str
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """All members by role and index; a group is a set of members that exchange packets."""

    targets: tuple
    drafters: tuple

    def exchange_group(self, role, group):
        return [m for m in (self.targets if role == TARGET else self.drafters) if m.group == group]

    def target_of(self, assignment):
        """The target that computes an assignment: its exchange group's targets take turns."""
        drafter = self.drafters[assignment.drafter]
        targets = self.exchange_group(TARGET, drafter.group)
        turn = serving_target(
            assignment, drafter.index_in_group, len(self.exchange_group(DRAFTER, drafter.group)), len(targets), len(self.drafters)
        )
        return targets[turn]

    def pairs(self):
        """(target, drafter) pairs that really exchange packets, in an order equal on all ranks."""
        found = []
        for drafter in self.drafters:
            targets, group_drafters = self.exchange_group(TARGET, drafter.group), len(self.exchange_group(DRAFTER, drafter.group))
            turns = {(u * group_drafters + drafter.index_in_group) % len(targets) for u in range(len(targets))}
            found += [(targets[turn], drafter) for turn in sorted(turns)]
        return found

    def describe(self):
        lines = [f"  {m.role} {m.index}: rank {m.rank} on {m.host}, {m.device}" for m in (*self.targets, *self.drafters)]
        return "\n".join(lines)


@dataclass(frozen=True)
class WorkerContext:
    """Everything a worker needs to know of where it is."""

    role: str
    index: int
    device: torch.device
    link: object
    comm: object
    schedule: Schedule
    layout: Layout
    status: object = field(repr=False)
    restarted: bool = False

    def packets(self, completed_steps=0):
        """(assignment, index of the other side) of all packets this context sends or receives, in order."""
        for assignment in self.schedule.assignments(completed_steps):
            target = self.layout.target_of(assignment)
            if self.role == DRAFTER and assignment.drafter == self.index:
                yield assignment, target.index
            elif self.role == TARGET and target.index == self.index:
                yield assignment, assignment.drafter

    def stop_offers(self, completed_steps):
        """Packets to answer with STOP after `completed_steps`: of each target its next one, if it is due to this drafter."""
        waiting = {m.index for m in self.layout.exchange_group(TARGET, self.layout.drafters[self.index].group)}
        for assignment in self.schedule.assignments(completed_steps):
            target = self.layout.target_of(assignment).index
            if target in waiting:
                waiting.remove(target)
                if assignment.drafter == self.index:
                    yield assignment, target
            if not waiting:
                return


def default_drafters(ranks):
    """Drafters of a group of `ranks`: a quarter of them, at least one."""
    return max(1, round(ranks / 4))


def split(ranks, targets, drafters):
    """(targets, drafters) of a group, filled up from whichever is given.

    Raises: UserError when they do not add up to the ranks there are.
    """
    if drafters is None:
        drafters = ranks - targets if targets is not None else default_drafters(ranks)
    if targets is None:
        targets = ranks - drafters
    if targets < 1 or drafters < 1 or targets + drafters != ranks:
        raise UserError(
            f"topology.targets={targets} + topology.drafters={drafters} do not make the exchange group's {ranks} ranks; each role "
            f"needs one: start {max(targets, 1) + max(drafters, 1)} ranks, or use topology.drafters={default_drafters(ranks)}"
        )
    return targets, drafters
