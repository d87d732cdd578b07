"""The target's loop: read the rows that are this target's, capture their features, offer them to the drafters that are due.

    torchrun ... serve_targets.py --config FILE [section.key=value ...]

Under train_drafter.py target ranks start here by themselves; run this script on nodes that only serve targets (launch/split.sh).
"""

import time

import torch

from common import config as configuration
from common import plan as planning
from common import target, topology
from common.metrics import DeviceClock


class Server:
    """One target. Captures the next packet before it offers the last one, so that the device never waits for a drafter's answer."""

    def __init__(self, plan, seat, model=None):
        self.plan, self.seat = plan, seat
        chosen = plan.config.target
        model = model or target.load(plan.folder, seat.device, plan.shape.dtype, chosen.trust_remote_code)
        self.target = target.Target(model, plan.drafter.taps, chosen.execution, plan.final_hidden, chosen.compile, plan.row_documents)
        self._busy = DeviceClock(seat.device)
        self._blocked_s = 0.0

    def warm(self):
        """Run a row, so that everything is compiled before the first packet is due."""
        _, _, row = self.plan.load_row(next(self.plan.deal.items()))
        out = torch.zeros(self.plan.shape.row_tokens, self.plan.shape.width, dtype=self.plan.shape.dtype, device=self.seat.device)
        self.target.capture(row, out)

    def capture(self, item, buffer):
        """Fill a buffer with an item's row and features; on CUDA the features are only launched."""
        epoch, index, row = self.plan.load_row(item)
        with self._busy:
            self.target.capture(row, buffer.features)
        busy_us, blocked_us = round(1e6 * self._busy.take_seconds()), round(1e6 * self._blocked_s)
        self._blocked_s = 0.0
        buffer.message.write(row, item, epoch, index, busy_us, blocked_us)

    def run(self):
        """Serve until the deal ends or a drafter stops."""
        waiting = None
        for item, drafter in self.seat.agenda(self.seat.board.wait("start")["step"]):
            buffer = self.seat.link.acquire()
            if buffer is None:
                return
            self.seat.board.phase(item.step, "capture")
            self.capture(item, buffer)
            buffer.mark()
            if waiting is not None and not self._offer(*waiting):
                return
            waiting = (buffer, drafter, item.step)
        if waiting is not None:
            self._offer(*waiting)
        self.seat.link.close()

    def _offer(self, buffer, drafter, step):
        self.seat.board.phase(step, "offer")
        start = time.perf_counter()
        going_on = self.seat.link.offer(buffer, drafter)
        self._blocked_s += time.perf_counter() - start
        return going_on


def main(argv):
    config = configuration.from_command_line(argv, __doc__)
    with topology.join(config, topology.TARGET) as job:
        plan = planning.make(config, job)
        job.agree(plan.agreement())
        job.connect(plan.shape, plan.deal)
        job.run(lambda seat: Server(plan, seat), None)
    return 0


if __name__ == "__main__":
    configuration.run_script(main)
