"""One process per worker, started by torchrun: how it joins the others, is connected to them, and leaves.

The only reader of RANK and WORLD_SIZE beside `jobs.join`.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from common.config import Config
from common.data.schedule import Schedule
from common.distributed.comms import GroupComm, SoloComm, StagedComm
from common.distributed.context import WorkerContext
from common.distributed.groups import TIMEOUT, Group, make_drafters_group, make_hops, make_pairs
from common.distributed.job import Job, MakeDrafter, MakeTarget, T, was_restarted
from common.distributed.layout import DRAFTER, TARGET
from common.distributed.packet import PacketShape
from common.distributed.process_link import P2PReceiver, P2PSender
from common.distributed.refusal import leave_refusal
from common.distributed.rendezvous import agree_on_attempt, open_store
from common.distributed.roles import Announcement, make_layout
from common.distributed.status import StatusStore
from common.distributed.stop import StopRequest
from common.distributed.watch import Watch
from common.errors import UserError
from common.trees import differences, digest


class ProcessesJob(Job):
    """One process per worker, started by torchrun; also by two torchrun agents of one rendezvous (split)."""

    def __init__(self, config: Config, role: str, stop: StopRequest | None):
        super().__init__(config)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout_s = config.topology.timeout_s
        self._shared = shared = open_store(timeout_s)
        self.attempt = agree_on_attempt(shared, self.rank, self.world, timeout_s)
        shared.set_timeout(TIMEOUT)  # from here on the watch judges who is late; a store that pauses is no error
        self.store = dist.PrefixStore(f"attempt_{self.attempt}", shared)
        self.status = StatusStore(self.store)
        announcement = Announcement(role, socket.gethostname(), int(os.environ.get("GROUP_RANK", 0)), int(os.environ["LOCAL_RANK"]))
        announced = [Announcement(*values) for values in self.status.gather("who", self.rank, self.world, announcement)]
        self.layout = make_layout(announced, config, self.rank)
        self.member = next(m for m in self.layout.members if m.rank == self.rank)
        self.is_main = self.member.role == DRAFTER and self.member.index == 0
        if self.member.device.type == "cuda":
            torch.cuda.set_device(self.member.device)
        self.staged = self.member.device.type == "cuda" and config.link.backend == "staged"
        self._groups: list[Group] = []
        connection = self.store.clone()  # pyrefly: ignore[missing-attribute]  # torch's stub leaves it out
        self.watch = Watch(connection, self.status, self.layout, self.member, timeout_s, stop)
        self.check()

    def first_per_host(self, work: Callable[[], T]) -> T:
        key = f"first/{self.member.host}"
        if self.rank == min(m.rank for m in self.layout.members if m.host == self.member.host):
            result = work()
            self.status.put(key, "done")
            return result
        self.status.wait(key)
        return work()

    def agree(self, tree: dict[str, Any]) -> None:
        """Refuse to start when ranks hold different configs, data or targets.

        Raises: UserError on every rank, naming the keys.
        """
        self.status.put(f"tree/{self.rank}", tree)
        first, *others = self.status.gather("digest", self.rank, self.world, digest(tree))
        for rank, other in enumerate(others, 1):
            if other != first:
                trees = self.status.wait("tree/0"), self.status.wait(f"tree/{rank}")
                keys = ", ".join(f"{k}: {a!r} against {b!r}" for k, (a, b) in differences(*trees).items())
                raise UserError(f"rank 0 and rank {rank} differ in {keys}: start all ranks with the same config, data, target and release")

    def connect(self, shapes: Sequence[PacketShape], schedule: Schedule) -> None:
        """Make the groups that this rank belongs to (the drafters', the pairs, the hops of a chain), and the context."""
        member, depth = self.member, self.config.link.depth
        store = dist.PrefixStore("groups", self.store)
        device = member.device if member.device.type == "cuda" and not self.staged else None
        comm = SoloComm()
        if member.role == DRAFTER:
            drafters = make_drafters_group(store, self.layout, member, device)
            comm = (StagedComm if self.staged else GroupComm)(drafters)
            self._groups = [drafters]
        pairs = make_pairs(store, self.layout, member, device)
        before, behind = make_hops(store, self.layout, member, device)
        self._groups += [*pairs.values(), *(hop for hop in (before, behind) if hop is not None)]
        local = [shape.on(member.device) for shape in shapes]
        if member.role == DRAFTER:
            link = P2PReceiver(local[-1], depth, pairs, self.staged)
        else:
            onwards = pairs if behind is None else dict.fromkeys(range(self.drafters), behind)
            link = P2PSender(local[member.stage], depth, onwards, self.staged)
        upstream = None if before is None else P2PReceiver(local[member.stage - 1], depth, {member.index: before}, self.staged)
        restarted = was_restarted() or self.attempt > 1
        place = member.role, member.index, member.device
        self.contexts = [WorkerContext(*place, link, comm, schedule, self.layout, self.status, restarted, member.stage, upstream)]

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        (context,) = self.contexts
        if context.role == TARGET:
            worker = make_target(context)
        else:
            assert make_drafter is not None, "a rank that only serves has the role of a target"
            worker = make_drafter(context)
        worker.warm()
        try:
            worker.run()
        except UserError as error:  # it has trained until it failed, and would do so again
            leave_refusal(self._shared, str(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.watch.explain(error, lost_connection=isinstance(error, dist.DistError) or "gloo" in str(error))
            return
        self.status.phase(self.status.now[1], "leave")
        for group in self._groups:
            group.close()
        with contextlib.suppress(dist.DistError):  # a rank, or its launcher, hosts the store: it may be gone as soon as everybody is done
            self.status.gather("left", self.rank, self.world, True)
            self.watch.leave()
