"""How a target is cut into stages: a chain of ranks, each with a range of the decoder's layers.

A stage writes the hidden states of its taps behind those of the stages before it, and the residual stream, which is nothing else than
the output of its last layer, behind them all. So what leaves the last stage is the packet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from common.errors import UserError
from common.target.meta import UnknownSize, part_sizes


@dataclass(frozen=True)
class Stage:
    """One rank's part of a target. `layers` None: all that are needed, of a target that is no chain."""

    layers: range | None
    taps: tuple[int, ...]
    """Layers whose outputs it writes: the drafter's taps among its own and, in a stage before the last, its last layer."""
    final_hidden: bool
    hidden_states: int
    """Hidden states of a token that leave it, those of the stages before included."""


def make_stages(taps: Sequence[int], final_hidden: bool, sizes: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a chain that have so many layers each, in order; one size is no chain."""
    if len(sizes) == 1:
        return (Stage(None, tuple(taps), final_hidden, len(taps) + final_hidden),)
    ends = list(accumulate(sizes))
    stages = []
    for first, end in zip([0, *ends], ends, strict=False):
        last = end == ends[-1]
        own = tuple(tap for tap in taps if first <= tap < end)
        so_far = sum(tap < end for tap in taps)
        written = own if last else (*own, end - 1)
        stages.append(Stage(range(first, end), written, last and final_hidden, so_far + (final_hidden if last else 1)))
    return tuple(stages)


def layer_costs(folder: Path, layers: int, balance: str, trust_remote_code: bool = False) -> tuple[list[int], str]:
    """What each of a target's first layers costs, by which stages are made even, and in words what it is; `balance` as target.balance."""
    try:
        rest, sizes = part_sizes(folder, trust_remote_code)
    except UnknownSize as error:
        return [1] * layers, f"numbers of layers, whose sizes are not known before they are loaded ({error})"
    if balance == "time":
        return [size.active for size in sizes[:layers]], "arithmetic a token (target.balance=time)"
    costs = [size.held for size in sizes[:layers]]
    return [costs[0] + rest.held, *costs[1:]], "bytes (target.balance=bytes)"


def cut(costs: Sequence[int], stages: int) -> list[int]:
    """How many layers each stage gets: the costliest stage costs as little as it can, and of such cuts the most even one is taken.

    Raises: UserError where there are fewer layers than stages.
    """
    layers = len(costs)
    if stages > layers:
        raise UserError(
            f"target.stages={stages}, but the target runs {layers} layers (up to its last tap): write target.stages={layers} or less"
        )
    before = [0, *accumulate(costs)]
    # best[end]: (costliest stage, sum of squares, sizes) of the cheapest way to cut the first `end` layers
    best = {end: (before[end], before[end] ** 2, [end]) for end in range(1, layers + 1)}
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (max(most, before[end] - before[first]), squares + (before[end] - before[first]) ** 2, [*sizes, end - first])
                for first, (most, squares, sizes) in best.items()
                if first < end
            )
            for end in range(stage, layers + 1)
        }
    return best[layers][2]
