"""What travels from a target to a drafter: a row of tokens with its masks on the host, its features on the device.

Legend: T tokens of a row, F feature width (taps x hidden, with the final hidden state behind it where it is needed).
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from common.data.rows import Row
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
)
HEADER_BYTES = 16 * 8


class HostMessage:
    """The host side of a packet: one contiguous byte buffer, with its header and the row's arrays as views on it.

    Shapes: buffer uint8 [128 + 9 T]: header int64 [16], tokens int32 [T], document_start int32 [T], loss_mask uint8 [T].
    """

    def __init__(self, row_tokens, pinned=False):
        T = row_tokens
        self.row_tokens = T
        self.buffer = torch.zeros(HEADER_BYTES + 9 * T, dtype=torch.uint8, pin_memory=pinned)
        data = self.buffer.numpy()
        self.header = data[:HEADER_BYTES].view(np.int64)
        self.payload = data[HEADER_BYTES:]
        self.tokens = self.payload[: 4 * T].view(np.int32)
        self.document_start = self.payload[4 * T : 8 * T].view(np.int32)
        self.loss_mask = self.payload[8 * T :]

    def write(self, row, assignment, epoch, row_index, busy_us=0, blocked_us=0):
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
        self.set("busy_us", busy_us)
        self.set("blocked_us", blocked_us)
        self.set("checksum", self._checksum())

    def _checksum(self):
        """Of everything but itself."""
        header = self.header.copy()
        header[HEADER.index("checksum")] = 0
        return zlib.crc32(self.payload, zlib.crc32(header))

    def get(self, name):
        return int(self.header[HEADER.index(name)])

    def set(self, name, value):
        self.header[HEADER.index(name)] = value

    def row(self):
        return Row(self.tokens, self.document_start, self.loss_mask, self.get("valid"), self.get("documents"))

    def check(self, assignment):
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
    """What every packet of a run has in common: T tokens, F values a token, and where its buffers live."""

    row_tokens: int
    width: int
    dtype: torch.dtype
    device: torch.device | None = None

    @property
    def buffer_bytes(self):
        return self.row_tokens * self.width * self.dtype.itemsize

    def on(self, device):
        return replace(self, device=torch.device(device))


class PacketBuffer:
    """Storage of one packet at one end of a link, allocated once.

    Shapes: features [T, F] in the target's compute type, on the context's device.
    """

    def __init__(self, shape):
        self.message = HostMessage(shape.row_tokens, pinned=shape.device.type == "cuda")
        self.features = torch.zeros(shape.row_tokens, shape.width, dtype=shape.dtype, device=shape.device)

    @property
    def row(self):
        return self.message.row()
