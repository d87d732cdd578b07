"""How a run is asked to stop."""

import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Self

INTERRUPT_GRACE_S = 20.0
"""How long a Ctrl-C waits where nothing was measured yet: there is little to save, and something may hang."""
TORCHRUN_GRACE_S = 30.0
"""What torchrun waits between a Ctrl-C and SIGKILL, where TORCH_ELASTIC_SHUTDOWN_TIMEOUT says nothing else."""
STOP_S = "stop_s"
"""The key of the main drafter's note: how many seconds a graceful stop takes by what was measured."""
ECHO_S = 2.0  # a terminal's Ctrl-C reaches a worker twice: from the terminal and from torchrun


class StopRequest:
    """A wish to stop, by signal: SIGUSR1 or Ctrl-C ask for a graceful stop; SIGTERM ends the process at once with 143.

    Python runs signal handlers only between two bytecodes of the main thread, which may be waiting inside a collective: so a thread of
    its own reads them from a socket. A Ctrl-C that has not been honoured after `grace_s`, or a second one, ends the process with 130.
    A context manager: behind it signals do what they did before.
    """

    grace_s: float

    def __init__(self) -> None:
        self.requested, self.grace_s = False, INTERRUPT_GRACE_S
        self._interrupted: float | None = None
        self._end_soon: threading.Timer | None = None
        self._lock = threading.Lock()
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

    def expect(self, seconds: float) -> None:
        """Wait so long for a graceful stop, from the Ctrl-C on, if that is longer than INTERRUPT_GRACE_S."""
        with self._lock:
            self.grace_s = max(INTERRUPT_GRACE_S, seconds)
            if self._interrupted is not None and self._end_soon is not None:
                self._end_later(self._interrupted)

    def _interrupt(self):
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted, self.requested = now, True
            short = "" if self.grace_s <= launcher_grace_s() else f" (torchrun ends its ranks after {launcher_grace_s():.0f} s)"
            print(
                f"\nstopping at the next averaging; a second Ctrl-C, or {self.grace_s:.0f} s, end at once{short}",
                file=sys.stderr,
                flush=True,
            )
            with self._lock:
                self._end_later(now)
        elif now - self._interrupted > ECHO_S:
            os._exit(128 + signal.SIGINT)

    def _end_later(self, interrupted: float) -> None:
        if self._end_soon is not None:
            self._end_soon.cancel()
        left_s = max(0.0, interrupted + self.grace_s - time.monotonic())
        self._end_soon = threading.Timer(left_s, os._exit, [128 + signal.SIGINT])
        self._end_soon.daemon = True
        self._end_soon.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with self._lock:
            if self._end_soon is not None:
                self._end_soon.cancel()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sockets[1].close()


def slow_stop_advice(seconds: float, stop_file: Path) -> str | None:
    """What would end a stop that takes so long before it is done, and what to do instead; None where nothing would."""
    warning_s = _variable_s("STOP_WARNING_S", math.inf)
    if seconds > warning_s:
        return (
            f"Slurm ends the job {warning_s:.0f} s after its warning: queue it with STOP_WARNING_S={seconds:.0f} exported and "
            f"sbatch --signal=B:USR1@{seconds:.0f}"
        )
    if seconds > launcher_grace_s():
        return (
            f"torchrun ends its ranks {launcher_grace_s():.0f} s after a Ctrl-C: stop with touch {stop_file}, or start with "
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds:.0f}"
        )
    return None


def launcher_grace_s() -> float:
    """Seconds between a Ctrl-C and the launcher's SIGKILL, infinite where no torchrun started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    return _variable_s("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_GRACE_S)


def _variable_s(name: str, default_s: float) -> float:
    """The seconds in an environment variable; the default where it holds none."""
    try:
        return float(os.environ[name])
    except (KeyError, ValueError):
        return default_s
