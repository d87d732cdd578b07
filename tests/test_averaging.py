"""What happens every K steps: afterwards the replicas are one drafter again, bit by bit."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from common.config import OptimConfig, SyncConfig
from common.distributed.comms import GroupComm
from common.distributed.groups import Group
from common.training.averaging import Averaging
from common.training.optim import Optimizer


def replica(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    weight = torch.nn.Parameter(torch.randn(33, 7, generator=generator).to(dtype))
    return Optimizer([("weight", weight)], OptimConfig(), steps=10)


def connected(rank, ranks, store):
    return GroupComm(Group(dist.FileStore(store, ranks), "drafters", rank, ranks))


def average(rank, ranks, store, mode, steps):
    """Average replicas of different weights after each of `steps`; returns what each rank then holds."""
    optimizer = replica(rank)
    comm = connected(rank, ranks, store)
    averaging = Averaging(SyncConfig(mode=mode, every=4), comm, optimizer, last_step=10)
    metrics = [averaging.weights(step) for step in steps]
    distances = [float(m["replica_distance"][0]) if m else None for m in metrics]
    comm.barrier()  # where nothing was averaged, the first to end would hang up while the other still connects
    return optimizer.masters.numpy(), optimizer.parameters[0].detach().numpy(), distances  # arrays travel by value


@pytest.fixture
def store(tmp_path):
    """Path of the file through which ranks find each other."""
    return str(tmp_path / "store")


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_are_equal_to_each_other_and_to_the_mean(ranks, store):
    """Otherwise the exported drafter is one replica's, and the others' work is lost."""
    results = run_ranks(average, ranks, store, "average", [4])
    mean = torch.stack([replica(rank).masters for rank in range(ranks)]).mean(0)
    for rank, (masters, compute, (distance,)) in enumerate(results):
        assert np.array_equal(masters, results[0][0]), "replicas differ after an averaging"
        np.testing.assert_allclose(masters, mean, rtol=1e-5, atol=1e-7)
        assert np.array_equal(compute.flatten(), masters), "the compute weights did not follow"
        assert distance == pytest.approx(float((replica(rank).masters - mean).norm() / mean.norm()), rel=1e-4)


def test_nothing_moves_between_averagings_and_the_last_step_averages(store):
    """An averaging that a stop or a miscount adds changes what is learnt."""
    for masters, _, distances in run_ranks(average, 2, store, "average", [1, 2, 3]):
        assert distances == [None] * 3
        assert any(np.array_equal(masters, replica(rank).masters) for rank in range(2))
    assert all(distances[0] > 0 for _, _, distances in run_ranks(average, 2, f"{store}2", "average", [10]))


def exchange(rank, ranks, store):
    optimizer = replica(rank)
    optimizer.gradients.fill_(rank + 1.0)
    averaging = Averaging(SyncConfig(mode="ddp"), connected(rank, ranks, store), optimizer, last_step=10)
    weight_sum = averaging.gradients(torch.tensor(10.0 * (rank + 1)))
    return optimizer.gradients[0].item(), weight_sum.item(), averaging.weights(4)


def test_ddp_sums_gradients_and_weights(store):
    """A mean of means would weigh a packet of three tokens like one of three thousand."""
    assert run_ranks(exchange, 2, store) == [(3.0, 30.0, {})] * 2


def average_in_bfloat16(rank, ranks, store):
    optimizer = replica(rank, torch.bfloat16)
    Averaging(SyncConfig(every=4), connected(rank, ranks, store), optimizer, last_step=10).weights(4)
    return optimizer.masters.numpy(), optimizer.compute.float().numpy()


def test_weights_in_half_precision_follow_an_averaging(store):
    """In float32 the weights are the masters themselves; in bfloat16 the next step and held-out tau would still be the single replica's."""
    for masters, compute in run_ranks(average_in_bfloat16, 2, store):
        assert np.array_equal(compute, torch.from_numpy(masters).bfloat16().float().numpy())


class PlusOne:
    """Drafters whose mean lies one above this replica's weights."""

    size = 2

    def mean_(self, tensor):
        return tensor.add_(1)


def test_the_distance_is_that_of_all_weights_however_they_are_cut(monkeypatch):
    """Large drafters are averaged in chunks: the distance of the last chunk says nothing of the others."""
    monkeypatch.setattr("common.training.averaging.CHUNK", 50)
    optimizer = replica(0)
    mean = optimizer.masters + 1
    distance, _ = Averaging(SyncConfig(every=4), PlusOne(), optimizer, last_step=10).weights(4)["replica_distance"]
    assert torch.equal(optimizer.masters, mean) and distance == pytest.approx(float(len(mean) ** 0.5 / mean.norm()), rel=1e-5)


def test_the_outer_step_is_nesterovs_along_the_ways_to_the_mean():
    """With few averagings plain means waste what drafters agree on; a wrong sign or a lost momentum would undo what they learnt."""
    optimizer = replica(0)
    start, config = optimizer.masters.clone(), SyncConfig(every=1, outer="nesterov", outer_lr=0.5, outer_momentum=0.8)
    averaging, weight_sum = Averaging(config, PlusOne(), optimizer, last_step=10), torch.ones(())
    at, velocity = 0.0, 0.0
    for step, local in enumerate((2.0, -0.5, 0.0), 1):  # what the inner steps add; the mean lies one above it
        averaging.gradients(weight_sum)
        optimizer.masters.add_(local)
        averaging.weights(step)
        velocity = 0.8 * velocity + local + 1
        at += 0.5 * (local + 1 + 0.8 * velocity)
        torch.testing.assert_close(optimizer.masters, start + at)
