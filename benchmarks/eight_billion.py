"""The shape every full-size benchmark runs at: Qwen3-8B, with random weights, so that nothing is downloaded. And a tiny one for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from common.data.store import StoreWriter
from common.drafter.spec import DrafterSpec
from common.target.files import TargetSpec
from common.target.vocabulary import Vocabulary

Shape = dict[str, Any]
"""The keys of a target's config.json."""

QWEN3_8B: Shape = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645, initializer_range=0.02,
)  # fmt: skip
TINY: Shape = QWEN3_8B | dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    bos_token_id=None, eos_token_id=95,
)  # fmt: skip


def random_target(shape: Shape, device: torch.device, dtype: torch.dtype, layers: range | None = None) -> PreTrainedModel:
    """A transformers model of that shape with random weights, made on the device; of a stage, the weights of its layers alone are kept."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**shape))
    finally:
        torch.set_default_dtype(before)
    for index, layer in enumerate(model.model.layers):
        if layers is not None and index not in layers:
            layer.requires_grad_(False).to_empty(device="meta")
    return model.eval().requires_grad_(False)


def random_vocabulary(spec: TargetSpec | DrafterSpec, device: torch.device, dtype: torch.dtype) -> Vocabulary:
    """An untied embedding and head of random rows."""
    generator = torch.Generator(device).manual_seed(0)
    draw = {"generator": generator, "device": device, "dtype": dtype}
    embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, **draw).mul_(0.02) for _ in range(2))
    return Vocabulary(embedding, head, 1.0, None)


def write_config(folder: Path, shape: Shape) -> None:
    """A target's folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))


def write_store(folder: Path, vocab_size: int, rows: int, row_tokens: int, documents_per_row: int) -> None:
    """A store of random documents of equal lengths, every token supervised; the vocabulary's last token, the mask, never occurs."""
    generator, length = np.random.default_rng(0), row_tokens // documents_per_row
    with StoreWriter(folder, {"vocab_size": vocab_size}) as writer:
        for _ in range(rows * documents_per_row):
            writer.add(generator.integers(0, vocab_size - 1, length), np.ones(length, np.uint8))
