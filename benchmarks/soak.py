"""Twenty thousand steps with targets that dawdle: nothing may hang, leak, or come out of order.

    python -m benchmarks.soak [--steps 20000] [--folder DIR]

A tiny target on CPU under torchrun: 3 targets, 2 drafters, averaging every 7 steps, a checkpoint every 70, captures that
sleep up to 20 ms at random. Every drafter compares each packet's number with the one it computes for itself; every rank notes its
memory. Prints one JSON line; exits 1 if anything is not as it should be.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serve_targets
import train_drafter
from benchmarks import tiny
from common.cli import run_script
from common.data.schedule import TRAIN, Assignment

TARGETS, DRAFTERS, SYNC, CHECKPOINT = 3, 2, 7, 70
SAMPLE_S = 0.5
GROWTH_MIB = 8.0  # more than an allocator's noise between the early part of a run and its end


class DawdlingServer(serve_targets.Server):
    """A target that is slow one time in five."""

    def warm(self) -> None:
        super().warm()
        self._draw, self._memory = random.Random(self.context.index), MemoryNotes(f"target{self.context.index}")

    def capture(self, assignment: Assignment, buffer: Any) -> None:
        if self._draw.random() < 0.2:
            time.sleep(self._draw.uniform(0, 0.02))
        self._memory.take(assignment.step)
        super().capture(assignment, buffer)


class CountingTrainer(train_drafter.Trainer):
    """A drafter that knows which packet is due without asking the schedule: each drafter gets every DRAFTERS-th."""

    def warm(self) -> None:
        super().warm()
        self._taken, self._memory = 0, MemoryNotes(f"drafter{self.context.index}")

    def take(self, assignment: Assignment, target: int, phase: str = "step") -> Any:
        packet = super().take(assignment, target, phase)
        if assignment.kind == TRAIN:
            due = self._taken * DRAFTERS + self.context.index
            assert packet.message.get("number") == due, f"packet {packet.message.get('number')} came, {due} was due"
            self._taken += 1
        self._memory.take(assignment.step)
        return packet


class MemoryNotes:
    """Resident memory of this process by step, two lines a second."""

    def __init__(self, name: str):
        self._file, self._next = open(f"{os.environ['SOAK_NOTES']}/{name}.txt", "a", buffering=1), 0.0  # noqa: SIM115

    def take(self, step: int) -> None:
        """Write a line if the last one is old enough."""
        if time.monotonic() > self._next:
            self._next = time.monotonic() + SAMPLE_S
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._file.write(f"{step} {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.2f}\n")


def growth_mib(notes: Path, steps: int) -> float:
    """How much a process grew between the run's second and third tenth and its last: difference of the medians."""
    samples = [tuple(map(float, line.split())) for line in notes.read_text().splitlines()]
    early = sorted(mib for step, mib in samples if 0.1 * steps < step <= 0.3 * steps)
    late = sorted(mib for step, mib in samples if step > 0.9 * steps)
    return late[len(late) // 2] - early[len(early) // 2]


def soak(folder: Path, steps: int) -> int:
    """Run the job in `folder` and print its result; returns the exit code."""
    preset, run, notes = tiny.make_preset(folder), folder / "run", folder / "notes"
    notes.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(TARGETS + DRAFTERS),
        "-m",
        "benchmarks.soak",
        "--rank",
    ]
    overrides = [f"topology.drafters={DRAFTERS}", f"sync.every={SYNC}", f"checkpoint.every={CHECKPOINT}", f"optim.steps={steps}"]
    start = time.monotonic()
    with open(folder / "output", "w") as output:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SOAK_NOTES": str(notes)}
        job = subprocess.run(
            [*command, "--config", preset, f"log.dir={run}", "topology.timeout_s=120", *overrides],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    seconds = time.monotonic() - start
    if job.returncode:
        print((folder / "output").read_text()[-4000:], file=sys.stderr)
        return 1
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = {
        "exit_code": job.returncode,
        "steps": logged[-1],
        "seconds": round(seconds),
        "packets_in_order": DRAFTERS * logged[-1],
        "log_complete": logged == list(range(10, steps + 1, 10)),
        "growth_mib": {file.stem: round(growth_mib(file, steps), 2) for file in sorted(notes.iterdir())},
    }
    print(json.dumps(result))
    passed = result["log_complete"] and max(result["growth_mib"].values()) < GROWTH_MIB
    return 0 if passed else 1


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--rank"]:
        vars(train_drafter).update(Server=DawdlingServer, Trainer=CountingTrainer)
        return train_drafter.main(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=None, help="where everything is written; default: a temporary folder")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        return soak(arguments.folder or Path(temporary), arguments.steps)


if __name__ == "__main__":
    run_script(main)
