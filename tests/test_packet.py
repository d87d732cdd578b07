"""A packet is believed only after it was checked: what a damaged or hostile message says must not steer anything."""

import contextlib
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from common.data.rows import Row
from common.data.schedule import TRAIN, Assignment
from common.distributed.groups import Pair
from common.distributed.packet import HostMessage, PacketBuffer, PacketShape
from common.distributed.process_link import STOP, P2PReceiver, P2PSender
from common.distributed.status import Stopped
from common.distributed.thread_link import Offered, QueueLink, QueueReceiver, QueueSender
from common.errors import UserError

ROW_TOKENS, DUE = 64, Assignment(TRAIN, 3, 17, 1)
SHAPE = PacketShape(ROW_TOKENS, 2, torch.float32).on("cpu")


@pytest.fixture
def message():
    starts = np.repeat([0, 20, 50], [20, 30, 14]).astype(np.int32)
    row = Row(np.arange(ROW_TOKENS, dtype=np.int32), starts, np.ones(ROW_TOKENS, np.uint8), valid=50, documents=2)
    message = HostMessage(ROW_TOKENS)
    message.write(row, DUE, epoch=0, row_index=5, busy_us=10)
    return message


def test_what_was_written_is_read(message):
    message.check(DUE)
    assert message.row().spans() == [(0, 20), (20, 50)] and message.get("busy_us") == 10


def test_another_packet_than_the_one_due_is_refused_with_both_numbers(message):
    """Else a drafter that is one packet behind trains on the wrong rows until the end."""
    with pytest.raises(UserError, match=r"\(0, 3, 17\), due is \(0, 3, 18\)"):
        message.check(Assignment(TRAIN, 3, 18, 0))


def test_every_damaged_message_is_refused(message):
    """Seeded mutations of header and arrays: each ends as an error that a person can read, none passes."""
    good, draw = message.buffer.clone(), np.random.default_rng(0)
    for trial in range(500):
        message.buffer.copy_(good)
        limit = 128 if trial % 2 else len(good)
        for position in draw.integers(limit, size=draw.integers(1, 9)):
            message.buffer[position] = int(draw.integers(256))
        if not message.buffer.equal(good):
            with pytest.raises(UserError):
                message.check(DUE)


def test_spans_of_a_row_and_of_one_that_only_fills_a_round():
    """Validation walks over the documents of every row, the empty ones too."""
    row = Row(np.zeros(6, np.int32), np.array([0, 0, 0, 3, 3, 5], np.int32), np.ones(6, np.uint8), valid=5, documents=2)
    assert row.spans() == [(0, 3), (3, 5)]
    assert Row.empty(6).spans() == []


def test_a_packet_that_is_not_due_is_refused_between_threads():
    """Else a drafter that is one packet behind trains on the wrong rows until the end."""
    link, buffer = QueueLink(2, threading.Event()), PacketBuffer(SHAPE)
    buffer.message.write(Row.empty(ROW_TOKENS), DUE, epoch=0, row_index=5)
    link.offered.put(Offered(buffer, None))
    with pytest.raises(UserError, match="due is"):
        QueueReceiver(SHAPE, 2, {0: link}).take(Assignment(TRAIN, 3, 18, 0), 0)


def take_another_one(rank, ranks, store):
    pair = Pair(dist.FileStore(store, ranks), "pair", rank)
    if rank == 0:
        sender = P2PSender(SHAPE, 2, {0: pair}, staged=False)
        buffer = sender.acquire()
        buffer.message.write(Row.empty(ROW_TOKENS), DUE, epoch=0, row_index=5)
        return sender.offer(buffer, 0)
    try:
        P2PReceiver(SHAPE, 2, {0: pair}, staged=False).take(Assignment(TRAIN, 3, 18, 0), 0)
    except UserError as error:
        pair.send(torch.tensor([STOP])).wait()
        return str(error)


def test_a_packet_that_is_not_due_is_refused_between_processes(tmp_path):
    refused = "offered packet (kind, step, number)=(0, 3, 17), due is (0, 3, 18)"
    assert run_ranks(take_another_one, 2, str(tmp_path / "store"), timeout_s=20) == [False, refused]


def test_a_stop_between_threads_waits_for_the_packets_before_it():
    """Else a target that one drafter has stopped drops what another drafter still waits for."""
    link = QueueLink(2, threading.Event())
    link.failed.set()  # else an empty queue is waited on for ever
    with pytest.raises(Stopped):
        QueueReceiver(SHAPE, 2, {0: link}).stop(DUE, 0)
    assert not link.stopped


class EventOfOneDevice:
    """As torch's: the first stream that records it gives it its device, and a stream of another device is refused."""

    device, waited_for = None, False

    def record(self, stream):
        assert self.device in (None, stream.device), f"Event device {self.device} does not match recording stream's device {stream.device}"
        self.device = stream.device

    def synchronize(self):
        self.waited_for = True


class StreamOf:
    def __init__(self, device):
        self.device = device

    def wait_stream(self, other):
        pass


def test_one_target_feeds_drafters_on_two_devices_from_one_buffer(monkeypatch):
    """Else the second drafter's first packet ends the job; and a buffer that is filled while a copy still reads it is a wrong packet."""
    monkeypatch.setattr("torch.cuda.Event", EventOfOneDevice)
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: StreamOf("any"))
    links = {drafter: QueueLink(1, threading.Event()) for drafter in (0, 1)}
    sender = QueueSender(SHAPE, 1, links, threading.Event())
    for drafter, link in links.items():
        receiver = QueueReceiver(SHAPE, 1, {0: link})
        receiver._stream = StreamOf(f"cuda:{drafter}")
        buffer = sender.acquire()
        buffer.message.write(Row.empty(ROW_TOKENS), DUE, epoch=0, row_index=5)
        buffer.features.fill_(drafter)
        sender.offer(buffer, drafter)
        assert (receiver.take(DUE, 0).features == drafter).all()
        copied = sender._free.queue[0].copied
        assert copied.device == f"cuda:{drafter}" and not copied.waited_for
    assert sender.acquire() is buffer and copied.waited_for
