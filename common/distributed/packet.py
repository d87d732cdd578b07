"""What travels from a target to a drafter: a row of tokens with its masks on the host, its features on the device.

Legend: T tokens of a row, F feature width (taps x hidden, with the final hidden state behind it where it is needed).
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from common.data.rows import Row
from common.data.schedule import Assignment
from common.errors import UserError

MAGIC, VERSION = 0x4446_4C41_5348, 1
HEADER = (
    "magic",
    "version",
    "row_tokens",
    "kind",
    "step",
    "number",
    "epoch",
    "row",
    "valid",
    "documents",
    "checksum",
    "busy_us",
    "blocked_us",
    "fallbacks",
)
HEADER_BYTES = 16 * 8
HOST = torch.device("cpu")


class HostMessage:
    """The host side of a packet: one contiguous byte buffer, with its header and the row's arrays as views on it.

    Shapes: buffer uint8 [128 + 9 T]: header int64 [16], tokens int32 [T], document_start int32 [T], loss_mask uint8 [T].
    """

    def __init__(self, row_tokens: int, pinned: bool = False):
        T = row_tokens
        self.row_tokens = T
        self.buffer = torch.zeros(HEADER_BYTES + 9 * T, dtype=torch.uint8, pin_memory=pinned)
        data = self.buffer.numpy()
        self.header = data[:HEADER_BYTES].view(np.int64)
        self.payload = data[HEADER_BYTES:]
        self.tokens = self.payload[: 4 * T].view(np.int32)
        self.document_start = self.payload[4 * T : 8 * T].view(np.int32)
        self.loss_mask = self.payload[8 * T :]

    def write(
        self, row: Row, assignment: Assignment, epoch: int, row_index: int, busy_us: int = 0, blocked_us: int = 0, fallbacks: int = 0
    ) -> None:
        """Fill the message: a row, which packet it is, for how long its target computed and was kept waiting, and how many faster ways
        it cannot take."""
        self.tokens[:], self.document_start[:], self.loss_mask[:] = row.tokens, row.document_start, row.loss_mask
        values = (
            MAGIC,
            VERSION,
            self.row_tokens,
            assignment.kind,
            assignment.step,
            assignment.number,
            epoch,
            row_index,
            row.valid,
            row.documents,
        )
        self.header[: len(values)] = values
        self._seal(busy_us, blocked_us, fallbacks)

    def pass_on(self, other: "HostMessage", busy_us: int, blocked_us: int, fallbacks: int) -> None:
        """Fill the message with another stage's, and add this one's times; ways that any stage cannot take are none of the chain's."""
        self.buffer.copy_(other.buffer)
        self._seal(other.get("busy_us") + busy_us, other.get("blocked_us") + blocked_us, max(other.get("fallbacks"), fallbacks))

    def _seal(self, busy_us: int, blocked_us: int, fallbacks: int) -> None:
        self.set("busy_us", busy_us)
        self.set("blocked_us", blocked_us)
        self.set("fallbacks", fallbacks)
        self.set("checksum", self._checksum())

    def _checksum(self) -> int:
        """Of everything but itself."""
        header = self.header.copy()
        header[HEADER.index("checksum")] = 0
        return zlib.crc32(self.payload.data, zlib.crc32(header.data))

    def get(self, name: str) -> int:
        """A field of the header."""
        return int(self.header[HEADER.index(name)])

    def set(self, name: str, value: int) -> None:
        """Write a field of the header."""
        self.header[HEADER.index(name)] = value

    def row(self) -> Row:
        """The row, as views on this message."""
        return Row(self.tokens, self.document_start, self.loss_mask, self.get("valid"), self.get("documents"))

    def check(self, assignment: Assignment) -> None:
        """Refuse a message that is damaged or is not the packet that is due.

        Raises: UserError with both sides of the difference.
        """
        if (self.get("magic"), self.get("version")) != (MAGIC, VERSION):
            raise UserError("a packet's header is not ours or of another version: all ranks must run the same release of this suite")
        if self.get("row_tokens") != self.row_tokens:
            raise UserError(
                f"a packet has rows of {self.get('row_tokens')} tokens, {self.row_tokens} were expected: use one data.pack_tokens"
            )
        offered = (self.get("kind"), self.get("step"), self.get("number"))
        if offered != (assignment.kind, assignment.step, assignment.number):
            raise UserError(
                f"offered packet (kind, step, number)={offered}, due is {(assignment.kind, assignment.step, assignment.number)}"
            )
        T, row = self.row_tokens, self.row()
        if not 0 <= row.valid <= T or not 0 <= row.documents <= row.valid:
            raise UserError(f"packet {assignment.number}: {row.valid} tokens in {row.documents} documents do not fit a row of {T}")
        if self._checksum() != self.get("checksum"):
            raise UserError(f"packet {assignment.number} was damaged on its way (checksum differs)")
        if (row.document_start < 0).any() or (row.document_start > np.arange(T)).any():
            raise UserError(f"packet {assignment.number}: a document starts behind its own token")


@dataclass(frozen=True)
class PacketShape:
    """What every packet of a run has in common: T tokens, F values a token, their type, and where the buffers live."""

    row_tokens: int
    width: int
    dtype: torch.dtype
    device: torch.device = HOST

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one packet's features."""
        return self.row_tokens * self.width * self.dtype.itemsize

    def on(self, device: torch.device | str) -> "PacketShape":
        """The same shape with its buffers on a device."""
        return replace(self, device=torch.device(device))


class PacketBuffer:
    """Storage of one packet at one end of a link, allocated once.

    Shapes: features [T, F] in the target's compute type on the shape's device; `staged`, their copy in pinned host memory, where
    features of a CUDA device travel through the host, else None.
    """

    def __init__(self, shape: PacketShape, staged: bool = False):
        cuda = shape.device.type == "cuda"
        self.message = HostMessage(shape.row_tokens, pinned=cuda)
        self.features = torch.zeros(shape.row_tokens, shape.width, dtype=shape.dtype, device=shape.device)
        self.staged = torch.empty_like(self.features, device="cpu", pin_memory=True) if staged else None
        self.launched = torch.cuda.Event() if cuda else None
        """Passes when the work that was launched on this buffer before the last `mark` is done."""

    @property
    def row(self) -> Row:
        """The row of the packet that lies here, as views on its message."""
        return self.message.row()

    def mark(self) -> None:
        """Work that fills or reads this buffer has been launched on the current stream."""
        if self.launched is not None:
            self.launched.record()

    def finish(self) -> None:
        """Wait, on the host, for the work of the last `mark`."""
        if self.launched is not None:
            self.launched.synchronize()
