"""A limit on the processor time of code that others wrote: a chat template may loop for ever."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class TooLong(Exception):
    """The limit was reached."""


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TooLong in the block once this process has computed for so long. Signals reach the main thread alone: others are not limited.

    Units: seconds of processor time, so that a busy or stopped machine changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
