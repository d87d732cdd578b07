"""The shape every full-size benchmark runs at: Qwen3-8B, with random weights, so that nothing is downloaded. And a tiny one for tests."""

import json

import numpy as np
import torch

from common.data.store import StoreWriter
from common.target.model import attention_for
from common.target.vocabulary import Vocabulary

QWEN3_8B = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645, initializer_range=0.02,
)  # fmt: skip
TINY = QWEN3_8B | dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    bos_token_id=None, eos_token_id=95,
)  # fmt: skip


def random_target(config, device, dtype, attention=None):
    """A transformers model of that config with random weights, made on the device; `attention` None is a trainer's target's."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**config), attn_implementation=attention or attention_for(device, dtype))
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def random_vocabulary(spec, device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    draw = {"generator": generator, "device": device, "dtype": dtype}
    embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, **draw).mul_(0.02) for _ in range(2))
    return Vocabulary(embedding, head, 1.0, None)


def write_target(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_store(folder, vocab_size, rows, row_tokens, documents_per_row):
    """A store of random documents of about equal lengths, every token supervised."""
    generator = np.random.default_rng(0)
    with StoreWriter(folder, {"vocab_size": vocab_size}) as writer:
        for length in np.full(rows * documents_per_row, row_tokens // documents_per_row):
            writer.add(generator.integers(0, vocab_size - 2, length), np.ones(length, np.uint8))
