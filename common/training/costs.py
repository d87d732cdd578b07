"""What a run costs: parameters, memory and arithmetic of both roles.

Parameters are counted on models built on the meta device. Memory and arithmetic follow from them and from the packets' shapes.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.data.rows import Row
from common.distributed.roles import nearest_drafters
from common.drafter.backbone import Drafter
from common.drafter.spec import FULL, DrafterSpec
from common.families.registry import FAMILIES
from common.objective.head import CHUNK_LOGITS
from common.target.meta import TargetSize, part_sizes
from common.training.plan import RunPlan

PEAK_FLOP_PER_S = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}
"""Dense bfloat16 peak by a part of the device's name, the first that fits; from the vendors' data sheets."""


def peak_flop_per_s(device: torch.device, dtype: str) -> float | None:
    """The peak to which useful arithmetic is compared; None for a CPU, a device that is not in the table, or another type than bfloat16."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOP_PER_S.items() if part in name), None)


def on_meta(spec: DrafterSpec) -> Drafter:
    """The drafter without its numbers: names and shapes of all parameters."""
    return FAMILIES[spec.family].build(spec, torch.bfloat16, "meta")


def drafter_parameters(spec: DrafterSpec) -> int:
    """Parameters that are trained; the target's embedding and head, which the drafter shares, are not among them."""
    return sum(p.numel() for p in on_meta(spec).parameters())


def stage_sizes(plan: RunPlan) -> list[TargetSize]:
    """The sizes of the parts of the target that run, up to the last tap or all of it: one for each stage. Raises: UnknownSize."""
    rest, layers = part_sizes(plan.folder, plan.config.target.trust_remote_code)
    if len(plan.stages) == 1:
        return [sum(layers if plan.final_hidden else layers[: max(plan.drafter.taps) + 1], rest)]
    sizes = [sum(layers[stage.layers.start : stage.layers.stop], TargetSize(0, 0)) for stage in plan.stages if stage.layers is not None]
    return [rest + sizes[0], *sizes[1:]]


@dataclass(frozen=True)
class DrafterFlop:
    """Useful floating-point operations of a drafter's step, by shapes: forward and backward, nothing that is recomputed.

    A matrix costs 6 a weight and row (2 forward, 4 for its two gradients), the frozen head 4 (it has no gradient of its own) and 2 more
    where the target's distribution is computed too, attention 12 a visible pair of query and key and value of a head (4 forward,
    8 backward). Norms, the loss and the optimiser are left out. A family says which rows go through its own matrices.
    Source: model FLOP utilisation, PaLM (arXiv 2204.02311), appendix B.
    """

    per_token: int
    """For each token of context: the projection of the features, and the layers' keys and values."""
    per_block: int
    """For each block: its slots through the layers, its predicted slots through the head."""
    per_pair: int
    """For each pair of query and key that one layer's attention sees."""
    spec: DrafterSpec

    @classmethod
    def of(cls, spec: DrafterSpec, distils: bool) -> "DrafterFlop":
        drafter = on_meta(spec)
        rows_of_block, named = FAMILIES[spec.family].rows_of_block, drafter.named_parameters()
        products = sum(p.numel() * rows_of_block(name, tuple(p.shape), spec) for name, p in named if name != "fc.weight")
        projection = drafter.fc.weight.numel()
        keys_and_values = spec.layers * 2 * spec.kv_heads * spec.head_dim * spec.hidden_size
        head = (6 if distils else 4) * spec.vocab_size * spec.hidden_size
        return cls(
            per_token=6 * (projection + keys_and_values),
            per_block=6 * products + spec.proposals * head,
            per_pair=12 * spec.heads * spec.head_dim,
            spec=spec,
        )

    def packet(self, row: Row, anchor_A: np.ndarray, keep_A: np.ndarray) -> float:
        """What a packet is worth: its valid tokens, its kept blocks, and the pairs that these really see."""
        anchor = anchor_A[keep_A].astype(np.int64)
        context, slot = anchor - row.document_start[anchor], np.arange(self.spec.block_size)
        full = self.spec.block_size * float(np.sum(context + self.spec.block_size))
        windowed = float(np.sum(np.minimum(context[:, None], (self.spec.window or 0) - 1 - slot) + slot + 1)) if self.spec.window else 0.0
        pairs = sum(full if kind == FULL else windowed for kind in self.spec.layer_types)
        return self.per_token * row.valid + self.per_block * len(anchor) + self.per_pair * pairs


def drafter_bytes(plan: RunPlan) -> float:
    """Estimated memory of a drafter: masters, moments, gradients, weights, the shared vocabulary, buffers and the most activations."""
    spec, T, vocabulary = plan.drafter, plan.shape.row_tokens, plan.target.vocab_size * plan.target.hidden_size
    itemsize = getattr(torch, plan.config.drafter.dtype).itemsize
    queries = plan.anchors * spec.block_size
    per_query = 4 * spec.hidden_size + 2 * spec.intermediate_size + 3 * spec.heads * spec.head_dim
    layers = 1 if plan.config.drafter.activation_checkpointing else spec.layers
    kept = layers * (queries * per_query + 4 * T * spec.kv_heads * spec.head_dim) + 3 * queries * spec.intermediate_size
    logits = min(queries * plan.target.vocab_size, CHUNK_LOGITS) * (1 + plan.distils)
    head = logits * (itemsize + 4) + queries * spec.hidden_size * itemsize
    float32 = 16 if plan.config.optim.name == "adamw" else 12  # master, gradient and two moments; Muon keeps one
    state = drafter_parameters(spec) * (float32 + (2 * itemsize if itemsize < 4 else 4))
    shared = (1 if plan.target.tie_word_embeddings else 2) * vocabulary * itemsize
    return state + shared + _buffer_bytes(plan) + kept * itemsize + head


def target_bytes(plan: RunPlan, sizes: list[TargetSize]) -> list[float]:
    """Estimated memory of each stage of a target: its weights up to the last tap, buffers, and the widest activations of a layer."""
    itemsize, spec = plan.shape.dtype.itemsize, plan.target
    widest = 4 * plan.shape.row_tokens * max(spec.intermediate_size, 2 * spec.hidden_size)
    buffers = [plan.config.link.depth * shape.buffer_bytes for shape in plan.stage_shapes]
    received = [0, *buffers[:-1]]
    return [(size.held + widest) * itemsize + out + into for size, out, into in zip(sizes, buffers, received, strict=True)]


def _buffer_bytes(plan: RunPlan) -> int:
    return plan.config.link.depth * plan.shape.buffer_bytes


def suggested_split(plan: RunPlan, sizes: list[TargetSize], ranks: int) -> tuple[int, int]:
    """(targets, drafters) of an exchange group by the arithmetic that each role has to do for a full row; attention is left out."""
    flop, T, stages = DrafterFlop.of(plan.drafter, plan.distils), plan.shape.row_tokens, len(plan.stages)
    drafter = flop.per_token * T + flop.per_block * plan.anchors
    target = 2 * sum(size.active for size in sizes) * T
    drafters = nearest_drafters(ranks, stages, ranks * drafter / (drafter + target))
    return (ranks - drafters) // stages, drafters
