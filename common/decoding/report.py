"""What answers of speculative decoding add up to: acceptance length, acceptance by slot, the copying baseline, a table to read."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.decoding.speculate import Answer


def summarize(answers: Sequence[Answer], plain: Sequence[Answer], drafts: int) -> dict[str, Any]:
    """The numbers of one run over all prompts, of chains of `drafts` tokens; `plain` are the answers of plain decoding, or none."""
    accepted, matched, tried = ([n for answer in answers for n in getattr(answer, name)] for name in ("accepted", "matched", "tried"))
    reached = [sum(n >= slot for n in matched) for slot in range(1, drafts + 1)]
    tested = [sum(n >= slot for n in tried) for slot in range(1, drafts + 1)]
    histogram, seconds = Counter(accepted), sum((answer.seconds for answer in answers), Counter())
    seconds_plain = sum(answer.seconds["total"] for answer in plain)
    return {
        "tau": mean_tau(answer.accepted for answer in answers),
        "prompts": len(answers),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "verifications": len(accepted),
        "accepted_histogram": [histogram[n] for n in range(drafts + 1)],
        "cumulative_acceptance": [ratio(n, len(matched)) for n in reached],
        "conditional_acceptance": [ratio(n, m) for n, m in zip(reached, tested, strict=True)],
        "full_accept_rate": ratio(reached[-1], len(matched)),
        "lossless": sum(a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)) if plain else None,
        "seconds_speculative": seconds["total"],
        "seconds_plain": seconds_plain if plain else None,
        "speedup": ratio(seconds_plain, seconds["total"]) if plain else None,
        "seconds": {part: seconds[part] for part in ("prefill", "draft", "verify")},
    }


def prompt_lookup(prompt: list[int], tokens: list[int], drafts: int, longest: int = 3) -> list[int]:
    """What copying would have had accepted on the way to the same answer: no drafter, no features.

    Proposes the `drafts` tokens that followed the latest earlier occurrence of the last `longest` (or fewer) tokens.
    Returns accepted drafts per verification, counted as in Answer. Source: github.com/apoorvumang/prompt-lookup-decoding.
    """
    text, accepted, done = prompt + tokens, [], len(prompt) + 1
    after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest continuation starts
    indexed = 0
    while done < len(text):
        for end in range(indexed + 1, done):
            for n in range(1, min(longest, end) + 1):
                after[tuple(text[end - n : end])] = end
        indexed = max(indexed, done - 1)
        grams = (tuple(text[done - n : done]) for n in range(min(longest, done), 0, -1))
        source, copied = next((after[gram] for gram in grams if gram in after), None), 0
        if source is not None:  # a copy may run into what it has just copied
            while copied < drafts and done + copied < len(text) and text[source + copied] == text[done + copied]:
                copied += 1
        accepted.append(min(copied, len(text) - done - 1))
        done += accepted[-1] + 1
    return accepted


def table(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    how = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']}"
    lines = [f"{report['prompts']} prompts, {how}, block {report['block_size']}, {report['dtype']} on {report['device']}", ""]
    lines.append(f"{'':24}{'tau':>7}{'tokens/s':>10}{'speedup':>9}   equal to plain decoding")
    if report["seconds_plain"] is not None:
        lines.append(f"{'plain decoding':24}{1:7.2f}{report['tokens'] / report['seconds_plain']:10.1f}{1:9.2f}")
    lines.append(f"{'prompt lookup':24}{number(report['prompt_lookup_tau'], 7)}")
    for run in report["runs"]:
        name = f"tree of {run['tree_budget']} nodes" if run["tree_budget"] else "chain"
        speed = f"{run['tokens'] / run['seconds_speculative']:10.1f}{number(run['speedup'], 9)}"
        equal = "not compared" if run["lossless"] is None else f"{run['lossless']} of {run['prompts']}"
        lines.append(f"{name:24}{number(run['tau'], 7)}{speed}   {equal}")
    if gaps := [p["difference"]["score_gap"] for p in report["per_prompt"] if "difference" in p]:
        lines.append(f"{len(gaps)} answers part from plain decoding where the target's own scores differ by at most {max(gaps):.3g}")
    slots = range(1, len(report["cumulative_acceptance"]) + 1)
    lines += ["", f"{'slot':24}" + "".join(f"{slot:6}" for slot in slots)]
    for name in ("cumulative_acceptance", "conditional_acceptance"):
        lines.append(f"{name.replace('_', ' '):24}" + "".join(number(share, 6) for share in report[name]))
    seconds = ", ".join(f"{part} {value:.2f} s" for part, value in report["seconds"].items())
    full, loops = number(report["full_accept_rate"]), report["loops"]
    lines += ["", f"all drafts right in {full} of verifications; {loops:.0%} of answers loop; {seconds}"]
    return "\n".join(lines)


def mean_tau(accepted: Iterable[Iterable[int]]) -> float | None:
    """Tokens per verification over all answers, the target's own token included; None without a verification."""
    counts = [n + 1 for answer in accepted for n in answer]
    return ratio(sum(counts), len(counts))


def ratio(one: float, other: float) -> float | None:
    """The quotient, or None where nothing was counted."""
    return one / other if other else None


def number(value: float | None, width: int = 0) -> str:
    """Two decimals, or a dash for None, at the right end of `width` characters."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"
