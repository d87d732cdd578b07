"""What a drafter is worth on this device: the times of drafting, verifying and plain decoding, and the acceptance that was replayed.

A verification takes draft_ms + verify_ms and gives tau tokens, plain decoding one token in plain_ms: the expected speed-up is
tau * plain_ms / (draft_ms + verify_ms), and the drafter pays from tau = (draft_ms + verify_ms) / plain_ms on.

Legend: B texts that are decoded side by side, K block slots, R rows of a verification, S context and rows.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.decoding.speculate import Way
from common.decoding.static import Recorded, StaticTarget, fits, records
from common.errors import UserError
from common.evaluation.subject import Subject
from common.families.family import Drafted
from common.objective.acceptance import build_tree

BATCHES = (1, 8, 32)
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """One way of drafting, `batch` texts side by side; tau was replayed, the times were measured here."""

    batch: int
    way: Way
    drafts: int
    tau: float
    draft_ms: float
    verify_ms: float
    plain_ms: float

    @property
    def break_even_tau(self) -> float:
        """The acceptance length from which on it pays."""
        return (self.draft_ms + self.verify_ms) / self.plain_ms

    @property
    def speedup(self) -> float:
        """Over plain decoding, as expected from the times."""
        return self.tau / self.break_even_tau

    def record(self) -> dict[str, Any]:
        """For the report."""
        names = ("batch", "drafts", "tau", "draft_ms", "verify_ms", "plain_ms", "break_even_tau", "speedup")
        return self.way._asdict() | {name: getattr(self, name) for name in names}


def check_advice(subject: Subject) -> None:
    """Raises: UserError where the target cannot be timed in batches."""
    if not fits(subject.target):
        raise UserError("--advise times targets of attention layers alone, on one device: leave it out, or leave out --stages")


def advise(subject: Subject, tau: Mapping[Way, float], context_tokens: int) -> list[Case]:
    """Every way in every batch, behind a context of so many tokens."""
    cases = []
    for batch in BATCHES:
        bench = _Bench(subject, batch, context_tokens, max(_rows(subject, way) for way in tau))
        plain_ms = bench.target_ms(1)
        cases += [
            Case(batch, way, subject.drafts(way), found, bench.draft_ms(way), bench.target_ms(_rows(subject, way)), plain_ms)
            for way, found in tau.items()
        ]
    return cases


def lines(cases: Sequence[Case]) -> list[str]:
    """The advice for a person: what is expected of each way, and what to set in the engines."""
    said = []
    for batch, group in itertools.groupby(cases, key=lambda case: case.batch):
        listed = list(group)
        said += ["", f"{batch} at a time: plain decoding {listed[0].plain_ms:.2f} ms a token"]
        said.append(f"{'':24}{'tau':>7}{'draft ms':>10}{'verify ms':>11}{'speed-up':>10}{'pays from tau':>15}")
        for case in listed:
            name = f"{case.drafts} draft tokens" if case.way.tree_budget is None else case.way.name
            times = f"{case.tau:7.2f}{case.draft_ms:10.2f}{case.verify_ms:11.2f}{case.speedup:10.2f}{case.break_even_tau:15.2f}"
            said.append(f"{name:24}{times}")
        best = max((case for case in listed if case.way.tree_budget is None), key=lambda case: case.speedup)
        if best.speedup > 1:
            set_these = f"vLLM num_speculative_tokens={best.drafts}, SGLang --speculative-num-draft-tokens {best.drafts + 1}"
            said.append(f"best chain: {best.drafts} draft tokens, {best.speedup:.2f} times plain decoding: {set_these}")
        else:
            said.append("no chain pays here: decode plainly, or train a drafter of a greater tau")
    return said


def _rows(subject: Subject, way: Way) -> int:
    return 1 + (way.tree_budget or subject.drafts(way))


class _Bench:
    """Times of one batch of texts that stand at one place, by recorded steps where a GPU and the target's family allow it."""

    def __init__(self, subject: Subject, batch: int, context_tokens: int, rows: int):
        self.subject, self.batch, self.device = subject, batch, subject.target.device
        self.static = StaticTarget(subject.target, context_tokens + rows)
        self.cache = subject.drafter.new_cache(context_tokens + rows)
        self.start_1 = torch.tensor([context_tokens], device=self.device)

    def target_ms(self, rows: int) -> float:
        """A forward of so many rows a text."""
        ids_BR = torch.zeros(self.batch, rows, dtype=torch.long, device=self.device)
        depth_R = torch.arange(rows, device=self.device)
        ancestors_RR = depth_R[:, None] >= depth_R
        return self._time_ms(lambda: self.static.forward(ids_BR, self.start_1, depth_R, ancestors_RR)[0].argmax(-1))

    def draft_ms(self, way: Way) -> float:
        """The blocks of all texts, and their proposals; a tree is grown on the host."""
        drafter = self.subject.block_drafter(way)
        ids_N = torch.tensor([0, *drafter.masks], device=self.device).repeat(self.batch)
        positions_N = (self.start_1 + torch.arange(way.block_size, device=self.device)).repeat(self.batch)
        before_BF = torch.zeros(self.batch, drafter.drafter.fc.in_features, dtype=self.subject.target.model.dtype, device=self.device)
        before_B = torch.arange(self.batch, device=self.device)
        drafted = []

        def draft() -> None:
            hidden_ND = drafter.drafter.draft(self.cache, drafter.vocabulary.embed(ids_N), positions_N, fixed=True)
            hidden_BJD = hidden_ND.unflatten(0, (self.batch, -1))[:, drafter.slots.start :]
            drafted[:] = [Drafted(hidden_BJD, ids_N[:: way.block_size], before_BF, before_B)]
            if way.tree_budget is None:
                drafter.proposer.chain(drafted[0])

        drafting_ms, growing_ms = self._time_ms(draft), 0.0
        if (budget := way.tree_budget) is not None:

            def grow() -> None:
                for children in drafter.proposer.children(drafted[0], budget):
                    build_tree(children, 0, len(drafter.slots), budget)

            growing_ms = statistics.median(_wall_ms(grow, self.device) for _ in range(REPEATS))
        return drafting_ms + growing_ms

    @torch.no_grad()
    def _time_ms(self, function: Callable[[], object]) -> float:
        step = Recorded(function, self.device) if records(self.subject.target) else function
        step()
        return statistics.median(_wall_ms(step, self.device) for _ in range(REPEATS))


def _wall_ms(function: Callable[[], object], device: torch.device) -> float:
    begun_s = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun_s)
