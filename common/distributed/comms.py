"""What drafters say to each other: sums and means of tensors, barriers. One class per way of running, one interface.

`sum_` and `mean_` work in place and leave every drafter with the same bits. Two replicas' sum does not depend on the order
of its terms, so with two drafters all modes agree bitwise; with more, each mode is reproducible by itself.
"""

import threading
from typing import Protocol

import torch

from common.distributed.groups import Group


class Comm(Protocol):
    """One drafter's connection to all drafters: it is number `index` of `size`."""

    index: int
    size: int

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by the sum over all drafters; returns it."""
        raise NotImplementedError

    def mean_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by the mean over all drafters; returns it."""
        return self.sum_(tensor).div_(self.size)

    def barrier(self) -> None:
        """Return when all drafters have called this."""
        self.sum_(torch.zeros(1))


class SoloComm(Comm):
    """One drafter: nothing to say. Targets have it too, for they take no part in sums."""

    index, size = 0, 1

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class GroupComm(Comm):
    """Drafters in processes of their own: NCCL for CUDA tensors, gloo for host tensors."""

    def __init__(self, group: Group):
        self._group, self.index, self.size = group, group.index, group.size

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.sum_(tensor)


class StagedComm(GroupComm):
    """Drafters in processes that share one CUDA device, where NCCL cannot run: sums go through host memory and gloo."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            return tensor.copy_(super().sum_(tensor.cpu()))
        return super().sum_(tensor)


class ThreadMeeting:
    """Where drafters in threads of one process meet; terms are added in the drafters' order, so timing cannot change a bit."""

    def __init__(self, size: int):
        self.size = size
        self._terms = [torch.zeros(0)] * size
        self._result = torch.zeros(0)
        self._barrier = threading.Barrier(size)

    def abort(self) -> None:
        """Wake everybody who waits here: BrokenBarrierError."""
        self._barrier.abort()

    def sum_(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Every drafter brings its tensor, drafter 0 adds them up, all take the result."""
        self._terms[index] = tensor
        self._meet(tensor)
        if index == 0:
            self._result = tensor.clone()
            for other in self._terms[1:]:
                self._result += other.to(tensor.device)
        self._meet(tensor)
        tensor.copy_(self._result)
        self._meet(tensor)
        return tensor

    def _meet(self, tensor):
        if tensor.is_cuda:  # what this thread has launched must be done before another device reads it
            torch.cuda.current_stream(tensor.device).synchronize()
        self._barrier.wait()


class ThreadComm(Comm):
    """A drafter's connection in threads mode."""

    def __init__(self, meeting: ThreadMeeting, index: int):
        self._meeting, self.index, self.size = meeting, index, meeting.size

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meeting.sum_(self.index, tensor)
