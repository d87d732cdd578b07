"""The tokens that a target wrote, carried in a row beside their text.

Text does not give its tokens back: a target may write "\\n\\n" as two tokens where its tokenizer makes one of it. What is trained on must
be what will be served, so a row that a target wrote holds the ids:

    "token_ids": {
      "template_digest": "…", "vocabulary_digest": "…", "added_tokens_digest": "…",   what they were written with
      "conversation_digest": "…",                         the messages that they belong to
      "sequences": [{"ids": [1, 9690, …], "answers": [[31, 95], …]}, …]
    }

A sequence is what the target read and wrote in one context: a prompt and its answer, [begin, end) of `ids`, the token that ended the
turn included. The prompt of the next turn is the template rendered over the text of the earlier answers. Where its ids begin with the
sequence so far, that sequence grows by it: most conversations are one sequence with as many answers as turns. Where they do not (an
earlier answer's text came back as other tokens, or the template leaves its thoughts out) the next turn begins a sequence of its own, in
which earlier answers are context only. So each answer is there once, behind exactly the tokens that it was written behind, and each
sequence becomes a document.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from common.data.chat import Chat, Encoded
from common.data.conversations import Rejected, conversation
from common.data.store import Document
from common.trees import digest


class NotUsed(Exception):
    """Why a row's token ids are not taken; the message is the reason it is counted under."""


def token_ids(chat: Chat, row: dict[str, Any], exchanges: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """The field `token_ids` of a row whose assistant's turns were written as these (prompt, answer) ids, in their order."""
    sequences: list[dict[str, Any]] = []
    for prompt, answer in exchanges:
        so_far = sequences[-1]["ids"] if sequences else []
        if not so_far or list(prompt[: len(so_far)]) != so_far:
            sequences.append({"ids": [], "answers": []})
        sequences[-1]["ids"] = [*prompt, *answer]
        sequences[-1]["answers"].append([len(prompt), len(prompt) + len(answer)])
    return _written_with(chat, row) | {"sequences": sequences}


def written_documents(chat: Chat, row: Any) -> list[Document]:
    """The documents of a row by the ids that it carries, the answers supervised.

    Raises: NotUsed if it carries none or they do not fit; Rejected if the row is no conversation.
    """
    carried = row.get("token_ids") if isinstance(row, dict) else None
    if carried is None:
        raise NotUsed("no token ids")
    try:
        fits = _written_with(chat, row)
        carried = {"added_tokens_digest": fits["added_tokens_digest"]} | carried  # rows of earlier versions do not say
        if reason := next((reason for key, reason in MISFITS.items() if carried[key] != fits[key]), None):
            raise NotUsed(reason)
        documents = [_document(sequence["ids"], sequence["answers"], chat.vocab_size) for sequence in carried["sequences"]]
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError):
        raise NotUsed("damaged token ids") from None
    if not documents:
        raise NotUsed("damaged token ids")
    return documents


MISFITS = {
    "vocabulary_digest": "written with another vocabulary",
    "added_tokens_digest": "written with other added tokens",
    "template_digest": "written with another chat template or other --chat-template-kwargs",
    "conversation_digest": "messages changed after they were written",
}


def packed_otherwise(chat: Chat, packed_with: Mapping[str, str]) -> list[str]:
    """What a store was packed with (`TokenStore.packed_with`) that is another here, by name."""
    mine = {"chat template": chat.template_digest, "added tokens": chat.added_tokens_digest}
    return [what for what, found in packed_with.items() if mine.get(what, found) != found]


def _written_with(chat: Chat, row: dict[str, Any]) -> dict[str, str]:
    said = digest([conversation(row), row.get("tools")])
    return {
        "vocabulary_digest": chat.vocabulary_digest,
        "added_tokens_digest": chat.added_tokens_digest,
        "template_digest": chat.template_digest,
        "conversation_digest": said,
    }


def _document(given_ids: Any, given_answers: Any, vocab_size: int) -> Document:
    """Raises: TypeError or ValueError unless these are ids, with answers that follow each other inside them; NotUsed for an unknown id."""
    ids, answers = np.array(given_ids), np.array(given_answers)
    if ids.dtype.kind != "i" or answers.dtype.kind != "i" or ids.ndim != 1 or answers.ndim != 2 or answers.shape[1] != 2:
        raise TypeError
    if np.diff([0, *answers.ravel(), len(ids)]).min() < 0 or ids.min() < 0:
        raise ValueError
    if ids.max() >= vocab_size:  # embeddings often have more rows than the tokenizer has tokens
        raise NotUsed("an id beyond the tokenizer's vocabulary")
    mask = np.zeros(len(ids), np.uint8)
    for begin, end in answers:
        mask[begin:end] = 1
    return ids.astype(np.int32), mask


def compare_answers(written: list[Document], from_text: Encoded | Rejected) -> tuple[int, int]:
    """How many answers the written documents hold, and how many of them come back from their text as other tokens."""
    answers = [answer for document in written for answer in _answers(document)]
    again = [] if isinstance(from_text, Rejected) else [answer for document in from_text.documents for answer in _answers(document)]
    if len(answers) != len(again):
        return len(answers), len(answers)
    # Behind an answer that ran into its limit, the text's document goes on with the template's end of turn, which nobody wrote.
    same = sum(np.array_equal(answer, other[: len(answer)]) for answer, other in zip(answers, again, strict=True))
    return len(answers), len(answers) - same


def _answers(document: Document) -> list[np.ndarray]:
    """The ids of each supervised run."""
    ids, mask = document
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return [ids[begin:end] for begin, end in edges.reshape(-1, 2)]
