"""What a reasoning model thinks before it answers: how messages carry it, and how templates open it, leave it out or leave it empty."""

import re

from common.data.conversations import Message

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message holds its thoughts apart from its content."""

CLOSING = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""What begins a thought -> what ends it."""

EMPTY = re.compile("|".join(rf"\s*{re.escape(begin)}\s*{re.escape(end)}\s*" for begin, end in CLOSING.items()))
"""A thought without words: templates write it before an answer that came without thoughts."""

OPENED = re.compile(rf"({'|'.join(map(re.escape, CLOSING))})\s*\Z")
"""The end of a generation prompt that has begun a thought itself."""

_HELD = re.compile(rf"(\s*(?:{'|'.join(map(re.escape, CLOSING))}))?(.*?)({'|'.join(map(re.escape, CLOSING.values()))})(\s*)", re.DOTALL)


def thoughts_and_answer(message: Message) -> tuple[str, str]:
    """What a message's author thought (empty where nothing is known of it), and what he answered."""
    own = next((message[field] for field in FIELDS if isinstance(message.get(field), str) and message[field].strip()), None)
    if own is not None:
        return own, message["content"]
    held = _HELD.match(message["content"])
    return (held[2], message["content"][held.end() :]) if held else ("", message["content"])


def after_opening(prompt: str, message: Message, answer: str) -> str | None:
    """What the target wrote behind a prompt that opens a thought: the message's thoughts, their end, and `answer`, its answer as the
    template shows it. None where the message holds no thoughts.
    """
    opening = OPENED.search(prompt)
    thoughts, _ = thoughts_and_answer(message)
    if opening is None or not thoughts.strip():
        return None
    held = _HELD.match(message["content"])
    end, space = (held[3], held[4]) if held else ("\n" + CLOSING[opening[1]], "\n\n")
    thoughts = thoughts if held else thoughts.strip("\n")
    return (thoughts.lstrip("\n") if prompt[-1].isspace() else thoughts) + end + space + answer.lstrip()
