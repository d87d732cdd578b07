"""Which documents share a row: drawn anew for every epoch, so that a row is a fair sample of the data.

Documents come in random order and go where they fit best among some dozens of open rows. Packing by sorted length fills rows a little
better, but then a row holds documents of one length and one kind: measured, it costs 0.05 of held-out tau (benchmarks/README.md).

Legend: N documents, T tokens of a row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.seeds import generator

OPEN_ROWS = 64
"""Rows that wait for a document that fits; more fill no better (measured up to 512)."""


@dataclass(frozen=True)
class PackedRows:
    """Which documents each row of one epoch holds: row r holds `documents[offsets[r]:offsets[r+1]]`, each cut to `limit` tokens.

    `tokens` are those of all rows, `most_documents` what a row of any epoch may hold; `truncated` and `dropped` count documents longer
    than the limit.
    """

    documents: np.ndarray
    offsets: np.ndarray
    pack_tokens: int
    limit: int
    most_documents: int
    tokens: int
    truncated: int
    dropped: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that are no padding."""
        return self.tokens / (len(self) * self.pack_tokens) if len(self) else 0.0

    def documents_of(self, row: int) -> np.ndarray:
        return self.documents[self.offsets[row] : self.offsets[row + 1]]


def pack_rows(
    lengths_N: np.ndarray, pack_tokens: int, max_document_tokens: int | None, long_documents: str, seed: int, epoch: int = 0
) -> PackedRows:
    """Pack documents into rows of `pack_tokens`: best fit over open rows, in an order drawn from (seed, epoch). Every document lies in one
    row; longer ones than `max_document_tokens` (None: a row) are cut, or left out where `long_documents` is `drop`.

    Raises: UserError for a limit beyond a row.
    """
    limit = max_document_tokens or pack_tokens
    if limit > pack_tokens:
        raise UserError(
            f"data.max_document_tokens={limit} exceeds data.pack_tokens={pack_tokens}: no document straddles rows; raise pack_tokens"
        )
    lengths_N = np.asarray(lengths_N)
    too_long = int((lengths_N > limit).sum())
    draw = generator("packing", seed, epoch)
    order = draw.permutation(len(lengths_N))
    if long_documents == "drop":
        order = order[lengths_N[order] <= limit]
    cut = np.minimum(lengths_N[order], limit)
    most = 16 + 2 * -(-pack_tokens // max(1, int(cut.mean()))) if len(cut) else 0  # one bound for all epochs: buffers have one size
    row_of, rows = _best_fit(cut.tolist(), pack_tokens, most)
    shuffled = draw.permutation(rows)[row_of]  # else the rows that are still open at the end, less full, would always come last
    offsets = np.concatenate([[0], np.cumsum(np.bincount(shuffled, minlength=rows))])
    truncated, dropped = (0, too_long) if long_documents == "drop" else (too_long, 0)
    documents = order[np.argsort(shuffled, kind="stable")]
    return PackedRows(documents, offsets, pack_tokens, limit, most, int(cut.sum()), truncated, dropped)


def _best_fit(lengths_N: Sequence[int], pack_tokens: int, most: int) -> tuple[np.ndarray, int]:
    """Each document's row, and the number of rows; a row closes when no document fits or when `most` documents lie in it."""
    shortest, rows = min(lengths_N, default=0), 0
    rooms: list[int] = []  # of the open rows, ascending, and beside them what they are and hold
    names: list[int] = []
    held: list[int] = []
    row_of = np.empty(len(lengths_N), np.int64)
    for document, length in enumerate(lengths_N):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            if at == OPEN_ROWS:
                rooms.pop(0), names.pop(0), held.pop(0)  # the fullest one
            room, row, count, rows = pack_tokens, rows, 0, rows + 1
        else:
            room, row, count = rooms.pop(at), names.pop(at), held.pop(at)
        row_of[document] = row
        room, count = room - length, count + 1
        if room >= shortest and count < most:
            at = bisect_left(rooms, room)
            rooms.insert(at, room), names.insert(at, row), held.insert(at, count)
    return row_of, rows
