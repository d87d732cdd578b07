"""One job a run directory: a lock that the kernel drops with the process, so that a killed job never blocks its successor."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from common.training.disk import must_write

LOCK_WAIT_S = 5.0


class DirectoryLock:
    """The file `.lock` of a folder, locked while this process holds it; it tells who does."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self._file: TextIO | None = None

    def take(self) -> None:
        """Create the folder and lock it. Raises: UserError naming the job that holds it, or why it cannot be written."""
        with must_write(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self._folder / ".lock", "a+")  # noqa: SIM115 (held until `drop`)
        deadline = time.monotonic() + LOCK_WAIT_S  # a killed predecessor may still be tearing down its device
        while not self._try(file):
            if time.monotonic() > deadline:
                holder = _holder(file)
                file.close()
                raise UserError(
                    f"log.dir={self._folder} is in use by another job ({holder}); "
                    f"stop that one (touch {self._folder / 'STOP'}) or name another directory with log.dir=DIR"
                )
            time.sleep(0.1)
        self._file = file
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")})
        with must_write(self._folder):
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), holder.encode())  # past the file object, which would try what failed again when it closes

    def drop(self) -> None:
        """Give the folder back; nothing happens if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try(self, file: TextIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            self._say(f"{self._folder}: this file system has no locks ({error.strerror}); make sure that no second job uses the directory")
        return True


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read(4096))
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "which has not said who it is"
