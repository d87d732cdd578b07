"""One process per worker, started by torchrun: roles, process groups, and the end of the job.

The only reader of RANK and WORLD_SIZE beside `jobs.join`, the only maker of process groups.
"""

import json
import os
import socket
import time
import uuid
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common.distributed import comms, links
from common.distributed.job import Job, choose_device, device_at, was_restarted
from common.distributed.layout import DRAFTER, TARGET, Layout, Member, WorkerContext, split
from common.distributed.status import StatusStore
from common.distributed.watch import Watch
from common.errors import UserError
from common.trees import differences, digest

LINK_CTAS = 4  # multiprocessors that a waiting send or receive may spin on


class ProcessesJob(Job):
    """One process per worker, started by torchrun; also by two torchrun agents of one rendezvous (split)."""

    def __init__(self, config, role):
        super().__init__(config)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank, agent = int(os.environ["LOCAL_RANK"]), int(os.environ.get("GROUP_RANK", 0))
        self._timeout = timedelta(seconds=config.topology.timeout_s)
        try:
            shared, _, _ = next(rendezvous("env://", timeout=self._timeout))
        except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"no rendezvous at MASTER_ADDR:MASTER_PORT ({reason}): start with torchrun; is the port taken or unreachable?"
            ) from None
        self.attempt = _agree_on_attempt(shared, self.rank, self.world, config.topology.timeout_s)
        self.store = dist.PrefixStore(f"attempt_{self.attempt}", shared)
        self.status = StatusStore(self.store)
        me = {"role": role, "host": socket.gethostname(), "agent": agent, "local_rank": local_rank}
        self.layout = self._seat_all(self.status.gather("who", self.rank, self.world, me))
        self.member = next(m for m in (*self.layout.targets, *self.layout.drafters) if m.rank == self.rank)
        self.is_main = self.member.role == DRAFTER and self.member.index == 0
        if self.member.device.type == "cuda":
            torch.cuda.set_device(self.member.device)
        self.staged = self.member.device.type == "cuda" and config.link.backend == "staged"
        self.watch = Watch(self.status, self.layout, self.member, config.topology.timeout_s)
        self.check()

    def _seat_all(self, who):
        """Members of all ranks, by (role, host, local rank) and never by global rank, which is the order of joining."""
        order = sorted(range(self.world), key=lambda r: (who[r]["host"], who[r]["agent"], who[r]["local_rank"]))
        by_host = defaultdict(list)
        for rank in order:
            by_host[who[rank]["host"]].append(rank)
        split_launch = any(w["role"] == TARGET for w in who)
        whole = split_launch or max(map(len, by_host.values())) == 1
        groups = [order] if whole else list(by_host.values())
        shapes, roles = set(), {}
        for group in groups:
            if split_launch:
                count = sum(who[r]["role"] == TARGET for r in group)
                counts = split(len(group), count, len(group) - count)
                ordered = sorted(group, key=lambda r: who[r]["role"] != TARGET)
            else:
                counts = split(len(group), self.config.topology.targets, self.config.topology.drafters)
                ordered = group
            shapes.add(counts)
            roles |= {r: TARGET if i < counts[0] else DRAFTER for i, r in enumerate(ordered)}
        if len(shapes) > 1:
            listed = ", ".join(f"{t} targets + {d} drafters" for t, d in sorted(shapes))
            raise UserError(f"the nodes differ ({listed}): start the same number of ranks on every node")
        members = {TARGET: [], DRAFTER: []}
        for number, group in enumerate(groups):
            devices_of = {TARGET: 0, DRAFTER: 0}
            for rank in group:
                role, host = roles[rank], who[rank]["host"]
                ranks_here = sorted(by_host[host], key=lambda r: (roles[r] != TARGET, who[r]["agent"], who[r]["local_rank"]))
                device = (
                    choose_device(ranks_here.index(rank), len(ranks_here), self.config)
                    if rank == self.rank
                    else device_at(ranks_here.index(rank))
                )
                members[role].append(Member(role, len(members[role]), devices_of[role], number, rank, host, device))
                devices_of[role] += 1
        return Layout(tuple(members[TARGET]), tuple(members[DRAFTER]))

    def first_per_host(self, work):
        """Run `work` on one rank of every host first (a download, say), then on the others."""
        here = [m.rank for m in (*self.layout.targets, *self.layout.drafters) if m.host == self.member.host]
        key = f"first/{self.member.host}"
        if self.rank == min(here):
            result = work()
            self.status.put(key, "done")
            return result
        self.status.wait(key)
        return work()

    def agree(self, tree):
        """Refuse to start when ranks hold different configs, data or targets.

        Raises: UserError on every rank, naming the keys.
        """
        mine = self.status.gather("agree", self.rank, self.world, {"digest": digest(tree), "tree": tree})
        for rank, other in enumerate(mine):
            if other["digest"] != mine[0]["digest"]:
                keys = ", ".join(f"{k}: {a!r} against {b!r}" for k, (a, b) in differences(mine[0]["tree"], other["tree"]).items())
                raise UserError(f"rank 0 and rank {rank} differ in {keys}: start all ranks with the same config, data, target and release")

    def connect(self, shape, schedule):
        """Make the groups, in the same order on every rank, and the context."""
        cuda = self.member.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if cuda and not self.staged else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("groups", self.store), rank=self.rank, world_size=self.world, timeout=self._timeout
        )
        long = timedelta(days=7)  # a slow peer is no error; a dead or hanging one is found by the watch

        def group(members, ctas=None):
            options = None
            if cuda and not self.staged:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = long  # or torch warns that it differs from the group's
                if ctas:
                    options.config.max_ctas = ctas
            return dist.new_group([m.rank for m in members], timeout=long, backend=backend, pg_options=options)

        drafters = group(self.layout.drafters)
        pairs = {(t.index, d.index): group((t, d), LINK_CTAS) for t, d in self.layout.pairs()}
        if cuda and not self.staged:
            self._open_channels(drafters, pairs)
        here, depth = shape.on(self.member.device), self.config.link.depth
        if self.member.role == TARGET:
            mine = {d: g for (t, d), g in pairs.items() if t == self.member.index}
            link, comm = links.P2PSender(here, depth, mine, self.staged), None
        else:
            mine = {t: g for (t, d), g in pairs.items() if d == self.member.index}
            link = links.P2PReceiver(here, depth, mine, self.staged)
            comm = (comms.StagedComm if self.staged else comms.GroupComm)(drafters, self.member.index, self.drafters)
        restarted = was_restarted() or self.attempt > 1
        self.contexts = [
            WorkerContext(
                self.member.role, self.member.index, self.member.device, link, comm, schedule, self.layout, self.status, restarted
            )
        ]

    def _open_channels(self, drafters, pairs):
        """First use of every NCCL communicator, in one order: opening them lazily in the order of need can deadlock."""
        token = torch.zeros(1, device=self.member.device)
        for (target, drafter), pair in pairs.items():
            if self.member.role == TARGET and self.member.index == target:
                dist.send(token, group=pair, group_dst=links.other(pair))
            elif self.member.role == DRAFTER and self.member.index == drafter:
                dist.recv(token, group=pair, group_src=links.other(pair))
        if self.member.role == DRAFTER and self.drafters > 1:
            dist.all_reduce(token, group=drafters)
        torch.cuda.synchronize()

    def run(self, make_server, make_trainer):
        context = self.contexts[0]
        worker = (make_server if context.role == TARGET else make_trainer)(context)
        worker.warm()
        return worker.run()

    def __exit__(self, kind, error, trace):
        if kind is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            if self.rank == 0:  # it may host the store: it leaves last
                for other in range(1, self.world):
                    self.status.wait(f"left/{other}")
            self.watch.leave()
            self.status.put(f"left/{self.rank}", True)
        else:
            self.watch.explain(error, lost_connection=isinstance(error, dist.DistError) or "gloo" in str(error))


def _agree_on_attempt(store, rank, world, timeout_s):
    """The number of this attempt at the job, 1 for the first: a name for the part of the store that no earlier attempt wrote to.

    torchrun's store outlives its restarts, and its agents count them differently (https://github.com/pytorch/pytorch/issues/135712).
    So every rank leaves a fresh word, the first rank answers with a number and the words it read, and whoever finds its own word there
    joins. A word of an earlier attempt is answered too, and the answer is given anew when it is replaced.
    Raises: UserError naming the ranks that did not come.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key):
        return json.loads(store.get(key)) if store.check([key]) else None

    store.set(f"word/{rank}", json.dumps(word))
    number, answered = store.add("attempts", 1) if rank == 0 else None, None
    while time.monotonic() < deadline:
        if rank == 0:
            words = [read(f"word/{other}") for other in range(world)]
            if words != answered:
                store.set("answer", json.dumps([number, words]))
                answered = words
            missing = [other for other in range(1, world) if read(f"joined/{other}") != number]
            if not missing:
                return number
        elif (answer := read("answer")) is not None and word in answer[1]:
            store.set(f"joined/{rank}", json.dumps(answer[0]))
            return answer[0]
        time.sleep(0.02)
    raise UserError(
        f"rank {rank} waited topology.timeout_s={timeout_s:.0f} for {f'ranks {missing}' if rank == 0 else 'rank 0'} to start: "
        "see their logs, or raise topology.timeout_s"
    )
