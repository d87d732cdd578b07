"""The benchmarks of target, links and whole steps run: one that no longer does is found on the day it is needed, on a rented GPU."""

import json

import pytest
from ranks import run_script, torchrun


def cases_of(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_target_capture_is_one_json_line_a_case():
    cases = cases_of(run_script("benchmarks/target_capture.py", "--tiny"))
    assert cases and all(case["ktok_per_s"] > 0 and case["device"] == "cpu" for case in cases)


def test_end_to_end_compares_the_whole_with_its_parts():
    """The efficiency decides whether overlapping work is worth the trouble: it must be the ratio that its docstring says."""
    (case,) = cases_of(run_script("benchmarks/end_to_end.py", "--tiny"))
    parts = 1 / (1 / case["target_ktok_per_s"] + 1 / case["drafter_ktok_per_s"])
    assert case["efficiency"] == pytest.approx(case["ktok_per_s"] / parts, rel=1e-2)


def test_scaling_counts_targets_and_drafters():
    (case,) = cases_of(torchrun("benchmarks/scaling.py", "--drafters", "2", "--tiny", ranks=3))
    assert (case["targets"], case["drafters"]) == (1, 2) and case["ktok_per_s"] > 0
