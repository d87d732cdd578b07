"""A target behind a server: the same rows as in process, whatever the network does, and the ids that it wrote wherever it tells."""

import contextlib
import http.server
import itertools
import json
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from writing import QUESTIONS, open_job, rows_of, write_questions

from common.data.chat import Chat, load_tokenizer
from common.data.conversations import Rejected
from common.errors import UserError
from common.generation import generate
from common.generation.backends import LocalBackend, Reply, Request, Sampling
from common.generation.script import Script
from common.generation.server import ServerBackend
from common.generation.transport import CallFailed, call
from common.target.files import read_spec


@pytest.fixture
def questions(tmp_path):
    return write_questions(tmp_path / "given.jsonl")


@pytest.fixture
def server(tiny_target):
    with ModelServer(tiny_target) as running:
        yield running


class ModelServer:
    """A server of the tiny target; `fault(prompt, tries)` names what goes wrong with a request, if anything.

    `kind` is how it answers: as vLLM does (`ids`), with the token that ended the turn told apart (`end apart`), without it (`no end`),
    without ids (`text`), or at llama.cpp's own endpoint (`llama.cpp`).
    """

    def __init__(self, target, kind="ids"):
        self.kind = kind
        tokenizer = load_tokenizer(target)
        self.backend, self.lock = LocalBackend.load(read_spec(target), tokenizer, 1, "cpu"), threading.Lock()
        self.fault, self.tries, self.retried = lambda prompt, tries: None, Counter(), {}
        self.metrics, self.written = None, []  # a function that gives a page of counters; (prompt, ids) of every answer
        ours = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/metrics" and ours.metrics:
                    return self.send(ours.metrics().encode())
                model = {"id": "tiny", "owned_by": "llamacpp" if ours.kind == "llama.cpp" else "somebody"}
                self.reply({"data": [model]} if self.path == "/v1/models" else {}, 200 if self.path == "/v1/models" else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != ("/completion" if ours.kind == "llama.cpp" else "/v1/completions"):
                    return self.reply({}, 404)
                ours.complete(self, body)

            def reply(self, value, code=200):
                self.send(json.dumps(value).encode(), code)

            def send(self, data, code=200, length=None):
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # the client hung up
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def complete(self, handler, body):
        prompt = tuple(body["prompt"])
        with self.lock:
            self.tries[prompt] += 1
            tries, retried = self.tries[prompt], self.retried.setdefault(prompt, threading.Event())
        if tries > 1:
            retried.set()
        fault = self.fault(prompt, tries)
        if fault in (400, 429, 500):
            return handler.reply({"error": "no"}, fault)
        if fault == "malformed":
            return handler.send(b'{"choices": [{"te')
        if fault == "no text":
            return handler.reply({"choices": []})
        if fault == "cut":
            return handler.send(b'{"choices"', length=5000)
        if fault == "slow":  # never answers a request that the client still waits for
            retried.wait(30)
        sampling = Sampling(body["temperature"], body["top_p"], body["max_tokens"])
        with self.lock:
            (reply,) = self.backend.write([Request(prompt, sampling, (258,), body["seed"])])
            self.written.append((list(prompt), list(reply.ids)))
        handler.reply(self.answer(reply, body))

    def answer(self, reply, body):
        ids = list(reply.ids)
        if self.kind == "llama.cpp":  # its own defaults are a top_k of 40 and a min_p, which would bend the samples
            assert body["return_tokens"] and body["samplers"] == ["temperature", "top_p"]
            return {"content": reply.text, "tokens": ids, "stop_type": "limit" if reply.cut else "eos", "tokens_predicted": len(ids)}
        assert body["return_token_ids"] and body["top_k"] == -1 and body["repetition_penalty"] == 1
        choice = {"text": reply.text, "finish_reason": "length" if reply.cut else "stop"}
        if self.kind == "end apart" and not reply.cut:
            choice["matched_stop"] = ids[-1]
        if self.kind in ("no end", "end apart") and not reply.cut:
            ids = ids[:-1]
        return {"choices": [choice if self.kind == "text" else choice | {"token_ids": ids}]}

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


@pytest.mark.parametrize("kind", ["ids", "end apart", "llama.cpp", "no end", "text"])
def test_both_backends_write_the_same_rows_whatever_the_network_does(tiny_target, questions, tmp_path, monkeypatch, kind):
    """A retry that loses, doubles or changes a row would silently train the drafter on words that are not the target's."""
    monkeypatch.setattr(generate, "ServerBackend", lambda *args: ServerBackend(*args, pause_s=0.001))
    faults = itertools.cycle([429, "malformed", "cut", 500, "no text"])
    with ModelServer(tiny_target, kind) as server:
        server.fault = lambda prompt, tries: next(faults) if tries == 1 else None
        there = open_job(tiny_target, tmp_path / "server.jsonl", server=server.url, input=questions)
        summary = there.regenerate()
    here = open_job(tiny_target, tmp_path / "local.jsonl", input=questions).regenerate()
    local, served = rows_of(tmp_path / "local.jsonl"), rows_of(tmp_path / "server.jsonl")
    assert len(local) == len(QUESTIONS) and min(server.tries.values()) > 1
    if kind in ("ids", "end apart", "llama.cpp"):
        assert served == local and summary == here
        return
    told = {row_id for row_id, row in served.items() if "token_ids" in row}
    ended = {row_id for row_id, row in local.items() if not row["cut"]}
    assert ended, "the tiny target must end some answers for this test to be one"
    assert told == (local.keys() - ended if kind == "no end" else set()), "ids without an answer's end teach answers that do not end"
    assert summary["without_token_ids"] == len(served) - len(told)
    assert {i: row["messages"] for i, row in served.items()} == {i: row["messages"] for i, row in local.items()}


def test_an_answer_that_never_comes_is_asked_for_again(tiny_target, server):
    """One hung request would hold up the whole run."""
    server.fault = lambda prompt, tries: "slow" if tries == 1 else None
    server.backend.write = lambda requests: [Reply("here", 1, True, (1,))]
    backend = ServerBackend(server.url, load_tokenizer(tiny_target), 1, retries=20, pause_s=0.001, timeout_s=0.3)
    assert backend.write(Request((1, 2), Sampling(0, 1, 8), (258,), 0)).text == "here"
    assert server.tries[1, 2] > 1


def test_rows_that_fail_are_kept_apart_and_tried_again(tiny_target, questions, server, tmp_path, monkeypatch):
    """One bad row must neither stop the others nor be lost."""
    monkeypatch.setattr(generate, "ServerBackend", lambda *args: ServerBackend(*args, retries=1, pause_s=0.001))
    doomed = Chat(load_tokenizer(tiny_target)).prompt([{"role": "user", "content": "go"}]).tolist()
    refused = Chat(load_tokenizer(tiny_target)).prompt([{"role": "user", "content": "7"}]).tolist()
    server.fault = lambda prompt, tries: {tuple(doomed): 500, tuple(refused): 400}.get(prompt)
    output = tmp_path / "out.jsonl"
    summary = open_job(tiny_target, output, server=server.url, input=questions).regenerate()
    errors = rows_of(tmp_path / "out.jsonl.errors.jsonl")
    assert summary["error"] == 2 and len(rows_of(output)) == len(QUESTIONS) - 2
    assert "2 tries" in errors["4"]["error"] and "HTTP 500" in errors["4"]["error"] and "HTTP 400" in errors["5"]["error"]
    assert server.tries[tuple(refused)] == 1, "what the server refuses for good is not worth a retry"
    server.fault = lambda prompt, tries: None
    before = output.read_text()
    open_job(tiny_target, output, server=server.url, input=questions).regenerate()
    assert output.read_text().startswith(before) and len(rows_of(output)) == len(QUESTIONS)
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_a_server_that_is_down_or_broken_is_an_error_at_once(tiny_target, server, tmp_path, monkeypatch):
    """Nobody wants to find a million error rows in the morning."""
    monkeypatch.setattr(generate, "ServerBackend", lambda *args: ServerBackend(*args, retries=0, pause_s=0.001))
    with pytest.raises(UserError, match=r"--server http://127.0.0.1:1/v1 does not list a model"):
        open_job(tiny_target, tmp_path / "a.jsonl", server="http://127.0.0.1:1/v1")
    server.fault = lambda prompt, tries: 500
    with pytest.raises(UserError, match=r"16 conversations in a row failed, the last with.*HTTP 500"):
        open_job(tiny_target, tmp_path / "b.jsonl", server=server.url, max_user_tokens=4).synthesize(100)


class Raw(http.server.BaseHTTPRequestHandler):
    """Answers with what `give(handler)` writes, and remembers what it was asked."""

    give, asked = None, ()

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append((self.path, self.headers.get("Authorization"), body))
        self.give()

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def raw_server(give):
    """A server of one function; yields its address and the list of (path, key, body) that it was asked for."""
    asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Raw,), {"give": give, "asked": asked}))
    server.handle_error = lambda *_: None  # the client hung up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def answer(text=b"{}", status=b"200", *headers, length=None):
    """A function that answers with these bytes."""
    lines = [b"HTTP/1.0 " + status, b"Content-Length: %d" % (len(text) if length is None else length), *headers, b"", text]
    return lambda handler: handler.wfile.write(b"\r\n".join(lines))


MODELS = answer(b'{"data": [{"id": "tiny"}]}')


def test_the_key_goes_to_no_other_host(monkeypatch):
    """Who answers with a redirect would be sent the key, to wherever he likes."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with raw_server(MODELS) as (other, stolen):
        redirect = answer(b"", b"302 Found", b"Location: " + other.encode() + b"/models")
        with raw_server(redirect) as (url, asked):
            with pytest.raises(UserError, match=r"HTTP 302: it redirects to .*/v1/models, which is not followed; give that address"):
                ServerBackend(url, None, 1)
            with pytest.raises(CallFailed, match="which is not followed"):
                call(f"{url}/completions", "secret", 5.0, {"prompt": [1]})
            assert {key for _, key, _ in asked} == {"Bearer secret"}
        assert not stolen
        ServerBackend(other, None, 1)
        assert [key for _, key, _ in stolen] == ["Bearer secret"]
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    with pytest.raises(UserError, match="OPENAI_API_KEY") as refused:
        ServerBackend(other, None, 1)
    assert "ret" not in str(refused.value).replace("cannot", "").replace("secret", "")
    with pytest.raises(CallFailed, match="unknown url type"):
        call("file:///etc/passwd", None, 5.0)


def test_a_pause_without_end_is_not_waited_for(monkeypatch, capsys):
    """`Retry-After: 99999999` is three years."""
    monkeypatch.setattr("common.generation.server.LONGEST_PAUSE_S", 0.01)
    later = answer(b"try later", b"429 Busy", b"Retry-After: 99999999")
    with raw_server(lambda handler: (MODELS if handler.command == "GET" else later)(handler)) as (url, asked):
        backend = ServerBackend(url, SimpleNamespace(decode=str), 1, retries=2, pause_s=0.001)
        with pytest.raises(Rejected, match="given up after 3 tries, the last: HTTP 429: try later"):
            backend.write(Request((1, 2), Sampling(0, 1, 8), (2,), 0))
        assert len(asked) == 4 and capsys.readouterr().err.count("asks to wait 1e+08 s (HTTP 429: try later): 0.01 s are waited") == 1
        later = answer(b"", b"429 Busy", "Retry-After: \u00b2".encode("latin-1"))
        with pytest.raises(CallFailed) as refused:
            call(url + "/completions", None, 5.0, {})
        assert refused.value.pause_s == 0


def drip(handler):
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n[")
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.02)


def drip_head(handler):
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.02)


@pytest.mark.parametrize("give", [drip, drip_head])
def test_a_dripping_answer_ends(give):
    """A socket's timeout starts anew with every byte: a server that sends one a minute would hold up the run for ever."""
    with raw_server(give) as (url, _), pytest.raises(CallFailed, match=r"no whole answer within 0.2 s"):
        call(f"{url}/models", None, 0.2)


def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch):
    """A server that never stops would take the machine down with it."""
    monkeypatch.setattr("common.generation.transport.ANSWER_BYTES", 1 << 20)
    with raw_server(answer(b" " * (3 << 20))) as (url, _), pytest.raises(CallFailed, match="more than 1 MiB"):
        call(f"{url}/models", None, 30.0)


def test_a_server_that_fails_says_why(tiny_target):
    """`HTTP 500` sends the user to the server's log on another machine; the reason was in the answer."""
    full, other = answer(b'{"error": "CUDA out of\nmemory"}', b"500 Oh"), answer(b'{"error": {"message": "no such model"}}')
    with raw_server(full) as (url, _), pytest.raises(UserError, match=r"HTTP 500: .*CUDA out of memory"):
        ServerBackend(url, None, 1)
    with raw_server(other) as (url, _), pytest.raises(UserError, match=r"does not list a model at .*/models \(it answers .*no such model"):
        ServerBackend(url, None, 1)
    reply = answer(b'{"object": "error", "message": "too long"}')
    with raw_server(lambda handler: (MODELS if handler.command == "GET" else reply)(handler)) as (url, _):
        backend = ServerBackend(url, SimpleNamespace(decode=str), 1, retries=0)
        with pytest.raises(Rejected, match=r"an answer without a text: .*too long"):
            backend.write(Request((1, 2), Sampling(0, 1, 8), (2,), 0))


def test_a_stop_ends_a_servers_conversations_at_the_next_turn(tiny_target, server):
    backend = ServerBackend(server.url, load_tokenizer(tiny_target), 1)
    backend.stopping.set()
    script = Script(Chat(load_tokenizer(tiny_target)), read_spec(tiny_target), 0, Sampling(0, 1, 8), Sampling(1, 1, 8))
    _, outcome = backend._play("0", script.synthesize("0"))
    assert str(outcome) == "stopped" and not server.tries
