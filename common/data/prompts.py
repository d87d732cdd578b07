"""Prompts of a JSONL file: what a target is asked when its drafter is evaluated."""

import itertools
from pathlib import Path

from common.data.conversations import Rejected, conversation, parse, read_lines
from common.errors import UserError


def read_prompts(path, chat, limit, longest):
    """Prompts as token ids.

    Raises: UserError for a row that cannot be asked, with its location.
    """
    if not Path(path).is_file():
        raise UserError(f"--prompts {path}: no such file; it holds a JSON object a line with messages, question or prompt")
    prompts = []
    for location, _, line in itertools.islice(read_lines(path), limit):
        try:
            prompts.append(chat.prompt(messages_of(parse(line))).tolist())
        except Rejected as reason:
            raise UserError(f"--prompts {location}: {reason}") from None
        if len(prompts[-1]) > longest:
            raise UserError(f"--prompts {location}: {len(prompts[-1])} tokens leave no room to answer; use a smaller --max-new-tokens")
    if not prompts:
        raise UserError(f"--prompts {path} is empty")
    return prompts


def messages_of(row):
    """What a row asks: a `question` or `prompt` (text or messages), or its conversation without the answer at its end."""
    if isinstance(row, Rejected):
        raise row
    if not isinstance(row, dict):
        raise Rejected("not a JSON object")
    asked = row.get("question", row.get("prompt"))
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    messages = conversation(row if asked is None else {"messages": asked})
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
