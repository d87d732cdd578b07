"""What a replica reports of a validation row: whose tau it is, and which tree's."""

from types import SimpleNamespace

import numpy as np

from common.data.rows import Row
from common.data.schedule import VALIDATE, Assignment
from common.objective.acceptance import Replay
from common.training.heldout import heldout_totals


def test_heldout_totals_are_those_of_the_source_and_the_tree_that_they_name():
    """Else a user tunes the mixture by another source's tau, or chooses between chain and tree by a tree nobody asked for."""
    starts = np.repeat([0, 4], [4, 6]).astype(np.int32)
    row = Row(np.arange(10, dtype=np.int32), starts, np.ones(10, np.uint8), valid=10, documents=2)
    accepted_N = np.array([0, 0, 0, 2, 2, 2, 1, 0])  # 3 verifications of one token each; then 3 + 2 tokens in two
    anchors_N = np.array([0, 1, 2, 4, 5, 6, 7, 8])
    labels_NJ = anchors_N[:, None] + np.arange(1, 4)
    likely = np.log([0.6, 0.4]).tolist()  # every label is its slot's best: a tree of one node holds one of them
    children = [lambda depth, parent, n=n: ([int(labels_NJ[n, depth]), 99], likely) for n in range(8)]
    plan = SimpleNamespace(
        config=SimpleNamespace(validation=SimpleNamespace(tree_budget=1)),
        schedule=SimpleNamespace(row_of=lambda assignment: (0, 7)),
        heldout=SimpleNamespace(
            store=SimpleNamespace(source_names=["a", ""], source_of=np.array([0, 0, 1, 1, 0, 1])),
            documents_of=lambda epoch, index: {(0, 7): np.array([3, 4])}[epoch, index],
        ),
    )
    totals = heldout_totals(plan, Assignment(VALIDATE, 1, 0, 0), row, Replay(accepted_N, anchors_N, labels_NJ, children))
    assert totals == {"heldout_tau": (8, 5), "heldout_tau/a": (5, 2), "heldout_tau/unnamed": (3, 3), "heldout_tau_tree": (8, 5)}
