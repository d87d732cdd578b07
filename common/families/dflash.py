"""DFlash: every slot is proposed by itself, all at once.

Legend: A anchors, J predicted slots, D hidden, T tokens of a row, k candidates of a slot.
Source: DFlash, arXiv 2602.06036, code z-lab/dflash.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from common.config import ObjectiveConfig
from common.drafter.backbone import Drafter
from common.families.family import Conditionals, Drafted, DrafterFamily, Proposer
from common.objective.acceptance import Children
from common.objective.block_loss import Result, base_loss
from common.objective.blocks import Blocks
from common.objective.head import best_tokens
from common.target.vocabulary import Vocabulary


class IndependentSlots(Proposer):
    """A slot's tokens do not depend on the slots before it: the best by the shared head."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    def chain(self, drafted: Drafted) -> Tensor:
        return best_tokens(drafted.hidden_AJD, self.vocabulary, 1)[1][..., 0]

    def children(self, drafted: Drafted, width: int) -> list[Children]:
        logprobs_AJk, tokens_AJk = (x.cpu().numpy() for x in best_tokens(drafted.hidden_AJD, self.vocabulary, width))
        return [self._children_of(tokens_Jk, logprobs_Jk) for tokens_Jk, logprobs_Jk in zip(tokens_AJk, logprobs_AJk, strict=True)]

    def conditionals(self, drafted: Drafted) -> Conditionals:
        logits_AJV = self.vocabulary.logits(drafted.hidden_AJD).to(torch.promote_types(drafted.hidden_AJD.dtype, torch.float32))
        return lambda slot, before_A: logits_AJV[:, slot]

    @staticmethod
    def _children_of(tokens_Jk: np.ndarray, logprobs_Jk: np.ndarray) -> Children:
        # A replay asks for the trees of few of its anchors: the others' numbers never become Python's.
        at_depth = functools.cache(lambda depth: (tokens_Jk[depth].tolist(), logprobs_Jk[depth].tolist()))
        return lambda depth, parent: at_depth(depth)


class DFlash(DrafterFamily):
    """The plain family: no modules, settings or loss terms of its own."""

    name = "dflash"
    architecture = "DFlashDraftModel"

    def loss(
        self,
        drafter: Drafter,
        drafted: Drafted,
        vocabulary: Vocabulary,
        blocks: Blocks,
        config: ObjectiveConfig,
        final_hidden_TD: Tensor | None,
        progress: float,
    ) -> Result:
        return base_loss(drafted.hidden_AJD, vocabulary, blocks, config, final_hidden_TD)

    def proposer(self, drafter: Drafter, vocabulary: Vocabulary) -> Proposer:
        return IndependentSlots(vocabulary)
