"""Groups of processes that exchange tensors: host tensors through gloo, CUDA tensors through NCCL.

A group is made by its members alone, under a name that tells it apart in the store. `torch.distributed.new_group` cannot do that: by
default every rank must call it for every group of the job, and with `use_local_synchronization=True` a rank names the group after the
number of groups that it has already, so that a drafter of three targets and a target of one drafter wait for each other under different
names for ever (https://github.com/pytorch/pytorch/pull/189073).

No deadlock: every rank makes its groups in the order of one list that all share. The first group of the list that is not complete has
members that have all made their earlier groups, so they come. Groups are closed in the same order for the same reason, since NCCL's
communicators end together.

Source: torchft and vLLM make their groups from the backends' constructors, too.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.distributed.layout import Layout, Member

TIMEOUT = timedelta(days=7)  # a slow peer is no error; a dead or hanging one is found by the watch
PAIR_CTAS = 4  # multiprocessors that a waiting send or receive may spin on


class Group:
    """Processes that sum tensors. The constructor returns when all members have called it.

    `device` is the CUDA device whose tensors travel by NCCL; None where only host tensors travel.
    """

    max_ctas: int | None = None

    def __init__(self, store: dist.Store, name: str, index: int, size: int, device: torch.device | None = None):
        self.index, self.size = index, size
        store = dist.PrefixStore(name, store)
        self._backends: dict[str, Any] = {"cpu": dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), index, size, TIMEOUT)}
        if device is not None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            if self.max_ctas is not None:
                options.config.max_ctas = self.max_ctas
            self._backends["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), index, size, options)
            self._connect(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)

    def _connect(self, token):
        """Use NCCL once: communicators that connect lazily, in the order of need, can deadlock."""
        if self.size > 1:
            self.sum_(token)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up the members' tensors in place; returns the tensor."""
        self._backends[tensor.device.type].allreduce([tensor]).wait()
        return tensor

    def close(self) -> None:
        """Give up the connections; all members close, each of its groups in the order in which it made them."""
        for backend in reversed(self._backends.values()):
            backend.shutdown()


class Pair(Group):
    """A sender of packets (index 0) and their receiver (index 1): a target and a drafter, or two stages of a chain."""

    max_ctas = PAIR_CTAS

    def __init__(self, store: dist.Store, name: str, index: int, device: torch.device | None = None):
        super().__init__(store, name, index, 2, device)

    def _connect(self, token):
        (self.receive if self.index else self.send)(token).wait()

    def send(self, tensor: torch.Tensor) -> dist.Work:
        """Start to send to the other side. The tensor is free after `wait()`; with NCCL that holds the current stream, not the host."""
        return self._backends[tensor.device.type].send([tensor], 1 - self.index, 0)

    def receive(self, tensor: torch.Tensor) -> dist.Work:
        """Start to receive from the other side. The tensor is filled after `wait()`; with NCCL that holds the stream, not the host."""
        return self._backends[tensor.device.type].recv([tensor], 1 - self.index, 0)


def make_drafters_group(store: dist.Store, layout: Layout, member: Member, device: torch.device | None) -> Group:
    """The group of all drafters; only drafters call this, before they make their pairs."""
    return Group(store, "drafters", member.index, len(layout.drafters), device)


def make_hops(store: dist.Store, layout: Layout, member: Member, device: torch.device | None) -> tuple[Pair | None, Pair | None]:
    """The pairs of a stage with the stages before and behind it, where there are any; after `make_pairs`."""
    before = behind = None
    for one, other in layout.hops():
        name = f"target_{one.index}_stage_{one.stage}"
        if member.rank == one.rank:
            behind = Pair(store, name, 0, device)
        elif member.rank == other.rank:
            before = Pair(store, name, 1, device)
    return before, behind


def make_pairs(store: dist.Store, layout: Layout, member: Member, device: torch.device | None) -> dict[int, Pair]:
    """The pairs that a member belongs to, by the other side's index."""
    pairs = {}
    for target, drafter in layout.pairs():
        name = f"target_{target.index}_drafter_{drafter.index}"
        if member.rank == target.rank:
            pairs[drafter.index] = Pair(store, name, 0, device)
        elif member.rank == drafter.rank:
            pairs[target.index] = Pair(store, name, 1, device)
    return pairs
