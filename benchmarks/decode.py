"""Tokens per second of plain decoding, chains and trees, and where a verification's time goes.

    python benchmarks/decode.py --target T --drafter D --prompts P.jsonl
    python benchmarks/decode.py [--tiny]

Without weights the Qwen3-8B shape runs with random ones: nothing is accepted then, but `break_even_tau`, the acceptance length from
which on speculation pays, is a matter of shapes alone.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import drafter_step, eight_billion, measure
from common.cli import run_script
from common.data.chat import Chat, load_tokenizer
from common.data.prompts import read_prompts
from common.decoding.report import mean_tau
from common.decoding.speculate import BlockDrafter, Chooser, decode, load_drafter, speculate
from common.decoding.target import DecodingTarget, load_target
from common.drafter.backbone import Drafter
from common.target.files import read_spec, resolve

TREES = (16, 64, 256)


def real(arguments, device, dtype):
    """(target, drafter, vocabulary, prompts, stop tokens) from folders."""
    folder = resolve(arguments.target)
    spec, drafter = read_spec(folder), load_drafter(arguments.drafter, dtype, device)
    drafter.spec.validate(spec)
    target = load_target(folder, drafter.spec.taps, dtype, device)
    prompts = read_prompts(arguments.prompts, Chat(load_tokenizer(folder)), arguments.limit, spec.max_position_embeddings)
    return target, drafter, target.vocabulary(spec), prompts, spec.eos_token_ids


def random(tiny, device, dtype):
    """The same with random weights and prompts; nothing stops an answer."""
    config, spec = (eight_billion.TINY, drafter_step.TINY) if tiny else (eight_billion.QWEN3_8B, drafter_step.SPEC)
    target = DecodingTarget(eight_billion.random_target(config, device, dtype, "sdpa"), spec.taps)
    drafter = Drafter(spec, dtype, device).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    prompts = np.random.default_rng(0).integers(0, config["vocab_size"] - 2, (2, 8 if tiny else 512)).tolist()
    return target, drafter, eight_billion.random_vocabulary(spec, device, dtype), prompts, ()


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args(arguments)
    if len({bool(asked.target), bool(asked.drafter), bool(asked.prompts)}) > 1:
        parser.error("--target, --drafter and --prompts go together")
    device = measure.device_of(asked.tiny)
    dtype = torch.float32 if asked.tiny else torch.bfloat16
    target, drafter, vocabulary, prompts, stop = real(asked, device, dtype) if asked.target else random(asked.tiny, device, dtype)
    new_tokens = min(asked.new_tokens, 6) if asked.tiny else asked.new_tokens

    def run(method, *first):
        method(*first, prompts[0], stop, 4, Chooser())  # untimed: kernels load
        answers = [method(*first, prompt, stop, new_tokens, Chooser()) for prompt in prompts]
        return answers, sum((answer.seconds for answer in answers), Counter()), sum(len(answer.tokens) for answer in answers)

    _, seconds, tokens = run(decode, target)
    plain_ms = 1e3 * seconds["total"] / tokens
    shared = dict(benchmark="decode", target=asked.target or "random", prompts=len(prompts), dtype=str(dtype).removeprefix("torch."))
    measure.report(device, **shared, method="plain", tokens=tokens, tokens_per_s=1e3 / plain_ms, tau=1.0)
    block, runs = (drafter, vocabulary, drafter.spec.mask_token_id, drafter.spec.block_size), []
    for budget in (None, *TREES):
        peak_gib = measure.peak_gib(lambda: runs.append(run(speculate, target, BlockDrafter(*block, budget))), device)  # noqa: B023
        answers, seconds, tokens = runs[-1]
        verifications = sum(len(answer.accepted) for answer in answers)
        draft_ms, verify_ms = (1e3 * seconds[part] / verifications for part in ("draft", "verify"))
        measure.report(
            device,
            **shared,
            method="chain" if budget is None else f"tree of {budget}",
            tokens=tokens,
            tokens_per_s=tokens / seconds["total"],
            tau=mean_tau(answer.accepted for answer in answers),
            speedup=plain_ms / (1e3 * seconds["total"] / tokens),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            break_even_tau=(draft_ms + verify_ms) / plain_ms,
            peak_gib=peak_gib,
        )


if __name__ == "__main__":
    run_script(main)
