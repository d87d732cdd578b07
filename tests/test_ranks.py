"""The helpers the distributed tests stand on: a rank that fails or hangs must fail the test that started it."""

import sys
import time

import pytest
import torch
import torch.distributed
from ranks import run_ranks


def _sum_of_ranks(rank, ranks):
    value = torch.tensor([float(rank)])
    torch.distributed.all_reduce(value)
    return value.item()


def _fail_on_last(rank, ranks):
    if rank == ranks - 1:
        raise ValueError("out of cheese")
    torch.distributed.barrier()


def _hang_on_first(rank, ranks):
    if rank == 0:
        time.sleep(600)


def test_ranks_really_communicate():
    assert run_ranks(_sum_of_ranks, 3) == [3.0, 3.0, 3.0]


def test_a_failing_rank_fails_the_test():
    with pytest.raises(AssertionError, match="out of cheese"):
        run_ranks(_fail_on_last, 2)


def test_a_hanging_rank_is_named():
    with pytest.raises(AssertionError, match=r"ranks \[0.* of 2 have not answered"):
        run_ranks(_hang_on_first, 2, timeout_s=3)


def _has_imported_the_script(rank, ranks):
    return "train_drafter" in sys.modules


def test_ranks_are_forked_with_everything_imported():
    """Else each rank of each test imports for seconds, and all tests together take twice as long."""
    assert run_ranks(_has_imported_the_script, 1) == [True]
