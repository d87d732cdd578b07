"""Train a DFlash drafter from a frozen target's hidden states.

    python train_drafter.py                              one device: the embedded quickstart
    torchrun --nproc_per_node 8 train_drafter.py         6 targets feed 2 drafters
    torchrun ... train_drafter.py --config launch/presets/qwen3_8b.yaml target.path=... data.path=...

Every rank starts here and takes its role: targets serve (serve_targets.py), drafters train (below).
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import groupby

import torch

from common import cli, config_reader
from common.data.schedule import TRAIN, VALIDATE, Assignment
from common.distributed import jobs
from common.distributed.context import WorkerContext
from common.distributed.packet import PacketBuffer
from common.distributed.refusal import one_voice
from common.distributed.stop import StopRequest
from common.families.registry import family_options
from common.metrics import Meters
from common.target.vocabulary import Vocabulary
from common.training.averaging import Averaging
from common.training.clock import VALIDATION
from common.training.description import describe
from common.training.heldout import heldout_totals
from common.training.learner import Learner
from common.training.opening import open_run
from common.training.plan import RunPlan, make_plan
from common.training.run import Run
from serve_targets import Server

Entry = tuple[Assignment, int]
"""A packet that is due, and the target that sends it."""


class Trainer:
    """One drafter: takes the packets that are due, learns from them, meets the other drafters every K steps."""

    def __init__(self, plan: RunPlan, context: WorkerContext, stop: StopRequest, vocabulary: Vocabulary | None = None):
        self.plan, self.context, self.stop = plan, context, stop
        self.learner = Learner(plan, context.device, vocabulary)
        self.averaging = Averaging(plan.config.sync, context.comm, self.learner.optimizer, plan.schedule.steps)
        self.meters = Meters(context.device)
        self.run_files = Run(plan, context, self.learner)

    def warm(self) -> None:
        """Compile everything before the first packet is due."""
        self.learner.warm()

    def run(self) -> None:
        """Every step that is left: train, average, validate, log, save. The order of packets is the schedule's."""
        with closing(self.run_files):
            step = start = self.run_files.begin(self.meters)
            for step, entries in groupby(self.context.packets(start), key=lambda entry: entry[0].step):
                train, validate = _by_kind(entries)
                self.train_step(step, train)
                self.meters.add(self.averaging.weights(step))
                stopping = self.averaging.due(step) and self.run_files.stop_agreed(self.stop.requested)
                self.validate(step, validate)
                if step % self.plan.config.log.every == 0 or step == self.plan.schedule.steps:
                    self.log(step)
                if stopping or self.run_files.due(step):
                    self.run_files.save(step, self.meters)
                if stopping:
                    self.answer_stop(step)
                    break
            self.run_files.end(step)

    def train_step(self, step: int, entries: Sequence[Entry]) -> None:
        """One optimiser step over this drafter's packets."""
        weight_sum = torch.zeros((), device=self.context.device)
        for assignment, target in entries:
            packet = self.take(assignment, target)
            result = self.learner.backward(packet, assignment.number)
            self.context.link.release(packet)
            self.meters.add(result.metrics)
            weight_sum = weight_sum + result.weight_sum
        weight_sum = self.averaging.gradients(weight_sum)
        self.meters.add(self.learner.step(step, weight_sum))

    def take(self, assignment: Assignment, target: int, phase: str = "step") -> PacketBuffer:
        """The packet that is due, on this drafter's device."""
        self.context.status.phase(assignment.step, "wait")
        packet = self.context.link.take(assignment, target)
        self.context.status.phase(assignment.step, phase)
        self.run_files.packet(packet.message)
        return packet

    def validate(self, step: int, entries: Sequence[Entry]) -> None:
        """Held-out tau over the held-out rows that are scheduled after this step, if any are."""
        if not entries:
            return
        totals = Meters(self.context.device)
        with self.run_files.clock.apart(VALIDATION):
            for assignment, target in entries:
                packet = self.take(assignment, target, phase="validate")
                totals.add(heldout_totals(self.plan, assignment, packet.row, self.learner.replay(packet)))
                self.context.link.release(packet)
        self.run_files.write(step, totals.drain(self.context.comm))

    def log(self, step: int) -> None:
        """One record of everything since the last; the only place where a step's numbers are read off the device."""
        self.meters.add(self.run_files.rates(self.context.link.wait.take_seconds()))
        self.run_files.write(step, self.meters.drain(self.context.comm))
        self.stop.expect(self.run_files.stop_s(step, self.averaging.interval))
        self.run_files.warn_of_faults()

    def answer_stop(self, step: int) -> None:
        """Targets learn of a stop from the answer to their next offer."""
        for assignment, target in self.context.stop_offers(step):
            self.context.link.stop(assignment, target)


def _by_kind(entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """A step's entries as (training, validation)."""
    entries = list(entries)
    return [e for e in entries if e[0].kind == TRAIN], [e for e in entries if e[0].kind == VALIDATE]


@one_voice
def main(argv: Sequence[str]) -> int:
    """Take part in a run, whatever this rank's role is."""
    config = config_reader.from_command_line(argv, __doc__, family_options())
    with StopRequest() as stop, jobs.join(config, stop=stop) as job:
        plan = make_plan(config, job)
        job.agree(plan.agreement())
        if job.is_main:
            print(f"{config_reader.to_yaml(config)}\n{job.layout.describe()}\n{describe(plan, job.layout)}", flush=True)
        job.connect(plan.stage_shapes, plan.schedule)
        with open_run(plan, job) as start:
            if not start.finished:
                job.run(lambda context: Server(plan, context), lambda context: Trainer(plan, context, stop))
    return 0


if __name__ == "__main__":
    cli.run_script(main)
