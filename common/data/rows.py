"""A row: documents packed side by side, the unit that a target reads.

Legend: T tokens of a row.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.data.packing import PackedRows
from common.data.store import TokenStore

EMPTY_ROW = -1  # the row index of a packet that only fills a round: weight 0


@dataclass
class Row:
    """One packed row of documents.

    Shapes: tokens, document_start int32 [T], loss_mask uint8 [T]. `document_start[p]` is the row index of the first token of
    p's document; the padding behind the last document is a document of its own. `valid` tokens are no padding.
    """

    tokens: np.ndarray
    document_start: np.ndarray
    loss_mask: np.ndarray
    valid: int
    documents: int

    def spans(self) -> list[tuple[int, int]]:
        """(first, past-the-last) row index of each document, padding left out."""
        starts = np.flatnonzero(self.document_start[: self.valid] == np.arange(self.valid))
        return list(itertools.pairwise([*starts.tolist(), self.valid])) if self.valid else []

    def positions(self) -> np.ndarray:
        """int32 [T]: each token's index in its own document."""
        return np.arange(len(self.tokens), dtype=np.int32) - self.document_start

    @classmethod
    def empty(cls, row_tokens: int) -> "Row":
        zeros = np.zeros(row_tokens, np.int32)
        return cls(zeros, zeros.copy(), np.zeros(row_tokens, np.uint8), valid=0, documents=0)


class RowLoader:
    """Reads packed rows from a store, packed anew for every epoch; every rank and thread that asks gets the same rows."""

    def __init__(self, store: TokenStore, pack: Callable[[int], PackedRows]):
        self.store, self._pack = store, functools.lru_cache(2)(pack)
        self._lock = threading.Lock()

    def packed(self, epoch: int = 0) -> PackedRows:
        """Which documents share a row in this epoch."""
        with self._lock:
            return self._pack(epoch)

    def count(self, epoch: int = 0) -> int:
        """Rows of an epoch; their number differs a little from epoch to epoch."""
        return len(self.packed(epoch))

    def documents_of(self, epoch: int, row: int) -> np.ndarray:
        return self.packed(epoch).documents_of(row) if row != EMPTY_ROW else np.empty(0, np.int64)

    def row(self, epoch: int, index: int) -> Row:
        """The Row of this index; EMPTY_ROW gives one that is all padding."""
        packed = self.packed(epoch)
        row, end = Row.empty(packed.pack_tokens), 0
        for document in self.documents_of(epoch, index):
            ids, mask = self.store.document(document)
            begin, end = end, end + min(len(ids), packed.limit)
            row.tokens[begin:end], row.loss_mask[begin:end] = ids[: end - begin], mask[: end - begin]
            row.document_start[begin:end] = begin
            row.documents += 1
        row.document_start[end:] = row.valid = end
        return row
