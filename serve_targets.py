"""The target's loop: read the rows that are this target's, capture their features, offer them to the drafters that are due.

    torchrun ... serve_targets.py --config FILE [section.key=value ...]

Under train_drafter.py target ranks start here by themselves; run this script on nodes that only serve targets (launch/split.sh).
"""

import time
from collections.abc import Sequence

import torch

from common import cli, config_reader
from common.data.schedule import Assignment
from common.distributed import jobs
from common.distributed.context import WorkerContext
from common.distributed.layout import TARGET
from common.distributed.packet import PacketBuffer
from common.distributed.refusal import one_voice
from common.distributed.stop import StopRequest
from common.families.registry import family_options
from common.metrics import DeviceClock
from common.target.model import PreTrainedModel, Target, load_model
from common.target.vocabulary import check_files
from common.training.opening import open_run
from common.training.plan import RunPlan, make_plan


class Server:
    """One target. Captures the next packet before it offers the last one, so that the device never waits for a drafter's answer."""

    def __init__(self, plan: RunPlan, context: WorkerContext, model: PreTrainedModel | None = None):
        self.plan, self.context = plan, context
        chosen = plan.config.target
        if model is None:
            check_files(plan.target, plan.shape.dtype, context.device)
            model = load_model(plan.folder, context.device, plan.shape.dtype, chosen.trust_remote_code)
        self.target = Target(model, plan.drafter.taps, chosen.execution, plan.final_hidden, chosen.compile, plan.row_documents)
        self._busy = DeviceClock(context.device)
        self._blocked_s = 0.0

    def warm(self) -> None:
        """Run a row, so that everything is compiled before the first packet is due."""
        _, _, row = self.plan.load_row(next(self.plan.schedule.assignments()))
        out = torch.zeros(self.plan.shape.row_tokens, self.plan.shape.width, dtype=self.plan.shape.dtype, device=self.context.device)
        self.target.capture(row, out)

    def capture(self, assignment: Assignment, buffer: PacketBuffer) -> None:
        """Fill a buffer with an assignment's row and features; on CUDA the features are only launched."""
        epoch, index, row = self.plan.load_row(assignment)
        with self._busy:
            self.target.capture(row, buffer.features)
        busy_us, blocked_us = round(1e6 * self._busy.take_seconds()), round(1e6 * self._blocked_s)
        self._blocked_s = 0.0
        buffer.message.write(row, assignment, epoch, index, busy_us, blocked_us)

    def run(self) -> None:
        """Serve until the schedule ends or a drafter stops."""
        waiting = None
        for assignment, drafter in self.context.packets(self.context.status.wait("start")["step"]):
            buffer = self.context.link.acquire()
            if buffer is None:
                return
            self.context.status.phase(assignment.step, "capture")
            self.capture(assignment, buffer)
            buffer.mark()
            if waiting is not None and not self._offer(*waiting):
                return
            waiting = (buffer, drafter, assignment.step)
        if waiting is not None:
            self._offer(*waiting)
        self.context.link.close()

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
        job.connect(plan.shape, plan.schedule)
        with open_run(plan, job) as start:
            if not start.finished:
                job.run(lambda context: Server(plan, context), None)
    return 0


if __name__ == "__main__":
    cli.run_script(main)
