"""What a replica reports of a validation row: whose tau it is, and which tree's."""

from types import SimpleNamespace

import numpy as np

from common.data.rows import Row
from common.data.schedule import VALIDATE, Assignment
from common.training.heldout import heldout_totals


def test_walk_totals_are_those_of_the_source_and_the_tree_that_they_name():
    """Else a user tunes the mixture by another source's tau, or chooses between chain and tree by a tree nobody asked for."""
    starts = np.repeat([0, 4], [4, 6]).astype(np.int32)
    row = Row(np.arange(10, dtype=np.int32), starts, np.ones(10, np.uint8), valid=10, documents=2)
    accepted_N = np.array([0, 0, 0, 2, 2, 2, 1, 0])  # 3 verifications of one token each; then 3 + 2 tokens in two
    logprobs_NJk = np.tile(np.log([0.6, 0.4]), (8, 3, 1))
    ranks_NJ = np.zeros((8, 3), np.int64)  # every label is its slot's best: a tree of one node holds one of them
    plan = SimpleNamespace(
        config=SimpleNamespace(validation=SimpleNamespace(tree_budget=1)),
        drafter=SimpleNamespace(block_size=4),
        schedule=SimpleNamespace(row_of=lambda assignment: (0, 7)),
        heldout=SimpleNamespace(
            store=SimpleNamespace(source_names=["a", ""], source_of=np.array([0, 0, 1, 1, 0, 1])), documents_of={7: np.array([3, 4])}.get
        ),
    )
    totals = heldout_totals(plan, Assignment(VALIDATE, 1, 0, 0), row, accepted_N, logprobs_NJk, ranks_NJ)
    assert totals == {"heldout_tau": (8, 5), "heldout_tau/a": (5, 2), "heldout_tau/unnamed": (3, 3), "heldout_tau_tree": (8, 5)}
