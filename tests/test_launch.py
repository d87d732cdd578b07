"""launch/split.sh: two torchrun agents on one host, one of targets and one of drafters, meet and train."""

import contextlib
import os
import re
import signal
import socket
import sys
from pathlib import Path

from ranks import REPOSITORY, descendants, start, stop_job, torchrun
from test_failures import wait_for
from test_resume import arguments, assert_equal_runs, finish

STEPS = ("optim.steps=40", "checkpoint.every=8", "sync.every=8")


def started(command, log, variables):
    """The agent that the shell starts; its ranks import for seconds, at every restart anew."""
    with open(log, "w") as output:
        return start(command, output, **variables)


def forked(command, log, variables):
    """An agent with the arguments that the shell would start it with; it and its ranks have imported everything."""
    arguments, _ = start(command, **variables, TORCHRUN="echo").communicate(timeout=60)
    return torchrun(*arguments.split(), output=log)


@contextlib.contextmanager
def split(start_agent, preset, folder, logs, *overrides):
    """The two agents, drafters first; yields their processes by role."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"ENDPOINT": endpoint, "MAX_RESTARTS": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    common = [*map(str, arguments(preset, folder, *STEPS, *overrides)), "topology.timeout_s=60"]
    jobs = {}
    try:
        for role, ranks in (("drafters", "1"), ("targets", "2")):
            jobs[role] = start_agent([str(REPOSITORY / "launch/split.sh"), role, ranks, *common], logs / role, variables)
        yield jobs
    finally:
        for job in jobs.values():
            stop_job(job)


def test_two_agents_learn_what_one_agent_learns_also_through_a_death(tiny_preset, tmp_path):
    """Ranks of both agents count from 0 and join in any order: roles, devices and the schedule must not depend on it.

    After a death under one agent both start again, and count that differently; all ranks must still meet in the same attempt, and not
    with what is left of the last one.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    with split(forked, tiny_preset, tmp_path / "run", logs) as jobs:
        wait_for(jobs["drafters"], (tmp_path / "run/checkpoints/step_00000008").exists, logs / "drafters")
        os.kill(max(descendants(jobs["targets"].pid)), signal.SIGKILL)
        for job in jobs.values():
            assert job.wait(timeout=150) == 0, "\n".join(log.read_text()[-3000:] for log in logs.iterdir())
    assert "resuming from" in (logs / "drafters").read_text()
    finish(tiny_preset, tmp_path / "one", *STEPS, ranks=3)
    assert_equal_runs(tmp_path / "one", tmp_path / "run")


def test_an_interrupt_of_the_targets_agent_stops_both_with_a_checkpoint(tiny_preset, tmp_path):
    """Else Ctrl-C there kills the targets, everything since the last checkpoint is lost, and the drafters' agent waits for nobody."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with split(started, tiny_preset, tmp_path / "run", logs, "optim.steps=100000", "checkpoint.every=48") as jobs:
        wait_for(jobs["drafters"], (tmp_path / "run/checkpoints/step_00000048").exists, logs / "drafters")
        jobs["targets"].send_signal(signal.SIGINT)
        wait_for(jobs["drafters"], lambda: "stopped after step" in (logs / "drafters").read_text(), logs / "drafters")
        jobs["targets"].wait(timeout=60)
    step = int(re.search(r"stopped after step (\d+)", (logs / "drafters").read_text())[1])
    assert (tmp_path / f"run/checkpoints/step_{step:08d}").is_dir()
