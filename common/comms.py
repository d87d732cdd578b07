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

    def broadcast_(self, tensor):
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

    def broadcast_(self, tensor):
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def barrier(self):
        self.sum_(torch.zeros(1))


class StagedComm(GroupComm):
    """Drafters in processes that share one CUDA device, where NCCL cannot run: sums go through host memory and gloo."""

    def sum_(self, tensor):
        if tensor.is_cuda:
            return tensor.copy_(super().sum_(tensor.cpu()))
        return super().sum_(tensor)

    def broadcast_(self, tensor):
        if tensor.is_cuda:
            return tensor.copy_(super().broadcast_(tensor.cpu()))
        return super().broadcast_(tensor)


class ThreadComm:
    """Drafters in threads of one process; terms are added in the drafters' order, so timing cannot change a bit."""

    def __init__(self, size):
        self._slots = [None] * size
        self._meeting = threading.Barrier(size)
        self.size = size

    def seat(self, index):
        """The comm of one drafter."""
        return _ThreadSeat(self, index)

    def abort(self):
        """Wake everybody who waits here: BrokenBarrierError."""
        self._meeting.abort()

    def exchange(self, index, tensor, combine):
        """Every seat hands in its tensor; seat 0 combines them; all take the result."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        self._slots[index] = tensor
        self._meeting.wait()
        if index == 0:
            self._result = combine(self._slots)
            if self._result.is_cuda:
                torch.cuda.current_stream(self._result.device).synchronize()
        self._meeting.wait()
        tensor.copy_(self._result)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        self._meeting.wait()
        return tensor


class _ThreadSeat:
    def __init__(self, shared, index):
        self._shared, self.index, self.size = shared, index, shared.size

    def sum_(self, tensor):
        def in_order(tensors):
            total = tensors[0].clone()
            for other in tensors[1:]:
                total += other.to(total.device)
            return total

        return self._shared.exchange(self.index, tensor, in_order)

    def mean_(self, tensor):
        return self.sum_(tensor).div_(self.size)

    def broadcast_(self, tensor):
        return self._shared.exchange(self.index, tensor, lambda tensors: tensors[0].clone())

    def barrier(self):
        self.sum_(torch.zeros(1))
