"""A drafter rank reads the target's vocabulary and numbers from its files alone; they must be those the target itself runs with."""

import json

import pytest
import torch
from conftest import build_target
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from common.errors import UserError
from common.target.files import fingerprint, read_spec, resolve
from common.target.vocabulary import load_vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets_own(tmp_path, tied):
    """A drafter that learns against another head proposes another model's tokens; a tied head exists only as the embedding."""
    build_target(tmp_path, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    vocabulary = load_vocabulary(tmp_path, torch.float32, "cpu")
    assert (vocabulary.head.data_ptr() == vocabulary.embedding.data_ptr()) == tied
    ids, hidden = torch.tensor([[3, 250]]), torch.randn(4, 32)
    assert torch.equal(vocabulary.embed(ids), model.get_input_embeddings()(ids))
    assert torch.equal(vocabulary.logits(hidden), model.get_output_embeddings()(hidden))


def test_gemma_scales_its_embedding_and_caps_its_logits(tmp_path):
    """Forgotten, both go unnoticed in training and cost most of the acceptance in the server."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, final_logit_softcapping=5.0, max_position_embeddings=64,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    _check_vocabulary(tmp_path)


SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, embedding_multiplier=3.0, logits_scaling=8.0)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    ],
    ids=["granite", "cohere"],
)
def test_scaled_logits_are_the_targets_own(tmp_path, model):
    """Forgotten, `kl` teaches a distribution that is eight times as sharp as the target's."""
    model().save_pretrained(tmp_path)
    _check_vocabulary(tmp_path)


def _check_vocabulary(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    vocabulary = load_vocabulary(tmp_path, torch.float32, "cpu")
    ids = torch.tensor([[1, 2, 3]])
    seen = []
    model.model.layers[0].register_forward_hook(lambda m, inputs, output: seen.append(inputs[0]))
    states = []
    model.model.norm.register_forward_hook(lambda m, inputs, output: states.append(output))
    with torch.no_grad():
        logits = model(ids).logits
    torch.testing.assert_close(vocabulary.embed(ids), seen[0])
    torch.testing.assert_close(vocabulary.logits(states[0]), logits)


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
