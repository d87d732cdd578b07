"""JSONL lines to messages: every shape in which people keep conversations."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "model": "assistant", "chatgpt": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip

LINE_BYTES = 16 << 20
"""The longest line that is read: a million tokens with their ids, and what one process can hold many of."""

Message = dict[str, Any]
"""What a chat template is given for a turn: `role`, `content` and whatever else the row said (names, tool calls, thoughts)."""


class Rejected(Exception):
    """A line that cannot become a document; the message is the reason it is counted under."""


def conversation(row: dict[str, Any]) -> list[Message]:
    """The messages of a JSONL row: `messages`, `conversations` (from/value) or `prompt` and `completion`.

    Raises: Rejected if the row has none of these shapes.
    """
    turns = _listed(row.get("messages", row.get("conversations")))
    if turns is None and "prompt" in row and "completion" in row:
        turns = []
        for role, part in (("user", row["prompt"]), ("assistant", row["completion"])):
            turns += part if isinstance(part, list) else [{"role": role, "content": part}]
    if turns is None:
        raise Rejected("no messages, conversations, prompt with completion, or text")
    if not isinstance(turns, list):
        raise Rejected(f"its messages are {'text' if isinstance(turns, str) else 'something else'} instead of a list of objects")
    return [normalise(turn) for turn in turns]


def tools_of(row: dict[str, Any]) -> Any:
    """The tools that a row says its conversation could call."""
    return _listed(row.get("tools")) or None


def _listed(value: Any) -> Any:
    """A list that a row holds as its JSON text, as tables of data sets do; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            return parsed if isinstance(parsed, list) else value
    return value


def normalise(turn: Any) -> Message:
    """One turn in the notation that chat templates expect. Raises: Rejected if it is no message."""
    if not isinstance(turn, dict):
        raise Rejected("a message is not an object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise Rejected(f"unknown role {str(role)[:40]!r}")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Rejected("a message's content is not text")
    return {k: v for k, v in turn.items() if k not in ("from", "value")} | {"role": ROLES[role], "content": content}


Line = tuple[str, str, bytes | Rejected]
"""Where a line is, what it comes from, and what it holds; a Rejected stands for what cannot be read."""


def read_lines(path: str) -> Iterator[Line]:
    """Yield the lines of a JSONL file, plain or gzipped, or of stdin for `-`.

    Raises: UserError if the file cannot be opened.
    """
    name, number = Path(path).name, 0
    source = "stdin" if path == "-" else name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    opener = gzip.open if name.endswith(".gz") else open
    try:
        stream: Any = sys.stdin.buffer if path == "-" else opener(path, "rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a file that can") from None
    with nullcontext() if path == "-" else stream:
        try:
            while line := stream.readline(LINE_BYTES + 1):
                number += 1
                yield f"{path}:{number}", source, line if len(line) <= LINE_BYTES else _skip_rest(stream, line)
        except (OSError, EOFError, zlib.error) as error:
            yield f"{path}:{number + 1}", source, Rejected(f"the file cannot be read further ({type(error).__name__})")


def _skip_rest(stream: BinaryIO, line: bytes) -> Rejected:
    """Read on to the end of a line that is too long, and keep none of it: a few megabytes of an archive hold gigabytes of one line."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(LINE_BYTES)
    return Rejected(f"a line of more than {LINE_BYTES >> 20} MiB")


def parse(line: bytes | Rejected) -> Any:
    """The JSON value of a line, or the Rejected that says why there is none."""
    if isinstance(line, Rejected):
        return line
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Rejected("not UTF-8")
    except (ValueError, RecursionError):
        return Rejected("not JSON" if line.strip() else "empty line")
