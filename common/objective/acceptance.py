"""How far a drafter's proposals agree with what was written: greedy speculative decoding replayed over a row, by chain and by tree.

Legend: J predicted slots, N anchors of a whole row.
Source: draft trees as a best-first heap over prefixes (DDTree, liranringel/ddtree).
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.data.rows import Row
from common.objective.blocks import candidates

Siblings = tuple[Sequence[int], Sequence[float]]
"""Tokens that may follow one node of a tree, and their log-probabilities, best first."""

Children = Callable[[int, int], Siblings]
"""(a node's depth, 0 for the root; the node's token) -> what may follow it."""


@dataclass(frozen=True)
class Replay:
    """What a drafter proposes at every anchor of a row, in order, beside what was written there.

    Shapes: accepted_N int64, how many tokens of each chain would be accepted; tokens_N int64, the anchors' own tokens; labels_NJ int64, -1
    where a slot has no label; children: of each anchor's tree; plain_N int64, as accepted_N of the proposer's `plain`, None without one.
    """

    accepted_N: np.ndarray
    tokens_N: np.ndarray
    labels_NJ: np.ndarray
    children: list[Children]
    plain_N: np.ndarray | None = None

    def chain(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """(emitted tokens, verifications), int64 per document of the row, of chain decoding."""
        return replay(lambda n: int(self.accepted_N[n]), row)

    def plain(self, row: Row) -> tuple[np.ndarray, np.ndarray] | None:
        """The same without what the drafter's family adds to the head; None where it adds nothing."""
        plain_N = self.plain_N
        return None if plain_N is None else replay(lambda n: int(plain_N[n]), row)

    def tree(self, row: Row, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """The same where each verification checks a tree of `budget` nodes."""
        return replay(lambda n: len(self.label_numbers(n, budget)), row)

    def label_numbers(self, n: int, budget: int) -> list[int]:
        """`label_numbers` of the tree below anchor n."""
        return label_numbers(self.children[n], int(self.tokens_N[n]), self.labels_NJ[n].tolist(), budget)


class Verification(NamedTuple):
    """One verification of a replay, at the anchor `at` of a row's `document`: `accepted` drafts were right, `emitted` tokens came out."""

    document: int
    at: int
    accepted: int
    emitted: int


def walk(accepted: Callable[[int], int], row: Row) -> Iterator[Verification]:
    """Greedy speculative decoding replayed: from each assistant turn's first token, jump by accepted + 1 to the turn's end.

    `accepted` takes an anchor's number among the row's candidates. The turn's first token is the prefill's and no verification emits it;
    a turn of one token costs no verification.
    """
    number = {at: n for n, at in enumerate(candidates(row).tolist())}
    for document, (first, stop) in enumerate(row.spans()):
        edges = np.flatnonzero(np.diff(row.loss_mask[first:stop] != 0, prepend=False, append=False)) + first
        for at, end in edges.reshape(-1, 2).tolist():
            while at < end - 1:
                found = Verification(document, at, right := accepted(number[at]), min(right + 1, end - 1 - at))
                yield found
                at += found.emitted


def replay(accepted: Callable[[int], int], row: Row) -> tuple[np.ndarray, np.ndarray]:
    """(emitted tokens, verifications), int64 per document of the row, of `walk`."""
    emitted, verifications = np.zeros(row.documents, np.int64), np.zeros(row.documents, np.int64)
    for found in walk(accepted, row):
        emitted[found.document] += found.emitted
        verifications[found.document] += 1
    return emitted, verifications


def best_prefixes(children: Children, root: int, slots: int) -> Iterator[tuple[int, int, int]]:
    """Yield prefixes from the likeliest down, under the product of their tokens' probabilities, as (parent, depth, token).

    `parent` is an earlier prefix's number or -1 (the root, whose token is `root`), `depth` counts from 1. A yielded prefix offers its next
    sibling and its first child, so none is missed. Earlier offers win ties: the order is the same on every machine.
    """
    heap: list[tuple[float, int, int, int, int, Siblings]] = []
    offered = 0

    def offer(cost: float, parent: int, depth: int, rank: int, siblings: Siblings) -> None:
        nonlocal offered
        if rank < len(siblings[0]):
            heapq.heappush(heap, (cost - siblings[1][rank], offered, parent, depth, rank, siblings))
            offered += 1

    offer(0.0, -1, 1, 0, children(0, root))
    for number in itertools.count():
        if not heap:
            return
        cost, _, parent, depth, rank, siblings = heapq.heappop(heap)
        tokens, logprobs = siblings
        yield parent, depth, tokens[rank]
        offer(cost + logprobs[rank], parent, depth, rank + 1, siblings)
        if depth < slots:
            offer(cost, number, depth + 1, 0, children(depth, tokens[rank]))


def build_tree(children: Children, root: int, slots: int, budget: int) -> list[tuple[int, int, int]]:
    """The `budget` likeliest prefixes as a list of (parent, depth, token), parents first; see `best_prefixes`."""
    return list(itertools.islice(best_prefixes(children, root, slots), budget))


def label_numbers(children: Children, root: int, labels_J: Sequence[int], budget: int) -> list[int]:
    """Which prefixes of the tree of `budget` nodes below the token `root` are the labels' own: the numbers of the first label, of the
    first two, and so on, as far as the tree holds them.

    A smaller tree is the beginning of a larger one: it holds those whose number is below its budget.
    """
    found: list[int] = []
    tip, possible = -1, children(0, root)[0]  # the labels' longest prefix so far, the tokens that may follow it
    for number, (parent, _, token) in enumerate(itertools.islice(best_prefixes(children, root, len(labels_J)), budget)):
        if len(found) == len(labels_J) or labels_J[len(found)] not in possible:
            break
        if parent == tip and token == labels_J[len(found)]:
            tip = number
            found.append(number)
            possible = children(len(found), token)[0] if len(found) < len(labels_J) else ()
    return found
