"""A target that writes through a server: vLLM, SGLang or llama.cpp, over HTTP."""

import json
import random
import sys
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.conversations import Rejected
from common.errors import UserError
from common.generation.backends import Dialogue, Job, Outcome, Reply, Request, advance
from common.generation.transport import SHOWN, CallFailed, api_key, call

LONGEST_PAUSE_S = 300.0
"""What a server that asks for a pause is given at most."""


@dataclass(frozen=True)
class Protocol:
    """How a kind of server is asked for exact samples and for the ids that it wrote, and how its answer is read."""

    path: str
    """From the address that is given up to /v1."""
    fields: dict[str, Any]
    """Beside those that all understand. Servers bend samples by defaults of their own or the model's generation_config.json."""
    read: Callable[[Any], tuple[Any, Any, bool, Any]]
    """Text, ids, whether the limit cut the turn, and how many tokens were written, as far as the answer tells."""


def _read_completions(answer: Any) -> tuple[Any, Any, bool, Any]:
    choice, usage = answer["choices"][0], answer.get("usage")
    ids, end = choice.get("token_ids"), choice.get("matched_stop")  # SGLang names the token that ended the turn
    if isinstance(ids, list) and isinstance(end, int) and ids[-1:] != [end]:
        ids = [*ids, end]
    return choice["text"], ids, choice.get("finish_reason") == "length", usage.get("completion_tokens") if isinstance(usage, dict) else None


def _read_llama_cpp(answer: Any) -> tuple[Any, Any, bool, Any]:
    return answer["content"], answer.get("tokens"), answer["stop_type"] == "limit", answer.get("tokens_predicted")


COMPLETIONS = Protocol("completions", {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}, _read_completions)
"""vLLM gives ids from 0.10.2 on. Source: vllm/entrypoints/openai/completion/protocol.py; SGLang, pull request 30917."""
LLAMA_CPP = Protocol("../completion", {"samplers": ["temperature", "top_p"], "return_tokens": True}, _read_llama_cpp)
"""llama.cpp gives ids at its own endpoint only. Source: llama.cpp, tools/server/README.md."""


class ServerBackend:
    """Dialogues against a server: prompts travel as token ids, in the target's own template; written ids come back where the server tells.

    What may pass (429, 5xx, a cut connection, an answer that is none) is tried again with growing pauses; what may not becomes a
    Rejected. OPENAI_API_KEY is sent to this server, where it is set, and to no other.

    Raises: UserError if there is no server, or no model in it.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerFast,
        concurrency: int,
        retries: int = 6,
        pause_s: float = 0.5,
        timeout_s: float = 600.0,
    ) -> None:
        self.url, self.tokenizer, self.concurrency = url.rstrip("/"), tokenizer, concurrency
        self.retries, self.pause_s, self.timeout_s, self.stopping = retries, pause_s, timeout_s, threading.Event()
        self.key, self._said_long_pause = api_key(), False
        try:
            self.model, self.protocol = _served(call(f"{self.url}/models", self.key, timeout_s))
        except CallFailed as error:
            raise UserError(f"--server {url} does not list a model at {self.url}/models ({error}); give the address up to /v1") from None

    def run(self, jobs: Iterable[Job], done: Collection[str]) -> Iterator[list[Outcome]]:
        """Yield outcomes as conversations end; jobs whose id is in `done` are left out.

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

    def _play(self, row_id: str, dialogue: Dialogue) -> Outcome:
        reply = None
        while True:
            request = advance(dialogue, reply)
            if not isinstance(request, Request):
                return row_id, request
            if self.stopping.is_set():
                return row_id, Rejected("stopped")
            try:
                reply = self.write(request)
            except Rejected as error:
                return row_id, error

    def write(self, request: Request) -> Reply:
        """The server's reply to one request.

        Raises: Rejected if the server refuses it, or has not given one after all retries.
        """
        body = self.protocol.fields | {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed,
            "stop": [self.tokenizer.decode([token]) for token in request.stop_ids][:4],  # the protocol's limit
            "stop_token_ids": list(request.stop_ids),
        }
        address = urllib.parse.urljoin(f"{self.url}/", self.protocol.path)
        jitter, problem = random.Random(request.seed), ""
        for attempt in range(self.retries + 1):
            pause_s = min(60.0, self.pause_s * 2**attempt) * jitter.uniform(0.5, 1.5)
            try:
                return self._reply(request, call(address, self.key, self.timeout_s, body))
            except CallFailed as error:
                problem = str(error)
                if error.lasting:
                    raise Rejected(problem) from None
                pause_s = max(pause_s, self._asked_pause_s(error))
            if attempt < self.retries and self.stopping.wait(pause_s):
                raise Rejected("stopped")
        raise Rejected(f"given up after {self.retries + 1} tries, the last: {problem}")

    def _asked_pause_s(self, error: CallFailed) -> float:
        if error.pause_s > LONGEST_PAUSE_S and not self._said_long_pause:
            self._said_long_pause = True
            print(
                f"{self.url} asks to wait {error.pause_s:g} s ({error}): {LONGEST_PAUSE_S:g} s are waited at most, then it is asked again",
                file=sys.stderr,
            )
        return min(LONGEST_PAUSE_S, error.pause_s)

    def _reply(self, request: Request, answer: Any) -> Reply:
        """What an answer says. Ids that lack the token that ended the turn would teach that answers do not end: then there are none.

        Raises: CallFailed for an answer that is none.
        """
        try:
            text, ids, cut, tokens = self.protocol.read(answer)
            text.encode()  # half a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CallFailed(f"an answer without a text: {_short(answer)}") from None
        told = isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)
        whole = tuple(ids) if told and (cut or ids[-1] in request.stop_ids) else None
        if type(tokens) is not int or not 0 < tokens <= request.sampling.max_tokens:
            tokens = len(whole or self.tokenizer(text, add_special_tokens=False).input_ids)
        return Reply(text, tokens, cut, whole)


def _served(answer: Any) -> tuple[str, Protocol]:
    """The model that a server lists first, and how to ask it. Raises: CallFailed for an answer that lists none."""
    try:
        model = answer["data"][0]
        return model["id"] + "", LLAMA_CPP if model.get("owned_by") == "llamacpp" else COMPLETIONS
    except (LookupError, TypeError, AttributeError):
        raise CallFailed(f"it answers {_short(answer)}") from None


def _short(answer: Any) -> str:
    """The beginning of an answer, which often says what is wrong."""
    try:
        return json.dumps(answer)[:SHOWN]
    except RecursionError:
        return "lists within lists"
