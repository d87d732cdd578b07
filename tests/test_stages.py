"""A target spread over several devices is still one target: the drafter must not be able to tell."""

import json

import pytest
import torch
import yaml
from conftest import build_target, build_tokenizer
from ranks import Job
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

import train_drafter

SMALL = dict(
    vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=256, bos_token_id=None, eos_token_id=258, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "sliding": None,
    "mixture": lambda: Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "hybrid": lambda: Qwen3_5TextConfig(
        **SMALL,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


def build(family, folder):
    """Write a random target of four layers."""
    if family == "sliding":
        return build_target(folder, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8, use_sliding_window=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    build_tokenizer(folder)


@pytest.fixture
def preset(tiny_target, tiny_store, tiny_heldout, tmp_path):
    """A YAML preset of a six-step run whose packets are tapped in every part of the target; returns its path."""
    tree = {
        "target": {"path": str(tiny_target), "dtype": "float32"},
        "drafter": {"layers": 2, "taps": [0, 2], "block_size": 4, "dtype": "float32"},
        "data": {"path": str(tiny_store), "pack_tokens": 128},
        "optim": {"lr": 1e-3, "steps": 6},
        "checkpoint": {"every": 6},
        "validation": {"path": str(tiny_heldout), "every": 6, "rows": 2},
        "log": {"every": 1, "tensorboard": False},
        "topology": {"timeout_s": 60},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def records(folder):
    """A run's losses and held-out taus in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], key, r[key]) for r in lines for key in ("loss", "grad_norm", "tau", "heldout_tau") if key in r]


def run(preset, folder, *overrides):
    train_drafter.main(["--config", str(preset), f"log.dir={folder}", *overrides])
    return records(folder)


def processes(preset, ranks, folder, *overrides):
    with Job(["--config", preset, f"log.dir={folder}", *overrides], ranks) as job:
        assert set(job.wait()) == {0}, job.output[-4000:]
    return records(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_gives_what_one_device_gives_for_every_kind_of_layer(preset, tmp_path, family):
    """Masks, windows, experts and recurrent states belong to a layer's number: a stage that counts anew feeds the drafter noise."""
    build(family, tmp_path / "target")
    options = f"target.path={tmp_path / 'target'}", "objective.loss=kl"  # the final hidden state travels, too
    whole = run(preset, tmp_path / "1", *options)
    for stages in (2, 3):
        assert run(preset, tmp_path / f"{stages}", *options, f"target.stages={stages}") == whole


def test_a_chain_gives_what_one_device_gives_in_every_mode(preset, tmp_path):
    """Else the losses of a 70B target say nothing about the quickstart that the recipe was tried on."""
    whole = run(preset, tmp_path / "solo")
    assert len(whole) == 6 * 3 + 1
    threads = "topology.mode=threads", "target.stages=3", "topology.targets=2", "topology.drafters=1"
    assert run(preset, tmp_path / "threads", *threads) == whole
    assert processes(preset, 4, tmp_path / "processes", "target.stages=3") == whole
