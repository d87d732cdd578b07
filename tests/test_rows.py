"""Rows and the schedule: what is read once per epoch, and by whom."""

from collections import Counter

import numpy as np
import pytest
from test_store import write_store

from common.data.packing import pack_rows
from common.data.rows import EMPTY_ROW, RowLoader
from common.data.schedule import TRAIN, VALIDATE, Schedule, serving_target
from common.data.store import TokenStore
from common.errors import UserError


def pack(lengths, pack_tokens, max_document_tokens=None, long_documents="truncate", seed=0, epoch=0):
    return pack_rows(np.asarray(lengths), pack_tokens, max_document_tokens, long_documents, seed, epoch)


def even(rows):
    """Epochs of equally many rows."""
    return lambda epoch: rows


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("pack_tokens", [16, 64, 3072])
def test_rows_hold_every_document_once(pack_tokens, epoch):
    """A document lost or doubled is data lost or doubled."""
    lengths = np.random.default_rng(pack_tokens).integers(1, pack_tokens + 20, 500)
    rows = pack(lengths, pack_tokens, epoch=epoch)
    assert sorted(rows.documents.tolist()) == list(range(500))
    cut = np.minimum(lengths, pack_tokens)
    held = [rows.documents_of(r) for r in range(len(rows))]
    assert all(0 < cut[documents].sum() <= pack_tokens and len(documents) <= rows.most_documents for documents in held)
    assert rows.truncated == (lengths > pack_tokens).sum() and rows.dropped == 0
    assert rows.tokens == cut.sum() and rows.fill == pytest.approx(cut.sum() / (len(rows) * pack_tokens))


@pytest.mark.parametrize(
    ("median", "spread", "longest", "pack_tokens"), [(300, 0.6, 2000, 10240), (1100, 0.8, 4096, 12288), (660, 0.8, 3072, 3072)]
)
def test_rows_are_filled(median, spread, longest, pack_tokens):
    """A badly filled row is device time spent on padding: at least 98% on lengths as conversations have them."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(median), spread, 50_000), 20, longest).astype(int)
    rows = pack(lengths, pack_tokens)
    assert rows.fill > 0.98 and np.diff(rows.offsets).max() < rows.most_documents


def test_a_row_is_a_fair_sample_of_the_data():
    """Packed by sorted length, every step would see documents of one length and one kind, and the drafter learns less from them."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.7, 0.6, 20_000), 20, 2000).astype(int)
    rows = pack(lengths, 10240)
    medians = np.array([np.median(lengths[rows.documents_of(r)]) for r in range(len(rows))])
    between, within = medians.std(), np.mean([lengths[rows.documents_of(r)].std() for r in range(len(rows))])
    assert between < within / 3  # drawn at random 1.25 / sqrt(30) of the documents' own spread; sorted rows have almost none within
    assert abs(np.corrcoef(np.arange(len(rows)), medians)[0, 1]) < 0.1


def test_documents_meet_others_in_every_epoch():
    """The same rows in every epoch are the same gradients again; and neighbours in a file, which are alike, must not share rows."""
    pairs = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        rows = pack([8] * 100, 16, seed=seed, epoch=epoch)
        pairs.append({frozenset(rows.documents_of(i).tolist()) for i in range(len(rows))})
        assert sum(max(pair) - min(pair) == 1 for pair in pairs[-1]) < 10
    assert pairs[0] != pairs[1] and pairs[0] != pairs[2] and pairs[1] != pairs[2]
    assert pairs[1] == {frozenset(d.tolist()) for d in np.split(pack([8] * 100, 16, epoch=1).documents, 50)}


def test_long_documents_are_cut_or_dropped_and_counted():
    """A user who loses documents must learn how many."""
    lengths = [4, 9, 10, 11, 30]
    cut = pack(lengths, 20, 10)
    assert (cut.truncated, cut.dropped, cut.tokens, len(cut.documents)) == (2, 0, 43, 5)
    drop = pack(lengths, 20, 10, "drop")
    assert (drop.truncated, drop.dropped, drop.tokens, sorted(drop.documents.tolist())) == (0, 2, 23, [0, 1, 2])
    assert len(pack([30], 20, None, "drop")) == 0
    with pytest.raises(UserError, match="raise pack_tokens"):
        pack(lengths, 20, 21)


def test_a_row_holds_whole_documents_and_marks_where_they_begin(tmp_path):
    """`document_start` is what keeps documents from seeing each other, padding included."""
    store = TokenStore.open(write_store(tmp_path / "store", lengths=(5, 3, 8, 30)))
    loader = RowLoader(store, lambda epoch: pack(store.lengths, 16, 12, seed=1, epoch=epoch))
    seen = []
    for r in range(loader.count(2)):
        row, at = loader.row(2, r), 0
        for document in loader.documents_of(2, r):
            ids, mask = (values[:12] for values in store.document(document))
            assert row.tokens[at : at + len(ids)].tolist() == ids.tolist()
            assert row.loss_mask[at : at + len(ids)].tolist() == mask.tolist()
            assert (row.document_start[at : at + len(ids)] == at).all()
            at += len(ids)
            seen.append(document)
        assert row.valid == at and row.documents == len(loader.documents_of(2, r))
        assert (row.document_start[at:] == at).all() and not row.loss_mask[at:].any()
    assert sorted(seen) == [0, 1, 2, 3]
    empty = loader.row(0, EMPTY_ROW)
    assert (empty.valid, empty.documents, len(empty.tokens), empty.loss_mask.sum()) == (0, 0, 16, 0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("rows", [(36, 36, 36), (37, 36, 38), (101, 99, 102)])
@pytest.mark.parametrize("drafters", range(1, 7))
def test_every_row_is_trained_on_once_per_epoch(drafters, rows, accumulate):
    """A row read twice or never is weight that nobody asked for; only the stated remainder may be missing. Epochs differ in their rows."""
    step_packets = drafters * accumulate
    steps = sum(count // step_packets for count in rows)
    schedule = Schedule(rows.__getitem__, drafters, accumulate, steps=steps)
    per_epoch = {}
    for assignment in schedule.assignments():
        epoch, row = schedule.row_of(assignment)
        per_epoch.setdefault(epoch, []).append(row)
        assert assignment.step == assignment.number // step_packets + 1
        assert assignment.drafter == assignment.number % drafters
    assert schedule.dropped_rows == rows[0] % step_packets
    assert per_epoch == {epoch: list(range(count - count % step_packets)) for epoch, count in enumerate(rows)}


def test_epochs_that_fill_no_step_are_passed_over_and_end_in_words():
    """Otherwise a run on very little data never ends, or ends in a stack."""
    schedule = Schedule([3, 1, 4].__getitem__, 3, 1, steps=2)
    assert [schedule.row_of(a) for a in schedule.assignments()] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(UserError, match="use more data"):
        Schedule(lambda epoch: 3 if epoch == 0 else 1, 3, 1, steps=2).epoch_of(3)


@pytest.mark.parametrize("targets", range(1, 7))
@pytest.mark.parametrize("drafters", range(1, 7))
@pytest.mark.parametrize("groups", [1, 2])
def test_work_is_even_over_targets_and_drafters(groups, drafters, targets):
    """With 5 targets and 2 drafters no target may idle while another is late."""
    everybody = groups * drafters
    schedule = Schedule(even(everybody * 60), everybody, 1, epochs=1)
    given, taken = Counter(), Counter()
    for assignment in schedule.assignments():
        group, index = divmod(assignment.drafter, drafters)
        target = serving_target(assignment, index, drafters, targets, everybody)
        packet_of_group = assignment.number // everybody * drafters + index
        assert target == packet_of_group % targets
        given[group, target] += 1
        taken[assignment.drafter] += 1
    assert len(given) == groups * targets and max(given.values()) - min(given.values()) <= 1
    assert set(taken.values()) == {60}


@pytest.mark.parametrize(("drafters", "accumulate"), [(1, 1), (2, 3), (5, 2)])
def test_a_schedule_goes_on_where_it_stopped(drafters, accumulate):
    """After a resume the same packets must follow, without listing a million earlier ones again."""
    schedule = Schedule(even(47), drafters, accumulate, steps=40, validation_rows=3, validation_every=4)
    everything = list(schedule.assignments())
    for completed in (0, 1, 4, 17, 39, 40):
        assert list(schedule.assignments(completed)) == [assignment for assignment in everything if assignment.step > completed]
    assert next(Schedule(even(10**6), 1, 1, steps=10**9).assignments(10**9 - 1)).number == 10**9 - 1


@pytest.mark.parametrize("drafters", range(1, 7))
def test_validation_covers_its_rows_after_its_steps(drafters):
    """A held-out row read twice, or a drafter without a packet in the last round, would bias tau or hang the job."""
    schedule = Schedule(even(60), drafters, 1, steps=10, validation_rows=7, validation_every=4)
    validated = {}
    for assignment in schedule.assignments():
        if assignment.kind == VALIDATE:
            validated.setdefault(assignment.step, []).append(schedule.row_of(assignment)[1])
            assert assignment.drafter == assignment.number % drafters
    assert list(validated) == [4, 8, 10]
    for rows in validated.values():
        assert [row for row in rows if row != EMPTY_ROW] == list(range(7)) and len(rows) % drafters == 0
        assert len(rows) - 7 < drafters
    assert not any(assignment.kind == VALIDATE for assignment in Schedule(even(60), drafters, 1, steps=10).assignments())
    kinds = [assignment.kind for assignment in schedule.assignments() if assignment.step == 4]
    assert kinds == sorted(kinds) == [TRAIN] * drafters + [VALIDATE] * len(validated[4])


def test_steps_follow_from_epochs_even_in_parts():
    assert Schedule(even(100), 2, 5, epochs=0.29).steps == 3
    assert Schedule(even(100), 1, 1, epochs=0.29).steps == 29
    assert Schedule(even(100), 1, 1, epochs=0.001).steps == 1
    assert Schedule(even(105), 2, 5, epochs=6).steps == 60
    assert Schedule(even(105), 2, 5, epochs=6, steps=7).steps == 7


def test_too_little_data_for_one_step_is_refused():
    """Instead of a run that ends at once, or one that divides by zero."""
    with pytest.raises(UserError, match=r"5 rows, one step takes 2 drafters x optim.accumulate=3 = 6"):
        Schedule(even(5), 2, 3, epochs=1)
