"""launch/split.sh for real: two torchrun agents on one host, one of targets and one of drafters, meet and train."""

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, descendants, start, stop_job
from test_failures import wait_for
from test_resume import arguments, assert_equal_runs, finish

STEPS = ("optim.steps=40", "checkpoint.every=8", "sync.every=8")


@pytest.fixture(scope="module")
def one_agent(tiny_preset, tmp_path_factory):
    """The run of two targets and a drafter under one agent."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(tiny_preset, folder, *STEPS, ranks=3)
    return folder


@contextlib.contextmanager
def split(preset, folder, logs):
    """The two agents, drafters first; yields their processes by role."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"ENDPOINT": endpoint, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    common = [*map(str, arguments(preset, folder, *STEPS)), "topology.timeout_s=60"]
    jobs = {}
    try:
        for role, ranks in (("drafters", "1"), ("targets", "2")):
            with open(logs / role, "w") as log:
                jobs[role] = start([str(REPOSITORY / "launch/split.sh"), role, ranks, *common], log, **variables)
        yield jobs
    finally:
        for job in jobs.values():
            stop_job(job)


def assert_both_end_well(jobs, logs):
    for job in jobs.values():
        assert job.wait(timeout=150) == 0, "\n".join(log.read_text()[-3000:] for log in logs.iterdir())


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def test_targets_and_drafters_as_two_agents_learn_what_one_agent_learns(tiny_preset, one_agent, tmp_path, logs):
    """Ranks of both agents count from 0 and join in any order: roles, devices and the schedule must not depend on it."""
    with split(tiny_preset, tmp_path / "run", logs) as jobs:
        assert_both_end_well(jobs, logs)
    assert_equal_runs(one_agent, tmp_path / "run")


def test_a_death_under_one_agent_restarts_both(tiny_preset, one_agent, tmp_path, logs):
    """The agents count restarts differently; all ranks must still meet in the same attempt, and not with ghosts of the last one."""
    with split(tiny_preset, tmp_path / "run", logs) as jobs:
        wait_for(jobs["drafters"], (tmp_path / "run/checkpoints/step_00000008").exists, logs / "drafters")
        os.kill(max(descendants(jobs["targets"].pid)), signal.SIGKILL)
        assert_both_end_well(jobs, logs)
    assert "resuming from" in (logs / "drafters").read_text()
    assert_equal_runs(one_agent, tmp_path / "run")
