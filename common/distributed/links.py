"""How packets get from targets to drafters: the two ends of a link, as targets and drafters see them.

A target `acquire`s a free buffer, fills it and `offer`s it to the drafter that is due; a drafter `take`s the packet that is due
and `release`s its buffer after the step that used it. Meet, then send: a receive that waits on a GPU slows the kernels beside it,
so the features only start once both sides have said so on the host. A drafter that stops answers STOP instead of GO.

Whatever blocks is called by the one thread of a worker that issues communication.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from common.data.schedule import Assignment
from common.distributed.packet import PacketBuffer, PacketShape
from common.metrics import DeviceClock


class Sender(Protocol):
    """A target's end of its links."""

    def acquire(self) -> PacketBuffer | None:
        """A buffer whose last packet has left; None once a drafter has stopped."""

    def offer(self, buffer: PacketBuffer, drafter: int) -> bool:
        """Send a buffer that was filled and marked, as soon as the drafter takes it; False if a drafter has stopped."""
        raise NotImplementedError

    def close(self) -> None:
        """Return when the last packets have left."""


class Receiver(Protocol):
    """A drafter's end of its links."""

    wait: DeviceClock
    """How long the drafter waited for packets."""

    def take(self, assignment: Assignment, target: int) -> PacketBuffer:
        """The packet that is due, its features complete for the current stream.

        Raises: UserError if the target offers another one or the message is damaged.
        """
        raise NotImplementedError

    def release(self, buffer: PacketBuffer) -> None:
        """Give a buffer back: the work that reads it has been launched."""

    def stop(self, assignment: Assignment, target: int) -> None:
        """Answer STOP to a target's offer of an assignment that will not be trained."""


class InlineLink:
    """A drafter's end in solo mode: taking a packet runs the target."""

    capture: Callable[[Assignment, PacketBuffer], None]
    """Runs the target; the job sets it before the first packet is taken."""

    def __init__(self, shape: PacketShape):
        self._buffer = PacketBuffer(shape)
        self.wait = DeviceClock(shape.device)

    def take(self, assignment: Assignment, target: int) -> PacketBuffer:
        with torch.no_grad():
            self.capture(assignment, self._buffer)
        return self._buffer

    def release(self, buffer: PacketBuffer) -> None:
        """Nothing: the next packet is computed on the same stream."""

    def stop(self, assignment: Assignment, target: int) -> None:
        """Nothing: the target computes only what is taken."""
