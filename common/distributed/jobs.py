"""Where the suite runs: solo, threads or processes. Builds a link and a Comm for every worker; nobody else asks in which mode it is."""

import os
import socket
import threading

import torch

from common import compile_cache
from common.distributed import comms, links
from common.distributed.job import Job, choose_device, named_device, on_device, was_restarted
from common.distributed.layout import DRAFTER, TARGET, Layout, Member, WorkerContext
from common.distributed.processes import ProcessesJob
from common.distributed.status import LocalStatus
from common.errors import UserError


def join(config, role=DRAFTER):
    """Take part in the job: one process of many, the one process of a threads or solo run.

    `role` is TARGET for ranks that only serve. Returns a job with `layout`, `first_per_host`, `agree`, `connect` and `run`.
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
    return {"solo": SoloJob, "threads": ThreadsJob, "processes": ProcessesJob}[mode](config, role)


class SoloJob(Job):
    """One device: the drafter pulls each packet out of the target."""

    is_main = True

    def __init__(self, config, role):
        super().__init__(config)
        for name in ("targets", "drafters"):
            if (getattr(config.topology, name) or 1) > 1:
                raise UserError(
                    f"topology.{name}={getattr(config.topology, name)} needs several ranks: use torchrun, or topology.mode=threads"
                )
        device, host = choose_device(0, 1, config), socket.gethostname()
        roles = [Member(role, 0, 0, 0, 0, host, device) for role in (TARGET, DRAFTER)]
        self.layout = Layout((roles[0],), (roles[1],))
        self.status = LocalStatus()
        self.check()

    def connect(self, shape, schedule):
        device = self.layout.drafters[0].device
        link = links.InlineLink(shape.on(device))
        self.contexts = [
            WorkerContext(role, 0, device, link, comms.SoloComm(), schedule, self.layout, self.status, was_restarted())
            for role in (TARGET, DRAFTER)
        ]

    def run(self, make_server, make_trainer):
        target_context, drafter_context = self.contexts
        server, trainer = make_server(target_context), make_trainer(drafter_context)
        drafter_context.link.capture = server.capture
        server.warm()
        trainer.warm()
        return trainer.run()


class ThreadsJob(Job):
    """One process, one thread per worker. All models are built and all kernels compiled by this thread before any worker starts."""

    is_main = True

    def __init__(self, config, role):
        super().__init__(config)
        chosen = config.topology
        devices_of = {TARGET: chosen.target_devices, DRAFTER: chosen.drafter_devices}
        counts = {TARGET: chosen.targets, DRAFTER: chosen.drafters}
        if not torch.cuda.is_available() or any(counts.values()):
            for role_, devices in devices_of.items():
                devices_of[role_] = devices or ["cpu" if not torch.cuda.is_available() else "cuda:0"] * (counts[role_] or 1)
        elif not all(devices_of.values()):
            raise UserError("topology.mode=threads needs topology.target_devices=[cuda:0,...] and topology.drafter_devices=[cuda:1,...]")
        for role_, devices in devices_of.items():
            if counts[role_] not in (None, len(devices)):
                raise UserError(
                    f"topology.{role_}s={counts[role_]} but topology.{role_}_devices names {len(devices)}: make them equal or drop one"
                )
        host = socket.gethostname()
        members = {r: tuple(Member(r, i, i, 0, 0, host, named_device(d)) for i, d in enumerate(ds)) for r, ds in devices_of.items()}
        self.layout = Layout(members[TARGET], members[DRAFTER])
        self.failed, self._first = threading.Event(), None
        self.status = LocalStatus(self.failed)
        self.check()

    def connect(self, shape, schedule):
        depth = self.config.link.depth
        queues = {(t.index, d.index): links.QueueLink(depth, self.failed) for t, d in self.layout.pairs()}
        self._comm = comms.ThreadComm(self.drafters)
        self.contexts = []
        for member in (*self.layout.targets, *self.layout.drafters):
            here = shape.on(member.device)
            if member.role == TARGET:
                mine = {d: q for (t, d), q in queues.items() if t == member.index}
                link, comm = links.QueueSender(here, depth, mine, self.failed), None
            else:
                mine = {t: q for (t, d), q in queues.items() if d == member.index}
                link, comm = links.QueueReceiver(here, depth, mine), self._comm.context(member.index)
            self.contexts.append(
                WorkerContext(member.role, member.index, member.device, link, comm, schedule, self.layout, self.status, was_restarted())
            )

    def run(self, make_server, make_trainer):
        workers = self._build(make_server, make_trainer)
        threads = [
            threading.Thread(target=self._work, args=pair, name=f"{pair[0].role}{pair[0].index}")
            for pair in zip(self.contexts, workers, strict=True)
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
        if self._first is not None:
            context, error = self._first
            error.add_note(f"raised by {context.role} {context.index} on {context.device}")
            raise error

    def _build(self, make_server, make_trainer):
        """All models, then all kernels, by this thread: no compile may run beside a worker."""
        workers = []
        for context in self.contexts:
            with on_device(context.device):
                workers.append((make_server if context.role == TARGET else make_trainer)(context))
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
                self._first = (context, error)
            self._end_all()

    def _end_all(self):
        self.failed.set()
        self._comm.abort()
