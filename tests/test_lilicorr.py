"""LiLiCorr: the lattice that chooses among a drafter's candidates must be trained, measured and served as one and the same.

Lost otherwise: the lattice. A candidate at another rank, an anchor's state one token late or a key under another name trains well and
proposes nonsense, and no error says so.
"""

import dataclasses
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_dspark import check_temperature, metrics_and_replay, records, small_row
from test_train_equals_serve import BLOCK, build_pair, check_export, check_replay

import evaluate_drafter
import train_drafter
from benchmarks.drafter_step import TINY
from common import compile_cache
from common.config import ObjectiveConfig
from common.drafter.spec import FULL
from common.errors import UserError
from common.families import lilicorr, registry
from common.families.family import Drafted
from common.families.lilicorr import LiLiCorr, Options
from common.objective.blocks import build_blocks, every_anchor
from common.target.vocabulary import Vocabulary

SMALL = dict(lattice_candidates=4, lattice_width=16, lattice_heads=2, lattice_layers=1, lattice_vector=8)
SPEC = dataclasses.replace(TINY, family="lilicorr", options=Options(**SMALL | {"lattice_layers": 2}), block_size=4)
V, D, J = SPEC.vocab_size, SPEC.hidden_size, 3


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """A drafter of this family with convolutions, trained on the target's own answers by the trainer's own parts."""
    options = SMALL | {"family": "lilicorr", "conv_taps": 2, "conv_group": 8}
    return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), [FULL, FULL], **options)


@pytest.mark.parametrize("tree_budget", [None, 12])
def test_heldout_tau_is_the_tau_of_real_decoding(pair, tree_budget):
    """Chain and tree, document by document, through the lattice; and every answer is the target's own."""
    assert 1.2 < check_replay(pair, tree_budget) < BLOCK


def test_at_a_temperature_every_token_is_the_targets(pair):
    check_temperature(pair)


def test_the_training_curve_counts_what_decoding_accepts(pair):
    """The step's tau is that of the drafter's own candidates and choices: a lattice that is given the label would look too good."""
    counted, replayed = metrics_and_replay(pair)
    assert counted == replayed and counted[0] > counted[-1]


def test_an_anchors_own_feature_is_found_out(pair, monkeypatch):
    """While decoding it does not exist yet: a lattice that sees it in the replay promises what serving cannot keep."""
    healthy = lilicorr.lattice_scores
    leaky = lambda drafter, drafted, *rest: healthy(drafter, dataclasses.replace(drafted, before_A=drafted.before_A + 1), *rest)  # noqa: E731
    replay = pair.learner.replay
    monkeypatch.setattr(pair.learner, "replay", lambda packet: planted(monkeypatch, leaky, lambda: replay(packet)))
    with pytest.raises(AssertionError):
        check_replay(pair)


def planted(monkeypatch, leaky, call):
    with monkeypatch.context() as patch:
        patch.setattr(lilicorr, "lattice_scores", leaky)
        return call()


def test_without_its_head_it_proposes_what_the_plain_drafter_does(pair):
    """The figure without the head must be a plain drafter's, and the trained lattice must be heard: it changes the chain."""
    learner = pair.learner
    packet = pair.packet(pair.rows[0])
    (slots, *_) = every_anchor(packet.row, learner.plan.anchors)
    with torch.no_grad():
        drafted = learner._draft(packet.features, learner._blocks(packet.row, *slots))
        assert not torch.equal(learner.proposer.chain(drafted), learner.proposer.plain.chain(drafted))
        kept = {name: p.clone() for name, p in learner.model.lilicorr.named_parameters()}
        for parameter in learner.model.lilicorr.parameters():
            parameter.zero_()
        assert torch.equal(learner.proposer.chain(drafted), learner.proposer.plain.chain(drafted))
        for name, parameter in learner.model.lilicorr.named_parameters():
            parameter.copy_(kept[name])


def test_what_is_sampled_from_is_what_the_chain_is_the_best_of(pair):
    """A slot's distribution, given the token before it: nothing outside the candidates, and the chain is its best token in every slot."""
    learner, packet = pair.learner, pair.packet(pair.rows[0])
    (slots, *_) = every_anchor(packet.row, learner.plan.anchors)
    drafted = learner._draft(packet.features, learner._blocks(packet.row, *slots))
    with torch.no_grad():
        chain_AJ, logits_of, before_A = learner.proposer.chain(drafted), learner.proposer.conditionals(drafted), drafted.anchors_A
        for slot, token_A in enumerate(chain_AJ.unbind(1)):
            logits_AV = logits_of(slot, before_A)
            assert logits_AV.isfinite().sum(1).eq(SMALL["lattice_candidates"]).all() and torch.equal(logits_AV.argmax(-1), token_A)
            before_A = token_A


# The loss


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_scores(p, rows, logprobs, hidden, context, present):
    """One block's scores of neighbouring candidates from the formulas, p the head's tensors: start [k], then pairs [J - 1, k, k]."""

    def linear(x, name):
        return x @ p[name + ".weight"].T + p[name + ".bias"]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + SPEC.rms_norm_eps).sqrt() * p[name + ".weight"]

    k, width = logprobs.shape[1], SPEC.options.lattice_width
    ranks = torch.arange(k).double()
    says = torch.stack(
        [logprobs, logprobs.exp(), logprobs - logprobs[:, :1], (ranks / (k - 1)).expand(J, k), (ranks == 0).double().expand(J, k)], -1
    )
    features = F.layer_norm(says, (5,), p["feature_norm.weight"], p["feature_norm.bias"])
    x = linear(rows, "token_proj") + linear(hidden, "pass_hidden_proj")[:, None]
    x = x + linear(F.silu(linear(features, "feature_mlp.up_proj")), "feature_mlp.down_proj")
    x = (x + p["slot_embedding"][0, 0] + p["rank_embedding"][0, 0]).reshape(J * k, width)
    bias = torch.empty(2, J * k, J * k, dtype=torch.float64)
    for i, j in itertools.product(range(J * k), repeat=2):
        apart = i // k - j // k
        bias[:, i, j] = p["relative_slot_bias"][:, apart + J] + (p["same_slot_bias"] if apart == 0 else 0)
    for layer in ("layers.0.", "layers.1."):
        y = norm(x, layer + "attn_norm")
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        weight, own_bias, out_weight, out_bias = (p[layer + "attn." + name] for name in names)
        q, key, value = (y @ weight.T + own_bias).reshape(J * k, 3, 2, width // 2).permute(1, 2, 0, 3)
        attention = torch.softmax(q @ key.transpose(1, 2) / (width // 2) ** 0.5 + bias, -1) @ value
        x = x + attention.transpose(0, 1).reshape(J * k, width) @ out_weight.T + out_bias
        x = x + linear(F.silu(linear(norm(x, layer + "mlp_norm"), layer + "mlp.up_proj")), layer + "mlp.down_proj")
    x = norm(x, "output_norm")
    anchor = norm(linear(context, "context_proj") * present, "anchor_norm")
    joined = F.silu(linear(torch.cat([x, anchor.expand_as(x), x * anchor], -1), "factor_input_proj"))
    unit = lambda v: v / v.norm(dim=-1, keepdim=True)  # noqa: E731
    out, into = (unit(linear(joined, name)).reshape(J, k, -1) for name in ("out_head", "in_head"))
    start = unit(linear(anchor, "anchor_out_head")) @ into[0].T
    return 8.0 * start, 8.0 * torch.einsum("jpe,jke->jpk", out[:-1], into[1:])


def reference(drafter, drafted, vocabulary, blocks, final):
    """The published objective slot by slot in float64: (the head's weighted sum, its weights, cross entropy, penalty, their slots)."""
    p = dict(drafter.lilicorr.named_parameters())
    base = entropy = penalty = torch.zeros((), dtype=torch.float64)
    weights, learnt = 0.0, 0
    for a in range(len(blocks.anchor_A)):
        logits = drafted.hidden_AJD[a] @ vocabulary.head.T
        tokens = logits.topk(4).indices
        before = int(drafted.before_A[a])
        fused = drafter.fc(drafted.features_TF[max(before, 0)])
        context = fused / (fused.square().mean() + SPEC.rms_norm_eps).sqrt() * drafter.hidden_norm.weight
        rows, logprobs = vocabulary.embedding[tokens], logits.log_softmax(-1).gather(1, tokens)
        start, pairs = reference_scores(p, rows, logprobs, drafted.hidden_AJD[a], context, before >= 0)
        inside, previous = True, None
        for j in range(int(blocks.valid_AJ[a].sum())):
            label = blocks.labels_AJ[a, j]
            weight = float(torch.exp(torch.tensor(-j / 2.0)))
            base, weights = base - weight * logits[j].log_softmax(-1)[label], weights + weight
            inside = inside and bool((tokens[j] == label).any())
            if not inside:
                continue
            scores, true = start if j == 0 else pairs[j - 1, previous], int((tokens[j] == label).nonzero())
            entropy, learnt, previous = entropy - scores.log_softmax(-1)[true], learnt + 1, true
            thought = vocabulary.head[tokens[j]] @ final[blocks.anchor_A[a] + j]
            penalty = penalty + (scores.softmax(-1) * (thought[true] - thought).clamp(min=0)).sum()
    return base, weights, entropy, penalty, learnt


@pytest.mark.parametrize("teacher", [True, False])
def test_loss_and_every_gradient_agree_with_float64(teacher):
    """All of the lattice's tensors, the drafter's hidden states, which the lattice teaches too, and the projection of the features."""
    family, row = LiLiCorr(), small_row()
    ((anchor, keep),) = every_anchor(row, 10)
    blocks = build_blocks(row, anchor, keep, J + 1, V - 1, gamma=2.0)
    drafter, vocabulary = family.build(SPEC, torch.float64, "cpu"), Vocabulary(draw(V, D, seed=90), draw(V, D, seed=91), 1.0, None)
    for i, (name, parameter) in enumerate(drafter.named_parameters()):
        parameter.data = draw(*parameter.shape, seed=i) * (0.3 if name.startswith("lilicorr") else 1.0)
    before = torch.where(blocks.anchor_A > blocks.lo_A, blocks.anchor_A - 1, -1).long()
    hidden = (2 * vocabulary.head[blocks.labels_AJ] / D**0.5 + 0.5 * draw(10, J, D, seed=92)).requires_grad_()
    drafted = Drafted(hidden, blocks.tokens_U[:-1], draw(16, 2 * D, seed=93), before)
    final = draw(16, D, seed=94)
    base, weights, entropy, penalty, learnt = reference(drafter, drafted, vocabulary, blocks, final)
    assert 4 < learnt < int(blocks.valid_AJ.sum()) and (before < 0).any(), "the case must have labels in and out of the lattice"
    expected = base + (0.25 * entropy + (0.25 * penalty if teacher else 0)) * (weights / learnt)
    inputs = [hidden, drafter.fc.weight, drafter.hidden_norm.weight, *drafter.lilicorr.parameters()]
    gradients = torch.autograd.grad(expected, inputs)
    for head in ("fused", "checkpoint"):
        config = ObjectiveConfig(head=head)
        result = family.loss(drafter, drafted, vocabulary, blocks, config, final if teacher else None, 0.0)
        torch.testing.assert_close(result.loss_sum, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
        for got, gradient in zip(torch.autograd.grad(result.loss_sum, inputs), gradients, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6)
    assert result.metrics["lattice_loss"][1] == learnt and ("lattice_penalty" in result.metrics) == teacher


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles on CUDA alone")
def test_the_compiled_lattice_agrees_with_the_eager_one():
    """The kernels that a GPU runs: scores and every gradient of the head, whose eager form is compared with float64 above."""
    head = LiLiCorr().build(SPEC, torch.float32, "cuda").lilicorr
    for i, parameter in enumerate(head.parameters()):
        parameter.data = 0.3 * draw(*parameter.shape, seed=i).to("cuda", torch.float32)
    rows, hidden, context = (draw(*shape, seed=i).to("cuda", torch.float32) for i, shape in enumerate(((10, J, 4, D), (10, J, D), (10, D))))
    logprobs = draw(10, J, V, seed=9).log_softmax(-1).topk(4).values.to("cuda", torch.float32)
    inputs = rows, logprobs, hidden, context, torch.arange(10, device="cuda") > 1
    compiled = compile_cache.handle("lattice", head.forward, "cuda", (rows.shape, rows.dtype), recompute=True)
    found = []
    for score in (compiled, head.forward):
        scores = score(*inputs)
        found.append([scores, *torch.autograd.grad(scores.square().sum(), list(head.parameters()))])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


# Files


def test_an_export_is_read_back_to_the_bit(pair, tmp_path):
    check_export(pair, tmp_path)
    folder, masters, plan = tmp_path / "export", pair.learner.master_tensors(), pair.learner.plan
    inner = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert inner["lilicorr_candidate_topk"] == 4 and inner["conv_kernel_size"] == 2 and inner["lilicorr_enabled"] is True
    spec, tensors = registry.load_exported(folder)
    assert (spec.family, spec.options) == ("lilicorr", plan.drafter.options)
    assert tensors.keys() == masters.keys() and all(torch.equal(tensors[name], masters[name]) for name in masters)
    assert registry.check(folder, plan.target).errors == []


@pytest.fixture(scope="module")
def run(tiny_preset, tiny_heldout, tmp_path_factory):
    """A run of six steps by the script itself, without convolutions and with the target's distribution: the run directory."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(tiny_preset, folder, "optim.steps=6", f"validation.path={tiny_heldout}")
    return folder


def train(preset, folder, *overrides):
    family = ["drafter.family=lilicorr", *(f"drafter.{name}={value}" for name, value in SMALL.items())]
    assert train_drafter.main(["--config", str(preset), f"log.dir={folder}", *family, *overrides]) == 0


def test_the_script_trains_it_and_goes_on_from_its_export(run, tiny_preset, tmp_path):
    """Held-out tau with and without the lattice is logged; training that goes on starts with what was exported."""
    steps = [record for record in records(run) if "loss" in record]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert any({"lattice_loss", "lattice_penalty", "tau_plain", "candidate_recall"} <= step.keys() for step in steps)
    assert any({"heldout_tau", "heldout_tau_tree", "heldout_tau_plain"} <= record.keys() for record in records(run))
    train(tiny_preset, tmp_path / "again", f"drafter.init={run / 'export' / 'latest'}", "optim.steps=1", "optim.lr=0")
    one, other = (load_file(folder / "export" / "latest" / "model.safetensors") for folder in (run, tmp_path / "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mode", [["--mode", "chain"], ["--mode", "tree", "--tree-budget", "6"]])
def test_the_script_decodes_with_it_losslessly(run, tiny_target, tmp_path, mode):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count 3"}\n{"prompt": "count 12"}\n')
    given = ["--drafter", run / "export" / "latest", "--target", tiny_target, "--prompts", tmp_path / "prompts.jsonl", "--device", "cpu"]
    evaluate_drafter.main([*map(str, given), "--decode", "--max-new-tokens", "24", "--json", str(tmp_path / "report.json"), *mode])
    assert json.loads((tmp_path / "report.json").read_text())["lossless"] == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter.lattice_candidates=3"], "engines take 1, 2, 4, 8 or 16"),
        (["drafter.lattice_heads=3"], "drafter.lattice_heads=3 does not divide drafter.lattice_width=16"),
        (["drafter.conv_taps=9"], "reach beyond a block of 4"),
        (["objective.loss=kl"], "needs the head's own log-probabilities"),
    ],
)
def test_what_no_engine_could_serve_is_refused(tiny_preset, tmp_path, overrides, words):
    """Engines refuse these only when the finished drafter is loaded, after the training."""
    with pytest.raises(UserError, match=words):
        train(tiny_preset, tmp_path / "run", *overrides)
