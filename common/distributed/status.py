"""What workers write for each other: in memory within one process, in the rendezvous store between processes."""

import json
import threading
import time
from typing import Any, Protocol

import torch.distributed as dist

POLL_S = 0.02


class Stopped(Exception):
    """Another worker of this process failed or was interrupted; this one must end too."""


class Status(Protocol):
    """Notes under keys that any worker may write and read, and what this worker is doing now."""

    def put(self, key: str, value: Any) -> None:
        """Write a note: anything that JSON can hold."""

    def wait(self, key: str) -> Any:
        """The note under a key, whenever it comes."""

    def phase(self, step: int, name: str) -> None:
        """Say what this worker is doing now, for whoever waits for it."""


class LocalStatus:
    """The status between workers of one process; `failed` wakes whoever waits for a note that will not come."""

    def __init__(self, failed: threading.Event | None = None):
        self._notes: dict[str, Any] = {}
        self._failed = failed or threading.Event()

    def put(self, key: str, value: Any) -> None:
        self._notes[key] = value

    def wait(self, key: str) -> Any:
        while key not in self._notes:
            if self._failed.wait(0.01):
                raise Stopped
        return self._notes[key]

    def phase(self, step: int, name: str) -> None:
        """Nothing: a process sees its own threads hang."""


class StatusStore:
    """The status between processes, as JSON in the rendezvous store."""

    def __init__(self, store: dist.Store):
        self._store = store
        self.now = (0, 0, "start")
        """How many phases this rank has entered, its step and its phase; the watch sends it with every heartbeat."""

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def wait(self, key: str) -> Any:
        """The note under a key, whenever it comes; a rank that never leaves it is found by the watch."""
        while not self._store.check([key]):  # the store's own wait writes a warning for every pause it makes
            time.sleep(POLL_S)
        return json.loads(self._store.get(key))

    def gather(self, name: str, rank: int, world: int, value: Any) -> list[Any]:
        """Everybody's value, by rank. Rank 0 collects them, so that the store's work grows with the ranks and not with their square."""
        self.put(f"{name}/{rank}", value)
        if rank == 0:
            self.put(name, [self.wait(f"{name}/{other}") for other in range(world)])
        return self.wait(name)

    def phase(self, step: int, name: str) -> None:
        self.now = (self.now[0] + 1, step, name)
