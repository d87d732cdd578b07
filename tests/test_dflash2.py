"""DFlash2: what its convolutions and its selector compute, learn from, propose and export.

Lost otherwise: a drafter that trains for days and is served as another one, since no engine says when its numbers differ.
"""

import dataclasses

import numpy as np
import pytest
import torch
from test_drafter import SHAPE, STARTS, A, K, inputs, run
from test_objective import make_row
from test_train_equals_serve import build_pair, check_export, check_replay, drafted_from

from common import config_reader
from common.config import ObjectiveConfig
from common.decoding.speculate import load_drafter
from common.drafter.spec import FULL, SLIDING
from common.families.convolution import convolve
from common.families.registry import FAMILIES, family_options, resolve_spec
from common.families.start import make_drafter
from common.objective.blocks import build_blocks, candidates, every_anchor
from common.target.files import read_spec
from common.target.vocabulary import Vocabulary

FAMILY = FAMILIES["dflash2"]
OPTIONS = dict(conv_group=8, selector_rank=6, selector_candidates=5)


def drafter(target, family="dflash2", seed=0, **changes):
    """A drafter for the tiny target as it starts."""
    section = SHAPE | {"family": family} | (OPTIONS if family == "dflash2" else {}) | changes
    config = config_reader.from_dict({"drafter": section}, family_options()).drafter
    return make_drafter(config, resolve_spec(config, read_spec(target), target), target, "cpu", seed)


def perturbed(model, seed=1):
    """The same drafter with every parameter drawn anew, so that none is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """A drafter trained on the target's own answers by the trainer's own parts."""
    return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), [SLIDING, FULL], family="dflash2", **OPTIONS)


def test_it_starts_as_dflash_bit_by_bit(tiny_target, tmp_path):
    """Else nobody can say whether it learns more, or only started elsewhere: hidden states, loss, proposals, and what the exports draft."""
    models = {family: drafter(tiny_target, family) for family in ("dflash", "dflash2")}
    embeddings, features = inputs(models["dflash"])
    plain, other = (run(model, embeddings, features, [3, 9, 14, 20], STARTS) for model in models.values())
    assert torch.equal(plain, other)
    vocabulary = Vocabulary(*torch.randn(2, 272, 32, generator=torch.Generator().manual_seed(2)), 1.0, None)
    blocks = build_blocks(make_row([10, 14]), np.array([3, 7, 14, 20], np.int32), np.ones(4, bool), K, 271)
    drafted, config = drafted_from(plain, blocks.tokens_U[:-1]), ObjectiveConfig()
    results = [FAMILIES[f].loss(m, drafted, vocabulary, blocks, config, None, progress=0.0) for f, m in models.items()]
    assert torch.equal(results[0].loss_sum, results[1].loss_sum) and torch.equal(results[0].weight_sum, results[1].weight_sum)
    for name, (total, count) in results[0].metrics.items():
        assert torch.equal(total, results[1].metrics[name][0]) and torch.equal(count, results[1].metrics[name][1]), name
    chains = [FAMILIES[f].proposer(m, vocabulary).chain(drafted) for f, m in models.items()]
    assert torch.equal(*chains)
    logits = []
    for family, model in models.items():
        folder, target = tmp_path / family, read_spec(tiny_target)
        FAMILIES[family].export(folder, dict(model.named_parameters()), model.spec, target, "float32", "float32")
        loaded = load_drafter(folder, torch.float32, torch.device("cpu"))
        cache = loaded.new_cache()
        loaded.extend(cache, features[:9], torch.arange(9))
        logits.append(vocabulary.logits(loaded.draft(cache, embeddings[[0, -1, -1, -1]], torch.arange(9, 13))))
    assert torch.equal(*logits)


@pytest.mark.parametrize(("taps", "block_size"), [(1, 4), (2, 4), (3, 4), (4, 4), (2, 1), (3, 2)])
def test_a_convolution_is_the_sum_that_it_stands_for(taps, block_size):
    """Written out row by row in float64, with the gradients of its input, its coefficients and its kernel."""
    generator = torch.Generator().manual_seed(taps)
    x, kernels, base, weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(i < 3)
        for i, shape in enumerate([(3 * block_size, 6), (3 * block_size, taps, 2), (taps, 6), (3 * block_size, 6)])
    )
    rows = []
    for n in range(len(x)):
        reach = range(min(taps, n % block_size + 1))
        rows.append(sum((base[tap] + kernels[n, tap].repeat_interleave(3)) * x[n - tap] for tap in reach))
    fast, slow = convolve(x, kernels, base, block_size), torch.stack(rows)
    torch.testing.assert_close(fast, slow)
    found, expected = (torch.autograd.grad((out * weights).sum(), (x, kernels, base)) for out in (fast, slow))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [{}, {"layer_types": [SLIDING, FULL], "window": 6}])
def test_projecting_the_masked_slots_once_changes_nothing(tiny_target, taps, kind):
    """The sublayers of the first layer get few distinct rows; the twin computes all. Values and every gradient."""
    model, twin = (perturbed(drafter(tiny_target, conv_taps=taps, **kind)) for _ in range(2))
    embeddings, features = inputs(model)
    anchors = [3, 9, 14, 20]
    all_rows = torch.cat([embeddings[[j] + [-1] * (K - 1)] for j in range(A)])
    blocks, projected = twin._blocks, []
    twin._blocks = lambda x, *rest, distinct, predicted: blocks(all_rows, *rest, distinct=False, predicted=predicted)
    model.layers[0].self_attn.qkv_proj.register_forward_hook(lambda module, given, out: projected.append(len(out)))
    fast, slow = (run(m, embeddings, features, anchors, STARTS) for m in (model, twin))
    assert projected == [A * taps + 1 if taps < K else A * K]
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=1e-4)
    weights = torch.randn(fast.shape, generator=torch.Generator().manual_seed(9))
    for hidden in (fast, slow):
        (hidden * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.startswith("candidate_selector"):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-3, msg=name)


def reference_loss(model, hidden_AJD, vocabulary, blocks, config, rise):
    """The loss written out slot by slot from the definition."""
    options, selector = model.spec.options, model.candidate_selector
    total, cap = hidden_AJD.new_zeros(()), vocabulary.softcap
    for a, j in blocks.valid_AJ.nonzero().tolist():
        logits = vocabulary.head @ hidden_AJD[a, j]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        label = int(blocks.labels_AJ[a, j])
        before = int(blocks.labels_AJ[a, j - 1] if j else blocks.tokens_U[a])
        chosen = logits.topk(options.selector_candidates).indices.tolist()
        term = -logits.log_softmax(-1)[label]
        if label not in chosen and options.selector_absent == "put_in":
            chosen[-1] = label
        if label in chosen:
            context = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ hidden_AJD[a, j])
            scores = logits[chosen] + selector.successor_codebook[chosen] @ context
            term = term + options.selector_weight * rise * -scores.log_softmax(-1)[chosen.index(label)]
        total = total + blocks.weights_AJ[a, j].double() * term
    return total


@pytest.mark.parametrize("absent", ["leave_out", "put_in"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("loss", ["ce", "tv"])
def test_loss_and_every_gradient_equal_the_definition(tiny_target, absent, softcap, loss):
    """In float64, for both heads, over chunks; a wrong gradient only learns less, and nobody sees why. `tv` has no gradient by hand."""
    model = perturbed(drafter(tiny_target, selector_absent=absent, selector_weight=0.7, selector_warmup=0.5)).double()
    generator = torch.Generator().manual_seed(3)
    head, final = torch.randn(2, 272, 32, generator=generator, dtype=torch.float64)
    vocabulary = Vocabulary(head, head, 1.0, softcap)
    row = make_row([10, 14])
    anchor, keep = every_anchor(row, 25)[0]
    blocks = build_blocks(row, anchor, keep, K, 271)
    hidden = torch.randn(25, K - 1, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():  # labels among the candidates in about half of the slots
        near = torch.rand(25, K - 1, 1, generator=generator) < 0.5
        hidden += torch.where(near, 0.4 * head[blocks.labels_AJ], 0.0)
    hidden.requires_grad_()
    wanted = [hidden, *model.candidate_selector.parameters()]
    grads, values = [], []
    for kind in ("fused", "checkpoint"):
        config = ObjectiveConfig(head=kind, loss=loss)
        drafted = drafted_from(hidden, blocks.tokens_U[:-1])
        result = FAMILY.loss(model, drafted, vocabulary, blocks, config, final, progress=0.25)
        values.append(result.loss_sum)
        grads.append(torch.autograd.grad(result.loss_sum, wanted))
        recall = (result.metrics["candidate_recall"][0] / result.metrics["candidate_recall"][1]).item()
        assert 0.2 < recall < 0.8
    if loss == "ce":
        values.append(reference_loss(model, hidden, vocabulary, blocks, config, rise=0.5))
        grads.append(torch.autograd.grad(values[-1], wanted))
    for value, gradient in zip(values[1:], grads[1:], strict=True):
        torch.testing.assert_close(values[0], value, atol=1e-9, rtol=1e-9)
        for one, other in zip(grads[0], gradient, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("tree_budget", [None, 12])
def test_heldout_tau_is_the_tau_of_real_decoding(pair, tree_budget):
    """Chain and tree, document by document, through the selector; and every answer is the target's own."""
    assert 1.2 < check_replay(pair, tree_budget) < pair.learner.plan.drafter.block_size


def test_an_export_read_as_the_engines_read_it_is_the_trained_drafter(pair, tmp_path):
    check_export(pair, tmp_path)


def test_the_selector_proposes_what_the_head_alone_would_not(pair):
    """Else both figures in the log are one; and a tree's nodes must be scored given their own parents."""
    proposer, row = pair.learner.proposer, pair.rows[0]
    hidden_AJD = pair.trained_hidden(row)
    drafted = drafted_from(hidden_AJD, torch.from_numpy(row.tokens[candidates(row)]).long())
    chain_AJ = proposer.chain(drafted)
    assert not torch.equal(chain_AJ, proposer.plain.chain(drafted))
    blocks = zip(hidden_AJD, drafted.anchors_A.tolist(), chain_AJ.tolist(), proposer.children(drafted, 9), strict=True)
    for hidden_JD, anchor, chain, children in list(blocks)[::8]:
        parents = [anchor]
        for depth, hidden_D in enumerate(hidden_JD):
            for parent in parents:
                best = scored(pair.learner, hidden_D, parent)
                tokens, logprobs = children(depth, parent)
                assert tokens == [token for _, token in best] and logprobs == pytest.approx([p for p, _ in best], abs=1e-4)
            assert chain[depth] == children(depth, [anchor, *chain][depth])[0][0]
            parents = sorted(tokens)


@torch.no_grad()
def scored(learner, hidden_D, parent):
    """(log-probability, token) of a slot's candidates after a token, best first, by the definition."""
    selector = learner.model.candidate_selector
    logits, tokens = (learner.vocabulary.head @ hidden_D).topk(OPTIONS["selector_candidates"])
    context = selector.predecessor_codebook[parent] * (selector.hidden_projection.weight @ hidden_D)
    scores = logits + selector.successor_codebook[tokens] @ context
    return sorted(zip(scores.log_softmax(-1).tolist(), tokens.tolist(), strict=True), reverse=True)


def test_training_measures_its_own_choices_and_never_the_labels(pair):
    """The training curve's tau is that of the walk through its own candidates; the head's own stands beside it."""
    learner, row = pair.learner, pair.rows[0]
    anchor, keep = every_anchor(row, learner.plan.anchors)[0]
    blocks = learner._blocks(row, anchor, keep)
    with torch.no_grad():
        drafted = learner._draft(pair.packet(row).features, blocks)
        for absent in ("leave_out", "put_in"):
            options = dataclasses.replace(learner.model.spec.options, selector_absent=absent)
            learner.model.spec = dataclasses.replace(learner.model.spec, options=options)
            metrics = FAMILY.loss(learner.model, drafted, learner.vocabulary, blocks, ObjectiveConfig(), None, 1.0).metrics
            for name, proposer in (("tau", learner.proposer), ("tau_plain", learner.proposer.plain)):
                right_AJ = (proposer.chain(drafted) == blocks.labels_AJ) & blocks.valid_AJ
                accepted = int(right_AJ.int().cumprod(1).sum()) + int(keep.sum())
                assert [x.item() for x in metrics[name]] == [accepted, int(keep.sum())], (name, absent)
