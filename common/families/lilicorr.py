"""LiLiCorr: a small transformer looks at the best candidates of all slots at once and scores how well neighbours fit together.

A slot's candidates are the shared head's best tokens; the head's log-probabilities enter as features alone. A candidate becomes two vectors
of length one, and a pair of neighbours scores the product of the earlier one's first and the later one's second. The first slot's
candidates follow the context just before the anchor. With `conv_taps`, the backbone has DFlash2's convolutions.

Legend: A anchors, J predicted slots, D hidden, T tokens of a row, k candidates of a slot (p: of the slot before).
Source: LiLiCorr, arXiv 2608.20530; computed and named as vLLM 0.32 does (models/lilicorr.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import compile_cache
from common.config import Bounds, HeadSize, ObjectiveConfig, Size
from common.drafter.backbone import Drafter
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.convolution import check_convolutions, layer_convolutions, start_as_identity
from common.families.family import Drafted, DrafterFamily, Proposer, check_plain_logits
from common.families.lattice import Lattice, LatticeProposer
from common.families.lilicorr_head import LatticeHead
from common.objective.block_loss import Result, acceptance_metrics, slot_losses, teacher_of, weighted
from common.objective.blocks import Blocks
from common.objective.head import best_tokens
from common.target.files import TargetSpec
from common.target.vocabulary import Vocabulary

EXPORTED = {
    "lattice_candidates": "lilicorr_candidate_topk",
    "lattice_width": "lilicorr_hidden_size",
    "lattice_layers": "lilicorr_num_layers",
    "lattice_heads": "lilicorr_num_heads",
    "lattice_mlp_ratio": "lilicorr_mlp_ratio",
    "lattice_vector": "lilicorr_factor_dim",
    "lattice_eps": "lilicorr_vector_eps",
    "lattice_scale": "lilicorr_logit_scale",
}
"""Settings that an exported config.json records in its `dflash_config`, with their names there."""

CONVOLUTIONS = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}
"""The same of a backbone with convolutions; both are absent without."""


@dataclass(frozen=True)
class Options:
    conv_taps: Annotated[int, Bounds(least=0, most=1024)] = 0
    """Slots that meet in a convolution around each sublayer, 2 as published with convolutions; 0 has none."""
    conv_group: Annotated[int, Bounds(least=1, most=10**6)] = 16
    """Channels that share the part of a convolution's coefficients which depends on the slot's own state; divides the hidden size."""
    lattice_candidates: Annotated[int, Bounds(least=1, most=16)] = 8
    """Best tokens of a slot, by the head, among which the lattice chooses: a power of two up to 16."""
    lattice_width: Size = 1024
    """Width of the lattice's transformer."""
    lattice_layers: Annotated[int, Bounds(least=1, most=100)] = 2
    """Its layers."""
    lattice_heads: HeadSize = 8
    """Its attention heads."""
    lattice_mlp_ratio: Annotated[float, Bounds(above=0, most=64)] = 2.0
    """Width of its MLP, as a multiple of `lattice_width`."""
    lattice_vector: Size = 1024
    """Length of the vectors by which candidates are compared."""
    lattice_eps: Annotated[float, Bounds(above=0, below=0.5)] = 1e-4
    """Least length that a vector is divided by."""
    lattice_scale: Annotated[float, Bounds(above=0, most=1000)] = 8.0
    """What a product of two vectors is multiplied by to be a logit."""
    lattice_weight: Annotated[float, Bounds(least=0, most=1000)] = 0.25
    """Weight of the lattice's cross entropy beside the head's loss."""
    penalty_weight: Annotated[float, Bounds(least=0, most=1000)] = 0.25
    """Weight of how much less the target thinks of the lattice's choice than of the label; needs `objective.teacher`."""


def lattice_scores(drafter: Drafter, drafted: Drafted, vocabulary: Vocabulary, tokens_AJk: Tensor, logprobs_AJk: Tensor) -> Tensor:
    """Scores [A, J, p, k] of blocks whose slots have these candidates; the target's embeddings enter unscaled, as engines take them."""
    head = cast(LatticeHead, drafter.lilicorr)
    present_A = drafted.before_A >= 0
    features_AF = drafted.features_TF[drafted.before_A.clamp(min=0)].to(drafter.fc.weight.dtype)
    context_AD = drafter.hidden_norm(drafter.fc(features_AF))
    rows_AJkD = F.embedding(tokens_AJk, vocabulary.embedding)
    score = head.forward
    if torch.is_grad_enabled():  # decoding's shapes are many and small
        score = compile_cache.handle("lattice", score, tokens_AJk.device, (tokens_AJk.shape, rows_AJkD.dtype), recompute=True)
    return score(rows_AJkD, logprobs_AJk, drafted.hidden_AJD, context_AD, present_A)


class LatticeWalk(LatticeProposer):
    """The head's best tokens of every slot, scored by the lattice alone."""

    def __init__(self, drafter: Drafter, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        self.drafter = drafter

    def lattice(self, drafted: Drafted) -> Lattice:
        logprobs_AJk, tokens_AJk = best_tokens(drafted.hidden_AJD, self.vocabulary, self.drafter.spec.options.lattice_candidates)
        return Lattice(tokens_AJk, lattice_scores(self.drafter, drafted, self.vocabulary, tokens_AJk, logprobs_AJk))


class LiLiCorr(DrafterFamily):
    """DFlash, with convolutions if asked for, and a lattice of candidates."""

    name, architecture, options, teaches = "lilicorr", "LiLiCorrDraftModel", Options, "candidates"

    def modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        return {"lilicorr": LatticeHead(spec, **kind)}

    def layer_modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        taps, group = spec.options.conv_taps, spec.options.conv_group
        return layer_convolutions(spec, taps, group, **kind) if taps else {}

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        return super().is_matrix(name, shape) and not name.endswith(("embedding", "slot_bias", "base_kernel"))

    def rows_of_block(self, name: str, shape: tuple[int, ...], spec: DrafterSpec) -> int:
        rows = super().rows_of_block(name, shape, spec)
        if not rows or not name.startswith("lilicorr."):
            return rows
        of_block, of_slot = name.startswith(("lilicorr.context", "lilicorr.anchor")), name.startswith("lilicorr.pass_hidden")
        return 1 if of_block else spec.proposals * (1 if of_slot else spec.options.lattice_candidates)

    def first_values(self, name: str, value: Tensor, spec: DrafterSpec, generator: torch.Generator) -> None:
        """The lattice's embeddings and biases start at zero, and its last matrices small but not at zero, where a product has no slope."""
        if name.startswith("lilicorr.") and name.endswith(("_embedding", "_bias")):
            value.zero_()
        elif name.startswith("lilicorr.") and name.endswith("_head.weight"):
            value.normal_(0.0, 0.02, generator=generator)
        elif not start_as_identity(name, value):
            super().first_values(name, value, spec, generator)

    def validate(self, spec: DrafterSpec) -> None:
        options = spec.options
        if options.conv_taps:
            check_convolutions(spec, options.conv_taps, options.conv_group)
        if options.lattice_candidates not in (1, 2, 4, 8, 16) or options.lattice_candidates > spec.vocab_size:
            raise UserError(f"drafter.lattice_candidates={options.lattice_candidates}: engines take 1, 2, 4, 8 or 16; use one of these")
        if options.lattice_width % options.lattice_heads:
            raise UserError(
                f"drafter.lattice_heads={options.lattice_heads} does not divide drafter.lattice_width={options.lattice_width}; use a "
                "number of heads that does"
            )

    def check_target(self, target: TargetSpec) -> None:
        check_plain_logits(self.name, target)

    def check_objective(self, config: ObjectiveConfig) -> None:
        if config.loss != "ce":
            raise UserError(
                f"objective.loss={config.loss}: drafter.family={self.name} needs the head's own log-probabilities, which come with "
                "objective.loss=ce; write that"
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
        """The head's loss, the lattice's cross entropy, and how much less than of the label the target thinks of the lattice's choice.

        The lattice learns in the slots up to which every label is among the candidates, each given the true one before; its terms are means
        over these slots of a packet, on the scale of the head's loss.
        """
        options, hidden_AJD = cast(Options, drafter.spec.options), drafted.hidden_AJD
        value_AJ, terms = slot_losses(hidden_AJD, vocabulary, blocks, config, candidates=options.lattice_candidates)
        plain = weighted(value_AJ, terms.nll, terms.hit, blocks, config)
        tokens_AJk, logits_AJk, labels_AJ = terms.tokens.permute(1, 2, 0), terms.logits.permute(1, 2, 0), blocks.labels_AJ
        # log of the head's sum over the vocabulary, from the label's own term, whose gradient the head has
        logsum_AJ = terms.terms[0] + products(hidden_AJD, vocabulary.head, labels_AJ[..., None])[..., 0].to(terms.terms.dtype)
        scores_AJpk = lattice_scores(drafter, drafted, vocabulary, tokens_AJk, logits_AJk - logsum_AJ[..., None])

        is_label_AJk = tokens_AJk == labels_AJ[..., None]
        learnt_AJ = is_label_AJk.any(-1).int().cumprod(1).bool() & blocks.valid_AJ
        true_AJ = is_label_AJk.int().argmax(-1)
        before_AJ = torch.cat((true_AJ[:, :1], true_AJ[:, :-1]), dim=1)  # any in the first slot
        logprobs_AJk = scores_AJpk.gather(2, before_AJ[..., None, None].expand(-1, -1, 1, scores_AJpk.shape[3]))[:, :, 0].log_softmax(-1)
        entropy_AJ = -logprobs_AJk.gather(2, true_AJ[..., None])[..., 0]
        lattice_sum, count = (entropy_AJ * learnt_AJ).sum(), learnt_AJ.sum()
        own_sum, own_metrics = options.lattice_weight * lattice_sum, {"lattice_loss": (lattice_sum.detach(), count)}
        if final_hidden_TD is not None:
            with torch.no_grad():
                teacher = teacher_of(final_hidden_TD, blocks)
                judged_AJD = teacher.hidden_TD[teacher.index_AJ].to(vocabulary.head.dtype)
                thought_AJk = products(judged_AJD, vocabulary.head, tokens_AJk)
                rejection_AJk = (thought_AJk.gather(2, true_AJ[..., None]) - thought_AJk).clamp(min=0)
            penalty_sum = ((logprobs_AJk.exp() * rejection_AJk).sum(-1) * learnt_AJ).sum()
            own_sum = own_sum + options.penalty_weight * penalty_sum
            own_metrics["lattice_penalty"] = (penalty_sum.detach(), count)

        with torch.no_grad():
            chain_AJ = Lattice(tokens_AJk, scores_AJpk).walk()
            found_AJ = is_label_AJk.any(-1) & blocks.valid_AJ
        metrics = plain.metrics | acceptance_metrics((chain_AJ == labels_AJ) & blocks.valid_AJ, blocks) | own_metrics
        metrics |= {"tau_plain": plain.metrics["tau"], "candidate_recall": (found_AJ.sum(), blocks.valid_AJ.sum())}
        return Result(plain.loss_sum + own_sum * (plain.weight_sum / count.clamp(min=1)), plain.weight_sum, metrics)

    def proposer(self, drafter: Drafter, vocabulary: Vocabulary) -> Proposer:
        return LatticeWalk(drafter, vocabulary)

    def export_config(self, spec: DrafterSpec, target: TargetSpec, dtype: str, feature_dtype: str) -> dict[str, Any]:
        config = super().export_config(spec, target, dtype, feature_dtype)
        named = EXPORTED | (CONVOLUTIONS if spec.options.conv_taps else {})
        own = {"lilicorr_enabled": True} | {theirs: getattr(spec.options, ours) for ours, theirs in named.items()}
        return config | {"dflash_config": config["dflash_config"] | own}

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        inner = config["dflash_config"]
        found = {ours: inner[theirs] for ours, theirs in EXPORTED.items()}
        found["lattice_width"] = found["lattice_width"] or config["hidden_size"]
        wrong = {EXPORTED[k]: v for k, v in found.items() if isinstance(v, bool) or not isinstance(v, (int, float)) or v <= 0}
        if wrong:
            raise UserError(f"config.json: dflash_config has {wrong}, which must be numbers above 0")
        found |= {ours: inner[theirs] for ours, theirs in CONVOLUTIONS.items() if inner.get(theirs)}
        return {"conv_taps": 0} | found


def products(hidden_AJD: Tensor, head_VD: Tensor, tokens_AJk: Tensor) -> Tensor:
    """Logits of a few tokens of every slot, rounded as the whole product with the head is: float32 or wider, [A, J, k]."""
    signature = (tokens_AJk.shape, hidden_AJD.dtype, hidden_AJD.requires_grad)
    return compile_cache.handle("products", _products, tokens_AJk.device, signature)(hidden_AJD, head_VD, tokens_AJk)


def _products(hidden_AJD: Tensor, head_VD: Tensor, tokens_AJk: Tensor) -> Tensor:
    wide = torch.promote_types(hidden_AJD.dtype, torch.float32)
    logits_AJk = (hidden_AJD[:, :, None].to(wide) * F.embedding(tokens_AJk, head_VD).to(wide)).sum(-1)
    return logits_AJk.to(hidden_AJD.dtype).to(wide)
