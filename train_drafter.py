"""Train a DFlash drafter from a frozen target's hidden states.

    python train_drafter.py                              one device: the embedded quickstart
    torchrun --nproc_per_node 8 train_drafter.py         6 targets feed 2 drafters
    torchrun ... train_drafter.py --config launch/presets/qwen3_8b.yaml target.path=... data.path=...

Every rank starts here and takes its seat: targets serve (serve_targets.py), drafters train (below).
"""

from contextlib import closing
from itertools import groupby

from common import config as configuration
from common import plan as planning
from common import topology
from common.averaging import Averaging
from common.learner import Learner, walk_totals
from common.metrics import Meters
from common.run import Run
from common.tokens import TRAIN, VALIDATE
from common.watch import StopRequest
from serve_targets import Server


class Trainer:
    """One drafter: takes the packets that are due, learns from them, meets the other drafters every K steps."""

    def __init__(self, plan, seat, stop, vocabulary=None):
        self.plan, self.seat, self.stop = plan, seat, stop
        self.learner = Learner(plan, seat.device, vocabulary)
        self.averaging = Averaging(plan.config.sync, seat.comm, self.learner.optimizer, plan.deal.steps)
        self.meters = Meters(seat.device)
        self.run_files = Run(plan, seat, self.learner)

    def warm(self):
        self.learner.warm()

    def run(self):
        """Every step that is left: train, average, validate, log, save. The order of packets is the deal's."""
        with closing(self.run_files):
            step = start = self.run_files.begin(self.meters)
            for step, entries in groupby(self.seat.agenda(start), key=lambda entry: entry[0].step):
                train, validate = _by_kind(entries)
                self.train_step(step, train)
                self.meters.add(self.averaging.weights(step))
                stopping = self.averaging.due(step) and self.run_files.stop_agreed(self.stop.requested)
                self.validate(step, validate)
                if step % self.plan.config.log.every == 0 or step == self.plan.deal.steps:
                    self.log(step)
                if stopping or self.run_files.due(step):
                    self.run_files.save(step, self.meters)
                if stopping:
                    self.answer_stop(step)
                    break
            self.run_files.end(step)

    def train_step(self, step, entries):
        """One optimiser step over this drafter's packets."""
        weight_sum = 0
        for item, target in entries:
            packet = self.take(item, target)
            result = self.learner.backward(packet, item.number)
            self.seat.link.release(packet)
            self.meters.add(result.metrics)
            weight_sum = weight_sum + result.weight_sum
        weight_sum = self.averaging.gradients(weight_sum)
        self.meters.add(self.learner.step(step, weight_sum))

    def take(self, item, target, phase="step"):
        """The packet that is due, on this drafter's device."""
        self.seat.board.phase(item.step, "wait")
        packet = self.seat.link.take(item, target)
        self.seat.board.phase(item.step, phase)
        self.run_files.packet(packet.message)
        return packet

    def validate(self, step, entries):
        """Walk tau over the held-out rows that are dealt after this step."""
        walked = Meters(self.seat.device)
        for item, target in entries:
            packet = self.take(item, target, phase="validate")
            walked.add(walk_totals(self.plan, item, packet.row, *self.learner.replay(packet)))
            self.seat.link.release(packet)
        if entries:
            self.run_files.write(step, walked.drain(self.seat.comm))

    def log(self, step):
        """One record of everything since the last; the only place where a step's numbers are read off the device."""
        self.meters.add(self.run_files.rates(self.seat.link.wait.take_seconds()))
        self.run_files.write(step, self.meters.drain(self.seat.comm))
        self.run_files.warn_of_faults()

    def answer_stop(self, step):
        """Targets learn of a stop from the answer to their next offer."""
        for item, target in self.seat.farewells(step):
            self.seat.link.stop(item, target)


def _by_kind(entries):
    """A step's entries as (training, validation)."""
    entries = list(entries)
    return [e for e in entries if e[0].kind == TRAIN], [e for e in entries if e[0].kind == VALIDATE]


def main(argv):
    config = configuration.from_command_line(argv, __doc__)
    with StopRequest() as stop, topology.join(config) as job:
        plan = planning.make(config, job)
        job.agree(plan.agreement())
        if job.speaks:
            print(f"{configuration.to_yaml(config)}\n{job.layout.describe()}\n{plan.describe(job.layout)}", flush=True)
        job.connect(plan.shape, plan.deal)
        job.run(lambda seat: Server(plan, seat), lambda seat: Trainer(plan, seat, stop))
    return 0


if __name__ == "__main__":
    configuration.run_script(main)
