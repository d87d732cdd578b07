"""A JSONL file of conversations that grows row by row, survives a kill at any moment, and keeps flawed rows apart."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.cli import check_output
from common.data.conversations import Rejected
from common.errors import UserError
from common.trees import differences

FLAWS = ("empty", "cut", "loop", "duplicate")


class ConversationFile:
    """FILE of conversations, with FILE.rejected.jsonl (flawed rows and why) and FILE.errors.jsonl (rows to be tried again) beside it.

    Rows are appended and fsynced as they come. Opened again it cuts off a torn last line and knows the ids that are there.

    Raises: UserError if FILE was begun with other settings, or by somebody else.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], tokenizer: PreTrainedTokenizerFast, keep: Iterable[str] = ()) -> None:
        self.path, self.tokenizer, self.keep = Path(path), tokenizer, set(keep)
        self.rejected, self.errors, marker = (Path(f"{path}.{kind}") for kind in ("rejected.jsonl", "errors.jsonl", "settings.json"))
        self._begin(marker, settings)
        kept, rejected = recover(self.path), recover(self.rejected)
        self.errors.unlink(missing_ok=True)  # they are tried again
        self.kept, self.done = {row["id"] for row in kept}, {row["id"] for row in kept + rejected}
        self.seen = {conversation_digest(row) for row in kept}
        self.counts = Counter(row["rejected"] for row in rejected)
        self.without_token_ids = sum("token_ids" not in row for row in kept)

    def _begin(self, marker: Path, settings: dict[str, Any]) -> None:
        if self.path.suffix == ".gz":
            raise UserError(f"--output {self.path}: rows are appended as plain text; compress the file when it is done")
        check_output("--output", self.path)
        if not self.path.exists() or not (marker.exists() or self.path.stat().st_size):
            self.rejected.unlink(missing_ok=True)
            marker.write_text(json.dumps(settings, indent=1) + "\n")
            self.path.touch()
            return
        if not marker.exists():
            raise UserError(f"--output {self.path} exists and was not begun by this command; choose another --output")
        try:
            begun_with = json.loads(marker.read_text())
        except ValueError:
            raise UserError(f"{marker} is damaged: choose another --output, or delete {self.path} and it") from None
        if changed := differences(begun_with, json.loads(json.dumps(settings))):
            listed = ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
            raise UserError(f"--output {self.path} was begun with other settings ({listed}); use those, or another --output")

    def add(self, outcomes: Iterable[tuple[str, dict[str, Any] | Rejected]]) -> None:
        """Append finished (row id, row or Rejected) pairs, each to the file where it belongs."""
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


def recover(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that a killed run left unfinished is cut off. Raises: UserError for another torn line."""
    whole = path.read_bytes() if path.exists() else b""
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)
    try:
        return [json.loads(line) for line in whole[:end].split(b"\n")[:-1]]
    except ValueError as error:
        raise UserError(f"{path} holds a line that is no JSON ({error}); repair it, or use another --output") from None


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file; they are on the disk when it returns."""
    if rows:
        with open(path, "ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
