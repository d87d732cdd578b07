"""Lines of JSONL to documents: by the token ids that a row carries, or else by tokenizing its text."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.data.chat import Chat, Encoded, load_tokenizer
from common.data.conversations import Rejected, parse
from common.data.store import Document
from common.data.written import NotUsed, compare_answers, written_documents

Batch = tuple[list[bytes | Rejected], bool]
"""Lines, and whether to compare their written answers with the answers' text."""


@dataclass(frozen=True)
class Tokenized:
    """What one line became."""

    documents: list[Document]
    truncated: bool
    """Whether --max-tokens cut anything off."""
    draw: int
    """Drawn from the tokens and the seed: the lines with the lowest are held out."""
    reason: str | None
    """Why the text was tokenized; None where the documents are the ids that the target wrote."""
    answers: int
    """Written answers that were compared with their text."""
    differing: int
    """Those whose text came back as other tokens."""
    lost: dict[str, int] = field(default_factory=dict)
    """Tokens that the chat template left out, by what they were."""
    unserved: int = 0
    """Answers behind a prompt that a server never gives."""


class LineTokenizer:
    """Tokenizes batches of lines. Pickled as what it is made from, so that each process loads its own tokenizer."""

    def __init__(
        self,
        target: str,
        template_kwargs: dict[str, Any],
        max_tokens: int | None,
        seed: int,
        trust_remote_code: bool = False,
        split_turns: bool = False,
    ) -> None:
        self.made_from = target, template_kwargs, max_tokens, seed, trust_remote_code, split_turns
        self.max_tokens, self.seed, self.split_turns = max_tokens, seed, split_turns
        self.chat = Chat(load_tokenizer(target, trust_remote_code), template_kwargs)

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), self.made_from

    def __call__(self, batch: Batch) -> list[Tokenized | Rejected]:
        """What each line became, or why nothing."""
        lines, compare = batch
        rows = [parse(line) for line in lines]
        written = [self._written(row) for row in rows]
        plain = self.chat.documents((row for row, found in zip(rows, written, strict=True) if isinstance(found, str)), self.split_turns)
        again = self.chat.documents(row for row, found in zip(rows, written, strict=True) if compare and not isinstance(found, str))
        from_text, compared = iter(plain), iter(again)
        results: list[Tokenized | Rejected] = []
        for found in written:
            if isinstance(found, str):
                encoded = next(from_text)
                results.append(encoded if isinstance(encoded, Rejected) else self._cut(encoded, found))
            else:
                answers, differing = compare_answers(found, next(compared)) if compare else (0, 0)
                results.append(self._cut(Encoded(found, {}, 0), None, answers, differing))
        return results

    def _written(self, row: Any) -> list[Document] | str:
        """The documents by the ids that the row carries, or why its text has to be tokenized."""
        try:
            return written_documents(self.chat, row)
        except (NotUsed, Rejected) as reason:
            return str(reason)

    def _cut(self, encoded: Encoded, reason: str | None, answers: int = 0, differing: int = 0) -> Tokenized | Rejected:
        """The documents cut to their size; those in which no anchor could lie then are none."""
        limit, whole = self.max_tokens, encoded.documents
        documents = [(ids[:limit], mask[:limit]) for ids, mask in whole if has_anchor(mask[:limit])]
        if not documents:
            too_short = not any(has_anchor(mask) for _, mask in whole)
            return Rejected("no two supervised tokens in a row" if too_short else f"no answer within --max-tokens {limit}")
        truncated = sum(len(ids) for ids, _ in documents) < sum(len(ids) for ids, _ in whole)
        hashed = hashlib.blake2b(b"".join(ids.tobytes() for ids, _ in documents), digest_size=8, key=b"%d" % self.seed)
        draw = int.from_bytes(hashed.digest())
        return Tokenized(documents, truncated, draw, reason, answers, differing, encoded.lost, encoded.unserved)


def has_anchor(mask: np.ndarray) -> bool:
    """Whether an anchor can lie in a document with this loss mask: it needs a supervised token behind a supervised one."""
    return bool((mask[:-1] & mask[1:]).any())
