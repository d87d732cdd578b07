"""The link between processes: a handshake on the host per packet, then the features by point-to-point send and receive.

The target says READY by sending the host message; the drafter checks it and answers GO or STOP; after GO both post the features.
CUDA features travel by NCCL on a side stream, or staged: through pinned host memory and gloo, for ranks that share a device.
"""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist

from common.data.schedule import Assignment
from common.distributed.groups import Pair
from common.distributed.packet import PacketBuffer, PacketShape
from common.metrics import DeviceClock

GO, STOP = 1, 0


def _side_stream(device):
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class P2PSender:
    """The target's end. `pairs` by drafter."""

    def __init__(self, shape: PacketShape, depth: int, pairs: Mapping[int, Pair], staged: bool):
        self.pairs = pairs
        self._free: deque[tuple[PacketBuffer, dist.Work | None]] = deque((PacketBuffer(shape, staged), None) for _ in range(depth))
        self._stream = _side_stream(shape.device)
        self._answer = torch.zeros(1, dtype=torch.int64)

    def acquire(self) -> PacketBuffer:
        """A buffer whose last packet has left."""
        buffer, sending = self._free.popleft()
        _finish(buffer, sending)
        return buffer

    def offer(self, buffer: PacketBuffer, drafter: int) -> bool:
        """READY, wait for GO, send; False if the drafter answers STOP."""
        buffer.finish()  # the capture: from here on a send needs no further waiting on the device
        pair = self.pairs[drafter]
        pair.send(buffer.message.buffer).wait()
        pair.receive(self._answer).wait()
        if int(self._answer) == STOP:
            return False
        self._free.append((buffer, self._send(buffer, pair)))
        return True

    def _send(self, buffer, pair):
        """Post the features; returns what the host must wait for before the buffer may be filled again, beside its mark."""
        if self._stream is None:
            return pair.send(buffer.features)
        with torch.cuda.stream(self._stream):
            if buffer.staged is not None:
                buffer.staged.copy_(buffer.features, non_blocking=True)
                self._stream.synchronize()
                return pair.send(buffer.staged)
            pair.send(buffer.features).wait()
            buffer.mark()
            return None

    def close(self) -> None:
        """Return when the last packets have left."""
        for buffer, sending in self._free:
            _finish(buffer, sending)


def _finish(buffer, sending):
    if sending is not None:
        sending.wait()
    buffer.finish()


class P2PReceiver:
    """The drafter's end. `pairs` by target."""

    def __init__(self, shape: PacketShape, depth: int, pairs: Mapping[int, Pair], staged: bool):
        self.pairs = pairs
        self._free = deque(PacketBuffer(shape, staged) for _ in range(depth))
        self._stream = _side_stream(shape.device)
        self._go, self._stop = (torch.tensor([answer], dtype=torch.int64) for answer in (GO, STOP))
        self.wait = DeviceClock(shape.device)

    def take(self, assignment: Assignment, target: int) -> PacketBuffer:
        """The packet that is due, its features complete for the current stream.

        Raises: UserError if the target offers another one or the message is damaged.
        """
        pair, buffer = self.pairs[target], self._free.popleft()
        with self.wait:
            pair.receive(buffer.message.buffer).wait()
            buffer.message.check(assignment)
            buffer.finish()  # the last step that read it
            pair.send(self._go).wait()
            self._receive(buffer, pair)
        return buffer

    def _receive(self, buffer, pair):
        if self._stream is None:
            pair.receive(buffer.features).wait()
        elif buffer.staged is not None:
            pair.receive(buffer.staged).wait()
            buffer.features.copy_(buffer.staged, non_blocking=True)
        else:
            with torch.cuda.stream(self._stream):
                pair.receive(buffer.features).wait()
            torch.cuda.current_stream().wait_stream(self._stream)

    def release(self, buffer: PacketBuffer) -> None:
        """The work that reads this buffer has been launched."""
        buffer.mark()
        self._free.append(buffer)

    def stop(self, assignment: Assignment, target: int) -> None:
        """Take the offer of an assignment that will not be trained and answer STOP."""
        pair, buffer = self.pairs[target], self._free[0]
        pair.receive(buffer.message.buffer).wait()
        buffer.message.check(assignment)
        pair.send(self._stop).wait()
