"""Conversations to token ids and loss mask, through the chat template of the target's tokenizer; and back to a person's eyes.

Supervised are the assistant's turns (`common/data/turns.py`). Text inside a message that merely looks like a special token is hidden
while the template runs and tokenized as ordinary text. What the template leaves out is counted (`common/data/lost.py`).

Legend: N tokens of a document.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from common.data.conversations import Message, Rejected, conversation, normalise, tools_of
from common.data.lost import lost_pieces
from common.data.store import Document, added_tokens_digest, vocabulary_digest
from common.data.thoughts import OPENED, after_opening
from common.data.time_limit import TooLong, time_limit
from common.data.turns import Span, Turns
from common.errors import UserError, first_line
from common.trees import digest

PRIVATE = re.compile("[\U00100000-\U0010ffff]")  # a plane of Unicode left to private use: our placeholders live in it
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ESCAPE, MARK, MOST_IDS = 0x100000, "\U0010fffc", 10**7
WORD_MARK = "▁"
"""What stands for a space in SentencePiece's tokens."""
RENDERING_S = 20.0
"""Processor time that a template may take for one conversation; thousands of messages take a tenth of a second."""
SHORT = 10_000
"""Characters of a conversation on which no template may take that long: one that does would do so on every line."""


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or hub id. Raises: UserError if there is none, or none with exact offsets."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)  # left out, it would ask
        tokenizer("\U0010ffff")  # a character that no vocabulary holds
        if max(tokenizer.get_vocab().values(), default=0) > MOST_IDS:  # its gaps would be counted one by one, and fill all memory
            raise ValueError(f"token ids beyond {MOST_IDS:,}")
    except Exception as error:  # transformers raises many kinds; the user needs one sentence
        raise UserError(f"no tokenizer could be loaded from {path} ({first_line(error)}); give the target's folder") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"the tokenizer of {path} has no tokenizer.json: its offsets, by which the loss mask is set, are unknown")
    return tokenizer


@dataclass(frozen=True)
class Encoded:
    """What one row became: its documents, the tokens that the template left out by kind, and how many of its answers follow a prompt that
    a server never gives.
    """

    documents: list[Document]
    lost: dict[str, int]
    unserved: int


@dataclass(frozen=True)
class Text:
    """The text of a document, with special tokens in its content hidden, and its supervised spans (None: a bare text, all of it)."""

    text: str
    spans: list[Span] | None
    unserved: int = 0


class Chat:
    """A tokenizer with its chat template: rows to documents, conversations to prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        added = tokenizer.added_tokens_decoder
        specials = {token.content: id for id, token in added.items() if token.special and token.content}
        self._special_ids = np.array(sorted(specials.values()), np.int64)
        self._escapes = {text: chr(ESCAPE + i) for i, text in enumerate(specials)}
        self._special_text = _any_of(specials)
        self._plain = {ord(escape): text for text, escape in self._escapes.items()}
        self.turns = Turns(self.render, re.compile(r"\s*" + _any_of(token.content for token in added.values()).pattern))
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()

    @property
    def template(self) -> str | None:
        """The Jinja text of the chat template, or None for a tokenizer that has none."""
        named = self.tokenizer.chat_template
        return self.template_kwargs.get("chat_template") or (named.get("default") if isinstance(named, dict) else named)

    @property
    def template_digest(self) -> str:
        """Hash of the template and of what else it is given: equal where equal messages become equal text."""
        return digest([self.template, {k: v for k, v in self.template_kwargs.items() if k != "chat_template"}])

    @cached_property
    def vocabulary_digest(self) -> str:
        """Hash of the token-to-id table: equal for tokenizers that give the same ids their meaning."""
        return vocabulary_digest(self._tokenizer_json)

    @cached_property
    def added_tokens_digest(self) -> str:
        """Hash of the added tokens: equal for tokenizers that keep the same words of a text whole."""
        return added_tokens_digest(self._tokenizer_json)

    @cached_property
    def _tokenizer_json(self) -> str:
        path = self.tokenizer.name_or_path
        file = path and cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False, local_files_only=True)
        return Path(file).read_text() if file else self.backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def documents(self, rows: Iterable[Any], split_turns: bool = False) -> list[Encoded | Rejected]:
        """Encode parsed JSONL rows. Returns, for each, its documents (one, or with `split_turns` one an answer) or why there are none."""
        texts: list[tuple[list[Text], list[tuple[str, str]]] | Rejected] = []
        for row in rows:
            try:
                texts.append(self._texts(row, split_turns))
            except Rejected as rejected:
                texts.append(rejected)
            except RecursionError:
                texts.append(Rejected("nested too deeply"))
        whole = [found for found in texts if not isinstance(found, Rejected)]
        encoded = self._encode([text.text for parts, _ in whole for text in parts])
        documents = [[self._document(text, *next(encoded)) for text in parts] for parts, _ in whole]
        sizes = self._encode([piece for _, lost in whole for _, piece in lost])
        results = []
        for (parts, lost), made in zip(whole, documents, strict=True):
            counted: Counter[str] = Counter()
            for kind, _ in lost:
                counted[kind] += len(next(sizes)[0])
            results.append(Encoded(made, dict(counted), sum(text.unserved for text in parts)))
        found = iter(results)
        return [text if isinstance(text, Rejected) else next(found) for text in texts]

    def _document(self, text: Text, ids: np.ndarray, offsets: np.ndarray) -> Document:
        if text.spans is not None:
            mask, kept = _mask(text.text, offsets, text.spans), np.ones(len(ids), bool)
            kept[self._lone_spaces(text.text, ids, offsets, text.spans)] = False
            return ids[kept], mask[kept]
        first = self._first_ids  # a template writes the first token itself, a bare text leaves it to the tokenizer
        return np.append(first, ids), np.append(np.zeros(len(first), np.uint8), _mask(text.text, offsets, [(0, len(text.text))]))

    def _lone_spaces(self, text: str, ids: np.ndarray, offsets: np.ndarray, spans: list[Span]) -> list[int]:
        """Tokens that no server's prompt and no answer holds: a template's space before an answer whose first word brings its own."""
        found = []
        for begin, _ in spans:
            token = int(offsets[:, 1].searchsorted(begin, "right"))
            pieces = [self.backend.id_to_token(int(i)) or "" for i in ids[token : token + 2]]
            if text[begin : begin + 1] == " " and len(pieces) == 2 and pieces[0] == WORD_MARK and pieces[1].startswith(WORD_MARK):
                found.append(token)
        return found

    def prompt(self, messages: list[Message]) -> np.ndarray:
        """Token ids int32 of a conversation with the generation prompt behind it.

        Raises: Rejected if the template refuses the messages.
        """
        text = self.render(self._hide([normalise(message) for message in messages]), generation=True)
        return next(self._encode([text]))[0]

    def show(self, ids: np.ndarray, mask: np.ndarray, color: bool) -> str:
        """A document for reading: supervised text green (without color: between « and »), special tokens inverse (⟦ ⟧), and its anchors."""
        special = np.isin(ids, self._special_ids)
        changes = np.flatnonzero((np.diff(mask) != 0) | special[1:] | special[:-1]) + 1
        shown = []
        for begin, end in itertools.pairwise([0, *changes.tolist(), len(ids)]):
            text = CONTROL.sub(lambda match: repr(match[0])[1:-1], self.backend.decode(ids[begin:end].tolist(), skip_special_tokens=False))
            style = f"{'32' if mask[begin] else '2'}{';7' if special[begin] else ''}"
            text = f"\033[{style}m{text}\033[0m" if color else f"⟦{text}⟧" if special[begin] else text
            shown.append(text if color else f"«{text}»" if mask[begin] else text)
        anchors = np.flatnonzero(mask[:-1] & mask[1:])
        runs = np.split(anchors, np.flatnonzero(np.diff(anchors) > 1) + 1) if len(anchors) else []
        ranges = ", ".join(f"{run[0]}-{run[-1]}" for run in runs)
        legend = "supervised: green, special tokens: inverse" if color else "supervised: « », special tokens: ⟦ ⟧"
        return f"{''.join(shown)}\n{len(ids)} tokens, {int(mask.sum())} supervised ({legend}); {len(anchors)} anchors may lie at {ranges}"

    def render(self, messages: list[Message], generation: bool = False, tools: Any = None) -> str:
        """The template's text of messages, with the generation prompt behind it if asked for.

        Raises: Rejected if there is no template, or if it refuses; UserError if it does not end.
        """
        if self.template is None:
            raise Rejected("the tokenizer has no chat template")
        try:
            with time_limit(RENDERING_S):
                text = self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=generation, **self.template_kwargs
                )
                return str(text).encode().decode()  # half a surrogate pair is no text
        except TooLong:
            if sum(len(message["content"]) for message in messages) > SHORT:
                raise Rejected(f"the chat template computes for more than {RENDERING_S:g} s") from None
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} computes for more than {RENDERING_S:g} s on {len(messages)} short "
                "messages: does it loop for ever? Mend it, or give another by --chat-template-kwargs '{\"chat_template\": ...}'"
            ) from None
        except Exception as error:  # a template may raise anything
            raise Rejected(f"the template refuses: {' '.join(str(error).split())[:100]}") from None

    def _texts(self, row: Any, split_turns: bool) -> tuple[list[Text], list[tuple[str, str]]]:
        """A row's texts, and what the template left out of them as (kind, text)."""
        if isinstance(row, Rejected):
            raise row
        if not isinstance(row, dict):
            raise Rejected("not a JSON object")
        if isinstance(row.get("text"), str) and not {"messages", "conversations"} & row.keys():
            return [Text(self._hide(row["text"]), None)], []
        messages, tools = self._hide(conversation(row)), self._hide(tools_of(row))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Rejected("no assistant turn")
        _ = self.turns.frame  # the shortest rendering first: a template that never ends ends the run here
        if split_turns:
            found = [self._as_served(messages, turn, tools) for turn in turns]
            texts = [text for text in found if text is not None]
            if not texts:
                raise Rejected("no answer has the thoughts that the template's prompt begins")
            by_turn = [text.text if text else "" for text in found]
        else:
            text = self.render(messages, tools=tools)
            spans = self.turns.spans(messages, text, tools)
            texts = [Text(text, spans, sum(not self.turns.serves(text, begin) for begin, _ in spans))]
            by_turn = [text] * len(turns)
        return texts, lost_pieces(messages, tools, by_turn)

    def _as_served(self, messages: list[Message], turn: int, tools: Any) -> Text | None:
        """The prompt that a server would give for this turn, and what the target wrote behind it; None where it wrote thoughts that the
        message does not hold.
        """
        prompt, shown = self.render(messages[:turn], True, tools), self.render(messages[: turn + 1], False, tools)
        begin, end = self.turns.spans(messages[: turn + 1], shown, tools)[-1]
        if shown.startswith(prompt):
            return Text(shown[:end], [(begin, end)])
        answer = shown[begin:end]
        if OPENED.search(prompt, max(0, len(prompt) - 64)):
            answer = after_opening(prompt, messages[turn], answer)
        return None if answer is None else Text(prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    def _hide(self, value: Any) -> Any:
        """Put a placeholder character instead of every special token's text."""
        if isinstance(value, dict):
            return {self._hide(k): self._hide(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._hide(v) for v in value]
        if not isinstance(value, str):
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Rejected("text with half a surrogate pair") from None
        if PRIVATE.search(value):
            raise Rejected("text with characters of Unicode's private plane 16")
        return self._special_text.sub(lambda match: self._escapes[match[0]], value)

    def _encode(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids int32 [N] and (begin, end) offsets int64 [N, 2] for each text."""
        for text, encoding in zip(texts, self.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids, offsets = _arrays(encoding)
            yield self._encode_hidden(text, ids, offsets) if PRIVATE.search(text) else (ids, offsets)

    def _encode_hidden(self, text: str, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode anew what lies between two real special tokens and holds hidden ones, by a twin that knows no special tokens."""
        real = np.flatnonzero(np.isin(ids, self._special_ids))
        pieces, begin, first = [], 0, 0  # where the part between two special tokens begins, in characters and in tokens
        for special in [*real.tolist(), None]:
            end = len(text) if special is None else int(offsets[special, 0])
            part = text[begin:end]
            pieces.append(self._encode_literally(part, begin) if PRIVATE.search(part) else (ids[first:special], offsets[first:special]))
            if special is not None:
                first, begin = special + 1, int(offsets[special, 1])
                pieces.append((ids[special:first], offsets[special:first]))
        return np.concatenate([ids for ids, _ in pieces]), np.concatenate([offsets for _, offsets in pieces])

    def _encode_literally(self, part: str, begin: int) -> tuple[np.ndarray, np.ndarray]:
        lead = MARK if begin else ""  # some tokenizers treat a text's first word otherwise than one behind a token
        ids, offsets = _arrays(self._literal.encode(lead + part.translate(self._plain), add_special_tokens=False))
        start_of = np.cumsum([len(lead), *(len(self._plain.get(ord(c), c)) for c in part)])  # of each hidden character in the plain text
        first, last = np.searchsorted(start_of, offsets[:, 0], "right") - 1, np.searchsorted(start_of, offsets[:, 1], "left")
        return ids[len(lead) :], (begin + np.stack([first, last], 1))[len(lead) :]

    @cached_property
    def _literal(self) -> Tokenizer:
        twin = Tokenizer.from_str(self.backend.to_str())
        twin.encode_special_tokens = True
        twin.add_tokens([AddedToken(MARK, normalized=False)])
        return twin

    @cached_property
    def _first_ids(self) -> np.ndarray:
        """What the tokenizer puts before a bare text."""
        ids = self.backend.encode("x", add_special_tokens=True).ids
        return np.array(list(itertools.takewhile(set(self._special_ids.tolist()).__contains__, ids)), np.int32)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of these texts, or nothing if there are none."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True)]
    return re.compile(f"(?:{'|'.join(escaped)})" if escaped else "(?!)")


def _arrays(encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    flat = itertools.chain.from_iterable(encoding.offsets)  # several times faster than an array of tuples
    return np.array(encoding.ids, np.int32), np.fromiter(flat, np.int64, 2 * len(encoding)).reshape(-1, 2)


def _mask(text: str, offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """uint8 [N]: 1 on every token that holds a character of a span and, before it, at most white space; offsets ascend."""
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    mask = np.zeros(len(offsets), np.uint8)
    for begin, end in spans:
        white = begin
        while white and text[white - 1].isspace():
            white -= 1
        first = max(begins.searchsorted(white), ends.searchsorted(begin, "right"))
        mask[first : begins.searchsorted(end)] = 1
    return mask
