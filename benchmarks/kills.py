"""Ten deaths at random times over all roles: the job must end by itself with the weights of the undisturbed run.

    python benchmarks/kills.py [--kills 10] [--steps 3000] [--seed 0]

The tests' tiny target on CPU under `torchrun --max-restarts`: 3 targets, 2 drafters, averaging every 7 steps, a checkpoint every 70.
Each kill -9 hits a random rank: every other one up to 20 s after the last, often while the job is starting again; the others up to
5 s after training has gone on, in a step, an averaging or a checkpoint alike.
Prints one JSON line; exits 1 unless the weights are bitwise equal and no death cost more than `checkpoint.every` steps.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from ranks import descendants, start_torchrun, stop_job

from benchmarks import tiny
from common import cli

RANKS, CHECKPOINT = 5, 70


def start(preset, folder, name, steps):
    overrides = ["topology.drafters=2", "sync.every=7", f"checkpoint.every={CHECKPOINT}", f"optim.steps={steps}", "log.every=1"]
    with open(folder / f"{name}.txt", "w") as output:
        return start_torchrun(
            "train_drafter.py",
            *("--config", preset, f"log.dir={folder / name}", "topology.timeout_s=60", *overrides),
            ranks=RANKS,
            options=["--max-restarts", "12"],
            output=output,
        )


def workers(job):
    """Process ids of the ranks that are alive, by rank."""
    found = {}
    for pid in descendants(job.pid):
        try:
            variables = dict(v.split(b"=", 1) for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue
        if b"RANK" in variables:
            found[int(variables[b"RANK"])] = pid
    return found


def kill_at_random(job, log, draw, kills):
    """Kill that many ranks of a job that logs to `log`; returns the ranks."""
    victims = []
    while len(victims) < kills and job.poll() is None:
        if len(victims) % 2:
            time.sleep(draw.uniform(0, 20))
        else:
            begin = len(steps_of(log))
            while len(steps_of(log)) == begin and job.poll() is None:
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 5))
        alive, rank = workers(job), draw.randrange(RANKS)
        if rank in alive:
            os.kill(alive[rank], signal.SIGKILL)
            victims.append(rank)
            print(f"killed rank {rank}", file=sys.stderr, flush=True)
    return victims


def steps_of(log):
    """The steps of a job's progress lines."""
    return [int(step) for step in re.findall(r"\] step (\d+)/", log.read_text(errors="replace"))]


def repeated_steps(steps):
    """For each time that the steps go back: how many of them were run again."""
    return [before - after + 1 for before, after in itertools.pairwise(steps) if after <= before]


def files(run, steps):
    return {path.name: path.read_bytes() for path in (run / f"checkpoints/step_{steps:08d}").glob("*.safetensors")}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        preset, steps = tiny.make_preset(folder), arguments.steps
        if start(preset, folder, "undisturbed", steps).wait() != 0:
            print((folder / "undisturbed.txt").read_text()[-4000:], file=sys.stderr)
            return 1
        job = start(preset, folder, "killed", steps)
        begin = time.monotonic()
        try:
            victims = kill_at_random(job, folder / "killed.txt", random.Random(arguments.seed), arguments.kills)
            code = job.wait()
        finally:
            stop_job(job)
        text = (folder / "killed.txt").read_text()
        result = {
            "exit_code": code,
            "killed_ranks": victims,
            "attempts": text.count("target 0: rank"),
            "repeated_steps": repeated_steps(steps_of(folder / "killed.txt")),
            "seconds": round(time.monotonic() - begin),
            "equal_weights": files(folder / "undisturbed", steps) == files(folder / "killed", steps) != {},
        }
        print(json.dumps(result))
        if code:
            print(text[-4000:], file=sys.stderr)
        passed = len(victims) == arguments.kills and result["equal_weights"] and max(result["repeated_steps"], default=0) <= CHECKPOINT
        return 0 if passed else 1


if __name__ == "__main__":
    cli.run_script(main)
