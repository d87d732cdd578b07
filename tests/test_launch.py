"""launch/split.sh for real: two torchrun agents on one host, one of targets and one of drafters, meet and train."""

import socket

from ranks import REPOSITORY, start, stop_job
from test_resume import arguments, assert_equal_runs, finish


def test_targets_and_drafters_as_two_agents_learn_what_one_agent_learns(tiny_preset, tmp_path):
    """Ranks of both agents count from 0 and join in any order: roles, devices and the deal must not depend on it."""
    finish(tiny_preset, tmp_path / "one", ranks=3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    common = [*map(str, arguments(tiny_preset, tmp_path / "two")), "topology.timeout_s=60"]
    logs = {role: tmp_path / f"{role}.log" for role in ("drafters", "targets")}
    jobs = []
    try:
        for role, ranks in (("drafters", "1"), ("targets", "2")):
            with open(logs[role], "w") as log:
                jobs.append(start([str(REPOSITORY / "launch/split.sh"), role, ranks, *common], log, ENDPOINT=endpoint, **on_path()))
        for job in jobs:
            assert job.wait(timeout=150) == 0, "\n".join(log.read_text()[-3000:] for log in logs.values())
    finally:
        for job in jobs:
            stop_job(job)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


def on_path():
    """This Python's torchrun first."""
    import os
    import sys

    return {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
