"""In which way the documents of a row run: tried on a small row before the first step, not believed.

Legend: T tokens of a row, B documents of a batch, N tokens of its longest, F features of a token, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.data.rows import Row
from common.errors import UserError
from common.target.adapters import first_line

PACKED, BATCHED, PER_DOCUMENT = "packed", "batched", "per_document"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Largest relative difference of a token's features from those of its document run alone: rounding over many layers stays below."""
LEAK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
"""The same, when another document of the row changes: the same kernels run on the same shapes, so there is hardly any rounding."""
KNOWN_KINDS = frozenset(("full_attention", "sliding_attention", "linear_attention"))
"""Attention that a small row puts to the test; for others (chunks, compressed keys) it would be too short to show anything."""
TRIAL_LENGTHS = (24, 9, 17)


class Way(NamedTuple):
    """How the documents of a row run, and the name of the attention function that they run through."""

    execution: str
    attention: str


class Batch(NamedTuple):
    """Documents side by side, filled up on the right, where a causal model does not see it.

    Shapes: tokens_BN int32; source, rows int64 [tokens]: indices into the flattened batch, and where in the row they belong.
    """

    tokens_BN: np.ndarray
    source: np.ndarray
    rows: np.ndarray


def document_batches(row: Row) -> Iterator[Batch]:
    """The documents of a row in batches of similar lengths, none larger than the row."""
    spans = sorted(row.spans(), key=lambda span: span[0] - span[1])
    while spans:
        N = spans[0][1] - spans[0][0]
        B = sum(2 * (end - begin) > N for begin, end in spans[: max(1, len(row.tokens) // N)])
        group, spans = spans[:B], spans[B:]
        rows = [np.arange(begin, end) for begin, end in group]
        tokens_BN = np.zeros((B, N), np.int32)
        for b, indices in enumerate(rows):
            tokens_BN[b, : len(indices)] = row.tokens[indices]
        source = np.concatenate([b * N + np.arange(len(indices)) for b, indices in enumerate(rows)])
        yield Batch(tokens_BN, source, np.concatenate(rows))


def exact_ways(
    asked: str,
    ways: Sequence[Way],
    reference: Way,
    features: Callable[[Row, Way], Tensor],
    kinds: set[str],
    vocabulary: int,
    hidden_size: int,
    all_of_them: bool,
) -> tuple[list[Way], list[str]]:
    """The first of `ways` that gives what `reference` gives, or all that do and `reference` behind them; `asked` as in target.execution.

    Returns beside it why none is packed, if none is. Raises: UserError where the way that was asked for is not exact.
    """
    found, refused = list[Way](), list[str]()
    row = trial_row(vocabulary)
    truth = features(row, reference)
    for way in ways:
        if asked not in ("auto", way.execution):
            continue
        if (flaw := _flaw(way, row, truth, features, kinds, hidden_size)) is None:
            found.append(way)
            if not all_of_them:
                break
        else:
            refused.append(f"{way.execution} through {way.attention}: {flaw}")
    if asked in (PACKED, BATCHED):
        if not found:
            raise UserError(f"target.execution={asked}: {'; '.join(refused)}; use target.execution=auto or per_document")
    elif all_of_them or not found:
        found.append(reference)
    return found, [] if found[0].execution == PACKED else refused


def common_way(ways: Sequence[Sequence[Sequence[str]]]) -> Way:
    """The fastest way that is exact in all stages of a chain, from each one's `exact_ways`, which may have travelled as JSON.

    Raises: UserError where they have none in common.
    """
    first, *others = ({Way(*way): None for way in stage} for stage in ways)
    found = next((way for way in first if all(way in other for other in others)), None)
    if found is None:
        raise UserError(
            "target.execution: the stages of a target cannot all run their documents in one such way; use target.execution=auto"
        )
    return found


def _flaw(way: Way, row: Row, truth: Tensor, features: Callable[[Row, Way], Tensor], kinds: set[str], hidden_size: int) -> str | None:
    """Why this way must not be taken, if so."""
    if way.execution == PACKED and (unknown := sorted(kind for kind in kinds - KNOWN_KINDS if "attention" in kind)):
        return f"layers of {', '.join(unknown)} are not known to keep documents apart"
    try:
        found = features(row, way)
        other = features(with_other_first_document(row), way) if way.execution == PACKED else found
    except Exception as error:  # the code of any family runs here
        return first_line(error)
    first = TRIAL_LENGTHS[0]
    for difference, tolerance, what in (
        (relative_difference(other[first:], found[first:], hidden_size), LEAK_TOLERANCE, "documents of one row change each other"),
        (relative_difference(found, truth, hidden_size), TOLERANCE, "features differ from those of documents run alone"),
    ):
        if not difference <= tolerance[truth.dtype]:
            return f"{what} by {difference:.1e}"
    return None


def trial_row(vocabulary: int) -> Row:
    """A small row of documents of unlike lengths."""
    total, starts = sum(TRIAL_LENGTHS), np.cumsum((0, *TRIAL_LENGTHS[:-1]))
    tokens = (np.arange(total) * 7919 % vocabulary).astype(np.int32)
    return Row(tokens, np.repeat(starts, TRIAL_LENGTHS).astype(np.int32), np.ones(total, np.uint8), total, len(TRIAL_LENGTHS))


def with_other_first_document(row: Row) -> Row:
    """The trial's row with the tokens of its first document in another order."""
    first = TRIAL_LENGTHS[0]
    tokens = np.concatenate([row.tokens[:first][::-1], row.tokens[first:]])
    return Row(tokens, row.document_start, row.loss_mask, row.valid, row.documents)


def relative_difference(found_TF: Tensor, truth_TF: Tensor, hidden_size: int) -> float:
    """The largest over tokens and hidden states."""
    found, truth = (x.float().unflatten(1, (-1, hidden_size)) for x in (found_TF, truth_TF))
    return float(((found - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-12)).max())
