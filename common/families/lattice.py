"""Proposals along a lattice: a few candidates for every slot, and a score for every pair of neighbouring candidates.

Legend: A anchors, J predicted slots, k candidates of a slot (p: of the slot before), w best of them.
"""

import functools
from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.families.dflash import IndependentSlots
from common.families.family import Conditionals, Drafted, Proposer
from common.objective.acceptance import Children, Siblings
from common.target.vocabulary import Vocabulary


class Lattice(NamedTuple):
    """Every slot's candidates, and how well each follows each candidate of the slot before.

    Shapes: tokens_AJk int64 [A, J, k]; scores_AJpk [A, J, p, k], logits given candidate p of the slot before; in the first slot, which
    follows the anchor, all rows p are alike.
    """

    tokens_AJk: Tensor
    scores_AJpk: Tensor

    def given(self, slot: int, chosen_A: Tensor) -> Tensor:
        """Scores [A, k] of a slot's candidates, given the number of the candidate that was chosen in the slot before (any in the first)."""
        scores_Apk = self.scores_AJpk[:, slot]
        return scores_Apk.gather(1, chosen_A[:, None, None].expand(-1, 1, scores_Apk.shape[2]))[:, 0]

    def walk(self) -> Tensor:
        """The greedy way from the anchors on, slot after slot, each given the one chosen before: int64 [A, J]."""
        chosen_A = self.tokens_AJk.new_zeros(len(self.tokens_AJk))
        tokens = []
        for slot in range(self.tokens_AJk.shape[1]):
            chosen_A = self.given(slot, chosen_A).argmax(-1)
            tokens.append(self.tokens_AJk[:, slot].gather(1, chosen_A[:, None])[:, 0])
        return torch.stack(tokens, dim=1)


class LatticeProposer(Proposer):
    """Walks from the anchor through the candidates; `plain` is the head's best token in every slot."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary, self.plain = vocabulary, IndependentSlots(vocabulary)

    @abstractmethod
    def lattice(self, drafted: Drafted) -> Lattice:
        """The lattice of every block, by the drafter's own candidates."""

    @torch.no_grad()
    def chain(self, drafted: Drafted) -> Tensor:
        return self.lattice(drafted).walk()

    def conditionals(self, drafted: Drafted) -> Conditionals:
        lattice, vocabulary_size = self.lattice(drafted), self.vocabulary.head.shape[0]

        def logits(slot: int, before_A: Tensor) -> Tensor:
            tokens_Ak = lattice.tokens_AJk[:, slot]
            chosen_A = (lattice.tokens_AJk[:, slot - 1] == before_A[:, None]).int().argmax(-1) if slot else torch.zeros_like(before_A)
            nowhere_AV = lattice.scores_AJpk.new_full((len(before_A), vocabulary_size), -torch.inf)
            return nowhere_AV.scatter(1, tokens_Ak, lattice.given(slot, chosen_A))

        return logits

    @torch.no_grad()
    def children(self, drafted: Drafted, width: int) -> list[Children]:
        lattice = self.lattice(drafted)
        logprobs_AJpk = lattice.scores_AJpk.log_softmax(-1)
        order_AJpw = logprobs_AJpk.argsort(dim=-1, descending=True, stable=True)[..., :width]
        logprobs_AJpw = logprobs_AJpk.gather(-1, order_AJpw)
        parts = (x.cpu().numpy() for x in (lattice.tokens_AJk, order_AJpw.to(torch.int16), logprobs_AJpw))
        return [_children_of(*block) for block in zip(*parts, strict=True)]


def _children_of(tokens_Jk: np.ndarray, order_Jpw: np.ndarray, logprobs_Jpw: np.ndarray) -> Children:
    @functools.cache  # siblings share their children's numbers, and few of them ever become Python's
    def children(depth: int, parent: int) -> Siblings:
        row = int(np.flatnonzero(tokens_Jk[depth - 1] == parent)[0]) if depth else 0
        return tokens_Jk[depth][order_Jpw[depth, row]].tolist(), logprobs_Jpw[depth, row].tolist()

    return children
