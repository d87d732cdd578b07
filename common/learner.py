"""One drafter replica: from a packet of features to gradients, to accepted lengths, to files.

Legend: A anchors, K block slots, T tokens of a row, F feature width, D hidden.
"""

import numpy as np
import torch

from common import attention, drafter, kernels, objective, tokens
from common.drafter_files import export
from common.metrics import Faults
from common.optim import Optimizer
from common.packet import Row
from common.target_files import load_vocabulary


class Learner:
    """The drafter with the target's vocabulary, its objective and its optimiser, on one device."""

    def __init__(self, plan, device, vocabulary=None):
        self.plan, self.device, config = plan, device, plan.config
        self.model = drafter.make(config.drafter, plan.drafter, plan.folder, device, config.seed)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optim, plan.deal.steps)
        self.vocabulary = vocabulary or load_vocabulary(plan.folder, getattr(torch, config.drafter.dtype), device)
        self.spec = attention.MaskSpec(plan.shape.row_tokens, plan.anchors, plan.drafter.block_size)
        attention.check_tiles(self.spec, device)
        self._taps_width = len(plan.drafter.taps) * plan.target.hidden_size
        sources = [f"tap {tap}" for tap in plan.drafter.taps] + ["final hidden state"] * plan.final_hidden
        self.faults = Faults(sources, device)
        self._forward = self._run
        if device.type == "cuda" and config.drafter.compile:
            self._forward = kernels.handle("drafter", self._run, device, (self.spec, config.drafter.dtype), recompute=True)

    def backward(self, buffer, number):
        """Add one packet's gradients; returns the Result. Anchors are drawn from (seed, packet number)."""
        anchor, keep = objective.draw_anchors(buffer.row, self.plan.anchors, self.plan.config.seed, number)
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
        """What speculative decoding would find from every possible anchor of a row, in order.

        Shapes: -> accepted int64 [N]; logprobs [N, J, k] and ranks [N, J] as `objective.rank_labels` gives them, k the tree's budget.
        """
        budget, J = self.plan.config.validation.tree_budget, self.plan.drafter.block_size - 1
        found = [(np.zeros(0, np.int64), np.zeros((0, J, budget), np.float32), np.zeros((0, J), np.int64))]
        for anchor, keep in objective.every_anchor(buffer.row, self.plan.anchors):
            blocks, kept = self._blocks(buffer.row, anchor, keep), int(keep.sum())
            hidden = self._hidden(buffer.features, blocks)
            accepted_A = self._loss(hidden, buffer.features, blocks).accepted_A
            ranked = objective.rank_labels(hidden, self.vocabulary, blocks, budget)
            found.append([tensor[:kept].cpu().numpy() for tensor in (accepted_A, *ranked)])
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def warm(self):
        """Compile everything, forward and backward, on a made-up packet."""
        T = self.plan.shape.row_tokens
        row = Row(np.zeros(T, np.int32), np.zeros(T, np.int32), np.ones(T, np.uint8), T, 1)
        features = torch.zeros(T, self.plan.shape.width, dtype=self.plan.shape.dtype, device=self.device)
        anchor, keep = objective.every_anchor(row, self.plan.anchors)[0]
        self._result(features, self._blocks(row, anchor, keep)).loss_sum.backward()
        self.model.zero_grad(set_to_none=True)
        if self.plan.heldout is not None:
            with torch.no_grad():
                self._result(features, self._blocks(row, anchor, keep))

    def _blocks(self, row, anchor, keep):
        spec = self.plan.drafter
        blocks = objective.build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, self.plan.config.objective.gamma)
        blocks.mask = attention.plan(self.spec, anchor, blocks.lo_A.numpy(), keep, spec.window)
        return blocks.to(self.device)

    def _result(self, features_TF, blocks):
        return self._loss(self._hidden(features_TF, blocks), features_TF, blocks)

    def _hidden(self, features_TF, blocks):
        taps = features_TF[:, : self._taps_width]
        if self.plan.config.drafter.zero_features:
            taps = torch.zeros_like(taps)
        embeddings = self.vocabulary.embed(blocks.tokens_U)
        return self._forward(embeddings, blocks.positions_AK, taps, blocks.context_positions_T, blocks.mask)

    def _loss(self, hidden_AJD, features_TF, blocks):
        final = features_TF[:, self._taps_width :] if self.plan.final_hidden else None
        return objective.loss(hidden_AJD, self.vocabulary, blocks, self.plan.config.objective, final)

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
        self.optimizer.publish()
        self.optimizer.load_state_tensors(state)

    def export(self, folder):
        """Write the loader-ready drafter: the engines' keys, bf16."""
        export(folder, self.master_tensors(), self.plan.drafter, self.plan.target, "bfloat16", self.plan.config.target.dtype)


def walk_totals(plan, item, row, accepted_N, logprobs_NJk, ranks_NJ):
    """Walk totals of one validation row as {name: (emitted, verifications)}.

    `walk_tau` is the chain's acceptance length, `walk_tau_tree` that of a tree of `validation.tree_budget` nodes, `walk_tau/<source>` the
    chain's on one source of the data.
    """
    emitted, verifications = objective.walk(accepted_N, row)
    tree = objective.walk_tree(logprobs_NJk, ranks_NJ, row, plan.config.validation.tree_budget)
    totals = {"walk_tau": (float(emitted.sum()), float(verifications.sum())), "walk_tau_tree": tuple(float(x.sum()) for x in tree)}
    names = plan.heldout.store.source_names
    documents = plan.heldout.documents_of(plan.deal.row_of(item)[1]) if item.kind == tokens.VALIDATE else []
    for source in range(len(names) if len(names) > 1 else 0):
        mine = plan.heldout.store.source_of[documents] == source
        totals[f"walk_tau/{names[source] or 'unnamed'}"] = (float(emitted[mine].sum()), float(verifications[mine].sum()))
    return totals
