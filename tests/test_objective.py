"""The objective: which tokens are learnt, with which weight, and what is reported about it."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_train_equals_serve import drafted_from

from common import compile_cache
from common.config import ObjectiveConfig
from common.data.rows import Row
from common.families.dflash import IndependentSlots
from common.objective import acceptance
from common.objective.block_loss import base_loss
from common.objective.blocks import build_blocks, candidates, default_anchors, draw_anchors, every_anchor
from common.objective.head import largest, slot_values
from common.objective.losses import LOSSES
from common.target.vocabulary import Vocabulary

V, D, MASK = 23, 6, 22


def make_row(lengths, mask=None, row_tokens=None, seed=0):
    """A row of documents of these lengths; `mask` is a string of 0 and 1 over their tokens (default: all supervised)."""
    valid = sum(lengths)
    T = row_tokens or valid
    starts = np.repeat(np.cumsum([0, *lengths]), [*lengths, T - valid]).astype(np.int32)
    loss_mask = np.zeros(T, np.uint8)
    loss_mask[:valid] = 1 if mask is None else [int(c) for c in mask]
    tokens = np.random.default_rng(seed).integers(0, V - 1, T).astype(np.int32)
    return Row(tokens, starts, loss_mask, valid, len(lengths))


def blocks_of(row, anchors, block_size, **options):
    anchor, keep = draw_anchors(row, anchors, seed=0, number=0)
    return build_blocks(row, anchor, keep, block_size, MASK, **options)


def random_vocabulary(softcap=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64)
    return Vocabulary(head, head, 1.0, softcap)


def random_hidden(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def hidden_that_says(tokens_AJ, vocabulary):
    """Hidden states whose best token under an orthonormal head is the given one."""
    return vocabulary.head[tokens_AJ].detach()


# Anchors


def test_anchors_reach_the_first_and_the_last_legal_position_and_no_other():
    """An anchor outside its document's supervised tokens would train on text that is never drafted."""
    row = make_row([6, 5], mask="001110" + "11011", row_tokens=14)
    assert candidates(row).tolist() == [2, 3, 6, 9]
    anchor, keep = draw_anchors(row, 4, seed=0, number=0)
    assert anchor.tolist() == [2, 3, 6, 9] and keep.all()


def test_a_row_without_a_candidate_has_no_weight_and_no_nan():
    """A row of prompts only must not stop or poison a run."""
    row = make_row([1, 1, 4], mask="11" + "0100", row_tokens=8)
    assert every_anchor(row, 3) == []
    blocks = blocks_of(row, 3, 4)
    assert not blocks.keep_A.any() and torch.equal(blocks.lo_A, blocks.anchor_A)
    hidden = random_hidden(3, 3, D)
    result = base_loss(hidden, random_vocabulary(), blocks, ObjectiveConfig())
    result.loss_sum.backward()
    assert result.loss_sum == 0 and result.weight_sum == 0 and not hidden.grad.any()
    assert result.metrics.pop("empty") == (1, 1), "badly masked data must show"
    assert all(count.sum() == 0 for _, count in result.metrics.values())


def test_anchors_are_drawn_by_seed_and_packet_number_alone():
    """Another draw in another mode, or the same draw for every packet, would break resume and waste data."""
    row = make_row([200])
    draw = [draw_anchors(row, 20, seed, number)[0].tolist() for seed, number in ((0, 5), (0, 5), (0, 6), (1, 5))]
    assert draw[0] == draw[1] and draw[0] != draw[2] and draw[0] != draw[3]
    assert all(d == sorted(set(d)) and len(d) == 20 for d in draw)
    counts = np.zeros(199)
    for number in range(400):
        counts[draw_anchors(row, 20, 0, number)[0]] += 1
    assert counts.min() > 15 and counts.max() < 75  # 40 expected, four standard deviations are 24


def test_anchors_are_spread_evenly_over_documents():
    """Drawn over the whole row, long documents get most anchors: measured, the drafter learns less from the same blocks."""
    row = make_row([200, 40, 10, 120])
    counts = np.zeros((30, 4), int)
    for number in range(30):
        anchor, keep = draw_anchors(row, 100, 0, number)
        assert keep.all() and (np.diff(anchor) > 0).all() and set(anchor) <= set(candidates(row))
        counts[number] = [((first <= anchor) & (anchor < end)).sum() for first, end in row.spans()]
    assert (counts[:, 2] == 9).all(), "a short document gives all it has"
    assert (counts[:, [0, 1, 3]] >= 30).all() and (counts[:, [0, 1, 3]] <= 31).all(), "the others share what is left"
    assert len({tuple(c) for c in counts.tolist()}) > 1, "and who gets the odd one is drawn"


def test_every_anchor_predicts_every_candidate_once():
    """Validation that skips or repeats positions would replay numbers that do not exist."""
    row = make_row([9, 2, 7], mask="011111011" + "11" + "1110111", row_tokens=20)
    chunks = every_anchor(row, 4)
    kept = np.concatenate([anchor[keep] for anchor, keep in chunks])
    assert kept.tolist() == candidates(row).tolist() and all(len(anchor) == 4 for anchor, _ in chunks)


@pytest.mark.parametrize(
    ("pack_tokens", "block_size", "expected"), [(3072, 16, 512), (3072, 10, 512), (100, 8, 32), (7, 16, 8), (7, 10, 2)]
)
def test_default_anchors_fill_tiles(pack_tokens, block_size, expected):
    """Blocks that do not fill tiles of 128 queries cannot run on the block-sparse attention."""
    assert default_anchors(pack_tokens, block_size) == expected


# Blocks


def test_labels_stop_at_the_documents_end_and_at_the_first_unsupervised_token():
    """A label beyond either teaches the drafter text that the target never writes there."""
    row = make_row([7, 6], mask="0111011" + "111111", row_tokens=16)
    anchor = np.array([1, 5, 7, 11, 15], np.int32)
    keep = np.array([True, True, True, True, False])
    blocks = build_blocks(row, anchor, keep, 5, MASK)
    expected = ["1100", "1000", "1111", "1000", "0000"]
    assert ["".join(str(int(v)) for v in slots) for slots in blocks.valid_AJ] == expected
    assert blocks.labels_AJ[2].tolist() == row.tokens[8:12].tolist()
    assert blocks.tokens_U.tolist() == [*row.tokens[anchor].tolist(), MASK]
    assert blocks.positions_AK[3].tolist() == [4, 5, 6, 7, 8] and blocks.lo_A[:4].tolist() == [0, 0, 7, 7]
    assert blocks.context_positions_T.tolist() == [*range(7), *range(6), *range(3)]
    torch.testing.assert_close(blocks.weights_AJ[2], torch.tensor(np.exp(-np.arange(4) / 4.0), dtype=torch.float32))


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_documents_shorter_than_a_block(length):
    """Short answers are common; a block may reach over the document's end but never learn from beyond it."""
    row = make_row([length, 9], row_tokens=16)
    blocks = blocks_of(row, 16, 5)
    own = blocks.keep_A & (blocks.anchor_A < length)
    assert own.sum() == length - 1
    assert blocks.valid_AJ[own].sum(1).tolist() == [min(4, length - 1 - a) for a in range(length - 1)]


def test_gamma_follows_the_block_size():
    """The decay that DFlash tuned for its block sizes is the default; a set value wins."""
    row = make_row([40])
    second = {b: blocks_of(row, 1, b).weights_AJ[0, 1].item() for b in (8, 9, 10, 16)}
    assert second == pytest.approx({b: np.exp(-1 / g) for b, g in ((8, 4), (9, 4.5), (10, 5), (16, 7))})
    assert blocks_of(row, 1, 16, gamma=2.0).weights_AJ[0, 1].item() == pytest.approx(np.exp(-0.5))


# Losses


def reference(hidden, vocabulary, blocks, config, final_hidden):
    """The losses and weights of the algorithm's page, slot by slot in float64."""

    def logprobs(h):
        z = vocabulary.head @ h
        return F.log_softmax(z if vocabulary.softcap is None else vocabulary.softcap * torch.tanh(z / vocabulary.softcap), dim=0)

    slots = [(a, k) for a, k in itertools.product(range(hidden.shape[0]), range(1, 1 + hidden.shape[1])) if blocks.valid_AJ[a, k - 1]]
    log_q = {(a, k): logprobs(hidden[a, k - 1]) for a, k in slots}
    p = {(a, k): logprobs(final_hidden[blocks.anchor_A[a] + k - 1]).exp() for a, k in slots}
    nll = {(a, k): -log_q[a, k][blocks.labels_AJ[a, k - 1]] for a, k in slots}
    kl = {s: (p[s] * (p[s].log() - log_q[s])).sum() for s in slots}
    tv = {s: 1 - torch.minimum(p[s], log_q[s].exp()).sum() for s in slots}
    share = {}
    for k in {k for _, k in slots}:
        share[k] = np.exp(-3 * np.mean([1 - tv[s].item() for s in slots if s[1] == k]))
    value = {"ce": nll, "kl": kl, "tv": tv, "lk": {s: share[s[1]] * kl[s] + (1 - share[s[1]]) * tv[s] for s in slots}}[config.loss]
    confidence = {s: (1 - config.alpha) * np.exp(-nll[s].item()) + config.alpha for s in slots}

    def weight(a, j):
        if config.weights == "decay":
            return np.exp(-(j - 1) / config.gamma)
        return sum(np.prod([confidence[a, i] for i in range(1, n + 1)]) for _, n in slots if _ == a and n >= j)

    return sum(weight(*s) * value[s] for s in slots), sum(weight(*s) for s in slots), sum(nll.values())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk"])
def test_loss_and_gradient_equal_the_float64_reference(loss, weights, softcap):
    """Both heads, all losses and weights, any chunk: a wrong gradient trains a worse drafter and nobody sees it."""
    row = make_row([9, 6], mask="111110111" + "111111", row_tokens=18)
    vocabulary, blocks = random_vocabulary(softcap), blocks_of(row, 13, 4, gamma=2.0)
    assert not blocks.keep_A.all()
    hidden, final_hidden = random_hidden(13, 3, D), random_hidden(18, D, seed=3).detach()
    config = ObjectiveConfig(loss=loss, weights=weights, gamma=2.0)
    loss_sum, weight_sum, nll_sum = reference(hidden, vocabulary, blocks, config, final_hidden)
    (gradient,) = torch.autograd.grad(loss_sum * 3, hidden)
    for head, chunk_anchors in itertools.product(("fused", "checkpoint"), (None, 1, 5)):
        config.head = head
        result = base_loss(hidden, vocabulary, blocks, config, final_hidden, chunk_anchors=chunk_anchors)
        (got,) = torch.autograd.grad(result.loss_sum * 3, hidden)
        torch.testing.assert_close(result.loss_sum, loss_sum, check_dtype=False, rtol=1e-6, atol=1e-6)  # weights are float32
        torch.testing.assert_close(result.weight_sum.double(), torch.tensor(weight_sum), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.metrics["nll"][0], nll_sum, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
def test_losses_differentiated_by_autograd_run_compiled(loss, monkeypatch):
    """On a GPU a chunk's values are one compiled kernel: a loss that only the interpreter can differentiate would stop a run there."""
    row = make_row([9, 6], row_tokens=18)
    blocks, vocabulary, hidden, final_hidden = blocks_of(row, 13, 4), random_vocabulary(3.0), random_hidden(13, 3, D), random_hidden(18, D)
    compile_cache.reset()
    gradients = []
    for handle in (compile_cache.handle, functools.partial(compile_cache.handle, backend="aot_eager")):
        monkeypatch.setattr(compile_cache, "handle", handle)
        result = base_loss(hidden, vocabulary, blocks, ObjectiveConfig(loss=loss), final_hidden.detach())
        gradients.append(torch.autograd.grad(result.loss_sum, hidden)[0])
    assert torch.equal(*gradients) and compile_cache.stats()["compiles"]
    compile_cache.reset()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_on_the_logits_is_learnt_with_them(softcap):
    """A family's own part of the logits must get the gradient of all slots with their weights, in any chunks and with either head."""
    row = make_row([9, 6], mask="111110111" + "111111", row_tokens=18)
    vocabulary, blocks, hidden = random_vocabulary(softcap), blocks_of(row, 13, 4, gamma=2.0), random_hidden(13, 3, D)
    table = random_hidden(V, V, seed=5)
    before_AJ = torch.cat((blocks.tokens_U[:-1, None], blocks.labels_AJ[:, :-1]), dim=1)
    log_q = (vocabulary.logits(hidden) + table[before_AJ]).log_softmax(-1)
    nll_AJ = -log_q.gather(-1, blocks.labels_AJ[..., None])[..., 0]
    expected = (nll_AJ * blocks.weights_AJ).sum()
    gradients = torch.autograd.grad(expected, (hidden, table))
    for head, chunk_anchors in itertools.product(("fused", "checkpoint"), (None, 1, 5)):
        bias = lambda span: table[before_AJ[span].flatten()]  # noqa: E731
        result = base_loss(hidden, vocabulary, blocks, ObjectiveConfig(head=head), chunk_anchors=chunk_anchors, bias=bias)
        torch.testing.assert_close(result.loss_sum, expected)
        for got, gradient in zip(torch.autograd.grad(result.loss_sum, (hidden, table)), gradients, strict=True):
            torch.testing.assert_close(got, gradient)
        hit_AJ = (log_q.argmax(-1) == blocks.labels_AJ) & blocks.valid_AJ
        assert torch.equal(result.metrics["accuracy"][0], hit_AJ.sum(0)), "what is measured is what the family proposes"


def test_the_fused_head_in_bfloat16_stays_near_float64():
    """The softmax is taken in float32 and the gradient kept in bfloat16: rounding, not bias."""
    row = make_row([30])
    blocks, vocabulary, hidden = blocks_of(row, 29, 4), random_vocabulary(), random_hidden(29, 3, D)
    half = Vocabulary(*(vocabulary.head.bfloat16(),) * 2, 1.0, None)
    hidden_half = hidden.detach().bfloat16().requires_grad_()
    exact = base_loss(hidden, vocabulary, blocks, ObjectiveConfig())
    rounded = base_loss(hidden_half, half, blocks, ObjectiveConfig())
    exact.loss_sum.backward(), rounded.loss_sum.backward()
    assert rounded.loss_sum.dtype == torch.float32 and hidden_half.grad.dtype == torch.bfloat16
    assert abs(rounded.loss_sum / exact.loss_sum - 1) < 5e-3
    assert (hidden_half.grad - hidden.grad).norm() / hidden.grad.norm() < 2e-2


def test_packed_equals_unpacked():
    """Documents packed into a row must be learnt as if each were alone."""
    packed = make_row([8, 5], mask="01111111" + "11110", row_tokens=16)
    vocabulary, config = random_vocabulary(), ObjectiveConfig(weights="dpace")
    hidden = random_hidden(16, 3, D)
    whole_blocks = blocks_of(packed, 16, 4)
    whole = base_loss(hidden, vocabulary, whole_blocks, config)
    parts, used = [], 0
    for first, stop in packed.spans():
        alone = Row(packed.tokens[first:stop], np.zeros(stop - first, np.int32), packed.loss_mask[first:stop], stop - first, 1)
        anchors = len(candidates(alone))
        blocks = blocks_of(alone, anchors, 4)
        for name in ("positions_AK", "labels_AJ", "valid_AJ"):
            assert torch.equal(getattr(blocks, name), getattr(whole_blocks, name)[used : used + anchors]), name
        assert torch.equal(blocks.tokens_U[:-1], whole_blocks.tokens_U[used : used + anchors])
        parts.append(base_loss(hidden[used : used + anchors], vocabulary, blocks, config))
        used += anchors
    assert used == whole_blocks.keep_A.sum()
    torch.testing.assert_close(whole.loss_sum, sum(p.loss_sum for p in parts))
    torch.testing.assert_close(whole.weight_sum, sum(p.weight_sum for p in parts))
    whole_gradient, parts_gradient = (torch.autograd.grad(x, hidden)[0] for x in (whole.loss_sum, sum(p.loss_sum for p in parts)))
    torch.testing.assert_close(whole_gradient, parts_gradient)


def test_a_non_finite_hidden_state_reaches_the_loss_and_the_gradient():
    """The optimiser skips a bad step only if it can see it."""
    hidden = random_hidden(9, 3, D)
    with torch.no_grad():
        hidden[3, 1, 0] = torch.nan
    for head in ("fused", "checkpoint"):
        result = base_loss(hidden, random_vocabulary(), blocks_of(make_row([10]), 9, 4), ObjectiveConfig(head=head))
        assert result.loss_sum.isnan() and torch.autograd.grad(result.loss_sum, hidden)[0].isnan().any()


# Acceptance


def test_metrics_of_a_hand_written_example():
    """Two blocks, hits known slot by slot: accuracy, unbroken acceptance and tau as written on paper."""
    vocabulary = Vocabulary(torch.eye(V), torch.eye(V), 1.0, None)
    row = make_row([9])
    blocks = build_blocks(row, np.array([0, 6], np.int32), np.array([True, True]), 4, MASK)  # labels 1-3; 7, 8
    says = blocks.labels_AJ.clone()
    says[0, 1] = MASK  # hits 1, 0, 1 and 1, 1
    result = base_loss(hidden_that_says(says, vocabulary), vocabulary, blocks, ObjectiveConfig())
    assert [t.tolist() for t in result.metrics["accuracy"]] == [[2, 1, 1], [2, 2, 1]]
    assert [t.tolist() for t in result.metrics["accepted"]] == [[2, 1, 0], [2, 2, 1]]
    assert [t.item() for t in result.metrics["tau"]] == [(1 + 1) + (1 + 2), 2]
    assert accepted_by_chain(hidden_that_says(says, vocabulary), vocabulary, blocks).tolist() == [1, 2]


def labels_or_none(blocks):
    """Labels of the predicted slots, -1 where a slot has none: int64 [A, J]."""
    return blocks.labels_AJ.masked_fill(~blocks.valid_AJ, -1)


def accepted_by_chain(hidden_AJD, vocabulary, blocks):
    """How many tokens of each kept anchor's greedy proposal agree with the labels before the first that does not: int64 [N]."""
    proposed_AJ = IndependentSlots(vocabulary).chain(drafted_from(hidden_AJD, blocks.tokens_U[:-1]))
    return (proposed_AJ == labels_or_none(blocks)).int().cumprod(1).sum(1)[blocks.keep_A]


def decode_greedily(row, says, block_size):
    """Speculative decoding by hand: the target's tokens are the row's, the drafter proposes says[position][slot]."""
    emitted, verifications = [0] * row.documents, [0] * row.documents
    for document, (first, stop) in enumerate(row.spans()):
        at = first
        while at < stop:
            if not row.loss_mask[at]:
                at += 1
                continue
            end = at
            while end < stop and row.loss_mask[end]:
                end += 1
            answer = [at]  # the prefill's token
            while answer[-1] < end - 1:
                bonus, n = answer[-1], 0
                while n < block_size - 1 and bonus + n + 1 < end and says[bonus][n] == row.tokens[bonus + n + 1]:
                    n += 1
                new = list(range(bonus + 1, min(bonus + n + 2, end)))
                answer, verifications[document] = answer + new, verifications[document] + 1
                emitted[document] += len(new)
            at = end
    return emitted, verifications


@pytest.mark.parametrize("seed", range(5))
def test_the_replay_equals_greedy_speculative_decoding(seed):
    """Held-out tau is what the best checkpoint is chosen by: it must be the number that decoding gives."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 30, 3, 25]
    row = make_row(lengths, mask="".join(str(int(c)) for c in rng.random(sum(lengths)) < 0.9), row_tokens=64, seed=seed)
    K, vocabulary = 5, Vocabulary(torch.eye(V), torch.eye(V), 1.0, None)
    says, accepted = {}, []
    for anchor, keep in every_anchor(row, 7):
        blocks = build_blocks(row, anchor, keep, K, MASK)
        index = np.minimum(anchor[:, None] + np.arange(1, K), 63)
        proposal = torch.from_numpy(np.where(rng.random((7, K - 1)) < 0.7, row.tokens[index], MASK))
        says |= {int(a): p.tolist() for a, p, kept in zip(anchor, proposal, keep, strict=True) if kept}
        accepted += accepted_by_chain(hidden_that_says(proposal, vocabulary), vocabulary, blocks).tolist()
    emitted, verifications = acceptance.replay(accepted.__getitem__, row)
    assert (emitted.tolist(), verifications.tolist()) == decode_greedily(row, says, K)


# Trees


def random_children(slots, width, seed, markov):
    """A random tree over `width` tokens below the root `width`; `markov` lets log-probabilities depend on the token before."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(slots, width + 1, width, generator=generator, dtype=torch.float64).log_softmax(-1)
    if not markov:
        logprobs[:] = logprobs[:, :1]
    best = logprobs.sort(-1, descending=True)
    return lambda depth, parent: (best.indices[depth, parent].tolist(), best.values[depth, parent].tolist())


def worth(children, root, path):
    """Log-probability of a path of tokens below the root."""
    pairs = [(*children(depth, parent), token) for depth, (parent, token) in enumerate(itertools.pairwise((root, *path)))]
    return sum(logprobs[tokens.index(token)] for tokens, logprobs, token in pairs)


def paths_of(nodes):
    """The tokens from the root to each node."""
    paths = []
    for parent, depth, token in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(paths[-1]) == depth
    return paths


@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("budget", [1, 4, 9, 40])
def test_the_tree_is_the_best_of_all_prefixes(budget, markov):
    """Fewer probable nodes than possible would cost acceptance for the same verification."""
    children = random_children(slots=3, width=3, seed=budget, markov=markov)
    prefixes = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    best = sorted((worth(children, 3, p) for p in prefixes), reverse=True)[:budget]
    paths = paths_of(acceptance.build_tree(children, 3, 3, budget))
    assert len(set(paths)) == len(paths) == min(budget, len(prefixes))
    assert [worth(children, 3, p) for p in paths] == pytest.approx(best)


def test_a_tree_along_rank_zero_is_the_chain():
    """Chain and tree must agree where they mean the same."""
    row, vocabulary = make_row([12, 7]), random_vocabulary()
    anchor, keep = every_anchor(row, 32)[0]
    blocks = build_blocks(row, anchor, keep, 4, MASK)
    right = torch.rand(blocks.labels_AJ.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    hidden = hidden_that_says(torch.where(right, blocks.labels_AJ, 1), vocabulary).double()
    proposer, anchors_A = IndependentSlots(vocabulary), blocks.tokens_U[:-1]
    drafted = drafted_from(hidden, anchors_A)
    chain_AJ, children = proposer.chain(drafted), proposer.children(drafted, width=1)
    for block, chain in zip(children, chain_AJ.tolist(), strict=True):
        assert acceptance.build_tree(block, MASK, 3, 5) == [(i - 1, i + 1, token) for i, token in enumerate(chain)]
    accepted_N, kept = accepted_by_chain(hidden, vocabulary, blocks), int(keep.sum())
    replay = acceptance.Replay(accepted_N.numpy(), anchors_A[:kept].numpy(), labels_or_none(blocks)[:kept].numpy(), children[:kept])
    assert accepted_N.any() and [a.tolist() for a in replay.chain(row)] == [a.tolist() for a in replay.tree(row, budget=3)]


@pytest.mark.parametrize("markov", [False, True])
def test_tree_acceptance_is_the_longest_label_prefix_in_the_tree(markov):
    """Counted against the set of all nodes' paths, over many random trees; token 5 is in no tree."""
    for budget in (1, 3, 8, 20):
        children = random_children(slots=4, width=5, seed=budget, markov=markov)
        paths = paths_of(acceptance.build_tree(children, 5, 4, budget))
        for labels in itertools.product(range(6), repeat=4):
            expected = max((n for n in range(1, 5) if labels[:n] in paths), default=0)
            numbers = acceptance.label_numbers(children, 5, labels, budget)
            assert len(numbers) == expected and [paths[n] for n in numbers] == [labels[: n + 1] for n in range(expected)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk"])
def test_the_cuda_kernels_equal_the_plain_twin(loss, dtype):
    """The fast head on the GPU against the slow twin in float64, ties and odd vocabularies included.

    Total variation has a kink where drafter and target agree, and rounding decides on which side a token falls: there the twin rounds, too.
    """
    generator, kinked = torch.Generator().manual_seed(0), loss in ("tv", "lk")
    exact = dtype if kinked else torch.float64
    tolerance = (2e-3 if kinked else 1e-4) if dtype == torch.float32 else 3e-2
    for rows, softcap in itertools.product((1000, 33024), (None, 5.0)):
        head, final_hidden = (torch.randn(n, 64, generator=generator).mul_(0.3).to(dtype).cuda() for n in (rows, 300))
        row = make_row([100, 150], row_tokens=300)
        blocks = blocks_of(row, 40, 8).to("cuda")
        vocabulary, wide = Vocabulary(head, head, 1.0, softcap), Vocabulary(head.to(exact), head.to(exact), 1.0, softcap)
        hidden = torch.randn(40, 7, 64, generator=generator).to(dtype).cuda().requires_grad_()
        exact_hidden = hidden.detach().to(exact).requires_grad_()
        fast = base_loss(hidden, vocabulary, blocks, ObjectiveConfig(loss=loss), final_hidden, chunk_anchors=16)
        slow = base_loss(exact_hidden, wide, blocks, ObjectiveConfig(loss=loss, head="checkpoint"), final_hidden.to(exact))
        fast.loss_sum.backward(), slow.loss_sum.backward()
        assert abs(fast.loss_sum / slow.loss_sum - 1) < tolerance
        assert (hidden.grad - exact_hidden.grad).norm() / exact_hidden.grad.norm() < tolerance
        logits = (torch.randn(64, rows, generator=generator) * 3).bfloat16().cuda()  # coarse: ties for the largest
        labels = logits.argmax(-1)
        if loss == "ce":
            from common.objective.head_kernel import cross_entropy_

            _, _, hit = slot_values(logits, labels, None, LOSSES["ce"], softcap)
            assert torch.equal(cross_entropy_(logits.clone(), labels, softcap)[1], hit)


@pytest.mark.parametrize(("rows", "count"), [(23, 5), (2048 + 77, 3), (128 * 70, 16)])
def test_the_largest_logits_are_those_of_topk(rows, count):
    """A token that the search by tiles overlooks could never be a candidate, and nobody would miss it. The last tile may be cut."""
    logits = torch.randn(50, rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).requires_grad_()
    logits.data[:7, -1] = logits.data[7:14, 0] = 9.0
    (values, tokens), (expected, at) = largest(logits, count), logits.topk(count)
    assert torch.equal(values, expected) and torch.equal(tokens, at)
    weights = torch.rand_like(values)
    one, other = (torch.autograd.grad((x * weights).sum(), logits)[0] for x in (values, expected))
    assert torch.equal(one, other)
