"""The target writes conversations: users' turns and answers (`synthesize`), or new answers to given turns (`regenerate`).

`Script` holds the dialogues, a backend plays them, and `ConversationFile` keeps what comes back, so that a stopped run goes on where it
was.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from common.cli import check_input
from common.data.chat import Chat, load_tokenizer
from common.data.conversations import Message, Rejected, conversation, parse, read_lines
from common.errors import UserError
from common.generation.backends import Backend, LocalBackend, Sampling
from common.generation.backends import Job as RowJob
from common.generation.conversation_file import ConversationFile
from common.generation.script import Script
from common.generation.server import ServerBackend
from common.target.files import read_spec, resolve


@dataclass
class Job:
    """A target that writes by a script into an output."""

    backend: Backend
    script: Script
    output: ConversationFile
    turns: int
    topics: str | Path | None
    input: str | Path | None

    @classmethod
    def open(
        cls,
        target: str,
        output: str | Path,
        answers: str,
        temperature: float,
        top_p: float,
        max_tokens: int,
        keep: Sequence[str],
        chat_template_kwargs: dict[str, Any],
        seed: int,
        server: str | None,
        concurrency: int,
        batch_size: int,
        device: str | None,
        stages: int,
        max_user_tokens: int | None = None,
        system: str | None = None,
        turns: int = 1,
        topics: str | Path | None = None,
        input: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """The job of a command line; everything is checked before the weights are loaded. Raises: UserError for what cannot be."""
        for flag, path in (("--topics", topics), ("--input", input)):
            if path is not None:
                check_input(flag, path, again=True)
        folder = resolve(target)
        chat = Chat(load_tokenizer(folder, trust_remote_code), chat_template_kwargs)
        spec = read_spec(folder, trust_remote_code)
        if not spec.eos_token_ids:
            raise UserError(
                f"--target {target}: neither config.json nor generation_config.json says what ends a turn; add eos_token_id to one"
            )
        if max_tokens >= spec.max_position_embeddings:
            positions = spec.max_position_embeddings
            raise UserError(f"--max-tokens {max_tokens} leaves no room for a prompt: this target has {positions} positions; ask for less")
        answer = Sampling(*((temperature, top_p) if answers == "sampled" else (0.0, 1.0)), max_tokens)
        question = Sampling(temperature, top_p, max_user_tokens) if max_user_tokens else None
        settings = {
            "target": spec.fingerprint, "seed": seed, "answer": asdict(answer), "question": question and asdict(question), "system": system,
            "chat_template_kwargs": chat_template_kwargs, "keep": sorted(keep),
            "turns": turns, "topics": _digest(topics), "input": _digest(input),
        }  # fmt: skip
        opened = ConversationFile(output, settings, chat.tokenizer, keep)
        try:
            if server:
                backend = ServerBackend(server, chat.tokenizer, concurrency)
            else:
                backend = LocalBackend.load(spec, chat.tokenizer, batch_size, device, stages)
        except BaseException:
            opened.close()
            raise
        return cls(backend, Script(chat, spec, seed, answer, question, system), opened, turns, topics, input)

    def synthesize(self, num: int) -> dict[str, int]:
        """Have the target write until `num` conversations are kept; for those that the filters reject others follow under further ids.
        Returns how many rows were kept, and the others by their flaw.

        Raises: UserError when none of 32 or more in a row is kept.
        """
        begun, useless = 0, 0
        topics = _topics(self.topics) if self.topics else [None]
        with closing(self.output) as output:
            while (missing := num - sum(f"{i:08d}" in output.kept for i in range(begun))) > 0:
                ids = [f"{i:08d}" for i in range(begun, begun + missing)]
                about = [topics[i % len(topics)] for i in range(begun, begun + missing)]
                self._run([(i, self.script.synthesize(i, self.turns, topic)) for i, topic in zip(ids, about, strict=True)])
                useless = useless + missing if output.kept.isdisjoint(ids) else 0
                if useless >= 32:
                    raise UserError(f"none of {useless} conversations is usable ({output.summary()}): see {output.path}.*; --keep may help")
                begun += missing
            return output.summary()

    def regenerate(self) -> dict[str, int]:
        """Answer the users' turns of the input's conversations anew. Returns how many rows were kept, and the others by their flaw.

        Raises: UserError when nothing is kept.
        """
        given, refused, path = [], [], str(self.input)
        for number, (_, _, line) in enumerate(read_lines(path), 1):
            row = parse(line)
            row_id = str(row.get("id", number)) if isinstance(row, dict) else str(number)
            row_id = row_id.encode(errors="replace").decode()  # half a surrogate pair is no text
            try:
                given.append((row_id, _to_answer(row)))
            except Rejected as rejected:
                refused.append((row_id, rejected))
        given.sort(key=lambda job: (len(job[1]), sum(len(message["content"]) for message in job[1])))  # alike ones share a batch
        with closing(self.output) as output:
            if len({row_id for row_id, _ in given}) < len(given):
                raise UserError(f"--input {path}: ids occur twice; give each conversation an `id` of its own, or none")
            output.add(refused)
            self._run([(row_id, self.script.regenerate(row_id, messages)) for row_id, messages in given])
            if not output.kept:
                raise UserError(f"--input {path}: no conversation is usable ({output.summary()}): see {output.path}.*")
            return output.summary()

    def _run(self, jobs: list[RowJob]) -> None:
        tokens, begun_s, before = 0, time.monotonic(), frozenset(self.output.done)
        with tqdm(total=len(jobs), initial=sum(row_id in before for row_id, _ in jobs), unit=" rows", smoothing=0.05) as bar:
            for outcomes in self.backend.run(jobs, before):
                self.output.add(outcomes)
                tokens += sum(row["tokens"] for _, row in outcomes if not isinstance(row, Rejected))
                bar.set_postfix_str(f"{tokens / (time.monotonic() - begun_s):,.0f} tokens/s, {self.output.summary()}")
                bar.update(len(outcomes))


def _digest(path: str | Path | None) -> str | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _topics(path: str | Path) -> list[str]:
    topics = [line.strip() for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    if not topics:
        raise UserError(f"--topics {path} is empty; write a topic a line")
    return topics


def _to_answer(row: Any) -> list[Message]:
    """The messages of a row whose assistant's turns can be written anew. Raises: Rejected if they cannot."""
    if isinstance(row, Rejected):
        raise row
    messages = conversation(row) if isinstance(row, dict) else []
    if messages and (row.get("tools") or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)):
        raise Rejected("tools: an answer in words instead of a tool call would belie what follows it")
    if not any(message["role"] == "user" for message in messages):
        raise Rejected("no user turn")
    return messages
