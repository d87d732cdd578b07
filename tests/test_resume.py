"""Nothing is lost: a run that was stopped or killed anywhere and started again ends where the uninterrupted run ends, bit by bit."""

import functools
import json
import os
import signal

import pytest
from ranks import Job

from common.checkpoint import RunDirectory

TIMED = ("tokens_per_s", "wait_share", "busy", "blocked", "seconds")  # what a clock decides in a log record


def arguments(preset, folder, *overrides):
    return ["--config", preset, f"log.dir={folder}", *overrides]


def finish(preset, folder, *overrides, ranks=1):
    with Job(arguments(preset, folder, *overrides), ranks) as job:
        assert job.wait() == [0] * ranks, job.output
        return job.output


def killed(preset, folder, *overrides, sabotage, ranks=1):
    """Run until `sabotage` kills a rank, then end the others."""
    with Job(arguments(preset, folder, *overrides), ranks, sabotage) as job:
        job.wait_until(lambda: any(p.exitcode == -signal.SIGKILL for p in job.processes))


def weights(folder, step=12):
    """Bytes of every file of a checkpoint: masters and each drafter's moments."""
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in TIMED)} for line in lines]


def assert_equal_runs(one, other):
    assert weights(one) == weights(other) and len(weights(one)) >= 2
    assert records(one) == records(other) and records(one)
    assert (one / "export/latest/model.safetensors").read_bytes() == (other / "export/latest/model.safetensors").read_bytes()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(of, method, count, before, rank):
    """SIGKILL this process at the count-th call of a method, before or after it has done its work."""
    original, calls = getattr(of, method), []

    @functools.wraps(original)
    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == count and before:
            die()
        result = original(*args, **kwargs)
        if len(calls) == count:
            die()
        return result

    setattr(of, method, counted)


def kill_in_accumulation(rank):
    from common.optim import Optimizer

    kill_at_call(Optimizer, "accumulate", 14, False, rank)  # the first of the two packets of step 7 is in the gradients, if accumulate=2


def kill_in_step(rank):
    from common.optim import Optimizer

    kill_at_call(Optimizer, "step", 7, True, rank)


def kill_between_parts(rank):
    kill_at_call(RunDirectory, "write_part", 3, True, rank)  # the second checkpoint has its weights but no moments


def kill_before_the_marker(rank):
    kill_at_call(RunDirectory, "commit", 2, True, rank)


def kill_after_the_checkpoint(rank):
    kill_at_call(RunDirectory, "commit", 2, False, rank)


def kill_in_export(rank):
    from common import drafter_files

    kill_at_call(drafter_files, "save_file", 2, True, rank)


def kill_before_the_first_checkpoint(rank):
    from common.optim import Optimizer

    kill_at_call(Optimizer, "step", 2, False, rank)


@pytest.fixture(scope="module")
def straight(tiny_preset, tmp_path_factory):
    """The uninterrupted run that accumulates two packets a step."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(tiny_preset, folder, "optim.accumulate=2")
    return folder


@pytest.mark.parametrize(
    "place",
    [
        kill_in_accumulation,
        kill_in_step,
        kill_between_parts,
        kill_before_the_marker,
        kill_after_the_checkpoint,
        kill_in_export,
        kill_before_the_first_checkpoint,
    ],
)
def test_a_killed_run_ends_like_the_uninterrupted_one(tiny_preset, straight, tmp_path, place):
    killed(tiny_preset, tmp_path / "run", "optim.accumulate=2", sabotage=place)
    finish(tiny_preset, tmp_path / "run", "optim.accumulate=2")
    assert_equal_runs(straight, tmp_path / "run")
    hidden = [path.name for part in ("checkpoints", "export") for path in (tmp_path / "run" / part).glob(".*")]
    assert not hidden, "leftovers of the killed job cost disk space"


def test_two_kills_in_a_row(tiny_preset, straight, tmp_path):
    for place in (kill_in_step, kill_before_the_first_checkpoint):
        killed(tiny_preset, tmp_path / "run", "optim.accumulate=2", sabotage=place)
    finish(tiny_preset, tmp_path / "run", "optim.accumulate=2")
    assert_equal_runs(straight, tmp_path / "run")
