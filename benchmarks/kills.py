"""Ten deaths at random times over all roles: the job must end by itself with the weights of the undisturbed run.

    python -m benchmarks.kills [--kills 10] [--steps 3000] [--seed 0]

A tiny target on CPU under `torchrun --max-restarts`: 3 targets, 2 drafters, averaging every 7 steps, a checkpoint every 70.
Each kill -9 hits a random rank: every other one up to 20 s after the last, often while the job is starting again; the others up to
5 s after training has gone on, in a step, an averaging or a checkpoint alike.
Prints one JSON line; exits 1 unless the weights are bitwise equal and no death cost more than `checkpoint.every` steps.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tiny
from common.cli import run_script

RANKS, CHECKPOINT = 5, 70
MARK = "KILLS_RUN"
"""Environment variable by which a job's processes are found: torchrun gives each worker a session of its own."""


def start(preset: Path, run: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the job that writes `run`; what it prints goes to `run`.txt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "--max-restarts", "12"]
    overrides = ["topology.drafters=2", "sync.every=7", f"checkpoint.every={CHECKPOINT}", f"optim.steps={steps}", "log.every=1"]
    arguments = ["--config", str(preset), f"log.dir={run}", "topology.timeout_s=60", *overrides]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", MARK: str(run)}
    with open(f"{run}.txt", "w") as output:
        return subprocess.Popen([*command, "train_drafter.py", *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment)


def processes(run: Path) -> list[tuple[int, int | None]]:
    """(process id, rank if it is one) of everything alive that belongs to a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            variables = dict(v.split("=", 1) for v in path.read_bytes().decode(errors="replace").split("\0") if "=" in v)
            if variables.get(MARK) == str(run):
                found.append((int(path.parent.name), int(variables["RANK"]) if "RANK" in variables else None))
    return found


def kill_at_random(job: subprocess.Popen[bytes], run: Path, draw: random.Random, kills: int) -> list[int]:
    """Kill that many ranks of a job; returns the ranks."""
    victims: list[int] = []
    while len(victims) < kills and job.poll() is None:
        if len(victims) % 2:
            time.sleep(draw.uniform(0, 20))
        else:
            begin = len(steps_of(run))
            while len(steps_of(run)) == begin and job.poll() is None:
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 5))
        alive, rank = {rank: pid for pid, rank in processes(run)}, draw.randrange(RANKS)
        if rank in alive:
            os.kill(alive[rank], signal.SIGKILL)
            victims.append(rank)
            print(f"killed rank {rank}", file=sys.stderr, flush=True)
    return victims


def steps_of(run: Path) -> list[int]:
    """The steps of a job's progress lines."""
    return [int(step) for step in re.findall(r"\] step (\d+)/", output_of(run))]


def output_of(run: Path) -> str:
    """What a job has printed."""
    return Path(f"{run}.txt").read_text(errors="replace")


def repeated_steps(steps: Sequence[int]) -> list[int]:
    """For each time that the steps go back: how many of them were run again."""
    return [before - after + 1 for before, after in itertools.pairwise(steps) if after <= before]


def files(run: Path, steps: int) -> dict[str, bytes]:
    """Weights and optimiser states of a run's last checkpoint."""
    return {path.name: path.read_bytes() for path in (run / f"checkpoints/step_{steps:08d}").glob("*.safetensors")}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, steps = Path(temporary), arguments.steps
        preset, undisturbed, killed = tiny.make_preset(folder), folder / "undisturbed", folder / "killed"
        if start(preset, undisturbed, steps).wait() != 0:
            print(output_of(undisturbed)[-4000:], file=sys.stderr)
            return 1
        job, begin_s = start(preset, killed, steps), time.monotonic()
        try:
            victims = kill_at_random(job, killed, random.Random(arguments.seed), arguments.kills)
            code = job.wait()
        finally:
            for pid, _ in processes(killed):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        repeated, equal = repeated_steps(steps_of(killed)), files(undisturbed, steps) == files(killed, steps) != {}
        result = {
            "exit_code": code,
            "killed_ranks": victims,
            "attempts": output_of(killed).count("target 0: rank"),
            "repeated_steps": repeated,
            "seconds": round(time.monotonic() - begin_s),
            "equal_weights": equal,
        }
        print(json.dumps(result))
        if code:
            print(output_of(killed)[-4000:], file=sys.stderr)
        return 0 if len(victims) == arguments.kills and equal and max(repeated, default=0) <= CHECKPOINT else 1


if __name__ == "__main__":
    run_script(main)
