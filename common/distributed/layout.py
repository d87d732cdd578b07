"""Which workers there are, which of them exchange packets, and which target computes which packet."""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import torch

from common.data.schedule import Assignment, serving_target

TARGET, DRAFTER = "target", "drafter"


@dataclass(frozen=True)
class Member:
    """One worker. `index` counts its role over all exchange groups, `index_in_group` in its own; `rank` is the process's (0 in threads).

    The stages of a target share these two numbers; `stage` of `stages` is its place in the chain.
    """

    role: str
    index: int
    index_in_group: int
    group: int
    rank: int
    host: str
    device: torch.device
    stage: int = 0
    stages: int = 1

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.role} {self.index}" + (f" stage {self.stage} of {self.stages}" if self.stages > 1 else "")


@dataclass(frozen=True)
class Layout:
    """All members by role and index; an exchange group is a set of members that exchange packets.

    Where a target is a chain of stages, `targets` are the last ones, which offer the packets, and `earlier` the others.
    """

    targets: tuple[Member, ...]
    drafters: tuple[Member, ...]
    earlier: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """The targets, each chain's stages in order, then the drafters."""
        serving = sorted((*self.earlier, *self.targets), key=lambda m: (m.index, m.stage))
        return (*serving, *self.drafters)

    @property
    def stages(self) -> int:
        """Stages of every target."""
        return self.targets[0].stages

    @cached_property
    def _by_group(self) -> dict[tuple[str, int], list[Member]]:
        found = defaultdict(list)
        for member in (*self.targets, *self.drafters):
            found[member.role, member.group].append(member)
        return found

    def exchange_group(self, role: str, group: int) -> list[Member]:
        """The targets, or the drafters, of one exchange group."""
        return self._by_group[role, group]

    def target_of(self, assignment: Assignment) -> Member:
        """The target that computes an assignment's packet: its exchange group's packets go round the group's targets."""
        drafter = self.drafters[assignment.drafter]
        targets, drafters = self.exchange_group(TARGET, drafter.group), self.exchange_group(DRAFTER, drafter.group)
        return targets[serving_target(assignment, drafter.index_in_group, len(drafters), len(targets), len(self.drafters))]

    def pairs(self) -> list[tuple[Member, Member]]:
        """(target, drafter) pairs that really exchange packets, in an order that all ranks share."""
        found = []
        for drafter in self.drafters:
            targets, drafters = self.exchange_group(TARGET, drafter.group), self.exchange_group(DRAFTER, drafter.group)
            serving = {(step * len(drafters) + drafter.index_in_group) % len(targets) for step in range(len(targets))}
            found += [(targets[index], drafter) for index in sorted(serving)]
        return found

    def hops(self) -> list[tuple[Member, Member]]:
        """(stage, next stage) of all chains, in an order that all ranks share."""
        serving = [m for m in self.members if m.role == TARGET]
        return [(one, other) for one, other in itertools.pairwise(serving) if one.index == other.index]

    def describe(self) -> str:
        """One line a member: its role, rank, host and device."""
        return "\n".join(f"  {m.name}: rank {m.rank} on {m.host}, {m.device}" for m in self.members)
