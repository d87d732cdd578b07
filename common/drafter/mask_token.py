"""Which token fills the unknown slots of a block."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import UserError
from common.target.files import TargetSpec, read_json

MASK_TOKENS = {
    "qwen3": 151669, "qwen3_moe": 151669, "qwen3_5": 248070, "qwen3_5_text": 248070, "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070, "gpt_oss": 200000, "minimax_m2": 200054,
}  # fmt: skip
"""Mask tokens of published drafters, by target family. Source: https://huggingface.co/collections/z-lab/dflash."""

NO_TOKENIZER = 1 << 60
"""More ids than any embedding has rows: without a tokenizer none of them is known to be unused."""


def mask_token(asked: str | int, target: TargetSpec, folder: str | Path, used_ids: Iterable[int] = ()) -> int:
    """The id of the token that fills unknown slots: `asked` is an id, a token's text or `auto`.

    Raises: UserError for a token that has a meaning already, is no row of the embedding, or cannot be found.
    """
    used = set(used_ids)
    added, plain, tokens = _tokenizer_tokens(folder)
    pads = _pads(folder, added)

    def objection(token: int) -> str | None:
        if token in pads:
            return "is the tokenizer's padding"
        return mask_objection(token, target) or ("occurs in the data" if token in used else None)

    if asked == "auto":
        reserved = [added[t] for word in ("mask", "reserved", "unused") for t in sorted(added) if word in t.lower()]
        candidates = itertools.chain([MASK_TOKENS.get(target.model_type, -1)], range(tokens, target.vocab_size), reserved)
        free = next((t for t in candidates if objection(t) is None), None)
        if free is None:
            raise UserError(
                "drafter.mask_token=auto finds no unused row of the target's embedding; name a token: drafter.mask_token=<id or text>"
            )
        return free
    token = _named(asked, added, plain) if isinstance(asked, str) else asked
    if (reason := objection(token)) is not None:
        raise UserError(f"drafter.mask_token={asked} {reason}; use an unused id or drafter.mask_token=auto")
    return token


def _named(text: str, added: Mapping[str, int], plain: Mapping[str, int]) -> int:
    """The id of a token by its text or, as byte-level and SentencePiece vocabularies spell it, its name. Raises: UserError."""
    names = (text, text.replace(" ", "Ġ"), text.replace(" ", "▁"))
    token = next((tokens[name] for tokens in (added, plain) for name in names if name in tokens), None)
    if token is None:
        raise UserError(
            f"drafter.mask_token={text!r} is no token of the target's tokenizer; write drafter.mask_token=auto, an id, or a token's name, "
            f"such as {', '.join(map(repr, sorted(added)[:8]))}"
        )
    return token


def mask_objection(token: int, target: TargetSpec) -> str | None:
    """Why a token cannot be the mask token of a target's drafter, or None."""
    if not 0 <= token < target.vocab_size:
        return f"is no row of the target's embedding (0..{target.vocab_size - 1})"
    taken = {"the end of a text": target.eos_token_ids, "the start of a text": (target.bos_token_id,), "padding": (target.pad_token_id,)}
    meaning = next((m for m, ids in taken.items() if token in ids), None)
    return meaning and f"is the target's token for {meaning}"


def _tokenizer_tokens(folder: str | Path) -> tuple[dict[str, int], dict[str, int], int]:
    """({text: id} of the added tokens, the same of the others, number of ids the tokenizer can produce), out of tokenizer.json."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return {}, {}, NO_TOKENIZER
    tree = read_json(file)
    try:
        added = {str(t["content"]): int(t["id"]) for t in tree.get("added_tokens", [])}
        vocabulary = tree.get("model", {}).get("vocab", {})
        listed = vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], i) for i, entry in enumerate(vocabulary))
        plain = {str(text): int(i) for text, i in listed}
        return added, plain, 1 + max([*plain.values(), *added.values()], default=-1)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{file} is no tokenizer ({type(error).__name__}: {error}): fetch it again") from None


def _pads(folder: str | Path, added: Mapping[str, int]) -> set[int]:
    """The padding token that tokenizer_config.json names, as a set of at most one id."""
    file = Path(folder) / "tokenizer_config.json"
    pad = read_json(file).get("pad_token") if file.is_file() else None
    text = pad.get("content") if isinstance(pad, dict) else pad
    return {added[text]} if isinstance(text, str) and text in added else set()
