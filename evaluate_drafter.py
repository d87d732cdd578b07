"""Real speculative decoding with a drafter and its target: acceptance length, speed, and whether every answer is the target's own.

python evaluate_drafter.py --drafter runs/quickstart/export/latest --target launch/quickstart/target \
    --prompts launch/quickstart/heldout.jsonl --json out.json
"""

import argparse
import functools
import json
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from common.cli import add_trust, check_output, json_object, open_device, positive, run_script, writing
from common.data.chat import Chat, load_tokenizer
from common.data.prompts import read_prompts
from common.decoding.report import mean_tau, prompt_lookup, ratio, summarize, table
from common.decoding.speculate import Answer, BlockDrafter, Chooser, decode, first_difference, load_drafter, speculate
from common.decoding.target import DecodingTarget, load_target
from common.drafter.export import read_feature_dtype
from common.errors import UserError
from common.generation.conversation_file import is_loop
from common.target.files import TargetSpec, read_spec, resolve
from common.trees import digest


def main(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    folder = resolve(arguments.target)
    trust = arguments.trust_remote_code
    spec, chat = read_spec(folder, trust), Chat(load_tokenizer(folder, trust), arguments.chat_template_kwargs)
    stop = spec.eos_token_ids or (chat.tokenizer.eos_token_id,)
    prompts = read_prompts(arguments.prompts, chat, arguments.limit, spec.max_position_embeddings - arguments.max_new_tokens)

    target, drafters, block_size = load(arguments, folder, spec)
    drafts = len(drafters[0].slots)
    runs, plain = answer(arguments, target, drafters, prompts, stop)

    summaries = [summarize(answers, plain, drafts) | {"tree_budget": d.tree_budget} for answers, d in zip(runs, drafters, strict=True)]
    report = describe(arguments, chat, target, spec) | summaries[-1] | {
        "block_size": block_size,
        "stop_token_ids": list(stop),
        "tau_by_tree_budget": {s["tree_budget"]: s["tau"] for s in summaries if s["tree_budget"]},
        "prompt_lookup_tau": mean_tau(prompt_lookup(a.prompt, a.tokens, drafts) for a in runs[-1]),
        "loops": ratio(sum(is_loop(a.tokens) for a in runs[-1]), len(prompts)),
        "runs": summaries,
        "per_prompt": [one_prompt(arguments, target, runs[-1][i], plain[i] if plain else None, i) for i in range(len(prompts))],
    }  # fmt: skip
    print(table(report))
    if arguments.json:
        with writing("--json", arguments.json):
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def load(arguments: argparse.Namespace, folder: Path, spec: TargetSpec) -> tuple[DecodingTarget, list[BlockDrafter], int]:
    """The target, a drafter for each tree budget (or one for chains), and their block size."""
    device = open_device(arguments.device)
    dtype = getattr(torch, arguments.dtype or read_feature_dtype(arguments.drafter))
    drafter = load_drafter(arguments.drafter, dtype, device)
    drafter.spec.validate(spec)
    block_size = arguments.block_size or drafter.spec.block_size
    if not 2 <= block_size <= drafter.spec.block_size:
        raise UserError(f"--block-size {block_size}: the drafter was trained on blocks of {drafter.spec.block_size}; use 2 to that")
    target = load_target(folder, drafter.spec.taps, dtype, device, arguments.trust_remote_code)
    shared = drafter, target.vocabulary(spec), drafter.spec.mask_token_id, block_size
    budgets = arguments.tree_budget or [64 if arguments.mode == "tree" else None]
    return target, [BlockDrafter(*shared, budget) for budget in budgets], block_size


def answer(
    arguments: argparse.Namespace, target: DecodingTarget, drafters: list[BlockDrafter], prompts: list[list[int]], stop: Collection[int]
) -> tuple[list[list[Answer]], list[Answer]]:
    """Every prompt answered with every drafter, and by plain decoding for comparison: (answers of each drafter, plain answers)."""
    methods = [functools.partial(speculate, target, drafter) for drafter in drafters]
    methods += [] if arguments.no_compare else [functools.partial(decode, target)]
    for method in methods:  # untimed: kernels load
        method(prompts[0], stop, 8, Chooser(arguments.temperature))
    rows = [
        [method(prompt, stop, arguments.max_new_tokens, Chooser(arguments.temperature, seed)) for method in methods]
        for seed, prompt in enumerate(tqdm(prompts, unit=" prompts", disable=None))
    ]
    runs = [list(answers) for answers in zip(*rows, strict=True)]
    return runs[: len(drafters)], [] if arguments.no_compare else runs[-1]


def one_prompt(arguments: argparse.Namespace, target: DecodingTarget, answer: Answer, plain: Answer | None, seed: int) -> dict[str, Any]:
    """A prompt's record; `difference` says where the answer parts from plain decoding, and between how close scores."""
    difference = first_difference(target, answer, plain, Chooser(arguments.temperature, seed)) if plain else None
    record = {"prompt_ids": answer.prompt, "output_ids": answer.tokens, "accepted": answer.accepted}
    return record | ({"difference": dict(zip(("index", "score_gap"), difference, strict=True))} if difference else {})


def describe(arguments: argparse.Namespace, chat: Chat, target: DecodingTarget, spec: TargetSpec) -> dict[str, Any]:
    """What was evaluated with what."""
    device = target.device
    return {
        **{key: getattr(arguments, key) for key in ("drafter", "target", "mode", "temperature", "max_new_tokens")},
        "prompts_file": arguments.prompts,
        "target_fingerprint": spec.fingerprint,
        "chat_template_digest": digest(chat.template),
        "chat_template_kwargs": chat.template_kwargs,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked as far as that goes without loading anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="folder of an exported drafter")
    parser.add_argument("--target", required=True, help="its target: a folder or hub id")
    parser.add_argument("--prompts", required=True, help="JSONL of messages, question or prompt")
    parser.add_argument("--mode", choices=("chain", "tree"), default="chain")
    parser.add_argument("--tree-budget", type=positives, metavar="N,N,...", help="nodes of a tree (64); the last leads the report")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0: greedy")
    parser.add_argument("--block-size", type=positive, help="slots, at most those of the trained block, the default")
    parser.add_argument("--limit", type=positive, help="number of prompts")
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--chat-template-kwargs", type=json_object, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: that of the features the drafter trained on")
    parser.add_argument("--device", help="default: cuda if there is one")
    add_trust(parser)
    parser.add_argument("--no-compare", action="store_true", help="skip plain decoding")
    parser.add_argument("--json", help="file for the report")
    arguments = parser.parse_args(argv)
    if arguments.tree_budget and arguments.mode == "chain":
        parser.error("--tree-budget is for --mode tree")
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
