"""What a user can be given, files and servers' answers of any content, is read or refused in a line of words. `benchmarks/fuzz.py` tries
thousands; here are a small seeded share of each kind, and the mistakes that people have met.
"""

import json
import math
import shutil

import pytest
import torch

from benchmarks.fuzz import fuzz
from benchmarks.fuzz_kinds import KINDS
from common.config import DrafterConfig
from common.data.chat import Chat, load_tokenizer
from common.errors import UserError
from common.families.registry import FAMILIES, load_exported, resolve_spec
from common.families.start import make_drafter
from common.target.files import read_spec
from common.target.vocabulary import load_vocabulary

CASES = {"overrides": 60, "presets": 40, "store": 200, "conversations": 200, "output": 60, "reply": 40}
"""The others load models or tokenizers, which takes longer."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_share_of_each_kind(kind):
    """A stack tells nobody which file to mend, and a case that once did must not come back."""
    assert not list(fuzz(kind, seed=0, numbers=range(CASES.get(kind, 20)), slow_s=math.inf))


TARGETS = {
    "no layers": {"num_hidden_layers": None},
    "layers that are text": {"num_hidden_layers": "4"},
    "rotations that are a list": {"rope_parameters": [1]},
    "rotations without their numbers": {"rope_parameters": {"rope_type": "yarn", "rope_theta": "x"}},
    "a text config that is none": {"text_config": 3},
    "a model type that is none": {"model_type": None},
    "a model type that is a list": {"model_type": ["qwen3"]},
    "more layers than there is memory": {"num_hidden_layers": 10**9},
    "an embedding of other rows": {"vocab_size": 300},
}


@pytest.mark.parametrize("mistake", TARGETS)
def test_a_target_s_config_of_the_wrong_types(tiny_target, tmp_path, mistake):
    """Configs are edited by hand and written by other tools: what is wrong is named, with the file."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    edit(target / "config.json", TARGETS[mistake])
    with pytest.raises(UserError, match="target") as refused:
        resolve_spec(DrafterConfig(layers=2, taps=[1, 2]), read_spec(target), target)
        load_vocabulary(read_spec(target), torch.float32, "cpu")
    assert "\n" not in str(refused.value)


DRAFTERS = {
    "kinds of layers that are a number": {"layer_types": 2},
    "kinds of layers that nobody knows": {"layer_types": ["full", "full"]},
    "too few kinds of layers": {"layer_types": ["full_attention"]},
    "taps that are text": {"dflash_config": {"target_layer_ids": "12", "mask_token_id": 1, "block_size": 4}},
    "taps of lists": {"dflash_config": {"target_layer_ids": [[1], [2]], "mask_token_id": 1, "block_size": 4}},
    "architectures that are a number": {"architectures": 3, "num_hidden_layers": "2"},
    "rotations that are text": {"rope_parameters": "default"},
    "a scaling that is a list": {"rope_scaling": [1]},
    "layers without end": {"num_hidden_layers": 10**12},
}


@pytest.fixture(scope="module")
def drafter(tiny_target, tmp_path_factory):
    """An exported drafter of the tiny target."""
    folder, spec = tmp_path_factory.mktemp("drafter") / "drafter", read_spec(tiny_target)
    config = DrafterConfig(layers=2, taps=[1, 2], block_size=4, dtype="float32")
    made = make_drafter(config, resolve_spec(config, spec, tiny_target), tiny_target, "cpu", seed=0)
    weights = {name: parameter.detach() for name, parameter in made.named_parameters()}
    FAMILIES["dflash"].export(folder, weights, made.spec, spec, "float32", "float32")
    return folder


@pytest.mark.parametrize("mistake", DRAFTERS)
def test_a_drafter_s_config_of_the_wrong_types(drafter, tiny_target, tmp_path, mistake):
    """Drafters come from other trainers, too."""
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    edit(folder / "config.json", DRAFTERS[mistake])
    with pytest.raises(UserError, match="drafter") as refused:
        load_exported(folder)[0].validate(read_spec(tiny_target))
    assert "\n" not in str(refused.value)


TOKENIZERS = {
    "padding that is a list": ("tokenizer_config.json", {"pad_token": ["a"]}),
    "added tokens without text": ("tokenizer.json", {"added_tokens": [{"id": 3}]}),
    "no model": ("tokenizer.json", {"model": None}),
    "a template that is a number": ("tokenizer_config.json", {"chat_template": 3}),
}


@pytest.mark.parametrize("mistake", TOKENIZERS)
def test_a_tokenizer_of_the_wrong_types(tiny_target, tmp_path, mistake):
    """Each of its files may have been edited, or cut by a full disk."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    name, change = TOKENIZERS[mistake]
    edit(target / name, change)
    try:
        resolve_spec(DrafterConfig(layers=2, taps=[1, 2]), read_spec(target), target)
        chat = Chat(load_tokenizer(target))
        chat.documents([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    except UserError as refused:
        assert "\n" not in str(refused)


def edit(path, change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
