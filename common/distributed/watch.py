"""How ranks keep an eye on each other.

Every process posts a heartbeat; whoever falls silent, or sits in one working phase for longer than `topology.timeout_s`, is named by
the others, which then end too. Waiting is no fault, nor is a slow checkpoint; but when everybody waits for that long, a device or a
transfer hangs, and the job ends as well.

Others are only judged by what this process could see: seconds in which it was stopped itself, or in which the store did not answer, are
nobody's silence.

With the heartbeats goes the wish to stop: a rank that is asked to stop, a target too, leaves a note, and the main drafter then asks all
drafters. Targets go on serving until they are answered STOP.
"""

import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from common.distributed.layout import DRAFTER, Layout, Member
from common.distributed.status import StatusStore
from common.distributed.stop import STOP_S, StopRequest
from common.errors import UserError

WORKING = ("capture", "step")  # phases that no healthy worker stays in for long
PATIENT = ("start", "checkpoint")  # phases that may take any time
STOP_WISH = "stop_wish"  # the key of the note of a rank that was asked to stop
AWAKE_INTERVALS = 2  # a round of looking that takes more than so many intervals was held up, and counts as that long


class AwakeClock:
    """Seconds in which this process ran and the store answered: of a round that took longer than `most_s`, only so much is counted."""

    def __init__(self, most_s: float, start_s: float):
        self._most_s, self._before_s, self._awake_s = most_s, start_s, 0.0

    def tick(self, now_s: float) -> float:
        """The seconds so far, at `now_s` of the real clock."""
        self._awake_s += min(now_s - self._before_s, self._most_s)
        self._before_s = now_s
        return self._awake_s


class _Seen(NamedTuple):
    """What is known of a rank: its last heartbeat, its last (count, step, phase), and when each was new, in seconds of the AwakeClock."""

    beat: float | None
    beat_s: float
    phase: list[Any] | None
    phase_s: float

    def overdue_s(self, now: float) -> float:
        """Seconds of silence or in one working phase."""
        return max(now - self.beat_s, now - self.phase_s if self.phase and self.phase[2] in WORKING else 0.0)

    def waiting_s(self, now: float) -> float:
        """Seconds of waiting in one phase; a rank that works for too long is overdue, and not one of those who wait."""
        return now - self.phase_s if self.phase and self.phase[2] not in (*PATIENT, *WORKING) else 0.0

    @property
    def step(self) -> int:
        return self.phase[1] if self.phase else 0

    def __str__(self) -> str:
        return f"last seen at step {self.phase[1]} in {self.phase[2]}" if self.phase else "never seen"


class Watch:
    """Heartbeats of all ranks, by a thread of its own with a connection of its own to the store.

    `leave` before a regular end; `explain` after an error that may be somebody else's. `stop` is this process's wish to stop, if it reads
    signals at all.
    """

    def __init__(
        self, store: dist.Store, status: StatusStore, layout: Layout, member: Member, timeout_s: float, stop: StopRequest | None = None
    ):
        self._store, self._status, self._member, self._timeout_s, self._stop = store, status, member, timeout_s, stop
        self._names = {m.rank: f"{m.name} (rank {m.rank} on {m.host})" for m in layout.members}
        self._interval_s = min(timeout_s / 10, max(0.5, len(self._names) / 32))
        self._clock = AwakeClock(AWAKE_INTERVALS * self._interval_s, time.monotonic())
        self._seen: dict[int, _Seen] = {}  # by rank, of those that have not left
        self._left = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def _run(self):
        while True:
            try:
                with self._lock:
                    if self._left:
                        return
                    self._look()
            except RuntimeError:
                return  # the store is gone with its agent, which ends us
            time.sleep(self._interval_s)

    def _look(self):
        self._store.set(f"beat/{self._member.rank}", json.dumps([time.monotonic(), *self._status.now]))
        self._pass_on_stop()
        beats = self._beats()
        now = self._clock.tick(time.monotonic())  # after the store has answered: a request that blocked is held-up time, too
        for rank, beat in beats.items():
            self._see(rank, beat, now)
        if set(self._seen) <= {self._member.rank}:
            return  # all others have left
        overdue_s, _, rank = max((s.overdue_s(now), -s.step, r) for r, s in self._seen.items() if r != self._member.rank)
        if overdue_s > self._timeout_s:
            self._end(f"{self._names[rank]}: no sign of progress for {overdue_s:.0f} s, {self._seen[rank]}")
        still_s = min(seen.waiting_s(now) for seen in self._seen.values())
        if still_s > self._timeout_s:
            behind = sorted(self._seen, key=lambda rank: self._seen[rank].step)[:8]
            ranks = "; ".join(f"{self._names[rank]} {self._seen[rank]}" for rank in behind)
            self._end(f"all ranks have waited for each other for {still_s:.0f} s, so a device or a transfer hangs: {ranks}")

    def _pass_on_stop(self):
        if self._stop is None:
            return
        if self._stop.requested:
            self._store.set(STOP_WISH, json.dumps(True))
            if (seconds := self._read(STOP_S)) is not None:
                self._stop.expect(seconds)  # a target does not know how long the drafters will take
        elif self._member.role == DRAFTER and self._member.index == 0:
            self._stop.requested = self._store.check([STOP_WISH])

    def _beats(self):
        """The last heartbeat of every rank, or None; one request for all as soon as all have sent one."""
        keys = [f"beat/{rank}" for rank in self._names]
        if self._store.check(keys):
            return dict(zip(self._names, map(json.loads, self._store.multi_get(keys)), strict=True))
        return {rank: self._read(key) for rank, key in zip(self._names, keys, strict=True)}

    def _see(self, rank, beat, now):
        if beat is not None and beat[3] == "left":
            self._seen.pop(rank, None)
            return
        seen = self._seen.get(rank, _Seen(None, now, None, now))
        if beat is not None and beat[0] != seen.beat:
            seen = seen._replace(beat=beat[0], beat_s=now)
        if beat is not None and beat[1:] != seen.phase:
            seen = seen._replace(phase=beat[1:], phase_s=now)
        self._seen[rank] = seen

    def _read(self, key):
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _end(self, what):
        print(f"error: {what}. This is {self._names[self._member.rank]}, ending too.", file=sys.stderr, flush=True)
        os._exit(1)

    def leave(self) -> None:
        """Tell the others that this rank is done, and stop watching them."""
        with self._lock:
            self._left = True
            self._store.set(f"beat/{self._member.rank}", json.dumps([0, 0, 0, "left"]))

    def explain(self, error: BaseException, lost_connection: bool) -> None:
        """Say whose fault it is: ours (a note for the others is left), or a rank's that died; then end the process if it is another's."""
        if not lost_connection:
            with self._lock:
                words = str(error).strip().splitlines()[0][:500] if str(error) else type(error).__name__
                self._store.set(f"fault/{self._member.rank}", json.dumps([words, isinstance(error, UserError)]))
            return
        deadline = time.monotonic() + min(self._timeout_s, 20 * self._interval_s)
        while time.monotonic() < deadline:
            time.sleep(self._interval_s / 2)
            with self._lock:
                for rank in self._names:
                    fault = self._read(f"fault/{rank}")
                    if fault is None:
                        continue
                    words, of_the_user = fault
                    if of_the_user:
                        os._exit(2)  # that rank says it, for all
                    self._end(f"{self._names[rank]}: {words}, {self._seen.get(rank, 'gone')}")
                now = self._clock.tick(time.monotonic())
                silent = {rank: now - seen.beat_s for rank, seen in self._seen.items() if rank != self._member.rank}
                if not silent:
                    continue
                rank = max(silent, key=silent.__getitem__)
                if silent[rank] > 4 * self._interval_s:
                    self._end(f"{self._names[rank]}: died or fell silent {silent[rank]:.0f} s ago, {self._seen[rank]}")
