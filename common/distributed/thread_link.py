"""The link between threads of one process: a bounded queue of filled buffers, and a copy from device to device.

A target's buffer goes back to it when the drafter has launched its copy, with an event that passes when the copy is done.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from common.data.schedule import Assignment
from common.distributed.packet import PacketBuffer, PacketShape
from common.distributed.status import Stopped
from common.metrics import DeviceClock

POLL_S = 0.1  # how soon a worker that waits notices that another has failed
T = TypeVar("T")


class Returned(NamedTuple):
    """A target's buffer that a drafter has given back, with the event of its copy (None: the copy is done)."""

    buffer: PacketBuffer
    copied: torch.cuda.Event | None


class Offered(NamedTuple):
    """A filled buffer and the queue to which it goes back."""

    buffer: PacketBuffer
    home: queue.Queue[Returned]


class QueueLink:
    """The link between one target and one drafter; `failed` wakes both when any worker ends badly."""

    def __init__(self, depth: int, failed: threading.Event):
        self.offered: queue.Queue[Offered] = queue.Queue(maxsize=depth)
        self.failed = failed
        self.stopped = False

    def get(self) -> Offered:
        """The next filled buffer. Raises: Stopped."""
        while True:
            if self.failed.is_set():
                raise Stopped
            with contextlib.suppress(queue.Empty):
                return self.offered.get(timeout=POLL_S)


class QueueSender:
    """The target's end. `links` by drafter."""

    def __init__(self, shape: PacketShape, depth: int, links: Mapping[int, QueueLink], failed: threading.Event):
        self.links, self._failed = links, failed
        self._free: queue.Queue[Returned] = queue.Queue()
        for _ in range(depth):
            self._free.put(Returned(PacketBuffer(shape), None))

    def acquire(self) -> PacketBuffer | None:
        """A buffer whose last packet has been copied; None once a drafter has stopped."""
        returned = self._unless_stopped(lambda: self._free.get(timeout=POLL_S), queue.Empty)
        if returned is None:
            return None
        if returned.copied is not None:
            returned.copied.synchronize()
        return returned.buffer

    def offer(self, buffer: PacketBuffer, drafter: int) -> bool:
        """Queue a filled buffer for a drafter; False once a drafter has stopped."""
        offered = Offered(buffer, self._free)
        self._unless_stopped(lambda: self.links[drafter].offered.put(offered, timeout=POLL_S), queue.Full)
        return not self._stopped()

    def close(self) -> None:
        """Nothing: the drafters take what is queued."""

    def _stopped(self):
        return any(link.stopped for link in self.links.values())

    def _unless_stopped(self, attempt: Callable[[], T], busy: type[Exception]) -> T | None:
        """The attempt's result, tried again while it is `busy`; None once a drafter has stopped."""
        while not self._stopped():
            if self._failed.is_set():
                raise Stopped
            with contextlib.suppress(busy):
                return attempt()
        return None


class QueueReceiver:
    """The drafter's end. `links` by target."""

    def __init__(self, shape: PacketShape, depth: int, links: Mapping[int, QueueLink]):
        self.links = links
        self._free = deque(PacketBuffer(shape) for _ in range(depth))
        self._stream = torch.cuda.Stream(shape.device) if shape.device.type == "cuda" else None
        self.wait = DeviceClock(shape.device)

    def take(self, assignment: Assignment, target: int) -> PacketBuffer:
        """The packet that is due, copied to this drafter's device.

        Raises: UserError if the target offers another one or the message is damaged.
        """
        buffer = self._free.popleft()
        with self.wait:
            offered, home = self.links[target].get()
            offered.message.check(assignment)
            buffer.finish()  # the last step that read it
            buffer.message.buffer.copy_(offered.message.buffer)
            home.put(Returned(offered, self._copy(offered, buffer)))
        return buffer

    def _copy(self, offered, buffer):
        """Copy the features; returns the event that passes when that is done.

        A fresh event for every copy: the next copy from the same buffer may run on another drafter's device, and an event is of one device.
        """
        if self._stream is None:
            buffer.features.copy_(offered.features)
            return None
        with torch.cuda.stream(self._stream):
            if offered.launched is not None:
                self._stream.wait_event(offered.launched)
            buffer.features.copy_(offered.features, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        torch.cuda.current_stream().wait_stream(self._stream)
        return copied

    def release(self, buffer: PacketBuffer) -> None:
        """The work that reads this buffer has been launched."""
        buffer.mark()
        self._free.append(buffer)

    def stop(self, assignment: Assignment, target: int) -> None:
        """Take the target's next packet, which will not be trained, so that all earlier ones are out; then end the target."""
        self.links[target].get().buffer.message.check(assignment)
        self.links[target].stopped = True
