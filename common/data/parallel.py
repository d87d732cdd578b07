"""A function mapped over batches by several processes, its results in the order of the batches."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from common.errors import UserError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

AHEAD = 3
"""Batches per process that may be read before the oldest one's result is there: all have work, and memory stays flat."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS does not tell


def ordered_map(function: Callable[[Batch], Result], batches: Iterable[Batch], workers: int) -> Generator[Result, None, None]:
    """Yield function(batch) for each batch, in their order, computed by `workers` processes (1: by this one).

    The function is pickled once for each process. However the iteration ends, no process is left.

    Raises: what the function raises; UserError if a process dies.
    """
    if workers == 1:
        yield from map(function, batches)
        return
    context = multiprocessing.get_context("forkserver")  # not fork: this process has threads; and the server imports once for all
    context.set_forkserver_preload([type(function).__module__])
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()  # else the end of a dead process would stay open
            processes[ours] = process
        yield from _in_order(processes, batches)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def _in_order(processes: dict[Connection, BaseProcess], batches: Iterable[Any]) -> Iterator[Any]:
    """A process has one batch at a time: with more, its pipe could fill up in both directions, and both sides would wait for ever."""
    numbered, idle, results = enumerate(batches), list(processes), {}
    due, read, exhausted = 0, 0, False
    while True:
        while idle and not exhausted and read < due + AHEAD * len(processes):
            if (batch := next(numbered, None)) is None:
                exhausted = True
            else:
                read += 1
                _exchange(processes, idle.pop(), batch)
        if due in results:
            yield results.pop(due)
            due += 1
            continue
        if exhausted and due == read:
            return
        busy = [connection for connection in processes if connection not in idle]
        for connection in set(busy).intersection(wait(busy)):
            number, result = _exchange(processes, connection)
            if isinstance(result, BaseException):
                raise result
            results[number] = result
            idle.append(connection)


def _exchange(processes: dict[Connection, BaseProcess], connection: Connection, batch: Any = None) -> Any:
    """Send a batch or, without one, take a result. Raises: UserError if the process at the other end is dead."""
    try:
        return connection.recv() if batch is None else connection.send(batch)
    except (EOFError, OSError):
        process = processes[connection]
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise UserError(f"one of {len(processes)} packing processes {how}; where memory ran out, use fewer --workers") from None


def _work(function: Callable[[Any], Any], connection: Connection) -> None:
    """A process's life: batches in, results out, until the parent hangs up or kills it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core: threads would only push each other aside
    try:
        while True:
            number, batch = connection.recv()
            try:
                result = function(batch)
            except UserError as error:
                result = error
            except Exception:
                result = RuntimeError(f"in a packing process:\n{traceback.format_exc()}")
            connection.send((number, result))
    except (EOFError, OSError):
        return
