"""What is trained is what is served: the numbers of a training packet against real decoding with the target, and against an export
read as the engines read it. Float32, a drafter trained for some steps on answers that the target wrote.

Each `check_*` is also what tests/test_canaries.py points known bugs at.
"""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common import config_reader
from common.data.store import StoreWriter
from common.decoding.fast import FastDecoder
from common.decoding.replay import Replayer
from common.decoding.speculate import BlockDrafter, Chooser, Proposal, Way, decode, speculate
from common.decoding.target import DecodingTarget
from common.decoding.target import load_target as load_served
from common.drafter.spec import FULL, SLIDING
from common.families.family import Drafted
from common.families.registry import family_options
from common.objective.blocks import candidates
from common.target.files import read_json, read_spec
from common.target.model import Target
from common.target.model import load_model as load_target
from common.training.learner import Learner
from common.training.plan import make_plan

BLOCK, LIMIT, STOP, ROW_TOKENS = 4, 26, {258}, 128
KINDS = {"full": [FULL, FULL], "sliding": [SLIDING, FULL]}


@dataclass
class Pair:
    """A learner, the rows it sees, and the same target ready to verify."""

    folder: object
    learner: Learner
    served: DecodingTarget
    rows: list

    def packet(self, row):
        """A row with its features as the target captures them for training."""
        plan = self.learner.plan
        target = Target(load_target(self.folder, torch.device("cpu"), torch.float32), plan.drafter.taps, final_hidden=plan.final_hidden)
        features = torch.zeros(len(row.tokens), target.width)
        target.capture(row, features)
        return SimpleNamespace(row=row, features=features)

    def documents(self):
        """(prompt, answer) of every document of every row, in the rows' order."""
        for row in self.rows:
            for first, stop in row.spans():
                prompt = int(np.argmax(row.loss_mask[first:stop]))
                yield row.tokens[first : first + prompt].tolist(), row.tokens[first + prompt : stop].tolist()

    def trained_hidden(self, row):
        """The training path's hidden states at every anchor of a row: [N, K - 1, D]."""
        seen, model = [], self.learner.model
        handle = model.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        replay = self.learner.replay(self.packet(row))
        handle.remove()
        return torch.cat(seen)[: len(replay.accepted_N)]

    def block_drafter(self, tree_budget=None):
        spec, learner = self.learner.plan.drafter, self.learner
        return BlockDrafter(learner.model, learner.vocabulary, spec.mask_token_id, spec.block_size, tree_budget)

    def answer(self, prompt, proposer):
        return speculate(self.served, proposer, prompt, STOP, LIMIT, Chooser())


def build_pair(folder, scratch, layer_types, **drafter):
    """Let the target answer twelve prompts, pack its answers and train a drafter on them with the trainer's own parts.

    `drafter` are further keys of that section.
    """
    served = load_served(read_spec(folder), [0, 2], torch.float32, torch.device("cpu"))
    draw, unused = np.random.default_rng(0), set(range(256))
    with StoreWriter(scratch / "store", {"vocab_size": 272}) as store:
        for _ in range(12):
            prompt = [257, *draw.integers(0, 256, draw.integers(1, 12)).tolist()]
            tokens = decode(served, prompt, STOP, LIMIT, Chooser()).tokens
            unused -= {*prompt, *tokens}
            store.add(prompt + tokens, [0] * len(prompt) + [1] * len(tokens))
    shape = dict(layers=2, block_size=BLOCK, taps=[0, 2], dtype="float32", layer_types=layer_types, window=9, mask_token=min(unused))
    config = config_reader.from_dict(
        dict(
            target=dict(path=str(folder), dtype="float32"),
            drafter=shape | drafter,
            data=dict(path=str(scratch / "store"), pack_tokens=ROW_TOKENS),
            objective=dict(anchors=40),
            optim=dict(lr=1e-2, steps=60, schedule="constant"),
        ),
        family_options(),
    )
    plan = make_plan(config, SimpleNamespace(first_per_host=lambda find: find(), drafters=1))
    learner = Learner(plan, torch.device("cpu"))
    pair = Pair(folder, learner, served, [plan.rows.row(0, i) for i in range(plan.rows.count())])
    packets = [pair.packet(row) for row in pair.rows]
    for step in range(60):
        result = learner.backward(packets[step % len(packets)], number=step)
        learner.optimizer.step(result.weight_sum)
    return pair


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tiny_target, tmp_path_factory):
    return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), KINDS[request.param])


def drafted_from(hidden_AJD, anchors_A):
    """Drafted blocks of these slots, for proposers that need nothing else."""
    return Drafted(hidden_AJD, anchors_A, hidden_AJD.new_zeros(0, 1), torch.full_like(anchors_A, -1))


class Spy:
    """A drafter that remembers what it drafted at each position."""

    def __init__(self, drafter):
        self.drafter, self.hidden = drafter, {}

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def draft(self, cache, block_embeddings, positions):
        self.hidden[int(positions[0])] = hidden = self.drafter.draft(cache, block_embeddings, positions)
        return hidden


class Refused(BlockDrafter):
    """Drafts as always but proposes what the target will not say, so that decoding stops at every position."""

    def propose(self, token, position):
        super().propose(token, position)
        return Proposal([self.not_this[position], *self.masks][: len(self.slots)], list(range(len(self.slots))))


def served_hidden(pair, prompt, answer):
    """What decoding drafts at every position of an answer: cached context, cropped caches, only new features. By position."""
    drafter = pair.block_drafter()
    refused = Refused(Spy(pair.learner.model), drafter.vocabulary, drafter.masks[0], BLOCK)
    refused.not_this = {len(prompt) + i: (token + 1) % 272 for i, token in enumerate(answer[1:])}
    assert pair.answer(prompt, refused).tokens == answer
    return refused.drafter.hidden


def check_hidden(pair):
    """The training path's hidden states equal the serving path's, for every anchor and predicted slot."""
    documents = pair.documents()
    for row in pair.rows:
        anchors, trained = candidates(row).tolist(), iter(pair.trained_hidden(row))
        for first, stop in row.spans():
            prompt, answer = next(documents)
            served = served_hidden(pair, prompt, answer)
            assert sorted(served) == [anchor - first for anchor in anchors if first <= anchor < stop]
            for position in sorted(served):
                torch.testing.assert_close(next(trained), served[position][-pair.learner.plan.drafter.proposals :], atol=1e-4, rtol=1e-4)


def check_replay(pair, tree_budget=None):
    """A packet's replay emits and verifies exactly as real greedy decoding does, document by document. Returns tau."""
    replayed, decoded = [], []
    for row in pair.rows:
        replay = pair.learner.replay(pair.packet(row))
        totals = replay.chain(row) if tree_budget is None else replay.tree(row, tree_budget)
        replayed += zip(*(total.tolist() for total in totals), strict=True)
    for prompt, tokens in pair.documents():
        answer = pair.answer(prompt, pair.block_drafter(tree_budget))
        assert answer.tokens == tokens
        decoded.append((sum(answer.accepted) + len(answer.accepted), len(answer.accepted)))
    assert replayed == decoded
    return sum(emitted for emitted, _ in replayed) / sum(verifications for _, verifications in replayed)


def check_evaluation(pair, ways, documents):
    """Answers replayed in every way are those of real decoding, verification by verification, an answer a row or several."""
    written = list(pair.documents())[:documents]
    alone, together = (
        Replayer(pair.served, pair.learner.model, pair.learner.vocabulary, row_tokens).run(written, ways) for row_tokens in (1, 150)
    )
    assert alone == together
    for way, replayed in zip(ways, alone, strict=True):
        proposer = BlockDrafter(pair.learner.model, pair.learner.vocabulary, pair.learner.plan.drafter.mask_token_id, *way)
        for (prompt, tokens), answer in zip(written, replayed, strict=True):
            decoded = pair.answer(prompt, proposer)
            assert decoded.tokens == answer.tokens == tokens
            assert (decoded.accepted, decoded.matched, decoded.tried) == (answer.accepted, answer.matched, answer.tried), way


def check_fast(pair, documents):
    """The steps that are recorded on a GPU write and accept what their eager twins do."""
    for way in (None, Way(BLOCK), Way(BLOCK, 2), Way(BLOCK, 12)):
        drafter = way and BlockDrafter(pair.learner.model, pair.learner.vocabulary, pair.learner.plan.drafter.mask_token_id, *way)
        fast = FastDecoder(pair.served, drafter)
        for prompt, tokens in list(pair.documents())[:documents]:
            answer = fast.answer(prompt, STOP, LIMIT)
            assert answer.tokens == tokens
            if drafter is not None:
                twin = pair.answer(prompt, drafter)
                assert (answer.accepted, answer.matched, answer.tried) == (twin.accepted, twin.matched, twin.tried), way


def check_export(pair, scratch):
    """The exported files, read as the engines read them, compute the training path's hidden states."""
    learner, plan = pair.learner, pair.learner.plan
    folder = learner.family.export(scratch / "export", learner.master_tensors(), plan.drafter, plan.target, "float32", "float32")
    row = pair.rows[0]
    trained, features = pair.trained_hidden(row), pair.packet(row).features[:, : len(plan.drafter.taps) * plan.target.hidden_size]
    for anchor, expected in list(zip(candidates(row).tolist(), trained, strict=True))[::5]:
        first = int(row.document_start[anchor])
        mask_token = read_json(folder / "config.json")["dflash_config"]["mask_token_id"]
        block = learner.vocabulary.embed(torch.tensor([int(row.tokens[anchor])] + [mask_token] * (BLOCK - 1)))
        torch.testing.assert_close(engine(folder, features[first:anchor], block)[-plan.drafter.proposals :], expected, atol=1e-4, rtol=1e-4)


def engine(folder, features_NF, x_KD):
    """One block behind its whole context, without a cache, from an export's files alone.

    Source: z-lab/dflash dflash/model.py, with vLLM's and SGLang's rule for sliding layers; float64 throughout. Convolutions and
    causality where the export has them.
    """
    config = read_json(folder / "config.json")
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    d, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    N, K = len(features_NF), len(x_KD)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weights[name + ".weight"]

    def project(x, name):
        return x @ weights[name + ".weight"].T

    def convolved(x, name, sublayer):
        """The sublayer's output, with the convolutions before and after it that the export names."""
        if name + ".base_kernel" not in weights:
            return sublayer(x)
        base = weights[name + ".base_kernel"]
        kernels = project(x, name + ".kernel_projection").unflatten(-1, (2, base.shape[1], -1))
        for side, function in enumerate((sublayer, lambda y: y)):
            kernel = base[side] + kernels[:, side].repeat_interleave(x.shape[-1] // kernels.shape[-1], dim=-1)
            rows = [sum(kernel[k, tap] * x[k - tap] for tap in range(len(base[side])) if k >= tap) for k in range(len(x))]
            x = function(torch.stack(rows))
        return x

    def rotate(x_NHd, positions):
        angles = positions[:, None, None] * config["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        real, imaginary = x_NHd[..., : d // 2], x_NHd[..., d // 2 :]
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(real, imaginary)
        return torch.cat([turned.real, turned.imag], dim=-1)

    context, x, positions = norm(project(features_NF.double(), "fc"), "hidden_norm"), x_KD.double(), torch.arange(N + K).double()

    def attend(block, attention, kind):
        keys_from = torch.cat([context, block])
        q = rotate(norm(project(block, attention + "q_proj").unflatten(-1, (heads, d)), attention + "q_norm"), positions[N:])
        k = rotate(norm(project(keys_from, attention + "k_proj").unflatten(-1, (groups, d)), attention + "k_norm"), positions)
        v = project(keys_from, attention + "v_proj").unflatten(-1, (groups, d))
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        distance = positions[N:, None] - positions[None, :]
        if kind == SLIDING:
            scores = scores.masked_fill(distance.abs() >= config["sliding_window"], -math.inf)
        if config.get("is_causal", kind == SLIDING):
            scores = scores.masked_fill(distance < 0, -math.inf)
        return project(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), attention + "o_proj")

    def mlp(hidden, layer):
        gate = torch.nn.functional.silu(project(hidden, layer + "mlp.gate_proj"))
        return project(gate * project(hidden, layer + "mlp.up_proj"), layer + "mlp.down_proj")

    for i, kind in enumerate(config["layer_types"]):
        layer = f"layers.{i}."
        attention = functools.partial(attend, attention=layer + "self_attn.", kind=kind)
        x = x + convolved(norm(x, layer + "input_layernorm"), layer + "attention_conv", attention)
        x = x + convolved(norm(x, layer + "post_attention_layernorm"), layer + "mlp_conv", functools.partial(mlp, layer=layer))
    return norm(x, "norm").float()


def test_decoding_drafts_what_training_computed(pair):
    """Lost otherwise: everything. A drafter that is served other inputs than it was trained on accepts nothing, and no error says so."""
    check_hidden(pair)


@pytest.mark.parametrize("tree_budget", [None, 3, 12])
def test_heldout_tau_is_the_tau_of_real_decoding(pair, tree_budget):
    """Lost otherwise: the number that chooses the best checkpoint. In float32, on the target's own answers, it is exact."""
    tau = check_replay(pair, tree_budget)
    assert 1.2 < tau < BLOCK, f"a drafter that accepts nothing, or everything, would prove little: tau {tau}"


def test_an_evaluation_by_replay_is_real_decoding(pair):
    """Lost otherwise: the figure a drafter is bought for, at every block size and for trees, at a hundredth of the time."""
    ways = [*(Way(size) for size in range(2, BLOCK + 1)), Way(BLOCK, 1), Way(BLOCK, 12), Way(BLOCK - 1, 5)]
    check_evaluation(pair, ways, documents=3)


def test_recorded_steps_decode_as_their_eager_twins(pair):
    """Lost otherwise: every speed that is measured, since it would be another decoding's."""
    check_fast(pair, documents=2)


def test_an_export_read_as_the_engines_read_it_is_the_trained_drafter(pair, tmp_path):
    """Lost otherwise: a drafter that only this suite can serve."""
    check_export(pair, tmp_path)
