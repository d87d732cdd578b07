"""Fixtures: a target small enough for every test, conversations, and their packed stores."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import start_fork_server

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY_ROWS = 272  # 256 bytes, the special tokens, and unused rows for the mask token


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have everything imported for the ranks, before any test starts a server that has not."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    if any(getattr(value, "__module__", None) == "ranks" for module in modules for value in vars(module).values()):
        start_fork_server()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 4-layer Qwen3 target (hidden 32, float32, untied head) with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_target")
    build_target(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL file of 48 short conversations in the `messages` shape."""
    path = tmp_path_factory.mktemp("conversations") / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations(48, seed=0)))
    return path


@pytest.fixture(scope="session")
def tiny_store(tiny_target: Path, tiny_conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token store of `tiny_conversations`, written by `prepare_data.py pack`."""
    return pack(tiny_target, tiny_conversations, tmp_path_factory.mktemp("store") / "train")


@pytest.fixture(scope="session")
def tiny_heldout(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token store of six held-out conversations."""
    folder = tmp_path_factory.mktemp("heldout")
    (folder / "heldout.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations(6, seed=1)))
    return pack(tiny_target, folder / "heldout.jsonl", folder / "store")


@pytest.fixture(scope="session")
def tiny_preset(tiny_target: Path, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config file of a run of 12 small steps on the tiny target, float32 throughout, without validation and TensorBoard."""
    path = tmp_path_factory.mktemp("preset") / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "target": {"path": str(tiny_target), "dtype": "float32"},
                "drafter": {"layers": 2, "taps": [1, 2], "block_size": 4, "dtype": "float32"},
                "data": {"path": str(tiny_store), "pack_tokens": 128},
                "optim": {"steps": 12, "lr": 2e-3},
                "sync": {"every": 2},
                "checkpoint": {"every": 4},
                "log": {"every": 1, "tensorboard": False},
            }
        )
    )
    return path


def build_target(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Write a random target; `changes` override its config, e.g. hidden_size=48."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY_ROWS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**shape | changes)).save_pretrained(folder)
    build_tokenizer(folder)


def build_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token per byte and the ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_by_name = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(bytes_by_name)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def conversations(count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Short counting games: enough regularity to learn from in a few steps."""
    draw = random.Random(seed)
    for _ in range(count):
        start, messages = draw.randrange(50), []
        for _ in range(draw.randint(1, 2)):
            messages.append({"role": "user", "content": f"count {start}"})
            messages.append({"role": "assistant", "content": " ".join(str(start + i) for i in range(draw.randint(2, 9)))})
            start += draw.randint(1, 5)
        yield messages


def pack(target: Path, conversations_file: Path, folder: Path) -> Path:
    """Run `prepare_data.py pack`; returns the store's folder."""
    import prepare_data

    prepare_data.main(["pack", str(conversations_file), "--target", str(target), "--output", str(folder)])
    return folder
