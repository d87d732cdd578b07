"""DFlash2: what its convolutions and its selector compute, learn from, propose and export.

Lost otherwise: a drafter that trains for days and is served as another one, since no engine says when its numbers differ.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import SHAPE, STARTS, A, K, inputs, run
from test_objective import make_row
from test_train_equals_serve import build_pair, check_export, check_replay, drafted_from, engine

from benchmarks import family_step
from benchmarks.drafter_step import random_row
from common import config_reader
from common.config import ObjectiveConfig
from common.decoding.speculate import load_drafter
from common.drafter.block_mask import MaskSpec, packet_mask
from common.drafter.spec import FULL, SLIDING
from common.errors import UserError
from common.families.convolution import convolve
from common.families.registry import FAMILIES, check, family_options, resolve_spec
from common.families.start import make_drafter
from common.objective.blocks import build_blocks, candidates, draw_anchors, every_anchor
from common.target.files import read_json, read_spec
from common.target.vocabulary import Vocabulary
from common.training.optim import Optimizer

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


def published(pair, folder, **changes):
    """The trained drafter as another trainer publishes it: bfloat16, all layers sliding, none causal; `changes` to its config.json."""
    learner, plan = pair.learner, pair.learner.plan
    spec = dataclasses.replace(plan.drafter, layer_types=(SLIDING, SLIDING), window=9, sliding_causal=False)
    FAMILY.export(folder, learner.master_tensors(), spec, plan.target, "float32", "float32")
    config = read_json(folder / "config.json")
    assert config["is_causal"] is False and config["dflash_config"]["selector_top_k"] == 5
    for key in ("block_size", "num_target_layers"):  # what published configs leave out or keep elsewhere
        config.pop(key)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def speculators(pair, folder):
    """The same drafter in the speculators format: layers counted from the embedding, the target's own tensors beside the drafter's."""
    config = read_json(published(pair, folder) / "config.json")
    inner, weights = config.pop("dflash_config"), load_file(folder / "model.safetensors")
    config.pop("is_causal")
    form = {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "aux_hidden_state_layer_ids": [tap + 1 for tap in inner["target_layer_ids"]],
        "sliding_window_non_causal": True,
        "draft_vocab_size": config["vocab_size"],
        "transformer_layer_config": {k: v for k, v in config.items() if k not in ("architectures", "dtype")},
        **{
            key: inner[key]
            for key in ("mask_token_id", "block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        },
    }
    (folder / "config.json").write_text(json.dumps(form))
    extra = {name: torch.zeros(272, 32) for name in ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")}
    save_file(weights | extra | {"verifier_norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", [published, speculators])
@pytest.mark.filterwarnings("ignore:.*the target's own are used")
def test_a_published_drafter_is_read_drafts_and_is_trained_further(pair, tiny_target, tmp_path, form):
    """All layers sliding and not causal, taps and sizes where that trainer keeps them; the reference reads the same folder."""
    folder = form(pair, tmp_path / "published")
    report = check(folder, read_spec(tiny_target))
    assert report.errors == [] and any("VLLM_USE_V2" in note for note in report.notes["vLLM"])
    loaded, row = load_drafter(folder, torch.float32, torch.device("cpu")), pair.rows[0]
    spec = loaded.spec
    assert (spec.taps, spec.block_size, spec.sliding_causal, spec.options.selector_rank) == ((0, 2), 4, False, 6)
    features, anchor = pair.packet(row).features, int(candidates(row)[6])
    first = int(row.document_start[anchor])
    cache = loaded.new_cache()
    loaded.extend(cache, features[first:anchor], torch.arange(anchor - first))
    block = pair.learner.vocabulary.embed(torch.tensor([int(row.tokens[anchor])] + [spec.mask_token_id] * (K - 1)))
    drafted = loaded.draft(cache, block, torch.arange(anchor - first, anchor - first + K))
    reference = published(pair, tmp_path / "reference")
    torch.testing.assert_close(drafted, engine(reference, features[first:anchor], block), atol=1e-4, rtol=1e-4)

    again = drafter(tiny_target, init=str(folder))
    assert again.spec.target_layers == 4 and again.spec.layer_types == (SLIDING, SLIDING)
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, again.get_parameter(name)), name
    starts = row.document_start
    mask = packet_mask(MaskSpec(len(starts), 1, K), np.array([anchor], np.int32), np.array([first], np.int32), np.ones(1, bool), 9)
    positions = torch.arange(anchor - first, anchor - first + K)[None]
    trained = again(block[[0, -1]], positions, features, torch.from_numpy(row.positions()), mask)
    torch.testing.assert_close(trained[0], drafted[1:], atol=1e-4, rtol=1e-4)
    exported = FAMILY.export(tmp_path / "again", dict(again.named_parameters()), again.spec, read_spec(tiny_target), "float32", "float32")
    assert check(exported, read_spec(tiny_target)).errors == [] and read_json(exported / "config.json")["is_causal"] is False


def test_logits_that_engines_would_scale_otherwise_are_found(pair, tiny_target, tmp_path):
    """The selector's scores are added to the logits: on another scale it chooses other tokens, and only acceptance would tell."""
    inner = read_json(published(pair, tmp_path / "published") / "config.json")["dflash_config"]
    folder = published(pair, tmp_path / "published", dflash_config=inner | {"output_multiplier": 0.5})
    (error,) = check(folder, read_spec(tiny_target)).errors
    assert "output_multiplier=0.5, but the target's is 1.0" in error


def test_a_plain_drafter_starts_one_with_a_selector(tiny_target, tmp_path):
    """What was learnt by DFlash is kept, and the new part starts as from scratch: so it drafts and proposes as before."""
    plain = perturbed(drafter(tiny_target, "dflash"))
    folder = FAMILIES["dflash"].export(
        tmp_path / "plain", dict(plain.named_parameters()), plain.spec, read_spec(tiny_target), "float32", "float32"
    )
    started = drafter(tiny_target, init=str(folder))
    embeddings, features = inputs(plain)
    assert torch.equal(*(run(m, embeddings, features, [3, 9, 14, 20], STARTS) for m in (plain, started)))
    assert started.candidate_selector.predecessor_codebook.any() and not started.candidate_selector.successor_codebook.any()
    with pytest.raises(UserError, match=r"drafter\.family=dflash but .* has dflash2; write that"):
        other = FAMILY.export(
            tmp_path / "other", dict(started.named_parameters()), started.spec, read_spec(tiny_target), "float32", "float32"
        )
        drafter(tiny_target, "dflash", init=str(other))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_group": 5}, "conv_group=5 does not divide the hidden size 32; use one of"),
        ({"conv_taps": 5}, "conv_taps=5 reach beyond a block of 4"),
        ({"selector_candidates": 300}, "selector_candidates=300 are more than the target's vocabulary of 272"),
    ],
)
def test_settings_that_no_engine_could_serve_are_refused(tiny_target, changes, words):
    with pytest.raises(UserError, match=words):
        drafter(tiny_target, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dflash_config": {}}, "lacks 'conv_kernel_size'"),
        ({"is_causal": "no"}, "is_causal='no' must be true or false"),
        ({"is_causal": True, "layer_types": [SLIDING, FULL]}, "is_causal=true makes its full_attention layers causal"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3' is not known; known: dflash"),
        ({"speculators_model_type": "dflash2"}, "lacks transformer_layer_config or aux_hidden_state_layer_ids"),
    ],
)
def test_a_folder_that_would_be_misread_is_refused(pair, tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        load_drafter(published(pair, tmp_path / "published", **changes), torch.float32, torch.device("cpu"))


def test_muon_leaves_tables_and_kernels_to_adamw(pair):
    """An orthogonal codebook would move every token's vector at every step, those of tokens that did not occur, too."""
    learner = pair.learner
    config = dataclasses.replace(learner.plan.config.optim, name="muon", weight_decay=0.5, lr=1e-2, schedule="constant")
    model = drafter(pair.folder)
    optimizer = Optimizer(model.named_parameters(), config, steps=10, is_matrix=FAMILY.is_matrix)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.candidate_selector.predecessor_codebook.grad[7] = 1.0
    model.layers[0].mlp_conv.kernel_projection.weight.grad.normal_()
    optimizer.accumulate()
    optimizer.step(torch.tensor(1.0))
    moved = {name: (before[name] != p).any(-1) for name, p in model.named_parameters() if "codebook" in name or "base_kernel" in name}
    assert [name for name, rows in moved.items() if rows.any()] == ["candidate_selector.predecessor_codebook"]
    assert moved["candidate_selector.predecessor_codebook"].nonzero().flatten().tolist() == [7]
    assert not torch.equal(model.layers[0].mlp_conv.kernel_projection.weight, before["layers.0.mlp_conv.kernel_projection.weight"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles on CUDA alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_compiled_step_equals_the_eager_twin(dtype):
    """Convolutions as inductor fuses them, candidates by the fused head: loss and every gradient, without one wait for the device."""
    spec = family_step.spec_of(
        "dflash2", dataclasses.replace(family_step.TINY, hidden_size=256, heads=8, head_dim=64, intermediate_size=512)
    )
    spec = dataclasses.replace(spec, vocab_size=4096, block_size=16, layer_types=(FULL, SLIDING), window=80, sliding_causal=False)
    device, tokens = torch.device("cuda"), 256
    fast = family_step.FamilyStep(spec, dtype, device, tokens)
    twin = FAMILY.build(spec, torch.float32, device)
    with torch.no_grad():
        for (name, parameter), other in zip(fast.model.named_parameters(), twin.parameters(), strict=True):
            parameter.add_(1.0) if name.endswith("base_kernel") else None
            other.copy_(parameter)
    row = random_row(np.random.default_rng(0), tokens, 3, spec.vocab_size, even=False)
    anchor, keep = draw_anchors(row, 64, seed=0, number=0)
    blocks = build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, window=spec.window).to(device)
    fast(blocks)  # compiles
    fast.model.zero_grad(set_to_none=True)
    torch.cuda.set_sync_debug_mode("error")
    result = fast(blocks)
    torch.cuda.set_sync_debug_mode("default")

    wide = Vocabulary(fast.vocabulary.embedding.float(), fast.vocabulary.head.float(), 1.0, None)
    plain = dataclasses.replace(blocks, mask=blocks.mask._replace(full_tiles=None, sliding_tiles=None))
    hidden = twin(wide.embed(plain.tokens_U), plain.positions_AK, fast.features.float(), plain.context_positions_T, plain.mask)
    slow = FAMILY.loss(twin, drafted_from(hidden, plain.tokens_U[:-1]), wide, plain, ObjectiveConfig(head="checkpoint"), None, 0.5)
    slow.loss_sum.backward()
    tolerance = 2e-3 if dtype == torch.float32 else 6e-2  # in half precision some slots have other candidates
    assert abs(result.loss_sum.item() / slow.loss_sum.item() - 1) < tolerance
    for (name, one), other in zip(fast.model.named_parameters(), twin.parameters(), strict=True):
        if not name.startswith("candidate_selector") or dtype == torch.float32:
            assert (one.grad - other.grad).norm() / other.grad.norm() < tolerance, name
