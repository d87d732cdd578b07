"""Two ways to let a target write: `LocalBackend` in this process through transformers, `ServerBackend` over HTTP.

A conversation being written is a generator, a *dialogue*: it yields a Request, is sent the Reply, and returns the finished row. An
backend drives dialogues: the local one batches of them in lockstep, the server's each one in a thread of its own.

Legend: B dialogues of a batch, P tokens of the longest prompt, N tokens written at most, V vocabulary.
"""

import http.client
import itertools
import json
import os
import random
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

from common.cli import open_device
from common.data.conversations import Rejected
from common.errors import UserError


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


def advance(dialogue, reply):
    """Send a reply (None at first); returns (next request, None) or (None, the row or a Rejected)."""
    try:
        return dialogue.send(reply), None
    except StopIteration as finished:
        return None, finished.value
    except Rejected as error:
        return None, error


class LocalBackend:
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
        """Yields lists of (row id, row or Rejected); jobs whose id is in `done` only lend their location in the batch."""
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


class ServerBackend:
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
