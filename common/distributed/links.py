"""How packets get from targets to drafters. The two halves of each link stand side by side.

A target `acquire`s a free buffer, fills it and `offer`s it to the drafter that is due; a drafter `take`s the packet that is due
and `release`s its buffer after the step that used it. Meet, then send: a receive that waits on a GPU slows the kernels beside it,
so the features only start once both sides have said so on the host. A drafter that stops answers STOP instead of GO.

Everything that blocks is called by the one thread of its context that issues communication.
"""

import contextlib
import queue
from collections import deque

import torch
import torch.distributed as dist

from common.distributed.packet import PacketBuffer
from common.distributed.status import Stopped
from common.metrics import DeviceClock

GO, STOP = 1, 0


def other(group):
    """The far side of a pair's group. Groups are sorted by global rank, and in a split launch either side may have come first."""
    return 1 - dist.get_rank(group)


class InlineLink:
    """One device: pulling a packet runs the target."""

    def __init__(self, shape):
        self._buffer = PacketBuffer(shape)
        self.capture = None  # set by the job: capture(assignment, buffer) runs the target
        self.wait = DeviceClock(self._buffer.features.device)

    def take(self, assignment, peer):
        with torch.no_grad():
            self.capture(assignment, self._buffer)
        return self._buffer

    def release(self, buffer):
        pass

    def stop(self, assignment, peer):
        pass


class P2PSender:
    """The target's half of the link between processes."""

    def __init__(self, shape, depth, groups, staged):
        self.groups = groups  # by drafter
        self._free = deque(_Outgoing(shape, staged) for _ in range(depth))
        self._stream = torch.cuda.Stream(shape.device) if shape.device.type == "cuda" and not staged else None
        self._answer = torch.zeros(1, dtype=torch.int64)

    def acquire(self):
        """A buffer whose last packet has left."""
        outgoing = self._free.popleft()
        outgoing.wait()
        return outgoing

    def offer(self, buffer, peer):
        """READY, wait for GO, send; False if the drafter answers STOP."""
        buffer.captured()
        group = self.groups[peer]
        dist.send(buffer.message.buffer, group=group, group_dst=other(group))
        dist.recv(self._answer, group=group, group_src=other(group))
        if int(self._answer) == STOP:
            return False
        buffer.send(group, self._stream)
        self._free.append(buffer)
        return True

    def close(self):
        for buffer in self._free:
            buffer.wait()


class _Outgoing(PacketBuffer):
    """A target's buffer with the events that guard it."""

    def __init__(self, shape, staged):
        super().__init__(shape)
        self._cuda = shape.device.type == "cuda"
        self._ready = torch.cuda.Event() if self._cuda else None
        self._host = torch.empty_like(self.features, device="cpu", pin_memory=True) if staged else None
        self._work = None

    def mark(self):
        """The capture into this buffer has been launched."""
        if self._cuda:
            if self._host is not None:
                self._host.copy_(self.features, non_blocking=True)
            self._ready.record()

    def captured(self):
        """Wait until the capture is complete: from here on a send needs no further waiting on the device."""
        if self._cuda:
            self._ready.synchronize()

    def send(self, group, stream):
        if stream is None:
            self._work = dist.isend(self.features if self._host is None else self._host, group=group, group_dst=other(group))
        else:
            with torch.cuda.stream(stream):
                self._work = dist.isend(self.features, group=group, group_dst=other(group))
                self._work.wait()  # the side stream, not the host
                self._ready.record(stream)

    def wait(self):
        if self._work is not None:
            if self._cuda and self._host is None:
                self._ready.synchronize()
            else:
                self._work.wait()
            self._work = None


class P2PReceiver:
    """The drafter's half of the link between processes."""

    def __init__(self, shape, depth, groups, staged):
        self.groups, self.staged = groups, staged  # by target
        self._free = deque(_Incoming(shape, staged) for _ in range(depth))
        self._cuda = shape.device.type == "cuda"
        self._stream = torch.cuda.Stream(shape.device) if self._cuda and not staged else None
        self._go = torch.tensor([GO], dtype=torch.int64)
        self.wait = DeviceClock(shape.device)

    def take(self, assignment, peer):
        """The packet that is due, its features complete for the current stream.

        Raises: UserError if the target offers another one or the message is damaged.
        """
        group, buffer = self.groups[peer], self._free.popleft()
        with self.wait:
            dist.recv(buffer.message.buffer, group=group, group_src=other(group))
            buffer.message.check(assignment)
            buffer.used()
            dist.send(self._go, group=group, group_dst=other(group))
            buffer.receive(group, self._stream)
        return buffer

    def release(self, buffer):
        """The work that reads this buffer has been launched."""
        buffer.mark()
        self._free.append(buffer)

    def stop(self, assignment, peer):
        """Take the offer of an assignment that will not be trained and answer STOP."""
        group, buffer = self.groups[peer], self._free[0]
        dist.recv(buffer.message.buffer, group=group, group_src=other(group))
        buffer.message.check(assignment)
        dist.send(torch.tensor([STOP], dtype=torch.int64), group=group, group_dst=other(group))


class _Incoming(PacketBuffer):
    def __init__(self, shape, staged):
        super().__init__(shape)
        self._done = torch.cuda.Event() if shape.device.type == "cuda" else None
        self._host = torch.empty_like(self.features, device="cpu", pin_memory=True) if staged else None

    def mark(self):
        if self._done is not None:
            self._done.record()

    def used(self):
        """Wait until the last step that read this buffer is done."""
        if self._done is not None:
            self._done.synchronize()

    def receive(self, group, stream):
        if self._host is not None:
            dist.recv(self._host, group=group, group_src=other(group))
            self.features.copy_(self._host, non_blocking=True)
        elif stream is None:
            dist.recv(self.features, group=group, group_src=other(group))
        else:
            with torch.cuda.stream(stream):
                work = dist.irecv(self.features, group=group, group_src=other(group))
                work.wait()
            torch.cuda.current_stream().wait_stream(stream)


class QueueLink:
    """The link between one target and one drafter in threads of one process: a bounded queue of filled buffers.

    The target's buffer goes back to it only after the drafter's copy is done; `failed` wakes both when any worker ends badly.
    """

    def __init__(self, depth, failed):
        self.filled = queue.Queue(maxsize=depth)
        self.failed = failed
        self.stopped = False

    def get(self):
        while True:
            if self.failed.is_set():
                raise Stopped
            with contextlib.suppress(queue.Empty):
                return self.filled.get(timeout=0.1)


class QueueSender:
    """The target's half in threads mode. `links` by drafter."""

    def __init__(self, shape, depth, links, failed):
        self.links, self._failed = links, failed
        self._free = queue.Queue()
        for _ in range(depth):
            self._free.put(_Queued(shape, self._free))

    def acquire(self):
        """A buffer whose last packet has been copied; None once a drafter has stopped."""
        buffer = self._unless_stopped(lambda: self._free.get(timeout=0.1), queue.Empty)
        if buffer is not None:
            buffer.copied()
        return buffer

    def offer(self, buffer, peer):
        self._unless_stopped(lambda: self.links[peer].filled.put(buffer, timeout=0.1), queue.Full)
        return not self._stopped()

    def close(self):
        pass

    def _stopped(self):
        return any(link.stopped for link in self.links.values())

    def _unless_stopped(self, attempt, busy):
        while not self._stopped():
            if self._failed.is_set():
                raise Stopped
            with contextlib.suppress(busy):
                return attempt()
        return None


class _Queued(PacketBuffer):
    def __init__(self, shape, home):
        super().__init__(shape)
        self._cuda = shape.device.type == "cuda"
        self.ready = torch.cuda.Event() if self._cuda else None
        self.read = torch.cuda.Event() if self._cuda else None
        self.home = home

    def mark(self):
        if self._cuda:
            self.ready.record()

    def copied(self):
        if self._cuda:
            self.read.synchronize()


class QueueReceiver:
    """The drafter's half in threads mode. `links` by target."""

    def __init__(self, shape, depth, links):
        self.links = links
        self._free = deque(_Incoming(shape, staged=False) for _ in range(depth))
        self._stream = torch.cuda.Stream(shape.device) if shape.device.type == "cuda" else None
        self.wait = DeviceClock(shape.device)

    def take(self, assignment, peer):
        buffer = self._free.popleft()
        with self.wait:
            offered = self.links[peer].get()
            offered.message.check(assignment)
            buffer.used()
            buffer.message.buffer.copy_(offered.message.buffer)
            if self._stream is None:
                buffer.features.copy_(offered.features)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(offered.ready)
                    buffer.features.copy_(offered.features, non_blocking=True)
                    offered.read.record(self._stream)
                torch.cuda.current_stream().wait_stream(self._stream)
            offered.home.put(offered)
        return buffer

    def release(self, buffer):
        buffer.mark()
        self._free.append(buffer)

    def stop(self, assignment, peer):
        """The target's next packet is ours and will not be trained: take it, so that all earlier ones are out, and end the target."""
        self.links[peer].get().message.check(assignment)
        self.links[peer].stopped = True
