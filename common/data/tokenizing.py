"""From JSONL conversations to a token store on disk, with a count of everything that was left out and why."""

import hashlib
import heapq
import itertools
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from common.data.chat import Chat, load_tokenizer
from common.data.conversations import Rejected, parse, read_lines
from common.data.store import StoreWriter, TokenStore, vocabulary_digest
from common.errors import UserError
from common.trees import digest

BATCH_LINES, SHOWN_LINES, SHOWN_REASONS = 512, 100, 50


def pack(inputs, target, output, max_tokens=None, heldout=0, heldout_output=None, chat_template_kwargs=None, seed=0):
    """Write a token store of the conversations in `inputs`, and a second one of `heldout` of them. Returns what was counted.

    Which documents are held out depends on `seed` and their own tokens only, so copies of one document stay on one side: held out,
    they count as one. Raises: UserError if nothing is usable, with the reasons.
    """
    for path in inputs:
        if path != "-" and not Path(path).is_file():
            raise UserError(f"{path}: no such file")
    if heldout < 0:
        raise UserError(f"--heldout {heldout} must not be negative")
    chat, file = Chat(load_tokenizer(target), chat_template_kwargs), Path(target) / "tokenizer.json"
    counts, rejects = {"lines": 0, "accepted": 0, "rejected": 0, "truncated": 0}, {}
    meta = {
        "target": str(Path(target).resolve() if Path(target).is_dir() else target),
        "vocab_size": max(chat.tokenizer.get_vocab().values()) + 1,
        "vocabulary_digest": vocabulary_digest(file.read_text() if file.is_file() else chat.backend.to_str()),
        "template_digest": digest(chat.template),
        "chat_template_kwargs": chat.template_kwargs,
        "max_tokens": max_tokens,
        "pack": counts | {"rejects": rejects},
    }
    folders = [output, heldout_output or f"{str(output).rstrip('/')}-heldout"] if heldout else [output]
    locations = [Path(folder).resolve() for folder in folders]
    if any(a == b or a in b.parents for a, b in itertools.permutations(locations, 2)):
        raise UserError(f"--output {output} and --heldout-output {folders[1]} lie in each other: name two folders side by side")
    apart, keys = {}, []  # documents held out so far by key, and a heap of their keys, the largest first
    with ExitStack() as stack:
        stores = [stack.enter_context(StoreWriter(folder, meta)) for folder in folders]
        for location, source, document in _documents(chat, inputs):
            counts["lines"] += 1
            try:
                ids, mask = _usable(document, max_tokens)
            except Rejected as reason:
                counts["rejected"] += 1
                _count_reject(rejects, str(reason), location)
                continue
            counts["accepted"] += 1
            counts["truncated"] += len(ids) < len(document[0])
            key = -int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8, key=b"%d" % seed).digest())
            if key not in apart:
                heapq.heappush(keys, key)
            apart.setdefault(key, []).append((ids, mask, source))
            if len(keys) > heldout:
                for one in apart.pop(heapq.heappop(keys)):
                    stores[0].add(*one)
        if not counts["accepted"]:
            raise UserError(f"none of {counts['lines']} lines is usable: {'; '.join(_describe_rejects(rejects)) or 'the input is empty'}")
        if counts["accepted"] == sum(map(len, apart.values())):
            raise UserError(f"--heldout {heldout} leaves none of {counts['accepted']} usable documents to train on; hold out fewer")
        for key in sorted(apart, reverse=True):
            for one in apart[key]:
                stores[1].add(*one)
        meta["pack"] |= counts
    written = [{"folder": str(f)} | {k: TokenStore.open(f).meta[k] for k in ("documents", "tokens", "supervised_tokens")} for f in folders]
    return written[0] | {"heldout": written[1] if heldout else None} | meta["pack"]


def _documents(chat, inputs):
    """Yield (location, source, ids and mask or Rejected) for every line."""
    lines = tqdm(itertools.chain.from_iterable(map(read_lines, inputs)), unit=" lines", disable=None)
    while batch := list(itertools.islice(lines, BATCH_LINES)):
        documents = chat.documents(parse(line) for _, _, line in batch)
        yield from ((location, source, document) for (location, source, _), document in zip(batch, documents, strict=True))


def _usable(document, max_tokens):
    """The document cut to its size. Raises: Rejected if it is none, or if no anchor could lie in it."""
    if isinstance(document, Rejected):
        raise document
    ids, mask = document
    if not has_anchor(mask[:max_tokens]):
        raise Rejected(f"no answer within --max-tokens {max_tokens}" if has_anchor(mask) else "no two supervised tokens in a row")
    return ids[:max_tokens], mask[:max_tokens]


def has_anchor(mask):
    return bool((mask[:-1] & mask[1:]).any())


def _count_reject(rejects, reason, location):
    entry = rejects.setdefault(reason if len(rejects) < SHOWN_REASONS else "other reasons", {"count": 0, "lines": []})
    entry["count"] += 1
    if len(entry["lines"]) < SHOWN_LINES:
        entry["lines"].append(location)


def describe_counts(counts):
    """What became of the lines, as `pack` counted it, for reading."""
    text = "{lines:,} lines packed: {accepted:,} accepted ({truncated:,} truncated), {rejected:,} rejected".format_map(counts)
    return "\n".join([text, *_describe_rejects(counts["rejects"])])


def _describe_rejects(rejects, shown=5):
    """One phrase per reason: how often, why, and the first locations."""
    phrases = []
    for reason, entry in sorted(rejects.items(), key=lambda item: -item[1]["count"]):
        locations = ", ".join(entry["lines"][:shown]) + (", ..." if entry["count"] > shown else "")
        phrases.append(f"{entry['count']} x {reason} ({locations})")
    return phrases
