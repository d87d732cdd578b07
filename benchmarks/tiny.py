"""The tests' tiny target, store and preset, for benchmarks of endurance rather than of speed."""

import json
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from conftest import build_target, conversations, pack


def make_preset(folder, documents=480):
    """Write a target, a packed store and a config file into `folder`; returns the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    build_target(folder / "target")
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations(documents, seed=0)]
    (folder / "train.jsonl").write_text("".join(lines))
    pack(folder / "target", folder / "train.jsonl", folder / "store")
    tree = {
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "drafter": {"layers": 2, "taps": [1, 2], "block_size": 4, "dtype": "float32"},
        "data": {"path": str(folder / "store"), "pack_tokens": 128},
        "optim": {"lr": 1e-3},
        "log": {"tensorboard": False},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return folder / "tiny.yaml"
