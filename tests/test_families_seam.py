"""A family of drafters is one file and one entry: here is a whole one, from its loss to its export, in no code but its own.

Lost otherwise: families. A drafter that some code takes for plain DFlash trains, exports and drafts without its own part,
and no error says so.
"""

import dataclasses
import json
from typing import Annotated

import pytest
import torch
from safetensors.torch import load_file
from test_train_equals_serve import build_pair, check_export, check_replay, drafted_from
from torch import nn

import evaluate_drafter
import train_drafter
from common import config_reader
from common.config import Bounds
from common.drafter.spec import FULL
from common.errors import UserError
from common.families import registry
from common.families.dflash import IndependentSlots
from common.families.family import DrafterFamily, Proposer
from common.families.start import make_drafter
from common.objective.block_loss import base_loss
from common.target.files import read_spec

NAME = "bigram"


@dataclasses.dataclass(frozen=True)
class Options:
    bias_init: Annotated[float, Bounds(least=0)] = 0.0
    """Standard deviation of the bias's first values; 0 starts as plain DFlash."""


class LeftToRight(Proposer):
    """A slot's logits are the head's and a bias for the token before it: the anchor's, then those proposed."""

    def __init__(self, bias, vocabulary):
        self.bias, self.vocabulary, self.plain = bias, vocabulary, IndependentSlots(vocabulary)

    def logits(self, hidden_ND, before_N):
        return self.vocabulary.logits(hidden_ND).float() + self.bias(before_N)

    @torch.no_grad()
    def chain(self, drafted):
        tokens = [drafted.anchors_A]
        for hidden_AD in drafted.hidden_AJD.unbind(1):
            tokens.append(self.logits(hidden_AD, tokens[-1]).argmax(-1))
        return torch.stack(tokens[1:], dim=1)

    def children(self, drafted, width):
        return [self.children_of(hidden_JD, width) for hidden_JD in drafted.hidden_AJD]

    def conditionals(self, drafted):
        return lambda slot, before_A: self.logits(drafted.hidden_AJD[:, slot], before_A)

    def children_of(self, hidden_JD, width):
        @torch.no_grad()
        def children(depth, parent):
            logits_V = self.logits(hidden_JD[depth, None], torch.tensor([parent], device=hidden_JD.device))[0]
            best = logits_V.log_softmax(-1).topk(min(width, len(logits_V)))
            return best.indices.tolist(), best.values.tolist()

        return children


class Bigram(DrafterFamily):
    """DFlash with a learnt bias on the logits for every pair of neighbouring tokens."""

    name, architecture, options = NAME, "BigramDraftModel", Options

    def modules(self, spec, **kind):
        return {"token_bias": nn.Embedding(spec.vocab_size, spec.vocab_size, **kind)}

    def first_values(self, name, value, spec, generator):
        if name == "token_bias.weight":
            value.normal_(0.0, spec.options.bias_init, generator=generator)
        else:
            super().first_values(name, value, spec, generator)

    def loss(self, drafter, drafted, vocabulary, blocks, config, final_hidden_TD, progress):
        before_AJ = torch.cat((blocks.tokens_U[:-1, None], blocks.labels_AJ[:, :-1]), dim=1)
        bias = lambda span: drafter.token_bias(before_AJ[span].flatten())  # noqa: E731
        return base_loss(drafted.hidden_AJD, vocabulary, blocks, config, final_hidden_TD, bias=bias)

    def proposer(self, drafter, vocabulary):
        return LeftToRight(drafter.token_bias, vocabulary)

    def export_config(self, spec, *given):
        config = super().export_config(spec, *given)
        return config | {"dflash_config": config["dflash_config"] | {"bias_init": spec.options.bias_init}}

    def read_options(self, config):
        return {"bias_init": config["dflash_config"]["bias_init"]}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, NAME, Bigram())


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """A drafter of this family, trained on the target's own answers by the trainer's own parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, NAME, Bigram())
        return build_pair(tiny_target, tmp_path_factory.mktemp("pair"), [FULL, FULL], family=NAME, bias_init=0.1)


@pytest.mark.parametrize("tree_budget", [None, 3, 12])
def test_heldout_tau_is_the_tau_of_real_decoding(pair, tree_budget):
    """Chain and tree, document by document; and every answer is the target's own."""
    assert 1.2 < check_replay(pair, tree_budget) < pair.learner.plan.drafter.block_size


def test_the_familys_own_part_is_learnt_and_proposes(pair):
    """The bias changed from its first values, the chain is not what the head alone would say, and a node's children follow its token."""
    learner = pair.learner
    fresh = make_drafter(learner.plan.config.drafter, learner.plan.drafter, learner.plan.folder, "cpu", learner.plan.config.seed)
    assert not torch.equal(fresh.token_bias.weight, learner.model.token_bias.weight)
    hidden_AJD = torch.cat([pair.trained_hidden(row) for row in pair.rows])
    drafted = drafted_from(hidden_AJD, torch.full((len(hidden_AJD),), 65))
    chain_AJ = learner.proposer.chain(drafted)
    assert not torch.equal(chain_AJ, learner.proposer.plain.chain(drafted))
    first = learner.proposer.children(drafted, width=4)[0]
    assert first(1, 65) != first(1, 66)
    chain = chain_AJ[0].tolist()
    assert [first(depth, token)[0][0] for depth, token in enumerate([65, *chain[:-1]])] == chain


def test_the_backbone_starts_as_that_of_plain_dflash(tiny_target):
    """Two families can be compared only if what they share starts alike; and the family decides how its own part starts."""
    drafters = {}
    for family, options in (("dflash", {}), (NAME, {"bias_init": 0.0}), (NAME, {"bias_init": 0.5})):
        section = {"family": family, "layers": 1, "taps": [1], "dtype": "float32", **options}
        config = config_reader.from_dict({"drafter": section}, registry.family_options()).drafter
        spec = registry.resolve_spec(config, read_spec(tiny_target), tiny_target)
        drafters[family, *options.values()] = dict(make_drafter(config, spec, tiny_target, "cpu", seed=3).named_parameters())
    plain, zero, drawn = drafters.values()
    assert all(torch.equal(plain[name], other[name]) for name in plain for other in (zero, drawn))
    assert not zero["token_bias.weight"].any() and drawn["token_bias.weight"].std().item() == pytest.approx(0.5, rel=0.05)


def test_an_export_is_read_back_to_the_bit(pair, tmp_path):
    check_export(pair, tmp_path)
    folder, learner = tmp_path / "export", pair.learner
    spec, tensors = registry.load_exported(folder)
    assert (spec.family, spec.options) == (NAME, Options(bias_init=0.1)) and registry.family_of(folder).name == NAME
    masters = learner.master_tensors()
    assert tensors.keys() == masters.keys() and all(torch.equal(tensors[name], masters[name]) for name in masters)
    assert registry.check(folder, learner.plan.target).errors == []
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"].pop("bias_init")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks 'bias_init'"):
        registry.load_exported(folder)


@pytest.fixture(scope="module")
def run(tiny_preset, tiny_heldout, tmp_path_factory):
    """A run of six steps by the script itself: the run directory."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, NAME, Bigram())
        train(tiny_preset, folder, f"drafter.family={NAME}", "drafter.bias_init=0.1", "optim.steps=6", f"validation.path={tiny_heldout}")
    return folder


def train(preset, folder, *overrides):
    assert train_drafter.main(["--config", str(preset), f"log.dir={folder}", *overrides]) == 0


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_script_trains_it_and_goes_on_from_its_export(run, tiny_preset, tmp_path):
    """The config's own key arrives, held-out tau is measured, and training that goes on starts with the tensors that were exported."""
    losses = [record["loss"] for record in records(run) if "loss" in record]
    assert losses[-1] < losses[0] and any("heldout_tau_tree" in record for record in records(run))
    exported = run / "export" / "latest"
    again = [f"drafter.family={NAME}", "drafter.bias_init=0.1", f"drafter.init={exported}", "optim.steps=1"]
    train(tiny_preset, tmp_path / "again", *again, "optim.lr=0")
    one, other = (load_file(folder / "export" / "latest" / "model.safetensors") for folder in (run, tmp_path / "again"))
    assert "token_bias.weight" in one and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert records(tmp_path / "again")[0]["loss"] < losses[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter.family=dflash"], f"drafter.family=dflash but .* has {NAME}; write that"),
        ([f"drafter.family={NAME}", "drafter.bias_init=0.2"], "drafter.bias_init=0.2 but .* has 0.1; write that"),
        (["drafter.family=dflash", "drafter.bias_init=0.1"], "unknown key drafter.bias_init"),
        ([f"drafter.family={NAME}", "drafter.bias_init=-1"], "drafter.bias_init=-1 must be at least 0"),
    ],
)
def test_what_contradicts_the_exported_drafter_is_refused(run, tiny_preset, tmp_path, overrides, words):
    """Another family would drop the bias without a word, another setting would stand in the export and be none of this drafter's."""
    with pytest.raises(UserError, match=words):
        train(tiny_preset, tmp_path, f"drafter.init={run / 'export' / 'latest'}", *overrides)


@pytest.mark.parametrize("mode", [["--mode", "chain"], ["--mode", "tree", "--tree-budget", "6"]])
def test_the_script_decodes_with_it_losslessly(run, tiny_target, tmp_path, mode):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count 3"}\n{"prompt": "count 12"}\n')
    given = ["--drafter", run / "export" / "latest", "--target", tiny_target, "--prompts", tmp_path / "prompts.jsonl", "--device", "cpu"]
    evaluate_drafter.main([*map(str, given), "--decode", "--max-new-tokens", "24", "--json", str(tmp_path / "report.json"), *mode])
    assert json.loads((tmp_path / "report.json").read_text())["lossless"] == 2
