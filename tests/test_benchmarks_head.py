"""The benchmarks of the head and of the optimiser run, and count the work they claim."""

import json

import pytest
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import head_loss, optimizer_step
from common.config import ObjectiveConfig
from common.objective.block_loss import base_loss


@pytest.mark.parametrize("benchmark", [head_loss, optimizer_step])
def test_each_case_is_one_json_line(benchmark, capsys):
    """A benchmark that no longer runs is found on the day it is needed, on a rented GPU."""
    benchmark.main(["--tiny"])
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert cases and all(0 < c["min_ms"] <= c["median_ms"] <= c["max_ms"] and c["torch"] and c["device"] == "cpu" for c in cases)


def test_useful_work_is_what_the_fused_head_does():
    """Two products a slot, no more: the share of the ceiling is measured against this count."""
    hidden, vocabulary, blocks = head_loss.inputs(8, head_loss.TINY, "cpu")
    with FlopCounterMode(display=False) as counter:
        base_loss(hidden, vocabulary, blocks, ObjectiveConfig()).loss_sum.backward()
    assert counter.get_total_flops() == head_loss.useful_flop(8, head_loss.TINY)
