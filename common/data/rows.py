"""A row: documents packed side by side, the unit that a target reads.

Legend: T tokens of a row.
"""

import itertools
from dataclasses import dataclass

import numpy as np

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

    def spans(self):
        """(first, past-the-last) row index of each document, padding left out."""
        starts = np.flatnonzero(self.document_start[: self.valid] == np.arange(self.valid))
        return list(itertools.pairwise([*starts.tolist(), self.valid])) if self.valid else []

    def positions(self):
        """int32 [T]: each token's index in its own document."""
        return np.arange(len(self.tokens), dtype=np.int32) - self.document_start

    @classmethod
    def empty(cls, row_tokens):
        zeros = np.zeros(row_tokens, np.int32)
        return cls(zeros, zeros.copy(), np.zeros(row_tokens, np.uint8), valid=0, documents=0)


class RowLoader:
    """Reads packed rows from a store."""

    def __init__(self, store, rows):
        self.store, self.rows = store, rows

    def __len__(self):
        return len(self.rows)

    def documents_of(self, row):
        return self.rows.documents_of(row) if row != EMPTY_ROW else np.empty(0, np.int64)

    def row(self, index):
        """The Row of this index; EMPTY_ROW gives one that is all padding."""
        row, at = Row.empty(self.rows.pack_tokens), 0
        for document in self.documents_of(index):
            ids, mask = self.store.document(document)
            end = at + min(len(ids), self.rows.limit)
            row.tokens[at:end], row.loss_mask[at:end] = ids[: end - at], mask[: end - at]
            row.document_start[at:end] = at
            row.documents += 1
            at = end
        row.document_start[at:] = row.valid = at
        return row
