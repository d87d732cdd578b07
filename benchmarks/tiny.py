"""A tiny random target on disk, a token store and a config file, for benchmarks of endurance rather than of speed."""

from pathlib import Path

import torch
import yaml
from transformers.utils import logging

from benchmarks import eight_billion

SHAPE: eight_billion.Shape = eight_billion.QWEN3_8B | dict(
    vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=258,
)  # fmt: skip


def make_preset(folder: Path, rows: int = 240) -> Path:
    """Write a target, a store of rows of two documents and a config file into `folder`; returns the config's path."""
    logging.disable_progress_bar()
    eight_billion.random_target(SHAPE, torch.device("cpu"), torch.float32).save_pretrained(folder / "target")
    eight_billion.write_store(folder / "store", SHAPE["vocab_size"], rows, row_tokens=128, documents_per_row=2)
    tree = {
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "drafter": {"layers": 2, "taps": [1, 2], "block_size": 4, "dtype": "float32", "mask_token": SHAPE["vocab_size"] - 1},
        "data": {"path": str(folder / "store"), "pack_tokens": 128},
        "optim": {"lr": 1e-3},
        "log": {"tensorboard": False},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return folder / "tiny.yaml"
