"""Code that ships with a checkpoint runs where the user has asked for it by a flag, and nowhere else."""

import io
import json
import shutil

import pytest
import torch
from writing import open_job

import evaluate_drafter
import prepare_data
from common.data.chat import load_tokenizer
from common.decoding.target import load_target
from common.errors import UserError
from common.families import __main__ as families
from common.target.files import read_spec

CODE = """
import pathlib
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pathlib.Path({ran!r}).touch()

class Config(Qwen3Config):
    model_type = "nobody_knows"

class Model(Qwen3ForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def target(tiny_target, tmp_path):
    """The tiny target as a family that only its own code knows; the code leaves the file `ran` when it runs."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    (folder / "theirs.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "nobody_knows", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def commands(target, conversations, folder):
    """Every command that takes a target."""
    where = ["--target", str(target)]
    return {
        "pack": lambda *trust: prepare_data.main(["pack", str(conversations), *where, "--output", f"{folder}/store", *trust]),
        "synthesize": lambda *trust: prepare_data.main(
            ["synthesize", *where, "--output", f"{folder}/o.jsonl", "--num", "1", "--max-tokens", "4", "--keep", "cut", "loop", *trust]
        ),
        "evaluate": lambda *trust: evaluate_drafter.main([*where, "--drafter", "d", "--prompts", str(conversations), *trust]),
        "check": lambda *trust: families.main(["check", "d", *where, *trust]),
    }


@pytest.mark.parametrize("name", ["pack", "synthesize", "evaluate", "check"])
def test_no_command_runs_code_unasked(target, tiny_conversations, tmp_path, monkeypatch, name):
    """`pack -` reads conversations where transformers asks `run this code? [y/N]`: a line that begins with y would be the answer."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 9)))
    with pytest.raises(UserError):
        commands(target, tiny_conversations, tmp_path)[name]()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pack", "synthesize"])
def test_where_it_is_asked_for_it_runs(target, tiny_conversations, tmp_path, name):
    """A flag that reaches the config alone ends in a refusal behind it, from the tokenizer or the weights."""
    commands(target, tiny_conversations, tmp_path)[name]("--trust-remote-code")
    assert (tmp_path / "ran").exists()


def test_decoding_and_chat_are_reached(target, tmp_path):
    assert read_spec(target, True).layers == 4
    assert type(load_tokenizer(target, True)).__name__ == "Tokenizer"
    assert type(load_target(read_spec(target, True), [1], torch.float32, torch.device("cpu")).model).__name__ == "Model"
    assert open_job(target, tmp_path / "o.jsonl", trust_remote_code=True).backend.model
