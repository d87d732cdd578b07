"""Who sits where, computed alike on every rank: a difference of opinion here is a hang on the first packet."""

import pytest

from common.config import Config
from common.data.schedule import Schedule
from common.distributed.layout import WorkerContext, default_drafters, split
from common.distributed.processes import ProcessesJob
from common.errors import UserError


def layout(who, rank=0, **topology):
    """The layout of a job whose ranks published `who`: (role, host, agent, local rank) by global rank."""
    job = ProcessesJob.__new__(ProcessesJob)
    job.config, job.rank, job.world = Config(), rank, len(who)
    for key, value in topology.items():
        setattr(job.config.topology, key, value)
    return job._seat_all([dict(zip(("role", "host", "agent", "local_rank"), w, strict=True)) for w in who])


def node(host, ranks, role="drafter", agent=0):
    return [(role, host, agent, r) for r in range(ranks)]


@pytest.mark.parametrize(("ranks", "drafters"), [(2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (16, 4)])
def test_default_split(ranks, drafters):
    assert default_drafters(ranks) == drafters


def test_one_node_of_eight():
    """The promised 6 + 2, targets on the lowest local ranks, each drafter fed by three targets in turn."""
    contexts = layout(node("a", 8))
    assert [m.rank for m in contexts.targets] == [0, 1, 2, 3, 4, 5]
    assert [m.rank for m in contexts.drafters] == [6, 7]
    fed = {d: {t.index for t, drafter in contexts.pairs() if drafter.index == d} for d in (0, 1)}
    assert fed == {0: {0, 2, 4}, 1: {1, 3, 5}}


def test_order_of_joining_changes_nothing():
    """Two agents get global ranks in the order in which they join; the contexts must not depend on that."""
    who = node("a", 4) + node("b", 4, agent=1)
    shuffled = [who[i] for i in (5, 0, 7, 2, 1, 6, 3, 4)]

    def devices_of(contexts, order):
        return {(order[m.rank][1], order[m.rank][3]): (m.role, m.index, m.group) for m in (*contexts.targets, *contexts.drafters)}

    assert devices_of(layout(who), who) == devices_of(layout(shuffled), shuffled)


def test_two_nodes_are_two_cells_that_exchange_no_packets():
    contexts = layout(node("a", 4) + node("b", 4, agent=1))
    assert [(m.index, m.group, m.index_in_group) for m in contexts.drafters] == [(0, 0, 0), (1, 1, 0)]
    assert all(t.group == d.group for t, d in contexts.pairs())


def test_a_split_launch_is_one_cell_with_roles_from_the_scripts():
    """Targets on one node, drafters on another: packets cross, and the counts follow from what was started."""
    contexts = layout(node("b", 2, agent=1) + node("a", 3, role="target"))
    assert [m.host for m in contexts.targets] == ["a"] * 3 and [m.host for m in contexts.drafters] == ["b"] * 2
    assert {m.group for m in (*contexts.targets, *contexts.drafters)} == {0}


def test_a_split_launch_on_one_host_deals_devices_over_both_agents(monkeypatch):
    """Both agents start at LOCAL_RANK 0: taken literally, two ranks would share a device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    who = node("a", 1) + node("a", 2, role="target", agent=1)
    for rank in range(3):
        contexts = layout(who, rank)
        assert [m.device.index for m in (*contexts.targets, *contexts.drafters)] == [0, 1, 2]


def test_unequal_nodes_are_refused_with_the_difference():
    with pytest.raises(UserError, match=r"2 targets \+ 1 drafters, 3 targets \+ 1 drafters"):
        layout(node("a", 3) + node("b", 4, agent=1))


@pytest.mark.parametrize(("ranks", "targets", "drafters"), [(3, 3, None), (3, None, 3), (4, 2, 1), (2, 0, 2)])
def test_counts_that_do_not_add_up_are_refused(ranks, targets, drafters):
    with pytest.raises(UserError, match=r"topology\.drafters"):
        split(ranks, targets, drafters)


@pytest.mark.parametrize(("targets", "drafters"), [(t, d) for t in range(1, 7) for d in range(1, 7)])
def test_both_sides_of_every_pair_expect_the_same_packets_in_the_same_order(targets, drafters):
    """Nobody negotiates: if the agendas of the two ends differ by one packet, both wait for ever."""
    contexts = layout(node("a", targets + drafters), drafters=drafters)
    schedule = Schedule(lambda epoch: 3 * drafters + 1, drafters, 1, steps=5, validation_rows=drafters + 1, validation_every=2)
    context = lambda member: WorkerContext(member.role, member.index, None, None, None, schedule, contexts, None)  # noqa: E731
    sent, taken = {}, {}
    for target in contexts.targets:
        for assignment, drafter in context(target).packets():
            sent.setdefault((target.index, drafter), []).append(assignment)
    for drafter in contexts.drafters:
        for assignment, target in context(drafter).packets():
            taken.setdefault((target, drafter.index), []).append(assignment)
    assert sent == taken
    assert set(sent) <= {(t.index, d.index) for t, d in contexts.pairs()}


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (5, 2), (2, 3), (6, 4)])
def test_a_stop_is_answered_to_every_target_exactly_once(targets, drafters):
    """A target that hears nothing waits for ever; one that is asked twice is gone the second time."""
    contexts = layout(node("a", targets + drafters), drafters=drafters)
    schedule = Schedule(lambda epoch: 50 * drafters, drafters, 1, steps=40)
    answered = []
    for drafter in contexts.drafters:
        answered += [
            target for _, target in WorkerContext("drafter", drafter.index, None, None, None, schedule, contexts, None).stop_offers(7)
        ]
    assert sorted(answered) == list(range(targets))
