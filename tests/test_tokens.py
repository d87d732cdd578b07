"""Rows and the schedule: what is read once per epoch, and by whom."""

from collections import Counter

import numpy as np
import pytest
from test_store import write_store

from common.data.packing import pack_rows
from common.data.rows import EMPTY_ROW, RowLoader
from common.data.schedule import TRAIN, VALIDATE, Assignment, Schedule, serving_target
from common.data.store import TokenStore
from common.errors import UserError


def first_fit_decreasing(lengths, room):
    """How many rows the textbook's loop over rows needs."""
    rows = []
    for length in sorted(lengths, reverse=True):
        for i, left in enumerate(rows):
            if left >= length:
                rows[i] -= length
                break
        else:
            rows.append(room - length)
    return len(rows)


@pytest.mark.parametrize("pack_tokens", [16, 64, 3072])
def test_rows_hold_every_document_once_and_as_few_as_first_fit(pack_tokens):
    """A document lost or doubled is data lost or doubled; a badly filled row is device time spent on padding."""
    draw = np.random.default_rng(pack_tokens)
    lengths = draw.integers(1, pack_tokens + 20, 500)
    rows = pack_rows(lengths, pack_tokens, None, "truncate", seed=0)
    assert sorted(rows.documents.tolist()) == list(range(500))
    cut = np.minimum(lengths, pack_tokens)
    assert all(cut[rows.documents_of(r)].sum() <= pack_tokens for r in range(len(rows)))
    assert len(rows) == first_fit_decreasing(cut.tolist(), pack_tokens)
    assert rows.truncated == (lengths > pack_tokens).sum() and rows.dropped == 0
    assert rows.tokens == cut.sum() and rows.fill == pytest.approx(cut.sum() / (len(rows) * pack_tokens))


def test_long_documents_are_cut_or_dropped_and_counted():
    """A user who loses documents must learn how many."""
    lengths = [4, 9, 10, 11, 30]
    cut = pack_rows(lengths, 20, 10, "truncate", seed=0)
    assert (cut.truncated, cut.dropped, cut.tokens, len(cut.documents)) == (2, 0, 43, 5)
    drop = pack_rows(lengths, 20, 10, "drop", seed=0)
    assert (drop.truncated, drop.dropped, drop.tokens, sorted(drop.documents.tolist())) == (0, 2, 23, [0, 1, 2])
    assert len(pack_rows([30], 20, None, "drop", seed=0)) == 0
    with pytest.raises(UserError, match="raise pack_tokens"):
        pack_rows(lengths, 20, 21, "truncate", seed=0)


def test_packing_follows_its_seed_and_mixes_lengths():
    """Ranks must pack alike; and the first rows, which validation takes, must not be the longest documents."""
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    one, same, other = (pack_rows(lengths, 128, None, "truncate", seed) for seed in (3, 3, 4))
    assert one.documents.tolist() == same.documents.tolist() != other.documents.tolist()
    first, last = (np.concatenate([lengths[one.documents_of(r)] for r in part]) for part in (range(200), range(len(one) - 200, len(one))))
    assert abs(first.mean() - last.mean()) < 8


def test_documents_of_one_length_share_a_row_by_lot():
    """Neighbours in a file are about the same: side by side in one row they would all go into one step."""
    rows = {seed: pack_rows([8] * 100, 16, None, "truncate", seed) for seed in (0, 1)}
    pairs = {seed: {frozenset(r.documents_of(i).tolist()) for i in range(len(r))} for seed, r in rows.items()}
    assert pairs[0] != pairs[1] and sum(max(pair) - min(pair) == 1 for pair in pairs[0]) < 10


def test_a_million_documents_are_packed_tightly():
    """Every start of a run packs; with a loop over documents a big store would keep all devices waiting for minutes."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 0.9, 1_000_000), 2, 20_000).astype(int)
    rows = pack_rows(lengths, 3072, None, "truncate", seed=0)
    assert len(rows.documents) == 1_000_000 and rows.fill > 0.999


def test_a_row_holds_whole_documents_and_marks_where_they_begin(tmp_path):
    """`document_start` is what keeps documents from seeing each other, padding included."""
    store = TokenStore.open(write_store(tmp_path / "store", lengths=(5, 3, 8, 30)))
    loader = RowLoader(store, pack_rows(store.lengths, 16, 12, "truncate", seed=1))
    seen = []
    for r in range(len(loader)):
        row, at = loader.row(r), 0
        for document in loader.documents_of(r):
            ids, mask = (values[:12] for values in store.document(document))
            assert row.tokens[at : at + len(ids)].tolist() == ids.tolist()
            assert row.loss_mask[at : at + len(ids)].tolist() == mask.tolist()
            assert (row.document_start[at : at + len(ids)] == at).all()
            at += len(ids)
            seen.append(document)
        assert row.valid == at and row.documents == len(loader.documents_of(r))
        assert (row.document_start[at:] == at).all() and not row.loss_mask[at:].any()
    assert sorted(seen) == [0, 1, 2, 3]
    empty = loader.row(EMPTY_ROW)
    assert (empty.valid, empty.documents, len(empty.tokens), empty.loss_mask.sum()) == (0, 0, 16, 0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("rows", [36, 37, 101])
@pytest.mark.parametrize("drafters", range(1, 7))
def test_every_row_is_trained_on_once_per_epoch(drafters, rows, accumulate):
    """A row read twice or never is weight that nobody asked for; only the stated remainder may be missing, another one each epoch."""
    schedule = Schedule(rows, drafters, accumulate, seed=5, epochs=3)
    per_epoch = {}
    for assignment in schedule.assignments():
        epoch, row = schedule.row_of(assignment)
        per_epoch.setdefault(epoch, []).append(row)
        assert assignment.step == assignment.number // (drafters * accumulate) + 1
        assert assignment.drafter == assignment.number % drafters
    assert schedule.dropped_rows == rows % (drafters * accumulate)
    assert list(per_epoch) == [0, 1, 2]
    assert all(len(set(seen)) == len(seen) == rows - schedule.dropped_rows for seen in per_epoch.values())
    assert per_epoch[0] != per_epoch[1] != per_epoch[2]
    if not schedule.dropped_rows:
        assert all(sorted(seen) == list(range(rows)) for seen in per_epoch.values())


@pytest.mark.parametrize("targets", range(1, 7))
@pytest.mark.parametrize("drafters", range(1, 7))
@pytest.mark.parametrize("groups", [1, 2])
def test_work_is_even_over_targets_and_drafters(groups, drafters, targets):
    """With 5 targets and 2 drafters no target may idle while another is late."""
    everybody = groups * drafters
    schedule = Schedule(everybody * 60, everybody, 1, seed=0, epochs=1)
    given, taken = Counter(), Counter()
    for assignment in schedule.assignments():
        group, place = divmod(assignment.drafter, drafters)
        target = serving_target(assignment, place, drafters, targets, everybody)
        packet_of_cell = assignment.number // everybody * drafters + place
        assert target == packet_of_cell % targets
        given[group, target] += 1
        taken[assignment.drafter] += 1
    assert len(given) == groups * targets and max(given.values()) - min(given.values()) <= 1
    assert set(taken.values()) == {60}


@pytest.mark.parametrize(("drafters", "accumulate"), [(1, 1), (2, 3), (5, 2)])
def test_a_deal_goes_on_where_it_stopped(drafters, accumulate):
    """After a resume the same packets must follow, without dealing a million earlier ones again."""
    schedule = Schedule(47, drafters, accumulate, seed=1, steps=40, validation_rows=3, validation_every=4)
    everything = list(schedule.assignments())
    for completed in (0, 1, 4, 17, 39, 40):
        assert list(schedule.assignments(completed)) == [assignment for assignment in everything if assignment.step > completed]
    assert next(Schedule(10**6, 1, 1, seed=0, steps=10**9).items(10**9 - 1)).number == 10**9 - 1


@pytest.mark.parametrize("drafters", range(1, 7))
def test_validation_covers_its_rows_after_its_steps(drafters):
    """A held-out row read twice, or a drafter without a packet in the last round, would bias tau or hang the job."""
    schedule = Schedule(60, drafters, 1, seed=0, steps=10, validation_rows=7, validation_every=4)
    validated = {}
    for assignment in schedule.assignments():
        if assignment.kind == VALIDATE:
            validated.setdefault(assignment.step, []).append(schedule.row_of(assignment)[1])
            assert assignment.drafter == assignment.number % drafters
    assert list(validated) == [4, 8, 10]
    for rows in validated.values():
        assert [row for row in rows if row != EMPTY_ROW] == list(range(7)) and len(rows) % drafters == 0
        assert len(rows) - 7 < drafters
    assert not any(assignment.kind == VALIDATE for assignment in Schedule(60, drafters, 1, seed=0, steps=10).items())
    kinds = [assignment.kind for assignment in schedule.assignments() if assignment.step == 4]
    assert kinds == sorted(kinds) == [TRAIN] * drafters + [VALIDATE] * len(validated[4])


def test_steps_follow_from_epochs_even_in_parts():
    assert Schedule(100, 2, 5, seed=0, epochs=0.29).steps == 3
    assert Schedule(100, 1, 1, seed=0, epochs=0.29).steps == 29
    assert Schedule(100, 1, 1, seed=0, epochs=0.001).steps == 1
    assert Schedule(105, 2, 5, seed=0, epochs=6).steps == 60
    assert Schedule(105, 2, 5, seed=0, epochs=6, steps=7).steps == 7


def test_too_little_data_for_one_step_is_refused():
    """Instead of a run that ends at once, or one that divides by zero."""
    with pytest.raises(UserError, match=r"5 rows, one step takes 2 drafters x optim.accumulate=3 = 6"):
        Schedule(5, 2, 3, seed=0, epochs=1)


def test_order_depends_on_seed_and_epoch_alone():
    """Solo, threads and processes must train on the same rows in the same order."""
    orders = [
        [Schedule(50, d, 1, seed, epochs=2).row_of(Assignment(TRAIN, 1, n, 0))[1] for n in range(50)]
        for d, seed in ((1, 0), (2, 0), (1, 1))
    ]
    assert orders[0] == orders[1] != orders[2]
    second = [Schedule(50, 1, 1, 0, epochs=2).row_of(Assignment(TRAIN, 1, 50 + n, 0))[1] for n in range(50)]
    assert second != orders[2], "seeds next to each other must not share their epochs"
