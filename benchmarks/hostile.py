"""Values, trees and bytes that nobody meant: what benchmarks/fuzz.py puts where something else belongs."""

import copy
import json
import random
from collections.abc import Iterable
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "a" * 300, "é🙂", "\ud800", "\0", "../..", "{{ 1 }}", "full_attention", "yarn", "<|im_end|>", "qwen3", "llama", "BPE", "gpt2",
    [], [None], [0], [1, 2], ["a", "a"], [[]], [[1, 2], [3]], {}, {"a": 1}, {"type": "x"}, {"content": 3}, {"rope_type": "yarn"},
)  # fmt: skip
"""What stands where something else was meant."""
PIECES = (
    "1", "0", "-1", "1e3", "1e30", "1e999", "0.5", "nan", ".nan", "true", "null", "~", "auto", "never", "ce", "[", "]", "{", "}", ",",
    ":", ": ", "\n", "\n  ", "- ", "&a ", "*a", "!!int ", "!!float ", "!!str ", "<<", "<<: *a", "? ", "| ", "> ", "'", '"', "\\", " ", "#",
    "%", "@", "\t", "\0", "\x1b", "é", "🙂", "2020-01-32", "0x", "0o", "1_0", "12:30", "target", "optim", "path", "steps", "=",
)  # fmt: skip
"""Of YAML."""


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in a JSON tree."""
    found, open_ = [], [tree]
    while open_:
        here = open_.pop()
        keys: Iterable[Any] = here if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            found.append((here, key))
            open_.append(here[key])
    return found


def nested(depth: int, draw: random.Random) -> Any:
    """Lists and objects within each other."""
    if not depth:
        return 1
    inner: Any = nested(depth - 1, draw)
    return [inner] if draw.random() < 0.5 else {"a": inner}


def mutate(tree: Any, draw: random.Random) -> Any:
    """A copy of a JSON tree with one to three places changed: something hostile, something of the tree, a copy, or nothing there."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        spots = places(tree)
        if not spots or draw.random() < 0.01:
            return copy.deepcopy(draw.choice(VALUES))
        shallow = [spot for spot in spots if spot[0] is tree]
        here, key = draw.choice(shallow if draw.random() < 0.4 and shallow else spots)
        match draw.randrange(6):
            case 0:
                del here[key]
            case 1:
                there, other = draw.choice(spots)
                here[key] = copy.deepcopy(there[other]) if _has(there, other) else None
            case 2 if isinstance(here, dict):
                here[draw.choice([str(key) + "x", *here])] = copy.deepcopy(draw.choice(VALUES))
            case 2:
                here.insert(key, copy.deepcopy(draw.choice(VALUES)))
            case 3:
                here[key] = nested(draw.choice((3, 100)), draw)
            case _:
                here[key] = copy.deepcopy(draw.choice(VALUES))
    return tree


def _has(there: Any, key: Any) -> bool:
    return key in there if isinstance(there, dict) else key < len(there)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
"""What git leaves where large files were not fetched."""


def damage(whole: bytes, draw: random.Random) -> bytes:
    """Bytes cut, flipped, doubled, or none at all."""
    data, at = bytearray(whole), draw.randrange(len(whole) + 1)
    match draw.randrange(5):
        case 0:
            del data[at:]
        case 1:
            data[at:at] = draw.randbytes(draw.randint(1, 9))
        case 2 if data:
            data[at - 1] ^= 1 << draw.randrange(8)
        case 3:
            data[at:at] = data[: draw.randint(0, 200)]
        case _:
            data[:] = draw.choice((b"", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, POINTER))
    return bytes(data)


def hostile_json(tree: Any, draw: random.Random) -> bytes:
    """The text of a mutated tree, seldom damaged itself."""
    text = json.dumps(mutate(tree, draw)).encode()
    return damage(text, draw) if draw.random() < 0.05 else text
