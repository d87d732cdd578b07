"""Speculative decoding must not change a single token of what the target writes: whoever proposes, and wherever the answer ends.

The tiny targets run in float32, where plain and speculative decoding agree token by token.
"""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers

from common.decoding import sampling
from common.decoding.fast import FastDecoder
from common.decoding.speculate import (
    Answer,
    BlockDrafter,
    Chooser,
    DraftModel,
    Proposal,
    accepted_path,
    decode,
    first_difference,
    speculate,
)
from common.decoding.static import StaticTarget, fuse_norms
from common.decoding.target import DecodingTarget, keep_rows, new_cache, tree_mask
from common.errors import UserError
from common.target.vocabulary import Vocabulary

V, BLOCK, ANSWER = 40, 6, 26
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
FAMILIES = {
    "qwen3": ("Qwen3", {}),
    "qwen3_tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen2_mixed_windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "llama": ("Llama", {}),
    "mistral_window": ("Mistral", dict(sliding_window=9)),
    "gemma2_window": ("Gemma2", dict(sliding_window=8, query_pre_attn_scalar=8)),
    "gemma3_window": ("Gemma3Text", dict(sliding_window=8, query_pre_attn_scalar=8)),
}
PROMPT = [3, 17, 5, 5, 9, 30, 2, 11, 25, 8, 1]


def build(name, dtype=torch.float32, **changes):
    family, extra = FAMILIES[name]
    model_name = family.replace("Text", "") + "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, family + "Config")(**SHAPE | extra | changes)
        return DecodingTarget(getattr(transformers, model_name)(config).to(dtype).eval(), taps=[1, 2])


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return build(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


def plain(target, prompt=PROMPT, stop=(), limit=ANSWER):
    return decode(target, prompt, stop, limit, Chooser()).tokens


class Scripted:
    """Proposes what `text` holds at each slot, or a wrong token in the slots of `wrong`; a tree adds wrong siblings and cousins."""

    def __init__(self, text, wrong=(), tree=False, block=BLOCK):
        self.text, self.wrong, self.tree, self.slots = text, set(wrong), tree, range(1, block)

    def begin(self):
        self.seen = 0

    def extend(self, features, start):
        assert start == self.seen, "features must arrive once, in order"
        self.seen += len(features)

    def propose(self, token, position):
        assert position == self.seen, "the known token's own features are not known yet"
        truth = [self.text[position + k] if position + k < len(self.text) else 0 for k in self.slots]
        tokens = [(t + 1) % V if k in self.wrong else t for k, t in zip(self.slots, truth, strict=True)]
        parents = list(range(len(tokens)))
        if self.tree:  # under every node of the main line a wrong sibling, with the right token below it
            decoys = [((t + 2) % V, row) for row, t in enumerate(tokens)]
            tokens, parents = tokens + [t for t, _ in decoys], parents + [row for _, row in decoys]
            tokens, parents = tokens + truth[1:], parents + [len(truth) + 1 + row for row in range(len(truth) - 1)]
        return Proposal(tokens, parents)


class Babbler(Scripted):
    """Random tokens in a random tree."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, token, position):
        tokens = torch.randint(V, (12,), generator=self.generator).tolist()
        return Proposal(tokens, [int(torch.randint(row + 1, (1,), generator=self.generator)) for row in range(12)])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_output_is_the_targets_own_whoever_proposes(target, tree):
    """Lost otherwise: losslessness. A wrong mask, position or a cache row too many changes the answer silently."""
    expected = plain(target)
    for wrong in [(), *[(k,) for k in range(1, BLOCK)], range(1, BLOCK)]:
        answer = speculate(target, Scripted(PROMPT + expected, wrong, tree), PROMPT, (), ANSWER, Chooser())
        assert answer.tokens == expected, f"wrong slots {wrong}"
        reach = min(wrong, default=BLOCK) - 1
        assert all(n == reach for n in answer.accepted[:-1]), f"the first wrong slot is {reach + 1}, accepted {answer.accepted}"
        assert sum(answer.accepted) + len(answer.accepted) + 1 == len(expected)


def test_output_is_the_targets_own_under_random_trees(target):
    """Lost otherwise: losslessness of trees whose accepted path jumps over cache rows."""
    for seed in range(2):
        assert speculate(target, Babbler(seed), PROMPT, (), ANSWER, Chooser()).tokens == plain(target)


def test_plain_decoding_in_fixed_shapes_is_plain_decoding(target):
    """Lost otherwise: the speed that everything is compared with, in families of windows, caps and tied heads; prompts of chunks, too."""
    fast = FastDecoder(target, None)
    for prompt in (PROMPT, PROMPT * 12):
        assert fast.answer(prompt, (), ANSWER).tokens == plain(target, prompt)
    free = plain(target)
    assert fast.answer(PROMPT, {free[4]}, ANSWER).tokens == free[: free.index(free[4]) + 1]


def test_rows_in_fixed_shapes_are_rows_behind_a_growing_cache(target):
    """Lost otherwise: trees verified behind the wrong mask. Stale rows of an earlier verification lie behind the context."""
    static, cache, parents = StaticTarget(target, 64), new_cache(), [0, 0, 1, 1, 2, 5]
    ancestors = tree_mask(parents, 0)
    depth, count = torch.tensor([0, 1, 1, 2, 2, 2, 3]), len(parents) + 1
    for start, rows in ((0, PROMPT), (len(PROMPT), [5, 6, 7, 8, 9, 10, 11])):
        chain = start == 0
        R = torch.arange(len(rows))
        inputs = (R, R[:, None] >= R) if chain else (depth, ancestors)
        logits, features = static.forward(torch.tensor(rows), torch.tensor([start]), *inputs)
        expected, expected_features = target.forward(rows, start, cache, None if chain else parents)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features, expected_features, atol=1e-4, rtol=1e-4)
    keep_rows(cache, len(PROMPT), [0, 2, 5, 6])  # the path of root, second child, its child and that one's
    static.cache.move(len(PROMPT) + torch.tensor([0, 2, 5, 6]), len(PROMPT) + torch.arange(4))
    after = len(PROMPT) + 4
    logits, _ = static.forward(torch.tensor([3]), torch.tensor([after]), torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(logits, target.forward([3], after, cache)[0], atol=1e-4, rtol=1e-4)
    assert count < static.capacity


def test_norms_are_fused_only_where_they_are_the_same():
    """Lost otherwise: right answers, where a family's norm is another (Gemma's weight counts from one)."""
    for name, good in (("qwen3", True), ("gemma2_window", False)):
        model = build(name).model
        ids = torch.tensor([PROMPT])
        for norm in (m for m in model.modules() if type(m).__name__.endswith("RMSNorm")):
            norm.weight.data.uniform_(0.5, 1.5)
        before = model(ids).logits
        assert bool(fuse_norms(model)) == good
        torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_plain_decoding_is_generates(target):
    """Lost otherwise: the reference itself. Plain decoding must be what transformers' own generate writes."""
    expected = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=ANSWER, do_sample=False)[0, len(PROMPT) :].tolist()
    assert plain(target) == expected


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_answer_ends_exactly_at_the_stop_token(qwen3, tree):
    """Lost otherwise: chats that run on past their end, or lose their last words."""
    free = plain(qwen3)
    for index in range(12):  # with blocks of 6: as first token, inside a block, at its end, as the target's own token
        stop = {free[index], V + 5}
        expected = free[: free.index(free[index]) + 1]
        assert plain(qwen3, stop=stop) == expected
        answer = speculate(qwen3, Scripted(PROMPT + free, tree=tree), PROMPT, stop, ANSWER, Chooser())
        assert answer.tokens == expected
        assert sum(answer.accepted) + len(answer.accepted) + 1 == len(expected)


def test_answer_stops_at_the_length_limit_in_mid_block(qwen3):
    """Lost otherwise: answers longer than the caller allowed, and a tau that counts tokens nobody got."""
    free = plain(qwen3)
    for limit in range(1, 15):
        answer = speculate(qwen3, Scripted(PROMPT + free), PROMPT, (), limit, Chooser())
        assert answer.tokens == free[:limit]
        assert sum(answer.accepted) + len(answer.accepted) + 1 == limit


@pytest.mark.parametrize(
    ("limit", "wrong", "counts"),
    [(1 + 3, (), (2, 3, 3)), (1 + 6, (), (5, 5, 6)), (1 + 9, (3,), (2, 2, 3)), (1 + 2, (3,), (1, 2, 2))],
    ids=["cut inside the drafts", "all drafts and the target's own", "third draft wrong", "cut before the wrong one"],
)
def test_slots_are_tested_as_far_as_the_answer_goes(qwen3, limit, wrong, counts):
    """Lost otherwise: acceptance by slot. Drafts behind the end were never asked for, and no slot lies behind the last."""
    answer = speculate(qwen3, Scripted(PROMPT + plain(qwen3), wrong), PROMPT, (), limit, Chooser())
    assert (answer.accepted[0], answer.matched[0], answer.tried[0]) == counts


def test_a_difference_is_weighed_by_the_scores_at_its_place(qwen3):
    """Lost otherwise: telling a near tie of half precision from an answer that is wrong."""
    right = plain(qwen3)
    wrong = [*right[:3], (right[3] + 1) % V, *right[4:]]
    scores = qwen3.model(torch.tensor([PROMPT + right[:3]])).logits[0, -1].detach()
    index, gap = first_difference(qwen3, Answer(PROMPT, wrong), Answer(PROMPT, right), Chooser())
    assert index == 3 and gap == pytest.approx(float(scores[right[3]] - scores[wrong[3]]), rel=1e-3)
    assert first_difference(qwen3, Answer(PROMPT, right), Answer(PROMPT, right), Chooser()) is None


def test_prompt_of_one_token_and_prompt_with_the_mask_id(qwen3):
    """Lost otherwise: an empty drafter cache crashes, or the mask id in a prompt is taken for a hole."""
    for prompt in ([7], [7, V - 1, V - 1, 4]):
        expected = plain(qwen3, prompt)
        drafter = BlockDrafter(RandomDrafter(), vocabulary(qwen3), mask_token_id=V - 1, block_size=BLOCK)
        assert speculate(qwen3, drafter, prompt, (), ANSWER, Chooser()).tokens == expected


class RandomDrafter:
    """The decoding side of a drafter without a mind: hidden states that depend on context, tokens and positions."""

    spec = SimpleNamespace(family="dflash", sample_from_anchor=False)

    def new_cache(self):
        return []

    def extend(self, cache, features, positions):
        cache += list(zip(positions.tolist(), features.sum(-1).tolist(), strict=True))

    def draft(self, cache, block_embeddings, positions):
        assert [p for p, _ in cache] == list(range(positions[0])), "the context is all positions before the anchor, each once"
        return block_embeddings + torch.sin(positions[:, None] * torch.arange(1, block_embeddings.shape[1] + 1) + cache[-1][1])


def vocabulary(target):
    model = target.model
    return Vocabulary(model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach(), 1.0, None)


@pytest.mark.parametrize("budget", [None, 1, BLOCK - 1, 24])
def test_random_drafter_changes_nothing(qwen3, budget):
    """Lost otherwise: losslessness with a drafter at its first step, chain and tree."""
    drafter = BlockDrafter(RandomDrafter(), vocabulary(qwen3), V - 1, BLOCK, budget)
    assert speculate(qwen3, drafter, PROMPT, (), ANSWER, Chooser()).tokens == plain(qwen3)


def test_features_are_the_tapped_layers_outputs():
    """Lost otherwise: a drafter served with features of other layers, or of rejected tokens, than it was trained on."""
    target = build("qwen3", num_hidden_layers=4)  # transformers shows the last layer's output only behind the final norm
    expected = plain(target)

    class Recorder(Scripted):
        def begin(self):
            super().begin()
            self.features = []

        def extend(self, features, start):
            super().extend(features, start)
            self.features.append(features)

    for tree in (False, True):
        recorder = Recorder(PROMPT + expected, wrong=(3,), tree=tree)
        speculate(target, recorder, PROMPT, (), ANSWER, Chooser())
        features = torch.cat(recorder.features)
        states = target.model(torch.tensor([PROMPT + expected]), output_hidden_states=True).hidden_states
        reference = torch.cat([states[1 + 1][0], states[2 + 1][0]], dim=-1)[: len(features)]
        torch.testing.assert_close(features[: len(reference)], reference, atol=1e-4, rtol=1e-4)


def test_tree_mask_shows_ancestors_only():
    """Lost otherwise: a branch verified in the light of its cousins."""
    #        root(0)
    #       /       \
    #      1         2
    #     / \         \
    #    3   4         5
    mask = tree_mask([0, 0, 1, 1, 2], start=3)
    assert mask[:, :3].all()
    seen = [set(torch.nonzero(row).flatten().tolist()) for row in mask[:, 3:]]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}]
    windowed = tree_mask([0, 0, 1, 1, 2], start=3, window=3)  # positions 3 4 4 5 5 5, so row 5 sees positions 3 and up
    assert torch.nonzero(windowed[5]).flatten().tolist() == [3, 5, 8]
    assert torch.nonzero(windowed[0]).flatten().tolist() == [1, 2, 3]


class SureDrafter:
    """Its hidden states of a block's slots are given: over a head of unit vectors they are the logits themselves."""

    def __init__(self, logits_JV):
        self.logits_JV, self.spec = logits_JV, SimpleNamespace(family="dflash", sample_from_anchor=False)

    def draft(self, cache, block_embeddings, positions):
        return torch.cat((torch.zeros(1, self.logits_JV.shape[1]), self.logits_JV))


def proposed_by(logits_JV, budget):
    """What a drafter with these logits proposes below token 0: a chain, or a tree of `budget` nodes."""
    slots, size = logits_JV.shape
    drafter = BlockDrafter(SureDrafter(logits_JV), Vocabulary(torch.eye(size), torch.eye(size), 1.0, None), 0, slots + 1, budget)
    drafter.cache, drafter.before_1F = [], torch.zeros(0, 1)
    return drafter.propose(token=0, position=0)


def test_tree_is_optimal_under_the_product_of_marginals():
    """Lost otherwise: node budget spent on unlikely branches. Brute force over all prefixes of a small case."""
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    logprobs = torch.log_softmax(logits, dim=-1)
    prefixes = [p for depth in (1, 2, 3) for p in itertools.product(range(4), repeat=depth)]
    worth = {p: sum(float(logprobs[k, t]) for k, t in enumerate(p)) for p in prefixes}
    for budget in (1, 5, 12, 84):
        proposal = proposed_by(logits, budget)
        paths = [()]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append(paths[parent] + (token,))
        assert len(set(paths[1:])) == budget
        assert sorted((worth[p] for p in paths[1:]), reverse=True) == pytest.approx(sorted(worth.values(), reverse=True)[:budget])


def test_tree_of_block_size_nodes_along_the_best_ranks_is_the_chain():
    """Lost otherwise: chain and tree measured with different rules. A sure drafter's tree of b-1 nodes is its chain."""
    logits = torch.zeros(BLOCK - 1, V)
    best = torch.tensor([4, 8, 8, 1, 30])
    logits[range(BLOCK - 1), best] = 20.0
    for budget in (None, BLOCK - 1):
        assert proposed_by(logits, budget) == Proposal(best.tolist(), list(range(BLOCK - 1)))


def test_path_follows_the_targets_choices():
    """Lost otherwise: an accepted token under a rejected parent."""
    proposal = Proposal([5, 6, 7, 7, 9], [0, 0, 1, 2, 4])
    assert accepted_path(proposal, [6, 7, 7, 0, 9, 1]) == [0, 2, 4, 5]
    assert accepted_path(proposal, [5, 8, 7, 0, 9, 1]) == [0, 1]
    assert accepted_path(proposal, [1, 7, 7, 0, 9, 1]) == [0]


class BigramTarget:
    """A target that is a table: the next token's logits depend on the last token alone. Thousands of answers take a second."""

    def __init__(self, vocabulary_size):
        self.device = torch.device("cpu")
        self.logits_VV = torch.randn(vocabulary_size, vocabulary_size, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens, start, cache, parents=None, last_only=False):
        logits = self.logits_VV[torch.tensor(tokens)]
        return logits[-1:] if last_only else logits, torch.zeros(len(tokens), 1)


class Stubborn(Scripted):
    """Always the same proposal, right now and then."""

    def __init__(self, tree):
        super().__init__([])
        self.proposal = Proposal([2, 1, 0, 3], [0, 0, 1, 2]) if tree else Proposal([2, 1], [0, 1])

    def propose(self, token, position):
        return self.proposal


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_samples_follow_the_targets_distribution(tree):
    """Lost otherwise: answers at a temperature that favour what the drafter likes. Chi-square over 64 three-token answers, level 0.001."""
    target, samples, temperature = BigramTarget(4), 1920, 1.5
    answers = (speculate(target, Stubborn(tree), [3], (), 3, Chooser(temperature, seed)) for seed in range(samples))
    counts = Counter(tuple(answer.tokens) for answer in answers)
    probability_VV, statistic = torch.softmax(target.logits_VV / temperature, dim=-1), 0.0
    for tokens in itertools.product(range(4), repeat=3):
        expected = samples * probability_VV[[3, *tokens[:-1]], tokens].prod().item()
        statistic += (counts[tokens] - expected) ** 2 / expected
    assert statistic < 103.4  # 63 degrees of freedom


class BigramDrafter:
    """Proposes by a table of its own, far from the target's: a slot's logits depend on the token before it alone."""

    def __init__(self, temperature):
        self.slots, self.proposer = range(1, 4), self
        self.logits_VV = temperature * torch.tensor([[3.0, 0, 0, -9], [0, 2, 1, 0], [-9, 0, 0, 2], [1, 0, 3, 0]])

    def begin(self):
        self.seen = 0

    def extend(self, features, start):
        assert start == self.seen, "features must arrive once, in order"
        self.seen += len(features)

    def draft(self, token, position):
        assert position == self.seen, "the known token's own features are not known yet"

    def conditionals(self, drafted):
        return lambda slot, before_A: self.logits_VV[before_A]


def test_samples_of_sampled_drafts_follow_the_targets_distribution():
    """Lost otherwise: losslessness of rejection sampling. Chi-square over 64 three-token answers, level 0.001; and a draft is kept as often
    as the two distributions overlap, by the token before it."""
    temperature, samples = 1.5, 2400
    target, drafter = BigramTarget(4), BigramDrafter(temperature)
    answers = [sampling.speculate_sampled(target, drafter, [3], (), 3, Chooser(temperature, seed)) for seed in range(samples)]
    counts = Counter(tuple(answer.tokens) for answer in answers)
    p_VV, statistic = torch.softmax(target.logits_VV / temperature, dim=-1), 0.0
    for tokens in itertools.product(range(4), repeat=3):
        expected = samples * p_VV[[3, *tokens[:-1]], tokens].prod().item()
        statistic += (counts[tokens] - expected) ** 2 / expected
    assert statistic < 103.4  # 63 degrees of freedom
    q_VV = torch.softmax(drafter.logits_VV / temperature, dim=-1)
    first_V = torch.minimum(p_VV, q_VV).sum(-1)  # 1 - TV
    tried = [(answer.tokens[0], answer.matched[0] > 0) for answer in answers]
    for token in range(4):
        kept = [good for before, good in tried if before == token]
        assert abs(sum(kept) / len(kept) - first_V[token]) < 4 * (0.25 / len(kept)) ** 0.5


def test_plain_and_speculative_sampling_agree_token_by_token(qwen3):
    """Lost otherwise: any check of answers at a temperature; both must meet the same noise at the same position."""
    for seed in range(3):
        choose = Chooser(1.0, seed)
        expected = decode(qwen3, PROMPT, (), ANSWER, choose).tokens
        for tree in (False, True):
            assert speculate(qwen3, Scripted(PROMPT + expected, (3,), tree), PROMPT, (), ANSWER, choose).tokens == expected


def test_bfloat16_answers_are_their_own_verifications_argmax():
    """Lost otherwise: in half precision answers may differ from plain decoding by near ties, but never from the target's own logits."""
    target = build("qwen3", dtype=torch.bfloat16)
    logits_seen = {}

    class Witness(Chooser):
        def __call__(self, logits, positions):
            choices = super().__call__(logits, positions)
            for row, position in zip(logits, positions, strict=True):
                logits_seen.setdefault(position, []).append(row)
            return choices

    truth = plain(target)
    answer = speculate(target, Scripted(PROMPT + truth, wrong=(4,)), PROMPT, (), ANSWER, Witness())
    for position, token in enumerate(answer.tokens, len(PROMPT)):
        assert token in [int(row.argmax()) for row in logits_seen[position]]
    full = target.model(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    gap = full.max(-1).values - full[range(ANSWER), answer.tokens]
    assert (gap <= 2**-7 * full.abs().max()).all(), "an emitted token is more than rounding below the best one"


STATES = {
    "state goes on over rows": ("Qwen3Next", SHAPE | dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "a row at a time": ("Jamba", SHAPE | dict(
        num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4)),
    "chunks": ("Llama4Text", SHAPE | dict(
        intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8, layer_types=["chunked_attention", "full_attention"] * 2,
        num_hidden_layers=4)),
}  # fmt: skip


class FourInFive(DraftModel):
    """Knows the answer, but for every fifth token or so: acceptance and roll-back both run."""

    def __init__(self, answer):
        self.wrong = [(token + 1) % V if i * 7919 % 1009 % 5 == 0 else token for i, token in enumerate(answer)]

    def begin(self): ...

    def extend(self, features_NF, start): ...

    def propose(self, token, position):
        begin = position + 1 - len(PROMPT)
        tokens = (self.wrong[begin : begin + BLOCK - 1] + [0] * BLOCK)[: BLOCK - 1]
        return Proposal(tokens, list(range(BLOCK - 1)))


@pytest.mark.parametrize("name", STATES)
def test_layers_that_carry_a_state_forget_rejected_drafts(name):
    """Lost otherwise: silently wrong answers of every hybrid, because a rejected draft stays in a recurrent state."""
    family, shape = STATES[name]
    torch.manual_seed(0)
    model_name = {"Llama4Text": "Llama4"}.get(family, family) + "ForCausalLM"
    target = DecodingTarget(getattr(transformers, model_name)(getattr(transformers, family + "Config")(**shape)).eval(), taps=[0, 2])
    answer = plain(target)
    spoken = speculate(target, FourInFive(answer), PROMPT, (), ANSWER, Chooser())
    assert spoken.tokens == answer and 0 < sum(spoken.accepted) < len(answer) - len(spoken.accepted)
    with pytest.raises(UserError, match="no trees"):
        target.forward([1, 2, 3], 5, new_cache(), parents=[0, 0])


def test_a_target_that_cannot_take_drafts_back_is_refused():
    """Lost otherwise: silently wrong answers, because a rejected draft stays in a state that nobody knows how to restore."""
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**SHAPE, num_local_experts=2)).eval()
    with pytest.raises(UserError, match="cannot drop rejected drafts"):
        DecodingTarget(model, taps=[0])


def test_taps_beyond_the_targets_depth_are_refused(qwen3):
    """Lost otherwise: an IndexError instead of 'this drafter belongs to another target'."""
    with pytest.raises(UserError, match="another target"):
        DecodingTarget(qwen3.model, taps=[1, 9])


def test_cache_holds_every_position_of_sliding_layers():
    """Lost otherwise: drafts rejected at the window's edge leave a hole that no error reports."""
    target, cache = build("mistral_window"), new_cache()
    target.forward(list(range(20)), 0, cache)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {20}
