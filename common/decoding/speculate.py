"""Speculative decoding: a drafter proposes a chain or a tree of tokens, the target verifies it in one forward, and the answer is
exactly what the target alone would have written.

Rows of a verification: row 0 is the root, the last token known; row i holds proposed token i-1. A row's position is its depth
below the root plus the root's position. N proposed tokens, R = N + 1 rows, S cached positions, F features of a position, V vocabulary.
Source: block drafting DFlash, arXiv 2602.06036; draft trees as a best-first heap over the slots' marginals (DDTree).
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from common.decoding.target import DecodingTarget, keep_rows, new_cache, tree_depths
from common.drafter.backbone import Drafter
from common.families.family import Drafted
from common.families.registry import FAMILIES, load_exported
from common.objective.acceptance import build_tree
from common.target.vocabulary import Vocabulary


class Proposal(NamedTuple):
    """Proposed tokens and, for each, the row of its parent (0 is the root); parents come before their children."""

    tokens: list[int]
    parents: list[int]


class DraftModel(Protocol):
    """What speculative decoding asks for proposals. Positions count from 0 at the prompt's first token."""

    def begin(self) -> None:
        """Forget the last prompt."""

    def extend(self, features_NF: Tensor, start: int) -> None:
        """Take in the target's features of the positions from `start` on."""

    def propose(self, token: int, position: int) -> Proposal:
        """Proposal below a known token whose own features are not known yet."""
        ...


class Way(NamedTuple):
    """How drafts are made: blocks of so many slots, as chains, or as trees of `tree_budget` nodes."""

    block_size: int
    tree_budget: int | None = None

    @property
    def name(self) -> str:
        return "chain" if self.tree_budget is None else f"tree of {self.tree_budget} nodes"


@dataclass
class Answer:
    """What one prompt gave: `accepted[i] + 1` tokens came out of verification i, after the one that prefill gave.

    `matched[i]` drafts of verification i were right and in the answer, which put the first `tried[i]` slots to the test (one slot more than
    there is where all were right).
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    """By part: prefill, draft, verify; total."""

    def add(self, emitted: list[int], verified: int) -> None:
        """Take in a verification that gave `verified` tokens, of which `emitted` belong to the answer."""
        self.tokens += emitted
        self.accepted.append(len(emitted) - 1)
        self.matched.append(min(verified - 1, len(emitted)))
        self.tried.append(min(verified, len(emitted)))


def load_drafter(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Drafter:
    """An exported drafter, ready to draft. Raises: UserError if the folder holds none."""
    spec, tensors = load_exported(folder)
    drafter = FAMILIES[spec.family].build(spec, dtype, device)
    drafter.load_state_dict(tensors)
    return drafter.eval().requires_grad_(False)


class Chooser:
    """Chooses the target's token: the argmax, or at a temperature a sample by Gumbel noise drawn from (seed, position) alone.

    A draft is accepted iff it equals the choice. Plain decoding meets the same noise at the same position, so both write the same answer.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0):
        self.temperature, self.seed = temperature, seed

    def __call__(self, logits_RV: Tensor, positions: Sequence[int]) -> list[int]:
        """Tokens chosen from each row's logits; positions are those of the tokens chosen."""
        return self.scores(logits_RV, positions).argmax(-1).tolist()

    def scores(self, logits_RV: Tensor, positions: Sequence[int]) -> Tensor:
        """What the choice is the argmax of: [R, V]."""
        if self.temperature == 0:
            return logits_RV
        noise = {position: self._noise(position, logits_RV) for position in set(positions)}
        return logits_RV.float() / self.temperature + torch.stack([noise[position] for position in positions])

    def _noise(self, position: int, like: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=7).digest()
        generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest))
        return -torch.empty(like.shape[-1], device=like.device).exponential_(generator=generator).log()


class BlockDrafter(DraftModel):
    """Proposes with a trained drafter, by its family's proposer: a chain, or a tree of the `tree_budget` likeliest prefixes."""

    def __init__(self, drafter: Drafter, vocabulary: Vocabulary, mask_token_id: int, block_size: int, tree_budget: int | None = None):
        self.drafter, self.vocabulary, self.tree_budget = drafter, vocabulary, tree_budget
        self.proposer = FAMILIES[drafter.spec.family].proposer(drafter, vocabulary)
        self.masks = [mask_token_id] * (block_size - 1)
        self.slots = range(0 if drafter.spec.sample_from_anchor else 1, block_size)  # those that predict

    def begin(self) -> None:
        self.cache = self.drafter.new_cache()

    def extend(self, features_NF: Tensor, start: int) -> None:
        self.before_1F = features_NF[-1:]
        self.drafter.extend(self.cache, features_NF, torch.arange(start, start + len(features_NF), device=features_NF.device))

    def draft(self, token: int, position: int) -> Drafted:
        """The block below a known token."""
        device = self.vocabulary.embedding.device
        ids = torch.tensor([token, *self.masks], device=device)
        hidden = self.drafter.draft(self.cache, self.vocabulary.embed(ids), torch.arange(position, position + len(ids), device=device))
        return Drafted(hidden[None, self.slots.start :], ids[:1], self.before_1F, ids.new_zeros(1))

    def propose(self, token: int, position: int) -> Proposal:
        drafted = self.draft(token, position)
        if self.tree_budget is None:
            return Proposal(self.proposer.chain(drafted)[0].tolist(), list(range(len(self.slots))))
        (children,) = self.proposer.children(drafted, self.tree_budget)
        nodes = build_tree(children, token, len(self.slots), self.tree_budget)
        return Proposal([token for _, _, token in nodes], [parent + 1 for parent, _, _ in nodes])


def accepted_path(proposal: Proposal, choices: Sequence[int]) -> list[int]:
    """Rows from the root down along the target's choices."""
    child: dict[tuple[int, int], int] = {}
    path = [0]
    for row, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), 1):
        child.setdefault((parent, token), row)
    while (row := child.get((path[-1], choices[path[-1]]))) is not None:
        path.append(row)
    return path


def cut(tokens: Sequence[int], stop: Collection[int], room: int) -> list[int]:
    """Tokens up to and including the first stop token, at most `room` of them."""
    kept = list(tokens[:room])
    end = next((i + 1 for i, token in enumerate(kept) if token in stop), len(kept))
    return kept[:end]


@torch.no_grad()
def speculate(
    target: DecodingTarget, draft_model: DraftModel, prompt: list[int], stop: Collection[int], max_new_tokens: int, choose: Chooser
) -> Answer:
    """Answer a prompt (token ids) by speculative decoding; the tokens are those of `decode`."""
    answer, cache, lap = Answer(prompt), new_cache(), stopwatch(target.device)
    logits, features = target.forward(prompt, 0, cache, last_only=True)
    answer.tokens = choose(logits, [len(prompt)])
    draft_model.begin()
    draft_model.extend(features, 0)
    lap(answer.seconds, "prefill")
    while len(answer.tokens) < max_new_tokens and answer.tokens[-1] not in stop:
        start = len(prompt) + len(answer.tokens) - 1
        proposal = draft_model.propose(answer.tokens[-1], start)
        lap(answer.seconds, "draft")

        is_chain = proposal.parents == list(range(len(proposal.parents)))
        depths = tree_depths(proposal.parents)
        rows = [answer.tokens[-1], *proposal.tokens]
        logits, features = target.forward(rows, start, cache, None if is_chain else proposal.parents)
        choices = choose(logits, [start + depth + 1 for depth in depths])
        path = accepted_path(proposal, choices)
        keep_rows(cache, start, path)
        emitted = cut([choices[row] for row in path], stop, max_new_tokens - len(answer.tokens))
        lap(answer.seconds, "verify")

        draft_model.extend(features[: len(path)] if is_chain else features[path], start)
        answer.add(emitted, len(path))
        lap(answer.seconds, "draft")
    answer.seconds["total"] = sum(answer.seconds.values())
    return answer


@torch.no_grad()
def decode(target: DecodingTarget, prompt: list[int], stop: Collection[int], max_new_tokens: int, choose: Chooser) -> Answer:
    """Answer a prompt by plain decoding, one token per forward, with the family's own cache: the reference."""
    answer, cache, lap = Answer(prompt), DynamicCache(config=target.model.config), stopwatch(target.device)
    rows, start = prompt, 0
    while len(answer.tokens) < max_new_tokens and not (answer.tokens and answer.tokens[-1] in stop):
        logits, _ = target.forward(rows, start, cache, last_only=True)
        start += len(rows)
        answer.tokens += choose(logits, [start])
        rows = answer.tokens[-1:]
        lap(answer.seconds, "write" if start > len(prompt) else "prefill")
    answer.seconds["total"] = sum(answer.seconds.values())
    return answer


@torch.no_grad()
def first_difference(target: DecodingTarget, answer: Answer, reference: Answer, choose: Chooser) -> tuple[int, float] | None:
    """(index, gap) of the first token that differs, if any: by how much the target's own scores prefer one over the other.

    In half precision the gap is a rounding; in float32 there should be no difference at all.
    """
    pairs = zip(answer.tokens, reference.tokens, strict=False)
    index = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if index is None:
        return None
    text = answer.prompt + answer.tokens[:index]
    logits, _ = target.forward(text, 0, new_cache(), last_only=True)
    scores = choose.scores(logits, [len(text)])[0].float()
    return index, float((scores[answer.tokens[index]] - scores[reference.tokens[index]]).abs())


def stopwatch(device: torch.device) -> Callable[[Counter[str], str], None]:
    """A function that adds the seconds since its last call to a part's counter, the device's work included."""
    last = time.perf_counter()

    def lap(seconds: Counter[str], part: str) -> None:
        nonlocal last
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        seconds[part] += now - last  # pyrefly: ignore[unsupported-operation]  (its type says whole numbers)
        last = now

    return lap
