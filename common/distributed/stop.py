"""How a run is asked to stop."""

import os
import signal
import socket
import sys
import threading
import time
from typing import Self

INTERRUPT_GRACE_S = 20.0
ECHO_S = 2.0  # a terminal's Ctrl-C reaches a worker twice: from the terminal and from torchrun


class StopRequest:
    """A wish to stop, by signal: SIGUSR1 or Ctrl-C ask for a graceful stop; SIGTERM ends the process at once with 143.

    Python runs signal handlers only between two bytecodes of the main thread, which may be waiting inside a collective: so a thread of
    its own reads them from a socket. A Ctrl-C that has not been honoured after 20 s, or a second one, ends the process with 130.
    A context manager: behind it signals do what they did before.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupted: float | None = None
        self._end_soon = threading.Timer(INTERRUPT_GRACE_S, os._exit, [128 + signal.SIGINT])
        self._end_soon.daemon = True
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._sockets = receiver, sender
        self._before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        self._wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, daemon=True, name="signals").start()

    def _run(self):
        while number := self._sockets[0].recv(1):
            number = number[0]
            if number == signal.SIGTERM:
                os._exit(128 + signal.SIGTERM)
            elif number == signal.SIGINT:
                self._interrupt()
            elif number == signal.SIGUSR1:
                self.requested = True

    def _interrupt(self):
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted, self.requested = now, True
            print(
                f"\nstopping at the next averaging; a second Ctrl-C, or {INTERRUPT_GRACE_S:.0f} s, end at once", file=sys.stderr, flush=True
            )
            self._end_soon.start()
        elif now - self._interrupted > ECHO_S:
            os._exit(128 + signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._end_soon.cancel()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sockets[1].close()
