"""One job a run directory: a lock that the kernel drops with the process, so that a killed job never blocks its successor."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from common.locks import holder_of, sign, try_lock
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
        while not try_lock(file, self._say):
            if time.monotonic() > deadline:
                holder = holder_of(file)
                file.close()
                raise UserError(
                    f"log.dir={self._folder} is in use by another job ({holder}); "
                    f"stop that one (touch {self._folder / 'STOP'}) or name another directory with log.dir=DIR"
                )
            time.sleep(0.1)
        self._file = file
        with must_write(self._folder):
            sign(file)

    def drop(self) -> None:
        """Give the folder back; nothing happens if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None
