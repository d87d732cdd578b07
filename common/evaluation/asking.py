"""Questions put to a target: by a backend that answers many at once, or one after the other by a method of decoding."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tqdm import tqdm

from common.data.conversations import Rejected
from common.data.prompts import Question
from common.decoding.speculate import Answer
from common.errors import UserError
from common.evaluation.subject import Questioned
from common.generation.backends import Backend, Request, Sampling, advance, reply_of
from common.generation.script import Script


class Turn(NamedTuple):
    """One answer: the set that its question is from, what the target was asked, and the token ids that it wrote."""

    source: str
    request: Request
    tokens: list[int]


Method = Callable[[Request], Answer]
"""A way of decoding one answer."""


class Asking:
    """How questions are asked: the template, what ends an answer, how its tokens are chosen."""

    def __init__(self, asked: Questioned, temperature: float, max_new_tokens: int):
        self.asked = asked
        spec = dataclasses.replace(asked.spec, eos_token_ids=asked.stop)
        self.script = Script(asked.chat, spec, seed=0, answer=Sampling(temperature, 1.0, max_new_tokens))

    def first(self, question: Question) -> Request:
        """The first answer that a question asks for."""
        request = advance(self.script.answers("0", question.messages), None)
        assert isinstance(request, Request), "read_questions leaves room for the first answer"
        return request

    def written(self, questions: Sequence[Question], backend: Backend) -> list[Turn]:
        """What a backend answers, in the questions' order. Raises: UserError where it does not, or does not tell its tokens."""
        found = {}
        # alike ones share a batch, whose prompts are padded to the longest
        order = sorted(range(len(questions)), key=lambda i: sum(len(str(message)) for message in questions[i].messages))
        jobs = [(str(i), self.script.answers(str(i), questions[i].messages)) for i in order]
        with tqdm(total=len(jobs), unit=" questions", desc="write", disable=None) as bar:
            for outcomes in backend.run(jobs, ()):
                found |= dict(outcomes)
                bar.update(len(outcomes))
        return [turn for i, question in enumerate(questions) for turn in _turns(question, found[str(i)])]

    def decoded(self, questions: Sequence[Question], methods: Sequence[Method]) -> tuple[list[Turn], list[list[Answer]]]:
        """What every method answers; later turns of a question are asked behind the last method's answers."""
        turns, rows = [], []
        for i, question in enumerate(tqdm(questions, unit=" questions", desc="decode", disable=None)):
            dialogue = self.script.answers(str(i), question.messages)
            request = advance(dialogue, None)
            while isinstance(request, Request):
                rows.append([method(request) for method in methods])
                turns.append(Turn(question.source, request, rows[-1][-1].tokens))
                request = advance(dialogue, reply_of(turns[-1].tokens, request.stop_ids, self.asked.chat.tokenizer))
            if isinstance(request, Rejected):
                raise UserError(f"--prompts: a question of {question.source} cannot be asked: {request}")
        return turns, [list(answers) for answers in zip(*rows, strict=True)]


def _turns(question: Question, outcome: object) -> list[Turn]:
    if isinstance(outcome, Rejected):
        raise UserError(f"--prompts: a question of {question.source} was not answered: {outcome}")
    assert isinstance(outcome, dict)
    turns = []
    for exchange in outcome["exchanges"]:
        if exchange.reply.ids is None:
            raise UserError("--server does not tell the token ids that it writes, which a replay needs; use a newer server, or none")
        turns.append(Turn(question.source, exchange.request, list(exchange.reply.ids)))
    return turns
