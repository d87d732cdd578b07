"""The tokenizer of a GGUF file: transformers builds one of the file's tokens, here it gets what transformers leaves out.

Which tokens are whole in a text, and how a text is cut into words before its bytes are merged: both decide which ids a prompt becomes,
and these must be those that the target was trained on and is served with. Source: llama.cpp, src/llama-vocab.cpp.
"""

import json
from pathlib import Path
from typing import Any

from common.data.chat import load_tokenizer
from common.errors import UserError
from common.generation.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens, as llama.cpp numbers them

GPT2_WORDS = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
SINGLE_DIGITS = [{"type": "Digits", "individual_digits": True}, *GPT2_WORDS]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(regex: str) -> list[dict[str, Any]]:
    """Pre-tokenizers that isolate each match."""
    return [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        GPT2_WORDS[0] | {"use_regex": False},
    ]


LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
"""These take a word that is a token whole, without merging it."""
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), GPT2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), SINGLE_DIGITS),
    **dict.fromkeys((*LLAMA3, "dbrx", "smaug-bpe"), _split(rf"{CONTRACTIONS}|\p{{N}}{{1,3}}|{REST}")),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), _split(rf"{CONTRACTIONS}|\p{{N}}|{REST}")),
}
"""What `tokenizer.ggml.pre` names -> how a text is cut into words."""


def mend_tokenizer(file: GgufFile, folder: Path) -> None:
    """Make the folder's tokenizer know every token by the file's id, and no others, and cut text as the file says. Unknown, control and
    user-defined ones become added tokens, so that a text that holds them is never cut within.

    Raises: UserError for tokens that cannot be mended.
    """
    tokens = file.field("tokenizer.ggml.tokens")
    types = file.field("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    added = {i: content for i, content in enumerate(tokens) if types[i] in (UNKNOWN, CONTROL, USER_DEFINED) and content}
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    _add_tokens(description, added, types)
    _cut_words(description, file)
    path.write_text(json.dumps(description, ensure_ascii=False))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    known = set(tokens)  # transformers names a token of its own where the file has none, and would add it behind the last
    named = {key: value for key, value in config.items() if not (key.endswith("_token") and isinstance(value, str) and value not in known)}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2, ensure_ascii=False))

    tokenizer = load_tokenizer(folder).backend_tokenizer
    whole = [i for i, kind in enumerate(types) if kind not in (UNUSED, BYTE)]  # whose names say nothing of text
    wrong = [i for i in whole if tokenizer.id_to_token(i) != tokens[i]]
    wrong += [i for i, content in added.items() if tokenizer.encode(content, add_special_tokens=False).ids != [i]]
    beyond = [content for content, i in tokenizer.get_vocab().items() if i >= len(tokens)]
    if wrong or beyond:
        first = f"{wrong[0]}, {tokens[wrong[0]]!r}" if wrong else f"{beyond[0]!r}, which it does not hold"
        raise UserError(
            f"--gguf {file.path}: {len(wrong) + len(beyond)} tokens would not keep their ids (the first is {first}): transformers cannot "
            "read its tokenizer; use the original safetensors and tokenizer.json"
        )


def _add_tokens(description: dict[str, Any], added: dict[int, str], types: list[int]) -> None:
    """Give the content of a tokenizer.json these added tokens, and none beyond the file's."""
    entries = {entry["id"]: entry for entry in description["added_tokens"] if entry["id"] < len(types)}
    for i, content in added.items():
        entry = entries.get(i, {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False})
        entries[i] = entry | {"id": i, "content": content, "special": types[i] != USER_DEFINED}
    description["added_tokens"] = [entries[i] for i in sorted(entries)]
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, dict):  # some versions of transformers spell there what is no byte in the alphabet of bytes
        spelled = {content: i for content, i in vocabulary.items() if i not in added}
        description["model"]["vocab"] = spelled | {content: i for i, content in added.items()}
    else:  # pieces with scores; an added token whose text is no piece would get an id behind them
        for i, content in added.items():
            vocabulary[i] = [content, *vocabulary[i][1:]]


def _cut_words(description: dict[str, Any], file: GgufFile) -> None:
    """Have a byte-level tokenizer cut text into words as the file names it; a name that is not known here is left to transformers."""
    name = file.field("tokenizer.ggml.pre")
    if name in PRE_TOKENIZERS:
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}
        description["model"]["ignore_merges"] = name in LLAMA3
    elif file.field("tokenizer.ggml.model") == "gpt2":
        print(
            f"{file.path} cuts text into words as {name!r}, which is left to transformers: compare a prompt's tokens with llama.cpp's "
            "(llama-tokenize) before you write conversations"
        )
