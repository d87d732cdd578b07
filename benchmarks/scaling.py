"""Targets and drafters together: what a second drafter brings, and what links and averaging cost.

    torchrun --nproc_per_node 2 -m benchmarks.scaling [--drafters D] [--stages S] [--sync average|ddp] [--steps 60] [--tiny]

The Qwen3-8B shape with random weights, packets of 12,288 tokens; one JSON line from the first drafter. Rates are of the
timed steps after a warm-up of ten. Under `python` instead of torchrun one device does both.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import eight_billion, measure
from common import config_reader
from common.cli import run_script
from common.config import Config
from common.distributed import jobs
from common.distributed.context import WorkerContext
from common.distributed.stop import StopRequest
from common.training.plan import make_plan
from serve_targets import Server
from train_drafter import Trainer

WARMUP_STEPS = 10


class Setting(NamedTuple):
    """What is timed."""

    tiny: bool
    steps: int
    drafters: int
    sync: str = "average"
    link: str = "auto"
    row_tokens: int = 12288
    stages: int = 1


class NeverStop(StopRequest):
    """Nobody asks a benchmark to stop: signals do what they always do."""

    def __init__(self) -> None:
        self.requested = False


class TimedTrainer(Trainer):
    """A trainer that times its steps instead of validating and saving."""

    def run(self) -> None:
        if self.context.index == 0:
            self.context.status.put("start", {"step": 0})
        self.handshake_us = round_trip_us(self.context, first=False)
        self.run_files.reset_rates()
        self.averaging_s, begin_s = 0.0, time.perf_counter()
        for step, entries in groupby(self.context.packets(), key=lambda entry: entry[0].step):
            if step == WARMUP_STEPS + 1:
                begin_s = self.begin_timing()
            self.train_step(step, list(entries))
            if self.averaging.due(step) and self.context.comm.size > 1:
                start_s = self.now()
                self.averaging.weights(step)
                self.averaging_s += self.now() - start_s
        self.report(self.now() - begin_s)

    def now(self) -> float:
        """The time when the device has done all its work."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return time.perf_counter()

    def begin_timing(self) -> float:
        """The warm-up is over: all drafters start at once, with every clock and counter at zero."""
        self.now()
        self.context.comm.barrier()
        self.run_files.reset_rates()
        self.context.link.wait.take_seconds()
        self.averaging_s = 0.0
        return time.perf_counter()

    def report(self, seconds: float) -> None:
        """Print what all drafters have done in the timed steps."""
        comm, steps = self.context.comm, self.plan.schedule.steps - WARMUP_STEPS
        self.meters.drain(comm)
        self.meters.add(self.run_files.rates(self.context.link.wait.take_seconds()))
        self.meters.add({"averaging_share": (self.averaging_s, seconds)})
        values = self.meters.drain(comm)
        if self.context.index == 0:
            measure.report(
                self.context.device,
                benchmark="scaling",
                targets=len(self.context.layout.targets),
                stages=self.context.layout.stages,
                drafters=comm.size,
                sync=self.plan.config.sync.mode,
                ktok_per_s=values["tokens_per_s"] / 1e3,
                ms_per_step=1e3 * seconds / steps,
                link_gb_per_s=self.plan.shape.buffer_bytes * steps / seconds / 1e9,
                handshake_us=self.handshake_us,
                averaging_ms=1e3 * self.averaging_s,
                peak_gib=peak_gib(self.context.device),
                **{name: values[name] for name in ("wait_share", "target_busy", "target_blocked", "averaging_share")},
            )


class TimedServer(Server):
    """A target that takes part in the handshakes and prints its memory."""

    def run(self) -> None:
        if self.context.stage == self.context.layout.stages - 1:
            round_trip_us(self.context, first=True)
        super().run()
        print(f"{self.context.name}: peak {peak_gib(self.context.device):.1f} GiB", file=sys.stderr, flush=True)


def round_trip_us(context: WorkerContext, first: bool, trips: int = 200) -> float | None:
    """Time of a message of one number and its answer between the first target and the first drafter, on the link's own pair.

    None elsewhere. `first` is the target's side, which sends first.
    """
    pair = getattr(context.link, "pairs", {}).get(0)
    if context.index != 0 or pair is None:
        return None
    number = torch.zeros(1, dtype=torch.int64)
    start_s = time.perf_counter()
    for _ in range(trips):
        for sending in (first, not first):
            (pair.send if sending else pair.receive)(number).wait()
    return 1e6 * (time.perf_counter() - start_s) / trips


def peak_gib(device: torch.device) -> float:
    """Most memory allocated since the process started; 0 on CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def make_config(setting: Setting, shape: eight_billion.Shape, folder: Path) -> Config:
    """The config of a run in `folder`, where a target without weights and a store of random documents are written."""
    tiny, T = setting.tiny, 128 if setting.tiny else setting.row_tokens
    eight_billion.write_config(folder / "target", shape)
    eight_billion.write_store(folder / "store", shape["vocab_size"], 2 * setting.drafters, T, 4)
    return config_reader.from_dict(
        {
            "target": {"path": str(folder / "target"), "dtype": "float32" if tiny else "bfloat16", "stages": setting.stages},
            "drafter": ({"dtype": "float32", "layers": 2, "block_size": 8} if tiny else {"layers": 5, "block_size": 16})
            | {"mask_token": shape["vocab_size"] - 1},
            "data": {"path": str(folder / "store"), "pack_tokens": T},
            "optim": {"steps": WARMUP_STEPS + setting.steps},
            "sync": {"mode": setting.sync, "every": 5 if tiny else 50},
            "topology": {"drafters": setting.drafters, "timeout_s": 300},
            "link": {"backend": setting.link},
            "checkpoint": {"every": 1000},
            "log": {"dir": str(folder / "run")},
        }
    )


def run_job(setting: Setting, trainer: type[TimedTrainer]) -> None:
    """Every step of that setting, on whatever ranks were started."""
    shape = eight_billion.TINY if setting.tiny else eight_billion.QWEN3_8B
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(setting, shape, Path(folder))
        with jobs.join(config) as job:
            plan = make_plan(config, job)
            job.connect(plan.stage_shapes, plan.schedule)

            def make_server(context: WorkerContext) -> TimedServer:
                layers = plan.stages[context.stage].layers
                return TimedServer(plan, context, eight_billion.random_target(shape, context.device, plan.shape.dtype, layers))

            def make_trainer(context: WorkerContext) -> TimedTrainer:
                dtype = getattr(torch, config.drafter.dtype)
                return trainer(plan, context, NeverStop(), eight_billion.random_vocabulary(plan.target, context.device, dtype))

            job.run(make_server, make_trainer)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--sync", default="average", choices=("average", "ddp"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--row-tokens", type=int, default=12288)
    parser.add_argument("--link", default="auto", choices=("auto", "nccl", "staged"))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(argv)
    drafters = asked.drafters if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 1
    run_job(Setting(asked.tiny, asked.steps, drafters, asked.sync, asked.link, asked.row_tokens, asked.stages), TimedTrainer)


if __name__ == "__main__":
    run_script(main)
