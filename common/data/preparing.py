"""From JSONL conversations to a token store on disk, with a count of everything that was left out and why.

One process reads lines and writes documents, several tokenize; the store's bytes do not depend on how many.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.cli import check_input
from common.data.conversations import Line, Rejected, read_lines
from common.data.parallel import cores, ordered_map
from common.data.store import Document, StoreWriter, TokenStore
from common.data.tokenizing import Batch, LineTokenizer, Tokenized
from common.errors import UserError

SHOWN_LINES, SHOWN_REASONS = 100, 50
BATCH_LINES, BATCH_BYTES = 64, 4 << 20
ALONE_BYTES = 4 << 20
"""Of input: so much one process has tokenized before others would have started."""
COMPARED_LINES = 1024
"""From the first one on: here the text of written answers is tokenized, too, to see how often it comes back as other tokens."""


@dataclass
class Counts:
    """What became of the lines, and where their tokens are from."""

    lines: int = 0
    accepted: int = 0
    rejected: int = 0
    truncated: int = 0
    written: int = 0
    """Accepted lines whose documents are the ids that the target wrote; the others' text was tokenized, for these reasons:"""
    tokenized: dict[str, int] = field(default_factory=dict)
    compared_answers: int = 0
    differing_answers: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    """Tokens of the accepted lines that the chat template left out, by what they were."""
    unserved: int = 0
    """Answers behind a prompt that a server never gives."""
    split_turns: bool = False
    """Whether each answer became a document of its own."""
    rejects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reason -> how many lines, and where the first of them are."""

    def reject(self, reason: Rejected, location: str) -> None:
        """Count a line that cannot become a document."""
        self.rejected += 1
        key = str(reason) if str(reason) in self.rejects or len(self.rejects) < SHOWN_REASONS else "other reasons"
        entry = self.rejects.setdefault(key, {"count": 0, "lines": []})
        entry["count"] += 1
        if len(entry["lines"]) < SHOWN_LINES:
            entry["lines"].append(location)

    def accept(self, line: Tokenized) -> None:
        """Count a line that became documents."""
        self.accepted += 1
        self.truncated += line.truncated
        self.written += line.reason is None
        if line.reason is not None:
            self.tokenized[line.reason] = self.tokenized.get(line.reason, 0) + 1
        self.compared_answers += line.answers
        self.differing_answers += line.differing
        self.unserved += line.unserved
        for kind, tokens in line.lost.items():
            self.lost[kind] = self.lost.get(kind, 0) + tokens


class Split:
    """Writes conversations into the first of its stores, and the `heldout` conversations with the lowest draws into the second.

    Copies of a conversation have one draw, so they stay on one side, and held out they count as one.
    """

    def __init__(self, stores: list[StoreWriter], heldout: int) -> None:
        self.stores, self.heldout = stores, heldout
        self._apart: dict[int, list[tuple[list[Document], str]]] = {}  # the conversations held out so far, by their draw
        self._draws: list[int] = []  # of these, negative: a heap whose first is the highest draw

    def add(self, line: Tokenized, source: str) -> None:
        """Write a conversation, or hold it out and write the one that it displaces."""
        if line.draw not in self._apart:
            heapq.heappush(self._draws, -line.draw)
        self._apart.setdefault(line.draw, []).append((line.documents, source))
        if len(self._draws) > self.heldout:
            self._write(self.stores[0], -heapq.heappop(self._draws))

    @property
    def held_out(self) -> int:
        """Conversations that are held out, copies included."""
        return sum(map(len, self._apart.values()))

    def finish(self) -> None:
        """Write what is held out."""
        for draw in sorted(self._apart):
            self._write(self.stores[1], draw)

    def _write(self, store: StoreWriter, draw: int) -> None:
        for documents, source in self._apart.pop(draw):
            for ids, mask in documents:
                store.add(ids, mask, source)


def pack(
    inputs: list[str],
    target: str,
    output: str,
    max_tokens: int | None = None,
    heldout: int = 0,
    heldout_output: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    workers: int | None = None,
    trust_remote_code: bool = False,
    split_turns: bool = False,
) -> dict[str, Any]:
    """Write a token store of the conversations in `inputs`, and a second one of `heldout` of them. Returns what was counted.

    With `split_turns` each answer is a document, behind the prompt that a server would give for it.
    The first store names the second by its fingerprint, so that no other passes for what was held out of it. Which conversations are
    held out depends on `seed` and their own tokens only. `workers` processes tokenize (None: one a core).

    Raises: UserError if nothing is usable, with the reasons.
    """
    for path in inputs:
        if path != "-":
            check_input("input", path)
    if heldout < 0:
        raise UserError(f"--heldout {heldout} must not be negative; give the number of conversations to hold out")
    tokenizer = LineTokenizer(target, chat_template_kwargs or {}, max_tokens, seed, trust_remote_code, split_turns)
    chat = tokenizer.chat
    meta = {
        "target": str(Path(target).resolve()) if Path(target).is_dir() else target,
        "vocab_size": chat.vocab_size,
        "vocabulary_digest": chat.vocabulary_digest,
        "added_tokens_digest": chat.added_tokens_digest,
        "template_digest": chat.template_digest,
        "chat_template_kwargs": chat.template_kwargs,
        "max_tokens": max_tokens,
    }
    folders = [output, heldout_output or f"{output.rstrip('/')}-heldout"] if heldout else [output]
    locations = [Path(folder).resolve() for folder in folders]
    if any(a == b or a in b.parents for a, b in itertools.permutations(locations, 2)):
        raise UserError(f"--output {output} and --heldout-output {folders[1]} lie in each other: name two folders side by side")
    with StoreWriter(output, dict(meta)) as train:
        with StoreWriter(folders[1], dict(meta)) if heldout else nullcontext() as apart:
            with closing(tokenized_lines(tokenizer, inputs, workers or cores())) as lines:
                counts = Counts(split_turns=split_turns)
                _fill(counts, Split([train, apart] if apart else [train], heldout), lines)
            for store in (train, apart) if apart else (train,):
                store.meta["pack"] = asdict(counts)
        train.meta["heldout"] = apart.meta["fingerprint"] if apart else None
    written = [{"folder": f} | {k: TokenStore.open(f).meta[k] for k in ("documents", "tokens", "supervised_tokens")} for f in folders]
    return written[0] | {"heldout": written[1] if heldout else None} | asdict(counts)


def _fill(counts: Counts, split: Split, lines: Iterable[tuple[str, str, Tokenized | Rejected]]) -> None:
    """Write the documents of all lines and count what became of them. Raises: UserError if nothing is left to train on."""
    for location, source, line in lines:
        counts.lines += 1
        if isinstance(line, Rejected):
            counts.reject(line, location)
        else:
            counts.accept(line)
            split.add(line, source)
    if not counts.accepted:
        reasons = "; ".join(_describe_rejects(counts.rejects)) or "the input is empty"
        raise UserError(f"none of {counts.lines} lines is usable: {reasons}")
    if counts.accepted == split.held_out:
        raise UserError(f"--heldout {split.heldout} leaves none of {counts.accepted} usable conversations to train on; hold out fewer")
    split.finish()


def tokenized_lines(
    tokenizer: LineTokenizer, inputs: list[str], workers: int
) -> Generator[tuple[str, str, Tokenized | Rejected], None, None]:
    """Yield (location, source, what became of it) for every line, in their order."""
    origins: deque[list[tuple[str, str]]] = deque()  # of the batches that are being tokenized
    batches = _batches(inputs, origins)
    first, size_bytes = [], 0
    for batch in batches:
        first.append(batch)
        size_bytes += sum(len(line) for line in batch[0] if isinstance(line, bytes))
        if size_bytes > ALONE_BYTES:
            break
    workers = workers if size_bytes > ALONE_BYTES else 1
    with closing(ordered_map(tokenizer, itertools.chain(first, batches), workers)) as results:
        for lines in results:
            for (location, source), line in zip(origins.popleft(), lines, strict=True):
                yield location, source, line


def _batches(inputs: list[str], origins: deque[list[tuple[str, str]]]) -> Iterator[Batch]:
    """Yield batches of lines, and note where they are from."""
    lines = iter(tqdm(itertools.chain.from_iterable(map(read_lines, inputs)), unit=" lines", disable=None))
    read = 0
    while batch := list(_some(lines)):
        origins.append([(location, source) for location, source, _ in batch])
        yield [line for _, _, line in batch], read < COMPARED_LINES
        read += len(batch)


def _some(lines: Iterator[Line]) -> Iterator[Line]:
    """As many lines as one process is given at a time: few where they are long, for all of them lie in memory."""
    size_bytes = 0
    for line in itertools.islice(lines, BATCH_LINES):
        yield line
        size_bytes += len(line[2]) if isinstance(line[2], bytes) else 0
        if size_bytes > BATCH_BYTES:
            return


def describe_counts(counts: Any) -> str:
    """What became of the lines, as `pack` counted it, for reading. Raises: UserError for counts that `pack` did not write."""
    try:
        return _describe(counts)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UserError("the token store does not say what became of the lines that it was packed from; pack it again") from None


def _describe(counts: dict[str, Any]) -> str:
    text = ["{lines:,} lines packed: {accepted:,} accepted ({truncated:,} truncated), {rejected:,} rejected".format_map(counts)]
    text += _describe_rejects(counts["rejects"])
    if "written" in counts:  # stores of earlier versions do not know
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in counts["tokenized"].items())
        anew = f"; {counts['accepted'] - counts['written']:,} were tokenized from their text: {reasons}" if reasons else ""
        text.append(f"{counts['written']:,} are the tokens that the target wrote{anew}")
    if answers := counts.get("compared_answers"):
        share = counts["differing_answers"] / answers
        text.append(f"the text of {share:.1%} of {answers:,} written answers comes back as other tokens (first {COMPARED_LINES:,} lines)")
    lost, unserved = counts.get("lost"), counts.get("unserved")
    if lost:
        kinds = ", ".join(f"{tokens:,} of {kind}" for kind, tokens in sorted(lost.items(), key=lambda item: -item[1]))
        text.append(f"the chat template leaves out {sum(lost.values()):,} tokens: {kinds}")
    if unserved:
        text.append(f"{unserved:,} answers follow another prompt in the template than the one that a server gives for them")
    if (lost or unserved) and not counts["split_turns"]:
        text.append("--split-turns makes a document of each answer, behind the prompt that it is served with")
    return "\n".join(text)


def _describe_rejects(rejects: dict[str, Any], shown: int = 5) -> list[str]:
    """One phrase per reason: how often, why, and the first locations."""
    phrases = []
    for reason, entry in sorted(rejects.items(), key=lambda item: -item[1]["count"]):
        locations = ", ".join(entry["lines"][:shown]) + (", ..." if entry["count"] > shown else "")
        phrases.append(f"{entry['count']} x {reason} ({locations})")
    return phrases
