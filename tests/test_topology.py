"""Which rank has which role, and who exchanges packets with whom: a difference of opinion here is a hang on the first packet."""

import socket

import pytest
import torch
import torch.distributed as dist
from ranks import Job, run_ranks
from test_resume import arguments, records, weights

from common.config import Config
from common.data.schedule import Schedule
from common.distributed import watch
from common.distributed.context import WorkerContext
from common.distributed.groups import make_drafters_group, make_pairs
from common.distributed.roles import Announcement, default_drafters, make_layout, split
from common.distributed.status import StatusStore
from common.errors import UserError


def layout(announced, rank=0, **topology):
    """The layout of a job whose ranks announced (role, host, agent, local rank), by global rank."""
    config = Config()
    for key, value in topology.items():
        setattr(config.topology, key, value)
    return make_layout([Announcement(*values) for values in announced], config, rank)


def node(host, ranks, role="drafter", agent=0):
    return [(role, host, agent, r) for r in range(ranks)]


@pytest.mark.parametrize(("ranks", "drafters"), [(2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (16, 4)])
def test_default_split(ranks, drafters):
    assert default_drafters(ranks) == drafters


def test_one_node_of_eight():
    """The promised 6 + 2, targets on the lowest local ranks, each drafter fed by three targets in turn."""
    found = layout(node("a", 8))
    assert [m.rank for m in found.targets] == [0, 1, 2, 3, 4, 5]
    assert [m.rank for m in found.drafters] == [6, 7]
    fed = {d: {t.index for t, drafter in found.pairs() if drafter.index == d} for d in (0, 1)}
    assert fed == {0: {0, 2, 4}, 1: {1, 3, 5}}


def test_order_of_joining_changes_nothing():
    """Two agents get global ranks in the order in which they join; roles must not depend on that."""
    who = node("a", 4) + node("b", 4, agent=1)
    shuffled = [who[i] for i in (5, 0, 7, 2, 1, 6, 3, 4)]

    def roles(announced):
        return {announced[m.rank][1::2]: (m.role, m.index, m.group) for m in layout(announced).members}

    assert roles(who) == roles(shuffled)


def test_two_nodes_are_two_exchange_groups():
    found = layout(node("a", 4) + node("b", 4, agent=1))
    assert [(m.index, m.group, m.index_in_group) for m in found.drafters] == [(0, 0, 0), (1, 1, 0)]
    assert all(t.group == d.group for t, d in found.pairs())


def test_a_split_launch_is_one_exchange_group_with_roles_from_the_scripts():
    """Targets on one node, drafters on another: packets cross, and the counts follow from what was started."""
    found = layout(node("b", 2, agent=1) + node("a", 3, role="target"))
    assert [m.host for m in found.targets] == ["a"] * 3 and [m.host for m in found.drafters] == ["b"] * 2
    assert {m.group for m in found.members} == {0}


def test_a_split_launch_on_one_host_counts_devices_over_both_agents(monkeypatch):
    """Both agents start at LOCAL_RANK 0: taken literally, two ranks would share a device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    who = node("a", 1) + node("a", 2, role="target", agent=1)
    for rank in range(3):
        found = layout(who, rank)
        assert [m.device.index for m in found.members] == [0, 1, 2]


def test_unequal_nodes_are_refused_with_the_difference():
    with pytest.raises(UserError, match=r"2 targets \+ 1 drafters, 3 targets \+ 1 drafters"):
        layout(node("a", 3) + node("b", 4, agent=1))


@pytest.mark.parametrize(("ranks", "targets", "drafters"), [(3, 3, None), (3, None, 3), (4, 2, 1), (2, 0, 2)])
def test_counts_that_do_not_add_up_are_refused(ranks, targets, drafters):
    with pytest.raises(UserError, match=r"topology\.drafters"):
        split(ranks, targets, drafters)


def packets(found, schedule, member):
    return WorkerContext(member.role, member.index, None, None, None, schedule, found, None).packets()


@pytest.mark.parametrize(("targets", "drafters"), [(t, d) for t in range(1, 7) for d in range(1, 7)])
def test_both_sides_of_every_pair_expect_the_same_packets_in_the_same_order(targets, drafters):
    """Nobody negotiates: if the two ends differ by one packet, both wait for ever."""
    found = layout(node("a", targets + drafters), drafters=drafters)
    schedule = Schedule(lambda epoch: 3 * drafters + 1, drafters, 1, steps=5, validation_rows=drafters + 1, validation_every=2)
    sent, taken = {}, {}
    for target in found.targets:
        for assignment, drafter in packets(found, schedule, target):
            sent.setdefault((target.index, drafter), []).append(assignment)
    for drafter in found.drafters:
        for assignment, target in packets(found, schedule, drafter):
            taken.setdefault((target, drafter.index), []).append(assignment)
    assert sent == taken
    assert set(sent) <= {(t.index, d.index) for t, d in found.pairs()}


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (5, 2), (2, 3), (6, 4)])
def test_a_stop_is_answered_to_every_target_exactly_once(targets, drafters):
    """A target that hears nothing waits for ever; one that is asked twice is gone the second time."""
    found = layout(node("a", targets + drafters), drafters=drafters)
    schedule = Schedule(lambda epoch: 50 * drafters, drafters, 1, steps=40)
    answered = []
    for drafter in found.drafters:
        context = WorkerContext("drafter", drafter.index, None, None, None, schedule, found, None)
        answered += [target for _, target in context.stop_offers(7)]
    assert sorted(answered) == list(range(targets))


def exchange(rank, ranks, announced, drafters, store):
    """Make this rank's groups and use them all; returns the names of what it made and what it received."""
    gloo, made = dist.ProcessGroupGloo, []

    def noted(store, index, size, timeout):
        made.append(size)
        return gloo(store, index, size, timeout)

    dist.ProcessGroupGloo = noted
    found = layout(announced, drafters=drafters)
    member = next(m for m in found.members if m.rank == rank)
    store, received = dist.FileStore(store, ranks), {}
    group = make_drafters_group(store, found, member, None) if member.role == "drafter" else None
    pairs = make_pairs(store, found, member, None)
    for other, pair in pairs.items():
        value = torch.tensor([member.index])
        if member.role == "target":
            pair.send(value).wait()
        else:
            pair.receive(value).wait()
            received[other] = int(value)
    total = None if group is None else int(group.sum_(torch.ones(1)))
    return made, sorted(pairs), received, total


@pytest.mark.parametrize("nodes", [[(3, 1)], [(2, 1), (2, 1)], [(3, 2), (3, 2)]])
def test_a_rank_makes_only_its_own_groups_and_all_of_them_meet(nodes, tmp_path):
    """Groups that every rank must make cost each start more with every node; and ranks of unequal numbers of groups must still meet."""
    announced = [rank for host, counts in enumerate(nodes) for rank in node(str(host), sum(counts))]
    found = layout(announced, drafters=nodes[0][1])
    results = run_ranks(exchange, len(announced), announced, nodes[0][1], str(tmp_path / "store"), timeout_s=30)
    for member in found.members:
        made, partners, received, total = results[member.rank]
        pairs = [(t.index, d.index) for t, d in found.pairs() if member in (t, d)]
        if member.role == "target":
            assert (made, partners, total) == ([2] * len(pairs), [d for _, d in pairs], None)
        else:
            assert (made, partners, total) == ([len(found.drafters)] + [2] * len(pairs), [t for t, _ in pairs], len(found.drafters))
            assert received == {t: t for t, _ in pairs}


class Watched:
    """Two ranks' watches over one store, on a clock that only the test moves; `end` is what the first one would end its process with."""

    def __init__(self, monkeypatch):
        self.now_s, self.blocks_s, self.end, real = 0.0, 0.0, None, dist.HashStore()
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(watch.threading.Thread, "start", lambda thread: None)
        monkeypatch.setattr(watch.Watch, "_end", lambda _, what: setattr(self, "end", what))
        self.store, found = real, layout(node("a", 2))
        self.statuses = [StatusStore(real), StatusStore(real)]
        first, other = found.members
        self.first = watch.Watch(self, self.statuses[0], found, first, timeout_s=5.0)
        self.other = watch.Watch(real, self.statuses[1], found, other, timeout_s=5.0)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def multi_get(self, keys):
        """Answers with what was there before it blocked."""
        answer, self.now_s, self.blocks_s = self.store.multi_get(keys), self.now_s + self.blocks_s, 0.0
        return answer

    def both_look(self, seconds, other=True):
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            if other:
                self.statuses[1].phase(1, "wait")
                self.other._look()
            self.statuses[0].phase(1, "wait")
            self.first._look()


@pytest.mark.parametrize("held_up", ["store", "process"])
def test_time_in_which_a_watch_could_not_see_is_nobody_elses_silence(monkeypatch, held_up):
    """A launcher or a process that pauses for seconds would kill a healthy job, and an innocent drafter would be blamed."""
    job = Watched(monkeypatch)
    job.both_look(4)
    if held_up == "store":
        job.blocks_s = 14.0
    else:
        job.now_s += 14.0
    job.both_look(1, other=False)
    job.both_look(20)
    assert job.end is None
    job.both_look(4, other=False)
    assert job.end is None
    job.both_look(3, other=False)
    assert job.end is not None and "drafter 0 (rank 1 on a): no sign of progress" in job.end, "real silence must still be found"


def two_ranks_a_host(rank):
    socket.gethostname = lambda: f"host{rank // 2}"


def test_two_nodes_learn_what_one_node_learns(tiny_preset, tmp_path):
    """Packets stay within a node and averages cross it; what is learnt must not depend on where the ranks are."""
    for name, drafters, sabotage in (("one", 2, None), ("two", 1, two_ranks_a_host)):
        with Job(arguments(tiny_preset, tmp_path / name, f"topology.drafters={drafters}"), 4, sabotage) as job:
            assert job.wait() == [0] * 4, job.output
    assert records(tmp_path / "one") == records(tmp_path / "two") and records(tmp_path / "one")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
