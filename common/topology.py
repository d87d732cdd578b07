"""Who sits where. Builds a Link and a Comm for every worker and hands it a Seat; nobody else asks in which mode the suite runs.

The only reader of RANK and WORLD_SIZE, the only maker of process groups.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common import comms, kernels, links, tokens
from common.config import UserError, check_averaging, differences, digest
from common.watch import LocalBoard, StoreBoard, Watch

TARGET, DRAFTER = "target", "drafter"
LINK_CTAS = 4  # multiprocessors that a waiting send or receive may spin on


@dataclass(frozen=True)
class Member:
    """One worker. `index` counts its role over all cells, `place` within its cell; `rank` is the process's (0 in threads)."""

    role: str
    index: int
    place: int
    cell: int
    rank: int
    host: str
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """All members by role and index; a cell is a set of members that exchange packets."""

    targets: tuple
    drafters: tuple

    def cell(self, role, cell):
        return [m for m in (self.targets if role == TARGET else self.drafters) if m.cell == cell]

    def target_of(self, item):
        """The target that computes an item: its cell's targets take turns."""
        drafter = self.drafters[item.drafter]
        targets = self.cell(TARGET, drafter.cell)
        turn = tokens.serving_target(item, drafter.place, len(self.cell(DRAFTER, drafter.cell)), len(targets), len(self.drafters))
        return targets[turn]

    def pairs(self):
        """(target, drafter) pairs that really exchange packets, in an order equal on all ranks."""
        found = []
        for drafter in self.drafters:
            targets, cell_drafters = self.cell(TARGET, drafter.cell), len(self.cell(DRAFTER, drafter.cell))
            turns = {(u * cell_drafters + drafter.place) % len(targets) for u in range(len(targets))}
            found += [(targets[turn], drafter) for turn in sorted(turns)]
        return found

    def describe(self):
        lines = [f"  {m.role} {m.index}: rank {m.rank} on {m.host}, {m.device}" for m in (*self.targets, *self.drafters)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Seat:
    """Everything a worker needs to know of where it is."""

    role: str
    index: int
    device: torch.device
    link: object
    comm: object
    deal: tokens.Deal
    layout: Layout
    board: object = field(repr=False)
    restarted: bool = False

    def agenda(self, completed_steps=0):
        """(item, index of the other side) of all packets this seat sends or receives, in order."""
        for item in self.deal.items(completed_steps):
            target = self.layout.target_of(item)
            if self.role == DRAFTER and item.drafter == self.index:
                yield item, target.index
            elif self.role == TARGET and target.index == self.index:
                yield item, item.drafter

    def farewells(self, completed_steps):
        """Packets to answer with STOP after `completed_steps`: of each target its next one, if it is due to this drafter."""
        waiting = {m.index for m in self.layout.cell(TARGET, self.layout.drafters[self.index].cell)}
        for item in self.deal.items(completed_steps):
            target = self.layout.target_of(item).index
            if target in waiting:
                waiting.remove(target)
                if item.drafter == self.index:
                    yield item, target
            if not waiting:
                return


def default_drafters(ranks):
    """Drafters of a cell of `ranks`: a quarter of them, at least one."""
    return max(1, round(ranks / 4))


def split(ranks, targets, drafters):
    """(targets, drafters) of a cell, filled up from whichever is given.

    Raises: UserError when they do not add up to the ranks there are.
    """
    if drafters is None:
        drafters = ranks - targets if targets is not None else default_drafters(ranks)
    if targets is None:
        targets = ranks - drafters
    if targets < 1 or drafters < 1 or targets + drafters != ranks:
        raise UserError(
            f"topology.targets={targets} + topology.drafters={drafters} do not make the cell's {ranks} ranks; each role needs one: "
            f"start {max(targets, 1) + max(drafters, 1)} ranks, or use topology.drafters={default_drafters(ranks)}"
        )
    return targets, drafters


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


class _Job:
    """What all modes share. `board` is where workers leave notes for each other."""

    def __init__(self, config):
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kernels.reset()  # they hold this job's models; the process, a notebook's, may run another

    def first_per_host(self, work):
        return work()

    def agree(self, tree):
        pass

    @property
    def drafters(self):
        return len(self.layout.drafters)

    def _check(self):
        check_averaging(self.config, self.drafters, "checkpoint.every")


class SoloJob(_Job):
    """One device: the drafter pulls each packet out of the target."""

    speaks = True

    def __init__(self, config, role):
        super().__init__(config)
        for name in ("targets", "drafters"):
            if (getattr(config.topology, name) or 1) > 1:
                raise UserError(
                    f"topology.{name}={getattr(config.topology, name)} needs several ranks: use torchrun, or topology.mode=threads"
                )
        device, host = _device(0, 1, config), socket.gethostname()
        roles = [Member(role, 0, 0, 0, 0, host, device) for role in (TARGET, DRAFTER)]
        self.layout = Layout((roles[0],), (roles[1],))
        self.board = LocalBoard()
        self._check()

    def connect(self, shape, deal):
        device = self.layout.drafters[0].device
        link = links.InlineLink(shape.on(device))
        self.seats = [
            Seat(role, 0, device, link, comms.SoloComm(), deal, self.layout, self.board, _restarted()) for role in (TARGET, DRAFTER)
        ]

    def run(self, make_server, make_trainer):
        target_seat, drafter_seat = self.seats
        server, trainer = make_server(target_seat), make_trainer(drafter_seat)
        drafter_seat.link.capture = server.capture
        server.warm()
        trainer.warm()
        return trainer.run()


class ThreadsJob(_Job):
    """One process, one thread per worker. All models are built and all kernels compiled by this thread before any worker starts."""

    speaks = True

    def __init__(self, config, role):
        super().__init__(config)
        chosen = config.topology
        places = {TARGET: chosen.target_devices, DRAFTER: chosen.drafter_devices}
        counts = {TARGET: chosen.targets, DRAFTER: chosen.drafters}
        if not torch.cuda.is_available() or any(counts.values()):
            for role_, devices in places.items():
                places[role_] = devices or ["cpu" if not torch.cuda.is_available() else "cuda:0"] * (counts[role_] or 1)
        elif not all(places.values()):
            raise UserError("topology.mode=threads needs topology.target_devices=[cuda:0,...] and topology.drafter_devices=[cuda:1,...]")
        for role_, devices in places.items():
            if counts[role_] not in (None, len(devices)):
                raise UserError(
                    f"topology.{role_}s={counts[role_]} but topology.{role_}_devices names {len(devices)}: make them equal or drop one"
                )
        host = socket.gethostname()
        members = {r: tuple(Member(r, i, i, 0, 0, host, _named_device(d)) for i, d in enumerate(ds)) for r, ds in places.items()}
        self.layout = Layout(members[TARGET], members[DRAFTER])
        self.failed, self._first = threading.Event(), None
        self.board = LocalBoard(self.failed)
        self._check()

    def connect(self, shape, deal):
        depth = self.config.link.depth
        queues = {(t.index, d.index): links.QueueLink(depth, self.failed) for t, d in self.layout.pairs()}
        self._comm = comms.ThreadComm(self.drafters)
        self.seats = []
        for member in (*self.layout.targets, *self.layout.drafters):
            here = shape.on(member.device)
            if member.role == TARGET:
                mine = {d: q for (t, d), q in queues.items() if t == member.index}
                link, comm = links.QueueSender(here, depth, mine, self.failed), None
            else:
                mine = {t: q for (t, d), q in queues.items() if d == member.index}
                link, comm = links.QueueReceiver(here, depth, mine), self._comm.seat(member.index)
            self.seats.append(Seat(member.role, member.index, member.device, link, comm, deal, self.layout, self.board, _restarted()))

    def run(self, make_server, make_trainer):
        workers = self._build(make_server, make_trainer)
        threads = [
            threading.Thread(target=self._work, args=pair, name=f"{pair[0].role}{pair[0].index}")
            for pair in zip(self.seats, workers, strict=True)
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
            seat, error = self._first
            error.add_note(f"raised by {seat.role} {seat.index} on {seat.device}")
            raise error

    def _build(self, make_server, make_trainer):
        """All models, then all kernels, by this thread: no compile may run beside a worker."""
        workers = []
        for seat in self.seats:
            with _on(seat.device):
                workers.append((make_server if seat.role == TARGET else make_trainer)(seat))
        for seat, worker in zip(self.seats, workers, strict=True):
            with _on(seat.device):
                worker.warm()
        kernels.freeze()
        return workers

    def _work(self, seat, worker):
        try:
            with _on(seat.device):
                worker.run()
        except BaseException as error:
            if not self.failed.is_set():  # the others' failures only follow from the first
                self._first = (seat, error)
            self._end_all()

    def _end_all(self):
        self.failed.set()
        self._comm.abort()


class ProcessesJob(_Job):
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
        self.board = StoreBoard(self.store)
        me = {"role": role, "host": socket.gethostname(), "agent": agent, "local_rank": local_rank}
        self.layout = self._seat_all(self.board.gather("who", self.rank, self.world, me))
        self.member = next(m for m in (*self.layout.targets, *self.layout.drafters) if m.rank == self.rank)
        self.speaks = self.member.role == DRAFTER and self.member.index == 0
        if self.member.device.type == "cuda":
            torch.cuda.set_device(self.member.device)
        self.staged = self.member.device.type == "cuda" and config.link.backend == "staged"
        self.watch = Watch(self.board, self.layout, self.member, config.topology.timeout_s)
        self._check()

    def _seat_all(self, who):
        """Members of all ranks, by (role, host, local rank) and never by global rank, which is the order of joining."""
        order = sorted(range(self.world), key=lambda r: (who[r]["host"], who[r]["agent"], who[r]["local_rank"]))
        by_host = defaultdict(list)
        for rank in order:
            by_host[who[rank]["host"]].append(rank)
        split_launch = any(w["role"] == TARGET for w in who)
        whole = split_launch or max(map(len, by_host.values())) == 1
        cells = [order] if whole else list(by_host.values())
        shapes, roles = set(), {}
        for cell in cells:
            if split_launch:
                count = sum(who[r]["role"] == TARGET for r in cell)
                counts = split(len(cell), count, len(cell) - count)
                ordered = sorted(cell, key=lambda r: who[r]["role"] != TARGET)
            else:
                counts = split(len(cell), self.config.topology.targets, self.config.topology.drafters)
                ordered = cell
            shapes.add(counts)
            roles |= {r: TARGET if i < counts[0] else DRAFTER for i, r in enumerate(ordered)}
        if len(shapes) > 1:
            listed = ", ".join(f"{t} targets + {d} drafters" for t, d in sorted(shapes))
            raise UserError(f"the nodes differ ({listed}): start the same number of ranks on every node")
        members = {TARGET: [], DRAFTER: []}
        for number, cell in enumerate(cells):
            places = {TARGET: 0, DRAFTER: 0}
            for rank in cell:
                role, host = roles[rank], who[rank]["host"]
                ranks_here = sorted(by_host[host], key=lambda r: (roles[r] != TARGET, who[r]["agent"], who[r]["local_rank"]))
                device = (
                    _device(ranks_here.index(rank), len(ranks_here), self.config)
                    if rank == self.rank
                    else _device_name(ranks_here.index(rank))
                )
                members[role].append(Member(role, len(members[role]), places[role], number, rank, host, device))
                places[role] += 1
        return Layout(tuple(members[TARGET]), tuple(members[DRAFTER]))

    def first_per_host(self, work):
        """Run `work` on one rank of every host first (a download, say), then on the others."""
        here = [m.rank for m in (*self.layout.targets, *self.layout.drafters) if m.host == self.member.host]
        key = f"first/{self.member.host}"
        if self.rank == min(here):
            result = work()
            self.board.put(key, "done")
            return result
        self.board.wait(key)
        return work()

    def agree(self, tree):
        """Refuse to start when ranks hold different configs, data or targets.

        Raises: UserError on every rank, naming the keys.
        """
        mine = self.board.gather("agree", self.rank, self.world, {"digest": digest(tree), "tree": tree})
        for rank, other in enumerate(mine):
            if other["digest"] != mine[0]["digest"]:
                keys = ", ".join(f"{k}: {a!r} against {b!r}" for k, (a, b) in differences(mine[0]["tree"], other["tree"]).items())
                raise UserError(f"rank 0 and rank {rank} differ in {keys}: start all ranks with the same config, data, target and release")

    def connect(self, shape, deal):
        """Make the groups, in the same order on every rank, and the seat."""
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
        restarted = _restarted() or self.attempt > 1
        self.seats = [Seat(self.member.role, self.member.index, self.member.device, link, comm, deal, self.layout, self.board, restarted)]

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
        seat = self.seats[0]
        worker = (make_server if seat.role == TARGET else make_trainer)(seat)
        worker.warm()
        return worker.run()

    def __exit__(self, kind, error, trace):
        if kind is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            if self.rank == 0:  # it may host the store: it leaves last
                for other in range(1, self.world):
                    self.board.wait(f"left/{other}")
            self.watch.leave()
            self.board.put(f"left/{self.rank}", True)
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


def _restarted():
    """Whether the launcher started this job again after a death or a requeue."""
    return any(int(os.environ.get(name, 0)) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _on(device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _named_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is no device; write cpu or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _device_name(position):
    return torch.device("cuda", position) if torch.cuda.is_available() else torch.device("cpu")


def _device(position, ranks, config):
    """The device of the host's rank at `position`: CUDA devices in order, else the CPU."""
    if not torch.cuda.is_available():
        if config.link.backend == "nccl":
            raise UserError("link.backend=nccl needs CUDA devices, this host has none; use link.backend=auto")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if position >= count and config.link.backend != "staged":
        raise UserError(
            f"{ranks} ranks on a host with {count} CUDA devices: start {count} ranks, or link.backend=staged to share devices (for tests)"
        )
    return torch.device("cuda", position % count)
