"""What a run says it will cost: users size machines and split ranks by these figures."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import config_reader
from common.distributed.layout import DRAFTER, TARGET, Layout, Member
from common.distributed.packet import PacketBuffer
from common.drafter import attention
from common.errors import UserError
from common.objective.blocks import draw_anchors
from common.target import meta
from common.target.meta import UnknownSize, target_size
from common.target.model import Target, load_model
from common.training import costs
from common.training.description import describe
from common.training.learner import Learner
from common.training.plan import make_plan

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(preset, *overrides):
    job = SimpleNamespace(first_per_host=lambda find: find(), drafters=1)
    return make_plan(config_reader.load(preset, overrides), job)


def layout_of(targets, drafters):
    counts = {TARGET: targets, DRAFTER: drafters}
    return Layout(*(tuple(Member(role, i, i, 0, i, "host", torch.device("cpu")) for i in range(n)) for role, n in counts.items()))


def test_all_experts_lie_in_memory_and_few_of_them_work(tmp_path, monkeypatch):
    """Counted as a dense model, a mixture of experts seems to need a tenth of its memory: the job dies when it loads its target."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    attention_weights, norms, expert = 2048 * 128 * 2 * (32 + 4), 2 * 2048 + 2 * 128, 3 * 2048 * 768
    layer = attention_weights + norms + 128 * 2048
    size = target_size(tmp_path, 46)
    assert size.held == 46 * (layer + 128 * expert) + 151936 * 2048 + 2048
    assert size.active == 46 * (layer + 8 * expert)
    monkeypatch.setattr(meta, "EXPERTS_PER_TOKEN", ("a_name_of_another_family",))
    with pytest.raises(UnknownSize, match="how many a token goes to"):
        target_size(tmp_path, 46)


def test_a_dense_target_is_as_large_as_the_one_that_runs(tiny_target):
    """The estimate stands for the loaded model; they must not drift apart."""
    target = Target(load_model(tiny_target, torch.device("cpu"), torch.float32), taps=(0, 2))
    assert target_size(tiny_target, 3).held == sum(p.numel() for p in target.decoder.parameters())


def test_a_family_that_cannot_be_built_is_left_out_and_said(tiny_preset, tiny_target, tmp_path):
    """Else a target whose code is not there on the main rank ends a run that only wanted to print an estimate."""
    plan = plan_of(tiny_preset)
    assert "M parameters up to its last tap" in describe(plan, layout_of(3, 1)) and "would be even" in describe(plan, layout_of(3, 1))
    shutil.copytree(tiny_target, tmp_path / "target")
    tree = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps(tree | {"model_type": "qwen9"}))
    text = describe(dataclasses.replace(plan, folder=tmp_path / "target"), layout_of(3, 1))
    assert "not known before it is loaded (ValueError" in text and "drafter 0.0" in text and "would be even" not in text


def test_drafter_parameters_are_those_that_are_trained(tiny_preset):
    """The count in the log's head is what papers and users compare."""
    plan = plan_of(tiny_preset)
    assert costs.drafter_parameters(plan.drafter) == len(Learner(plan, torch.device("cpu")).optimizer.masters)


def a_packet(plan, supervised=0):
    """The first packet's buffer, as a target would fill it, but for its features, which are noise; `supervised` 1 for all tokens."""
    packet = PacketBuffer(plan.shape.on(torch.device("cpu")))
    assignment = next(plan.schedule.assignments())
    epoch, index, row = plan.load_row(assignment)
    row.loss_mask[: row.valid] |= supervised
    packet.message.write(row, assignment, epoch, index)
    torch.nn.init.normal_(packet.features, generator=torch.Generator().manual_seed(0))
    return packet


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_useful_arithmetic_is_what_torch_counts(tiny_preset, loss):
    """Utilisation is judged by this figure: matrices and head, forward and backward. What counts although it is not computed is listed."""
    plan = plan_of(tiny_preset, "drafter.block_size=8", "objective.anchors=48", f"objective.loss={loss}")
    learner, packet = Learner(plan, torch.device("cpu")), a_packet(plan, supervised=1)
    with FlopCounterMode(display=False) as counter:
        learner.backward(packet, 0)
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    anchor, keep = draw_anchors(packet.row, plan.anchors, plan.config.seed, 0)
    assert keep.all()
    flop = dataclasses.replace(costs.DrafterFlop.of(plan.drafter, plan.distils), per_pair=0)
    padding = plan.shape.row_tokens - packet.row.valid
    useful = flop.packet(packet.row, anchor, keep) + flop.per_token * padding
    spec, T, A, K, D = plan.drafter, plan.shape.row_tokens, 48, 8, plan.drafter.hidden_size
    query, both = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    gradient_of_features = 2 * T * D * len(spec.taps) * D
    alike_slots_of_the_first_layer = 6 * (A * K - A - 1) * D * both
    unused_slots_of_the_last_layer = 6 * A * D * (query + 3 * spec.intermediate_size)
    assert useful - counted == gradient_of_features + alike_slots_of_the_first_layer + unused_slots_of_the_last_layer


def test_visible_pairs_are_those_of_the_mask(tiny_preset):
    """Attention over all of a row's keys would count work that nobody does, and utilisation would grow with the row."""
    kinds = "drafter.layer_types=[full_attention,sliding_attention]"
    plan = plan_of(tiny_preset, kinds, "drafter.window=6", "objective.anchors=64")
    row = a_packet(plan).row
    anchor, keep = draw_anchors(row, plan.anchors, 0, 0)
    assert 0 < keep.sum() < 64
    low, spec = row.document_start[anchor], attention.MaskSpec(len(row.tokens), 64, plan.drafter.block_size)
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (anchor, low, keep)]
    kept = torch.from_numpy(keep).repeat_interleave(plan.drafter.block_size)
    pairs = sum(int(attention.dense_mask(spec, *tensors, window)[kept].sum()) for window in (None, 6))
    flop = dataclasses.replace(costs.DrafterFlop.of(plan.drafter, False), per_token=0, per_block=0, per_pair=1)
    assert flop.packet(row, anchor, keep) == pairs


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", None)],
)
def test_utilisation_is_told_only_where_the_peak_is_known(monkeypatch, name, peak):
    """A utilisation of the wrong peak is worse than none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert costs.peak_flop_per_s(torch.device("cuda"), "bfloat16") == peak
    assert costs.peak_flop_per_s(torch.device("cuda"), "float32") is None and costs.peak_flop_per_s(torch.device("cpu"), "bfloat16") is None


def test_a_warm_up_longer_than_the_run_is_refused(tiny_preset):
    """Else a run of 200 steps with the warm-up of one of 200,000 learns nothing, and nothing says why."""
    with pytest.raises(UserError, match=r"optim\.warmup=13 .* the run's 12, .*optim\.warmup=0\.04, or at most 12 steps"):
        plan_of(tiny_preset, "optim.warmup=13")
    assert plan_of(tiny_preset, "optim.warmup=12").schedule.steps == 12
