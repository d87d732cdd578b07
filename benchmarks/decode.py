"""Tokens per second of plain decoding, chains and trees, by recorded steps and (with --eager) by their eager twins.

    python -m benchmarks.decode --target T --drafter D --prompts P.jsonl
    python -m benchmarks.decode [--tiny]

Without weights the Qwen3-8B shape runs with random ones: nothing is accepted then, but `break_even_tau`, the acceptance length from
which on speculation pays, is a matter of shapes alone.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import drafter_step, eight_billion, measure
from common.cli import run_script
from common.data.chat import Chat, load_tokenizer
from common.data.prompts import read_questions
from common.decoding.fast import FastDecoder
from common.decoding.speculate import Answer, BlockDrafter, Chooser, decode, load_drafter, speculate
from common.decoding.target import DecodingTarget, load_target
from common.drafter.backbone import Drafter
from common.evaluation.report import mean_tau
from common.target.files import read_spec, resolve
from common.target.vocabulary import Vocabulary

PLAIN, CHAIN, TREES = -1, 0, (16, 64, 256)
"""Ways of decoding, by the nodes of their trees."""


class Subject(NamedTuple):
    """What is measured, and on which prompts."""

    target: DecodingTarget
    drafter: Drafter
    vocabulary: Vocabulary
    prompts: list[list[int]]
    stop: Sequence[int]


class Run(NamedTuple):
    """The answers to all prompts, their seconds by part, and how many tokens they hold."""

    answers: list[Answer]
    seconds: Counter[str]
    tokens: int


def real(asked: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Subject:
    """Target, drafter and prompts from folders."""
    folder = resolve(asked.target)
    spec, drafter = read_spec(folder), load_drafter(asked.drafter, dtype, device)
    drafter.spec.validate(spec)
    target = load_target(spec, drafter.spec.taps, dtype, device)
    chat = Chat(load_tokenizer(folder))
    prompts = [question.prompt(chat) for question in read_questions([asked.prompts], chat, asked.limit, spec.max_position_embeddings)]
    return Subject(target, drafter, target.vocabulary(spec), prompts, spec.eos_token_ids)


def random(tiny: bool, device: torch.device, dtype: torch.dtype) -> Subject:
    """The same with random weights and prompts; nothing stops an answer."""
    shape, spec = (eight_billion.TINY, drafter_step.TINY) if tiny else (eight_billion.QWEN3_8B, drafter_step.SPEC)
    target = DecodingTarget(eight_billion.random_target(shape, device, dtype), spec.taps)
    drafter = Drafter(spec, dtype, device).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    prompts = np.random.default_rng(0).integers(0, spec.vocab_size - 2, (2, 8 if tiny else 512)).tolist()
    return Subject(target, drafter, eight_billion.random_vocabulary(spec, device, dtype), prompts, ())


def run(method: Callable[[list[int], int], Answer], subject: Subject, new_tokens: int) -> Run:
    """Answer every prompt by `method(prompt, new tokens)`, after one that is not timed: kernels load, and are recorded."""
    method(subject.prompts[0], 4)
    answers = [method(prompt, new_tokens) for prompt in subject.prompts]
    seconds = sum((answer.seconds for answer in answers), Counter())
    return Run(answers, seconds, sum(len(answer.tokens) for answer in answers))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="time the eager twins, too: minutes at the 8B shape")
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args(argv)
    if len({bool(asked.target), bool(asked.drafter), bool(asked.prompts)}) > 1:
        parser.error("--target, --drafter and --prompts go together")
    device = measure.device_of(asked.tiny)
    dtype = torch.float32 if asked.tiny else torch.bfloat16
    subject = real(asked, device, dtype) if asked.target else random(asked.tiny, device, dtype)
    new_tokens = min(asked.new_tokens, 6) if asked.tiny else asked.new_tokens
    shared = dict(
        benchmark="decode", target=asked.target or "random", prompts=len(subject.prompts), dtype=str(dtype).removeprefix("torch.")
    )
    for steps in ("eager", "recorded") if asked.eager else ("recorded",):
        plain_ms = 0.0
        for budget in (PLAIN, CHAIN, *TREES):
            case = decoding(subject, steps, budget, new_tokens)
            plain_ms = plain_ms or case["step_ms"]
            speed = {"break_even_tau": case["step_ms"] / plain_ms, "speedup": (case["tau"] or 1.0) * plain_ms / case["step_ms"]}
            measure.report(device, **shared, steps=steps, **case, **speed)


def decoding(subject: Subject, steps: str, budget: int, new_tokens: int) -> dict[str, Any]:
    """One way of decoding: tokens a second, the prompt's reading left out, and how long a verification (or a plain token) takes."""
    spec, runs = subject.drafter.spec, []
    drafter = None
    if budget != PLAIN:
        drafter = BlockDrafter(subject.drafter, subject.vocabulary, spec.mask_token_id, spec.block_size, budget or None)
    if steps == "recorded":
        fast = FastDecoder(subject.target, drafter)
        method = lambda prompt, count: fast.answer(prompt, subject.stop, count)  # noqa: E731
    elif drafter is None:
        method = lambda prompt, count: decode(subject.target, prompt, subject.stop, count, Chooser())  # noqa: E731
    else:
        method = lambda prompt, count: speculate(subject.target, drafter, prompt, subject.stop, count, Chooser())  # noqa: E731
    peak_gib = measure.peak_gib(lambda: runs.append(run(method, subject, new_tokens)), subject.target.device)
    answers, seconds, tokens = runs[0]
    writing_s = seconds["total"] - seconds["prefill"]
    rounds = tokens - len(answers) if drafter is None else sum(len(answer.accepted) for answer in answers)
    return {
        "method": {PLAIN: "plain", CHAIN: "chain"}.get(budget, f"tree of {budget}"),
        "tokens": tokens,
        "tokens_per_s": (tokens - len(answers)) / writing_s,
        "prefill_ms": 1e3 * seconds["prefill"] / len(answers),
        "tau": mean_tau(answer.accepted for answer in answers) if drafter else 1.0,
        "step_ms": 1e3 * writing_s / rounds,
        "peak_gib": peak_gib,
    }


if __name__ == "__main__":
    run_script(main)
