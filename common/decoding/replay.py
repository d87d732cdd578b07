"""Greedy speculative decoding without decoding: what a drafter would have had accepted on the way to answers that are there already.

One forward of the target over each answer gives the features of all its positions, one of the drafter the proposals at all of them; then
every way of drafting is a walk over numbers. Where the answers are the target's own greedy ones, what comes out is what `speculate` does,
verification by verification; in float32 exactly.

Legend: T tokens of a row, F features of a position, A anchors, K block slots.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.data.rows import Row
from common.decoding.speculate import Answer, Way
from common.decoding.target import DecodingTarget
from common.drafter.backbone import Drafter
from common.families.family import Drafted
from common.families.registry import FAMILIES
from common.families.replay import draft_blocks, replay_row
from common.objective.acceptance import Replay, walk
from common.objective.blocks import Blocks, build_blocks
from common.target.vocabulary import Vocabulary

Written = tuple[list[int], list[int]]
"""A prompt and the answer to it, as token ids."""

ROW_TOKENS = {"cuda": 4096}
"""Answers share a row of so many tokens, since launches cost more there than masked work; elsewhere each has a row of its own."""

ROW_SLOTS = 2048
"""Slots of a forward: its dense attention is [ROW_SLOTS, T + ROW_SLOTS] a head."""


class Replayer:
    """Replays answers with one target and one drafter; `row_tokens` None is the device's own."""

    def __init__(self, target: DecodingTarget, drafter: Drafter, vocabulary: Vocabulary, row_tokens: int | None = None):
        self.target, self.drafter, self.vocabulary = target, drafter, vocabulary
        self.row_tokens = row_tokens or ROW_TOKENS.get(target.device.type, 1)
        self.proposer = FAMILIES[drafter.spec.family].proposer(drafter, vocabulary)

    def run(self, written: Sequence[Written], ways: Sequence[Way]) -> list[list[Answer]]:
        """For each way, the Answers that `speculate` would give, in the order of `written`."""
        order = sorted(range(len(written)), key=lambda i: sum(map(len, written[i])))
        answers = [[Answer(prompt, tokens) for prompt, tokens in written] for _ in ways]
        largest_first = sorted(zip(ways, answers, strict=True), key=lambda pair: -(pair[0].tree_budget or 0))
        with tqdm(total=len(written), unit=" answers", desc="replay", disable=None) as bar:
            for group in self._groups(written, order):
                row, features = self._row([written[i] for i in group])
                accepted = {}
                for size in {way.block_size for way in ways}:
                    budgets = [way.tree_budget for way in ways if way.block_size == size and way.tree_budget]
                    accepted |= _by_way(size, self._replay(row, features, size, max(budgets, default=None)), budgets)
                for way, ours in largest_first:
                    for found in walk(accepted[way], row):
                        answer = ours[group[found.document]]
                        answer.accepted.append(found.emitted - 1)
                        answer.matched.append(found.accepted)
                        answer.tried.append(min(found.accepted + 1, found.emitted))
                bar.update(len(group))
        return answers

    def _groups(self, written: Sequence[Written], order: Sequence[int]) -> Iterator[list[int]]:
        """Answers whose texts fill a row, each padded to the longest; neighbours in `order` are about equally long."""
        group: list[int] = []
        for i in order:
            if group and (len(group) + 1) * sum(map(len, written[i])) > self.row_tokens:
                yield group
                group = []
            group.append(i)
        yield group

    def _row(self, written: Sequence[Written]) -> tuple[Row, Tensor]:
        """The answers as the documents of a row, supervised where the target wrote, and their features [T, F]."""
        texts = [prompt + tokens for prompt, tokens in written]
        ends = np.cumsum([len(text) for text in texts])
        row = Row(
            tokens=np.concatenate(texts).astype(np.int32),
            document_start=np.repeat(ends - [len(text) for text in texts], [len(text) for text in texts]).astype(np.int32),
            loss_mask=np.concatenate([[0] * len(prompt) + [1] * len(tokens) for prompt, tokens in written]).astype(np.uint8),
            valid=int(ends[-1]),
            documents=len(texts),
        )
        return row, torch.cat(self.target.capture(texts))

    def _replay(self, row: Row, features_TF: Tensor, block_size: int, tree_width: int | None) -> Replay:
        spec = self.drafter.spec

        def blocks_of(anchor_A: np.ndarray, keep_A: np.ndarray) -> Blocks:
            blocks = build_blocks(
                row, anchor_A, keep_A, block_size, spec.mask_token_id, window=spec.window, sample_from_anchor=spec.sample_from_anchor
            )
            blocks.mask = blocks.mask._replace(full_tiles=None, sliding_tiles=None)  # kernels would be compiled for every block size
            return blocks.to(self.target.device)

        def drafted_of(blocks: Blocks) -> Drafted:
            return draft_blocks(self.drafter, self.vocabulary, features_TF, blocks)

        anchors = max(1, min(ROW_SLOTS // block_size, int(row.loss_mask.sum())))
        return replay_row(row, anchors, blocks_of, drafted_of, self.proposer, tree_width)


def _by_way(block_size: int, replay: Replay, budgets: Sequence[int]) -> dict[Way, Callable[[int], int]]:
    """How many drafts are accepted at an anchor, by the anchor's number; what is known of a larger tree serves the smaller ones."""
    known: dict[int, tuple[int, list[int]]] = {}

    def by_tree(budget: int) -> Callable[[int], int]:
        def accepted(n: int) -> int:
            if n not in known or known[n][0] < budget:
                known[n] = budget, replay.label_numbers(n, budget)
            return bisect.bisect_left(known[n][1], budget)

        return accepted

    return {Way(block_size): lambda n: int(replay.accepted_N[n])} | {Way(block_size, budget): by_tree(budget) for budget in budgets}
