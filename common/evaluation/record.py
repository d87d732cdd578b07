"""The report of an evaluation as one JSON object: what was evaluated with what, and all that was measured."""

import argparse
import platform
from importlib.metadata import version
from typing import Any

import torch

from common.decoding.speculate import Way
from common.evaluation.measure import Results, differences
from common.evaluation.report import by_position, by_set, mean_tau, prompt_lookup, ratio, summarize
from common.evaluation.subject import Subject
from common.generation.conversation_file import is_loop
from common.trees import digest


def numbers(arguments: argparse.Namespace, subject: Subject, results: Results) -> dict[str, Any]:
    """What was measured."""
    sources, drafts = [turn.source for turn in results.turns], subject.drafts(results.lead)
    runs = [
        summarize(answers, results.plain, subject.drafts(way))
        | {"way": way_name(way), **way._asdict(), "tau_by_set": by_set(sources, answers)}
        for way, answers in zip(results.ways, results.runs, strict=True)
    ]
    lead = runs[results.ways.index(results.lead)]
    return lead | {
        "lead": lead["way"],
        "stop_token_ids": list(subject.asked.stop),
        "tau_by_block_size": {run["block_size"]: run["tau"] for run in runs if run["tree_budget"] is None},
        "tau_by_tree_budget": {run["tree_budget"]: run["tau"] for run in runs if run["tree_budget"]},
        "tau_by_position": by_position(results.answers),
        "prompt_lookup_tau": mean_tau(prompt_lookup(answer.prompt, answer.tokens, drafts) for answer in results.answers),
        "loops": ratio(sum(is_loop(answer.tokens) for answer in results.answers), len(results.answers)),
        "seconds_by_stage": results.seconds,
        "runs": runs,
        "sample": sample(subject, results),
        "per_prompt": per_prompt(arguments, subject, results),
    }  # fmt: skip


def sample(subject: Subject, results: Results) -> dict[str, Any] | None:
    """The numbers of the answers that were decoded beside the replay."""
    if (found := results.sample) is None:
        return None
    parted = differences(subject, found.answers, found.replayed, found.turns, temperature=0.0)
    return summarize(found.answers, found.plain, subject.drafts(found.way)) | {
        "equal_to_replay": found.equal,
        "differences": [difference and {"index": difference[0], "score_gap": difference[1]} for difference in parted],
    }


def per_prompt(arguments: argparse.Namespace, subject: Subject, results: Results) -> list[dict[str, Any]]:
    """A record of each answer; `difference` says where it parts from plain decoding, and between how close scores."""
    answers = results.answers
    parted = differences(subject, answers, results.plain, results.turns, arguments.temperature) if results.plain else [None] * len(answers)
    return [
        {"set": turn.source, "prompt_ids": answer.prompt, "output_ids": answer.tokens, "accepted": answer.accepted}
        | ({"difference": {"index": difference[0], "score_gap": difference[1]}} if difference else {})
        for turn, answer, difference in zip(results.turns, answers, parted, strict=True)
    ]


def way_name(way: Way) -> str:
    """How a way is called in the report."""
    return f"{way.name}, blocks of {way.block_size}" if way.tree_budget is None else way.name


def describe(arguments: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What was evaluated with what."""
    device, chat = subject.target.device, subject.asked.chat
    return {
        **{key: getattr(arguments, key) for key in ("drafter", "target", "mode", "temperature", "drafts", "max_new_tokens")},
        "how": "decode" if arguments.decode else "replay",
        "prompts_files": arguments.prompts,
        "server": arguments.server,
        "target_fingerprint": subject.asked.spec.fingerprint,
        "chat_template_digest": digest(chat.template),
        "chat_template_kwargs": chat.template_kwargs,
        "dtype": str(subject.target.model.dtype).removeprefix("torch."),
        "stages": arguments.stages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": version("transformers")},
    }
