"""A JSONL file of conversations that grows row by row, survives a kill at any moment, and keeps flawed rows apart."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.cli import check_output, json_object, writing
from common.data.conversations import Rejected
from common.errors import UserError
from common.locks import OutputLock
from common.trees import differences

FLAG = "--output"
FLAWS = ("empty", "cut", "loop", "duplicate")


class ConversationFile:
    """FILE of conversations, with FILE.rejected.jsonl (flawed rows and why) and FILE.errors.jsonl (rows to be tried again) beside it.

    Rows are appended and fsynced as they come. Opened again it knows the ids that are there. Nothing changes before the first row is
    added: a torn last line is cut off then. Locked until it is closed.

    Raises: UserError if FILE was begun with other settings, by somebody else, or is being written by another command.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], tokenizer: PreTrainedTokenizerFast, keep: Iterable[str] = ()) -> None:
        self.path, self.tokenizer, self.keep = Path(path), tokenizer, set(keep)
        self.rejected, self.errors, self.marker = (Path(f"{path}.{kind}") for kind in ("rejected.jsonl", "errors.jsonl", "settings.json"))
        if self.path.suffix == ".gz":
            raise UserError(f"{FLAG} {self.path}: rows are appended as plain text; compress the file when it is done")
        self.settings, self.counts, self._whole_bytes = settings, Counter[str](), dict[Path, int]()
        self.kept, self.done, self.seen, self.without_token_ids = set[str](), set[str](), set[bytes](), 0
        with writing(FLAG, self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._started = OutputLock(FLAG, self.path), False
        try:
            check_output(FLAG, self.path)
            self._begun = self._was_begun()
            if self._begun:
                self._read()
        except BaseException:
            self.close()
            raise

    def _was_begun(self) -> bool:
        """Whether an earlier run of this command wrote here. Raises: UserError if it had other settings, or was another command."""
        if not self.path.exists() or not (self.marker.exists() or self.path.stat().st_size):
            return False
        if not self.marker.exists():
            raise UserError(f"{FLAG} {self.path} exists and was not begun by this command; choose another {FLAG}")
        try:
            begun_with = json_object(self.marker.read_text())
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{self.marker} is damaged: choose another {FLAG}, or delete {self.path} and it") from None
        if changed := differences(begun_with, json.loads(json.dumps(self.settings))):
            listed = ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
            raise UserError(f"{FLAG} {self.path} was begun with other settings ({listed}); use those, or another {FLAG}")
        return True

    def _read(self) -> None:
        for row in self._rows(self.path):
            self.kept.add(row["id"])
            self.seen.add(conversation_digest(row))
            self.without_token_ids += "token_ids" not in row
        for row in self._rows(self.rejected):
            self.done.add(row["id"])
            self.counts[str(row.get("rejected"))] += 1
        self.done |= self.kept

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        """The rows of a file, without a last line that a killed run left unfinished. Raises: UserError for any other damage."""
        self._whole_bytes[path] = 0
        if not path.exists():
            return
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                self._whole_bytes[path] += len(line)
                yield _row(line, f"{path}, line {number}")

    def _start(self) -> None:
        """What has to be done before the first row is added."""
        if self._begun:
            for path, whole_bytes in self._whole_bytes.items():
                if path.exists():
                    os.truncate(path, whole_bytes)
        else:
            self.rejected.unlink(missing_ok=True)
            self.marker.write_text(json.dumps(self.settings, indent=1) + "\n")
            self.path.touch()
        self.errors.unlink(missing_ok=True)  # they are tried again
        self._started = True

    def close(self) -> None:
        """Let others write."""
        self._lock.drop()

    def add(self, outcomes: Iterable[tuple[str, dict[str, Any] | Rejected]]) -> None:
        """Append finished (row id, row or Rejected) pairs, each to the file where it belongs. Raises: UserError if the disk is full."""
        lines: dict[Path, list[dict[str, Any]]] = {self.path: [], self.rejected: [], self.errors: []}
        for row_id, outcome in outcomes:
            if isinstance(outcome, Rejected):
                self.counts["error"] += 1
                lines[self.errors].append({"id": row_id, "error": str(outcome)})
                continue
            self.done.add(row_id)
            if flaw := self._flaw(outcome):
                self.counts[flaw] += 1
                lines[self.rejected].append(outcome | {"rejected": flaw})
            else:
                self.kept.add(row_id)
                self.without_token_ids += "token_ids" not in outcome
                self.seen.add(conversation_digest(outcome))
                lines[self.path].append(outcome)
        with writing(FLAG, self.path, "make room there, and start the same command again: it goes on where it was"):
            if any(lines.values()) and not self._started:
                self._start()
            for path, rows in lines.items():
                append(path, rows)

    def _flaw(self, row: dict[str, Any]) -> str | None:
        said = [message["content"] for message in row["messages"] if message["role"] in ("user", "assistant")]
        found = {
            "empty": not all(text.strip() for text in said),
            "cut": row["cut"],
            "loop": any(is_loop(self.tokenizer(text, add_special_tokens=False).input_ids) for text in said),
            "duplicate": conversation_digest(row) in self.seen,
        }
        return next((flaw for flaw in FLAWS if found[flaw] and flaw not in self.keep), None)

    def summary(self) -> dict[str, int]:
        """How many rows are kept, how many of these carry no token ids, and how many are not kept, by their flaw."""
        without = {"without_token_ids": self.without_token_ids} if self.without_token_ids else {}
        return {"kept": len(self.kept)} | without | {flaw: self.counts[flaw] for flaw in (*FLAWS, "error") if self.counts[flaw]}


def is_loop(tokens: Sequence[int], gram: int = 16, repeats: int = 3) -> bool:
    """Whether some `gram` tokens in a row occur `repeats` times or more: text that goes round in circles."""
    seen = Counter(zip(*(tokens[i:] for i in range(gram)), strict=False))
    return max(seen.values(), default=0) >= repeats


def conversation_digest(row: dict[str, Any]) -> bytes:
    """Hash of what is said, but for case and white space: equal for conversations that are one and the same to a reader."""
    text = "\0".join(" ".join(str(message["content"]).lower().split()) for message in row["messages"])
    return hashlib.sha256(text.encode()).digest()[:16]


def _row(line: bytes, where: str) -> dict[str, Any]:
    """The row in a line that `append` wrote. Raises: UserError for any other line."""
    try:
        row = json.loads(line)
        texts = [row["id"], *(message["content"] for message in row["messages"])]
        if all(isinstance(text, str) for text in texts):
            "".join(texts).encode()  # half a surrogate pair is no text
            return row
        reason = "its id or messages are no text"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise UserError(f"{where}: no row that this command wrote ({reason}); take that line out, or use another {FLAG}") from None


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file; they are on the disk when it returns."""
    if rows:
        with open(path, "ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
