"""Which role and which device every process gets: worked out from what all ranks announce, alike on every rank."""

from collections import defaultdict
from typing import NamedTuple

from common.config import Config, TopologyConfig
from common.distributed.devices import choose_device, device_at
from common.distributed.layout import DRAFTER, TARGET, Layout, Member
from common.errors import UserError


class Announcement(NamedTuple):
    """What a rank says of itself: the role its script allows (TARGET: it only serves), its host, its agent's number, its local rank."""

    role: str
    host: str
    agent: int
    local_rank: int


def make_layout(announced: list[Announcement], config: Config, rank: int) -> Layout:
    """The layout of a job whose ranks made these announcements, as `rank` sees it: only its own device is checked.

    Members are ordered by (host, agent, local rank) and never by global rank, which is the order in which ranks joined.

    Raises: UserError when the counts do not fit, nodes differ, or this rank has no device.
    """
    groups = _exchange_groups(announced)
    roles = _roles(announced, groups, config.topology)
    by_host = _by_host(announced, range(len(announced)))
    members: dict[str, list[Member]] = {TARGET: [], DRAFTER: []}
    for number, group in enumerate(groups):
        counts = {TARGET: 0, DRAFTER: 0}
        for member_rank in group:
            role, host = roles[member_rank], announced[member_rank].host
            on_host = sorted(by_host[host], key=lambda r: (roles[r] != TARGET, announced[r].agent, announced[r].local_rank))
            position = on_host.index(member_rank)
            device = choose_device(position, len(on_host), config) if member_rank == rank else device_at(position)
            members[role].append(Member(role, len(members[role]), counts[role], number, member_rank, host, device))
            counts[role] += 1
    return Layout(tuple(members[TARGET]), tuple(members[DRAFTER]))


def _by_host(announced, ranks):
    by_host = defaultdict(list)
    for rank in ranks:
        by_host[announced[rank].host].append(rank)
    return by_host


def _exchange_groups(announced):
    """The ranks of each exchange group, in order: one group a node, or one of all in a split launch or where nodes have one rank each."""
    order = sorted(range(len(announced)), key=lambda r: (announced[r].host, announced[r].agent, announced[r].local_rank))
    nodes = list(_by_host(announced, order).values())
    one_group = _is_split(announced) or all(len(node) == 1 for node in nodes)
    return [order] if one_group else nodes


def _is_split(announced):
    """Whether some ranks only serve, so that roles follow from the scripts and not from the counts."""
    return any(a.role == TARGET for a in announced)


def _roles(announced, groups, topology: TopologyConfig):
    """The role of every rank. Raises: UserError."""
    counts, roles = set(), {}
    for group in groups:
        if _is_split(announced):
            ordered = sorted(group, key=lambda r: announced[r].role != TARGET)
            serving = sum(announced[r].role == TARGET for r in group)
            targets, drafters = split(len(group), serving, len(group) - serving)
        else:
            ordered = group
            targets, drafters = split(len(group), topology.targets, topology.drafters)
        counts.add((targets, drafters))
        roles |= {rank: TARGET if position < targets else DRAFTER for position, rank in enumerate(ordered)}
    if len(counts) > 1:
        listed = ", ".join(f"{t} targets + {d} drafters" for t, d in sorted(counts))
        raise UserError(f"the nodes differ ({listed}): start the same number of ranks on every node")
    return roles


def default_drafters(ranks: int) -> int:
    """Drafters of an exchange group of `ranks`: a quarter of them, at least one."""
    return max(1, round(ranks / 4))


def split(ranks: int, targets: int | None, drafters: int | None) -> tuple[int, int]:
    """(targets, drafters) of an exchange group, filled up from whichever is given.

    Raises: UserError when they do not add up to the ranks there are.
    """
    if drafters is None:
        drafters = ranks - targets if targets is not None else default_drafters(ranks)
    if targets is None:
        targets = ranks - drafters
    if targets < 1 or drafters < 1 or targets + drafters != ranks:
        usual = default_drafters(ranks)
        other = f", or write topology.targets={ranks - usual} topology.drafters={usual}" if ranks > 1 else ""
        raise UserError(
            f"topology.targets={targets} + topology.drafters={drafters} do not make the exchange group's {ranks} ranks; each role "
            f"needs one: start {max(targets, 1) + max(drafters, 1)} ranks{other}"
        )
    return targets, drafters
