"""What users watch for weeks: the console line, metrics.jsonl and TensorBoard say what is true, and the same thing."""

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import train_drafter
from common import config_reader
from common.data.schedule import TRAIN, Schedule
from common.distributed import stop
from common.objective.blocks import draw_anchors
from common.training import clock
from common.training.clock import CHECKPOINT, VALIDATION, RunClock
from common.training.costs import DrafterFlop
from common.training.log import FIRST_PLOTS, Log, duration
from common.training.plan import RunPlan, make_plan
from common.training.run_directory import ResumePoint, RunDirectory

RECORD = {
    "step": 20, "epoch": 1.5, "loss": 2.5, "tau": 2.25, "lr": 1e-3, "grad_norm": 0.5, "accuracy": [0.5, None, 0.125],
    "tokens_per_s": 12345.6, "mfu": 0.414, "wait_share": 0.02, "peak_memory_gib": 61.23, "tokens_seen": 10**9, "kernels/compiles": 4,
    "skipped": 0.0,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run directory that is ready for records."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare(ResumePoint(None, None))
    return directory


def test_tensorboard_groups_what_belongs_together(directory):
    """Thirty plots in one heap are looked at by nobody; metrics.jsonl keeps the flat names that scripts read."""
    log = Log(directory, 1, 100, tensorboard=True, config_text="seed: 0")
    log.write(RECORD)
    log.write({"step": 20, "heldout_tau": 2.5, "heldout_tau_tree": 3.5, "heldout_tau/code": 2.75})
    log.close()
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "health/grad_norm", "health/kernels_compiles", "health/peak_memory_gib", "health/skipped", "heldout/tau", "heldout/tau/code",
        "heldout/tau_tree", "slots/accuracy/01", "slots/accuracy/03", "speed/mfu", "speed/tokens_per_s", "speed/wait_share", "train/epoch",
        "train/loss", "train/lr", "train/tau", "train/tokens_seen",
    ]  # fmt: skip
    assert [(event.step, event.value) for event in events.Scalars("heldout/tau")] == [(20, 2.5)]
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts == FIRST_PLOTS and len(charts) == 4
    for tags in charts.values():
        assert all(any(re.match(tag, known) for known in events.Tags()["scalars"]) for tag in tags), "a first plot would be empty"
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert lines == [RECORD, {"step": 20, "heldout_tau": 2.5, "heldout_tau_tree": 3.5, "heldout_tau/code": 2.75}]


def test_the_console_shows_a_record_in_one_line(directory, capsys):
    """What does not fit a line is not read; utilisation is left out where no peak is known, rather than shown as zero."""
    log = Log(directory, 1, 100, tensorboard=False, config_text="")
    log.write(RECORD, left_s=3 * 3600 + 299)
    log.write({key: value for key, value in RECORD.items() if key not in ("mfu", "tau")})
    log.write({"step": 20, "heldout_tau": 2.5})
    first, second = capsys.readouterr().out.splitlines()
    numbers = "epoch 1.50  loss 2.500  tau 2.25  12,346 tokens/s  MFU 41%  61.2 GiB  wait 2%  ETA 3 h 05 min"
    assert first == f"[####................] step 20/100  {numbers}"
    assert "tau -  12,346 tokens/s  61.2 GiB" in second and second.endswith("ETA ?")
    assert [duration(s) for s in (0.4, 119, 121, 7000, 7300)] == ["0 s", "119 s", "2 min", "117 min", "2 h 02 min"]


class Hand:
    """A clock that stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_the_end_is_told_by_what_was_measured(monkeypatch):
    """A run that validates for an hour every epoch ends hours after an ETA of its steps alone; and its rate looks halved at that record."""
    hand = Hand(monkeypatch)
    schedule = Schedule(lambda epoch: 40, 1, 1, steps=100, validation_rows=3, validation_every=30)
    run = RunClock(torch.device("cpu"), schedule, checkpoint_every=25)
    hand.now += 500  # the start: compiling, filling the links
    assert run.lap() == (500, 500) and run.left_s(10) is None
    hand.now += 20
    assert run.lap() == (20, 20)
    assert run.left_s(20) == 80 * 2
    hand.now += 20
    with run.apart(VALIDATION):
        hand.now += 7
    with pytest.raises(ZeroDivisionError), run.apart(VALIDATION):
        hand.now += 9
        1 / 0  # noqa: B018
    assert run.lap() == (20, 36)
    with run.apart(CHECKPOINT):
        hand.now += 3
    hand.now += 20
    assert run.lap() == (20, 23)
    assert run.left_s(40) == pytest.approx(60 * 2 + 3 * 8 + 3 * 3), "validations after 60, 90 and 100, checkpoints after 50, 75 and 100"
    assert run.left_s(60) == pytest.approx(40 * 60 / 50 + 2 * 8 + 2 * 3), "60 is a validation that is over"
    assert run.left_s(75) == pytest.approx(25 * 60 / 65 + 2 * 8 + 2 * 3), "75's checkpoint follows its record"
    assert run.left_s(100) == 3, "the last checkpoint"


def test_a_ctrl_c_waits_for_the_averaging_and_the_checkpoint(monkeypatch):
    """Ended after 20 s, a run that averages every 24 s and saves for 15 s loses what it has learnt since its last checkpoint."""
    hand = Hand(monkeypatch)
    schedule = Schedule(lambda epoch: 40, 1, 1, steps=100, validation_rows=3, validation_every=30)
    run = RunClock(torch.device("cpu"), schedule, checkpoint_every=25)
    run.begin(40)
    hand.now += 5
    run.lap()
    assert run.stop_s(50, interval=50) == 1.5 * (25 + clock.UNSEEN_S), "no checkpoint was seen yet"
    for what, seconds in ((CHECKPOINT, 15), (CHECKPOINT, 12), (VALIDATION, 6)):
        with run.apart(what):
            hand.now += seconds
    assert run.stop_s(50, interval=50) == 1.5 * (25 + 6 + 15)
    assert run.stop_s(50, interval=1) == 1.5 * (0.5 + 6 + 15)


def test_a_stop_that_slurm_or_torchrun_would_cut_short_is_said(monkeypatch, tmp_path):
    """A job that is ended in the middle of its last checkpoint has lost what it learnt since the one before."""
    for name in ("STOP_WARNING_S", "TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert stop.slow_stop_advice(1000, tmp_path) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert stop.slow_stop_advice(29, tmp_path) is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=45" in stop.slow_stop_advice(45, tmp_path)
    monkeypatch.setenv("STOP_WARNING_S", "120")
    assert "torchrun" in stop.slow_stop_advice(119, tmp_path) and "--signal=B:USR1@130" in stop.slow_stop_advice(130, tmp_path)
    script = (Path(__file__).parent.parent / "launch/slurm.sbatch").read_text()
    assert "--signal=B:USR1@120" in script and "STOP_WARNING_S=${STOP_WARNING_S:-120}" in script, "one number, in both places"


def test_a_stop_request_waits_as_long_as_was_measured(monkeypatch):
    """What was measured before the Ctrl-C and what a target hears after it both count; nothing is waited for longer once it is over."""
    armed = []

    class Timer:
        """Never fires."""

        def __init__(self, seconds: float, *_: object):
            armed.append(seconds)

        def start(self) -> None:
            """Nothing."""

        cancel = start

    monkeypatch.setattr(stop, "threading", SimpleNamespace(Timer=Timer, Lock=threading.Lock, Thread=threading.Thread))
    with stop.StopRequest() as request:
        request.expect(3.0)
        assert request.grace_s == stop.INTERRUPT_GRACE_S and not armed
        request.expect(70.0)
        request._interrupt()
        request.expect(100.0)
        assert [round(seconds) for seconds in armed] == [70, 100] and request.requested
        request._interrupt()  # the terminal's echo


def plan_and_records(preset: Path, folder: Path, *overrides: str) -> tuple[RunPlan, list[dict]]:
    """Run in this process; the run's plan and its training records."""
    overrides = (f"log.dir={folder}", *overrides)
    train_drafter.main(["--config", str(preset), *overrides])
    drafters = 2 if "topology.drafters=2" in overrides else 1
    plan = make_plan(config_reader.load(preset, overrides), SimpleNamespace(first_per_host=lambda find: find(), drafters=drafters))
    return plan, [record for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in record]


def packets(plan: RunPlan, first_step: int, last_step: int) -> list:
    """(assignment, row) of all training packets of these steps."""
    found = [a for a in plan.schedule.assignments(first_step - 1) if a.step <= last_step and a.kind == TRAIN]
    return [(assignment, plan.load_row(assignment)[2]) for assignment in found]


@pytest.mark.parametrize("drafters", [1, 2])
def test_tokens_seen_are_the_tokens_that_were_trained_on(tiny_preset, tiny_heldout, tmp_path, drafters):
    """Runs are compared at equal tokens: padding, held-out rows and the second drafter's share must not be miscounted, nor a resume."""
    mode = ["topology.mode=threads", "topology.targets=2", "topology.drafters=2"] if drafters == 2 else []
    overrides = [*mode, f"validation.path={tiny_heldout}", "validation.every=4", "log.every=3"]
    plan_and_records(tiny_preset, tmp_path, *overrides, "optim.steps=8", "optim.schedule=constant")
    plan, records = plan_and_records(tiny_preset, tmp_path, *overrides, "optim.steps=12", "optim.schedule=constant")
    assert [record["step"] for record in records] == [3, 6, 8, 9, 12]
    for record in records:
        assert record["tokens_seen"] == sum(row.valid for _, row in packets(plan, 1, record["step"]))
        assert record["epoch"] == record["step"] / plan.schedule.steps_per_epoch
        assert 0.05 < record["peak_memory_gib"] < 64 and "mfu" not in record


def test_rates_are_of_training_alone(tiny_preset, tiny_heldout, tmp_path, monkeypatch):
    """A rate that dips at every validation hides the dip that means something."""
    monkeypatch.setattr(RunClock, "lap", lambda self: (2.0, 4.0))
    monkeypatch.setattr("common.training.run.peak_flop_per_s", lambda device, dtype: 1e9)
    plan, records = plan_and_records(tiny_preset, tmp_path, f"validation.path={tiny_heldout}", "validation.every=4", "log.every=6")
    flop = DrafterFlop.of(plan.drafter, False)
    for record in records:
        rows = packets(plan, record["step"] - 5, record["step"])
        useful = sum(flop.packet(row, *draw_anchors(row, plan.anchors, plan.config.seed, a.number)) for a, row in rows)
        assert record["tokens_per_s"] == sum(row.valid for _, row in rows) / 2.0
        assert record["mfu"] == pytest.approx(useful / (2.0 * 1e9), rel=1e-9) and useful > 0
