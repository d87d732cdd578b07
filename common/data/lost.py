"""What a chat template leaves out of the text that it makes of a conversation."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from common.data.conversations import Message
from common.data.thoughts import thoughts_and_answer

KINDS = {"system": "system messages", "user": "users' messages", "tool": "tools' results"}
THOUGHTS, ANSWERS, CALLS, TOOLS = "thoughts", "answers", "tool calls", "tools' descriptions"


def lost_pieces(messages: Sequence[Message], tools: Any, texts: Sequence[str]) -> list[tuple[str, str]]:
    """What is said in a conversation and in none of its texts, as (kind, text).

    `texts` holds for each assistant's turn the text in which it is supervised; the last one shows the whole conversation.
    """
    lost, at, turn = [], 0, -1
    for tool in _names(tools):
        lost += [] if _find(tool, texts[-1], 0) >= 0 else [(TOOLS, tool)]
    for message in messages:
        turn += message["role"] == "assistant"
        for kind, piece in _pieces(message):
            found = _find(piece, texts[-1], at)
            at = max(at, found)
            own = message["role"] == "assistant" and texts[turn] is not texts[-1] and _find(piece, texts[turn], 0) >= 0
            if found < 0 and not own and _find(piece, texts[-1], 0) < 0:
                lost.append((kind, piece))
    return lost


def _pieces(message: Message) -> Iterator[tuple[str, str]]:
    """What a message says, by kind."""
    if message["role"] != "assistant":
        parts = [(KINDS[message["role"]], message["content"])]
    else:
        thoughts, answer = thoughts_and_answer(message)
        parts = [(THOUGHTS, thoughts), (ANSWERS, answer), *((CALLS, text) for text in _texts(message.get("tool_calls")))]
    return ((kind, text.strip()) for kind, text in parts if text.strip())


def _texts(calls: Any) -> Iterator[str]:
    """The names and the arguments of calls."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            values = arguments.values() if isinstance(arguments, dict) else ()
            yield from (text for text in (function.get("name"), *values) if isinstance(text, str))


def _names(tools: Any) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
            yield function["name"]


def _find(piece: str, text: str, start: int) -> int:
    """Where a text holds a piece, plainly or as JSON writes it; -1 if it does not."""
    found = text.find(piece, start)
    quoted = json.dumps(piece, ensure_ascii=False)[1:-1]
    return text.find(quoted, start) if found < 0 and quoted != piece else found
