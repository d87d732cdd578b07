"""Which documents share a row.

Legend: N documents, R rows.
"""

from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.seeds import STREAM_PACK, generator


@dataclass(frozen=True)
class Rows:
    """Which documents each row holds: row r holds `documents[offsets[r]:offsets[r+1]]`, each cut to `limit` tokens."""

    documents: np.ndarray
    offsets: np.ndarray
    pack_tokens: int
    limit: int
    tokens: int
    truncated: int
    dropped: int

    def __len__(self):
        return len(self.offsets) - 1

    @property
    def fill(self):
        return self.tokens / (len(self) * self.pack_tokens) if len(self) else 0.0

    def documents_of(self, row):
        return self.documents[self.offsets[row] : self.offsets[row + 1]]


def pack_rows(lengths_N, pack_tokens, max_document_tokens, long_documents, seed):
    """Pack documents into rows of `pack_tokens`, first-fit decreasing; which of several equally long ones goes where is drawn from `seed`.

    Documents of one length are interchangeable, so a row is filled once with the longest lengths that still fit and repeated while they
    last: the work grows with the number of distinct lengths, not of documents.
    """
    limit = max_document_tokens or pack_tokens
    if limit > pack_tokens:
        raise UserError(
            f"data.max_document_tokens={limit} exceeds data.pack_tokens={pack_tokens}: no document straddles rows; raise pack_tokens"
        )
    lengths_N = np.asarray(lengths_N)
    too_long = int((lengths_N > limit).sum())
    draw = generator(seed, STREAM_PACK)
    order = draw.permutation(len(lengths_N))
    if long_documents == "drop":
        order = order[lengths_N[order] <= limit]
    cut = np.minimum(lengths_N[order], limit)
    order = order[np.argsort(cut, kind="stable")]
    left = np.bincount(cut)
    ends, left = np.cumsum(left).tolist(), left.tolist()  # by length: where its unplaced documents end in `order`, and how many they are
    available = sum(1 << length for length, count in enumerate(left) if count)  # bit l: a document of length l is left
    blocks, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    while available:
        uses, room, candidates = {}, pack_tokens, available
        while candidates := candidates & ((1 << (room + 1)) - 1):
            length = candidates.bit_length() - 1
            uses[length] = min(room // length, left[length])
            room -= uses[length] * length
            candidates ^= 1 << length  # none left, or no room for another
        repeats = min(left[length] // count for length, count in uses.items())
        columns = []
        for length, count in uses.items():
            taken = order[ends[length] - repeats * count : ends[length]]
            columns.append(taken.reshape(repeats, count))
            ends[length] -= len(taken)
            left[length] -= len(taken)
            if not left[length]:
                available ^= 1 << length
        block = np.concatenate(columns, axis=1)
        blocks.append(block.ravel())
        sizes.append(np.full(repeats, block.shape[1]))
    documents, sizes = np.concatenate(blocks), np.concatenate(sizes)
    shuffle = draw.permutation(len(sizes))  # so that the first rows are a fair sample, not the longest documents
    offsets = np.concatenate([[0], np.cumsum(sizes[shuffle])])
    begins = (np.cumsum(sizes) - sizes)[shuffle]
    documents = documents[np.repeat(begins - offsets[:-1], sizes[shuffle]) + np.arange(len(documents))]
    truncated, dropped = (0, too_long) if long_documents == "drop" else (too_long, 0)
    return Rows(documents, offsets, pack_tokens, limit, int(cut.sum()), truncated, dropped)
