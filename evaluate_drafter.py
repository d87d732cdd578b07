"""The acceptance length of a drafter with its target: by replay of greedy answers (the default), or by real decoding, chain or tree.

python evaluate_drafter.py --drafter runs/quickstart/export/latest --target launch/quickstart/target \
    --prompts launch/quickstart/heldout.jsonl --json out.json

A replay lets the target write all answers in large batches; one forward over each then tells what every block size and every tree would
have had accepted: greedy decoding's own figures, verification by verification (exactly so in float32). Some answers (--verify) are
decoded, too. --decode decodes all of them, as does a temperature.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common.cli import run_script, writing
from common.data.prompts import Question, read_questions
from common.decoding.speculate import Way
from common.errors import UserError
from common.evaluation import advice, served
from common.evaluation.arguments import parse_arguments
from common.evaluation.asking import Asking, Turn
from common.evaluation.measure import by_decoding, by_replay, timed
from common.evaluation.plot import plot
from common.evaluation.record import describe, numbers
from common.evaluation.report import table
from common.evaluation.subject import Questioned, Subject
from common.evaluation.trained import compare_with_training
from common.generation.backends import LocalBackend
from common.generation.server import ServerBackend


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv, __doc__)
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


if __name__ == "__main__":
    run_script(main)
