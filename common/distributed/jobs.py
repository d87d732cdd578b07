"""Where the suite runs: solo, threads or processes. Builds a link and a Comm for every worker; nobody else asks in which mode it is."""

import os
import socket
import threading

import torch

from common import compile_cache
from common.config import Config, TopologyConfig
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
        target, drafter = (Member(role, 0, 0, 0, 0, host, device) for role in (TARGET, DRAFTER))
        self.layout = Layout((target,), (drafter,))
        self.status = LocalStatus()
        self.check()

    def connect(self, shape: PacketShape, schedule: Schedule) -> None:
        device = self.layout.drafters[0].device
        self._link = links.InlineLink(shape.on(device))
        self.contexts = [
            WorkerContext(role, 0, device, self._link, SoloComm(), schedule, self.layout, self.status, was_restarted())
            for role in (TARGET, DRAFTER)
        ]

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        assert make_drafter is not None, "only ranks of several processes serve without a drafter"
        target_context, drafter_context = self.contexts
        target, drafter = make_target(target_context), make_drafter(drafter_context)
        self._link.capture = target.capture
        target.warm()
        drafter.warm()
        drafter.run()


class ThreadsJob(Job):
    """One process, one thread per worker. All models are built and all kernels compiled by this thread before any worker starts."""

    is_main = True

    def __init__(self, config: Config):
        super().__init__(config)
        host, names = socket.gethostname(), _device_names(config.topology)
        target_members, drafter_members = (
            tuple(Member(role, i, i, 0, 0, host, named_device(name)) for i, name in enumerate(names[role])) for role in (TARGET, DRAFTER)
        )
        self.layout = Layout(target_members, drafter_members)
        self.failed = threading.Event()
        self._first_failure: tuple[WorkerContext, BaseException] | None = None
        self.status = LocalStatus(self.failed)
        self.check()

    def connect(self, shape: PacketShape, schedule: Schedule) -> None:
        depth, pairs = self.config.link.depth, self.layout.pairs()
        queues = {(target.index, drafter.index): thread_link.QueueLink(depth, self.failed) for target, drafter in pairs}
        self._meeting = ThreadMeeting(self.drafters)
        self.contexts = []
        for member in self.layout.members:
            local_shape = shape.on(member.device)
            if member.role == TARGET:
                by_drafter = {drafter: q for (target, drafter), q in queues.items() if target == member.index}
                link, comm = thread_link.QueueSender(local_shape, depth, by_drafter, self.failed), SoloComm()
            else:
                by_target = {target: q for (target, drafter), q in queues.items() if drafter == member.index}
                link, comm = thread_link.QueueReceiver(local_shape, depth, by_target), ThreadComm(self._meeting, member.index)
            self.contexts.append(
                WorkerContext(member.role, member.index, member.device, link, comm, schedule, self.layout, self.status, was_restarted())
            )

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        assert make_drafter is not None, "only ranks of several processes serve without a drafter"
        workers = self._build(make_target, make_drafter)
        threads = [
            threading.Thread(target=self._work, args=(context, worker), name=f"{context.role}{context.index}")
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
            error.add_note(f"raised by {context.role} {context.index} on {context.device}")
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


def _device_names(chosen: TopologyConfig):
    """The devices' names by role. Raises: UserError where they are not named, or do not fit the counts."""
    names = {TARGET: chosen.target_devices or [], DRAFTER: chosen.drafter_devices or []}
    counts = {TARGET: chosen.targets, DRAFTER: chosen.drafters}
    if not torch.cuda.is_available() or any(counts.values()):
        default = "cuda:0" if torch.cuda.is_available() else "cpu"
        names = {role: names[role] or [default] * (counts[role] or 1) for role in names}
    elif not all(names.values()):
        raise UserError("topology.mode=threads needs topology.target_devices=[cuda:0,...] and topology.drafter_devices=[cuda:1,...]")
    for role, count in counts.items():
        if count not in (None, len(names[role])):
            raise UserError(f"topology.{role}s={count} but topology.{role}_devices names {len(names[role])}: make them equal or drop one")
    return names
