"""The drafter's rotations: what it trains with, what its config says, and what engines make of that must be one table."""

import dataclasses
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from test_drafter import SHAPE, exported, inputs, run, tiny
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from common.config import DrafterConfig
from common.drafter.rope import ROPE_KINDS
from common.errors import UserError
from common.families.registry import load_exported, resolve_spec
from common.target.adapters import VocabularyRules
from common.target.files import TargetSpec, read_spec

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = [1.0 + i for i in range(4)]
SCALINGS = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "axes": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn by its old key": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn without its length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with half of mscale": YARN | {"mscale": 0.707},
    "yarn with a factor": YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn on half a head": YARN | {"partial_rotary_factor": 0.5},
    "yarn with axes": YARN | {"mrope_section": [2, 1, 1]},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


@pytest.fixture
def target(tiny_target, tmp_path, monkeypatch):
    """target(scaling) -> the tiny target with this rope scaling, which need not be one that its family can run."""
    monkeypatch.setattr(TargetSpec, "vocabulary", VocabularyRules(1.0, 1.0, None))

    def target(scaling):
        folder = tmp_path / "target"
        shutil.copytree(tiny_target, folder)
        config = json.loads((folder / "config.json").read_text())
        config.pop("rope_parameters", None)
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0, "rope_scaling": scaling}))
        return folder

    return target


@pytest.mark.parametrize("name", SCALINGS)
def test_the_exported_config_gives_the_trained_table(target, tmp_path, name):
    """Engines and transformers build their rotations from the config: another table there, and every draft is wrong."""
    folder = target(SCALINGS[name])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = tiny(folder)
    inherits = name.split()[0] in ROPE_KINDS
    assert any("rotations of its own" in str(warning.message) for warning in said) != (inherits or name in ("partial", "axes"))
    config = AutoConfig.from_pretrained(exported(model, folder, tmp_path / "export"))
    served = Qwen3RotaryEmbedding(config)
    torch.testing.assert_close(model.frequencies, served.inv_freq)
    assert model.table_factor == pytest.approx(served.attention_scaling)
    assert load_exported(tmp_path / "export")[0] == model.spec
    assert (model.spec.rope_scaling is not None) == (inherits and name != "default")


def test_a_drafter_may_have_plain_rotations(target, tmp_path):
    """Whoever doubts a scaling must be able to leave it out; what was trained otherwise cannot be changed to it."""
    folder = target(YARN)
    plain = tiny(folder, rope="own")
    assert plain.spec.rope_scaling is None and plain.spec.rope_theta == 5000.0
    scaled = exported(tiny(folder), folder, tmp_path / "scaled")
    config = DrafterConfig(**SHAPE, init=str(scaled), rope="own")
    with pytest.raises(UserError, match=r"drafter\.rope=own but .* has yarn rope scaling"):
        resolve_spec(config, read_spec(folder), folder)


def test_rotations_that_engines_read_in_two_ways_are_refused(target, tmp_path):
    """Another trainer's drafter that rotates half a head, or by the text's length, would be trained on with another table."""
    folder = target(YARN)
    export = exported(tiny(folder), folder, tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    for change, words in (
        ({"partial_rotary_factor": 0.5}, "rotates a share of each head"),
        ({"rope_type": "dynamic"}, "was trained with 'dynamic' rope scaling"),
    ):
        (export / "config.json").write_text(json.dumps(config | {"rope_parameters": config["rope_parameters"] | change}))
        with pytest.raises(UserError, match=words):
            resolve_spec(DrafterConfig(**SHAPE, init=str(export)), read_spec(folder), folder)
    spec = dataclasses.replace(read_spec(folder), rope_scaling={"rope_type": "yarn", "factor": "four"})
    with pytest.raises(UserError, match=r"cannot be computed .*drafter\.rope=own"):
        resolve_spec(DrafterConfig(**SHAPE), spec, folder)


def test_a_drafter_of_scaled_embeddings_is_exported_for_plain_ones(tiny_target, tmp_path, monkeypatch):
    """Engines feed a drafter the target's embeddings as they are: a Gemma's would be 25 times too small for what was trained."""
    monkeypatch.setattr(TargetSpec, "vocabulary", VocabularyRules(6.5, 1.0, None))
    model = tiny(tiny_target)
    assert model.spec.embedding_scale == 6.5
    folder = exported(model, tiny_target, tmp_path / "export")
    spec, tensors = load_exported(folder)
    assert spec.embedding_scale == 1.0 and "input_embedding_scale" not in (folder / "config.json").read_text()
    served = type(model)(spec, torch.float32, "cpu")
    served.load_state_dict(tensors)
    embeddings, features = inputs(model)
    anchors, starts = [3, 9, 14, 20], [0] * 24
    trained = run(model, embeddings * 6.5, features, anchors, starts)
    torch.testing.assert_close(run(served, embeddings, features, anchors, starts), trained, atol=1e-4, rtol=1e-4)
    moved = load_file(folder / "model.safetensors")
    assert not torch.equal(moved["layers.0.mlp.down_proj.weight"], model.state_dict()["layers.0.mlp.down_proj.weight"])
    again = exported(served, tiny_target, tmp_path / "again")
    assert all(torch.equal(value, moved[name]) for name, value in load_file(again / "model.safetensors").items())
