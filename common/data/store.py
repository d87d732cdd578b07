"""Tokens on disk.

A store is a folder of raw arrays (memory-mapped, never unpickled) and `meta.json`, the marker that is written last:

    tokens.bin int32[total]   mask.bin uint8[total]   offsets.bin int64[N+1]   sources.bin uint16[N]

Legend: N documents, n tokens of one.
"""

import hashlib
import json
import os
import shutil
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from common.cli import writing
from common.errors import UserError
from common.locks import OutputLock
from common.trees import digest

VERSION = 1
FLAG = "--output"
"""How the user named the folder that a store is written to."""
FILES = {"tokens": np.int32, "mask": np.uint8, "offsets": np.int64, "sources": np.uint16}
STORE_FILES = {"meta.json", *(f"{name}.bin" for name in FILES)}

Document = tuple[np.ndarray, np.ndarray]
"""Token ids int32 [n], and a loss mask uint8 [n] that is 1 on supervised tokens."""


def vocabulary_digest(tokenizer_json: str) -> str:
    """Hash of the token-to-id table in the text of a tokenizer.json: equal for tokenizers that give the same ids their meaning."""
    return digest(json.loads(tokenizer_json)["model"]["vocab"])


def _vocabulary_of(file: Path) -> str:
    """The same of a tokenizer.json that may be anything. Raises: UserError."""
    try:
        return vocabulary_digest(file.read_text())
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is no tokenizer ({type(error).__name__}: {str(error)[:100]}): fetch it again") from None


def added_tokens_digest(tokenizer_json: str) -> str:
    """Hash of the added tokens in the text of a tokenizer.json: equal for tokenizers that keep the same words of a text whole."""
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return digest(sorted([token["id"], token["content"], bool(token.get("special"))] for token in added))


class _File:
    """A file that knows the hash of what was written, and is on the disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.file, self.hash = open(path, "wb"), hashlib.sha256()  # noqa: SIM115

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)

    def close(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.hash.hexdigest()


class StoreWriter:
    """Write a token store: documents are added one by one, and the folder appears, whole, when it is closed.

    `meta` may grow until then. Left by an exception, as a context manager, it leaves nothing behind.

    Raises: UserError if the folder holds something else, cannot be written, or is being written by another command.
    """

    def __init__(self, folder: str | Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = Path(folder).resolve(), meta
        if self.folder.exists() and not _may_be_replaced(self.folder):
            raise UserError(f"{folder} exists and is not (only) a token store: it will not be overwritten; name another folder")
        with writing(FLAG, folder, "make room, or name another folder"):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.lock = OutputLock(FLAG, self.folder)
            self.temporary = self.folder.with_name(f".{self.folder.name}.partial")
            try:
                shutil.rmtree(self.temporary, ignore_errors=True)  # of a command that was killed
                self.temporary.mkdir()
                self.tokens, self.mask = _File(self.temporary / "tokens.bin"), _File(self.temporary / "mask.bin")
            except OSError:
                self._give_up()
                raise
        self.offsets, self.sources, self.supervised = array("q", [0]), array("H"), 0
        self.source_names: dict[str, int] = {}
        self._used = np.zeros(0, bool)  # by token id

    def add(self, ids: Any, mask: Any, source: str = "") -> None:
        """Append a document: token ids, a mask that is 1 on supervised tokens, and where it came from.

        Shapes: anything that numpy makes two arrays [n] of. Raises: UserError if they are none that a target could read.
        """
        ids, mask = np.asarray(ids, np.int32), np.asarray(mask, np.uint8)
        vocab_size = self.meta.get("vocab_size")
        if ids.ndim != 1 or not len(ids) or ids.shape != mask.shape or mask.max() > 1:
            raise UserError(f"a document needs as many 0/1 mask values as tokens, at least one; got shapes {ids.shape} and {mask.shape}")
        if ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size):
            raise UserError(f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocab_size}; use the target's own tokenizer")
        with writing(FLAG, self.folder):
            self.tokens.write(ids.tobytes())
            self.mask.write(mask.tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        self.sources.append(self.source_names.setdefault(source, len(self.source_names)))
        self.supervised += int(mask.sum())
        if ids.max() >= len(self._used):
            self._used = np.append(self._used, np.zeros(int(ids.max()) + 1, bool))
        self._used[ids] = True

    def close(self) -> dict[str, Any]:
        """Make the store visible and return its meta. Raises: UserError if the disk is full; nothing has changed then."""
        try:
            with writing(FLAG, self.folder):
                self.meta = self._close()
        finally:
            self._give_up()
        return self.meta

    def _close(self) -> dict[str, Any]:
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
        old = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, old)
        os.rename(self.temporary, self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return meta

    def _give_up(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.lock.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()


def _may_be_replaced(folder: Path) -> bool:
    """Whether a folder is empty, or a token store and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    return not names or ("meta.json" in names and names <= STORE_FILES)


class TokenStore:
    """A store opened for reading. Sizes and index are checked against meta.json before anything is believed.

    `lengths` are the documents' in tokens, `source_of[i]` the index in `source_names` of the file that document i came from,
    `fingerprint` a hash of all arrays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The store in a folder. Raises: UserError where there is none, or a damaged one."""
        folder = Path(folder)
        if not (folder / "meta.json").is_file():
            raise UserError(
                f"{folder} is not a token store; write one: python prepare_data.py pack FILE.jsonl --target T --output {folder}"
            )
        try:
            return cls(folder)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(f"token store {folder} is damaged ({error!r}); pack it again") from None

    def _read(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != VERSION:
            raise ValueError(f"format {meta['version']}, this code reads {VERSION}")
        if meta.pop("digest") != digest(meta):
            raise ValueError("meta.json does not match its own digest")
        documents, tokens = meta["documents"], meta["tokens"]
        if type(documents) is not int or type(tokens) is not int or not 0 < documents <= tokens:
            raise ValueError(f"documents={documents!r} tokens={tokens!r}")
        if not isinstance(meta["source_names"], list) or not all(type(name) is str for name in meta["source_names"]):
            raise ValueError("source_names of a wrong type")
        if type(meta["fingerprint"]) is not str or not meta["fingerprint"]:
            raise ValueError("no fingerprint")
        if type(meta.get("vocab_size", 1)) is not int or type(meta["supervised_tokens"]) is not int:
            raise ValueError("vocab_size or supervised_tokens of a wrong type")
        counts = {"tokens": tokens, "mask": tokens, "offsets": documents + 1, "sources": documents}
        arrays = {}
        for name, dtype in FILES.items():
            path, stated_bytes = folder / f"{name}.bin", counts[name] * np.dtype(dtype).itemsize
            if path.stat().st_size != stated_bytes:
                raise ValueError(f"{name}.bin has {path.stat().st_size} bytes, meta.json says {stated_bytes}")
            arrays[name] = np.memmap(path, dtype, "r")
        offsets, sources = arrays["offsets"], arrays["sources"]
        if digest([hashlib.sha256(arrays[name].data).hexdigest() for name in ("offsets", "sources")]) != meta["index"]:
            raise ValueError("offsets.bin or sources.bin changed after writing")
        self.lengths = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != tokens or self.lengths.min() < 1 or sources.max() >= len(meta["source_names"]):
            raise ValueError("offsets or sources out of range")
        self.meta, self.fingerprint, self.source_names = meta, meta["fingerprint"], meta["source_names"]
        self._used = np.unpackbits(np.frombuffer(bytes.fromhex(meta["used_ids"]), np.uint8))
        self._highest = int(np.flatnonzero(self._used)[-1])
        self.source_of, self._arrays = sources, arrays

    @property
    def packed_with(self) -> dict[str, str]:
        """Hashes of what made text of its conversations and tokens of the text; those that a store of earlier versions knows."""
        kinds = {"chat template": "template_digest", "added tokens": "added_tokens_digest"}
        return {what: str(self.meta[key]) for what, key in kinds.items() if key in self.meta}

    def __len__(self) -> int:
        return len(self.lengths)

    def check_target(self, folder: str | Path, vocab_size: int) -> None:
        """Refuse a target other than the one the store was packed for, by the size of its embedding and its tokenizer's vocabulary.

        Raises: UserError naming both.
        """
        tokenizer, packed_for = Path(folder) / "tokenizer.json", self.meta.get("target", "another target")
        packed_with, added = self.meta.get("vocabulary_digest"), self.meta.get("added_tokens_digest")
        if self._highest >= vocab_size:
            what = f"holds token {self._highest}, but the embedding of {folder} has {vocab_size} rows"
        elif packed_with and tokenizer.is_file() and _vocabulary_of(tokenizer) != packed_with:
            what = f"was packed with another tokenizer than that of {folder}"
        elif added and tokenizer.is_file() and added_tokens_digest(tokenizer.read_text()) != added:
            what = f"was packed with other added tokens than those of {folder}, so that texts become other tokens"
        else:
            return
        raise UserError(f"{self.folder} {what} (it was packed for {packed_for}); pack it again with --target {folder}")

    def describe(self) -> str:
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
    def used_ids(self) -> np.ndarray:
        """Token ids that occur anywhere in the store, ascending."""
        return np.flatnonzero(self._used)

    def document(self, i: int) -> Document:
        """Token ids and loss mask of document i. Raises: UserError if the files were damaged since the store was opened."""
        begin, end = self._arrays["offsets"][i], self._arrays["offsets"][i + 1]
        ids, mask = np.array(self._arrays["tokens"][begin:end]), np.array(self._arrays["mask"][begin:end])
        if ids.min() < 0 or ids.max() > self._highest or mask.max() > 1:
            raise UserError(f"token store {self.folder}, document {i}: ids or mask out of range; the files are damaged, pack it again")
        return ids, mask
