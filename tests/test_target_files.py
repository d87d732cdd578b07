"""A drafter rank reads the target's vocabulary and numbers from its files alone; they must be those the target itself runs with."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import build_target
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
)

from common.errors import UserError
from common.target.adapters import through_model
from common.target.files import fingerprint, read_spec, resolve
from common.target.loading import load_causal_lm
from common.target.vocabulary import FirstLayer, check_vocabulary, load_vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets_own(tmp_path, tied):
    """A drafter that learns against another head proposes another model's tokens; a tied head exists only as the embedding."""
    build_target(tmp_path, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    vocabulary = load_vocabulary(read_spec(tmp_path), torch.float32, "cpu")
    assert (vocabulary.head.data_ptr() == vocabulary.embedding.data_ptr()) == tied
    ids, hidden = torch.tensor([[3, 250]]), torch.randn(4, 32)
    assert torch.equal(vocabulary.embed(ids), model.get_input_embeddings()(ids))
    assert torch.equal(vocabulary.logits(hidden), model.get_output_embeddings()(hidden))


SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64,
)  # fmt: skip
FAMILIES = {
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=16),
    "granite": lambda: GraniteConfig(**SMALL, embedding_multiplier=3.0, logits_scaling=8.0),
    "cohere": lambda: CohereConfig(**SMALL, logit_scale=0.25),
    "llama": lambda: LlamaConfig(**SMALL),
    "mixtral": lambda: MixtralConfig(**SMALL),
    "phi": lambda: PhiConfig(**SMALL),
    "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=0.5),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_are_measured_on_the_family_itself(tmp_path, family):
    """A scale that nobody looked up goes unnoticed in training and costs most of the acceptance in the server."""
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    _check_vocabulary(tmp_path)


@pytest.mark.parametrize("family", [GPT2Config, BloomConfig])
def test_a_family_that_does_more_to_its_vocabulary_is_refused(tmp_path, family):
    """GPT-2 adds positions to its embeddings, Bloom norms them: drafters know neither, and nothing else would say so."""
    AutoModelForCausalLM.from_config(family(vocab_size=64, hidden_size=32, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="more to its embeddings"):
        load_vocabulary(read_spec(tmp_path), torch.float32, "cpu")


def _check_vocabulary(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    vocabulary = load_vocabulary(read_spec(tmp_path), torch.float32, "cpu")
    ids = torch.tensor([1, 2, 3])
    embedded, hidden, logits = through_model(model, ids)
    torch.testing.assert_close(vocabulary.embed(ids), embedded)
    torch.testing.assert_close(vocabulary.logits(hidden), logits)
    check_vocabulary(read_spec(tmp_path), FirstLayer.of(read_spec(tmp_path), model), vocabulary)
    return model, vocabulary


WRONG = {
    "a bias forgotten": ("phi", lambda v: replace(v, bias=None)),
    "a cap forgotten": ("gemma2", lambda v: replace(v, softcap=None)),
    "a scale of logits forgotten": ("cohere", lambda v: replace(v, head=v.head / 0.25)),
    "a scale of logits multiplied": ("granite", lambda v: replace(v, head=v.head * 64.0)),
    "a scale of embeddings forgotten": ("granite", lambda v: replace(v, scale=1.0)),
    "a scale of embeddings divided": ("gemma3", lambda v: replace(v, scale=1 / v.scale)),
    "the embedding for the head": ("llama", lambda v: replace(v, head=v.embedding)),
}


@pytest.mark.parametrize("flaw", WRONG)
def test_a_vocabulary_unlike_the_models_own_is_refused_before_the_first_step(tmp_path, flaw):
    """The drafter would learn to predict another model's tokens; decoding stays lossless and only its speed is lost."""
    family, change = WRONG[flaw]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias, std=0.02)
    model.save_pretrained(tmp_path)
    model, vocabulary = _check_vocabulary(tmp_path)
    with pytest.raises(UserError, match="its drafter would share"):
        check_vocabulary(read_spec(tmp_path), FirstLayer.of(read_spec(tmp_path), model), change(vocabulary))


def test_a_head_of_its_own_in_a_checkpoint_that_calls_it_tied_is_the_head(tmp_path):
    """transformers goes by the files there and so must the drafter, or it learns against the embedding."""
    build_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _, vocabulary = _check_vocabulary(tmp_path)
    assert not torch.equal(vocabulary.head, vocabulary.embedding)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        (json.dumps({"model_type": "mamba", "hidden_size": 8}), "lacks"),
    ],
)
def test_a_folder_that_is_no_dense_decoder_is_refused(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=words):
        read_spec(tmp_path)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id():
    """Otherwise a typing error waits for the network."""
    with pytest.raises(UserError, match="no such folder"):
        resolve("./nowhere")


def test_the_fingerprint_follows_the_weights(tmp_path):
    """Resuming on another checkpoint of the same shape must be noticed."""
    prints = []
    for seed in (0, 1):
        build_target(tmp_path / str(seed), seed=seed)
        prints.append(fingerprint(tmp_path / str(seed)))
    assert prints[0] != prints[1]


def change_tensor(folder, name, change):
    """Rewrite one tensor of a checkpoint: (name, tensor) -> (name, tensor) or None."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = change(name, tensors.pop(name))
    save_file(tensors | ({changed[0]: changed[1]} if changed else {}), path, metadata={"format": "pt"})


def test_the_fingerprint_follows_every_layer(tmp_path):
    """Layers trained on with the embedding untouched (a merged LoRA) are another target: resuming on it must be noticed."""
    build_target(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=2048)
    assert (tmp_path / "model.safetensors").stat().st_size > 4 << 20
    before = fingerprint(tmp_path)
    change_tensor(tmp_path, "model.layers.1.self_attn.q_proj.weight", lambda name, tensor: (name, tensor + 1e-3))
    assert fingerprint(tmp_path) != before


FLAWS = {
    "renamed": (lambda name, tensor: (name.replace("q_proj", "query_proj"), tensor), "1 tensors missing .*; 1 tensors unknown"),
    "left out": (lambda name, tensor: None, "1 tensors missing"),
    "of another shape": (lambda name, tensor: (name, tensor[:-1].contiguous()), "1 tensors of another shape"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_target_that_is_not_whole_is_refused(tmp_path, flaw):
    """transformers draws missing tensors at random: the drafter would learn from a target that nobody serves."""
    change, words = FLAWS[flaw]
    build_target(tmp_path)
    change_tensor(tmp_path, "model.layers.1.self_attn.q_proj.weight", change)
    with pytest.raises(UserError, match=words):
        load_causal_lm(tmp_path, torch.float32, torch.device("cpu"), "target.path")


def test_shards_that_are_no_safetensors_are_refused(tmp_path):
    """A git-lfs pointer instead of a shard is the commonest broken download."""
    build_target(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match="git-lfs"):
        fingerprint(tmp_path)


def test_an_untied_checkpoint_without_a_head_and_rows_unlike_the_config_are_refused(tmp_path):
    """Taking the embedding for the head, or half of one, trains against another model's tokens."""
    build_target(tmp_path)
    spec = read_spec(tmp_path)
    change_tensor(tmp_path, "model.embed_tokens.weight", lambda name, tensor: (name, tensor[:100].contiguous()))
    with pytest.raises(UserError, match=r"\[100, 32\], not \[272, 32\]"):
        load_vocabulary(spec, torch.float32, "cpu")
    build_target(tmp_path)
    change_tensor(tmp_path, "lm_head.weight", lambda name, tensor: None)
    with pytest.raises(UserError, match="no head"):
        load_vocabulary(spec, torch.float32, "cpu")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("value", [None, "many", 0, [4]])
def test_numbers_that_are_none_are_refused_in_words(tmp_path, key, value):
    build_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=r"config\.json"):
        read_spec(tmp_path)
