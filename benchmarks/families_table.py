"""Every family of targets that is known, on a tiny random model: what is captured, learnt, decoded and exported, against transformers' own.

python -m benchmarks.families_table [FAMILY ...] [--markdown]
"""

import argparse
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from benchmarks.tiny_families import MULTIMODAL, TEXT, VOCABULARY, write_model
from common.cli import run_script
from common.config import DrafterConfig, ObjectiveConfig
from common.data.rows import Row
from common.decoding.speculate import Chooser, DraftModel, Proposal, decode, speculate
from common.decoding.target import DecodingTarget
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.registry import FAMILIES, resolve_spec
from common.families.replay import draft_blocks
from common.families.start import make_drafter
from common.objective.blocks import build_blocks, every_anchor
from common.target.adapters import auto_class, decoder_layers, decoder_of, first_line, relative_distance
from common.target.files import TargetSpec, read_spec
from common.target.model import Target, load_model
from common.target.vocabulary import check_files, load_vocabulary

CPU, TAPS, BLOCK, ANSWER = torch.device("cpu"), (1, 3), 4, 24
PROMPT = [3, 17, 5, 5, 9, 30, 2, 11, 25, 8, 6]
LENGTHS, PADDING = (12, 25, 3), 3


@dataclass
class Findings:
    """What is true of a family; `wrong` names what should hold and does not, `refused` why it cannot be trained for."""

    execution: str = ""
    decoding: str = ""
    refused: str = ""
    wrong: list[str] = field(default_factory=list)


def examine(family: str, folder: Path) -> Findings:
    """Try a family from its files to an exported drafter. `folder` is empty and is filled."""
    findings, target = Findings(), folder / "target"
    write_model(family, target)
    try:
        spec = read_spec(target)
        check_files(spec, torch.float32, CPU)
        subject = Target(load_model(target, CPU, torch.float32), TAPS)
    except UserError as error:
        findings.refused = str(error).replace(f"{target}: ", "").replace(f"{target}/", "")
        return findings
    findings.execution = subject.execution
    row = _row()
    features = torch.zeros(len(row.tokens), subject.width)
    subject.capture(row, features)
    model = auto_class(config := AutoConfig.from_pretrained(target)).from_pretrained(target, config=config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    checks: dict[str, Callable[[], str | None]] = {
        "capture": lambda: _capture(model, row, features),
        "training step": lambda: _train(spec, target, row, features, folder / "drafter"),
    }
    for name, check in checks.items():
        if (flaw := _tried(check)) is not None:
            findings.wrong.append(f"{name}: {flaw}")
    try:
        served = DecodingTarget(model, TAPS)
    except UserError as error:
        findings.decoding = str(error)
        return findings
    findings.decoding = "chain, tree" if served.windows else "chain"
    if (flaw := _tried(lambda: _decode(model, served))) is not None:
        findings.wrong.append(f"decoding: {flaw}")
    return findings


def _tried(check: Callable[[], str | None]) -> str | None:
    try:
        return check()
    except Exception as error:  # the code of any family runs here
        return f"{type(error).__name__}: {first_line(error)}"


def _row() -> Row:
    total = sum(LENGTHS)
    tokens = np.random.default_rng(0).integers(2, VOCABULARY - 1, total + PADDING).astype(np.int32)
    starts = np.repeat(np.cumsum((0, *LENGTHS)), (*LENGTHS, PADDING)).astype(np.int32)
    return Row(tokens, starts, np.ones(len(tokens), np.uint8), total, len(LENGTHS))


def _capture(model: Any, row: Row, features_TF: Tensor) -> str | None:
    """The features against the taps of the whole model, a document at a time."""
    seen: dict[int, Tensor] = {}
    layers = decoder_layers(decoder_of(model))

    def keep(tap: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            seen[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [layers[tap].register_forward_hook(keep(tap)) for tap in TAPS]
    worst = 0.0
    for begin, end in row.spans():
        model(input_ids=torch.from_numpy(row.tokens[None, begin:end]).long(), use_cache=False)
        truth = torch.cat([seen[tap].reshape(end - begin, -1) for tap in TAPS], dim=-1)
        worst = max(worst, relative_distance(features_TF[begin:end], truth))
    for hook in hooks:
        hook.remove()
    return f"features differ by {worst:.1e}" if worst > 1e-4 else None


def _train(spec: TargetSpec, target: Path, row: Row, features_TF: Tensor, folder: Path) -> str | None:
    """A gradient for every parameter, and the exported form."""
    config = DrafterConfig(layers=2, taps=list(TAPS), block_size=BLOCK, mask_token=VOCABULARY - 1, dtype="float32")
    drafter_spec: DrafterSpec = resolve_spec(config, spec, target)
    family, vocabulary = FAMILIES[drafter_spec.family], load_vocabulary(spec, torch.float32, CPU)
    drafter = make_drafter(config, drafter_spec, target, CPU, 0)
    anchor, keep = every_anchor(row, 32)[0]
    blocks = build_blocks(row, anchor, keep, BLOCK, drafter_spec.mask_token_id, None, None, drafter_spec.sample_from_anchor)
    drafted = draft_blocks(drafter, vocabulary, features_TF, blocks)
    family.loss(drafter, drafted, vocabulary, blocks, ObjectiveConfig(), None, 0.0).loss_sum.backward()
    dead = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    if dead:
        return f"no gradient for {', '.join(dead)}"
    family.export(folder, dict(drafter.named_parameters()), drafter_spec, spec, "bfloat16", "float32")
    return None


class FourInFive(DraftModel):
    """Knows the answer, but for a fifth of its tokens, so that acceptance and roll-back both run."""

    def __init__(self, answer: Sequence[int]):
        draw = random.Random(0)
        self.tokens = [(token + 1) % VOCABULARY if draw.random() < 0.2 else token for token in answer]

    def begin(self) -> None:
        """Nothing is remembered."""

    def extend(self, features_NF: Tensor, start: int) -> None:
        """Nor learnt."""

    def propose(self, token: int, position: int) -> Proposal:
        begin = position + 1 - len(PROMPT)
        tokens = (self.tokens[begin : begin + BLOCK] + [0] * BLOCK)[:BLOCK]
        return Proposal(tokens, list(range(BLOCK)))


def _decode(model: Any, served: DecodingTarget) -> str | None:
    """Plain and speculative decoding against transformers' own greedy answer."""
    options = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    plain = decode(served, PROMPT, (), ANSWER, Chooser()).tokens
    ours = speculate(served, FourInFive(plain), PROMPT, (), ANSWER, Chooser()).tokens
    if plain != theirs:
        return "plain decoding is not transformers' own"
    return None if ours == plain else "speculative decoding changes the answer"


def examine_in_words(family: str) -> Findings:
    """`examine` in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return examine(family, Path(folder))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[*TEXT, *MULTIMODAL], help="model types (all that are known)")
    parser.add_argument("--markdown", action="store_true", help="end with the README's table")
    asked = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    found: dict[str, Findings] = {}
    for family in asked.families:
        begun_s = time.perf_counter()
        try:
            found[family] = examine_in_words(family)
        except Exception as error:  # the code of any family runs here
            found[family] = Findings(refused=f"{type(error).__name__}: {first_line(error)}")
        f, seconds = found[family], time.perf_counter() - begun_s
        print(
            f"{family:20s} {f.execution or 'refused'}; {f.refused or f.decoding}; {'; '.join(f.wrong) or '-'}; {seconds:.1f} s", flush=True
        )
    if asked.markdown:
        print(markdown(found))


def markdown(found: dict[str, Findings]) -> str:
    """The README's table: families that behave alike in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family, f in found.items():
        how = {"packed": "packed", "batched": "side by side", "per_document": "one by one", "": "refused"}[f.execution]
        rows.setdefault((how, f.refused or ("; ".join(f.wrong) if f.wrong else f.decoding)), []).append(family)
    lines = [f"| {how} | {what} | {', '.join(sorted(families))} |" for (how, what), families in sorted(rows.items())]
    return "\n".join(["| documents | decoding, or why not | families |", "|---|---|---|", *lines])


if __name__ == "__main__":
    run_script(main)
