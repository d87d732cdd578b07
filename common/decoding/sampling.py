"""Speculative sampling: a chain sampled from the drafter, kept or rejected so that every token has the target's own distribution.

A proposed token x is kept with probability min(1, p(x) / q(x)), q the distribution that it was sampled from and p the target's; the first
that is rejected is replaced by a sample of the normalised positive part of p - q, and nothing behind it counts. Trees and greedy chains
need no q: what they propose is certain, and `speculate` keeps what equals the target's own sample.

Legend: J proposed tokens, R = J + 1 rows of a verification, V vocabulary.
Source: speculative sampling, arXiv 2302.01318; engines call it probabilistic drafting with rejection sampling.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from common.decoding.speculate import Answer, BlockDrafter, Chooser, cut, stopwatch
from common.decoding.target import DecodingTarget, keep_rows, new_cache
from common.families.family import Conditionals


def sample_chain(conditionals: Conditionals, token: int, slots: int, temperature: float, draw: torch.Generator) -> tuple[list[int], Tensor]:
    """Tokens sampled slot after slot below a known token, and the distributions they were sampled from: float32 [J, V]."""
    before_1, tokens, rows = torch.tensor([token], device=draw.device), [], []
    for slot in range(slots):
        q_1V = torch.softmax(conditionals(slot, before_1).float() / temperature, dim=-1)
        before_1 = torch.multinomial(q_1V, 1, generator=draw)[0]
        tokens.append(int(before_1))
        rows.append(q_1V[0])
    return tokens, torch.stack(rows)


def accept(tokens: list[int], q_JV: Tensor, p_RV: Tensor, draw: torch.Generator) -> list[int]:
    """The tokens that come out of a verification: the proposed ones that are kept, and one of the target's own behind them."""
    chance_J = torch.rand(len(tokens), generator=draw, device=draw.device)
    kept: list[int] = []
    for slot, token in enumerate(tokens):
        if chance_J[slot] * q_JV[slot, token] >= p_RV[slot, token]:
            left_V = (p_RV[slot] - q_JV[slot]).clamp(min=0)
            left_V = left_V if left_V.any() else p_RV[slot]  # p and q differ by roundings alone
            return [*kept, int(torch.multinomial(left_V, 1, generator=draw))]
        kept.append(token)
    return [*kept, int(torch.multinomial(p_RV[len(tokens)], 1, generator=draw))]


@torch.no_grad()
def speculate_sampled(
    target: DecodingTarget, drafter: BlockDrafter, prompt: list[int], stop: Collection[int], max_new_tokens: int, choose: Chooser
) -> Answer:
    """Answer a prompt (token ids) by chains sampled from the drafter, at the temperature above 0 and with the seed of `choose`.

    The answer has the distribution of `decode`'s, not its tokens.
    """
    answer, cache, lap = Answer(prompt), new_cache(), stopwatch(target.device)
    temperature, draw = choose.temperature, torch.Generator(target.device).manual_seed(choose.seed)
    logits, features = target.forward(prompt, 0, cache, last_only=True)
    answer.tokens = torch.multinomial(_distribution(logits, temperature), 1, generator=draw)[0].tolist()
    drafter.begin()
    drafter.extend(features, 0)
    lap(answer.seconds, "prefill")
    while len(answer.tokens) < max_new_tokens and answer.tokens[-1] not in stop:
        start = len(prompt) + len(answer.tokens) - 1
        conditionals = drafter.proposer.conditionals(drafter.draft(answer.tokens[-1], start))
        tokens, q_JV = sample_chain(conditionals, answer.tokens[-1], len(drafter.slots), temperature, draw)
        lap(answer.seconds, "draft")

        logits, features = target.forward([answer.tokens[-1], *tokens], start, cache)
        found = accept(tokens, q_JV, _distribution(logits, temperature), draw)
        keep_rows(cache, start, list(range(len(found))))
        emitted = cut(found, stop, max_new_tokens - len(answer.tokens))
        lap(answer.seconds, "verify")

        drafter.extend(features[: len(found)], start)
        answer.add(emitted, len(found))
        lap(answer.seconds, "draft")
    answer.seconds["total"] = sum(answer.seconds.values())
    return answer


def _distribution(logits_RV: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits_RV.float() / temperature, dim=-1)
