"""A packet is believed only after it was checked: what a damaged or hostile message says must not steer anything."""

import numpy as np
import pytest

from common.config import UserError
from common.packet import HostMessage, Row
from common.tokens import TRAIN, Item

ROW_TOKENS, DUE = 64, Item(TRAIN, 3, 17, 1)


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
        message.check(Item(TRAIN, 3, 18, 0))


def test_every_damaged_message_is_refused(message):
    """Seeded mutations of header and arrays: each ends as an error that a person can read, none passes."""
    good, draw = message.buffer.clone(), np.random.default_rng(0)
    for trial in range(500):
        message.buffer.copy_(good)
        limit = 128 if trial % 2 else len(good)
        for place in draw.integers(limit, size=draw.integers(1, 9)):
            message.buffer[place] = int(draw.integers(256))
        if not message.buffer.equal(good):
            with pytest.raises(UserError):
                message.check(DUE)


def test_spans_of_a_row_and_of_one_that_only_fills_a_round():
    """Validation walks over the documents of every row, the empty ones too."""
    row = Row(np.zeros(6, np.int32), np.array([0, 0, 0, 3, 3, 5], np.int32), np.ones(6, np.uint8), valid=5, documents=2)
    assert row.spans() == [(0, 3), (3, 5)]
    assert Row.empty(6).spans() == []
