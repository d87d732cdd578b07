"""How a target writes: the requests and replies of a conversation, and `LocalBackend`, which lets transformers write in this process.

A conversation being written is a generator, a *dialogue*: it yields a Request, is sent the Reply, and returns the finished row. A backend
plays dialogues: the local one batches of them in lockstep, the server's (`server.py`) each one in a thread of its own.

Legend: B dialogues of a batch, P tokens of the longest prompt, N tokens written at most, V vocabulary.
"""

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from common.cli import open_device
from common.data.conversations import Rejected
from common.errors import UserError
from common.target.files import TargetSpec
from common.target.spread import load_spread


@dataclass(frozen=True)
class Sampling:
    """How a turn is chosen; temperature 0 is greedy."""

    temperature: float
    top_p: float
    max_tokens: int

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and 0 < self.top_p <= 1):
            raise UserError(f"--temperature {self.temperature} must be 0 or more, --top-p {self.top_p} above 0 and at most 1")


@dataclass(frozen=True)
class Request:
    """Token ids to go on from, and the tokens that end the turn."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Reply:
    """A turn as it was written."""

    text: str
    tokens: int
    cut: bool
    """The turn ran into max_tokens."""
    ids: tuple[int, ...] | None
    """What was written, the token that ended the turn included; None where a server does not tell."""


Row = dict[str, Any]
Dialogue = Generator[Request, Reply, Row]
Job = tuple[str, Dialogue]
"""A row's id, and the dialogue that becomes it."""
Outcome = tuple[str, Row | Rejected]


class Backend(Protocol):
    """What plays dialogues."""

    def run(self, jobs: Iterable[Job], done: Collection[str]) -> Iterator[list[Outcome]]:
        """Yield finished rows in any order, or why there is none; jobs whose id is in `done` are left out."""
        ...


def advance(dialogue: Dialogue, reply: Reply | None) -> Request | Row | Rejected:
    """Send a reply (None at first); returns the next request, or the finished row, or why there is none."""
    try:
        return next(dialogue) if reply is None else dialogue.send(reply)
    except StopIteration as finished:
        return finished.value
    except Rejected as error:
        return error


class LocalBackend:
    """Batches of dialogues through transformers, all asking at once, then all getting their replies.

    A batch is made of neighbouring jobs, so that a run that goes on computes the same batches as one that was never stopped.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pad_id: int, batch_size: int) -> None:
        self.tokenizer, self.pad_id, self.batch_size, self.device = tokenizer, pad_id, batch_size, model.device
        self.model: Any = model
        self.model.generation_config = GenerationConfig()  # the folder's own penalties and top-k would bend the target's distribution

    @classmethod
    def load(
        cls, spec: TargetSpec, tokenizer: PreTrainedTokenizerFast, batch_size: int, device: str | None = None, stages: int = 1
    ) -> "LocalBackend":
        """With a target's model, on so many devices. Raises: UserError if it does not load, or if a device is not there."""
        where = open_device(device)
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        return cls(load_spread(spec, dtype, where, stages, "--target"), tokenizer, spec.eos_token_ids[0], batch_size)

    def run(self, jobs: Iterable[Job], done: Collection[str]) -> Iterator[list[Outcome]]:
        """Yield the outcomes of a batch at a time; jobs whose id is in `done` only fill up their batch."""
        jobs = iter(jobs)
        while batch := list(itertools.islice(jobs, self.batch_size)):
            if not all(row_id in done for row_id, _ in batch):
                yield [(row_id, outcome) for row_id, outcome in self._lockstep(batch) if row_id not in done]

    def _lockstep(self, batch: list[Job]) -> list[Outcome]:
        waiting: list[tuple[str, Dialogue, Reply | None]] = [(row_id, dialogue, None) for row_id, dialogue in batch]
        outcomes: list[Outcome] = []
        while waiting:
            asked: list[tuple[str, Dialogue, Request]] = []
            for row_id, dialogue, reply in waiting:
                answer = advance(dialogue, reply)
                if isinstance(answer, Request):
                    asked.append((row_id, dialogue, answer))
                else:
                    outcomes.append((row_id, answer))
            replies = self.write([request for _, _, request in asked]) if asked else []
            waiting = [(row_id, dialogue, reply) for (row_id, dialogue, _), reply in zip(asked, replies, strict=True)]
        return outcomes

    @torch.no_grad()
    def write(self, requests: Sequence[Request]) -> list[Reply]:
        """Replies to requests of one sampling.

        Shapes: prompts padded on the left to [B, P], tokens written [B, N]. Raises: UserError if the batch does not fit the device.
        """
        sampling, stop_ids = requests[0].sampling, requests[0].stop_ids
        width = -(-max(len(r.prompt) for r in requests) // 32) * 32
        prompts_BP = torch.full((len(requests), width), self.pad_id)
        for row, request in zip(prompts_BP, requests, strict=True):
            row[width - len(request.prompt) :] = torch.tensor(request.prompt)
        lengths_B = torch.tensor([len(r.prompt) for r in requests])
        mask_BP = torch.arange(width) >= width - lengths_B[:, None]
        how = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=self.pad_id,
            cache_implementation="static" if self.device.type == "cuda" else None,  # a growing cache is copied at every token
            disable_compile=True,  # with large batches the host keeps up, and nothing waits for a compiler
        )
        chooser = LogitsProcessorList([SeededChoice(requests, width, self.device)] if sampling.temperature > 0 else [])
        inputs = {"input_ids": prompts_BP.to(self.device), "attention_mask": mask_BP.long().to(self.device)}
        try:
            written = self.model.generate(**inputs, generation_config=how, logits_processor=chooser)
        except torch.OutOfMemoryError:
            raise UserError(f"--batch-size {self.batch_size}: {len(requests)} conversations do not fit {self.device}; use fewer") from None
        return [reply_of(tokens, stop_ids, self.tokenizer) for tokens in written[:, width:].tolist()]


def reply_of(tokens: list[int], stop_ids: Collection[int], tokenizer: PreTrainedTokenizerFast) -> Reply:
    """The reply that tokens make up to the first that ends a turn."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
    text = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
    ids = tuple(tokens if end is None else tokens[: end + 1])
    return Reply(text, len(ids), cut=end is None, ids=ids)


class SeededChoice(LogitsProcessor):
    """Sampling as an argmax: every score but the drawn token's becomes -inf.

    A row draws from random numbers of its own, so its words do not depend on who shares the batch.
    """

    def __init__(self, requests: Sequence[Request], width: int, device: torch.device | str) -> None:
        self.sampling, self.width = requests[0].sampling, width
        draws_BN = [np.random.default_rng(r.seed).random(self.sampling.max_tokens, dtype=np.float32) for r in requests]
        self.draws_BN = torch.from_numpy(np.stack(draws_BN)).to(device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shapes: ids [B, P + written so far], scores [B, V] -> [B, V]."""
        probabilities_BV = nucleus(torch.softmax(scores.float() / self.sampling.temperature, -1), self.sampling.top_p)
        mass_BV = probabilities_BV.cumsum(-1, dtype=torch.float64)  # in float32 rounding could draw a token of probability zero
        step = input_ids.shape[1] - self.width
        drawn_B1 = torch.searchsorted(mass_BV, self.draws_BN[:, step, None] * mass_BV[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn_B1, 0.0)


def nucleus(probabilities_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the likeliest tokens that together hold `top_p`: the lowest kept probability is found by bisection, without a sort.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv 1904.09751, section 3.1.
    """
    if top_p >= 1:
        return probabilities_BV
    high_B1 = probabilities_BV.amax(-1, keepdim=True)
    low_B1 = torch.zeros_like(high_B1)
    for _ in range(24):
        middle_B1 = (low_B1 + high_B1) / 2
        enough_B1 = (probabilities_BV * (probabilities_BV >= middle_B1)).sum(-1, keepdim=True) >= top_p
        low_B1, high_B1 = torch.where(enough_B1, middle_B1, low_B1), torch.where(enough_B1, high_B1, middle_B1)
    return probabilities_BV * (probabilities_BV >= low_B1)
