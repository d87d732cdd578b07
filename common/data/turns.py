"""Where the assistant's turns lie in the text of a conversation.

Supervised is what the target itself would have generated: an assistant's turn from the end of the generation prompt through its
end-of-turn token. Where that lies is found by rendering with a probe instead of the turn, so any template works and none needs
generation markers.
"""

import re
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

from common.data.conversations import Message, Rejected

PROBE = "\U0010fffd"  # of a plane of Unicode left to private use
Span = tuple[int, int]
"""Characters [begin, end) of a text."""


class Turns:
    """Finds the assistant's turns of one chat template.

    `render(messages, generation, tools)` is the template, `end_of_turn` matches the token that may close a turn.
    """

    def __init__(self, render: Callable[[list[Message], bool, Any], str], end_of_turn: re.Pattern[str]) -> None:
        self.render, self.end_of_turn = render, end_of_turn

    def spans(self, messages: list[Message], text: str, tools: Any) -> list[Span]:
        """Where each assistant's turn lies in `text`, which is `messages` rendered.

        Raises: Rejected where the template does not show a turn in one piece.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = self.all_at_once(messages, text, tools) or [self.one(messages, turn, text, tools) for turn in turns]
        return [(begin, self._with_end_of_turn(text, end)) for begin, end in found]

    def all_at_once(self, messages: list[Message], text: str, tools: Any) -> list[Span] | None:
        """The turns by a single rendering with probes instead of all of them, so that long conversations take linear time.

        None where that leaves a doubt: where the template writes more between the turns than the probes show, or where what it writes
        between two turns also occurs inside a turn.
        """
        probes = [{"role": "assistant", "content": PROBE} if message["role"] == "assistant" else message for message in messages]
        try:
            between = self.render(probes, False, tools).split(PROBE)
        except Rejected:
            return None
        if len(between) != 1 + sum(message["role"] == "assistant" for message in messages):
            return None
        header, inserted = self._header
        heads = [part.removesuffix(inserted) if part.endswith(header + inserted) else part for part in between[:-1]]
        first, middle, last = heads[0], heads[1:], between[-1]
        begin, end = len(first), len(text) - len(last)
        if begin > end or not text.startswith(first) or not text.endswith(last):
            return None
        positions = _only_positions(text, middle, begin, end)
        if positions is None:
            return None
        borders = [(0, begin), *positions, (end, len(text))]
        return [(behind, before) for (_, behind), (before, _) in pairwise(borders)]

    def one(self, messages: list[Message], turn: int, text: str, tools: Any) -> Span:
        """The turn with this index, by a rendering of its own. Raises: Rejected where it is not shown in one piece."""
        probe = {"role": "assistant", "content": PROBE}
        head, found, tail = self.render([*messages[:turn], probe, *messages[turn + 1 :]], False, tools).partition(PROBE)
        header, inserted = self._header
        begin = len(head) - (len(inserted) if head.endswith(header + inserted) else 0)
        end = len(text) - len(tail)
        if not found or not text.endswith(tail) or text[:begin] != head[:begin] or begin > end:
            raise Rejected("the template does not show an assistant's turn in one piece")
        return begin, end

    def _with_end_of_turn(self, text: str, end: int) -> int:
        stop = self.end_of_turn.match(text, end)
        return stop.end() if stop else end

    @cached_property
    def _header(self) -> tuple[str, str]:
        """What the template opens an assistant's turn with, and what it then writes itself before the content (an empty thought)."""
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
        before, prompt, whole = (
            self.render(messages, generation, None) for messages, generation in (([user], False), ([user], True), ([user, answer], False))
        )
        header, head = prompt.removeprefix(before), whole.partition(PROBE)[0]
        if prompt == before or not prompt.startswith(before) or not head.startswith(prompt):
            return "", ""
        return header, head.removeprefix(prompt)


def _only_positions(text: str, parts: list[str], begin: int, end: int) -> list[Span] | None:
    """Where `parts` follow each other in text[begin:end]; None where they do not, or could in more than one way.

    The leftmost and the rightmost positions bound all others: where they agree there is only one way.
    """
    leftmost, rightmost, at = [], [], begin
    for part in parts:
        found = text.find(part, at, end)
        if found < 0:
            return None
        at = found + len(part)
        leftmost.append((found, at))
    at = end
    for part in reversed(parts):
        at = text.rfind(part, begin, at)
        rightmost.append((at, at + len(part)))
    return leftmost if leftmost == rightmost[::-1] else None
