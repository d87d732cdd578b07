"""One drafter replica: from a packet of features to gradients, to accepted lengths, to files.

Legend: A anchors, K block slots, T tokens of a row, F feature width, D hidden.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import compile_cache
from common.data.rows import Row
from common.distributed.packet import PacketBuffer
from common.drafter import attention
from common.drafter.export import split
from common.families.family import Drafted
from common.families.registry import FAMILIES
from common.families.replay import draft_blocks, replay_row
from common.families.start import make_drafter
from common.metrics import Faults, Metrics
from common.objective.acceptance import Replay
from common.objective.block_loss import Result
from common.objective.blocks import Blocks, build_blocks, draw_anchors, every_anchor
from common.target.vocabulary import Vocabulary, load_vocabulary
from common.training.costs import DrafterFlop
from common.training.optim import Optimizer
from common.training.plan import RunPlan


class Learner:
    """The drafter with the target's vocabulary, its objective and its optimiser, on one device."""

    def __init__(self, plan: RunPlan, device: torch.device, vocabulary: Vocabulary | None = None):
        self.plan, self.device, config = plan, device, plan.config
        self.model = make_drafter(config.drafter, plan.drafter, plan.folder, device, config.seed, config.target.trust_remote_code)
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            config.optim,
            plan.schedule.steps,
            parts=lambda name, tensor: split(plan.drafter, {name: tensor}).values(),
            is_matrix=FAMILIES[plan.drafter.family].is_matrix,
        )
        loaded = vocabulary or load_vocabulary(plan.target, getattr(torch, config.drafter.dtype), device)
        self.vocabulary = loaded.scaled_by(plan.drafter.embedding_scale)
        self.family = FAMILIES[plan.drafter.family]
        self.proposer = self.family.proposer(self.model, self.vocabulary)
        spec = plan.drafter
        self.spec = attention.MaskSpec(plan.shape.row_tokens, plan.anchors, spec.block_size, spec.sliding_causal)
        attention.check_tiles(self.spec, device)
        self.slow_path = attention.slow_path(
            self.spec, (spec.heads, spec.kv_heads, spec.head_dim), getattr(torch, config.drafter.dtype), device
        )
        self._taps_width = len(plan.drafter.taps) * plan.target.hidden_size
        sources = [f"tap {tap}" for tap in plan.drafter.taps] + ["final hidden state"] * plan.final_hidden
        self.faults = Faults(sources, device)
        self._flop, self._useful_flop = DrafterFlop.of(plan.drafter, plan.distils), 0.0
        self._forward = self._run
        if device.type == "cuda" and config.drafter.compile:
            self._forward = compile_cache.handle("drafter", self._run, device, (self.spec, config.drafter.dtype), recompute=True)

    def backward(self, buffer: PacketBuffer, number: int) -> Result:
        """Add one packet's gradients; returns the Result. Anchors are drawn from (seed, packet number)."""
        anchor, keep = draw_anchors(buffer.row, self.plan.anchors, self.plan.config.seed, number)
        result = self._result(buffer.features, self._blocks(buffer.row, anchor, keep))
        result.loss_sum.backward()
        self.optimizer.accumulate()
        self.faults.packet(number, buffer.features)
        self._useful_flop += self._flop.packet(buffer.row, anchor, keep)
        return result

    def take_useful_flop(self) -> float:
        """Useful floating-point operations of all packets since the last call."""
        flop, self._useful_flop = self._useful_flop, 0.0
        return flop

    def step(self, step: int, weight_sum: Tensor) -> Metrics:
        """Update the weights, or leave them where anything is not finite; returns metrics as (sum, count)."""
        done = self.optimizer.step(weight_sum)
        self.faults.step(step, done["skipped"])
        return {name: (value, 1) for name, value in done.items()}

    def replay(self, buffer: PacketBuffer) -> Replay:
        """What the drafter would propose at every possible anchor of a row, as a Replay."""
        width, blocks_of = self.plan.config.validation.tree_budget, functools.partial(self._blocks, buffer.row)
        drafted_of = functools.partial(self._draft, buffer.features)
        return replay_row(buffer.row, self.plan.anchors, blocks_of, drafted_of, self.proposer, width)

    def warm(self) -> None:
        """Compile everything, forward and backward, on a made-up packet."""
        T = self.plan.shape.row_tokens
        row = Row(np.zeros(T, np.int32), np.zeros(T, np.int32), np.ones(T, np.uint8), T, 1)
        features = torch.zeros(T, self.plan.shape.width, dtype=self.plan.shape.dtype, device=self.device)
        anchor, keep = every_anchor(row, self.plan.anchors)[0]
        self._result(features, self._blocks(row, anchor, keep)).loss_sum.backward()
        self.model.zero_grad(set_to_none=True)
        if self.plan.heldout is not None:
            with torch.no_grad():
                self._result(features, self._blocks(row, anchor, keep))

    def _blocks(self, row: Row, anchor: np.ndarray, keep: np.ndarray) -> Blocks:
        spec = self.plan.drafter
        kind = spec.block_size, spec.mask_token_id, self.plan.config.objective.gamma, spec.window, spec.sample_from_anchor
        return build_blocks(row, anchor, keep, *kind).to(self.device)

    def _result(self, features_TF: Tensor, blocks: Blocks) -> Result:
        final = features_TF[:, self._taps_width :] if self.plan.final_hidden else None
        progress = self.optimizer.steps_done / self.plan.schedule.steps
        drafted = self._draft(features_TF, blocks)
        return self.family.loss(self.model, drafted, self.vocabulary, blocks, self.plan.config.objective, final, progress)

    def _draft(self, features_TF: Tensor, blocks: Blocks) -> Drafted:
        taps = features_TF[:, : self._taps_width]
        if self.plan.config.drafter.zero_features:
            taps = torch.zeros_like(taps)
        return draft_blocks(self._forward, self.vocabulary, taps, blocks)

    def _run(self, *inputs: object) -> Tensor:
        return self.model(*inputs)

    def master_tensors(self) -> dict[str, Tensor]:
        """{parameter's name: its float32 master}."""
        return self.optimizer.master_tensors()

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Take up a checkpoint's weights and this replica's optimiser state."""
        own = self.optimizer.master_tensors()
        for name, tensor in own.items():
            tensor.copy_(masters[name])
        self.optimizer.copy_masters_to_weights()
        self.optimizer.load_state_tensors(state)


def export_drafter(plan: RunPlan, masters: Mapping[str, Tensor], folder: Path) -> None:
    """Write the loader-ready drafter of these float32 masters: the engines' keys, bf16."""
    known = {"packed_with": plan.rows.store.packed_with}
    FAMILIES[plan.drafter.family].export(folder, masters, plan.drafter, plan.target, "bfloat16", plan.config.target.dtype, known)
