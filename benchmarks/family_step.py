"""The step of every family of drafters, forward and backward with its own loss, beside DFlash's: time and memory at the Qwen3-8B shape.

    python -m benchmarks.family_step [--tiny] [--profile] [--kinds dflash lilicorr dspark]

The families' steps start from random weights and random features, on the same blocks. Packets carry the target's final hidden states where
a family's loss compares with its distribution.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks import measure
from benchmarks.drafter_step import CASES, RECOMPUTE, SPEC, TINY, forget_steps, random_row, report_profile
from common import compile_cache
from common.cli import run_script
from common.config import ObjectiveConfig
from common.drafter.backbone import Drafter
from common.drafter.spec import DrafterSpec
from common.families.family import Drafted
from common.families.registry import FAMILIES
from common.objective.block_loss import Result
from common.objective.blocks import Blocks, build_blocks, draw_anchors
from common.target.vocabulary import Vocabulary

KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "dflash": ("dflash", {}),
    "dflash2": ("dflash2", {}),
    "lilicorr": ("lilicorr", {}),
    "lilicorr_convolutions": ("lilicorr", {"conv_taps": 2}),
    "dspark": ("dspark", {}),
}
"""{name: (family, options other than the published ones)}."""


def spec_of(kind: str, shape: DrafterSpec) -> DrafterSpec:
    """The drafter of a kind at a shape."""
    name, options = KINDS[kind]
    family = FAMILIES[name]
    own = None if family.options is None else family.options(**options)
    return dataclasses.replace(shape, family=name, options=own, sample_from_anchor=family.sample_from_anchor)


class FamilyStep:
    """A drafter with random weights, a random vocabulary and random hidden states of a target."""

    def __init__(self, spec: DrafterSpec, dtype: torch.dtype, device: torch.device, row_tokens: int):
        self.spec, self.family = spec, FAMILIES[spec.family]
        generator = torch.Generator(device).manual_seed(0)
        draw = {"generator": generator, "device": device, "dtype": dtype}
        self.model: Drafter = self.family.build(spec, dtype, device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, **draw).mul_(0.02) for _ in range(2))
        self.vocabulary = Vocabulary(embedding, head, 1.0, None)
        self.features = torch.randn(row_tokens, len(spec.taps) * spec.hidden_size, **draw)
        self.final = None if self.family.teaches == "nothing" else torch.randn(row_tokens, spec.hidden_size, **draw)
        self.forward = compile_cache.handle("drafter", self._run, device, (id(self),), recompute=RECOMPUTE)

    def _run(self, *inputs: object) -> torch.Tensor:
        return self.model(*inputs)

    def __call__(self, blocks: Blocks) -> Result:
        self.model.zero_grad(set_to_none=True)
        embeddings = self.vocabulary.embed(blocks.tokens_U)
        hidden = self.forward(embeddings, blocks.positions_AK, self.features, blocks.context_positions_T, blocks.mask)
        before_A = torch.where(blocks.anchor_A > blocks.lo_A, blocks.anchor_A - 1, -1).long()
        drafted = Drafted(hidden, blocks.tokens_U[:-1], self.features, before_A)
        result = self.family.loss(self.model, drafted, self.vocabulary, blocks, ObjectiveConfig(), self.final, 0.5)
        result.loss_sum.backward()
        return result


def measure_kind(kind: str, tiny: bool, device: torch.device, profile: bool, first: tuple[float, float] | None) -> tuple[float, float]:
    """Report a kind's step beside the first kind's (milliseconds, GiB); returns its own."""
    forget_steps()
    shape, dtype, repeats = (TINY, torch.float32, 2) if tiny else (SPEC, torch.bfloat16, 10)
    case = row_tokens, documents, anchors = CASES["tiny" if tiny else "full"][0]
    spec = spec_of(kind, shape)
    step = FamilyStep(spec, dtype, device, row_tokens)
    row = random_row(np.random.default_rng(0), row_tokens, documents, spec.vocab_size)
    anchor, keep = draw_anchors(row, anchors, seed=0, number=0)
    built = build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, sample_from_anchor=spec.sample_from_anchor)
    run = functools.partial(step, built.to(device))
    times = measure.timed(run, device, repeats=repeats)
    peak_gib = measure.peak_gib(run, device)
    first_ms, first_gib = first or (times.median_ms, peak_gib)
    measure.report(
        device,
        benchmark="family_step",
        kind=kind,
        row_tokens=row_tokens,
        anchors=anchors,
        parameters=sum(p.numel() for p in step.model.parameters()),
        **times._asdict(),
        times_the_first=times.median_ms / first_ms,
        peak_gib=peak_gib,
        memory_of_the_first=peak_gib / first_gib if first_gib else None,
    )
    if profile:
        report_profile(run, device, case)
    return times.median_ms, peak_gib


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("tiny", "profile"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="the first is what the others are compared with")
    asked = parser.parse_args(argv)
    device, first = measure.device_of(asked.tiny), None
    for kind in asked.kinds:
        found = measure_kind(kind, asked.tiny, device, asked.profile, first)
        first = first or found


if __name__ == "__main__":
    run_script(main)
