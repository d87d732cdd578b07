"""Nothing is lost: a run that was stopped or killed anywhere and started again ends where the uninterrupted run ends, bit by bit."""

import functools
import json
import os
import signal

import pytest
from ranks import Job

from common.training.run_directory import RunDirectory

TIMED = ("tokens_per_s", "wait_share", "busy", "blocked", "seconds", "peak_memory")  # what a clock or the machine decides in a log record


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


def weights(folder):
    """Bytes of every file of the newest checkpoint: masters and each drafter's moments."""
    checkpoint = max((folder / "checkpoints").glob("step_*"))
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
    from common.training.optim import Optimizer

    kill_at_call(Optimizer, "accumulate", 14, False, rank)  # the first of the two packets of step 7 is in the gradients, if accumulate=2


def kill_in_step(rank):
    from common.training.optim import Optimizer

    kill_at_call(Optimizer, "step", 7, True, rank)


def kill_between_parts(rank):
    kill_at_call(RunDirectory, "write_part", 3, True, rank)  # the second checkpoint has its weights but no moments


def kill_before_the_marker(rank):
    kill_at_call(RunDirectory, "commit", 2, True, rank)


def kill_after_the_checkpoint(rank):
    kill_at_call(RunDirectory, "commit", 2, False, rank)


def kill_in_export(rank):

    from common.drafter import export

    kill_at_call(export, "save_file", 2, True, rank)


def kill_before_the_first_checkpoint(rank):
    from common.training.optim import Optimizer

    kill_at_call(Optimizer, "step", 2, False, rank)


@pytest.fixture(scope="module")
def straight(tiny_preset, tmp_path_factory):
    """The uninterrupted run that accumulates two packets a step."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(tiny_preset, folder, "optim.accumulate=2")
    return folder


@pytest.mark.parametrize(
    "kill",
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
def test_a_killed_run_ends_like_the_uninterrupted_one(tiny_preset, straight, tmp_path, kill):
    """Else every death of a node changes what is learnt, and no run can be compared with another."""
    killed(tiny_preset, tmp_path / "run", "optim.accumulate=2", sabotage=kill)
    finish(tiny_preset, tmp_path / "run", "optim.accumulate=2")
    assert_equal_runs(straight, tmp_path / "run")
    hidden = [path.name for part in ("checkpoints", "export") for path in (tmp_path / "run" / part).glob(".*")]
    assert not hidden, "leftovers of the killed job cost disk space"


def test_two_kills_in_a_row(tiny_preset, straight, tmp_path):
    """What the first death left behind must not confuse the job that recovers from the second."""
    for kill in (kill_in_step, kill_before_the_first_checkpoint):
        killed(tiny_preset, tmp_path / "run", "optim.accumulate=2", sabotage=kill)
    finish(tiny_preset, tmp_path / "run", "optim.accumulate=2")
    assert_equal_runs(straight, tmp_path / "run")


def stop_at(step, how, rank):
    """Ask for a graceful stop when this rank begins a step: by the STOP file, or by a signal to itself."""
    from train_drafter import Trainer

    train_step = Trainer.train_step

    def asking(trainer, now, entries):
        if now == step:
            if how == "file":
                trainer.run_files.directory.stop_file.touch()
            else:
                os.kill(os.getpid(), how)
                while not trainer.stop.requested:
                    pass
        train_step(trainer, now, entries)

    Trainer.train_step = asking


def stopped(preset, folder, *overrides, step, how="file", ranks=1):
    with Job(arguments(preset, folder, *overrides), ranks, functools.partial(stop_at, step, how)) as job:
        assert job.wait() == [0] * ranks, job.output
        assert "start the same command again" in job.output
    assert not (folder / "STOP").exists(), "the next start would stop at once"


def steps_of(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("how", ["file", signal.SIGUSR1, signal.SIGINT])
def test_a_stopped_run_ends_like_the_uninterrupted_one(tiny_preset, straight, tmp_path, how):
    """Else a time limit, a maintenance window or a Ctrl-C costs steps or changes them."""
    stopped(tiny_preset, tmp_path / "run", "optim.accumulate=2", step=6, how=how)
    assert steps_of(tmp_path / "run") == [4, 6]
    stopped(tiny_preset, tmp_path / "run", "optim.accumulate=2", step=7, how=how)
    finish(tiny_preset, tmp_path / "run", "optim.accumulate=2")
    assert_equal_runs(straight, tmp_path / "run")


def test_a_stop_that_came_after_the_end_stops_nobody(tiny_preset, tmp_path):
    """Else the next start ends after one step, and nobody asked it to."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/STOP").touch()
    finish(tiny_preset, tmp_path / "run")
    assert steps_of(tmp_path / "run")[-1] == 12


def test_a_stopped_run_in_bfloat16_ends_like_the_uninterrupted_one(tiny_preset, tmp_path):
    """Weights in half precision are copies of the masters: left as they were drawn, the first step after a resume learns from noise."""
    finish(tiny_preset, tmp_path / "straight", "drafter.dtype=bfloat16")
    stopped(tiny_preset, tmp_path / "run", "drafter.dtype=bfloat16", step=6)
    finish(tiny_preset, tmp_path / "run", "drafter.dtype=bfloat16")
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")
    inner = json.loads((tmp_path / "run/export/latest/config.json").read_text())["dflash_config"]
    assert inner["feature_dtype"] == "float32", "the evaluation would round the features that training did not"


SPARSE_LOG = ("log.every=5", "validation.every=3", "validation.rows=3")


def test_the_log_is_the_uninterrupted_one_even_between_its_lines(tiny_preset, tiny_heldout, tmp_path):
    """A record is a mean since the last one: a stop or a kill between two records must not shorten it."""
    overrides = (*SPARSE_LOG, f"validation.path={tiny_heldout}")
    finish(tiny_preset, tmp_path / "straight", *overrides)
    stopped(tiny_preset, tmp_path / "run", *overrides, step=3)
    killed(tiny_preset, tmp_path / "run", *overrides, sabotage=kill_after_the_checkpoint)
    finish(tiny_preset, tmp_path / "run", *overrides)
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")
    assert [line["step"] for line in records(tmp_path / "run") if "loss" in line] == [5, 10, 12]


def test_an_export_that_the_last_job_did_not_finish_is_made_up_for(tiny_preset, tmp_path):
    """Killed in its last export, the run is finished, and no later step will export."""
    finish(tiny_preset, tmp_path / "straight", "checkpoint.every=100")
    killed(tiny_preset, tmp_path / "run", "checkpoint.every=100", sabotage=kill_in_the_first_export)
    finish(tiny_preset, tmp_path / "run", "checkpoint.every=100")
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")


def kill_in_the_first_export(rank):

    from common.drafter import export

    kill_at_call(export, "save_file", 1, True, rank)


TWO_DRAFTERS = ("topology.drafters=2", "sync.every=4", "checkpoint.every=4", "sync.outer=nesterov")  # a plain mean keeps less


@pytest.fixture(scope="module")
def pair(tiny_preset, tmp_path_factory):
    """The uninterrupted run of two targets and two drafters that average every four steps."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    finish(tiny_preset, folder, *TWO_DRAFTERS, ranks=4)
    return folder


def test_a_stop_adds_and_moves_no_averaging(tiny_preset, pair, tmp_path):
    """Asked to stop in step 6, two drafters stop after step 8, where they meet anyway."""
    stopped(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, step=6, ranks=4)
    assert steps_of(tmp_path / "run") == [4, 8]
    finish(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, ranks=4)
    assert_equal_runs(pair, tmp_path / "run")
    assert len(weights(pair)) == 3, "each drafter keeps its own moments"


def kill_the_second_drafter(rank):
    if rank == 3:
        kill_in_step(rank)


def kill_the_first_target(rank):
    if rank == 0:
        from serve_targets import Server

        kill_at_call(Server, "_capture", 9, True, rank)


@pytest.mark.parametrize("kill", [kill_the_second_drafter, kill_the_first_target])
def test_two_drafters_go_on_after_the_death_of_a_rank(tiny_preset, pair, tmp_path, kill):
    """Each drafter has moments of its own: mixed up or lost, the replicas train on as something else."""
    killed(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, sabotage=kill, ranks=4)
    finish(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, ranks=4)
    assert_equal_runs(pair, tmp_path / "run")


def test_another_number_of_targets_resumes_exactly(tiny_preset, pair, tmp_path):
    """Targets hold no state: a job that lost a node goes on with what is left."""
    stopped(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, step=5, ranks=4)
    finish(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, ranks=3)
    assert_equal_runs(pair, tmp_path / "run")


def test_another_number_of_drafters_resumes_from_the_average_and_says_so(tiny_preset, pair, tmp_path):
    """A job that gets fewer devices next time can go on, but not bit by bit: its user must be told."""
    stopped(tiny_preset, tmp_path / "run", *TWO_DRAFTERS, step=5, ranks=4)
    output = finish(tiny_preset, tmp_path / "run", "topology.drafters=1", *TWO_DRAFTERS[1:], ranks=3)
    assert "2 drafters" in output and "average" in output and steps_of(tmp_path / "run")[-1] == 12
    assert len(weights(tmp_path / "run")) == 2


def test_threads_stop_and_go_on_like_processes(tiny_preset, pair, tmp_path):
    """Two targets and two drafters in threads of one process: stopped, started again, and equal to four processes."""
    overrides = ("topology.mode=threads", "topology.targets=2", *TWO_DRAFTERS)
    stopped(tiny_preset, tmp_path / "run", *overrides, step=6)
    assert steps_of(tmp_path / "run") == [4, 8]
    finish(tiny_preset, tmp_path / "run", *overrides)
    assert_equal_runs(pair, tmp_path / "run")
