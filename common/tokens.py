"""Tokens on disk, packed into rows, dealt to drafters.

Legend: N documents, R rows, T tokens of a row, D drafters.

A store is a folder of raw arrays (memory-mapped, never unpickled) and `meta.json`, the marker that is written last:

    tokens.bin int32[total]   mask.bin uint8[total]   offsets.bin int64[N+1]   sources.bin uint16[N]
"""

import functools
import hashlib
import json
import os
import shutil
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import UserError, digest
from common.packet import EMPTY_ROW, Row

VERSION = 1
TRAIN, VALIDATE = 0, 1
STREAM_PACK, STREAM_ORDER = 1, 2  # what a seed is used for; zero would vanish in a SeedSequence
FILES = {"tokens": np.int32, "mask": np.uint8, "offsets": np.int64, "sources": np.uint16}


def generator(*key):
    """A numpy generator that depends on the integers of `key` and on nothing else."""
    return np.random.default_rng(np.random.SeedSequence(key))


def vocabulary_digest(tokenizer_json):
    """Hash of the token-to-id table in the text of a tokenizer.json: equal for tokenizers that give the same ids their meaning."""
    return digest(json.loads(tokenizer_json)["model"]["vocab"])


STORE_FILES = {"meta.json", "tokens.bin", "mask.bin", "offsets.bin", "sources.bin"}


class _File:
    """A file that knows the hash of what was written, and is on the disk once it is closed."""

    def __init__(self, path):
        self.file, self.hash = open(path, "wb"), hashlib.sha256()  # noqa: SIM115

    def write(self, data):
        self.file.write(data)
        self.hash.update(data)

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.hash.hexdigest()


class StoreWriter:
    """Write a token store: documents are added one by one, and the folder appears, whole, when it is closed.

    `meta` may grow until then. Left by an exception, as a context manager, it leaves nothing behind.
    """

    def __init__(self, folder, meta):
        self.folder, self.meta = Path(folder).resolve(), meta
        if self.folder.exists() and not _may_be_replaced(self.folder):
            raise UserError(f"{folder} exists and is not (only) a token store: it will not be overwritten; name another folder")
        self.temporary = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.partial")
        shutil.rmtree(self.temporary, ignore_errors=True)
        try:
            self.temporary.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); name another folder") from None
        self.tokens, self.mask = _File(self.temporary / "tokens.bin"), _File(self.temporary / "mask.bin")
        self.offsets, self.sources, self.source_names, self.supervised = array("q", [0]), array("H"), {}, 0
        self._used = np.zeros(0, bool)  # by token id

    def add(self, ids, mask, source=""):
        """Append a document: token ids, a mask that is 1 on supervised tokens, and where it came from."""
        ids, mask = np.asarray(ids, np.int32), np.asarray(mask, np.uint8)
        vocab_size = self.meta.get("vocab_size")
        if ids.ndim != 1 or not len(ids) or ids.shape != mask.shape or mask.max() > 1:
            raise UserError(f"a document needs as many 0/1 mask values as tokens, at least one; got shapes {ids.shape} and {mask.shape}")
        if ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size):
            raise UserError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab_size}; use the target's own tokenizer")
        self.tokens.write(ids.tobytes())
        self.mask.write(mask.tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        self.sources.append(self.source_names.setdefault(source, len(self.source_names)))
        self.supervised += int(mask.sum())
        if ids.max() >= len(self._used):
            self._used = np.append(self._used, np.zeros(int(ids.max()) + 1, bool))
        self._used[ids] = True

    def close(self):
        """Make the store visible and return its meta."""
        offsets, sources = _File(self.temporary / "offsets.bin"), _File(self.temporary / "sources.bin")
        offsets.write(self.offsets.tobytes())
        sources.write(self.sources.tobytes())
        hashes = [file.close() for file in (self.tokens, self.mask, offsets, sources)]
        meta = self.meta | {
            "version": VERSION,
            "documents": len(self.sources),
            "tokens": self.offsets[-1],
            "supervised_tokens": self.supervised,
            "source_names": list(self.source_names),
            "used_ids": np.packbits(self._used).tobytes().hex(),
            "index": digest(hashes[2:]),
            "fingerprint": digest(hashes),
        }
        marker = _File(self.temporary / "meta.json")
        marker.write(json.dumps(meta | {"digest": digest(meta)}, indent=1).encode())
        marker.close()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.rename(self.temporary, self.folder)
        return meta

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.close()
        else:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _may_be_replaced(folder):
    """Whether a folder is empty, or a token store and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    return not names or ("meta.json" in names and names <= STORE_FILES)


class TokenStore:
    """A store opened for reading. Sizes and index are checked against meta.json before anything is believed."""

    @classmethod
    def open(cls, folder):
        """Raises: UserError where there is no store, or a damaged one."""
        store, folder = cls(), Path(folder)
        if not (folder / "meta.json").is_file():
            raise UserError(
                f"{folder} is not a token store; write one: python prepare_data.py pack FILE.jsonl --target T --output {folder}"
            )
        try:
            store._read(folder)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(f"token store {folder} is damaged ({error!r}); pack it again") from None
        store.folder = folder
        return store

    def _read(self, folder):
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != VERSION:
            raise ValueError(f"format {meta['version']}, this code reads {VERSION}")
        if meta.pop("digest") != digest(meta):
            raise ValueError("meta.json does not match its own digest")
        documents, tokens = meta["documents"], meta["tokens"]
        if type(documents) is not int or type(tokens) is not int or not 0 < documents <= tokens:
            raise ValueError(f"documents={documents!r} tokens={tokens!r}")
        if not isinstance(meta["source_names"], list) or type(meta.get("vocab_size", 1)) is not int:
            raise ValueError("source_names or vocab_size of a wrong type")
        counts = {"tokens": tokens, "mask": tokens, "offsets": documents + 1, "sources": documents}
        arrays = {}
        for name, dtype in FILES.items():
            path, wanted = folder / f"{name}.bin", counts[name] * np.dtype(dtype).itemsize
            if path.stat().st_size != wanted:
                raise ValueError(f"{name}.bin has {path.stat().st_size} bytes, meta.json says {wanted}")
            arrays[name] = np.memmap(path, dtype, "r")
        offsets, sources = arrays["offsets"], arrays["sources"]
        if digest([hashlib.sha256(arrays[name]).hexdigest() for name in ("offsets", "sources")]) != meta["index"]:
            raise ValueError("offsets.bin or sources.bin changed after writing")
        self.lengths = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != tokens or self.lengths.min() < 1 or sources.max() >= len(meta["source_names"]):
            raise ValueError("offsets or sources out of range")
        self.meta, self.fingerprint, self.source_names = meta, meta["fingerprint"], meta["source_names"]
        self._used = np.unpackbits(np.frombuffer(bytes.fromhex(meta["used_ids"]), np.uint8))
        self._highest = int(np.flatnonzero(self._used)[-1])
        self.source_of, self._arrays = sources, arrays

    def __len__(self):
        return len(self.lengths)

    def check_target(self, folder, vocab_size):
        """Refuse a target other than the one the store was packed for, by the size of its embedding and its tokenizer's vocabulary.

        Raises: UserError naming both.
        """
        tokenizer, packed_for = Path(folder) / "tokenizer.json", self.meta.get("target", "another target")
        wanted = self.meta.get("vocabulary_digest")
        if self._highest >= vocab_size:
            what = f"holds token {self._highest}, but the embedding of {folder} has {vocab_size} rows"
        elif wanted and tokenizer.is_file() and vocabulary_digest(tokenizer.read_text()) != wanted:
            what = f"was packed with another tokenizer than that of {folder}"
        else:
            return
        raise UserError(f"{self.folder} {what} (it was packed for {packed_for}); pack it again with --target {folder}")

    def describe(self):
        """The store in a few lines: counts, sources, a histogram of document lengths."""
        meta, lines = self.meta, []
        lines.append(f"{len(self):,} documents, {meta['tokens']:,} tokens, {meta['supervised_tokens'] / meta['tokens']:.1%} supervised")
        counts = np.bincount(self.source_of, minlength=len(self.source_names))
        lines += [f"  from {name}: {count:,}" for name, count in zip(self.source_names, counts, strict=True)]
        lines.append(f"tokens per document: {self.lengths.min()} to {self.lengths.max()}, median {int(np.median(self.lengths))}")
        exponents = np.log2(self.lengths).astype(int)
        for exponent, count in enumerate(np.bincount(exponents)):
            if exponent >= exponents.min():
                lines.append(f"  {2**exponent:>7,} to {2 ** (exponent + 1) - 1:>7,}: {count:>9,} {'#' * -(-50 * count // len(self))}")
        return "\n".join(lines)

    @property
    def used_ids(self):
        """Token ids that occur anywhere in the store, ascending."""
        return np.flatnonzero(self._used)

    def document(self, i):
        """Token ids int32[n] and loss mask uint8[n] of document i."""
        begin, end = self._arrays["offsets"][i], self._arrays["offsets"][i + 1]
        ids, mask = np.array(self._arrays["tokens"][begin:end]), np.array(self._arrays["mask"][begin:end])
        if ids.min() < 0 or ids.max() > self._highest or mask.max() > 1:
            raise UserError(f"token store {self.folder}, document {i}: ids or mask out of range; the files are damaged, pack it again")
        return ids, mask


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


class Item(NamedTuple):
    """One packet's place in the run: the optimiser step it belongs to (from 1), its number among its kind, and the drafter it goes to."""

    kind: int
    step: int
    number: int
    drafter: int


def serving_target(item, cell_drafter, cell_drafters, cell_targets, drafters):
    """Which of its cell's targets computes a packet: the cell's packets go round them in turn.

    `cell_drafter` is the item's drafter counted within its cell; `drafters` counts all cells'.
    """
    return (item.number // drafters * cell_drafters + cell_drafter) % cell_targets


class Deal:
    """Who gets which row when: a pure function of the config's numbers, so every rank computes the same and nobody negotiates.

    At micro-step u drafter d of D consumes packet u*D + d. An epoch's rows are shuffled anew, and its trailing round of fewer than
    D x accumulate rows is dropped. `validation_every` steps, and after the last, all validation rows are dealt the same way.

    Raises: UserError when the rows do not fill one step.
    """

    def __init__(self, rows, drafters, accumulate, seed, steps=None, epochs=None, validation_rows=0, validation_every=1):
        self.rows, self.drafters, self.accumulate, self.seed = rows, drafters, accumulate, seed
        self.step_packets = drafters * accumulate
        self.steps_per_epoch = rows // self.step_packets
        self.dropped_rows = rows % self.step_packets  # per epoch
        self.validation_rows, self.validation_every = validation_rows, validation_every
        if not self.steps_per_epoch:
            raise UserError(
                f"the data fill {rows} rows, one step takes {drafters} drafters x optim.accumulate={accumulate} = {self.step_packets}; "
                "use more data, a smaller data.pack_tokens or fewer drafters"
            )
        self.steps = steps if steps is not None else max(1, round(epochs * self.steps_per_epoch))
        self._order = functools.lru_cache(2)(lambda epoch: generator(seed, STREAM_ORDER, epoch).permutation(rows))

    def validates(self, step):
        return self.validation_rows > 0 and (step % self.validation_every == 0 or step == self.steps)

    def items(self, completed_steps=0):
        """The Items of all steps after `completed_steps`, in the order in which everybody works through them."""
        for step in range(completed_steps + 1, self.steps + 1):
            first = (step - 1) * self.step_packets
            for number in range(first, first + self.step_packets):
                yield Item(TRAIN, step, number, number % self.drafters)
            if self.validates(step):
                for number in range(-(-self.validation_rows // self.drafters) * self.drafters):
                    yield Item(VALIDATE, step, number, number % self.drafters)

    def row_of(self, item):
        """(epoch, row) of an item; the row is EMPTY_ROW where a validation's last round has none left."""
        if item.kind == VALIDATE:
            return 0, item.number if item.number < self.validation_rows else EMPTY_ROW
        epoch, place = divmod(item.number, self.steps_per_epoch * self.step_packets)
        return epoch, int(self._order(epoch)[place])
