"""What answers of speculative decoding add up to: acceptance length, acceptance by slot, the copying baseline, a table to read."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.decoding.speculate import Answer

FIRST_RANGE = 128
"""Contexts shorter than this are one range."""


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


def by_set(sources: Sequence[str], answers: Sequence[Answer]) -> dict[str, float | None]:
    """tau of each set of questions."""
    return {
        source: mean_tau(answer.accepted for of, answer in zip(sources, answers, strict=True) if of == source)
        for source in dict.fromkeys(sources)
    }


def by_position(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """tau by how many tokens, the prompt's included, were known when a block was drafted; a range ends where the next begins, at twice."""
    counts: dict[int, list[int]] = {}
    for answer in answers:
        known = len(answer.prompt) + 1
        for n in answer.accepted:
            counts.setdefault(max(known, FIRST_RANGE - 1).bit_length(), []).append(n + 1)
            known += n + 1
    return [{"below": 2**bit, "tau": mean(counts[bit]), "verifications": len(counts[bit])} for bit in sorted(counts)]


def table(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    how = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']}"
    took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds_by_stage"].items())
    lines = [f"{report['prompts']} answers, {how}, {report['dtype']} on {report['device']}: {took}", ""]
    lines += _runs(report)
    if gaps := [p["difference"]["score_gap"] for p in report["per_prompt"] if "difference" in p]:
        lines.append(f"{len(gaps)} answers part from plain decoding where the target's own scores differ by at most {max(gaps):.3g}")
    slots = range(1, len(report["cumulative_acceptance"]) + 1)
    lines += ["", f"{report['lead'] + ', slot':24}" + "".join(f"{slot:6}" for slot in slots)]
    for name in ("cumulative_acceptance", "conditional_acceptance"):
        lines.append(f"{name.replace('_', ' '):24}" + "".join(number(share, 6) for share in report[name]))
    lines += ["", f"{'tokens known':24}" + "".join(f"{'< ' + str(part['below']):>8}" for part in report["tau_by_position"])]
    lines.append(f"{'tau':24}" + "".join(number(part["tau"], 8) for part in report["tau_by_position"]))
    full, loops = number(report["full_accept_rate"]), report["loops"]
    lines += ["", f"all drafts right in {full} of verifications; {loops:.0%} of answers loop", *_sample(report), *_training(report)]
    return "\n".join(lines)


def _runs(report: Mapping[str, Any]) -> list[str]:
    """A line for every way: tau, by set where there are several, and the speed where it was decoded."""
    sets, decoded = list(report["runs"][0]["tau_by_set"]), report["how"] == "decode"
    sets = sets if len(sets) > 1 else []
    head = "".join(f"{name[:11]:>12}" for name in sets)
    head += f"{'tokens/s':>10}{'speedup':>9}   equal to plain decoding" if decoded else ""
    lines = [f"{'':24}{'tau':>7}{head}"]
    if report["seconds_plain"] is not None:
        lines.append(f"{'plain decoding':24}{1:7.2f}{' ' * 12 * len(sets)}{report['tokens'] / report['seconds_plain']:10.1f}{1:9.2f}")
    lines.append(f"{'prompt lookup':24}{number(report['prompt_lookup_tau'], 7)}")
    for run in report["runs"]:
        line = f"{run['way']:24}{number(run['tau'], 7)}" + "".join(number(run["tau_by_set"][name], 12) for name in sets)
        if decoded:
            line += f"{run['tokens'] / run['seconds_speculative']:10.1f}{number(run['speedup'], 9)}"
            line += "   not compared" if run["lossless"] is None else f"   {run['lossless']} of {run['prompts']}"
        lines.append(line)
    return lines


def _sample(report: Mapping[str, Any]) -> list[str]:
    """What real decoding of some of the answers says, for a person."""
    if (sample := report["sample"]) is None:
        return []
    rate = f"{sample['tokens'] / sample['seconds_speculative']:.1f} tokens/s"
    lines = [f"decoded, too: {sample['prompts']} answers, {sample['equal_to_replay']} with the replay's tokens and verifications; {rate}"]
    if sample["speedup"] is not None:
        lines[0] += f", {sample['speedup']:.2f} times plain decoding, equal to it in {sample['lossless']}"
    if gaps := [difference["score_gap"] for difference in sample["differences"] if difference]:
        lines.append(f"{len(gaps)} part from what was replayed where the target's own scores differ by at most {max(gaps):.3g}")
    return lines


def _training(report: Mapping[str, Any]) -> list[str]:
    """What the drafter's own run measured on the held-out conversations that were asked here, for a person."""
    if not (found := report["training"]).get("asked"):
        return []
    line = f"{found['asked']} of these prompts were held out: tau {number(found['tau_held_out'])} on the answers held out with them, "
    line += f"{number(found['tau_written'])} on those written here, {found['other_tokens']} of them other tokens"
    return [line + ("" if found["heldout_tau"] is None else f"; all held-out turns in training: {found['heldout_tau']:.2f}")]


def mean_tau(accepted: Iterable[Iterable[int]]) -> float | None:
    """Tokens per verification over all answers, the target's own token included; None without a verification."""
    return mean([n + 1 for answer in accepted for n in answer])


def mean(counts: Sequence[int]) -> float | None:
    """Their mean, or None where there are none."""
    return ratio(sum(counts), len(counts))


def ratio(one: float, other: float) -> float | None:
    """The quotient, or None where nothing was counted."""
    return one / other if other else None


def number(value: float | None, width: int = 0) -> str:
    """Two decimals, or a dash for None, at the right end of `width` characters."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"
