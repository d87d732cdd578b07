"""DSpark: every slot of a block predicts, the anchor's own too, and a token's logits hear of the token before it; a second head says how
likely each proposal is to be accepted.

Legend: A anchors, J predicted slots, D hidden, V vocabulary, S rank of the Markov head, T tokens of a row, k children of a node.
Source: DSpark, arXiv 2607.05147; served as vLLM 0.32 does (models/qwen3_dspark.py).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Bounds, ObjectiveConfig, Size
from common.drafter.backbone import Drafter
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.dflash import IndependentSlots
from common.families.family import Conditionals, Drafted, DrafterFamily, Proposer, check_plain_logits
from common.objective.acceptance import Children, Siblings
from common.objective.block_loss import Result, acceptance_metrics, teacher_of
from common.objective.blocks import Blocks
from common.objective.corrected_head import Mixture, corrected_loss
from common.objective.head import spans
from common.target.files import TargetSpec
from common.target.vocabulary import Vocabulary

FIXED = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True, "sample_from_anchor": True}
"""What config.json says of every drafter of this family; other kinds of DSpark are refused."""


@dataclass(frozen=True)
class Options:
    markov_rank: Size = 256
    """Width of the Markov head: the rank of what a token adds to the next one's logits."""
    ce_weight: Annotated[float, Bounds(least=0)] = 0.1
    """Weight of the cross entropy on the data's tokens."""
    variation_weight: Annotated[float, Bounds(least=0)] = 1.8
    """Weight of the total variation between drafter and target, half of their L1 distance (published: 0.9 of that distance)."""
    confidence_weight: Annotated[float, Bounds(least=0)] = 1.0
    """Weight of the confidence head's binary cross entropy."""


class MarkovHead(nn.Module):
    """What the token before adds to a token's logits: `markov_w2` applied to its row of `markov_w1`."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.options.markov_rank, **kind)
        self.markov_w2 = nn.Linear(spec.options.markov_rank, spec.vocab_size, bias=False, **kind)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., V]."""
        return self.markov_w2(self.markov_w1(tokens))


class ConfidenceHead(nn.Module):
    """How likely a proposal is to be accepted, from its slot's hidden state and the Markov row of the token before it."""

    def __init__(self, spec: DrafterSpec, **kind: Any):
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.options.markov_rank, 1, **kind)

    def forward(self, hidden_AJD: Tensor, before_AJS: Tensor) -> Tensor:
        """Logits of the probabilities, in float32 as vLLM computes them: [A, J]."""
        wide = torch.promote_types(hidden_AJD.dtype, torch.float32)
        inputs = torch.cat((hidden_AJD, before_AJS), dim=-1).to(wide)
        return F.linear(inputs, self.proj.weight.to(wide), self.proj.bias.to(wide)).squeeze(-1)


class MarkovChain(Proposer):
    """A slot's logits are the shared head's and the Markov head's for the token before it: the anchor's, then those proposed."""

    def __init__(self, head: MarkovHead, vocabulary: Vocabulary):
        self.head, self.vocabulary, self.plain = head, vocabulary, IndependentSlots(vocabulary)

    @torch.no_grad()
    def chain(self, drafted: Drafted) -> Tensor:
        A, J = drafted.hidden_AJD.shape[:2]
        proposed = []
        for span in spans(A, J * self.vocabulary.head.shape[0], None):
            logits_of, before_A = self._conditionals(drafted.hidden_AJD[span]), drafted.anchors_A[span]
            tokens = [before_A := logits_of(slot, before_A).argmax(-1) for slot in range(J)]
            proposed.append(torch.stack(tokens, dim=1))
        return torch.cat(proposed)

    def children(self, drafted: Drafted, width: int) -> list[Children]:
        @functools.lru_cache(1)  # trees are built one after the other, and a block's logits are large
        @torch.no_grad()
        def logits_of(block: int) -> Tensor:
            return _logits(self.vocabulary, drafted.hidden_AJD[block])

        @torch.no_grad()
        def children(block: int, depth: int, parent: int) -> Siblings:
            logits_V = logits_of(block)[depth] + self.head(torch.tensor(parent, device=drafted.hidden_AJD.device))
            best = logits_V.log_softmax(-1).topk(min(width, len(logits_V)))
            return best.indices.tolist(), best.values.tolist()

        return [functools.partial(children, block) for block in range(len(drafted.hidden_AJD))]

    def conditionals(self, drafted: Drafted) -> Conditionals:
        return self._conditionals(drafted.hidden_AJD)

    def _conditionals(self, hidden_AJD: Tensor) -> Conditionals:
        logits_AJV = _logits(self.vocabulary, hidden_AJD)
        return lambda slot, before_A: logits_AJV[:, slot] + self.head(before_A)


def _logits(vocabulary: Vocabulary, hidden: Tensor) -> Tensor:
    """The shared head's logits, in float32 or wider."""
    return vocabulary.logits(hidden).to(torch.promote_types(hidden.dtype, torch.float32))


class DSpark(DrafterFamily):
    """DFlash's backbone whose blocks begin to predict at the anchor, with a Markov head and a confidence head."""

    name, architecture, options = "dspark", "Qwen3DSparkModel", Options
    sample_from_anchor, teaches, method = True, "all", "dspark"

    def modules(self, spec: DrafterSpec, **kind: Any) -> dict[str, nn.Module]:
        return {"markov_head": MarkovHead(spec, **kind), "confidence_head": ConfidenceHead(spec, **kind)}

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """The Markov head's matrices are tables of tokens, and the confidence head's is one row."""
        return super().is_matrix(name, shape) and not name.startswith(("markov_head.", "confidence_head."))

    def rows_of_block(self, name: str, shape: tuple[int, ...], spec: DrafterSpec) -> int:
        return spec.proposals if name == "markov_head.markov_w2.weight" else super().rows_of_block(name, shape, spec)

    def first_values(self, name: str, value: Tensor, spec: DrafterSpec, generator: torch.Generator) -> None:
        """The Markov head's second table starts at zero: the drafter starts as one whose slots are independent."""
        super().first_values(name, value, spec, generator)
        if name == "markov_head.markov_w2.weight":
            value.zero_()

    def check_target(self, target: TargetSpec) -> None:
        check_plain_logits(self.name, target)

    def check_objective(self, config: ObjectiveConfig) -> None:
        if config.loss != "ce":
            raise UserError(
                f"objective.loss={config.loss}: drafter.family={self.name} has its own loss, cross entropy and total variation; drop the "
                "key, and set drafter.ce_weight and drafter.variation_weight"
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
        """Cross entropy and total variation of each slot, the true token before it, and the confidence head's cross entropy.

        The confidence head learns how often its slot's proposal would be accepted: one minus the total variation; without the target's
        distribution, whether the greedy proposal is what was written.
        Metrics: `confidence` and `acceptance` by slot, the predicted and the observed share, to see whether the head is calibrated.
        """
        options, hidden_AJD = cast(Options, drafter.spec.options), drafted.hidden_AJD
        markov, confidence = cast(MarkovHead, drafter.markov_head), cast(ConfidenceHead, drafter.confidence_head)
        tokens_AJ = torch.cat((drafted.anchors_A[:, None], blocks.labels_AJ[:, :-1]), dim=1)
        before_AJS = markov.markov_w1(tokens_AJ)
        teacher = None if final_hidden_TD is None else teacher_of(final_hidden_TD, blocks)
        mixture = Mixture(options.ce_weight, options.variation_weight)
        corrected = corrected_loss(hidden_AJD, before_AJS, markov.markov_w2.weight, vocabulary, blocks, mixture, config, teacher)
        acceptance_AJ = corrected.hit_AJ.float() if teacher is None else 1 - corrected.variation_AJ.clamp(0, 1)
        predicted_AJ = confidence(hidden_AJD, before_AJS)
        entropy_AJ = F.binary_cross_entropy_with_logits(predicted_AJ, acceptance_AJ.to(predicted_AJ.dtype), reduction="none")
        loss_sum = corrected.loss_sum + options.confidence_weight * (corrected.weights_AJ * entropy_AJ).sum()
        weight_sum, valid_AJ = corrected.weights_AJ.sum(), blocks.valid_AJ
        counted = lambda value_AJ: ((value_AJ.detach() * valid_AJ).sum(0), valid_AJ.sum(0))  # noqa: E731
        metrics = {
            "loss": (loss_sum.detach(), weight_sum),
            "nll": ((corrected.nll_AJ * valid_AJ).sum(), valid_AJ.sum()),
            "confidence": counted(predicted_AJ.sigmoid()),
            "acceptance": counted(acceptance_AJ),
            **acceptance_metrics(corrected.hit_AJ & valid_AJ, blocks),
        }
        return Result(loss_sum, weight_sum, metrics)

    def proposer(self, drafter: Drafter, vocabulary: Vocabulary) -> Proposer:
        return MarkovChain(cast(MarkovHead, drafter.markov_head), vocabulary)

    def export_config(self, spec: DrafterSpec, target: TargetSpec, dtype: str, feature_dtype: str) -> dict[str, Any]:
        """With the keys at top level, where the engines read this family's."""
        config = super().export_config(spec, target, dtype, feature_dtype)
        own = {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.taps), "markov_rank": spec.options.markov_rank}
        return config | FIXED | own

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"markov_rank": config["markov_rank"]}

    def read_spec(self, folder: str | Path) -> DrafterSpec:
        config = self.read_config(folder)
        if other := {key: config[key] for key, value in FIXED.items() if config.get(key, value) != value}:
            raise UserError(f"{folder}/config.json: {other} is another kind of DSpark; what is read has {FIXED}")
        return super().read_spec(folder)

    def read_config(self, folder: str | Path) -> dict[str, Any]:
        """Published drafters have no `dflash_config`: what would stand in it stands at top level."""
        config = super().read_config(folder)
        top = {key: config[key] for key in ("block_size", "mask_token_id", "target_layer_ids") if key in config}
        return config | {"dflash_config": top | (config.get("dflash_config") or {})}
