"""Prompts of a JSONL file: what a target is asked when its drafter is evaluated."""

import itertools
from typing import Any

from common.cli import check_input
from common.data.chat import Chat
from common.data.conversations import Message, Rejected, conversation, parse, read_lines
from common.errors import UserError


def read_prompts(path: str, chat: Chat, limit: int | None, longest: int) -> list[list[int]]:
    """The first `limit` prompts of a JSONL file as token ids, each of at most `longest` tokens.

    Raises: UserError for a row that cannot be asked, with its location.
    """
    check_input("--prompts", path)
    prompts = []
    for location, _, line in itertools.islice(read_lines(path), limit):
        try:
            prompts.append(chat.prompt(messages_of(parse(line))).tolist())
        except Rejected as reason:
            raise UserError(f"--prompts {location}: {reason}") from None
        if len(prompts[-1]) > longest:
            raise UserError(f"--prompts {location}: {len(prompts[-1])} tokens leave no room to answer; use a smaller --max-new-tokens")
    if not prompts:
        raise UserError(f"--prompts {path} is empty; it holds a JSON object a line")
    return prompts


def messages_of(row: Any) -> list[Message]:
    """What a row asks: a `question` or `prompt` (text or messages), or its conversation without the answer at its end.

    Raises: Rejected if it asks nothing.
    """
    if isinstance(row, Rejected):
        raise row
    if not isinstance(row, dict):
        raise Rejected("not a JSON object")
    asked = row.get("question", row.get("prompt"))
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    messages = conversation(row if asked is None else {"messages": asked})
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
