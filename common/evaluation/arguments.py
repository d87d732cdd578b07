"""The command line of evaluate_drafter.py."""

import argparse

from common.cli import add_device, add_trust, check_output, json_object, positive, whole
from common.evaluation.plot import check_plot


def parse_arguments(argv: list[str], description: str | None) -> argparse.Namespace:
    """The command line, checked as far as that goes without loading anything."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
