"""Ranks die and hang, disks fill up, users press Ctrl-C: the job goes on from its checkpoint, or ends soon with the culprit's name."""

import errno
import functools
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from ranks import Job, descendants, stop_job, torchrun
from test_resume import arguments, assert_equal_runs, finish, kill_at_call, records, stop_at, weights

from common.distributed.stop import StopRequest
from common.training.run_directory import RunDirectory

SOON = "topology.timeout_s=2"  # heartbeats then come every 0.2 s


def first_error(output):
    return next(line for line in output.splitlines() if line.startswith(("error", "Traceback")))


def test_a_killed_rank_and_an_interrupt_lose_nothing(tiny_preset, tmp_path):
    """Under torchrun --max-restarts a killed drafter goes on from the checkpoint, and nobody has to come and start the job again.

    Ctrl-C reaches torchrun, which passes it on and waits 30 s: time to stop after the next averaging, with a checkpoint.
    """
    overrides, run, output = (
        ("optim.schedule=constant", "optim.warmup=0", "checkpoint.every=8", "sync.every=8"),
        tmp_path / "run",
        tmp_path / "output",
    )
    command = ["train_drafter.py", *arguments(tiny_preset, run, *overrides, "optim.steps=100000")]
    job = torchrun("--standalone", "--nproc_per_node", 2, "--max-restarts", 3, *command, output=output)
    try:
        wait_for(job, (run / "checkpoints/step_00000008").exists, output)
        (drafter,) = re.findall(r"drafter 0: rank (\d)", output.read_text())
        os.kill(sorted(descendants(job.pid))[int(drafter)], signal.SIGKILL)
        wait_for(job, lambda: re.search(r"resuming from .* \(step (\d+)\)", output.read_text()), output)
        resumed = int(re.search(r"resuming from .* \(step (\d+)\)", output.read_text())[1])
        wait_for(job, (run / f"checkpoints/step_{resumed + 8:08d}").exists, output)
        workers = descendants(job.pid)
        job.send_signal(signal.SIGINT)
        job.wait(timeout=60)
    finally:
        stop_job(job)
    step = int(re.search(r"stopped after step (\d+)", output.read_text())[1])
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), "a rank was left behind"
    finish(tiny_preset, tmp_path / "straight", *overrides, f"optim.steps={step}", ranks=2)
    assert_equal_runs(tmp_path / "straight", run)


def wait_for(job, condition, output):
    deadline = time.monotonic() + 120
    while not condition():
        assert job.poll() is None and time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.02)


def kill_target_1(rank):
    if rank == 1:
        from serve_targets import Server

        kill_at_call(Server, "_capture", 4, True, rank)


def at_the_fourth_call(of, method, act):
    original, calls = getattr(of, method), []

    def counted(*args):
        calls.append(1)
        if len(calls) == 4:
            act()
        return original(*args)

    setattr(of, method, counted)


def target_that_computes_for_ever(rank):
    """Its heart goes on beating, so that only the time it spends in one capture tells."""
    if rank == 1:
        from serve_targets import Server

        at_the_fourth_call(Server, "_capture", threading.Event().wait)


def drafter_that_is_frozen(rank):
    if rank == 2:
        from train_drafter import Trainer

        at_the_fourth_call(Trainer, "train_step", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def test_without_restarts_a_death_ends_the_job_and_is_named(tiny_preset, tmp_path):
    """Else the others wait for ever, or print stacks of innocents."""
    with Job(arguments(tiny_preset, tmp_path / "run", SOON), 3, kill_target_1) as job:
        codes = job.wait(timeout_s=30)
        assert codes[1] == -signal.SIGKILL and codes[0] > 0 and codes[2] > 0
        assert "target 1 (rank 1 on " in first_error(job.output), job.output


@pytest.mark.parametrize(
    ("hang", "victim", "name"), [(target_that_computes_for_ever, 1, "target 1"), (drafter_that_is_frozen, 2, "drafter 0")]
)
def test_a_hanging_rank_is_named(tiny_preset, tmp_path, hang, victim, name):
    """Else the job burns its allocation, and nobody knows which device or node to look at."""
    with Job(arguments(tiny_preset, tmp_path / "run", SOON), 3, hang) as job:
        others = [process for rank, process in enumerate(job.processes) if rank != victim]
        job.wait_until(lambda: not any(process.is_alive() for process in others), timeout_s=40)
        assert all(process.exitcode > 0 for process in others)
        assert re.match(rf"error: {name} \(rank {victim} on [^)]*\): no sign of progress", first_error(job.output)), job.output


def transfer_that_never_ends(rank):
    """As on a device that hangs: the host waits for it in a phase in which waiting is no fault, and the heart goes on beating."""
    if rank == 2:
        from common.distributed.packet import PacketBuffer

        at_the_fourth_call(PacketBuffer, "finish", threading.Event().wait)


def test_a_job_that_stands_still_ends(tiny_preset, tmp_path):
    """Else nobody is overdue, for all only wait, and the job burns its allocation."""
    with Job(arguments(tiny_preset, tmp_path / "run", SOON), 3, transfer_that_never_ends) as job:
        job.wait_until(lambda: not any(process.is_alive() for process in job.processes), timeout_s=40)
        assert all(process.exitcode > 0 for process in job.processes)
        assert "a device or a transfer hangs: " in job.output, job.output
        assert re.search(r"drafter 0 \(rank 2 on [^)]*\) last seen at step 4 in wait", job.output), job.output


def slow_checkpoint(rank):
    """The first takes longer than the timeout and a few heartbeats."""
    commit, slow = RunDirectory.commit, [3.0]

    def slowly(*args):
        time.sleep(slow.pop() if slow else 0)
        commit(*args)

    RunDirectory.commit = slowly


def test_a_slow_checkpoint_kills_nobody(tiny_preset, tmp_path):
    """Writing 12 GB to a busy file system takes longer than the timeout, and is no fault."""
    with Job(arguments(tiny_preset, tmp_path / "run", SOON, "optim.steps=5", "checkpoint.every=4"), 3, slow_checkpoint) as job:
        assert job.wait() == [0, 0, 0], job.output


def wait_at(step, flag, rank):
    """Leave a note when a step begins, and stay there. A second Ctrl-C counts at once, and not as the echo of the first."""
    from common.distributed import stop
    from train_drafter import Trainer

    stop.ECHO_S = 0.0

    train_step = Trainer.train_step

    def waiting(trainer, now, entries):
        if now == step:
            open(flag, "w").close()
            time.sleep(60)
        train_step(trainer, now, entries)

    Trainer.train_step = waiting


@pytest.fixture
def busy(tiny_preset, tmp_path):
    """A job of one rank that sits in its third step."""
    flag = tmp_path / "flag"
    with Job(arguments(tiny_preset, tmp_path / "run"), 1, functools.partial(wait_at, 3, flag)) as job:
        job.wait_until(flag.exists)
        yield job


def test_sigterm_ends_at_once_with_143(busy):
    """Launchers send it and kill 30 s later: whoever then writes a checkpoint leaves half of one."""
    busy.signal(0, signal.SIGTERM)
    assert busy.wait(timeout_s=5) == [143]


def test_a_second_interrupt_ends_at_once(busy):
    busy.signal(0, signal.SIGINT)
    busy.wait_until(lambda: "stopping at the next averaging" in busy.output)
    busy.signal(0, signal.SIGINT)
    assert busy.wait(timeout_s=5) == [130]


def impatient(step, flag, rank):
    from common.distributed import stop
    from common.training import clock

    stop.INTERRUPT_GRACE_S, clock.UNSEEN_S = 0.3, 0.0
    wait_at(step, flag, rank)


def test_signals_do_behind_a_job_what_they_did_before():
    """In a notebook the next Ctrl-C would end the kernel."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.requested
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert stop._end_soon is not None
    stop._end_soon.join(10)
    assert not stop._end_soon.is_alive()


def test_an_interrupt_gives_up_waiting(tiny_preset, tmp_path):
    with Job(arguments(tiny_preset, tmp_path / "run"), 1, functools.partial(impatient, 3, tmp_path / "flag")) as job:
        job.wait_until((tmp_path / "flag").exists)
        job.signal(0, signal.SIGINT)
        assert job.wait(timeout_s=10) == [130]


def test_a_signal_to_any_drafter_stops_all_ranks(tiny_preset, tmp_path):
    """SIGUSR1 to the second of two drafters: all four ranks end with 0, and the checkpoint is there."""
    overrides = ("topology.drafters=2", "sync.every=4")
    with Job(arguments(tiny_preset, tmp_path / "run", *overrides), 4, second_drafter_asks) as job:
        assert job.wait() == [0, 0, 0, 0], job.output
        assert "stopped after step 8" in job.output
    assert weights(tmp_path / "run")


def first_target_asks(rank):
    """SIGINT reaches a target before its fifth capture."""
    if rank == 0:
        from serve_targets import Server

        at_the_fourth_call(Server, "_capture", lambda: os.kill(os.getpid(), signal.SIGINT))


def test_a_signal_to_a_target_stops_all_ranks(tiny_preset, tmp_path):
    """Ctrl-C at the agent that only serves would kill its targets after 20 s, without a checkpoint, and leave the drafters waiting."""
    overrides = ("optim.steps=100000", "checkpoint.every=50000", "topology.timeout_s=30")
    with Job(arguments(tiny_preset, tmp_path / "run", *overrides), 3, first_target_asks) as job:
        assert job.wait() == [0, 0, 0], job.output
        step = int(re.search(r"stopped after step (\d+)", job.output)[1])
    assert (tmp_path / f"run/checkpoints/step_{step:08d}").is_dir() and (tmp_path / f"run/export/step_{step:08d}").is_dir()


def second_drafter_asks(rank):
    if rank == 3:
        stop_at(6, signal.SIGUSR1, rank)


def test_a_second_job_in_a_run_directory_is_refused(tiny_preset, tmp_path):
    with Job(arguments(tiny_preset, tmp_path / "run"), 1, functools.partial(wait_at, 3, tmp_path / "flag")) as first:
        first.wait_until((tmp_path / "flag").exists)
        with Job(arguments(tiny_preset, tmp_path / "run")) as second:
            assert second.wait() == [2]
            assert f"in use by another job (pid {first.processes[0].pid} on " in second.output and "Traceback" not in second.output


def io_error(rank):
    """The disk under checkpoint 2 and its export gives up."""

    from common.training import run_directory

    write, calls = run_directory.write_safetensors, []

    def failing(path, tensors):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return write(path, tensors)

    run_directory.write_safetensors = failing


def test_an_io_error_costs_one_checkpoint(tiny_preset, tmp_path):
    finish(tiny_preset, tmp_path / "straight")
    with Job(arguments(tiny_preset, tmp_path / "run"), 1, io_error) as job:
        assert job.wait() == [0]
        assert "WARNING: no checkpoint of step 8" in job.output and "Input/output error" in job.output
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_00000004", "step_00000012"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.learning_rate=1"], "optim.learning_rate"),  # found before the ranks have met
        (["topology.targets=5"], "topology.targets=5"),  # found as they meet
    ],
)
def test_a_users_mistake_is_said_by_one_rank_and_ends_restarts_at_once(tiny_preset, tmp_path, overrides, words):
    """Else eight ranks that are restarted twelve times say it 104 times, and what a diverged run burns it burns again and again."""
    command = ["train_drafter.py", *arguments(tiny_preset, tmp_path / "run", *overrides, "topology.timeout_s=60")]
    job = torchrun("--standalone", "--nproc_per_node", 3, "--max-restarts", 2, *command, output=tmp_path / "output")
    try:
        assert job.wait(timeout=120) == 1
    finally:
        stop_job(job)
    printed = (tmp_path / "output").read_text()
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert 1 <= len(errors) <= 3 and len(set(errors)) == 1 and words in errors[0], printed[-6000:]
    assert re.search(r"exitcode *: 2\b", printed), printed[-3000:]


def test_a_run_that_failed_by_itself_leaves_its_words_for_restarts(tiny_preset, tmp_path):
    """A diverged run would be trained until it fails once for every restart, and every rank would print its own story."""
    overrides = ("optim.max_skipped=3", "log.every=2", "optim.steps=100000", "checkpoint.every=50000")
    with Job(arguments(tiny_preset, tmp_path / "run", *overrides), 3, functools.partial(poison, 4, 100000, 0)) as job:
        assert job.wait() == [2, 2, 2], job.output
        errors = [line for line in job.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "in a row (optim.max_skipped=3)" in errors[0], job.output
        assert f"error: {job._store.get('refusal').decode()}" == errors[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system that has room for one checkpoint of the tiny drafter and its export, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=440k", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_does_not_end_the_training(tiny_preset, small_disk, tmp_path):
    """What was learnt may still be saved when there is room again; but a run that ends unsaved must not look like a success."""
    with Job(arguments(tiny_preset, small_disk / "run", "log.tensorboard=true")) as job:
        assert job.wait() == [2], job.output
        assert "step 12 was trained, but could not be saved: no checkpoint" in job.output and "vllm serve" not in job.output
        assert "WARNING: no checkpoint of step" in job.output and "No space left on device" in job.output
        assert "step 12/12" in job.output, "training went on to its end"
    directory = RunDirectory(small_disk / "run")
    assert directory.newest_valid().step == 4
    assert (directory.exports / "latest/model.safetensors").is_file()


def poison(first, last, tap, rank):
    """Targets send not-a-number in one tap of some packets."""
    import serve_targets

    capture = serve_targets.Server.capture

    def poisoned(server, assignment, buffer):
        capture(server, assignment, buffer)
        if first <= assignment.number <= last:
            buffer.features[5, tap * 32 + 3] = float("nan")

    serve_targets.Server.capture = poisoned


@pytest.mark.parametrize("mode", ["average", "ddp"])
def test_a_packet_that_is_not_finite_costs_one_step_and_is_named(tiny_preset, tmp_path, mode):
    """One bad packet must not poison weights for good, nor vanish without a word."""
    overrides = ("topology.drafters=2", "log.every=4", f"sync.mode={mode}")
    with Job(arguments(tiny_preset, tmp_path / "run", *overrides), 4, functools.partial(poison, 13, 13, 1)) as job:
        assert job.wait() == [0] * 4, job.output
        assert "drafter 1 skipped 1 steps, the last was 7: features of packet 13 (tap 2) from target 1 not finite" in job.output
        innocent = "drafter 0 skipped 1 steps, the last was 7: loss or gradients of some drafter's packet not finite"
        assert (innocent in job.output) == ("drafter 0 skipped" in job.output) == (mode == "ddp"), "in ddp all skip together"
    (record,) = [line for line in records(tmp_path / "run") if line["step"] == 8]
    assert record["skipped"] == (1 / 4 if mode == "ddp" else 1 / 8) and record["loss"] > 0 and record["grad_norm"] > 0
    tensors = RunDirectory(tmp_path / "run").newest_valid().tensors("drafter.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_too_many_skipped_steps_end_the_job(tiny_preset, tmp_path):
    """Else a diverged run burns its whole allocation doing nothing."""
    overrides = ("optim.max_skipped=3", "log.every=2")
    with Job(arguments(tiny_preset, tmp_path / "run", *overrides), 1, functools.partial(poison, 4, 99, 0)) as job:
        assert job.wait() == [2]
        assert "4 in a row (optim.max_skipped=3)" in job.output and "packet 7 (tap 1)" in job.output and "Traceback" not in job.output
