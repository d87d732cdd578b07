"""Tokens per second of plain decoding, chains and trees, and where a verification's time goes.

    python -m benchmarks.decode --target T --drafter D --prompts P.jsonl
    python -m benchmarks.decode [--tiny]

Without weights the Qwen3-8B shape runs with random ones: nothing is accepted then, but `break_even_tau`, the acceptance length from
which on speculation pays, is a matter of shapes alone.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import drafter_step, eight_billion, measure
from common.cli import run_script
from common.data.chat import Chat, load_tokenizer
from common.data.prompts import read_questions
from common.decoding.speculate import Answer, BlockDrafter, Chooser, decode, load_drafter, speculate
from common.decoding.target import DecodingTarget, load_target
from common.drafter.backbone import Drafter
from common.evaluation.report import mean_tau
from common.target.files import read_spec, resolve
from common.target.vocabulary import Vocabulary

TREES = (16, 64, 256)


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


def run(method: Callable[..., Answer], subject: Subject, new_tokens: int) -> Run:
    """Answer every prompt by `method(prompt, stop tokens, new tokens, chooser)`, after one that is not timed: kernels load."""
    method(subject.prompts[0], subject.stop, 4, Chooser())
    answers = [method(prompt, subject.stop, new_tokens, Chooser()) for prompt in subject.prompts]
    seconds = sum((answer.seconds for answer in answers), Counter())
    return Run(answers, seconds, sum(len(answer.tokens) for answer in answers))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
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
    plain = run(lambda *of: decode(subject.target, *of), subject, new_tokens)
    plain_ms = 1e3 * plain.seconds["total"] / plain.tokens
    measure.report(device, **shared, method="plain", tokens=plain.tokens, tokens_per_s=1e3 / plain_ms, tau=1.0)
    for budget in (None, *TREES):
        measure.report(device, **shared, **speculation(subject, budget, new_tokens, plain_ms))


def speculation(subject: Subject, budget: int | None, new_tokens: int, plain_ms: float) -> dict[str, float | str | None]:
    """The case of one tree budget (None: chains), against plain decoding's milliseconds a token."""
    spec = subject.drafter.spec
    proposer, runs = BlockDrafter(subject.drafter, subject.vocabulary, spec.mask_token_id, spec.block_size, budget), []

    def answer_all() -> None:
        runs.append(run(lambda *of: speculate(subject.target, proposer, *of), subject, new_tokens))

    peak_gib = measure.peak_gib(answer_all, subject.target.device)
    answers, seconds, tokens = runs[0]
    verifications = sum(len(answer.accepted) for answer in answers)
    draft_ms, verify_ms = (1e3 * seconds[part] / verifications for part in ("draft", "verify"))
    return {
        "method": "chain" if budget is None else f"tree of {budget}",
        "tokens": tokens,
        "tokens_per_s": tokens / seconds["total"],
        "tau": mean_tau(answer.accepted for answer in answers),
        "speedup": plain_ms / (1e3 * seconds["total"] / tokens),
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
        "break_even_tau": (draft_ms + verify_ms) / plain_ms,
        "peak_gib": peak_gib,
    }


if __name__ == "__main__":
    run_script(main)
