"""The target writes conversations: users' turns and answers (`synthesize`), or new answers to given turns (`regenerate`).

`Script` holds the dialogues, a backend (common/generation/backends.py) plays them, and `ConversationFile` keeps what comes back, so that
a stopped run goes on where it was.
"""

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from common.data.chat import PROBE, Chat, load_tokenizer
from common.data.conversations import Rejected, conversation, parse, read_lines
from common.errors import UserError
from common.generation.backends import LocalBackend, Request, Sampling, ServerBackend
from common.generation.conversation_file import ConversationFile
from common.target.files import read_spec, resolve


class Script:
    """The dialogues that can be played with one target: what it is asked, turn by turn, in its own chat template.

    A turn's random numbers depend on (seed, row, turn) alone.
    """

    def __init__(self, chat, spec, seed, answer, question=None, system=None):
        self.chat, self.stop_ids, self.context_tokens, self.seed = chat, spec.eos_token_ids, spec.max_position_embeddings, seed
        self.answer, self.question, self.system = answer, question, system

    def synthesize(self, row_id, turns=1, topic=None):
        """A dialogue in which the target writes the user's turns and answers them."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        draft = [{"role": "system", "content": f"{self.system or ''}\nThe user writes about: {topic}".strip()}] if topic else messages[:]
        cut, tokens = False, 0
        for turn in range(turns):
            asked = yield self._question(draft, f"{row_id}/{turn}/user")
            question = {"role": "user", "content": asked.text.strip()}
            answered = yield self._answer([*messages, question], f"{row_id}/{turn}/assistant")
            exchange = [question, {"role": "assistant", "content": answered.text}]
            messages, draft = messages + exchange, draft + exchange
            cut, tokens = cut or asked.cut or answered.cut, tokens + asked.tokens + answered.tokens
        return {"id": row_id, "messages": messages, "cut": cut, "tokens": tokens} | ({"topic": topic} if topic else {})

    def regenerate(self, row_id, given):
        """A dialogue that keeps the given users' turns and answers each in the context of the answers written before it."""
        messages, cut, tokens = [], False, 0
        for turn, message in enumerate(given if given[-1]["role"] == "assistant" else [*given, {"role": "assistant"}]):
            if message["role"] == "assistant":
                reply = yield self._answer(messages, f"{row_id}/{turn}/assistant")
                message, cut, tokens = {"role": "assistant", "content": reply.text}, cut or reply.cut, tokens + reply.tokens
            messages.append(message)
        return {"id": row_id, "messages": messages, "cut": cut, "tokens": tokens}

    def _answer(self, messages, name):
        return self._request(self.chat.prompt(messages).tolist(), self.answer, (), name)

    def _question(self, messages, name):
        """The template up to a user's words is the prompt; the first token after them ends the turn."""
        chat = self.chat
        try:
            text = chat.tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": PROBE}], tokenize=False, **chat.template_kwargs
            )
        except Exception as error:  # a template may raise anything
            raise Rejected(f"the template refuses: {error}") from None
        if text.count(PROBE) != 1:
            raise Rejected("the template does not show a user's turn in one piece")
        before, after = (chat.backend.encode(part, add_special_tokens=False).ids for part in text.split(PROBE))
        return self._request(before, self.question, after[:1], name)

    def _request(self, prompt, sampling, stop_ids, name):
        if len(prompt) + sampling.max_tokens > self.context_tokens:
            raise Rejected(f"prompt of {len(prompt)} + {sampling.max_tokens} tokens exceeds the target's {self.context_tokens} positions")
        seed = int(hashlib.sha256(f"{self.seed}/{name}".encode()).hexdigest()[:7], 16)
        return Request(tuple(prompt), sampling, (*stop_ids, *(i for i in self.stop_ids if i not in stop_ids)), seed)


@dataclass
class Job:
    """A target that writes by a script into an output."""

    backend: object
    script: Script
    output: ConversationFile
    turns: int
    topics: str | None
    input: str | None

    @classmethod
    def open(cls, target, output, answers, temperature, top_p, max_tokens, keep, chat_template_kwargs, seed, server, concurrency,
             batch_size, device, max_user_tokens=None, system=None, turns=1, topics=None, input=None):  # fmt: skip
        """Everything is checked before the weights are loaded."""
        for flag, path in (("--topics", topics), ("--input", input)):
            if path is not None and not Path(path).is_file():
                raise UserError(f"{flag} {path}: no such file")
        folder = resolve(target)
        chat, spec = Chat(load_tokenizer(folder), chat_template_kwargs), read_spec(folder)
        if not spec.eos_token_ids:
            raise UserError(
                f"--target {target}: neither config.json nor generation_config.json names the token that ends a turn (eos_token_id)"
            )
        if max_tokens >= spec.max_position_embeddings:
            raise UserError(
                f"--max-tokens {max_tokens} leaves no room for a prompt: this target has {spec.max_position_embeddings} positions"
            )
        answer = Sampling(*((temperature, top_p) if answers == "sampled" else (0.0, 1.0)), max_tokens)
        question = Sampling(temperature, top_p, max_user_tokens) if max_user_tokens else None
        settings = {
            "target": spec.fingerprint, "seed": seed, "answer": asdict(answer), "question": question and asdict(question), "system": system,
            "chat_template_kwargs": chat_template_kwargs, "keep": sorted(keep),
            "turns": turns, "topics": _digest(topics), "input": _digest(input),
        }  # fmt: skip
        opened = ConversationFile(output, settings, chat.tokenizer, keep)
        if server:
            backend = ServerBackend(server, chat.tokenizer, concurrency)
        else:
            backend = LocalBackend(folder, chat.tokenizer, spec.eos_token_ids[0], batch_size, device)
        return cls(backend, Script(chat, spec, seed, answer, question, system), opened, turns, topics, input)

    def synthesize(self, num):
        """Have the target write until `num` conversations are kept; for those that the filters reject others follow under further ids.

        Raises: UserError when none of 32 or more in a row is kept.
        """
        begun, useless, output = 0, 0, self.output
        topics = _topics(self.topics) if self.topics else [None]
        while (missing := num - sum(f"{i:08d}" in output.kept for i in range(begun))) > 0:
            ids = [f"{i:08d}" for i in range(begun, begun + missing)]
            about = [topics[i % len(topics)] for i in range(begun, begun + missing)]
            self._run([(i, self.script.synthesize(i, self.turns, topic)) for i, topic in zip(ids, about, strict=True)])
            useless = useless + missing if output.kept.isdisjoint(ids) else 0
            if useless >= 32:
                raise UserError(f"none of {useless} conversations is usable ({output.summary()}): see {output.path}.*; --keep may help")
            begun += missing
        return output.summary()

    def regenerate(self):
        """Answer the users' turns of the input's conversations anew.

        Raises: UserError when nothing is kept.
        """
        given, path = [], self.input
        for number, (_, _, line) in enumerate(read_lines(path), 1):
            row = parse(line)
            row_id = str(row.get("id", number)) if isinstance(row, dict) else str(number)
            try:
                given.append((row_id, _to_answer(row)))
            except Rejected as rejected:
                self.output.add([(row_id, rejected)])
        given.sort(key=lambda job: (len(job[1]), sum(len(message["content"]) for message in job[1])))  # alike ones share a batch
        if len({row_id for row_id, _ in given}) < len(given):
            raise UserError(f"--input {path}: ids occur twice; give each conversation an `id` of its own, or none")
        self._run([(row_id, self.script.regenerate(row_id, messages)) for row_id, messages in given])
        if not self.output.kept:
            raise UserError(f"--input {path}: no conversation is usable ({self.output.summary()}): see {self.output.path}.*")
        return self.output.summary()

    def _run(self, jobs):
        tokens, begun_s, before = 0, time.monotonic(), frozenset(self.output.done)
        with tqdm(total=len(jobs), initial=sum(row_id in before for row_id, _ in jobs), unit=" rows", smoothing=0.05) as bar:
            for outcomes in self.backend.run(jobs, before):
                self.output.add(outcomes)
                tokens += sum(row["tokens"] for _, row in outcomes if not isinstance(row, Rejected))
                bar.set_postfix_str(f"{tokens / (time.monotonic() - begun_s):,.0f} tokens/s, {self.output.summary()}")
                bar.update(len(outcomes))


def _digest(path):
    return path and hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _topics(path):
    topics = [line.strip() for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    if not topics:
        raise UserError(f"--topics {path} is empty; it holds a topic a line")
    return topics


def _to_answer(row):
    if isinstance(row, Rejected):
        raise row
    messages = conversation(row) if isinstance(row, dict) else []
    if messages and (row.get("tools") or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)):
        raise Rejected("tools: an answer in words in a tool call's location would belie what follows it")
    if not any(message["role"] == "user" for message in messages):
        raise Rejected("no user turn")
    return messages
