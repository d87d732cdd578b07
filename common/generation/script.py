"""What a target is asked: the dialogues in which it answers given users' turns, or writes these, too."""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from common.data.chat import Chat
from common.data.conversations import Message, Rejected
from common.data.prompts import OPEN
from common.data.turns import PROBE
from common.data.written import token_ids
from common.generation.backends import Dialogue, Reply, Request, Row, Sampling
from common.target.files import TargetSpec


@dataclass(frozen=True)
class Exchange:
    """What the target was asked for a turn, and what it wrote."""

    request: Request
    reply: Reply


class Script:
    """The dialogues that can be played with one target: what it is asked, turn by turn, in its own chat template.

    A turn's random numbers depend on (seed, row, turn) alone.
    """

    def __init__(
        self,
        chat: Chat,
        spec: TargetSpec,
        seed: int,
        answer: Sampling,
        question: Sampling | None = None,
        system: str | None = None,
    ) -> None:
        self.chat, self.stop_ids, self.context_tokens, self.seed = chat, spec.eos_token_ids, spec.max_position_embeddings, seed
        self.answer, self.question, self.system = answer, question, system

    def synthesize(self, row_id: str, turns: int = 1, topic: str | None = None) -> Dialogue:
        """A dialogue in which the target writes the user's turns and answers them."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        draft = [{"role": "system", "content": f"{self.system or ''}\nThe user writes about: {topic}".strip()}] if topic else messages[:]
        questions, answers = [], []
        for turn in range(turns):
            questions.append((yield from _ask(self._question(draft, f"{row_id}/{turn}/user"))))
            question = {"role": "user", "content": questions[-1].reply.text.strip()}
            answers.append((yield from _ask(self._answer([*messages, question], f"{row_id}/{turn}/assistant"))))
            exchange = [question, {"role": "assistant", "content": answers[-1].reply.text}]
            messages, draft = messages + exchange, draft + exchange
        return self._row(row_id, messages, questions, answers) | ({"topic": topic} if topic else {})

    def regenerate(self, row_id: str, given: list[Message]) -> Dialogue:
        """A dialogue that keeps the given users' turns and answers each in the context of the answers written before it."""
        given = given if given[-1]["role"] == "assistant" else [*given, OPEN]
        messages, answers = yield from self._answers(row_id, [OPEN if message["role"] == "assistant" else message for message in given])
        return self._row(row_id, messages, [], answers)

    def answers(self, row_id: str, given: list[Message]) -> Dialogue:
        """A dialogue in which the target writes each assistant's turn without content; its row holds no more than its `exchanges`."""
        _, answers = yield from self._answers(row_id, given)
        return {"exchanges": answers}

    def _answers(self, row_id: str, given: list[Message]) -> Generator[Request, Reply, tuple[list[Message], list[Exchange]]]:
        """The messages with what was written, and the exchanges in which it was."""
        messages, answers = [], []
        for turn, message in enumerate(given):
            if message == OPEN:
                answers.append((yield from _ask(self._answer(messages, f"{row_id}/{turn}/assistant"))))
                message = {"role": "assistant", "content": answers[-1].reply.text}
            messages.append(message)
        return messages, answers

    def _row(self, row_id: str, messages: list[Message], questions: list[Exchange], answers: list[Exchange]) -> Row:
        replies = [exchange.reply for exchange in (*questions, *answers)]
        row = {
            "id": row_id,
            "messages": messages,
            "cut": any(reply.cut for reply in replies),
            "tokens": sum(reply.tokens for reply in replies),
        }
        written = [(exchange.request.prompt, exchange.reply.ids) for exchange in answers if exchange.reply.ids is not None]
        return row | ({"token_ids": token_ids(self.chat, row, written)} if len(written) == len(answers) else {})

    def _answer(self, messages: list[Message], name: str) -> Request:
        return self._request(self.chat.prompt(messages).tolist(), self.answer, (), name)

    def _question(self, messages: list[Message], name: str) -> Request:
        """The template up to a user's words is the prompt; the first token after them ends the turn."""
        assert self.question is not None, "only a job that synthesizes asks for questions"
        text = self.chat.render([*messages, {"role": "user", "content": PROBE}])
        if text.count(PROBE) != 1:
            raise Rejected("the template does not show a user's turn in one piece")
        before, after = (self.chat.backend.encode(part, add_special_tokens=False).ids for part in text.split(PROBE))
        return self._request(before, self.question, after[:1], name)

    def _request(self, prompt: list[int], sampling: Sampling, stop_ids: Sequence[int], name: str) -> Request:
        if len(prompt) + sampling.max_tokens > self.context_tokens:
            raise Rejected(f"prompt of {len(prompt)} + {sampling.max_tokens} tokens exceeds the target's {self.context_tokens} positions")
        seed = int(hashlib.sha256(f"{self.seed}/{name}".encode()).hexdigest()[:7], 16)
        return Request(tuple(prompt), sampling, (*stop_ids, *(i for i in self.stop_ids if i not in stop_ids)), seed)


def _ask(request: Request) -> Generator[Request, Reply, Exchange]:
    return Exchange(request, (yield request))
