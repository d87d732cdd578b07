"""Drafters that others trained are read in whatever form they come, or refused with what they are."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import exported, tiny

from common.errors import UserError
from common.families.registry import load_exported


@pytest.fixture
def folder(tiny_target, tmp_path):
    return exported(tiny(tiny_target), tiny_target, tmp_path / "export")


WRAPPED = {
    "DDP": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name.replace('self_attn', '_fsdp_wrapped_module.self_attn')}",
    "checkpointed layers": lambda name: f"model.{name.replace('mlp', '_checkpoint_wrapped_module.mlp')}",
    "a trainer's class": lambda name: f"draft_model.model.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_of_wrappers_are_taken_off(folder, wrapper):
    """A drafter that was saved as it was trained would be refused for missing tensors that are all there."""
    spec, tensors = load_exported(folder)
    parts = load_file(folder / "model.safetensors")
    save_file({WRAPPED[wrapper](name): value for name, value in parts.items()}, folder / "model.safetensors")
    again, loaded = load_exported(folder)
    assert again == spec and loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    save_file(
        {WRAPPED[wrapper](name): value for name, value in parts.items()} | {"norm.weight": torch.ones(32)}, folder / "model.safetensors"
    )
    with pytest.raises(UserError, match="one tensor's names"):
        load_exported(folder)


def test_defaults_that_speculators_leaves_out_are_filled_in(folder):
    """That format keeps what differs from its class's defaults alone: a drafter with 1e-6 in its norms would lack them."""
    spec, tensors = load_exported(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer = {name: config[name] for name in (*kept, "max_position_embeddings", "rope_parameters", "layer_types")}
    flat = {
        "speculators_model_type": "dflash", "transformer_layer_config": layer, "block_size": 4, "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps], "draft_vocab_size": spec.vocab_size,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(flat))
    again, loaded = load_exported(folder)
    assert (again.taps, again.rms_norm_eps, again.rope_theta, again.layer_types) == (spec.taps, 1e-6, spec.rope_theta, spec.layer_types)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


OTHERS = {
    "EAGLE": ({"config.json": {"architectures": ["LlamaForCausalLMEagle3"]}}, "an EAGLE drafter"),
    "a target": ({"config.json": {"architectures": ["Qwen3ForCausalLM"]}}, "a whole language model"),
    "a checkpoint": ({"state.json": {}}, r"a checkpoint of this suite; give its drafter, .*export/"),
    "an adapter": ({"adapter_config.json": {}}, "a LoRA adapter"),
    "shards": ({"__0_0.distcp": {}}, "a sharded checkpoint"),
    "pickles": ({"config.json": {"block_size": 4}, "pytorch_model.bin": {}}, "pickled"),
    "a file of llama.cpp": ({"model.gguf": {}}, "a GGUF file's"),
    "nothing": ({}, "no such file"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_block_drafter_is_refused_with_what_it_is(tmp_path, kind):
    """`lacks num_hidden_layers` tells nobody that this is an adapter, or how to get at the drafter."""
    files, words = OTHERS[kind]
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        load_exported(tmp_path)
