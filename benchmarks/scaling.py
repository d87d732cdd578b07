"""Targets and drafters together: what a second drafter brings, and what links and averaging cost.

    torchrun --nproc_per_node 2 benchmarks/scaling.py [--drafters D] [--sync average|ddp] [--steps 60] [--tiny]

The Qwen3-8B shape with random weights, packets of 12,288 tokens; one JSON line from the first drafter. Rates are of the
timed steps after a warm-up of ten. Under `python` instead of torchrun one device does both.
"""

import argparse
import os
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import eight_billion, measure
from common import config_reader
from common.cli import run_script
from common.data.packing import pack_rows
from common.data.rows import RowLoader
from common.data.schedule import Schedule
from common.data.store import TokenStore
from common.distributed import jobs
from common.distributed.packet import PacketShape
from common.drafter.spec import DrafterSpec
from common.objective.blocks import default_anchors
from common.target.files import read_spec
from common.training.plan import Plan
from serve_targets import Server
from train_drafter import Trainer

WARMUP_STEPS = 10


class Stopless:
    requested = False


class TimedTrainer(Trainer):
    """A trainer that times its steps instead of validating and saving."""

    def run(self):
        if self.context.index == 0:
            self.context.status.put("start", {"step": 0})
        self.handshake_us = round_trip_us(self.context.link, self.context.index, first=False)
        self.run_files.reset_rates()
        device, begin = self.context.device, None
        self.averaging_s = 0.0
        for step, entries in groupby(self.context.packets(), key=lambda entry: entry[0].step):
            if step == WARMUP_STEPS + 1:
                _synchronize(device)
                self.context.comm.barrier()
                self.run_files.reset_rates()
                self.context.link.wait.take_seconds()
                self.averaging_s, begin = 0.0, time.perf_counter()
            self.train_step(step, list(entries))
            if self.averaging.due(step) and self.context.comm.size > 1:
                _synchronize(device)
                start = time.perf_counter()
                self.averaging.weights(step)
                _synchronize(device)
                self.averaging_s += time.perf_counter() - start
        _synchronize(device)
        self.report(time.perf_counter() - begin)

    def report(self, seconds):
        comm, steps = self.context.comm, self.plan.schedule.steps - WARMUP_STEPS
        self.meters.drain(comm)
        self.meters.add(self.run_files.rates(self.context.link.wait.take_seconds()))
        self.meters.add({"averaging_share": (self.averaging_s, seconds)})
        values = self.meters.drain(comm)
        if self.context.index == 0:
            packet_bytes = self.plan.shape.buffer_bytes
            measure.report(
                self.context.device,
                benchmark="scaling",
                targets=len(self.context.layout.targets),
                drafters=comm.size,
                sync=self.plan.config.sync.mode,
                ktok_per_s=values["tokens_per_s"] / 1e3,
                ms_per_step=1e3 * seconds / steps,
                link_gb_per_s=packet_bytes * steps / seconds / 1e9,
                handshake_us=self.handshake_us,
                averaging_ms=1e3 * self.averaging_s,
                peak_gib=_peak(self.context.device),
                **{name: values[name] for name in ("wait_share", "target_busy", "target_blocked", "averaging_share")},
            )


def round_trip_us(link, index, first, trips=200):
    """Time of a message of one number and its answer between the first target and the first drafter, on the link's own group."""
    if index != 0 or 0 not in getattr(link, "groups", {}):
        return None
    number, group = torch.zeros(1, dtype=torch.int64), link.groups[0]
    start = time.perf_counter()
    for _ in range(trips):
        for sending in (first, not first):
            if sending:
                dist.send(number, group=group, group_dst=int(first))
            else:
                dist.recv(number, group=group, group_src=int(first))
    return 1e6 * (time.perf_counter() - start) / trips


class TimedServer(Server):
    def run(self):
        round_trip_us(self.context.link, self.context.index, first=True)
        super().run()
        print(f"target {self.context.index}: peak {_peak(self.context.device):.1f} GiB", file=sys.stderr, flush=True)


def make_plan(asked, drafters, folder):
    shape = eight_billion.TINY if asked.tiny else eight_billion.QWEN3_8B
    T, steps = (128, WARMUP_STEPS + 5) if asked.tiny else (asked.row_tokens, WARMUP_STEPS + asked.steps)
    config = config_reader.from_dict(
        {
            "target": {"path": str(folder / "target"), "dtype": "float32" if asked.tiny else "bfloat16"},
            "drafter": ({"dtype": "float32", "layers": 2, "block_size": 8} if asked.tiny else {"layers": 5, "block_size": 16})
            | {"mask_token": shape["vocab_size"] - 1},
            "data": {"path": str(folder / "store"), "pack_tokens": T},
            "optim": {"steps": steps},
            "sync": {"mode": asked.sync, "every": 5 if asked.tiny else 50},
            "topology": {"drafters": drafters, "timeout_s": 300},
            "link": {"backend": asked.link},
            "checkpoint": {"every": 1000},
        }
    )
    config.log.dir = str(folder / "run")
    eight_billion.write_target(folder / "target", shape)
    eight_billion.write_store(folder / "store", shape["vocab_size"], 2 * drafters, T, 4)
    spec = read_spec(folder / "target")
    drafter = DrafterSpec.resolve(config.drafter, spec, folder / "target")
    store = TokenStore.open(folder / "store")
    rows = RowLoader(store, lambda epoch: pack_rows(store.lengths, T, None, "truncate", 0, epoch))
    schedule = Schedule(rows.count, drafters, 1, steps=steps)
    packet = PacketShape(T, len(drafter.taps) * spec.hidden_size, getattr(torch, config.target.dtype))
    return shape, Plan(config, folder, spec, drafter, rows, None, schedule, packet, default_anchors(T, drafter.block_size))


def _peak(device):
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--sync", default="average", choices=("average", "ddp"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--row-tokens", type=int, default=12288)
    parser.add_argument("--link", default="auto", choices=("auto", "nccl", "staged"))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        drafters = asked.drafters if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 1
        shape, plan = make_plan(asked, drafters, Path(folder))
        with jobs.join(plan.config) as job:
            job.connect(plan.shape, plan.schedule)

            def make_server(context):
                model = eight_billion.random_target(shape, context.device, plan.shape.dtype)
                return TimedServer(plan, context, model)

            def make_trainer(context):
                dtype = getattr(torch, plan.config.drafter.dtype)
                return TimedTrainer(plan, context, Stopless, eight_billion.random_vocabulary(plan.target, context.device, dtype))

            job.run(make_server, make_trainer)


if __name__ == "__main__":
    run_script(main)
