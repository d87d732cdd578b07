"""Where the suite runs: solo, threads or processes. Builds a link and a Comm for every worker; nobody else asks in which mode it is."""

import os
import socket
import threading
from collections.abc import Sequence

import torch

from common import compile_cache
from common.config import Config
from common.data.schedule import Schedule
from common.distributed import links, thread_link
from common.distributed.comms import SoloComm, ThreadComm, ThreadMeeting
from common.distributed.context import WorkerContext
from common.distributed.devices import choose_device, named_device, on_device
from common.distributed.job import Job, MakeDrafter, MakeTarget, Worker, was_restarted
from common.distributed.layout import DRAFTER, TARGET, Layout, Member
from common.distributed.packet import PacketShape
from common.distributed.processes import ProcessesJob
from common.distributed.status import LocalStatus
from common.distributed.stop import StopRequest
from common.errors import UserError


def join(config: Config, role: str = DRAFTER, stop: StopRequest | None = None) -> Job:
    """Take part in the job: one process of many, or the one process of a threads or solo run.

    `role` is TARGET for ranks that only serve. A wish to `stop` that reaches one of many processes is passed on to the drafters.

    Raises: UserError when the mode does not fit what was started.
    """
    torch.set_num_threads(config.topology.cpu_threads)
    world = int(os.environ.get("WORLD_SIZE", 1))
    mode = config.topology.mode
    if mode == "auto":
        mode = "processes" if world > 1 else "solo"
    if world > 1 and mode != "processes":
        raise UserError(f"topology.mode={mode} is one process, but {world} ranks were started: drop topology.mode or start one rank")
    if mode == "processes" and world == 1:
        raise UserError("topology.mode=processes needs several ranks: start with torchrun --nproc_per_node N, or drop topology.mode")
    if mode != "processes" and role == TARGET:
        raise UserError("serve_targets.py serves drafters of the same rendezvous: start train_drafter.py there too (launch/split.sh)")
    if mode == "processes":
        return ProcessesJob(config, role, stop)
    return SoloJob(config) if mode == "solo" else ThreadsJob(config)


class SoloJob(Job):
    """One device: the drafter pulls each packet out of the target."""

    is_main = True

    def __init__(self, config: Config):
        super().__init__(config)
        for name in ("targets", "drafters"):
            if (getattr(config.topology, name) or 1) > 1:
                raise UserError(
                    f"topology.{name}={getattr(config.topology, name)} needs several ranks: use torchrun or topology.mode=threads, or "
                    "write topology.targets=1 topology.drafters=1 for one device"
                )
        device, host = choose_device(0, 1, config), socket.gethostname()
        where, stages = (0, 0, 0, 0, host, device), config.target.stages
        *earlier, target = (Member(TARGET, *where, stage, stages) for stage in range(stages))
        self.layout = Layout((target,), (Member(DRAFTER, *where),), tuple(earlier))
        self.status = LocalStatus()
        self.check()

    def connect(self, shapes: Sequence[PacketShape], schedule: Schedule) -> None:
        device = self.layout.drafters[0].device
        self._links = [links.InlineLink(shape.on(device)) for shape in shapes]
        same = SoloComm(), schedule, self.layout, self.status, was_restarted()
        self.contexts = [
            WorkerContext(TARGET, 0, device, link, *same, stage, upstream)
            for stage, (link, upstream) in enumerate(zip(self._links, [None, *self._links[:-1]], strict=True))
        ]
        self.contexts.append(WorkerContext(DRAFTER, 0, device, self._links[-1], *same))

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        assert make_drafter is not None, "only ranks of several processes serve without a drafter"
        *target_contexts, drafter_context = self.contexts
        targets, drafter = [make_target(context) for context in target_contexts], make_drafter(drafter_context)
        for link, target in zip(self._links, targets, strict=True):
            link.capture = target.capture
            target.warm()
        drafter.warm()
        drafter.run()


class ThreadsJob(Job):
    """One process, one thread per worker. All models are built and all kernels compiled by this thread before any worker starts."""

    is_main = True

    def __init__(self, config: Config):
        super().__init__(config)
        host, names, stages = socket.gethostname(), _device_names(config), config.target.stages
        serving = [
            Member(TARGET, i // stages, i // stages, 0, 0, host, named_device(name), i % stages, stages)
            for i, name in enumerate(names[TARGET])
        ]
        drafters = tuple(Member(DRAFTER, i, i, 0, 0, host, named_device(name)) for i, name in enumerate(names[DRAFTER]))
        last, earlier = (tuple(m for m in serving if (m.stage == stages - 1) == wanted) for wanted in (True, False))
        self.layout = Layout(last, drafters, earlier)
        self.failed = threading.Event()
        self._first_failure: tuple[WorkerContext, BaseException] | None = None
        self.status = LocalStatus(self.failed)
        self.check()

    def connect(self, shapes: Sequence[PacketShape], schedule: Schedule) -> None:
        depth, failed = self.config.link.depth, self.failed
        queues = {(target.index, drafter.index): thread_link.QueueLink(depth, failed) for target, drafter in self.layout.pairs()}
        hops = {(one.index, one.stage): thread_link.QueueLink(depth, failed) for one, _ in self.layout.hops()}
        self._meeting = ThreadMeeting(self.drafters)
        self.contexts = []
        for member in self.layout.members:
            local, upstream = [shape.on(member.device) for shape in shapes], None
            if member.role == TARGET:
                onwards = {drafter: q for (target, drafter), q in queues.items() if target == member.index}
                if (behind := hops.get((member.index, member.stage))) is not None:
                    onwards = dict.fromkeys(range(self.drafters), behind)
                if (before := hops.get((member.index, member.stage - 1))) is not None:
                    upstream = thread_link.QueueReceiver(local[member.stage - 1], depth, {member.index: before})
                link, comm = thread_link.QueueSender(local[member.stage], depth, onwards, failed), SoloComm()
            else:
                by_target = {target: q for (target, drafter), q in queues.items() if drafter == member.index}
                link, comm = thread_link.QueueReceiver(local[-1], depth, by_target), ThreadComm(self._meeting, member.index)
            place = member.role, member.index, member.device
            context = WorkerContext(*place, link, comm, schedule, self.layout, self.status, was_restarted(), member.stage, upstream)
            self.contexts.append(context)

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        assert make_drafter is not None, "only ranks of several processes serve without a drafter"
        workers = self._build(make_target, make_drafter)
        threads = [
            threading.Thread(target=self._work, args=(context, worker), name=context.name)
            for context, worker in zip(self.contexts, workers, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)
        except BaseException:
            self._end_all()
            for thread in threads:
                thread.join(timeout=20)
            raise
        if self._first_failure is not None:
            context, error = self._first_failure
            error.add_note(f"raised by {context.name} on {context.device}")
            raise error

    def _build(self, make_target: MakeTarget, make_drafter: MakeDrafter) -> list[Worker]:
        """All models, then all kernels, by this thread: no compile may run beside a worker."""
        workers: list[Worker] = []
        for context in self.contexts:
            with on_device(context.device):
                workers.append(make_target(context) if context.role == TARGET else make_drafter(context))
        for context, worker in zip(self.contexts, workers, strict=True):
            with on_device(context.device):
                worker.warm()
        compile_cache.freeze()
        return workers

    def _work(self, context, worker):
        try:
            with on_device(context.device):
                worker.run()
        except BaseException as error:
            if not self.failed.is_set():  # the others' failures only follow from the first
                self._first_failure = (context, error)
            self._end_all()

    def _end_all(self):
        self.failed.set()
        self._meeting.abort()


def _device_names(config: Config):
    """The devices' names by role. Raises: UserError where they are not named, or do not fit the counts."""
    chosen, stages = config.topology, config.target.stages
    names = {TARGET: chosen.target_devices or [], DRAFTER: chosen.drafter_devices or []}
    counts = {TARGET: chosen.targets and chosen.targets * stages, DRAFTER: chosen.drafters}
    if not torch.cuda.is_available() or any(counts.values()):
        default, fewest = "cuda:0" if torch.cuda.is_available() else "cpu", {TARGET: stages, DRAFTER: 1}
        names = {role: names[role] or [default] * (counts[role] or fewest[role]) for role in names}
    elif not all(names.values()):
        raise UserError("topology.mode=threads needs topology.target_devices=[cuda:0,...] and topology.drafter_devices=[cuda:1,...]")
    for role, count in counts.items():
        if count not in (None, len(names[role])):
            raise UserError(
                f"topology.{role}s={getattr(chosen, f'{role}s')} take {count} devices but topology.{role}_devices names "
                f"{len(names[role])}: make them equal or drop one"
            )
    if len(names[TARGET]) % stages:
        raise UserError(
            f"topology.target_devices names {len(names[TARGET])} devices, which is no multiple of target.stages={stages}: each stage of a "
            "target has its own (it may be named twice)"
        )
    return names
