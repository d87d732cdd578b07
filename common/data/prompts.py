"""Questions of JSONL files: what a target is asked when its drafter is evaluated."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.cli import check_input
from common.data.chat import Chat
from common.data.conversations import Message, Rejected, conversation, parse, read_lines
from common.errors import UserError

OPEN: Message = {"role": "assistant"}
"""A turn that the target has yet to write."""

ASKED = ("question", "prompt", "problem")
"""Fields that hold a question, as the sets that people quote name them: GSM8K, HumanEval, MATH500. MT-Bench has `turns`."""


class Question(NamedTuple):
    """What is asked, and the set that it belongs to: its file's name."""

    source: str
    messages: list[Message]

    def prompt(self, chat: Chat) -> list[int]:
        """The token ids up to the first turn that the target writes."""
        return chat.prompt(self.messages[: self.messages.index(OPEN)]).tolist()


def read_questions(paths: Sequence[str], chat: Chat, limit: int | None, longest: int) -> list[Question]:
    """The first `limit` questions of each JSONL file, whose prompts have at most `longest` tokens.

    Raises: UserError for a row that cannot be asked, with its location, and for files of one name.
    """
    questions = [question for path in paths for question in _read(path, chat, limit, longest)]
    if len({question.source for question in questions}) < len(paths):
        raise UserError(f"--prompts {' '.join(paths)}: two sets have the same name; rename a file")
    return questions


def _read(path: str, chat: Chat, limit: int | None, longest: int) -> list[Question]:
    check_input("--prompts", path)
    questions = []
    for location, source, line in itertools.islice(read_lines(path), limit):
        try:
            questions.append(Question(source, messages_of(parse(line))))
            tokens = len(questions[-1].prompt(chat))
        except Rejected as reason:
            raise UserError(f"--prompts {location}: {reason}") from None
        if tokens > longest:
            raise UserError(f"--prompts {location}: {tokens} tokens leave no room to answer; use a smaller --max-new-tokens")
    if not questions:
        raise UserError(f"--prompts {path} is empty; it holds a JSON object a line")
    return questions


def messages_of(row: Any) -> list[Message]:
    """What a row asks: users' `turns`, each answered before the next; a question (text or messages); or its conversation without the
    answer at its end. What the target has yet to write is OPEN.

    Raises: Rejected if it asks nothing.
    """
    if isinstance(row, Rejected):
        raise row
    if not isinstance(row, dict):
        raise Rejected("not a JSON object")
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [message for turn in turns for message in ({"role": "user", "content": turn}, OPEN)]
    asked = next((row[name] for name in ASKED if row.get(name) is not None), None)
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}, OPEN]
    messages = conversation(row if asked is None else {"messages": asked})
    return [*(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages), OPEN]
