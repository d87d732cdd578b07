"""Which role and which device every process gets: worked out from what all ranks announce, alike on every rank."""

from collections import defaultdict
from typing import NamedTuple

import torch

from common.config import Config
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
    groups, stages = _exchange_groups(announced), config.target.stages
    roles = _roles(announced, groups, config)
    by_host = _by_host(announced, range(len(announced)))

    def device_of(ranked: int) -> torch.device:
        on_host = sorted(by_host[announced[ranked].host], key=lambda r: (roles[r] != TARGET, announced[r].agent, announced[r].local_rank))
        position = on_host.index(ranked)
        return choose_device(position, len(on_host), config) if ranked == rank else device_at(position)

    targets, earlier, drafters = [], [], []
    for number, group in enumerate(groups):
        serving = _chains([r for r in group if roles[r] == TARGET], announced, stages)
        first = len(targets)
        for position, ranked in enumerate(serving):
            index, stage = divmod(position, stages)
            where = number, ranked, announced[ranked].host, device_of(ranked)
            member = Member(TARGET, first + index, index, *where, stage, stages)
            (targets if stage == stages - 1 else earlier).append(member)
        for index, ranked in enumerate(r for r in group if roles[r] == DRAFTER):
            where = number, ranked, announced[ranked].host, device_of(ranked)
            drafters.append(Member(DRAFTER, len(drafters), index, *where))
    return Layout(tuple(targets), tuple(drafters), tuple(earlier))


def _chains(ranks: list[int], announced: list[Announcement], stages: int) -> list[int]:
    """Ranks in an order in which every `stages` are a chain: as many chains as go lie on one host, the others are made of what is left."""
    whole, left = [], []
    for on_host in _by_host(announced, ranks).values():
        full = len(on_host) // stages * stages
        whole += on_host[:full]
        left += on_host[full:]
    return whole + left


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


def _roles(announced, groups, config: Config):
    """The role of every rank. Raises: UserError."""
    counts, roles, stages, topology = set(), {}, config.target.stages, config.topology
    for group in groups:
        if _is_split(announced):
            ordered = sorted(group, key=lambda r: announced[r].role != TARGET)
            serving = sum(announced[r].role == TARGET for r in group)
            if serving % stages:
                raise UserError(
                    f"{serving} ranks serve, which is no multiple of target.stages={stages}: start serve_targets.py with "
                    f"{max(stages, serving // stages * stages)} ranks in all"
                )
            targets, drafters = split(len(group), serving // stages, len(group) - serving, stages)
        else:
            ordered = group
            targets, drafters = split(len(group), topology.targets, topology.drafters, stages)
        counts.add((targets, drafters))
        roles |= {rank: TARGET if position < targets * stages else DRAFTER for position, rank in enumerate(ordered)}
    if len(counts) > 1:
        listed = ", ".join(f"{t} targets + {d} drafters" for t, d in sorted(counts))
        raise UserError(f"the nodes differ ({listed}): start the same number of ranks on every node")
    return roles


def default_drafters(ranks: int, stages: int = 1) -> int:
    """Drafters of an exchange group of `ranks`: a quarter of them, or the nearest number that leaves whole targets; at least one."""
    return nearest_drafters(ranks, stages, max(1, round(ranks / 4)))


def nearest_drafters(ranks: int, stages: int, wanted: float) -> int:
    """The number of drafters nearest to `wanted` that leaves ranks for one target at least, and for whole ones; 1 if there is none."""
    possible = range(ranks % stages or stages, ranks - stages + 1, stages)
    return min(possible, key=lambda drafters: abs(drafters - wanted), default=1)


def split(ranks: int, targets: int | None, drafters: int | None, stages: int = 1) -> tuple[int, int]:
    """(targets, drafters) of an exchange group, filled up from whichever is given; each target takes `stages` ranks.

    Raises: UserError when they do not add up to the ranks there are.
    """
    if drafters is None:
        drafters = ranks - targets * stages if targets is not None else default_drafters(ranks, stages)
    if targets is None:
        targets = (ranks - drafters) // stages
    if targets < 1 or drafters < 1 or targets * stages + drafters != ranks:
        usual = default_drafters(ranks, stages)
        fits = ranks > usual and (ranks - usual) % stages == 0
        other = f", or write topology.targets={(ranks - usual) // stages} topology.drafters={usual}" if fits else ""
        chain = f" of target.stages={stages} ranks each" if stages > 1 else ""
        longer = "" if fits or stages == 1 else ", or let a chain span nodes in a split launch (launch/split.sh)"
        raise UserError(
            f"topology.targets={targets}{chain} + topology.drafters={drafters} do not make the exchange group's {ranks} ranks; each role "
            f"needs one: start {max(targets, 1) * stages + max(drafters, 1)} ranks{other}{longer}"
        )
    return targets, drafters
