"""Packing on all cores: the same bytes as on one, in flat memory, and nothing left behind however it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import build_tokenizer, conversations
from ranks import REPOSITORY, Job, descendants

from common.data import preparing
from common.data.parallel import AHEAD, ordered_map
from common.data.store import TokenStore
from common.data.tokenizing import LineTokenizer
from common.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return str(folder)


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A file of more lines than one process takes alone, some of them bad."""
    monkeypatch.setattr(preparing, "ALONE_BYTES", 1000)
    rows = [json.dumps({"messages": messages}) for messages in conversations(600, seed=0)]
    rows[100], rows[500] = "oops", rows[3]
    (tmp_path / "lines.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "lines.jsonl")


class Square:
    """A function with results of very different cost, so that batches finish out of order."""

    def __call__(self, number):
        if number == 13:
            raise UserError("thirteen")
        return sum(1 for _ in range(200_000 if number % 7 == 0 else 1)) and number**2


class Killed(LineTokenizer):
    """Tokenizes until it meets the line `oops`, on which its process dies."""

    def __call__(self, batch):
        if b"oops\n" in batch[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


class Broken(LineTokenizer):
    """A tokenizer with a bug."""

    def __call__(self, batch):
        raise ZeroDivisionError("a bug")


def test_the_stores_do_not_depend_on_the_number_of_processes(tokenizer, lines, tmp_path):
    """The fingerprint of the data decides whether a run may resume: it must not change with the machine that packed them."""
    found = []
    for workers in (1, 2, 3):
        folder = str(tmp_path / f"store{workers}")
        summary = preparing.pack([lines], tokenizer, folder, heldout=5, workers=workers)
        prints = [TokenStore.open(path).fingerprint for path in (folder, f"{folder}-heldout")]
        found.append((prints, summary["lines"], summary["rejects"], summary["documents"]))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 600 and found[0][2]["not JSON"]["lines"] == [f"{lines}:101"]


def test_results_come_in_order_and_batches_are_read_only_a_little_ahead():
    """Data sets are larger than memory: what is read must be written before more is read."""
    read = []

    def batches():
        for number in range(100, 200):
            read.append(number)
            yield number

    for given, result in enumerate(ordered_map(Square(), batches(), 2)):
        assert result == (100 + given) ** 2
        assert len(read) <= given + 2 * AHEAD
    assert given == 99


def test_an_error_of_the_function_reaches_the_caller():
    """A bug or a mistake in a worker that only its own process saw would look like a hang."""
    with pytest.raises(UserError, match="thirteen"):
        list(ordered_map(Square(), range(20), 2))


def test_a_bug_in_a_process_shows_where_it_is(tokenizer, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "LineTokenizer", Broken)
    with pytest.raises(RuntimeError, match=r"(?s)in a packing process:.*ZeroDivisionError: a bug"):
        preparing.pack([lines], tokenizer, str(tmp_path / "store"), workers=2)


def test_a_killed_process_ends_the_pack_in_words_and_leaves_nothing(tokenizer, lines, tmp_path, monkeypatch):
    """The kernel kills what takes too much memory: a pack that waited for it, or left half a store, would cost a night."""
    monkeypatch.setattr(preparing, "LineTokenizer", Killed)
    with pytest.raises(UserError, match=r"one of 2 packing processes was killed by signal 9; where memory ran out, use fewer --workers"):
        preparing.pack([lines], tokenizer, str(tmp_path / "store"), workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


ENDLESS = """
if __name__ == "__main__":
    import functools, itertools
    from common.cli import run_script
    from common.data.parallel import ordered_map
    from common.data.store import StoreWriter

    def main(arguments):
        with StoreWriter(arguments[0], {}) as store:
            for ids in ordered_map(functools.partial(sorted), ([2, 1] for _ in itertools.count()), 2):
                store.add(ids, [1, 1])

    run_script(main)
"""


@pytest.fixture
def endless(tmp_path):
    """A script that fills a store by two processes until it is stopped, and the ids of the processes below it."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    job = subprocess.Popen(
        [sys.executable, script, tmp_path / "store"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it, and so would its children
    )
    try:
        until(lambda: any(path.stat().st_size for path in tmp_path.glob(".store*.partial/tokens.bin")), job)
        yield job, descendants(job.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def until(condition, job=None, timeout_s=60):
    """Look again and again until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end and (job is None or job.poll() is None), "it does not come"
        time.sleep(0.02)


def alive(pids):
    """Those of these processes that are there and not only waiting to be collected."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" else []
    return found


def test_ctrl_c_ends_all(endless, tmp_path):
    """A user who stops a pack wants the cores back, the store that was there, and no page of tracebacks."""
    job, below = endless
    assert len(below) >= 3, "two processes and the server that starts them"
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130 and errors.strip().splitlines()[-1] == "interrupted" and "Traceback" not in errors
    until(lambda: not alive(below))
    assert [path.name for path in tmp_path.iterdir()] == ["endless.py"]


def test_no_process_outlives_a_killed_pack(endless):
    """Orphans that wait for batches for ever would hold a node's memory until somebody finds them."""
    job, below = endless
    job.kill()
    job.wait()
    until(lambda: not alive(below))


@pytest.mark.benchmark
def test_the_benchmark_measures_one_and_the_same_work():
    """Speeds of different work cannot be compared, and a user chooses --workers by them."""
    with Job(["--tiny"], script="benchmarks.packing") as job:
        assert job.wait(timeout_s=300) == [0], job.output[-4000:]
        cases = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    text = [case for case in cases if case["part"] == "text"]
    assert text[0]["workers"] == 1 < text[1]["workers"] and len({case["tokens"] for case in text}) == 1
    assert all(case["share"] == pytest.approx(text[0]["wall_s"] / case["wall_s"] / case["workers"], rel=1e-2) for case in text)
    assert [case["messages"] for case in cases if case["part"] == "turns"] == [20, 60]
