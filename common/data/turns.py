"""Where the assistant's turns lie in the text of a conversation.

Supervised is what the target itself would have generated: an assistant's turn from the end of the generation prompt through its
end-of-turn token. Where that lies is found by rendering the conversation with a probe instead of the turn or, where the template refuses
that, by rendering what came before it; so any template works and none needs generation markers.

Long conversations are rendered a few times only: marks around what users and tools said show where a turn lies between them, and what the
template writes before and behind a turn is the same for all turns of a kind.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.data.conversations import Message, Rejected
from common.data.thoughts import EMPTY, OPENED

PROBE, MARK = "\U0010fffd", "\U0010fffb"  # of a plane of Unicode left to private use
RENDERINGS = 64
"""Turns of one conversation that may be looked up by renderings of their own."""

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's turn.

    `prompt` is what a server puts before an answer and `shown` what a whole conversation shows there; `inserted` is what follows the
    generation prompt there before the answer's own words. `end` closes an answer at the conversation's end, `inner_end` one before it.
    """

    prompt: str
    shown: str
    inserted: str
    end: str
    inner_end: str


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
        regions = self._regions(messages, text, tools) if len(turns) > 2 else {}
        frames: dict[tuple[str, str], tuple[str, str]] = {}  # (roles before and behind) -> what the template writes there
        found, rendered = [], 0
        for turn in turns:
            first, last = regions.get(turn, (0, -1))
            roles = messages[turn - 1]["role"], messages[turn + 1]["role"] if turn + 1 < len(messages) else ""
            before, behind = frames.get(roles, ("", ""))
            fits = last - first >= len(before) + len(behind) and text.startswith(before, first) and text.endswith(behind, first, last)
            if roles in frames and fits:
                begin, end = first + len(before), last - len(behind)
            else:
                rendered += 1
                if rendered > RENDERINGS:
                    raise Rejected(f"the template shows more than {RENDERINGS} of its turns each in another way")
                begin, end = self.one(messages, turn, text, tools)
                if first <= begin <= end <= last:
                    frames[roles] = text[first:begin], text[end:last]
            found.append(self._written(messages[turn], text, begin, end))
        return found

    def one(self, messages: list[Message], turn: int, text: str, tools: Any) -> Span:
        """The turn with this index, less the token that ends it, by renderings of its own.

        Raises: Rejected where it is not shown in one piece.
        """
        try:
            return self._by_probe(messages, turn, text, tools)
        except Rejected as refused:
            return self._by_prompt(messages, turn, text, tools, refused)

    def serves(self, text: str, begin: int) -> bool:
        """Whether a turn that begins here in a text follows what a server puts before an answer."""
        return text.endswith(self.frame.prompt, 0, begin)

    @cached_property
    def frame(self) -> Frame:
        """What the template writes around the answer to a user. Raises: Rejected if it does not show one."""
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
        before, prompt, whole = (
            self.render(messages, generation, None) for messages, generation in (([user], False), ([user], True), ([user, answer], False))
        )
        head, _, tail = whole.partition(PROBE)
        _, _, inner = self.render([user, answer, user], False, None).partition(PROBE)
        ends = [self._end_of_turn(part, 0) for part in (tail, inner)]
        served, shown = prompt.removeprefix(before), head.removeprefix(before)
        if not (prompt.startswith(before) and head.startswith(before)):
            return Frame("", "", "", *ends)
        if not shown.startswith(served):
            return Frame(served, shown, "", *ends)
        inserted = shown.removeprefix(served)
        return Frame(served, shown, inserted if served or inserted.isspace() else "", *ends)

    def _by_probe(self, messages: list[Message], turn: int, text: str, tools: Any) -> Span:
        probe = {"role": "assistant", "content": PROBE}
        head, found, tail = self.render([*messages[:turn], probe, *messages[turn + 1 :]], False, tools).partition(PROBE)
        begin = len(head) - (len(self.frame.inserted) if head.endswith(self.frame.shown) else 0)
        end = len(text) - len(tail)
        if not found or not text.endswith(tail) or text[:begin] != head[:begin] or begin > end:
            raise Rejected("the template does not show an assistant's turn in one piece")
        return begin, end

    def _by_prompt(self, messages: list[Message], turn: int, text: str, tools: Any, refused: Rejected) -> Span:
        """A turn behind the prompt that a server would render; most templates that refuse a probe refuse to have a tool called by it."""
        if not messages[turn].get("tool_calls"):
            raise refused
        prompt, closed = self.render(messages[:turn], True, tools), self.render(messages[: turn + 1], False, tools)
        unserved = "" if self.frame.prompt else self.frame.shown.removesuffix(self.frame.inserted)
        begin = len(prompt) + (len(unserved) if text.startswith(unserved, len(prompt)) else 0)
        shown = re.sub(rf"{self.end_of_turn.pattern}\s*\Z", "", closed).rstrip()
        if not text.startswith(prompt) or not text.startswith(shown) or begin > len(shown):
            raise refused
        return begin, len(shown)

    def _written(self, message: Message, text: str, begin: int, end: int) -> Span:
        """A turn as the target would have written it: without an empty thought before it, and with its end if that is the target's own."""
        opened = OPENED.search(text, max(0, begin - 64), begin)
        thought = EMPTY.match(text, opened.start() if opened else begin, end)
        if thought and thought.end() > begin and not EMPTY.match(message["content"]):
            begin = thought.end()
        closed = self._end_of_turn(text, end)
        inner, last = self.frame.inner_end.strip(), self.frame.end.strip()
        return begin, end if closed and last and closed.strip() == inner != last else end + len(closed)

    def _end_of_turn(self, text: str, end: int) -> str:
        stop = self.end_of_turn.match(text, end)
        return stop[0] if stop else ""

    def _regions(self, messages: list[Message], text: str, tools: Any) -> dict[int, Span]:
        """For the turns that stand alone between what users and tools said: what the text holds between these, by the turn's index."""
        marked = [
            message | {"content": _marked(message["content"])} if message["role"] in ("user", "tool") else message for message in messages
        ]
        try:
            parts = self.render(marked, False, tools).split(MARK)
        except Rejected:
            return {}
        owners = [i for i, message in enumerate(marked) if message["role"] in ("user", "tool") and MARK in message["content"]]
        if "".join(parts) != text or len(parts) != 2 * len(owners) + 1:
            return {}
        regions, at = {}, len(parts[0])
        for number, owner in enumerate(owners):
            at += len(parts[2 * number + 1])
            following = owners[number + 1] if number + 1 < len(owners) else len(messages)
            if following == owner + 2 and messages[owner + 1]["role"] == "assistant":
                regions[owner + 1] = at, at + len(parts[2 * number + 2])
            at += len(parts[2 * number + 2])
        return regions


def _marked(content: str) -> str:
    """The content between marks that leave its outer white space outside: templates may trim it."""
    core = content.strip()
    begin = content.find(core)
    return f"{content[:begin]}{MARK}{core}{MARK}{content[begin + len(core) :]}" if core else content
