"""The target's loop: read the rows that are this target's, capture their features, offer them to the drafters that are due.

    torchrun ... serve_targets.py --config FILE [section.key=value ...]

Under train_drafter.py target ranks start here by themselves; run this script on nodes that only serve targets (launch/split.sh).
"""

import time
from collections.abc import Sequence

import torch

from common import cli, config_reader
from common.data.rows import Row
from common.data.schedule import Assignment
from common.distributed import jobs
from common.distributed.context import WorkerContext
from common.distributed.layout import TARGET
from common.distributed.packet import PacketBuffer
from common.distributed.refusal import one_voice
from common.distributed.stop import StopRequest
from common.families.registry import family_options
from common.metrics import DeviceClock
from common.target.execution import common_way
from common.target.model import PreTrainedModel, Target, load_model
from common.target.vocabulary import check_files
from common.training.opening import open_run
from common.training.plan import RunPlan, make_plan


class Server:
    """One target, or one stage of it. Captures the next packet before it offers the last, so that the device never waits for an answer."""

    def __init__(self, plan: RunPlan, context: WorkerContext, model: PreTrainedModel | None = None):
        self.plan, self.context, self.stage = plan, context, plan.stages[context.stage]
        chosen, stage = plan.config.target, self.stage
        if model is None:
            if context.stage == 0:
                check_files(plan.target, plan.shape.dtype, context.device)
            model = load_model(plan.folder, context.device, plan.shape.dtype, chosen.trust_remote_code, stage.layers)
        options = chosen.execution, stage.final_hidden, chosen.compile, plan.row_documents, stage.layers
        self.target = Target(model, stage.taps, *options)
        context.tell_chain("ways", self.target.exact_ways)
        self._busy = DeviceClock(context.device)
        self._blocked_s = 0.0

    def warm(self) -> None:
        """Run a row, so that everything is compiled before the first packet is due."""
        if self.stage.layers is not None:
            self.target.take_way(common_way(self.context.told_by_chain("ways")))
        _, _, row = self.plan.load_row(next(self.plan.schedule.assignments()))
        shapes = [shape.on(self.context.device) for shape in self.plan.stage_shapes]
        before = PacketBuffer(shapes[self.context.stage - 1]).features if self.context.stage else None
        self.target.warm(row, PacketBuffer(shapes[self.context.stage]).features, before)
        if self.target.fallbacks and (self.context.index, self.context.stage) == (0, 0):
            print(f"target   its documents run {self.target.execution}; {'; '.join(self.target.fallbacks)}", flush=True)

    def capture(self, assignment: Assignment, buffer: PacketBuffer) -> None:
        """Fill a buffer with an assignment's row and features; on CUDA the features are only launched."""
        upstream, status = self.context.upstream, self.context.status
        if upstream is None:
            status.phase(assignment.step, "capture")
            epoch, index, row = self.plan.load_row(assignment)
            buffer.message.write(row, assignment, epoch, index, *self._capture(row, buffer.features, None))
        else:
            status.phase(assignment.step, "wait")
            before = upstream.take(assignment, self.context.index)
            status.phase(assignment.step, "capture")
            buffer.message.pass_on(before.message, *self._capture(before.row, buffer.features, before.features))
            upstream.release(before)

    def _capture(self, row: Row, out: torch.Tensor, before: torch.Tensor | None) -> tuple[int, int, int]:
        """Capture, and tell for how long this rank computed and was kept waiting since it was last asked, in microseconds, and how many
        faster ways it cannot take."""
        with self._busy:
            self.target.capture(row, out, before)
        busy_us, blocked_us = round(1e6 * self._busy.take_seconds()), round(1e6 * self._blocked_s)
        self._blocked_s = 0.0
        return busy_us, blocked_us, len(self.target.fallbacks)

    def run(self) -> None:
        """Serve until the schedule ends or a drafter stops."""
        packets, waiting = self.context.packets(self.context.status.wait("start")["step"]), None
        for assignment, drafter in packets:
            buffer = self.context.link.acquire()
            if buffer is None:
                return self._stop_upstream(assignment)
            self.capture(assignment, buffer)
            buffer.mark()
            if waiting is not None and not self._offer(*waiting):
                buffer.finish()  # what it was computed from may still be on its way
                return self._stop_upstream(next(packets, (None,))[0])
            waiting = (buffer, drafter, assignment.step)
        if waiting is not None:
            self._offer(*waiting)
        self.context.link.close()

    def _stop_upstream(self, assignment: Assignment | None) -> None:
        """Tell the stage before, which offers this assignment next, that nobody wants it."""
        if self.context.upstream is not None and assignment is not None:
            self.context.upstream.stop(assignment, self.context.index)

    def _offer(self, buffer: PacketBuffer, drafter: int, step: int) -> bool:
        self.context.status.phase(step, "offer")
        start = time.perf_counter()
        going_on = self.context.link.offer(buffer, drafter)
        self._blocked_s += time.perf_counter() - start
        return going_on


@one_voice
def main(argv: Sequence[str]) -> int:
    """Take part in a run as a target."""
    config = config_reader.from_command_line(argv, __doc__, family_options())
    with StopRequest() as stop, jobs.join(config, TARGET, stop) as job:
        plan = make_plan(config, job)
        job.agree(plan.agreement())
        job.connect(plan.stage_shapes, plan.schedule)
        with open_run(plan, job) as start:
            if not start.finished:
                job.run(lambda context: Server(plan, context), None)
    return 0


if __name__ == "__main__":
    cli.run_script(main)
