"""A target in one stage and in several, as threads on one device: what the hand-over of the residual stream costs, and what a stage holds.

    python -m benchmarks.stages [--tiny]

Half of the Qwen3-8B shape's layers with random weights, written to disk once and read by every stage, as in a run; packets of 12,288
tokens go to a worker that only looks at them. One JSON line a number of stages: the time of a packet, what share of it the hand-over
took, whether the features are those of one stage bit by bit, and the most memory that loading took against what is held afterwards.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import eight_billion, measure
from benchmarks.scaling import Setting, make_config
from common.cli import run_script
from common.distributed import jobs
from common.distributed.context import WorkerContext
from common.training.plan import RunPlan, make_plan
from serve_targets import Server

WARMUP_PACKETS = 4


class Sink:
    """In a drafter's place: takes every packet, keeps a sum of its bits, and times those behind the warm-up."""

    def __init__(self, context: WorkerContext):
        self.context, self.sums, self.ms_per_packet = context, list[torch.Tensor](), 0.0

    def warm(self) -> None:
        """Nothing to compile."""

    def run(self) -> None:
        self.context.status.put("start", {"step": 0})
        begin_s = 0.0
        for number, (assignment, target) in enumerate(self.context.packets()):
            if number == WARMUP_PACKETS:
                begin_s = self.now()
            packet = self.context.link.take(assignment, target)
            bits = packet.features.view(torch.int16 if packet.features.element_size() == 2 else torch.int32).flatten()
            self.sums.append((bits[::7].long() * torch.arange(len(bits[::7]), device=bits.device)).sum())
            self.context.link.release(packet)
        self.ms_per_packet = 1e3 * (self.now() - begin_s) / (len(self.sums) - WARMUP_PACKETS)

    def now(self) -> float:
        """The time when the device has done all its work."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return time.perf_counter()


class LoadedServer(Server):
    """A stage that measures what it took to load it."""

    def __init__(self, plan: RunPlan, context: WorkerContext):
        gc.collect()
        before = memory(context.device, reset=True)[0]
        super().__init__(plan, context)
        gc.collect()
        held, peak = memory(context.device)
        self.loading = {"held_gib": (held - before) / 2**30, "peak_over_held": (peak - before) / max(1, held - before)}


def memory(device: torch.device, reset: bool = False) -> tuple[int, int]:
    """Bytes allocated now, and at most since the last reset; zeros on the CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def run_chain(folder: Path, setting: Setting, shape: eight_billion.Shape, device: torch.device) -> tuple[Sink, list[dict[str, Any]]]:
    """All packets of a setting through a chain of threads on one device."""
    config = make_config(setting, shape, folder)
    config.topology.mode, config.topology.drafter_devices = "threads", [str(device)]
    config.topology.target_devices = [str(device)] * setting.stages
    servers, sinks = list[LoadedServer](), list[Sink]()
    with jobs.join(config) as job:
        plan = make_plan(config, job)
        job.connect(plan.stage_shapes, plan.schedule)

        def make_server(context: WorkerContext) -> LoadedServer:
            servers.append(LoadedServer(plan, context))
            return servers[-1]

        def make_sink(context: WorkerContext) -> Sink:
            sinks.append(Sink(context))
            return sinks[-1]

        job.run(make_server, make_sink)
    return sinks[0], [server.loading for server in servers]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(argv)
    device = measure.device_of(asked.tiny)
    device = torch.device("cuda:0") if device.type == "cuda" else device
    whole: eight_billion.Shape = eight_billion.TINY if asked.tiny else eight_billion.QWEN3_8B
    shape = whole | {"num_hidden_layers": 6 if asked.tiny else whole["num_hidden_layers"] // 2}
    dtype = torch.float32 if asked.tiny else torch.bfloat16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        eight_billion.random_target(shape, device, dtype).save_pretrained(folder / "target")
        one: Sink | None = None
        for stages in (1, 2, 3):
            sink, loading = run_chain(folder, Setting(asked.tiny, 2 if asked.tiny else 20, 1, stages=stages), shape, device)
            one = one or sink
            measure.report(
                device,
                benchmark="stages",
                stages=stages,
                ms_per_packet=sink.ms_per_packet,
                handover_share=sink.ms_per_packet / one.ms_per_packet - 1,
                bit_equal=[int(x) for x in sink.sums] == [int(x) for x in one.sums],
                loading=loading,
            )


if __name__ == "__main__":
    run_script(main)
