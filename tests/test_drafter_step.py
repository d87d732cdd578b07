"""The drafter's benchmark: its useful work must be what torch counts, or every share of the ceiling is wrong."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import drafter_step


def test_useful_work_equals_torchs_count():
    """Counted on the path of plain products, where all pairs are computed and attention's backward costs two forwards."""
    spec, anchors, row_tokens = drafter_step.TINY, 8, 24
    step = drafter_step.Step(spec, torch.float32, torch.device("cpu"))
    row = drafter_step.random_row(np.random.default_rng(0), row_tokens, 1, spec.vocab_size)
    blocks, features = drafter_step.draw_blocks(spec, row, anchors), step.draw(row_tokens).requires_grad_()
    queries = anchors * spec.block_size
    flop = drafter_step.useful_flop(spec, row_tokens, anchors, queries * (row_tokens + queries))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step(features, blocks)
    unwanted = 3 * 2 * anchors * spec.hidden_size * (spec.heads * spec.head_dim + 3 * spec.intermediate_size)  # slot 0 of the last layer
    projected = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    unwanted += 3 * 2 * (queries - anchors - 1) * spec.hidden_size * projected  # masked slots of the first layer, projected once
    assert counter.get_total_flops() + unwanted == flop["matrices"] + flop["head"] + flop["attention"] * 3 // 3.5


def test_useful_work_of_the_8b_row_is_the_published_figure():
    spec, row_tokens, anchors = drafter_step.SPEC, 3072, 512
    row = drafter_step.random_row(np.random.default_rng(0), row_tokens, 1, spec.vocab_size)
    blocks = drafter_step.draw_blocks(spec, row, anchors)
    flop = drafter_step.useful_flop(spec, row_tokens, anchors, drafter_step.visible_pairs(blocks, spec))
    assert sum(flop.values()) / 1e12 == pytest.approx(72.5, abs=0.2)
    dense = drafter_step.attention.dense_mask(drafter_step.attention.MaskSpec(64, 8, 4), *small_row()).sum()
    assert dense == drafter_step.visible_pairs(small_blocks(), dataclasses.replace(spec, block_size=4))


def small_blocks():
    row = drafter_step.random_row(np.random.default_rng(1), 64, 3, 97, even=False)
    return drafter_step.draw_blocks(drafter_step.TINY, row, 8)


def small_row():
    blocks = small_blocks()
    return blocks.anchor_A, blocks.lo_A, blocks.keep_A


def run_tiny(capsys, *flags):
    drafter_step.main(["--tiny", *flags])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_times_run_tiny(capsys):
    cases = run_tiny(capsys, "--profile")
    steps = [case for case in cases if case["benchmark"] == "drafter_step"]
    assert {"row_tokens", "median_ms", "ktok_per_s", "tflops", "share_of_ceiling", "peak_gib", "compiles"} <= set(steps[0])
    assert [case["activation_checkpointing"] for case in steps] == [False, False, True]
    assert cases[-1]["sustained_tflops"] > 0


def test_check_and_sweep_run_tiny(capsys):
    cases = run_tiny(capsys, "--check", "--sweep")
    good = [case["good"] for case in cases if case["benchmark"] == "drafter_step_check"]
    assert good == [True, True]
    assert [case["packets"] for case in cases if case["benchmark"] == "drafter_step_steady"] == [5]
    assert cases[-1]["forward_ms"] > 0
