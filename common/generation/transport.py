"""JSON over HTTP with limits: a server may be slow, broken or hostile, and must cost neither the key, nor the memory, nor the night."""

import http.client
import io
import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any, cast

from common.errors import UserError

ANSWER_BYTES = 32 << 20
"""The longest answer that is read."""
SHOWN = 300
"""Characters of a server's words that a message repeats."""


class CallFailed(Exception):
    """Why there is no answer, in words. Where it is `lasting`, asking again will not help; `pause_s` is what the server asks to wait."""

    def __init__(self, words: str, lasting: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(" ".join(words.split()))
        self.lasting, self.pause_s = lasting, pause_s


def api_key() -> str | None:
    """OPENAI_API_KEY, if it is set. Raises: UserError for one that no header can hold, without repeating it."""
    key = os.environ.get("OPENAI_API_KEY")
    if key and not (key.isascii() and key.isprintable()):
        raise UserError("OPENAI_API_KEY holds characters that no header can; set it to the key alone, or unset it")
    return key


def call(address: str, key: str | None, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    """The JSON value that a server answers with, to a GET or, with a body, a POST; `timeout_s` is for all of it.

    The key goes to this address alone: redirects are not followed. Raises: CallFailed.
    """
    try:
        return json.loads(text_of(address, key, timeout_s, body))
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"{type(error).__name__}: {str(error)[:SHOWN]}") from None


def text_of(address: str, key: str | None, timeout_s: float, body: dict[str, Any] | None = None) -> str:
    """The text that a server answers with, as `call` asks for it. Raises: CallFailed."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, headers)
        with _opener().open(request, timeout=timeout_s) as answer:
            text = answer.read(ANSWER_BYTES + 1)
            if len(text) > ANSWER_BYTES:
                raise CallFailed(f"an answer of more than {ANSWER_BYTES >> 20} MiB")
            return text.decode()
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None
    except TimeoutError:
        raise CallFailed(f"no whole answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise CallFailed(f"{type(reason).__name__}: {str(reason)[:SHOWN]}") from None


def _refusal(error: urllib.error.HTTPError) -> CallFailed:
    if 300 <= error.code < 400:
        where = error.headers.get("Location", "nowhere")[:SHOWN]
        return CallFailed(f"HTTP {error.code}: it redirects to {where}, which is not followed; give that address itself", lasting=True)
    told = error.headers.get("Retry-After", "")
    words = f"HTTP {error.code}: {_words_of(error)}"
    return CallFailed(words, error.code < 500 and error.code not in (408, 425, 429), float(told) if told.isdecimal() else 0.0)


def _words_of(error: urllib.error.HTTPError) -> str:
    """What a server says of its error, from the body that it sends along."""
    try:
        return error.read(SHOWN).decode(errors="replace").strip() or error.reason
    except (OSError, http.client.HTTPException, ValueError):
        return error.reason


class _Timed(io.RawIOBase):
    """A socket's bytes, all of them within its timeout: by itself that would start anew with every one."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock, self._deadline = raw, sock, time.monotonic() + (sock.gettimeout() or 0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Shapes: as of io.RawIOBase. Raises: TimeoutError behind the deadline."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock))


class _Connection(http.client.HTTPConnection):
    response_class = _Answer


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Answer


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(cast(Any, _Connection), req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(cast(Any, _SecureConnection), req)


def _opener() -> urllib.request.OpenerDirector:
    """Speaks HTTP, through the environment's proxies, and nothing else: no files, and no redirects, which would take the key along."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler, _Http, _Https, urllib.request.UnknownHandler):
        opener.add_handler(handler())
    for handler in (urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor):
        opener.add_handler(handler())
    return opener
