"""DSpark: a drafter whose slots hear of the token before them must be trained, measured and served as one and the same.

Lost otherwise: the Markov head and the confidence head. A wrong predecessor, a slot off by one or a key under another name trains well
and proposes nonsense, and no error says so.
"""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_train_equals_serve import BLOCK, LIMIT, STOP, build_pair, check_export, check_hidden, check_replay

import evaluate_drafter
import train_drafter
from benchmarks.drafter_step import TINY
from common import config_reader
from common.config import DrafterConfig, ObjectiveConfig
from common.data.rows import Row
from common.decoding.sampling import speculate_sampled
from common.decoding.speculate import Chooser, decode, speculate
from common.drafter.spec import FULL
from common.errors import UserError
from common.families import registry
from common.families.dspark import DSpark, Options
from common.families.family import Drafted
from common.families.start import make_drafter
from common.objective.block_loss import teacher_of
from common.objective.blocks import build_blocks, candidates, every_anchor
from common.objective.corrected_head import Mixture, corrected_loss
from common.target.files import read_spec
from common.target.vocabulary import Vocabulary

S, K, MIXTURE = 3, 4, Mixture(0.1, 1.8)
SPEC = dataclasses.replace(TINY, family="dspark", options=Options(markov_rank=S), sample_from_anchor=True, block_size=K)
V, D = SPEC.vocab_size, SPEC.hidden_size


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """A drafter of this family, trained on the target's own answers by the trainer's own parts."""
    return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), [FULL, FULL], family="dspark", markov_rank=8)


def test_decoding_drafts_what_training_computed(pair):
    """All of a block's slots, the anchor's own among them."""
    check_hidden(pair)


@pytest.mark.parametrize("tree_budget", [None, 12])
def test_heldout_tau_is_the_tau_of_real_decoding(pair, tree_budget):
    """Chain and tree, document by document, through the Markov head; and every answer is the target's own."""
    assert 1.2 < check_replay(pair, tree_budget) < BLOCK + 1


def check_temperature(pair):
    """Likeliest chains and trees write plain decoding's tokens under the same noise; sampled chains repeat with their seed, and differ."""
    prompt, choose = next(pair.documents())[0], Chooser(1.0, seed=0)
    expected = decode(pair.served, prompt, STOP, LIMIT, choose).tokens
    for budget in (None, 6):
        assert speculate(pair.served, pair.block_drafter(budget), prompt, STOP, LIMIT, choose).tokens == expected
    one, again, other = (
        speculate_sampled(pair.served, pair.block_drafter(), prompt, STOP, LIMIT, Chooser(1.0, seed)).tokens for seed in (0, 0, 1)
    )
    assert one == again != other


def test_at_a_temperature_every_token_is_the_targets(pair):
    check_temperature(pair)


def metrics_and_replay(pair):
    """For the first row, what the training step counts as accepted by each slot, and the same by the replay."""
    learner, packet = pair.learner, pair.packet(pair.rows[0])
    parts = (learner._blocks(packet.row, *slots) for slots in every_anchor(packet.row, learner.plan.anchors))
    counted = sum(learner._result(packet.features, blocks).metrics["accepted"][0] for blocks in parts)
    accepted_N = learner.replay(packet).accepted_N
    return counted.tolist(), [int((accepted_N > slot).sum()) for slot in range(len(counted))]


def test_the_training_curve_counts_what_decoding_accepts(pair, monkeypatch):
    """The step sees the true predecessor, decoding its own proposal: up to the first miss they are the same. A loss that is given the label
    itself (a leak from the future) looks better than decoding is, and is found by just this."""
    counted, replayed = metrics_and_replay(pair)
    assert counted == replayed and counted[0] > counted[-1]
    healthy = DSpark.loss

    def leaky(self, drafter, drafted, vocabulary, blocks, *rest):
        table = drafter.markov_head.markov_w1.weight
        with torch.no_grad():  # the table's rows point to the tokens themselves
            table.normal_(generator=torch.Generator().manual_seed(0))
            drafter.markov_head.markov_w2.weight.copy_(9 * table)
        leaked = dataclasses.replace(drafted, anchors_A=blocks.labels_AJ[:, 0])
        return healthy(self, drafter, leaked, vocabulary, blocks, *rest)

    weights = {name: tensor.clone() for name, tensor in pair.learner.model.state_dict().items()}
    monkeypatch.setattr(DSpark, "loss", leaky)
    counted, replayed = metrics_and_replay(pair)
    pair.learner.model.load_state_dict(weights)
    assert counted[0] > replayed[0]


def test_without_its_head_it_proposes_what_the_plain_drafter_does(pair):
    """The figure without the head must be a plain drafter's, and the trained head must be heard: it changes the chain."""
    model, proposer = pair.learner.model, pair.learner.proposer
    hidden_AJD = torch.cat([pair.trained_hidden(row) for row in pair.rows])
    drafted = Drafted(hidden_AJD, torch.full((len(hidden_AJD),), 65), hidden_AJD.new_zeros(0, 1), torch.full((len(hidden_AJD),), -1))
    assert not torch.equal(proposer.chain(drafted), proposer.plain.chain(drafted))
    table = model.markov_head.markov_w2.weight
    kept = table.detach().clone()
    with torch.no_grad():
        table.zero_()
        assert torch.equal(proposer.chain(drafted), proposer.plain.chain(drafted))
        table.copy_(kept)


# The blocks and the loss


def small_row():
    index = np.arange(16)
    mask = np.array([int(c) for c in "0111101110111110"], np.uint8)
    return Row((index * 7 % V).astype(np.int32), np.where(index < 9, 0, 9).astype(np.int32), mask, 15, 2)


def small_blocks():
    ((anchor, keep),) = every_anchor(small_row(), 10)
    return build_blocks(small_row(), anchor, keep, K, V - 1, gamma=2.0, sample_from_anchor=True)


def test_the_first_slot_predicts_the_token_after_the_anchor():
    """Slot k of a block at a predicts token a + k + 1, as long as the document and its supervision last."""
    row, blocks = small_row(), small_blocks()
    assert blocks.labels_AJ.shape == blocks.positions_AK.shape == (10, K)
    for a, anchor in enumerate(candidates(row).tolist()):
        end = next(i for i in range(anchor + 1, 17) if i == 16 or not row.loss_mask[i] or row.document_start[i] > anchor)
        expected = row.tokens[anchor + 1 : min(end, anchor + 1 + K)].tolist()
        assert blocks.labels_AJ[a][blocks.valid_AJ[a]].tolist() == expected and blocks.valid_AJ[a, : len(expected)].all()


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(hidden, before, table, head, final, blocks, weights):
    """The loss slot by slot in float64, from the paper's formulas: (sum, weights, nll, total variation)."""
    total, found = torch.zeros((), dtype=torch.float64), torch.zeros(3, *blocks.valid_AJ.shape, dtype=torch.float64)
    for a in range(len(hidden)):
        values, confidences = [], []
        for j in range(int(blocks.valid_AJ[a].sum())):
            q = torch.softmax(head @ hidden[a, j] + table @ before[a, j], 0)
            nll = -q[blocks.labels_AJ[a, j]].log()
            distance = 0 * nll if final is None else (torch.softmax(head @ final[blocks.anchor_A[a] + j], 0) - q).abs().sum()
            values.append(nll if final is None else 0.1 * nll + 0.9 * distance)
            confidences.append(0.5 + 0.5 * q[blocks.labels_AJ[a, j]].item())
            found[1:, a, j] = torch.stack((nll, distance / 2)).detach()
        for j, value in enumerate(values):
            weight = np.cumprod(confidences)[j:].sum() if weights == "dpace" else np.exp(-j / 2.0)
            total, found[0, a, j] = total + weight * value, weight
    return total, *found


@pytest.mark.parametrize(("teacher", "weights"), [(True, "decay"), (True, "dpace"), (False, "dpace")])
def test_loss_and_every_gradient_agree_with_float64(teacher, weights):
    """The fused head keeps the gradients of three tensors, weighted; a wrong one trains the Markov table towards nothing."""
    blocks, head = small_blocks(), draw(V, D, seed=3)
    hidden, before, table = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(((10, K, D), (10, K, S), (V, S))))
    final = draw(16, D, seed=4) if teacher else None
    expected, *parts = reference(hidden, before, table, head, final, blocks, weights)
    gradients = torch.autograd.grad(expected, (hidden, before, table))
    vocabulary, valid = Vocabulary(head, head, 1.0, None), blocks.valid_AJ
    source = None if final is None else teacher_of(final, blocks)
    for kind, chunk_anchors in itertools.product(("fused", "checkpoint"), (None, 3)):
        config = ObjectiveConfig(head=kind, weights=weights)
        result = corrected_loss(hidden, before, table, vocabulary, blocks, MIXTURE, config, source, chunk_anchors)
        torch.testing.assert_close(result.loss_sum, expected, check_dtype=False)
        for got, part in zip((result.weights_AJ, result.nll_AJ, result.variation_AJ), parts, strict=True):
            torch.testing.assert_close(got[valid], part[valid], check_dtype=False, rtol=1e-5, atol=1e-6)
        for got, gradient in zip(torch.autograd.grad(3 * result.loss_sum, (hidden, before, table)), gradients, strict=True):
            torch.testing.assert_close(got, 3 * gradient)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles on CUDA alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_head_agrees_with_its_twin(dtype):
    """The kernels that a GPU runs: loss and every gradient against autograd in float32."""
    blocks, tolerance = small_blocks().to("cuda"), {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    cuda = [draw(*shape, seed=i).to("cuda", dtype) for i, shape in enumerate(((10, K, D), (10, K, S), (V, S), (V, D), (16, D)))]
    found = []
    for kind, values in (("fused", cuda), ("checkpoint", [x.float() for x in cuda])):
        *learnt, head, final = (x.detach().clone() for x in values)
        inputs = [x.requires_grad_() for x in learnt]
        config, source = ObjectiveConfig(head=kind), teacher_of(final, blocks)
        result = corrected_loss(*inputs, Vocabulary(head, head, 1.0, None), blocks, MIXTURE, config, source)
        found.append([result.loss_sum.detach(), *torch.autograd.grad(result.loss_sum, inputs)])
    for got, expected in zip(*found, strict=True):
        assert (got.float() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("teacher", [True, False])
def test_the_confidence_head_learns_the_acceptance(teacher):
    """Its term is the cross entropy to 1 - TV (to the greedy hit without the target's distribution), weighted as the slots are, and its
    gradient reaches the drafter, too; predicted and observed acceptance are metrics by slot: the calibration."""
    family, blocks, head = DSpark(), small_blocks(), draw(V, D, seed=3)
    drafter = family.build(SPEC, torch.float64, "cpu")
    for i, parameter in enumerate(drafter.parameters()):
        parameter.data = draw(*parameter.shape, seed=i)
    hidden, final = draw(10, K, D, seed=0).requires_grad_(), draw(16, D, seed=4) if teacher else None
    drafted = Drafted(hidden, blocks.tokens_U[:-1], hidden.new_zeros(0, 1), torch.full((10,), -1))
    markov, proj = drafter.markov_head, drafter.confidence_head.proj
    before = markov.markov_w1.weight[torch.cat((blocks.tokens_U[:-1, None], blocks.labels_AJ[:, :-1]), 1)]
    expected, weights, _, variation = reference(hidden, before, markov.markov_w2.weight, head, final, blocks, "decay")
    hit = ((hidden @ head.T + before @ markov.markov_w2.weight.T).argmax(-1) == blocks.labels_AJ).double()
    acceptance = 1 - variation if teacher else hit
    logits = torch.cat((hidden, before), -1) @ proj.weight[0] + proj.bias
    entropy = -(acceptance * F.logsigmoid(logits) + (1 - acceptance) * F.logsigmoid(-logits))
    expected = expected + (weights * entropy).sum()
    result = family.loss(drafter, drafted, Vocabulary(head, head, 1.0, None), blocks, ObjectiveConfig(), final, 0.0)
    torch.testing.assert_close(result.loss_sum, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
    inputs = [hidden, *markov.parameters(), *proj.parameters()]
    for got, gradient in zip(torch.autograd.grad(result.loss_sum, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-6, atol=1e-6)
    for name, value in (("confidence", logits.sigmoid()), ("acceptance", acceptance)):
        total, count = result.metrics[name]
        torch.testing.assert_close(total.double(), (value * blocks.valid_AJ).sum(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(count, blocks.valid_AJ.sum(0))


# Files


def test_an_export_is_read_back_to_the_bit(pair, tmp_path):
    """Also in the published form, which has no `dflash_config`; another kind of DSpark is refused in words."""
    check_export(pair, tmp_path)
    folder, masters = tmp_path / "export", pair.learner.master_tensors()
    config = json.loads((folder / "config.json").read_text())
    assert {"markov_rank": 8, "block_size": BLOCK, "target_layer_ids": [0, 2], "sample_from_anchor": True}.items() <= config.items()
    config.pop("dflash_config")
    (folder / "config.json").write_text(json.dumps(config))
    spec, tensors = registry.load_exported(folder)
    assert (spec.family, spec.options.markov_rank, spec.proposals) == ("dspark", 8, BLOCK) and spec == dataclasses.replace(
        pair.learner.plan.drafter, options=spec.options, window=spec.window
    )
    assert tensors.keys() == masters.keys() and all(torch.equal(tensors[name], masters[name]) for name in masters)
    assert registry.check(folder, pair.learner.plan.target).errors == []
    (folder / "config.json").write_text(json.dumps(config | {"markov_head_type": "rnn"}))
    with pytest.raises(UserError, match=r"'markov_head_type': 'rnn'.* is another kind of DSpark"):
        registry.load_exported(folder)


@pytest.fixture(scope="module")
def run(tiny_preset, tiny_heldout, tmp_path_factory):
    """A run of six steps by the script itself, with the target's distribution: the run directory."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny_preset, folder, "optim.steps=6", f"validation.path={tiny_heldout}")
    return folder


def train(preset, folder, *overrides):
    family = ["drafter.family=dspark", "drafter.markov_rank=8"]
    assert train_drafter.main(["--config", str(preset), f"log.dir={folder}", *family, *overrides]) == 0


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_script_trains_it_and_goes_on_from_its_export(run, tiny_preset, tmp_path):
    """Calibration is logged by slot, held-out tau with and without the head; training that goes on starts with what was exported."""
    steps = [record for record in records(run) if "loss" in record]
    assert steps[-1]["loss"] < steps[0]["loss"] and all(len(steps[-1][name]) == 4 for name in ("confidence", "acceptance", "accuracy"))
    assert any({"heldout_tau", "heldout_tau_tree", "heldout_tau_plain"} <= record.keys() for record in records(run))
    train(tiny_preset, tmp_path / "again", f"drafter.init={run / 'export' / 'latest'}", "optim.steps=1", "optim.lr=0")
    one, other = (load_file(folder / "export" / "latest" / "model.safetensors") for folder in (run, tmp_path / "again"))
    assert one["markov_head.markov_w2.weight"].any() and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["dspark", "lilicorr"])
def test_a_plain_drafter_may_start_it(tiny_target, tmp_path, family):
    """A DFlash that was trained already: its backbone is taken over to the bit, the family's own part starts as from scratch."""
    target = read_spec(tiny_target)
    plain = DrafterConfig(layers=1, taps=[1], block_size=4, dtype="float32")
    spec = registry.resolve_spec(plain, target, tiny_target)
    tensors = make_drafter(plain, spec, tiny_target, "cpu", seed=5).state_dict()
    registry.FAMILIES["dflash"].export(tmp_path / "plain", tensors, spec, target, "float32", "float32")
    section = {"family": family, "layers": 1, "taps": [1], "block_size": 4, "dtype": "float32"}
    started, scratch = (
        config_reader.from_dict({"drafter": section | init}, registry.family_options()).drafter
        for init in ({"init": str(tmp_path / "plain")}, {})
    )
    spec = registry.resolve_spec(started, target, tiny_target)
    assert (spec.family, spec.sample_from_anchor) == (family, family == "dspark")
    found, fresh = (make_drafter(config, spec, tiny_target, "cpu", seed=3).state_dict() for config in (started, scratch))
    assert all(torch.equal(found[name], tensors[name] if name in tensors else fresh[name]) for name in found) and len(found) > len(tensors)


def test_without_the_targets_distribution_it_trains_and_says_so(tiny_preset, tmp_path, capsys):
    """No final hidden state travels then, and a log that does not tell would be read as the published recipe's."""
    train(tiny_preset, tmp_path / "run", "objective.teacher=false", "optim.steps=1")
    assert "without the target's distribution (objective.teacher=false)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"objective.loss=kl: drafter.family=dspark has its own loss"):
        train(tiny_preset, tmp_path / "other", "objective.loss=kl")


def test_the_script_decodes_with_it_losslessly(run, tiny_target, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count 3"}\n{"prompt": "count 12"}\n')
    given = ["--drafter", run / "export" / "latest", "--target", tiny_target, "--prompts", tmp_path / "prompts.jsonl", "--device", "cpu"]
    evaluate_drafter.main([*map(str, given), "--decode", "--max-new-tokens", "24", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"] == 2 and len(report["cumulative_acceptance"]) == 4
