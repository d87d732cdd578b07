"""What drafters say to each other: sums and means of tensors, barriers. One class per way of running, one interface.

`sum_` and `mean_` work in place and leave every drafter with the same bits. Two replicas' sum does not depend on the order
of its terms, so with two drafters all modes agree bitwise; with more, each mode is reproducible by itself.
"""

import threading

import torch
import torch.distributed as dist


class SoloComm:
    """One drafter: nothing to say."""

    index, size = 0, 1

    def sum_(self, tensor):
        return tensor

    def mean_(self, tensor):
        return tensor

    def barrier(self):
        pass


class GroupComm:
    """Drafters in processes of their own: NCCL for CUDA tensors, gloo for host tensors."""

    def __init__(self, group, index, size):
        self.group, self.index, self.size = group, index, size

    def sum_(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def mean_(self, tensor):
        return self.sum_(tensor).div_(self.size)

    def barrier(self):
        self.sum_(torch.zeros(1))


class StagedComm(GroupComm):
    """Drafters in processes that share one CUDA device, where NCCL cannot run: sums go through host memory and gloo."""

    def sum_(self, tensor):
        if tensor.is_cuda:
            return tensor.copy_(super().sum_(tensor.cpu()))
        return super().sum_(tensor)


class ThreadComm:
    """Drafters in threads of one process; terms are added in the drafters' order, so timing cannot change a bit."""

    def __init__(self, size):
        self._slots = [None] * size
        self._meeting = threading.Barrier(size)
        self.size = size

    def context(self, index):
        """The comm of one drafter."""
        return _ThreadSeat(self, index)

    def abort(self):
        """Wake everybody who waits here: BrokenBarrierError."""
        self._meeting.abort()

    def sum_(self, index, tensor):
        """Every context hands in its tensor; context 0 adds them up; all take the result."""
        self._slots[index] = tensor
        self._meet(tensor)
        if index == 0:
            self._result = self._slots[0].clone()
            for other in self._slots[1:]:
                self._result += other.to(tensor.device)
        self._meet(tensor)
        tensor.copy_(self._result)
        self._meet(tensor)
        return tensor

    def _meet(self, tensor):
        if tensor.is_cuda:  # what this context has launched must be done before another device reads it
            torch.cuda.current_stream(tensor.device).synchronize()
        self._meeting.wait()


class _ThreadSeat:
    def __init__(self, shared, index):
        self._shared, self.index, self.size = shared, index, shared.size

    def sum_(self, tensor):
        return self._shared.sum_(self.index, tensor)

    def mean_(self, tensor):
        return self.sum_(tensor).div_(self.size)

    def barrier(self):
        self.sum_(torch.zeros(1))
