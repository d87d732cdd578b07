"""What a running engine does with a drafter: its answers, its speed, and its own speculative counters.

vLLM and llama.cpp's server (started with --metrics) count verifications and accepted drafts at /metrics, under names that end alike; vLLM
counts by slot, too. They count drafts behind an answer's end as well. Cut where the answer ends, a verification gives what it adds to the
answer: then tau is (tokens - answers) / verifications, since the prompt's reading gives each answer its first token.
SGLang tells its mean since it started at /get_server_info.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.data.prompts import Question
from common.evaluation.asking import Asking, Turn
from common.evaluation.report import ratio
from common.generation.server import ServerBackend
from common.generation.transport import CallFailed, call, text_of

COUNTER = re.compile(r'^(\w+):spec_decode_num_(\w+?)(?:_total)?(?:\{(?:[^}]*position="(\d+)")?[^}]*\})? +([0-9.eE+-]+)$', re.MULTILINE)


@dataclass(frozen=True)
class Counters:
    """An engine's speculative counters; `by_slot` is empty where it does not tell."""

    verifications: float
    drafted: float
    accepted: float
    by_slot: tuple[float, ...]

    @classmethod
    def parse(cls, metrics: str) -> "Counters | None":
        """The counters in a Prometheus page, None if there are none."""
        found: dict[str, float] = {}
        slots: dict[int, float] = {}
        for _, name, slot, value in COUNTER.findall(metrics):
            if slot:
                slots[int(slot)] = slots.get(int(slot), 0.0) + float(value)
            else:
                found[name] = found.get(name, 0.0) + float(value)  # an engine of several replicas has a line for each
        if not {"drafts", "draft_tokens", "accepted_tokens"} <= found.keys():
            return None
        return cls(found["drafts"], found["draft_tokens"], found["accepted_tokens"], tuple(slots[i] for i in sorted(slots)))

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`."""
        by_slot = tuple(now - (before.by_slot[i] if i < len(before.by_slot) else 0.0) for i, now in enumerate(self.by_slot))
        return Counters(self.verifications - before.verifications, self.drafted - before.drafted, self.accepted - before.accepted, by_slot)


@dataclass(frozen=True)
class Served:
    """What an engine answered, in how many seconds, and what it counted meanwhile (None where it does not tell)."""

    url: str
    turns: list[Turn]
    seconds: float
    counters: Counters | None
    own_mean: float | None
    """SGLang's own mean of tokens per verification, since it started."""

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    def numbers(self) -> dict[str, Any]:
        """What was measured, for the report."""
        counted = self.counters
        behind_first = self.tokens - len(self.turns)
        return {
            "url": self.url,
            "answers": len(self.turns),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "tau": ratio(behind_first, counted.verifications) if counted else self.own_mean,
            "accepted": behind_first - counted.verifications if counted else None,
            "tau_as_counted": 1 + counted.accepted / counted.verifications if counted and counted.verifications else None,
            "acceptance_by_slot": [n / counted.verifications for n in counted.by_slot] if counted and counted.verifications else [],
            "counters": asdict(counted) if counted else None,
        }


def measure(asking: Asking, questions: Sequence[Question], backend: ServerBackend) -> Served:
    """Have an engine answer all questions, after one that is not counted. Raises: UserError if it cannot."""
    asking.written(questions[:1], backend)
    before, begun_s = _counters(backend), time.perf_counter()
    turns = asking.written(questions, backend)
    seconds, after = time.perf_counter() - begun_s, _counters(backend)
    counted = after.since(before) if after and before else None
    return Served(backend.url, turns, seconds, counted, None if counted else _own_mean(backend))


def compared(served: Served, baseline: Served) -> dict[str, Any]:
    """An engine with a drafter against one without: how much faster, and how many answers are the same, token by token."""
    equal = sum(one.tokens == other.tokens for one, other in zip(served.turns, baseline.turns, strict=True))
    speed = served.tokens / served.seconds / (baseline.tokens / baseline.seconds)
    return {"equal": equal, "speedup": speed, "tokens_per_s_plain": baseline.tokens / baseline.seconds}


def _root(backend: ServerBackend) -> str:
    return backend.url.removesuffix("/v1")


def _counters(backend: ServerBackend) -> Counters | None:
    try:
        return Counters.parse(text_of(f"{_root(backend)}/metrics", backend.key, backend.timeout_s))
    except CallFailed:
        return None


def _own_mean(backend: ServerBackend) -> float | None:
    try:
        told = call(f"{_root(backend)}/get_server_info", backend.key, backend.timeout_s)
        return float(told["internal_states"][0]["avg_spec_accept_length"])
    except (CallFailed, LookupError, TypeError, ValueError):
        return None


def lines(report: dict[str, Any]) -> list[str]:
    """The engine's part of the report, for a person."""
    served = report["served"]
    said = [f"served by {served['url']}: {served['answers']} answers, {served['tokens_per_s']:.1f} tokens/s"]
    if served["tau"] is None:
        said.append("it tells no speculative counters: a plain server, or llama-server without --metrics")
    else:
        counted = f" (as it counts, drafts behind the end included: {served['tau_as_counted']:.2f})" if served["tau_as_counted"] else ""
        said.append(f"tau {served['tau']:.2f}{counted}")
    if served["acceptance_by_slot"]:
        said.append("acceptance by slot " + " ".join(f"{share:.2f}" for share in served["acceptance_by_slot"]))
    if (plain := served.get("baseline")) is not None:
        said.append(
            f"{plain['speedup']:.2f} times the plain engine's {plain['tokens_per_s_plain']:.1f} tokens/s; {plain['equal']} answers equal"
        )
    return said
