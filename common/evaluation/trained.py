"""What a drafter's own training said, beside what is measured: a difference that rounding does not explain is a fault, and is named.

Validation replays what held-out conversations hold; decoding goes over what the target writes. On the same prompts both must be the same
tokens with the same acceptance. They are not where texts became other tokens than the target writes (another tokenizer or template): such a
drafter is measured well and serves badly. Answers of another text, sampled or somebody else's, are no fault, and only counted.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from common.data.store import TokenStore
from common.data.written import packed_otherwise
from common.decoding.replay import Replayer
from common.decoding.speculate import Answer
from common.drafter.folder import read_config
from common.errors import UserError
from common.evaluation.measure import Results
from common.evaluation.report import mean_tau
from common.evaluation.subject import Subject

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float16: 0.25}
"""Of the target's own scores: by how much two answers may differ at the token where they part."""
ENGINES_ROUNDING = 0.25
"""The same where an engine wrote one of them, by its own arithmetic."""
DEVIATIONS, SHARE = 3.0, 0.05
"""Two acceptance lengths are told apart from so many standard deviations and this share of them on."""


def compare_with_training(drafter: str, subject: Subject, results: Results, report: Mapping[str, Any]) -> dict[str, Any]:
    """What the run that exported a drafter knows of it, beside greedy answers; `problems` are sentences that name what must not be."""
    config, run = read_config(drafter), _run_of(Path(drafter))
    packed_with = config.get("packed_with")
    others = packed_otherwise(subject.asked.chat, packed_with) if isinstance(packed_with, dict) else []
    problems = [
        f"the drafter's data were packed with another {what} (or other --chat-template-kwargs) than is asked with here" for what in others
    ]
    problems += _sample_problems(subject, results, report)
    found: dict[str, Any] = {"problems": problems}
    store = None if run is None or report["temperature"] else _heldout_store(run)
    if run is not None and store is not None:
        found |= {"heldout_tau": _recorded_tau(run, Path(drafter).resolve().name)} | _heldout(subject, results, store)
        problems += _heldout_problems(found)
    return found


def _run_of(drafter: Path) -> Path | None:
    """The run directory that an export lies in."""
    run = drafter.resolve().parent.parent
    return run if (run / "config.yaml").is_file() and drafter.resolve().parent.name == "export" else None


def _heldout_store(run: Path) -> TokenStore | None:
    """The held-out conversations of a run, if they are still where they were."""
    with suppress(OSError, ValueError, TypeError, LookupError, yaml.YAMLError, UserError):
        tree = yaml.safe_load((run / "config.yaml").read_text())
        path = tree["validation"]["path"]
        return TokenStore.open(f"{tree['data']['path'].rstrip('/')}-heldout" if path == "auto" else path)
    return None


def _recorded_tau(run: Path, step_name: str) -> float | None:
    """The held-out tau that a run logged for the step of an export."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        step = int(step_name.removeprefix("step_"))
        records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        return next((record["heldout_tau"] for record in records if record["step"] == step and "heldout_tau" in record), None)
    return None


def _heldout(subject: Subject, results: Results, store: TokenStore) -> dict[str, Any]:
    """Those of the answers whose prompts are held-out conversations': tau on what these hold, and on what the target wrote."""
    stored = {prompt.tobytes(): answer for prompt, answer in _stored_answers(store)}
    pairs = []
    for turn, answer in zip(results.turns, results.answers, strict=True):
        held = stored.get(np.array(turn.request.prompt, np.int32).tobytes())
        if held is not None:
            pairs.append((list(turn.request.prompt), held[: turn.request.sampling.max_tokens].tolist(), answer))
    if not pairs:
        return {"asked": 0}
    replayer = Replayer(subject.target, subject.drafter, subject.vocabulary)
    (replayed,) = replayer.run([(prompt, held) for prompt, held, _ in pairs], [results.lead])
    answers = [answer for *_, answer in pairs]
    others = [(held, answer.tokens) for _, held, answer in pairs if answer.tokens != held]
    return {
        "asked": len(pairs),
        "other_tokens": len(others),
        "same_texts": sum(_one_text(subject.asked.chat.tokenizer.decode, *both) for both in others),
        "tau_held_out": mean_tau(answer.accepted for answer in replayed),
        "tau_written": mean_tau(answer.accepted for answer in answers),
        "deviation": _deviation(replayed, answers),
    }


def _one_text(decode: Callable[[list[int]], Any], held: list[int], written: list[int]) -> bool:
    """Whether two answers, either of which may have been cut, are the same text."""
    one, other = decode(held), decode(written)
    shared = min(len(one), len(other))
    return shared > 0 and one[:shared] == other[:shared]


def _stored_answers(store: TokenStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(prompt, answer) of every supervised run of a store's documents."""
    for i in range(len(store)):
        ids, mask = store.document(i)
        for begin, end in np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2):
            yield ids[:begin], ids[begin:end]


def _deviation(one: Sequence[Answer], other: Sequence[Answer]) -> float | None:
    """The standard deviation of the difference between two acceptance lengths over the same prompts, None where nothing was verified."""
    ours, theirs = mean_tau(answer.accepted for answer in one), mean_tau(answer.accepted for answer in other)
    if ours is None or theirs is None:
        return None
    counts = [sum(len(answer.accepted) for answer in answers) for answers in (one, other)]
    parts = (
        (sum(a.accepted) + len(a.accepted) * (1 - ours)) / counts[0] - (sum(b.accepted) + len(b.accepted) * (1 - theirs)) / counts[1]
        for a, b in zip(one, other, strict=True)
    )
    return math.sqrt(sum(part * part for part in parts))


def _heldout_problems(found: Mapping[str, Any]) -> list[str]:
    if not found["asked"] or found["deviation"] is None:
        return []
    held, written = found["tau_held_out"], found["tau_written"]
    if found["other_tokens"] and not found["same_texts"]:  # other texts: of their own acceptance
        return []
    if abs(held - written) <= max(SHARE * held, DEVIATIONS * found["deviation"] if found["other_tokens"] else 0.0):
        return []
    why = (
        f"{found['other_tokens']} of {found['asked']} held-out answers are other tokens than the target writes here, {found['same_texts']} "
        "of them for the same text: were they packed with another tokenizer? Write them anew (prepare_data.py regenerate), pack, train anew"
        if found["other_tokens"]
        else "the answers are the same tokens, so the two forwards of the drafter or of the target differ: please report it"
    )
    return [f"on held-out prompts training's replay gives tau {held:.2f}, decoding {written:.2f}: {why}"]


def _sample_problems(subject: Subject, results: Results, report: Mapping[str, Any]) -> list[str]:
    """What in a sample of decoded answers is no rounding."""
    if results.sample is None:
        return []
    kind = subject.target.model.dtype
    gaps = [difference["score_gap"] for difference in report["sample"]["differences"] if difference]
    problems = []
    if gaps and max(gaps) > (max(ENGINES_ROUNDING, ROUNDING[kind]) if report["server"] else ROUNDING[kind]):
        problems.append(f"a decoded answer parts from the replayed one where the target's scores differ by {max(gaps):.3g}")
    pairs = zip(results.sample.answers, results.sample.replayed, strict=True)
    same = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    decoded, replayed = (mean_tau(answer.accepted for answer in answers) for answers in zip(*same, strict=True)) if same else (None, None)
    if decoded is not None and replayed is not None and abs(decoded - replayed) > (0.0 if kind == torch.float32 else SHARE * replayed):
        problems.append(f"the same answers were accepted with tau {decoded:.3f} when decoded and {replayed:.3f} when replayed")
    return problems
