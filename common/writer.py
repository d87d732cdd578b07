"""The target writes conversations: users' turns and answers (`synthesize`), or new answers to given turns (`regenerate`).

A conversation being written is a generator, a *dialogue*: it yields a Request, is sent the Reply, and returns the finished row. An
engine drives dialogues: `LocalEngine` batches of them in lockstep through transformers, `ServerEngine` each one in a thread of its own
against an OpenAI-compatible server. `ConversationFile` keeps what comes back, so that a stopped run goes on where it was.

Legend: B dialogues of a batch, P tokens of the longest prompt, N tokens written at most, V vocabulary.
"""

import copy
import hashlib
import http.client
import importlib.util
import itertools
import json
import os
import random
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor

from common.chat import PROBE, Chat, Rejected, conversation, load_tokenizer, parse, read_lines
from common.config import UserError
from common.conversation_file import ConversationFile
from common.target_files import open_device, read_spec, resolve


@dataclass(frozen=True)
class Sampling:
    """How a turn is chosen; temperature 0 is greedy."""

    temperature: float
    top_p: float
    max_tokens: int

    def __post_init__(self):
        if not (0 <= self.temperature < float("inf") and 0 < self.top_p <= 1):
            raise UserError(f"--temperature {self.temperature} must be 0 or more, --top-p {self.top_p} above 0 and at most 1")


@dataclass(frozen=True)
class Request:
    """Token ids to go on from, and the tokens that end the turn."""

    prompt: tuple
    sampling: Sampling
    stop_ids: tuple
    seed: int


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: int
    cut: bool
    """The turn ran into max_tokens."""


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


def advance(dialogue, reply):
    """Send a reply (None at first); returns (next request, None) or (None, the row or a Rejected)."""
    try:
        return dialogue.send(reply), None
    except StopIteration as finished:
        return None, finished.value
    except Rejected as error:
        return None, error


class LocalEngine:
    """Batches of dialogues through transformers, all asking at once, then all getting their replies.

    A batch is made of neighbouring jobs, so that a run that goes on computes the same batches as one that was never stopped.
    """

    def __init__(self, folder, tokenizer, pad_id, batch_size, device=None):
        self.tokenizer, self.pad_id, self.batch_size = tokenizer, pad_id, batch_size
        self.device = open_device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.generation_config = GenerationConfig()  # the folder's own penalties and top-k would bend the target's distribution
        self.model = model.to(self.device).eval()

    def run(self, jobs, done):
        """Yields lists of (row id, row or Rejected); jobs whose id is in `done` only lend their place in the batch."""
        jobs = iter(jobs)
        while batch := list(itertools.islice(jobs, self.batch_size)):
            if not all(row_id in done for row_id, _ in batch):
                yield [(row_id, outcome) for row_id, outcome in self._lockstep(batch) if row_id not in done]

    def _lockstep(self, batch):
        waiting, outcomes = [(row_id, dialogue, None) for row_id, dialogue in batch], []
        while waiting:
            asked = []
            for row_id, dialogue, reply in waiting:
                request, outcome = advance(dialogue, reply)
                asked += [(row_id, dialogue, request)] if request else []
                outcomes += [] if request else [(row_id, outcome)]
            replies = self.write([request for _, _, request in asked]) if asked else []
            waiting = [(row_id, dialogue, reply) for (row_id, dialogue, _), reply in zip(asked, replies, strict=True)]
        return outcomes

    @torch.no_grad()
    def write(self, requests):
        """Replies to requests of one sampling.

        Shapes: prompts padded on the left to [B, P], tokens written [B, N].
        """
        sampling, stop_ids = requests[0].sampling, requests[0].stop_ids
        width = -(-max(len(r.prompt) for r in requests) // 32) * 32
        prompts_BP = torch.full((len(requests), width), self.pad_id)
        for row, request in zip(prompts_BP, requests, strict=True):
            row[width - len(request.prompt) :] = torch.tensor(request.prompt)
        lengths_B = torch.tensor([len(r.prompt) for r in requests])
        mask_BP = torch.arange(width) >= width - lengths_B[:, None]
        how = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=self.pad_id,
            cache_implementation="static" if self.device.type == "cuda" else None,  # a growing cache is copied at every token
            disable_compile=True,  # with large batches the host keeps up, and nothing waits for a compiler
        )
        chooser = [SeededChoice(requests, width, self.device)] if sampling.temperature > 0 else []
        inputs = {"input_ids": prompts_BP.to(self.device), "attention_mask": mask_BP.long().to(self.device)}
        try:
            written = self.model.generate(**inputs, generation_config=how, logits_processor=chooser)
        except torch.OutOfMemoryError:
            raise UserError(f"--batch-size {self.batch_size}: {len(requests)} conversations do not fit {self.device}; use fewer") from None
        return [self._reply(tokens, stop_ids) for tokens in written[:, width:].tolist()]

    def _reply(self, tokens, stop_ids):
        end = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return Reply(text, tokens=len(tokens) if end is None else end + 1, cut=end is None)


class SeededChoice(LogitsProcessor):
    """Sampling as an argmax: every score but the drawn token's becomes -inf.

    A row draws from random numbers of its own, so its words do not depend on who shares the batch.
    """

    def __init__(self, requests, width, device):
        self.sampling, self.width = requests[0].sampling, width
        draws_BN = [np.random.default_rng(r.seed).random(self.sampling.max_tokens, dtype=np.float32) for r in requests]
        self.draws_BN = torch.from_numpy(np.stack(draws_BN)).to(device)

    def __call__(self, input_ids, scores):
        probabilities_BV = nucleus(torch.softmax(scores.float() / self.sampling.temperature, -1), self.sampling.top_p)
        mass_BV = probabilities_BV.cumsum(-1, dtype=torch.float64)  # in float32 rounding could draw a token of probability zero
        step = input_ids.shape[1] - self.width
        drawn_B1 = torch.searchsorted(mass_BV, self.draws_BN[:, step, None] * mass_BV[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn_B1, 0.0)


def nucleus(probabilities_BV, top_p):
    """Zero all but the likeliest tokens that together hold `top_p`: the lowest kept probability is found by bisection, without a sort."""
    if top_p >= 1:
        return probabilities_BV
    high_B1 = probabilities_BV.amax(-1, keepdim=True)
    low_B1 = torch.zeros_like(high_B1)
    for _ in range(24):
        middle_B1 = (low_B1 + high_B1) / 2
        enough_B1 = (probabilities_BV * (probabilities_BV >= middle_B1)).sum(-1, keepdim=True) >= top_p
        low_B1, high_B1 = torch.where(enough_B1, middle_B1, low_B1), torch.where(enough_B1, high_B1, middle_B1)
    return probabilities_BV * (probabilities_BV >= low_B1)


class ServerEngine:
    """Dialogues against `/completions` of vLLM, SGLang or llama.cpp: prompts travel as token ids, in the target's own template.

    What may pass (429, 5xx, a cut connection, an answer that is no JSON) is tried again with growing pauses; what may not becomes a
    Rejected. OPENAI_API_KEY is sent where it is set.
    """

    def __init__(self, url, tokenizer, concurrency, retries=6, pause_s=0.5, timeout_s=600.0):
        self.url, self.tokenizer, self.concurrency = url.rstrip("/"), tokenizer, concurrency
        self.retries, self.pause_s, self.timeout_s, self.stopping = retries, pause_s, timeout_s, threading.Event()
        try:
            self.model = self._call("models")["data"][0]["id"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise UserError(f"--server {url} does not list a model at {self.url}/models ({error}); give the address up to /v1") from None

    def run(self, jobs, done):
        """Yields [(row id, row or Rejected)] as conversations end.

        Raises: UserError when none of the first ones succeeds.
        """
        failed_in_a_row = 0
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            for future in as_completed([pool.submit(self._play, *job) for job in jobs if job[0] not in done]):
                row_id, outcome = future.result()
                failed_in_a_row = failed_in_a_row + 1 if isinstance(outcome, Rejected) else 0
                yield [(row_id, outcome)]
                if failed_in_a_row >= max(16, self.concurrency):
                    raise UserError(f"{failed_in_a_row} conversations in a row failed, the last with: {outcome}; is {self.url} well?")
        finally:
            self.stopping.set()
            pool.shutdown(cancel_futures=True)
            self.stopping.clear()

    def _play(self, row_id, dialogue):
        reply = None
        while True:
            request, outcome = advance(dialogue, reply)
            if request is None:
                return row_id, outcome
            if self.stopping.is_set():
                return row_id, Rejected("stopped")
            try:
                reply = self.write(request)
            except Rejected as error:
                return row_id, error

    def write(self, request):
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed,
            "stop": [self.tokenizer.decode([token]) for token in request.stop_ids][:4],  # the protocol's limit
        }
        jitter = random.Random(request.seed)
        for attempt in range(self.retries + 1):
            pause_s = min(60.0, self.pause_s * 2**attempt) * jitter.uniform(0.5, 1.5)
            try:
                return self._reply(self._call("completions", body))
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {_complaint(error)}"
                if error.code < 500 and error.code not in (408, 429):
                    raise Rejected(problem) from None
                told = error.headers.get("Retry-After", "")
                pause_s = max(pause_s, float(told)) if told.isdigit() else pause_s
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.retries and self.stopping.wait(pause_s):
                raise Rejected("stopped")
        raise Rejected(f"given up after {self.retries + 1} tries, the last: {problem}")

    def _reply(self, answer):
        choice = answer["choices"][0]
        text = choice["text"] + ""  # a null text is a malformed answer
        tokens = (answer.get("usage") or {}).get("completion_tokens") or len(self.tokenizer(text, add_special_tokens=False).input_ids)
        return Reply(text, tokens, cut=choice.get("finish_reason") == "length")

    def _call(self, path, body=None):
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", data, headers), timeout=self.timeout_s) as answer:
            return json.load(answer)


def _complaint(error):
    try:
        return error.read(300).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return error.reason


@dataclass
class Job:
    """A target that writes by a script into an output."""

    engine: object
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
            engine = ServerEngine(server, chat.tokenizer, concurrency)
        else:
            engine = LocalEngine(folder, chat.tokenizer, spec.eos_token_ids[0], batch_size, device)
        return cls(engine, Script(chat, spec, seed, answer, question, system), opened, turns, topics, input)

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
            for outcomes in self.engine.run(jobs, before):
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
        raise Rejected("tools: an answer in words in a tool call's place would belie what follows it")
    if not any(message["role"] == "user" for message in messages):
        raise Rejected("no user turn")
    return messages


def convert_gguf(file, folder, dtype="bfloat16"):
    """Turn a GGUF file into a folder of safetensors, tokenizer and chat template, and check that both give the same logits.

    Raises: UserError if packages are missing, the file cannot be read, the folder exists, or the logits differ.
    """
    file, folder = Path(file), Path(folder)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"convert needs {' and '.join(missing)} to read GGUF files: pip install {' '.join(missing)}")
    if not file.is_file():
        raise UserError(f"--gguf {file}: no such file")
    if folder.exists():
        raise UserError(f"--output {folder} exists; choose another folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # the reader raises many kinds; the user needs one sentence
        raise UserError(f"--gguf {file} could not be read: {' '.join(str(error).split())[:300]}") from None
    config = copy.deepcopy(model.config)
    del config.quantization_config  # the weights are plain now, and only a model that never was quantised can be saved
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    plain.save_pretrained(part)
    tokenizer.save_pretrained(part)
    _same_logits(model, AutoModelForCausalLM.from_pretrained(part, dtype=model.dtype).eval(), file)
    if not (part / "chat_template.jinja").exists():
        print(f"{file} carries no chat template: give {folder}/chat_template.jinja one before packing conversations")
    part.rename(folder)


@torch.no_grad()
def _same_logits(before, after, file):
    ids = torch.arange(64)[None] * 97 % before.config.get_text_config().vocab_size
    difference = (before(ids).logits - after(ids).logits).abs().max().item()
    if difference != 0:
        raise UserError(f"{file}: the converted folder's logits differ by {difference:.3g} from the file's; do not use it")
