"""The acceptance length of a drafter with its target: by replay of greedy answers (the default), or by real decoding, chain or tree.

python evaluate_drafter.py --drafter runs/quickstart/export/latest --target launch/quickstart/target \
    --prompts launch/quickstart/heldout.jsonl --json out.json

A replay lets the target write all answers in large batches; one forward over each then tells what every block size and every tree would
have had accepted: greedy decoding's own figures, verification by verification (exactly so in float32). Some answers (--verify) are
decoded, too. --decode decodes all of them, as does a temperature.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from common.cli import add_device, add_trust, check_output, json_object, positive, run_script, whole, writing
from common.data.prompts import Question, read_questions
from common.decoding.speculate import Way
from common.errors import UserError
from common.evaluation import advice, served
from common.evaluation.asking import Asking, Turn
from common.evaluation.measure import Results, by_decoding, by_replay, differences, timed
from common.evaluation.plot import check_plot, plot
from common.evaluation.report import by_position, by_set, mean_tau, prompt_lookup, ratio, summarize, table
from common.evaluation.subject import Questioned, Subject
from common.evaluation.trained import compare_with_training
from common.generation.backends import LocalBackend
from common.generation.conversation_file import is_loop
from common.generation.server import ServerBackend
from common.trees import digest


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    asked = Questioned.open(arguments.target, arguments.chat_template_kwargs, arguments.trust_remote_code)
    longest = asked.spec.max_position_embeddings - arguments.max_new_tokens
    questions = read_questions(arguments.prompts, asked.chat, arguments.limit, longest)
    asking = Asking(asked, arguments.temperature, arguments.max_new_tokens)
    report, turns = by_server(arguments, asking, questions) if arguments.server else ({}, None)
    if arguments.drafter:
        report |= by_drafter(arguments, asked, asking, questions, turns)
    said = [table(report), *report.pop("advice_lines", ())] if arguments.drafter else []
    print("\n".join(said + (served.lines(report) if arguments.server else [])))
    if arguments.plot:
        print(f"plotted: {plot(report, arguments.plot)}")
    if arguments.json:
        with writing("--json", arguments.json):
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.drafter and (problems := report["training"]["problems"]):
        raise UserError("; ".join(problems))


def by_server(arguments: argparse.Namespace, asking: Asking, questions: list[Question]) -> tuple[dict[str, Any], list[Turn]]:
    """What a running engine is measured to do, against another without a drafter if there is one; and its answers."""
    engine, *plain = (
        served.measure(asking, questions, ServerBackend(url, asking.asked.chat.tokenizer, arguments.concurrency))
        for url in (arguments.server, arguments.baseline)
        if url
    )
    return {"served": engine.numbers() | {"baseline": served.compared(engine, plain[0]) if plain else None}}, engine.turns


def by_drafter(
    arguments: argparse.Namespace, asked: Questioned, asking: Asking, questions: list[Question], turns: list[Turn] | None
) -> dict[str, Any]:
    """What the drafter is measured to do here, on the answers of an engine where `turns` are given."""
    subject = Subject.load(asked, arguments.drafter, arguments.dtype, arguments.device, arguments.stages)
    if arguments.advise:
        advice.check_advice(subject)  # before minutes of work, not after
    (ways, lead), compare, seconds = ways_of(arguments, subject), not arguments.no_compare, {}
    if arguments.decode:
        results = by_decoding(subject, asking, questions, ways, arguments.temperature, compare, arguments.drafts == "sampled")
    else:
        if turns is None:
            with timed(seconds, "write"):
                backend = LocalBackend(subject.target.model, asked.chat.tokenizer, asked.stop[0], arguments.batch_size)
                turns = asking.written(questions, backend)
        results = by_replay(subject, turns, ways, lead, arguments.verify, compare)
        results.seconds = seconds | results.seconds
    report = describe(arguments, subject) | numbers(arguments, subject, results)
    report["training"] = compare_with_training(arguments.drafter, subject, results, report)
    if arguments.advise:
        tau = {way: run["tau"] for way, run in zip(results.ways, report["runs"], strict=True) if run["tau"] is not None}
        context_tokens = max(len(answer.prompt) + len(answer.tokens) for answer in results.answers)
        cases = advice.advise(subject, tau, context_tokens)
        report |= {"advice": [case.record() for case in cases], "advice_lines": advice.lines(cases)}
    return report


def ways_of(arguments: argparse.Namespace, subject: Subject) -> tuple[list[Way], Way]:
    """The ways of drafting that are measured, and the one that leads the report."""
    chain = Way(subject.block_size(arguments.block_size))
    trees = [Way(chain.block_size, budget) for budget in arguments.tree_budget or ([64] if arguments.decode else [16, 64, 256])]
    if arguments.decode:
        ways = trees if arguments.mode == "tree" else [chain]
        return ways, ways[-1]
    return [*subject.chains(chain.block_size), *trees], trees[-1] if arguments.mode == "tree" else chain


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
        "target_fingerprint": subject.asked.spec.fingerprint,
        "chat_template_digest": digest(chat.template),
        "chat_template_kwargs": chat.template_kwargs,
        "dtype": str(subject.target.model.dtype).removeprefix("torch."),
        "stages": arguments.stages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked as far as that goes without loading anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="folder of an exported drafter; --server alone can do without")
    parser.add_argument("--target", required=True, help="its target: a folder or hub id")
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL of messages, question, prompt, problem or turns, a file a set")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--replay", action="store_true", help="replay answers that the target writes in batches: what greedy reports do")
    how.add_argument("--decode", action="store_true", help="decode every answer, one after the other: what a temperature needs")
    parser.add_argument(
        "--server", metavar="URL", help="an engine that serves target and drafter, up to /v1: measured; a replay takes its answers"
    )
    parser.add_argument("--baseline", metavar="URL", help="one that serves the target alone, to compare with")
    parser.add_argument("--concurrency", type=positive, default=1, help="questions that an engine is asked at a time (1)")
    parser.add_argument("--verify", type=whole, default=8, metavar="N", help="answers that are decoded beside a replay (8)")
    parser.add_argument("--batch-size", type=positive, default=256, help="answers that are written at a time for a replay")
    parser.add_argument("--mode", choices=("chain", "tree"), default="chain")
    parser.add_argument(
        "--tree-budget", type=positives, metavar="N,N,...", help="nodes of a tree (replay: 16,64,256; decoding: 64); the last leads"
    )
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0: greedy")
    parser.add_argument(
        "--drafts",
        choices=("greedy", "sampled"),
        default="greedy",
        help="at a temperature: the likeliest chain, kept while the target samples the same, or one sampled from the drafter and kept by "
        "rejection sampling (engines: probabilistic drafting), whose answers have plain decoding's distribution but not its tokens",
    )
    parser.add_argument(
        "--block-size", type=positive, help="slots, at most those of the trained block, the default; a replay tells all up to it"
    )
    parser.add_argument("--limit", type=positive, help="number of questions of each set")
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--chat-template-kwargs", type=json_object, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: that of the features the drafter trained on")
    add_device(parser)
    add_trust(parser)
    parser.add_argument("--no-compare", action="store_true", help="skip plain decoding")
    parser.add_argument("--advise", action="store_true", help="time drafts and verifications, and say what to set in the engines")
    parser.add_argument("--plot", metavar="FOLDER", help="a picture of the report, and TensorBoard's events of it; needs matplotlib")
    parser.add_argument("--json", help="file for the report")
    arguments = parser.parse_args(argv)
    if arguments.replay and arguments.temperature:
        parser.error("--replay is for greedy answers; use --decode")
    if arguments.drafts == "sampled" and (not arguments.temperature or arguments.mode == "tree"):
        parser.error("--drafts sampled is for chains at a --temperature")
    arguments.no_compare = arguments.no_compare or arguments.drafts == "sampled"
    arguments.decode = arguments.decode or arguments.temperature > 0
    if not (arguments.drafter or arguments.server):
        parser.error("--drafter names what is evaluated here, --server what is measured there; give one of them, or both")
    if arguments.baseline and not arguments.server:
        parser.error("--baseline is what --server is compared with")
    if arguments.decode and arguments.tree_budget and arguments.mode == "chain":
        parser.error("--tree-budget is for --mode tree, or for a replay")
    if (arguments.advise or arguments.plot) and (arguments.decode or not arguments.drafter):
        parser.error("--advise and --plot need --drafter and a replay, which tells every block size: leave out --decode and --temperature")
    if arguments.plot:
        check_plot()
    if arguments.json:
        check_output("--json", arguments.json)  # before minutes of work, not after
    return arguments


def temperature(text: str) -> float:
    """An argument that is a number from 0."""
    if not float(text) >= 0:
        raise ValueError
    return float(text)


def positives(text: str) -> list[int]:
    """An argument of whole numbers from 1, between commas."""
    return [positive(part) for part in text.split(",")]


if __name__ == "__main__":
    run_script(main)
