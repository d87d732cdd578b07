"""Every benchmark runs and says what it should: one that no longer does is found on the day it is needed, on a rented GPU."""

import importlib
import json
import multiprocessing

import pytest
from ranks import Job

from benchmarks import engines

pytestmark = pytest.mark.benchmark


def cases_of(name, *arguments, ranks=1, sabotage=None):
    """What `python -m benchmarks.NAME` prints, case by case."""
    with Job(arguments, ranks, sabotage, f"benchmarks.{name}") as job:
        assert set(job.wait(timeout_s=120)) == {0}, job.output[-4000:]
        return [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", ["head_loss", "optimizer_step", "target_capture"])
def test_times_of_a_part(name):
    """Who runs it on a GPU compares these with the tables of benchmarks/README.md."""
    cases = cases_of(name, "--tiny")
    check_times([case for case in cases if "median_ms" in case])


def check_times(cases):
    assert len(cases) >= 2
    assert all(0 < case["min_ms"] <= case["median_ms"] <= case["max_ms"] and case["torch"] and case["device"] == "cpu" for case in cases)


def test_drafter_step_says_where_the_time_goes():
    """The share of the ceiling and the profile are what the work on the step is steered by."""
    cases = cases_of("drafter_step", "--tiny", "--profile")
    steps = [case for case in cases if case["benchmark"] == "drafter_step"]
    assert [case["activation_checkpointing"] for case in steps] == [False, False, True]
    check_times(steps)
    for step in steps:
        assert step["share_of_ceiling"] == pytest.approx(step["tflops"] / step["ceiling_tflops"], rel=1e-3)
    profiles = [case for case in cases if case["benchmark"] == "drafter_step_profile"]
    assert len(profiles) == 2 and all(sum(v for k, v in case.items() if k.endswith(" ms")) > 0 for case in profiles)
    assert cases[-1]["sustained_tflops"] > 0


def test_drafter_step_checks_itself():
    """If the useful work is not what torch counts, every share of the ceiling is wrong; if the values are not, so is every time."""
    cases = cases_of("drafter_step", "--tiny", "--check")
    assert [case["check"] for case in cases] == ["useful work", "values", "values", "steady"]
    assert all(case["good"] for case in cases)
    assert cases[0]["useful_tflop"] == pytest.approx(72.5, abs=0.2)  # the figure in README.md, of the 8B shape


def test_head_loss_checks_itself():
    """Two products a slot, no more: the share of the ceiling is measured against this count."""
    cases = cases_of("head_loss", "--check")
    assert cases[0]["counted"] == cases[0]["useful"] > 0


def test_attention_sweep_runs():
    """The tilings of the kernels come from it."""
    cases = cases_of("attention_sweep", "--tiny")
    assert cases[-1]["forward_ms"] > 0


def test_end_to_end_compares_the_whole_with_its_parts():
    """The efficiency decides whether overlapping work is worth the trouble: it must be the ratio that its docstring says."""
    (case,) = cases_of("end_to_end", "--tiny", "--steps", "3")
    parts = 1 / (1 / case["target_ktok_per_s"] + 1 / case["drafter_ktok_per_s"])
    assert case["efficiency"] == pytest.approx(case["ktok_per_s"] / parts, rel=1e-2)


def test_scaling_counts_targets_and_drafters():
    """The figures of two GPUs and of eight are compared by it."""
    (case,) = cases_of("scaling", "--drafters", "2", "--stages", "2", "--tiny", "--steps", "5", ranks=4)
    assert (case["targets"], case["stages"], case["drafters"]) == (1, 2, 2) and case["ktok_per_s"] > 0 and case["handshake_us"] > 0


def test_stages_compares_chains_with_one_stage():
    """What a hop costs decides whether a target that just fits one GPU is better spread over two."""
    cases = cases_of("stages", "--tiny")
    assert [case["stages"] for case in cases] == [1, 2, 3] and all(case["bit_equal"] and case["ms_per_packet"] > 0 for case in cases)
    assert [len(case["loading"]) for case in cases] == [1, 2, 3] and cases[0]["handover_share"] == 0


@pytest.mark.parametrize("weights", ["random", "real"])
def test_decode_times_every_way_of_decoding(weights, tiny_target, tiny_preset, tmp_path):
    """From the break-even acceptance length a user reads whether a drafter pays on his GPU."""
    folders = []
    if weights == "real":
        with Job(["--config", tiny_preset, f"log.dir={tmp_path}/run", "optim.steps=1"]) as job:
            assert job.wait() == [0], job.output[-4000:]
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "count 7"}\n{"prompt": "count 30"}\n')
        folders = ["--target", tiny_target, "--drafter", tmp_path / "run/export/latest", "--prompts", tmp_path / "prompts.jsonl"]
    cases = cases_of("decode", "--tiny", "--eager", *folders)
    assert [case["method"] for case in cases] == 2 * ["plain", "chain", "tree of 16", "tree of 64", "tree of 256"]
    assert all(case["break_even_tau"] > 0 and case["tokens"] == cases[0]["tokens"] for case in cases)
    eager, recorded = cases[:5], cases[5:]
    assert [case["tau"] for case in eager] == [case["tau"] for case in recorded]


def modes_are_forked(rank):
    """The server that kernel_race starts, for a GPU's sake, would import once more what is here."""
    importlib.import_module("torch._inductor.compile_fx")
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork


def test_kernel_race_runs_every_guard():
    """An error of the cache here is an error on the GPU; a naive guard that fails for another reason makes the comparison worthless."""
    arguments = ["--tiny", "--seconds", "0.01", "--warm-calls", "1"]
    *naive, cache = cases_of("kernel_race", *arguments, sabotage=modes_are_forked)
    assert [case["mode"] for case in naive] == ["singleton", "dict"]
    assert all(case["other"] == {} and case["compiled"] + case["errors"] >= case["shapes"] for case in naive)
    assert cache["errors"] == 0 and cache["other"] == {} and not (cache["stuck"] or cache["hangs"])
    assert cache["compiled"] == cache["shapes"] < cache["calls"]


def test_engines_complains_of_what_does_not_hold():
    """What an engine does otherwise than we must fail the command, not stand in a table that nobody reads."""
    served = {"answers": 2, "accepted": 101.0, "tau": 3.0, "tokens_per_s": 5.0, "baseline": {"equal": 2, "speedup": 1.5}}
    answers = [{"accepted": [50, 10]}, {"accepted": [40]}]
    good = {"served": served, "sample": {"differences": [None, None]}, "per_prompt": answers, "tau": 2.9}
    assert engines.complaints(good) == []
    assert engines.row("vllm", good) == "| vllm | 2 | 2 | 2 | 3.00 | 2.90 | 101, 100 | 5.0 | 1.50 |"
    for changes, words in (
        ({"served": served | {"accepted": 103.0}}, "103 drafts accepted, ours 100"),
        ({"served": served | {"accepted": None}}, "no speculative counters"),
        ({"served": served | {"baseline": {"equal": 1, "speedup": 1.5}}}, "1 of 2 answers equal plain serving"),
        ({"sample": {"differences": [None, {"index": 3, "score_gap": 0.1}]}}, "1 of 2 answers are not ours"),
    ):
        (found,) = engines.complaints(good | changes)
        assert words in found
