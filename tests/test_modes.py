"""One seed, one run: wherever the workers sit, the same numbers come out, bit by bit."""

import errno
import json
import threading

import pytest
import torch
import yaml
from ranks import Job

import train_drafter
from common.drafter import export
from common.errors import UserError
from common.training import run_directory
from common.training.checkpoint import open_checkpoint
from serve_targets import Server


@pytest.fixture
def preset(tiny_target, tiny_store, tiny_heldout, tmp_path):
    """A YAML preset of a twelve-step run; returns its path."""
    tree = {
        "target": {"path": str(tiny_target), "dtype": "float32"},
        "drafter": {"layers": 2, "taps": [0, 2], "block_size": 8, "dtype": "float32"},
        "data": {"path": str(tiny_store), "pack_tokens": 256},
        "optim": {"lr": 1e-3, "steps": 12},
        "sync": {"every": 4},
        "checkpoint": {"every": 4},
        "validation": {"path": str(tiny_heldout), "every": 8},
        "log": {"every": 1, "tensorboard": False},
        "topology": {"timeout_s": 60},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def records(folder):
    """A run's losses and held-out taus in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], key, r[key]) for r in lines for key in ("loss", "grad_norm", "tau", "heldout_tau") if key in r]


def solo(preset, folder, *overrides):
    train_drafter.main(["--config", str(preset), f"log.dir={folder}", *overrides])
    return records(folder)


def processes(preset, ranks, folder, *overrides):
    with Job(["--config", preset, f"log.dir={folder}", *overrides], ranks) as job:
        assert set(job.wait()) == {0}, job.output[-4000:]
    return records(folder)


def test_one_drafter_learns_the_same_in_every_mode(preset, tmp_path):
    """Otherwise a result on one device says nothing about eight: here topology would change what is learnt."""
    alone = solo(preset, tmp_path / "solo")
    assert len(alone) == 12 * 3 + 2
    assert solo(preset, tmp_path / "threads", "topology.mode=threads", "topology.targets=2", "topology.drafters=1") == alone
    assert processes(preset, 3, tmp_path / "processes") == alone  # what torchrun starts learns the same: test_failures.py, test_launch.py


@pytest.mark.parametrize("mode", ["solo", "threads"])
def test_a_job_that_failed_gives_its_run_directory_back(preset, tmp_path, monkeypatch, mode):
    """A notebook keeps the traceback, and with it the job: the next try must not be refused by its own process."""
    mode = (f"topology.mode={mode}",)
    with monkeypatch.context() as patch:
        patch.setattr(train_drafter.Trainer, "train_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            solo(preset, tmp_path, *mode)
    assert solo(preset, tmp_path, *mode) and kept.traceback


def test_two_drafters_agree_in_threads_and_processes_and_are_equal_after_an_averaging(preset, tmp_path):
    """Otherwise replicas drift apart unnoticed, and the exported drafter is only one of them."""
    odd = "validation.rows=1"  # one of the two drafters validates a row that only fills the round
    threads = solo(preset, tmp_path / "threads", "topology.mode=threads", "topology.targets=3", "topology.drafters=2", odd)
    assert processes(preset, 5, tmp_path / "processes", "topology.drafters=2", odd) == threads
    ends = [open_checkpoint(tmp_path / mode / "checkpoints" / "step_00000012") for mode in ("threads", "processes")]
    weights = [end.tensors("drafter.safetensors") for end in ends]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    distances = [json.loads(line).get("replica_distance") for line in (tmp_path / "threads" / "metrics.jsonl").read_text().splitlines()]
    assert sum(d is not None and d > 0 for d in distances) == 3  # steps 4, 8, 12


@pytest.mark.parametrize("objective", [["objective.loss=lk"], ["objective.weights=dpace"], ["optim.accumulate=2", "optim.steps=4"]])
def test_every_objective_travels(preset, tmp_path, objective):
    """Distillation needs the final hidden state on the drafter's side; it must arrive in the right columns there too."""
    assert processes(preset, 2, tmp_path / "processes", *objective) == solo(preset, tmp_path / "solo", *objective)


def test_ddp_is_one_drafter_with_more_packets_a_step(preset, tmp_path):
    """`ddp` is the baseline that averaging is judged by: it must be large-batch training exactly, one division at the end."""
    overrides = ["optim.steps=5", "checkpoint.every=5"]
    together = processes(preset, 3, tmp_path / "ddp", "topology.drafters=2", "sync.mode=ddp", *overrides)
    alone = solo(preset, tmp_path / "solo", "optim.accumulate=2", *overrides)
    assert [entry[:2] for entry in together] == [entry[:2] for entry in alone]
    assert [value for *_, value in together] == pytest.approx([value for *_, value in alone], rel=1e-4)


def test_threads_run_for_three_hundred_steps(preset, tmp_path):
    """Queues, buffers and barriers that leak or deadlock do so after a while, not in the first steps."""
    overrides = ["topology.mode=threads", "topology.targets=3", "topology.drafters=2", "optim.steps=300", "log.every=50"]
    overrides += ["data.pack_tokens=64", "objective.anchors=2", "drafter.layers=1"]  # the queues count packets, however small
    assert len(solo(preset, tmp_path / "threads", *overrides, "validation.every=300", "checkpoint.every=300")) == 6 * 3 + 1


def test_validation_runs_with_the_averaged_weights(preset, tmp_path, monkeypatch):
    """Else held-out tau, by which the best checkpoint is chosen, is that of replicas that nobody exports."""
    validate, seen = train_drafter.Trainer.validate, {}

    def watched(trainer, step, entries):
        if entries:
            seen.setdefault(step, []).append(trainer.learner.optimizer.masters.clone())
        validate(trainer, step, entries)

    monkeypatch.setattr(train_drafter.Trainer, "validate", watched)
    solo(preset, tmp_path, "topology.mode=threads", "topology.targets=2", "topology.drafters=2")
    assert list(seen) == [8, 12] and all(torch.equal(one, other) for one, other in seen.values())


def test_an_ablated_drafter_learns_nothing_from_features(preset, tmp_path):
    """`zero_features` measures what the features are worth: a projection that moves has read them."""
    solo(preset, tmp_path, "drafter.zero_features=true", "optim.steps=4")
    assert not open_checkpoint(tmp_path / "checkpoints" / "step_00000004").tensors("drafter.safetensors")["fc.weight"].any()


def test_the_best_checkpoint_outlives_newer_ones(preset, tmp_path, monkeypatch):
    """Else a run that forgets towards its end has thrown its best drafter away. Step 10 goes by the tau of step 8 and is not it."""
    monkeypatch.setattr(
        train_drafter, "heldout_totals", lambda plan, assignment, *_: {"heldout_tau": (3.0 if assignment.step == 8 else 2.0, 1.0)}
    )
    solo(preset, tmp_path, "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=true")
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_00000008", "step_00000012"]


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_failing_thread_ends_all_others_and_says_who_it_was(preset, tmp_path, monkeypatch, role):
    """Otherwise one worker's exception leaves the rest waiting on queues and barriers for ever."""
    owner, name = (Server, "capture") if role == "target" else (train_drafter.Trainer, "train_step")
    healthy = getattr(owner, name)

    def failing(self, first, *rest):
        if self.context.index == 1 and getattr(first, "step", first) == 5:
            raise ZeroDivisionError("planted")
        return healthy(self, first, *rest)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(ZeroDivisionError, match="planted") as failure:
        solo(preset, tmp_path / "threads", "topology.mode=threads", "topology.targets=2", "topology.drafters=2")
    assert failure.value.__notes__ == [f"raised by {role} 1 on cpu"]
    assert [t.name for t in threading.enumerate() if t.name.startswith(("target", "drafter"))] == []


@pytest.mark.parametrize("lost", ["checkpoint", "drafter", "link"])
def test_a_run_whose_last_step_was_not_saved_does_not_end_well(preset, tmp_path, monkeypatch, capsys, lost):
    """Exit 0 and a `vllm serve` line for a drafter that is not there: the user finds out when the machine is gone."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {
        "checkpoint": (run_directory, "write_safetensors"),
        "drafter": (export, "save_file"),
        "link": (run_directory.RunDirectory, "_point_latest"),
    }
    monkeypatch.setattr(*where[lost], full)
    with pytest.raises(UserError, match=rf"step 2 was trained, but could not be saved: no {lost} "):
        solo(preset, tmp_path, "optim.steps=2")
    printed = capsys.readouterr().out
    assert "vllm serve" not in printed and "export/latest" not in printed
    assert not list(tmp_path.rglob("*.partial"))
