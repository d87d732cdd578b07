"""One drafter replica: from a packet of features to gradients, to accepted lengths, to files.

Legend: A anchors, K block slots, T tokens of a row, F feature width, D hidden.
"""

import numpy as np
import torch

from common import compile_cache
from common.data.rows import Row
from common.drafter import attention
from common.families.registry import FAMILIES
from common.families.start import make_drafter
from common.metrics import Faults
from common.objective.acceptance import Replay
from common.objective.blocks import build_blocks, draw_anchors, every_anchor
from common.target.vocabulary import load_vocabulary
from common.training.optim import Optimizer


class Learner:
    """The drafter with the target's vocabulary, its objective and its optimiser, on one device."""

    def __init__(self, plan, device, vocabulary=None):
        self.plan, self.device, config = plan, device, plan.config
        self.model = make_drafter(config.drafter, plan.drafter, plan.folder, device, config.seed)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optim, plan.schedule.steps)
        self.vocabulary = vocabulary or load_vocabulary(plan.folder, getattr(torch, config.drafter.dtype), device)
        self.family = FAMILIES[plan.drafter.family]
        self.proposer = self.family.proposer(self.model, self.vocabulary)
        self.spec = attention.MaskSpec(plan.shape.row_tokens, plan.anchors, plan.drafter.block_size)
        attention.check_tiles(self.spec, device)
        self._taps_width = len(plan.drafter.taps) * plan.target.hidden_size
        sources = [f"tap {tap}" for tap in plan.drafter.taps] + ["final hidden state"] * plan.final_hidden
        self.faults = Faults(sources, device)
        self._forward = self._run
        if device.type == "cuda" and config.drafter.compile:
            self._forward = compile_cache.handle("drafter", self._run, device, (self.spec, config.drafter.dtype), recompute=True)

    def backward(self, buffer, number):
        """Add one packet's gradients; returns the Result. Anchors are drawn from (seed, packet number)."""
        anchor, keep = draw_anchors(buffer.row, self.plan.anchors, self.plan.config.seed, number)
        result = self._result(buffer.features, self._blocks(buffer.row, anchor, keep))
        result.loss_sum.backward()
        self.optimizer.accumulate()
        self.faults.packet(number, buffer.features)
        return result

    def step(self, step, weight_sum):
        """Update the weights, or leave them where anything is not finite; returns metrics as (sum, count)."""
        done = self.optimizer.step(weight_sum)
        self.faults.step(step, done["skipped"])
        return {name: (value, 1) for name, value in done.items()}

    @torch.no_grad()
    def replay(self, buffer):
        """What the drafter would propose at every possible anchor of a row, as a Replay."""
        accepted, labels, tokens, children = [np.zeros(0, np.int64)], [], [np.zeros(0, np.int64)], []
        for anchor, keep in every_anchor(buffer.row, self.plan.anchors):
            blocks, kept = self._blocks(buffer.row, anchor, keep), int(keep.sum())
            hidden, anchors_A = self._hidden(buffer.features, blocks), blocks.tokens_U[:-1]
            labels_AJ = blocks.labels_AK[:, 1:].masked_fill(~blocks.valid_AK[:, 1:], -1)
            right_AJ = self.proposer.chain(hidden, anchors_A) == labels_AJ
            accepted.append(right_AJ.int().cumprod(1).sum(1)[:kept].cpu().numpy())
            labels.append(labels_AJ[:kept].cpu().numpy())
            tokens.append(anchors_A[:kept].cpu().numpy())
            children += self.proposer.children(hidden, anchors_A, self.plan.config.validation.tree_budget)[:kept]
        labels.append(np.zeros((0, self.plan.drafter.block_size - 1), np.int64))
        return Replay(np.concatenate(accepted), np.concatenate(tokens), np.concatenate(labels), children)

    def warm(self):
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

    def _blocks(self, row, anchor, keep):
        spec = self.plan.drafter
        gamma = self.plan.config.objective.gamma
        return build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, gamma, spec.window).to(self.device)

    def _result(self, features_TF, blocks):
        final = features_TF[:, self._taps_width :] if self.plan.final_hidden else None
        hidden = self._hidden(features_TF, blocks)
        return self.family.loss(self.model, hidden, self.vocabulary, blocks, self.plan.config.objective, final)

    def _hidden(self, features_TF, blocks):
        taps = features_TF[:, : self._taps_width]
        if self.plan.config.drafter.zero_features:
            taps = torch.zeros_like(taps)
        embeddings = self.vocabulary.embed(blocks.tokens_U)
        return self._forward(embeddings, blocks.positions_AK, taps, blocks.context_positions_T, blocks.mask)

    def _run(self, *inputs):
        return self.model(*inputs)

    def master_tensors(self):
        return self.optimizer.master_tensors()

    @torch.no_grad()
    def load(self, masters, state):
        """Take up a checkpoint's weights and this replica's optimiser state."""
        own = self.optimizer.master_tensors()
        for name, tensor in own.items():
            tensor.copy_(masters[name])
        self.optimizer.copy_masters_to_weights()
        self.optimizer.load_state_tensors(state)

    def export(self, folder):
        """Write the loader-ready drafter: the engines' keys, bf16."""
        self.family.export(folder, self.master_tensors(), self.plan.drafter, self.plan.target, "bfloat16", self.plan.config.target.dtype)
