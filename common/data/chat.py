"""Conversations to token ids and loss mask, through the chat template of the target's tokenizer; and back to a person's eyes.

Supervised is what the target itself would have generated: an assistant's turn from the end of the generation prompt through its
end-of-turn token. Where that lies is found by rendering, so any template works and none needs generation markers.

Text inside a message that merely looks like a special token is hidden while the template runs and tokenized as ordinary text.
"""

import itertools
import re
from functools import cached_property

import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from common.data.conversations import Rejected, _message, conversation
from common.errors import UserError

PRIVATE = re.compile("[\U00100000-\U0010ffff]")  # a plane of Unicode left to private use: our placeholders live in it
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ESCAPE, PROBE, MARK = 0x100000, "\U0010fffd", "\U0010fffc"


def load_tokenizer(path):
    """The tokenizer of a folder or hub id. Raises: UserError if there is none, or none with exact offsets."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds; the user needs one sentence
        raise UserError(
            f"no tokenizer could be loaded from {path} ({str(error).strip().splitlines()[0]}); give the target's folder"
        ) from None
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of {path} has no tokenizer.json: its offsets, by which the loss mask is set, are unknown")
    return tokenizer


class Chat:
    """A tokenizer with its chat template: rows to documents, conversations to prompts."""

    def __init__(self, tokenizer, template_kwargs=None):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        added = tokenizer.added_tokens_decoder
        specials = {token.content: id for id, token in added.items() if token.special and token.content}
        self._special_ids = np.array(sorted(specials.values()), np.int64)
        self._escapes = {text: chr(ESCAPE + i) for i, text in enumerate(specials)}
        self._special_text = _any_of(specials)
        self._end_of_turn = re.compile(r"\s*" + _any_of(token.content for token in added.values()).pattern)
        self._plain = {ord(escape): text for text, escape in self._escapes.items()}
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()

    @property
    def template(self):
        given = self.template_kwargs.get("chat_template")
        return given or (self.tokenizer.get_chat_template() if self.tokenizer.chat_template else None)

    def documents(self, rows):
        """Encode parsed JSONL rows. Returns, for each, (ids int32 [n], mask uint8 [n]) or the Rejected that says why not."""
        results = []
        for row in rows:
            try:
                results.append(self._text_and_spans(row))
            except Rejected as rejected:
                results.append(rejected)
            except RecursionError:
                results.append(Rejected("nested too deeply"))
        good = [i for i, result in enumerate(results) if not isinstance(result, Rejected)]
        for i, (ids, offsets) in zip(good, self._encode([results[i][0] for i in good]), strict=True):
            text, spans = results[i]
            mask = _mask(text, offsets, [(0, len(text))] if spans is None else spans)
            if spans is None:  # a template writes the first token itself, a bare text leaves it to the tokenizer
                ids, mask = np.append(self._first_ids, ids), np.append(np.zeros_like(self._first_ids), mask)
            results[i] = ids, mask
        return results

    def prompt(self, messages):
        """Token ids int32 of a conversation with the generation prompt behind it."""
        text = self._render(self._hide([_message(message) for message in messages]), generation=True)
        return next(self._encode([text]))[0]

    def show(self, ids, mask, color):
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

    def _text_and_spans(self, row):
        """A row's text, special tokens in its content hidden, and its supervised (begin, end) ranges; None: a bare text, all of it."""
        if isinstance(row, Rejected):
            raise row
        if not isinstance(row, dict):
            raise Rejected("not a JSON object")
        if isinstance(row.get("text"), str) and not {"messages", "conversations"} & row.keys():
            return self._hide(row["text"]), None
        messages = self._hide(conversation(row))
        if all(message["role"] != "assistant" for message in messages):
            raise Rejected("no assistant turn")
        tools = self._hide(row.get("tools"))
        text = self._render(messages, tools=tools)
        return text, [self._span(messages, i, text, tools) for i, message in enumerate(messages) if message["role"] == "assistant"]

    def _span(self, messages, turn, text, tools):
        """Where turn's own tokens lie in the rendered text: the same conversation is rendered with a probe instead of the turn."""
        probe = {"role": "assistant", "content": PROBE}
        head, found, tail = self._render([*messages[:turn], probe, *messages[turn + 1 :]], tools=tools).partition(PROBE)
        header, inserted = self._header
        begin = len(head) - (len(inserted) if head.endswith(header + inserted) else 0)
        end = len(text) - len(tail)
        if not found or not text.endswith(tail) or text[:begin] != head[:begin] or begin > end:
            raise Rejected("the template does not show an assistant's turn in one piece")
        stop = self._end_of_turn.match(text, end)
        return begin, stop.end() if stop else end

    @cached_property
    def _header(self):
        """What the template opens an assistant's turn with, and what it then writes itself before the content (an empty thought)."""
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
        before, prompt, whole = self._render([user]), self._render([user], generation=True), self._render([user, answer])
        header, head = prompt.removeprefix(before), whole.partition(PROBE)[0]
        if prompt == before or not prompt.startswith(before) or not head.startswith(prompt):
            return "", ""
        return header, head.removeprefix(prompt)

    def _render(self, messages, generation=False, tools=None):
        if self.template is None:
            raise Rejected("the tokenizer has no chat template")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation, **self.template_kwargs
            )
        except Exception as error:  # a template may raise anything
            raise Rejected(f"the template refuses: {' '.join(str(error).split())[:100]}") from None

    def _hide(self, value):
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

    def _encode(self, texts):
        """Yield ids int32 [n] and (begin, end) offsets int64 [n, 2] for each text."""
        for text, encoding in zip(texts, self.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids, offsets = _arrays(encoding)
            yield self._encode_hidden(text, ids, offsets) if PRIVATE.search(text) else (ids, offsets)

    def _encode_hidden(self, text, ids, offsets):
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

    def _encode_literally(self, part, begin):
        lead = MARK if begin else ""  # some tokenizers treat a text's first word unlike one behind a token
        ids, offsets = _arrays(self._literal.encode(lead + part.translate(self._plain), add_special_tokens=False))
        start_of = np.cumsum([len(lead), *(len(self._plain.get(ord(c), c)) for c in part)])  # of each hidden character in the plain text
        first, last = np.searchsorted(start_of, offsets[:, 0], "right") - 1, np.searchsorted(start_of, offsets[:, 1], "left")
        return ids[len(lead) :], (begin + np.stack([first, last], 1))[len(lead) :]

    @cached_property
    def _literal(self):
        twin = Tokenizer.from_str(self.backend.to_str())
        twin.encode_special_tokens = True
        twin.add_tokens([AddedToken(MARK, normalized=False)])
        return twin

    @cached_property
    def _first_ids(self):
        """What the tokenizer puts before a bare text."""
        ids = self.backend.encode("x", add_special_tokens=True).ids
        return np.array(list(itertools.takewhile(set(self._special_ids.tolist()).__contains__, ids)), np.int32)


def _any_of(texts):
    """A pattern that matches the longest of these texts, or nothing if there are none."""
    return re.compile("(?:" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")" if texts else "(?!)")


def _arrays(encoding):
    flat = itertools.chain.from_iterable(encoding.offsets)  # several times faster than an array of tuples
    return np.array(encoding.ids, np.int32), np.fromiter(flat, np.int64, 2 * len(encoding)).reshape(-1, 2)


def _mask(text, offsets, spans):
    """uint8 [n]: 1 on every token that holds a character of a span and, before it, at most white space."""
    begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    mask = np.zeros(len(offsets), np.uint8)
    for begin, end in spans:
        mask |= ((begins >= len(text[:begin].rstrip())) & (ends > begin) & (begins < end)).view(np.uint8)
    return mask
