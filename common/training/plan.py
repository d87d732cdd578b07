"""What every rank derives from the config before it starts: specs, stores, the schedule, the packets' shape, what roles cost."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import config_reader
from common.config_reader import check_averaging
from common.data.packing import pack_rows
from common.data.rows import RowLoader
from common.data.schedule import TRAIN, Schedule
from common.data.store import TokenStore
from common.distributed.layout import DRAFTER, TARGET
from common.distributed.packet import PacketShape
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.registry import resolve_spec
from common.objective.blocks import default_anchors
from common.objective.head import CHUNK_LOGITS
from common.objective.losses import LOSSES
from common.target.files import TargetSpec, read_spec, resolve

GIB = 1 << 30


@dataclass(frozen=True)
class RunPlan:
    """Everything about a run that is the same on all ranks."""

    config: object
    folder: object
    target: TargetSpec
    drafter: DrafterSpec
    rows: RowLoader
    heldout: RowLoader | None
    schedule: Schedule
    shape: PacketShape
    anchors: int

    def load_row(self, assignment):
        """(epoch, row index, Row) of an assignment."""
        epoch, index = self.schedule.row_of(assignment)
        return epoch, index, (self.rows if assignment.kind == TRAIN else self.heldout).row(epoch, index)

    @property
    def row_documents(self):
        """Most documents that any row may hold."""
        return max(loader.packed().most_documents for loader in (self.rows, self.heldout) if loader is not None)

    @property
    def final_hidden(self):
        return needs_final_hidden(self.config)

    def agreement(self):
        """What all ranks must have in common, as a tree whose differing keys can be named."""
        data = {"path": self.rows.store.fingerprint, "validation": self.heldout.store.fingerprint if self.heldout else None}
        return config_reader.to_dict(self.config) | {
            "data fingerprint": data,
            "target fingerprint": self.target.fingerprint,
            "release": {"torch": torch.__version__},
        }

    def describe(self, layout):
        rows, schedule, shape = self.rows.packed(), self.schedule, self.shape
        lines = [
            f"target   {self.config.target.path}: {self.target.layers} layers of {self.target.hidden_size}, taps {list(self.drafter.taps)}",
            f"drafter  {self.drafter.layers} layers, blocks of {self.drafter.block_size}, {self.parameters() / 1e6:,.1f} M parameters, "
            f"mask token {self.drafter.mask_token_id}",
            f"data     {len(self.rows.store):,} documents in {len(rows):,} rows of {shape.row_tokens} ({rows.fill:.0%} filled), "
            f"{rows.truncated:,} truncated, {rows.dropped:,} dropped; {schedule.dropped_rows} rows at each epoch's end left out",
            f"steps    {schedule.steps:,} of {schedule.step_packets} packets, up to {self.anchors} blocks each; "
            f"per epoch {schedule.steps_per_epoch:,}",
            "memory   " + "; ".join(f"{role} {bytes_ / GIB:.2f} GiB" for role, bytes_ in self.memory().items()) + " (estimate per device)",
        ]
        targets, drafters = (len(layout.exchange_group(role, 0)) for role in (TARGET, DRAFTER))
        if targets + drafters > 2:
            suggested = "{} targets + {} drafters".format(*self.suggested_split(targets + drafters))
            lines.append(
                f"split    {targets} targets + {drafters} drafters a group; by the arithmetic of both roles {suggested} would be even"
            )
        return "\n".join(lines)

    def parameters(self):
        """Parameters of the drafter."""
        d, s = self.drafter.hidden_size, self.drafter
        attention = d * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 2 * s.head_dim
        return s.layers * (attention + 3 * d * s.intermediate_size + 2 * d) + len(s.taps) * d * d + 2 * d

    def target_parameters(self):
        """Parameters of the target's layers that run: up to the last tap, or all of them."""
        t = self.target
        layers = t.layers if self.final_hidden else max(self.drafter.taps) + 1
        attention = t.hidden_size * t.head_dim * (2 * t.heads + 2 * t.kv_heads)
        return layers * (attention + 3 * t.hidden_size * t.intermediate_size)

    def memory(self):
        """Estimated bytes by role: weights, optimiser, buffers and the largest activations."""
        t, s, T = self.target, self.drafter, self.shape.row_tokens
        buffers = self.config.link.depth * self.shape.buffer_bytes
        wide, narrow = self.shape.dtype.itemsize, getattr(torch, self.config.drafter.dtype).itemsize
        vocabulary = t.vocab_size * t.hidden_size
        target = (self.target_parameters() + vocabulary) * wide + buffers + 4 * T * max(t.intermediate_size, 2 * t.hidden_size) * wide
        queries = self.anchors * s.block_size
        per_query = 4 * s.hidden_size + 2 * s.intermediate_size + 3 * s.heads * s.head_dim
        layers = 1 if self.config.drafter.activation_checkpointing else s.layers
        activations = layers * (queries * per_query + 4 * T * s.kv_heads * s.head_dim) * narrow + 3 * queries * s.intermediate_size * narrow
        logits = min(queries * t.vocab_size, CHUNK_LOGITS) * (1 + self.final_hidden)
        head = logits * (narrow + 4) + queries * s.hidden_size * narrow
        state = self.parameters() * (16 + (2 * narrow if narrow < 4 else 4))
        tied = 1 if t.tie_word_embeddings else 2
        return {"target": target, "drafter": state + tied * vocabulary * narrow + buffers + activations + head}

    def suggested_split(self, ranks):
        """(targets, drafters) of a group by the arithmetic each role has to do per token."""
        t, s, T = self.target, self.drafter, self.shape.row_tokens
        target = 2 * self.target_parameters()
        queries = self.anchors * s.block_size
        head = 4 * self.anchors * (s.block_size - 1) * t.vocab_size * t.hidden_size
        layers = s.layers * (s.hidden_size * s.head_dim * 2 * s.heads + 3 * s.hidden_size * s.intermediate_size)
        keys = s.layers * s.hidden_size * s.head_dim * 2 * s.kv_heads
        context = len(s.taps) * s.hidden_size**2
        drafter = (head + 6 * (queries * (layers + keys) + T * (keys + context))) / T
        drafters = min(ranks - 1, max(1, round(ranks * drafter / (drafter + target))))
        return ranks - drafters, drafters


def needs_final_hidden(config):
    """Whether the loss compares with the target's own distribution."""
    return LOSSES[config.objective.loss].distils


def make_plan(config, job):
    """Open target, stores and schedule. Raises: UserError for whatever does not fit together."""
    folder = job.first_per_host(lambda: resolve(config.target.path, config.target.revision))
    target = read_spec(folder)
    if needs_final_hidden(config) and config.drafter.zero_features:
        raise UserError("drafter.zero_features=true is an ablation of objective.loss=ce; drop one of them")
    rows = _open_rows(config, config.data.path, folder, target)
    heldout_path = _heldout_path(config)
    heldout = _open_rows(config, heldout_path, folder, target) if heldout_path else None
    if heldout:
        check_averaging(config, job.drafters, "validation.every")
    used_ids = np.concatenate([loader.store.used_ids for loader in (rows, heldout) if loader is not None])
    drafter = resolve_spec(config.drafter, target, folder, used_ids)
    validation_rows = min(heldout.count(), config.validation.rows or heldout.count()) if heldout else 0
    schedule = Schedule(
        rows.count,
        job.drafters,
        config.optim.accumulate,
        config.optim.steps,
        config.optim.epochs,
        validation_rows,
        config.validation.every,
    )
    width = (len(drafter.taps) + needs_final_hidden(config)) * target.hidden_size
    shape = PacketShape(config.data.pack_tokens, width, getattr(torch, config.target.dtype))
    anchors = config.objective.anchors or default_anchors(config.data.pack_tokens, drafter.block_size)
    return RunPlan(config, folder, target, drafter, rows, heldout, schedule, shape, anchors)


def _heldout_path(config):
    path = config.validation.path
    if path == "auto":
        path = config.data.path.rstrip("/") + "-heldout"
        return path if Path(path).is_dir() else None
    return path


def _open_rows(config, path, folder, target):
    store = TokenStore.open(path)
    store.check_target(folder, target.vocab_size)
    data = config.data

    def pack(epoch):
        return pack_rows(store.lengths, data.pack_tokens, data.max_document_tokens, data.long_documents, config.seed, epoch)

    return RowLoader(store, pack)
