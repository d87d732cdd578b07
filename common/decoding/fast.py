"""Greedy decoding whose steps are recorded: `FastDecoder.answer` writes what `decode` and `speculate` write, their eager twins.

Where the answer stands is on the device: the last token known, its position, the caches, the feature before it. A step reads and moves
that, so a chain's is two launches (draft, verify) and one look at what came out. A tree is grown on the host between the two.

Legend: K block slots, J proposed tokens of a chain, N nodes of a tree, R = J + 1 or N + 1 rows of a verification, F features of a position.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from common.decoding.speculate import Answer, BlockDrafter, Proposal, accepted_path, cut, stopwatch
from common.decoding.static import Recorded, StaticTarget, fuse_norms
from common.decoding.target import DecodingTarget, tree_depths, tree_mask
from common.families.family import Drafted
from common.objective.acceptance import build_tree

CHUNK = 128
"""Tokens of a prompt that are read at once; the weights are read once for them all."""
CAPACITY = 512
"""A cache's capacity is a multiple of this."""


class FastDecoder:
    """Plain decoding, or speculative decoding with a drafter's chains or trees. Greedy; one answer at a time."""

    def __init__(self, target: DecodingTarget, drafter: BlockDrafter | None):
        self.target, self.drafter, self.capacity = target, drafter, 0
        if target.device.type == "cuda":
            fuse_norms(target.model)
            if drafter is not None:
                fuse_norms(drafter.drafter)

    def answer(self, prompt: list[int], stop: Collection[int], max_new_tokens: int) -> Answer:
        """Answer a prompt (token ids)."""
        if len(prompt) + max_new_tokens + self._rows() + CHUNK > self.capacity:
            self.capacity = -(-(len(prompt) + max_new_tokens + self._rows() + CHUNK) // CAPACITY) * CAPACITY
            self._steps = _Steps(self.target, self.drafter, self.capacity)
        answer, lap = Answer(prompt), stopwatch(self.target.device)
        answer.tokens = [self._steps.read(prompt)]
        lap(answer.seconds, "prefill")
        while len(answer.tokens) < max_new_tokens and answer.tokens[-1] not in stop:
            choices, path = self._steps.advance()
            emitted = cut(choices, stop, max_new_tokens - len(answer.tokens))
            if self.drafter is None:
                answer.tokens += emitted
            else:
                answer.add(emitted, path)
        lap(answer.seconds, "write")
        answer.seconds["total"] = sum(answer.seconds.values())
        return answer

    def _rows(self) -> int:
        if self.drafter is None:
            return 1
        return 1 + (self.drafter.tree_budget or len(self.drafter.slots))


class _Steps:
    """The state of an answer on the device, and the recorded steps that move it."""

    def __init__(self, target: DecodingTarget, drafter: BlockDrafter | None, capacity: int):
        self.device, self.drafter, self.target = target.device, drafter, StaticTarget(target, capacity)
        self.token_1, self.position_1, self.count_1 = (self._integers([number]) for number in (0, 0, 1))
        self.chunk_C, self.chunk_depth_C, self.chunk_mask_CC = self._integers([0] * CHUNK), self._range(CHUNK), self._causal(CHUNK)
        if drafter is not None:
            self.cache = drafter.drafter.new_cache(capacity)
            self.before_1F = torch.zeros(1, drafter.drafter.fc.in_features, dtype=target.model.dtype, device=self.device)
            self.block_K = self._integers([0, *drafter.masks])
        self.read_chunk = self._record(self._read_chunk)
        if drafter is None:
            self.step = self._record(self._plain)
        elif drafter.tree_budget is None:
            self.drafts_J = self._integers([0] * len(drafter.slots))
            self.out_R = self._integers([0] * (len(drafter.slots) + 2))
            self.draft, self.step = self._record(self._draft_chain), self._record(self._verify_chain)
        else:
            rows = 1 + drafter.tree_budget
            self.rows_R, self.depth_R, self.choices_R = (self._integers([0] * rows) for _ in range(3))
            self.ancestors_RR = torch.eye(rows, dtype=torch.bool, device=self.device)
            self.path_J1 = self._range(1 + min(len(drafter.slots), drafter.tree_budget))  # the deepest path of the tree
            self.draft, self.step, self.commit = (self._record(f) for f in (self._draft_hidden, self._verify_tree, self._commit))

    def read(self, prompt: list[int]) -> int:
        """Read a prompt; returns the token behind it."""
        self.position_1.zero_()
        for start in range(0, len(prompt), CHUNK):
            tokens = prompt[start : start + CHUNK]
            self.chunk_C[: len(tokens)].copy_(torch.tensor(tokens))
            self.count_1.fill_(len(tokens))
            self.read_chunk()
        self.known = int(self.token_1)
        return self.known

    def advance(self) -> tuple[list[int], int]:
        """One verification (or one plain token): the target's choices along what was accepted, and how many rows that is."""
        if self.drafter is None:
            self.step()
            return [int(self.token_1)], 1
        self.draft()
        if self.drafter.tree_budget is None:
            self.step()
            *choices, accepted = self.out_R.tolist()
            return choices[: accepted + 1], accepted + 1
        proposal = self._grow()
        self._place(proposal)
        self.step()
        choices = self.choices_R.tolist()
        path = accepted_path(proposal, choices)
        self.path_J1.copy_(torch.tensor([*path, *range(len(path), len(self.path_J1))]))
        self.count_1.fill_(len(path))
        self.commit()
        self.known = choices[path[-1]]
        return [choices[row] for row in path], len(path)

    def _read_chunk(self) -> None:
        """A chunk of the prompt, `count` tokens of it real; the rows behind them are overwritten before anybody sees them."""
        logits_CV, features_CF = self.target.forward(self.chunk_C, self.position_1, self.chunk_depth_C, self.chunk_mask_CC)
        self._take(features_CF, self.chunk_depth_C, self.count_1 - 1)
        self.token_1.copy_(logits_CV.index_select(0, self.count_1 - 1).argmax(-1))
        self.position_1.add_(self.count_1)

    def _plain(self) -> None:
        logits_1V, _ = self.target.forward(self.token_1, self.position_1, self.chunk_depth_C[:1], self.chunk_mask_CC[:1, :1])
        self.token_1.copy_(logits_1V.argmax(-1))
        self.position_1.add_(1)

    def _draft_chain(self) -> None:
        assert self.drafter is not None
        self.drafts_J.copy_(self.drafter.proposer.chain(self._drafted())[0])

    def _verify_chain(self) -> None:
        """Verify the drafts; the first row whose choice is another token than the next draft is the last that is accepted."""
        rows_R = torch.cat((self.token_1, self.drafts_J))
        depth_R = torch.arange(len(rows_R), device=self.device)
        logits_RV, features_RF = self.target.forward(rows_R, self.position_1, depth_R, depth_R[:, None] >= depth_R)
        choices_R = logits_RV.argmax(-1)
        accepted_1 = (choices_R[:-1] == self.drafts_J).long().cumprod(0).sum(0, keepdim=True)
        self._take(features_RF, depth_R, accepted_1)
        self.token_1.copy_(choices_R.index_select(0, accepted_1))
        self.position_1.add_(accepted_1 + 1)
        self.out_R.copy_(torch.cat((choices_R, accepted_1)))

    def _draft_hidden(self) -> None:
        self.drafted = self._drafted()

    def _grow(self) -> Proposal:
        """The tree below the last token known."""
        assert self.drafter is not None and self.drafter.tree_budget is not None
        (children,) = self.drafter.proposer.children(self.drafted, self.drafter.tree_budget)
        nodes = build_tree(children, self.known, len(self.drafter.slots), self.drafter.tree_budget)
        return Proposal([token for _, _, token in nodes], [parent + 1 for parent, _, _ in nodes])

    def _place(self, proposal: Proposal) -> None:
        """Hand the tree to the device; rows that a small vocabulary leaves over see themselves alone."""
        rows = 1 + len(proposal.tokens)
        self.rows_R[1:rows].copy_(torch.tensor(proposal.tokens))
        self.depth_R[:rows].copy_(torch.tensor(tree_depths(proposal.parents)))
        self.ancestors_RR[:rows, :rows].copy_(tree_mask(proposal.parents, 0))

    def _verify_tree(self) -> None:
        self.rows_R[:1].copy_(self.token_1)
        logits_RV, self.features_RF = self.target.forward(self.rows_R, self.position_1, self.depth_R, self.ancestors_RR)
        self.choices_R.copy_(logits_RV.argmax(-1))

    def _commit(self) -> None:
        """Keep the accepted path of `count` rows as if it had been a chain."""
        depth_J1, last_1 = torch.arange(len(self.path_J1), device=self.device), self.path_J1.index_select(0, self.count_1 - 1)
        self.target.cache.move(self.position_1 + self.path_J1, self.position_1 + depth_J1)
        self._take(self.features_RF.index_select(0, self.path_J1), depth_J1, self.count_1 - 1)
        self.token_1.copy_(self.choices_R.index_select(0, last_1))
        self.position_1.add_(self.count_1)

    def _drafted(self) -> Drafted:
        """Run the drafter on a block behind the last token known."""
        drafter = self.drafter
        assert drafter is not None
        self.block_K[:1].copy_(self.token_1)
        positions_K = self.position_1 + torch.arange(len(self.block_K), device=self.device)
        hidden_KD = drafter.drafter.draft(self.cache, drafter.vocabulary.embed(self.block_K), positions_K, fixed=True)
        return Drafted(hidden_KD[None, drafter.slots.start :], self.token_1, self.before_1F, torch.zeros_like(self.token_1))

    def _take(self, features_RF: Tensor, depth_R: Tensor, last_1: Tensor) -> None:
        """Give the drafter the features of verified rows, the accepted ones up to `last`; later rows are overwritten unseen."""
        if self.drafter is not None:
            self.drafter.drafter.write(self.cache, features_RF, self.position_1 + depth_R)
            self.before_1F.copy_(features_RF.index_select(0, last_1))

    def _record(self, function: Callable[[], None]) -> Recorded:
        with torch.no_grad():
            return Recorded(function, self.device)

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _range(self, length: int) -> Tensor:
        return torch.arange(length, device=self.device)

    def _causal(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
