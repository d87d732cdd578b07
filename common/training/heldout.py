"""Held-out tau: the acceptance length of greedy speculative decoding, replayed on held-out conversations."""

from common.data.rows import Row
from common.data.schedule import VALIDATE, Assignment
from common.objective.acceptance import Replay
from common.training.plan import RunPlan


def heldout_totals(plan: RunPlan, assignment: Assignment, row: Row, replay: Replay) -> dict[str, tuple[float, float]]:
    """Totals of one validation row as {name: (emitted tokens, verifications)}.

    `heldout_tau` is the chain's acceptance length, `heldout_tau_tree` that of a tree of `validation.tree_budget` nodes,
    `heldout_tau_plain` the chain's without what the drafter's family adds to the head (only where it adds anything),
    `heldout_tau/<source>` the chain's on one source of the data.
    """
    emitted, verifications = replay.chain(row)
    tree = replay.tree(row, plan.config.validation.tree_budget)
    totals = {
        "heldout_tau": (float(emitted.sum()), float(verifications.sum())),
        "heldout_tau_tree": (float(tree[0].sum()), float(tree[1].sum())),
    }
    if (plain := replay.plain(row)) is not None:
        totals["heldout_tau_plain"] = (float(plain[0].sum()), float(plain[1].sum()))
    if plan.heldout is None or assignment.kind != VALIDATE:
        return totals
    names, documents = plan.heldout.store.source_names, plan.heldout.documents_of(*plan.schedule.row_of(assignment))
    for source in range(len(names) if len(names) > 1 else 0):
        own = plan.heldout.store.source_of[documents] == source
        totals[f"heldout_tau/{names[source] or 'unnamed'}"] = (float(emitted[own].sum()), float(verifications[own].sum()))
    return totals
