"""What workers write for each other: in memory within one process, in the rendezvous store between processes."""

import json
import threading
import time

POLL_S = 0.02


class Stopped(Exception):
    """Another worker of this process failed or was interrupted; this one must end too."""


class LocalStatus:
    """Notes between workers of one process; `failed` wakes whoever waits for a note that will not come."""

    def __init__(self, failed=None):
        self._notes, self._failed = {}, failed or threading.Event()

    def put(self, key, value):
        self._notes[key] = value

    def wait(self, key):
        while key not in self._notes:
            if self._failed.wait(0.01):
                raise Stopped
        return self._notes[key]

    def phase(self, step, name):
        """What this worker is doing now."""


class StatusStore:
    """Notes between processes, as JSON in the rendezvous store."""

    def __init__(self, store):
        self._store = store
        self.now = (0, 0, "start")  # how many phases were entered, step, phase

    def put(self, key, value):
        self._store.set(key, json.dumps(value))

    def wait(self, key):
        """The note under a key, whenever it comes; a rank that never leaves it is found by the watch."""
        while not self._store.check([key]):  # the store's own wait writes a warning for every pause it makes
            time.sleep(POLL_S)
        return json.loads(self._store.get(key))

    def gather(self, name, rank, world, value):
        """Everybody's value, by rank."""
        self.put(f"{name}/{rank}", value)
        return [self.wait(f"{name}/{other}") for other in range(world)]

    def phase(self, step, name):
        self.now = (self.now[0] + 1, step, name)
