"""Helpers of the distributed tests: real gloo ranks, and whole jobs with and without torchrun, all forked with everything imported."""

import contextlib
import datetime
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""These tests are about ranks on CPUs; a box with one GPU would refuse three of them."""


def start_fork_server() -> None:
    """Start the process that ranks are forked from. A session has one, whoever starts it, and it imports what its starter asked for."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    multiprocessing.forkserver.ensure_running()


@functools.cache
def fork_context() -> ForkServerContext:
    """Where ranks are forked, once the server has imported everything: no test's clock runs meanwhile."""
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


class Job:
    """Ranks of a script, forked from a process that has already imported everything, so that a job starts in an instant.

    `script` is a module with a `main(argv)`; `sabotage(rank)` runs in each rank before it. `output` is what all ranks printed.
    """

    def __init__(
        self,
        arguments: Iterable[object],
        ranks: int = 1,
        sabotage: Callable[[int], object] | None = None,
        script: str = "train_drafter",
    ):
        context = fork_context()
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "output"
        variables = {"OMP_NUM_THREADS": "1"} | WITHOUT_GPUS
        if ranks > 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._host_store()), "WORLD_SIZE": str(ranks)}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.processes = [
            context.Process(target=_job_main, args=(rank, variables, script, list(map(str, arguments)), sabotage, self._log))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _host_store(self) -> int:
        """The rendezvous store lives here, as it does in torchrun's agent: it outlives every rank."""
        import torch.distributed

        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, timeout_s: float = 60) -> list[int | None]:
        """Exit codes by rank, negative for signals; fails when the job takes longer."""
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            process.join(max(0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} has not ended in {timeout_s} s\n{self.output[-4000:]}"
        return [process.exitcode for process in self.processes]

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        """Return when the condition holds; fails when that takes longer, or when the job has ended without it."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still waiting after {timeout_s} s\n{self.output[-4000:]}"
            assert any(process.is_alive() for process in self.processes), f"the job has ended\n{self.output[-4000:]}"
            time.sleep(0.02)


class Forked:
    """A process of multiprocessing, used like a Popen."""

    def __init__(self, process: BaseProcess):
        process.start()
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def torchrun(*arguments: object, output: Path, **variables: str) -> Forked:
    """Start a job as `torchrun ARGUMENTS` does: by torch's own agent, but the agent and the ranks that it starts are forked.

    They print to the file `output`. tests/test_launch.py also has agents and ranks that a shell starts.
    """
    environment = {"OMP_NUM_THREADS": "1", **WITHOUT_GPUS, **variables}
    return Forked(fork_context().Process(target=_agent_main, args=(environment, list(map(str, arguments)), output)))


def run_ranks(worker: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `worker(rank, ranks, *args)` on that many gloo ranks and return their results, by rank.

    `worker` is a module-level function; the default process group is up while it runs. A failing rank's traceback is raised here,
    and ranks that have not answered after `timeout_s` are named and killed.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], {}
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(worker, rank, ranks, args, f"{folder}/rendezvous", timeout_s, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            return _collect(pipes, ranks, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def start(command: Sequence[str], output: int | IO[str] = subprocess.PIPE, **variables: Any) -> subprocess.Popen[str]:
    """Start a command in the repository's root, without GPUs and without the hub."""
    environment = {**os.environ, **WITHOUT_GPUS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    stderr = subprocess.PIPE if output is subprocess.PIPE else subprocess.STDOUT
    return subprocess.Popen(command, stdout=output, stderr=stderr, text=True, cwd=REPOSITORY, env=environment, start_new_session=True)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, found in /proc: torchrun gives each worker a session of its own."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(rest[1]), []).append(child)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def stop_job(process: subprocess.Popen[str] | Forked) -> None:
    """Kill a job that is still running, its workers included."""
    if process.poll() is None:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _job_main(rank, variables, script, arguments, sabotage, log):
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    _print_to(log)
    from common.cli import run_script

    if sabotage is not None:
        sabotage(rank)
    sys.argv = [script, *arguments]
    run_script(importlib.import_module(script).main)


def _print_to(log):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _agent_main(environment, arguments, output):
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    _print_to(output)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda _, command, variables: _fork_rank(command, variables)
    run.main(arguments)


def _fork_rank(command, environment):
    """What an agent starts ranks by: a process in a process group of its own, which is what it sends its signals to."""
    rank = Forked(multiprocessing.get_context("fork").Process(target=_forked_main, args=(command, environment)))
    os.setpgid(rank.pid, rank.pid)
    return rank


def _forked_main(command, environment):
    """What `python -u SCRIPT ARGUMENTS` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's own handlers
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    _, _, script, *_ = sys.argv = list(command)
    del sys.argv[:2]
    runpy.run_path(script, run_name="__main__")


def _rank_main(worker, rank, ranks, args, rendezvous, timeout_s, pipe):
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        torch.distributed.barrier()  # else a rank that is done at once hangs up on one that is still connecting
        pipe.send((True, worker(rank, ranks, *args)))
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _collect(pipes: dict[Connection, int], ranks: int, timeout_s: float) -> list[Any]:
    results, waiting, deadline = {}, dict(pipes), time.monotonic() + timeout_s
    while waiting:
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())} of {ranks} have not answered in {timeout_s} s")
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            try:
                passed, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not passed:
                raise AssertionError(f"rank {rank} of {ranks} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(ranks)]
