"""How an evaluation gets its numbers: by replay of answers that are written first, or by real decoding."""

import functools
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.data.prompts import Question
from common.decoding.fast import FastDecoder
from common.decoding.replay import Replayer
from common.decoding.sampling import speculate_sampled
from common.decoding.speculate import Answer, BlockDrafter, Chooser, Way, decode, first_difference, speculate
from common.decoding.static import records
from common.errors import UserError
from common.evaluation.asking import Asking, Method, Turn
from common.evaluation.subject import Subject
from common.generation.backends import Request


@dataclass
class Sample:
    """Answers that were decoded, too: their turns, by drafts of `way`, and plainly (or none); what the replay says of the same."""

    turns: list[Turn]
    way: Way
    answers: list[Answer]
    plain: list[Answer]
    replayed: list[Answer]

    @property
    def equal(self) -> int:
        """Answers of which real decoding wrote the same tokens in the same verifications as the replay says."""
        pairs = zip(self.answers, self.replayed, strict=True)
        return sum((one.tokens, one.accepted) == (other.tokens, other.accepted) for one, other in pairs)


@dataclass
class Results:
    """Every answer in every way; the way that leads the report; plain decoding's answers and a sample that was decoded, if any."""

    turns: list[Turn]
    ways: list[Way]
    runs: list[list[Answer]]
    lead: Way
    plain: list[Answer] = field(default_factory=list)
    sample: Sample | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: write, replay, verify; or decode."""

    @property
    def answers(self) -> list[Answer]:
        """Those of the way that leads."""
        return self.runs[self.ways.index(self.lead)]


def by_replay(subject: Subject, turns: list[Turn], ways: list[Way], lead: Way, verify: int, compare: bool) -> Results:
    """Every way replayed on answers that are written already; `verify` of them are decoded, too."""
    seconds: dict[str, float] = {}
    with timed(seconds, "replay"):
        written = [(list(turn.request.prompt), turn.tokens) for turn in turns]
        runs = Replayer(subject.target, subject.drafter, subject.vocabulary).run(written, ways)
    results = Results(turns, ways, runs, lead, seconds=seconds)
    if verify:
        with timed(seconds, "verify"):
            chosen = [turns[i] for i in range(0, len(turns), -(-len(turns) // verify))]
            replayed = [results.answers[i] for i in range(0, len(turns), -(-len(turns) // verify))]
            methods = _methods(subject, [lead], compare, chosen[0].request)
            answers, *plain = ([method(turn.request) for turn in chosen] for method in methods)
            results.sample = Sample(chosen, lead, answers, plain[0] if plain else [], replayed)
    return results


def by_decoding(
    subject: Subject,
    asking: Asking,
    questions: Sequence[Question],
    ways: list[Way],
    temperature: float,
    compare: bool,
    sampled: bool = False,
) -> Results:
    """Every question answered in every way, one token after the other, and by plain decoding for comparison; the last way leads.

    `sampled` chains are drawn from the drafter and verified by rejection sampling.
    """
    seconds: dict[str, float] = {}
    methods = _methods(subject, ways, compare, asking.first(questions[0]), temperature, sampled)
    with timed(seconds, "decode"):
        turns, runs = asking.decoded(questions, methods)
    plain = runs.pop() if compare else []
    return Results(turns, ways, runs, ways[-1], plain, seconds=seconds)


def _methods(
    subject: Subject, ways: Sequence[Way], compare: bool, first: Request, temperature: float = 0.0, sampled: bool = False
) -> list[Method]:
    """Each way of decoding, plain decoding last where it is compared with; `first` is answered untimed, so that kernels are loaded."""
    drafters: list[BlockDrafter | None] = [subject.block_drafter(way) for way in ways]
    methods = []
    for drafter in drafters + [None] * compare:
        recorded = None if temperature else _recorded(subject, drafter, first)
        methods.append(recorded or _eager(subject, drafter, first, temperature, sampled))
    return methods


def _recorded(subject: Subject, drafter: BlockDrafter | None, first: Request) -> Method | None:
    """Greedy decoding by recorded steps, on a GPU and for a target that can be recorded."""
    if subject.target.device.type != "cuda" or not records(subject.target):
        return None
    fast = FastDecoder(subject.target, drafter)
    try:
        fast.answer(list(first.prompt), first.stop_ids, 8)
    except (RuntimeError, UserError) as error:  # the code of any family runs here
        family = subject.asked.spec.model_type
        print(f"decoding eagerly, since {family} cannot be recorded: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return None
    return lambda request: fast.answer(list(request.prompt), request.stop_ids, request.sampling.max_tokens)


def _eager(subject: Subject, drafter: BlockDrafter | None, first: Request, temperature: float, sampled: bool) -> Method:
    how = speculate_sampled if sampled else speculate
    decoder: Callable[..., Answer] = functools.partial(decode, subject.target)
    if drafter is not None:
        decoder = functools.partial(how, subject.target, drafter)
    decoder(list(first.prompt), first.stop_ids, 8, Chooser(temperature))
    return lambda request: decoder(list(request.prompt), request.stop_ids, request.sampling.max_tokens, Chooser(temperature, request.seed))


def differences(
    subject: Subject, answers: Sequence[Answer], references: Sequence[Answer], turns: Sequence[Turn], temperature: float
) -> list[tuple[int, float] | None]:
    """Where each answer parts from its reference, if it does: (index, by how much the target's own scores prefer one to the other)."""
    return [
        first_difference(subject.target, answer, reference, Chooser(temperature, turn.request.seed))
        for answer, reference, turn in zip(answers, references, turns, strict=True)
    ]


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Generator[None]:
    """Write down how long a stage takes."""
    begun_s = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - begun_s
