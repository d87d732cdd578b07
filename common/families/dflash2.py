"""DFlash2: DFlash with convolutions along the slots and a selector, which chooses each slot's token given the one before.

A candidate's score is its logit plus a product of three: a vector of the token before it, a projection of the slot's hidden state, a vector
of the candidate. It starts as DFlash: the convolutions as the identity, the candidates' vectors as zeros.

Legend: A anchors, J predicted slots, D hidden, T tokens of a row, V vocabulary, R rank of the selector, k candidates of a slot, p tokens
that may stand before it.
Source: z-lab/dflash dflash/model.py; scores as in vLLM 0.32 (models/qwen3_dflash2.py); loss as in SpecForge (dflash2) and NeMo Automodel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Bounds, ObjectiveConfig
from common.drafter.backbone import Drafter
from common.drafter.check import Report
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.convolution import check_convolutions, layer_convolutions, start_as_identity
from common.families.family import Drafted, DrafterFamily
from common.families.lattice import Lattice, LatticeProposer
from common.objective.block_loss import Result, acceptance_metrics, slot_losses, slot_weights, weighted
from common.objective.blocks import Blocks
from common.objective.head import best_logits
from common.target.files import TargetSpec
from common.target.vocabulary import Vocabulary

EXPORTED = {
    "conv_taps": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_candidates": "selector_top_k",
}
"""Settings that an exported config.json records in its `dflash_config`, with their names there."""


@dataclass(frozen=True)
class Options:
    conv_taps: Annotated[int, Bounds(least=1, most=1024)] = 2
    """Slots that meet in a convolution: a slot and those just before it."""
    conv_group: Annotated[int, Bounds(least=1, most=10**6)] = 16
    """Channels that share the part of a convolution's coefficients which depends on the slot's own state; divides the hidden size."""
    selector_rank: Annotated[int, Bounds(least=1, most=10**5)] = 256
    """Width of the selector's vectors."""
    selector_candidates: Annotated[int, Bounds(least=1, most=1024)] = 16
    """Best tokens of a slot, by the head, among which the selector chooses."""
    selector_weight: Annotated[float, Bounds(least=0, most=1000)] = 1.0
    """Weight of the selector's loss beside the head's."""
    selector_warmup: Annotated[float, Bounds(least=0, most=1)] = 0.001
    """Share of all steps in which that weight rises from zero."""
    selector_absent: Literal["leave_out", "put_in"] = "leave_out"
    """What a slot teaches the selector whose label is not among the candidates: nothing, or the label in the last candidate's place."""


class CandidateSelector(nn.Module):
    """Scores how well candidates follow the tokens that may stand before them."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        rank = spec.options.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank, **kind))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank, **kind))
        self.hidden_projection = nn.Linear(spec.hidden_size, rank, bias=False, **kind)

    def forward(self, hidden_AJD: Tensor, before_AJp: Tensor, tokens_AJk: Tensor) -> Tensor:
        """What is added to each candidate's logit, given each token that may stand before it: [A, J, p, k].

        Shapes: hidden_AJD [A, J, D]; before_AJp int64 [A, J, p]; tokens_AJk int64 [A, J, k].
        """
        context_AJpR = F.embedding(before_AJp, self.predecessor_codebook) * self.hidden_projection(hidden_AJD)[:, :, None]
        return torch.einsum("ajpr,ajkr->ajpk", context_AJpR, F.embedding(tokens_AJk, self.successor_codebook))


def lattice_of(selector: CandidateSelector, hidden_AJD: Tensor, anchors_A: Tensor, tokens_AJk: Tensor, logits_AJk: Tensor) -> Lattice:
    """The lattice of blocks whose slots have these candidates, by the drafter's own choices alone."""
    first_A1k = anchors_A[:, None, None].expand(-1, 1, tokens_AJk.shape[2])
    before_AJk = torch.cat((first_A1k, tokens_AJk[:, :-1]), dim=1)
    return Lattice(tokens_AJk, logits_AJk[:, :, None] + selector(hidden_AJD, before_AJk, tokens_AJk))


class SelectorProposer(LatticeProposer):
    """The head's best tokens of every slot, scored by the selector."""

    def __init__(self, selector: CandidateSelector, vocabulary: Vocabulary, candidates: int):
        super().__init__(vocabulary)
        self.selector, self.candidates = selector, candidates

    def lattice(self, drafted: Drafted) -> Lattice:
        tokens_AJk, logits_AJk = best_logits(drafted.hidden_AJD, self.vocabulary, self.candidates)
        return lattice_of(self.selector, drafted.hidden_AJD, drafted.anchors_A, tokens_AJk, logits_AJk)


class DFlash2(DrafterFamily):
    """DFlash with convolutions and a candidate selector."""

    name, architecture, options = "dflash2", "DFlash2DraftModel", Options

    def modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        return {"candidate_selector": CandidateSelector(spec, **kind)}

    def layer_modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        return layer_convolutions(spec, spec.options.conv_taps, spec.options.conv_group, **kind)

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        return super().is_matrix(name, shape) and not name.endswith(("codebook", "base_kernel"))

    def first_values(self, name: str, value: Tensor, spec: DrafterSpec, generator: torch.Generator) -> None:
        if name == "candidate_selector.successor_codebook":
            value.zero_()
        elif not start_as_identity(name, value):
            super().first_values(name, value, spec, generator)

    def validate(self, spec: DrafterSpec) -> None:
        options = spec.options
        check_convolutions(spec, options.conv_taps, options.conv_group)
        if options.selector_candidates > spec.vocab_size:
            raise UserError(
                f"drafter.selector_candidates={options.selector_candidates} are more than the target's vocabulary of {spec.vocab_size}; "
                "use at most that"
            )

    def loss(
        self,
        drafter: Drafter,
        drafted: Drafted,
        vocabulary: Vocabulary,
        blocks: Blocks,
        config: ObjectiveConfig,
        final_hidden_TD: Tensor | None,
        progress: float,
    ) -> Result:
        options, selector = drafter.spec.options, cast(CandidateSelector, drafter.candidate_selector)
        count, hidden_AJD = options.selector_candidates, drafted.hidden_AJD
        value_AJ, terms = slot_losses(hidden_AJD, vocabulary, blocks, config, final_hidden_TD, candidates=count)
        plain = weighted(value_AJ, terms.nll, terms.hit, blocks, config)
        tokens_AJk, logits_AJk = terms.tokens.permute(1, 2, 0), terms.logits.permute(1, 2, 0)

        before_AJ = torch.cat((drafted.anchors_A[:, None], blocks.labels_AJ[:, :-1]), dim=1)
        candidates = tokens_AJk, logits_AJk
        if options.selector_absent == "put_in":
            candidates = with_label(hidden_AJD, vocabulary, blocks.labels_AJ, *candidates)
        loss_AJ, present_AJ = selector_loss(selector, hidden_AJD, before_AJ, blocks.labels_AJ, *candidates)
        weights_AJ = slot_weights(terms.nll, blocks, config) * present_AJ
        loss_sum = (weights_AJ * loss_AJ).sum()
        rise = min(1.0, progress / options.selector_warmup) if options.selector_warmup else 1.0

        with torch.no_grad():
            chain_AJ = lattice_of(selector, hidden_AJD, drafted.anchors_A, tokens_AJk, logits_AJk).walk()
            found_AJ = (tokens_AJk == blocks.labels_AJ[..., None]).any(-1) & blocks.valid_AJ
        metrics = plain.metrics | acceptance_metrics((chain_AJ == blocks.labels_AJ) & blocks.valid_AJ, blocks)
        metrics |= {
            "tau_plain": plain.metrics["tau"],
            "selector_loss": (loss_sum.detach(), weights_AJ.sum()),
            "candidate_recall": (found_AJ.sum(), blocks.valid_AJ.sum()),
        }
        return Result(plain.loss_sum + options.selector_weight * rise * loss_sum, plain.weight_sum, metrics)

    def proposer(self, drafter: Drafter, vocabulary: Vocabulary) -> SelectorProposer:
        return SelectorProposer(cast(CandidateSelector, drafter.candidate_selector), vocabulary, drafter.spec.options.selector_candidates)

    def export_config(self, spec: DrafterSpec, target: TargetSpec, dtype: str, feature_dtype: str) -> dict[str, Any]:
        config = super().export_config(spec, target, dtype, feature_dtype)
        inner = config["dflash_config"] | {theirs: getattr(spec.options, ours) for ours, theirs in EXPORTED.items()}
        if target.vocabulary.logit_scale != 1.0:
            inner["output_multiplier"] = target.vocabulary.logit_scale
        return config | {"dflash_config": inner}

    def check(self, folder: str | Path, target: TargetSpec) -> Report:
        report, rules = super().check(folder, target), target.vocabulary
        inner = self.read_config(folder).get("dflash_config") or {}
        expected = {"output_multiplier": rules.logit_scale, "final_logit_softcapping": rules.logit_softcap or 0.0}
        for key, value in expected.items():
            if (said := inner.get(key) or (1.0 if key == "output_multiplier" else 0.0)) != value:
                report.errors.append(
                    f"dflash_config.{key}={said!r}, but the target's is {value}: engines would weigh logits and selector otherwise"
                )
        return report

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        inner = config["dflash_config"]
        found = {ours: inner.get(theirs, config.get(theirs)) for ours, theirs in EXPORTED.items()}
        for name, value in found.items():
            if value is None:
                raise KeyError(EXPORTED[name])
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"config.json: dflash_config.{EXPORTED[name]}={value!r} must be a whole number from 1")
        return found


def selector_loss(
    selector: CandidateSelector, hidden_AJD: Tensor, before_AJ: Tensor, labels_AJ: Tensor, tokens_AJk: Tensor, logits_AJk: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy over each slot's candidates, given the true token before it, and whether the label is among them (else it is 0).

    Shapes: before_AJ, labels_AJ int64 [A, J] -> loss [A, J], present bool [A, J]. Units: nats.
    """
    scores_AJk = logits_AJk + selector(hidden_AJD, before_AJ[..., None], tokens_AJk)[:, :, 0]
    is_label_AJk = tokens_AJk == labels_AJ[..., None]
    present_AJ = is_label_AJk.any(-1)
    loss_AJ = scores_AJk.logsumexp(-1) - (scores_AJk * is_label_AJk).sum(-1)
    return torch.where(present_AJ, loss_AJ, 0.0), present_AJ


def with_label(
    hidden_AJD: Tensor, vocabulary: Vocabulary, labels_AJ: Tensor, tokens_AJk: Tensor, logits_AJk: Tensor
) -> tuple[Tensor, Tensor]:
    """Candidates and their logits with the label in the last place where it is not among them."""
    logits_AJ = (hidden_AJD.to(logits_AJk.dtype) * F.embedding(labels_AJ, vocabulary.head).to(logits_AJk.dtype)).sum(-1)
    if vocabulary.softcap is not None:
        logits_AJ = vocabulary.softcap * torch.tanh(logits_AJ / vocabulary.softcap)
    absent_AJ1 = (tokens_AJk != labels_AJ[..., None]).all(-1, keepdim=True)
    last_AJk = absent_AJ1 & (torch.arange(tokens_AJk.shape[2], device=labels_AJ.device) == tokens_AJk.shape[2] - 1)
    return torch.where(last_AJk, labels_AJ[..., None], tokens_AJk), torch.where(last_AJk, logits_AJ[..., None], logits_AJk)
