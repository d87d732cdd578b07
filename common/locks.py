"""One writer at a time: locks that the kernel drops with their process, so that a killed one never blocks its successor."""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from common.cli import writing
from common.errors import UserError


def try_lock(file: TextIO, say: Callable[[str], None]) -> bool:
    """Lock an open file; False while another process holds it. On a file system without locks it says so and goes on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        say(f"{file.name}: this file system has no locks ({error.strerror}); make sure that nothing else writes there")
    return True


def sign(file: TextIO) -> None:
    """Write into a locked file who holds it."""
    holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")})
    os.truncate(file.fileno(), 0)
    os.write(file.fileno(), holder.encode())  # past the file object, which would try what failed again when it closes


def holder_of(file: TextIO) -> str:
    """Who holds a locked file, in words."""
    file.seek(0)
    try:
        holder = json.loads(file.read(4096))
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "which has not said who it is"


class OutputLock:
    """Keeps others from writing the same output: a hidden file beside it, which is gone when the lock is dropped.

    Raises: UserError naming who is writing there, or if nothing can be written.
    """

    def __init__(self, flag: str, output: Path) -> None:
        self._path = output.with_name(f".{output.name}.lock")
        with writing(flag, output):
            self._file = self._take(flag, output)
            try:
                sign(self._file)
            except OSError:
                self.drop()
                raise

    def _take(self, flag: str, output: Path) -> TextIO:
        while True:
            file = open(self._path, "a+")  # noqa: SIM115 (held until `drop`)
            if not try_lock(file, lambda words: print(words, file=sys.stderr)):
                holder = holder_of(file)
                file.close()
                raise UserError(f"{flag} {output} is being written by another command ({holder}); wait for that one, or name another")
            if self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                return file
            file.close()  # whoever held it has removed it meanwhile

    def drop(self) -> None:
        """Let others write."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()
