"""A user's weeks of training hang on these files: whatever happens to them, the newest whole checkpoint is found and nothing lies."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from common.config import BEFORE, Config
from common.config_reader import to_dict
from common.errors import UserError
from common.training.checkpoint import MARKER, CheckpointError, compare_configs, open_checkpoint
from common.training.run_directory import ResumePoint, RunDirectory
from common.trees import digest

PARTS = ("drafter.safetensors", "optim_drafter0.safetensors", "optim_drafter1.safetensors")


@pytest.fixture
def said():
    return []


@pytest.fixture
def run(tmp_path, said):
    directory = opened(tmp_path / "run", say=said.append)
    yield directory
    directory.unlock()


def opened(path, say=print):
    """A run directory that this process holds, ready for a new run."""
    directory = RunDirectory(path, say)
    directory.lock()
    directory.prepare(ResumePoint(None, None))
    return directory


def start(run, *choice, **restart):
    """Start a run as its first drafter does; returns the checkpoint that it goes on from."""
    point = run.resume_point(*choice, **restart)
    run.prepare(point)
    return point.checkpoint


def tensors(step):
    return {
        "weight": torch.full((3, 5), float(step)),
        "count": torch.tensor(step),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "sum": torch.ones(2).double(),
    }


def save(run, step, **state):
    for name in PARTS:
        run.write_part(step, name, tensors(step))
    run.commit(step, PARTS, {"seed": 0}, state)
    return run.checkpoints / f"step_{step:08d}"


def export(run, step):
    run.save_export(step, lambda folder: (folder / "config.json").write_text(str(step)))


def steps_of(parent):
    return sorted(int(path.name[5:]) for path in parent.glob("step_*"))


def test_a_saved_checkpoint_comes_back_bit_by_bit(run):
    """Else a resumed run silently continues from other weights."""
    save(run, 500, heldout_tau=2.5)
    checkpoint = run.newest_valid()
    assert (checkpoint.step, checkpoint.state, checkpoint.config) == (500, {"heldout_tau": 2.5}, {"seed": 0})
    for name in PARTS:
        loaded = checkpoint.tensors(name)
        for key, tensor in tensors(500).items():
            assert loaded[key].dtype == tensor.dtype and torch.equal(loaded[key], tensor)
    with pytest.raises(CheckpointError, match="has no optim_drafter9"):
        checkpoint.tensors("optim_drafter9.safetensors")


def truncate(folder, name):
    os.truncate(folder / name, os.path.getsize(folder / name) - 1)


def flip_a_bit(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)


def delete(folder, name):
    (folder / name).unlink()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, delete])
@pytest.mark.parametrize("name", [*PARTS, MARKER])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(run, said, damage, name):
    """Else a job that lost one file of its newest checkpoint cannot start, or starts from garbage."""
    save(run, 100)
    damage(save(run, 200), name)
    assert run.newest_valid().step == 100
    assert any("passed over" in line and "step_00000200" in line for line in said)


def test_nothing_valid_means_a_new_run(run, said):
    """Else a first start fails, or one whose only checkpoint was not finished."""
    assert run.newest_valid() is None
    run.write_part(100, PARTS[0], tensors(100))
    assert run.newest_valid() is None


def test_a_marker_that_is_lost_is_no_new_run(run):
    """Else a file system that lost one small file makes the run begin at step 0 over what was learnt."""
    delete(save(run, 100), MARKER)
    with pytest.raises(UserError, match=r"no readable state\.json"):
        run.resume_point("auto")


def test_a_newer_checkpoint_that_cannot_be_read_is_set_aside(run, said):
    """A newer release wrote steps 200 and 300: this one goes on from 100, and must not write over them."""
    for step in (100, 200, 300):
        save(run, step)
        export(run, step)
    for step in (200, 300):
        (run.checkpoints / f"step_{step:08d}" / MARKER).write_text('{"version": 2}')
    assert start(run, "auto").step == 100
    save(run, 200)
    assert (run.checkpoints / "abandoned_step_00000200" / MARKER).read_text() == '{"version": 2}'
    assert (run.exports / "abandoned_step_00000300").is_dir() and run.latest_is(100)


def test_retention_leaves_the_exports_of_what_it_cannot_read(run):
    """Else the drafter of a run that a newer release wrote is gone, though its checkpoint was spared."""
    for step in (100, 200, 300):
        save(run, step)
        export(run, step)
    (run.checkpoints / "step_00000100" / MARKER).write_text('{"version": 2}')
    run.retain(keep=1, keep_best=False)
    assert steps_of(run.checkpoints) == steps_of(run.exports) == [100, 300]


@pytest.mark.parametrize("name", [".step_00000100", ".step_00000100.old", "step_00000100"])
def test_nothing_is_removed_through_a_link(run, tmp_path, name):
    """A checkpoint that was moved to a larger disk and linked would lose its marker there."""
    shutil.move(save(run, 100), tmp_path / "moved")
    (run.checkpoints / name).symlink_to(tmp_path / "moved")
    run.prepare(ResumePoint(None, None))
    save(run, 200)
    run.retain(keep=1, keep_best=False)
    assert open_checkpoint(tmp_path / "moved").step == 100


def test_files_that_could_not_be_written_leave_nothing_behind(run, monkeypatch):
    """Hidden halves on a disk that is full already."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; make room there, or .*log\.dir=DIR"):
        run.write_config("seed: 1")
    assert not list(run.path.rglob("*.partial"))


def test_a_stop_that_is_a_folder_is_said(run):
    """It can neither be cleared away nor honoured once: each start would end after one step."""
    run.stop_file.mkdir()
    with pytest.raises(UserError, match=r"STOP cannot be removed .*would stop the next start: remove it"):
        run.prepare(ResumePoint(None, None))


@pytest.mark.parametrize("marker", ['{"version": 2}', "", "no JSON"])
def test_checkpoints_that_cannot_be_read_are_no_new_run(run, marker):
    """Else a release that writes another version makes this one train from 0 and delete all that was learnt."""
    for step in (100, 200):
        (save(run, step) / MARKER).write_text(marker)
    with pytest.raises(UserError, match=r"none can be read .*never, which sets them aside"):
        run.resume_point("auto")
    save(run, 300)
    run.retain(keep=1, keep_best=True)
    assert steps_of(run.checkpoints) == [100, 200, 300], "what this release did not write it does not delete"
    assert start(run, "never") is None
    assert (run.checkpoints / "abandoned_step_00000100" / MARKER).read_text() == marker


def test_hidden_files_of_the_user_outlive_a_start(run, tmp_path):
    """A git repository in export/, or an .ssh behind a linked checkpoints/: gone without a word."""
    (run.exports / ".git").mkdir()
    (run.exports / ".git" / "HEAD").write_text("ref")
    (run.exports / ".step_00000100.old").mkdir()
    (run.exports / "..step_00000100.partial").mkdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".ssh").mkdir(parents=True)
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(elsewhere)
    run.prepare(ResumePoint(None, None))
    assert (run.exports / ".git" / "HEAD").read_text() == "ref" and (elsewhere / ".ssh").is_dir()
    assert [path.name for path in run.exports.iterdir()] == [".git"]


def test_what_was_set_aside_stays_aside(run, said):
    """A second start over must not destroy what the first one put away, nor the log of the run before."""
    for round_ in (1, 2):
        save(run, 100, round=round_)
        export(run, 100)
        run.metrics.write_text(str(round_))
        assert start(run, "never") is None
    first, second = (run.checkpoints / name for name in ("abandoned_step_00000100", "abandoned_2_step_00000100"))
    assert [open_checkpoint(folder).state["round"] for folder in (first, second)] == [1, 2]
    assert (run.path / "abandoned_metrics.jsonl").read_text() == "1" and (run.path / "abandoned_2_metrics.jsonl").read_text() == "2"


def test_a_copied_latest_does_not_stay_stale(run, said):
    """After `cp -rL` export/latest is a folder: it would be recommended for ever, whatever was learnt since."""
    export(run, 100)
    (run.exports / "latest").unlink()
    shutil.copytree(run.exports / "step_00000100", run.exports / "latest")
    export(run, 200)
    assert run.latest_is(200) and (run.exports / "abandoned_latest" / "config.json").read_text() == "100"
    assert "set aside" in said[-1]


def test_a_part_that_was_not_written_voids_the_checkpoint(run):
    """Else a drafter whose disk is full leaves a checkpoint without its moments."""
    save(run, 100)
    run.write_part(200, PARTS[0], tensors(200))
    with pytest.raises(CheckpointError, match="optim_drafter0"):
        run.commit(200, PARTS, {}, {})
    assert run.newest_valid().step == 100
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000100"]


def test_a_failing_export_leaves_latest_alone(run):
    """Else an engine that serves export/latest loads half a model."""
    export(run, 100)

    def out_of_space(folder):
        (folder / "config.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        run.save_export(200, out_of_space)
    assert (run.exports / "latest" / "config.json").read_text() == "100"
    assert steps_of(run.exports) == [100] and not list(run.exports.glob(".*"))


def test_leftovers_of_a_killed_job_are_cleared_by_the_next(tmp_path):
    """Else every kill costs the disk space of a checkpoint for good, or stale parts enter the next one."""
    first = opened(tmp_path)
    save(first, 100)
    first.write_part(200, PARTS[0], tensors(1))
    (first.exports / ".step_00000200").mkdir()
    first.unlock()
    second = opened(tmp_path)
    assert [path.name for path in second.checkpoints.iterdir()] == ["step_00000100"] and not list(second.exports.iterdir())
    second.unlock()


def test_a_step_saved_again_replaces_its_older_self(run):
    """After a rewind the same step is reached again; the damaged folder of that name must not win or block."""
    truncate(save(run, 100), PARTS[0])
    save(run, 100, again=True)
    assert run.newest_valid().state == {"again": True}
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000100"]


def test_retention_keeps_the_newest_and_the_best(run):
    """Else the disk fills, or the best drafter of the run is gone."""
    for step, tau in ((100, 2.0), (200, 3.0), (300, float("nan")), (400, 2.5), (500, None)):
        save(run, step, heldout_tau=tau)
        export(run, step)
        run.retain(keep=2, keep_best=True)
    assert steps_of(run.checkpoints) == [200, 400, 500]
    assert steps_of(run.exports) == [200, 400, 500]
    run.retain(keep=1, keep_best=False)
    assert steps_of(run.checkpoints) == [500] and os.readlink(run.exports / "latest") == "step_00000500"


def test_retention_does_not_count_a_damaged_checkpoint(run):
    """Else keep=1 deletes the only checkpoint that could be resumed."""
    save(run, 100)
    delete(save(run, 200), MARKER)
    run.retain(keep=1, keep_best=False)
    assert run.newest_valid().step == 100


def test_going_back_sets_the_later_future_aside(run, said):
    """Else the next automatic resume continues the future that the user went back from."""
    for step in (100, 200, 300):
        save(run, step)
        export(run, step)
    point = run.resume_point(str(run.checkpoints / "step_00000200"))
    assert run.newest_valid().step == 300 and not said, "nothing changes before the run is ready to begin"
    run.prepare(point)
    assert point.checkpoint.step == 200 and run.newest_valid().step == 200
    assert os.readlink(run.exports / "latest") == "step_00000200"
    assert (run.checkpoints / "abandoned_step_00000300" / MARKER).is_file() and "set aside" in said[-1]
    save(run, 250)
    assert start(run, str(run.checkpoints / "step_00000200"), restarted=True).step == 250
    assert start(run, "never") is None and run.newest_valid() is None


def test_a_launch_that_died_before_it_chose_still_obeys_resume_when_restarted(run, monkeypatch):
    """Else `never` goes on from the run of somebody else, because the first attempt ran out of memory while loading."""
    save(run, 100)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert start(run, "auto").step == 100
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert start(run, "never", restarted=True) is None
    save(run, 50)
    assert start(run, "never", restarted=True).step == 50


def test_a_restart_before_the_first_checkpoint_goes_on_from_the_named_one_again(run, tmp_path):
    """Else a job that dies in its first minutes begins anew when its launcher starts it again, without the weights it was given."""
    other = opened(tmp_path / "other")
    named = save(other, 100)
    assert start(run, str(named)).step == 100
    assert start(run, str(named), restarted=True).step == 100
    save(run, 150)
    assert start(run, str(named), restarted=True).step == 150
    other.unlock()


def test_resuming_from_a_folder_that_is_no_checkpoint_is_refused(run, tmp_path):
    """Else a typing error in a path starts a run of weeks from random weights."""
    with pytest.raises(UserError, match=r"checkpoint\.resume=.*has no readable state\.json.*step_00000500"):
        run.resume_point(str(tmp_path / "nowhere"))
    flip_a_bit(save(run, 100), PARTS[1])
    with pytest.raises(UserError, match="checksum"):
        run.resume_point(str(run.checkpoints / "step_00000100"))


HOLD = """
import sys, time
from common.training.run_directory import ResumePoint, RunDirectory
run = RunDirectory(sys.argv[1])
run.lock()
print("mine", flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path, monkeypatch):
    """Else two jobs write into one run; or a killed job locks its successor out."""
    monkeypatch.setattr("common.training.lock.LOCK_WAIT_S", 0.2)
    root = Path(__file__).resolve().parent.parent
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True, cwd=root)
    assert holder.stdout.readline() == "mine\n"
    second = RunDirectory(tmp_path)
    with pytest.raises(UserError, match=rf"in use by another job \(pid {holder.pid} on .*log\.dir="):
        second.lock()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    second.lock()
    second.unlock()


def test_an_unshared_run_directory_is_refused(run, tmp_path, monkeypatch):
    """Else half the moments are written on another machine's disk, and found missing at the first resume."""
    monkeypatch.setattr("common.training.run_directory.PROBE_WAIT_S", 0.3)
    run.write_probe("token")
    RunDirectory(run.path).check_probe("token")
    with pytest.raises(UserError, match=r"shared.*log\.dir=DIR"):
        RunDirectory(tmp_path / "elsewhere").check_probe("token")


def test_an_unwritable_run_directory_is_refused(tmp_path):
    """Else the user learns at the first checkpoint, hours later, that nothing can be saved."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written.*log\.dir=DIR"):
        RunDirectory(tmp_path / "file").lock()


def test_the_stop_file_is_seen_and_cleared(run):
    """Else a stopped job stops again at once when it is started anew."""
    run.stop_file.touch()
    assert run.stop_requested()
    run.clear_stop()
    run.clear_stop()
    assert not run.stop_requested()


def test_the_log_is_rewound_to_the_resumed_step(run):
    """Else steps that are run again stand twice in the log, and curves fold back."""
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (10, 20, 30)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 40, "lo')
    run.rewind_log(20)
    assert run.metrics.read_text() == "\n".join(lines[:2]) + "\n"


def test_configs_may_differ_only_where_they_steer(run):
    """Else a resume trains something else than the first half did; or a user cannot even change the log interval."""
    saved, current = to_dict(Config()), to_dict(Config())
    current["log"]["every"], current["topology"]["targets"], current["optim"]["steps"] = 3, 5, 900
    assert len(compare_configs(saved, current)) == 3
    current["optim"]["lr"], current["drafter"]["layers"] = 0.5, 3
    with pytest.raises(
        UserError, match=r"drafter\.layers was 5, is 3; optim\.lr was 0\.0006, is 0\.5.*allow_changes=\[drafter\.layers,optim\.lr\]"
    ):
        compare_configs(saved, current)
    assert any(note.startswith("optim.lr") for note in compare_configs(saved, current, ["optim.lr", "drafter.layers"]))


def test_keys_that_came_later_or_went_break_no_checkpoint(monkeypatch):
    """Else every release that adds a setting ends all runs that were begun before it, or silently changes what they learn."""
    saved, current = to_dict(Config()), to_dict(Config())
    del saved["objective"]["alpha"], saved["optim"]["max_skipped"], saved["link"]
    saved["optim"]["a_key_that_is_gone"], saved["a_section_that_is_gone"] = 3, {"key": 1}
    assert compare_configs(saved, current) == []
    current["objective"]["alpha"] = 0.25
    with pytest.raises(UserError, match=r"objective\.alpha was 0\.5, is 0\.25"):
        compare_configs(saved, current)
    monkeypatch.setitem(BEFORE, "objective.alpha", 0.25)
    assert compare_configs(saved, current) == [], "before the key existed, the suite did as with 0.25"
    current["objective"]["alpha"] = 0.5
    with pytest.raises(UserError, match=r"objective\.alpha was 0\.25, is 0\.5"):
        compare_configs(saved, current)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sync", "every", 7),
        ("sync", "mode", "ddp"),
        ("data", "pack_tokens", 64),
        ("objective", "loss", "lk"),
        ("target", "dtype", "float32"),
    ],
)
def test_what_a_step_learns_may_not_change(section, key, value):
    """Else the second half of a run is another experiment than the first."""
    current = to_dict(Config())
    current[section][key] = value
    with pytest.raises(UserError, match=rf"{section}\.{key} was"):
        compare_configs(to_dict(Config()), current)


def forged(marker):
    """The text of a marker whose own digest holds."""
    marker = {key: value for key, value in marker.items() if key != "digest"}
    return json.dumps(marker | {"digest": digest(marker)})


def test_hostile_markers_are_errors_and_nothing_else(run):
    """A marker is a file from disk: whatever stands in it must end as CheckpointError, without allocating what it claims."""
    folder = save(run, 100)
    good = (folder / MARKER).read_bytes()
    draw = random.Random(0)
    hostile = [
        b"", b"null", b"[]", b"{}", b"[" * 100_000, b"\xff\xfe", b"9" * 10_000, b'{"version": 1}', b"x" * (1 << 24) + b"y",
        *(forged(json.loads(good) | change).encode() for change in (
            {"version": 2}, {"step": -1}, {"step": True}, {"step": 1e400}, {"step": "1"}, {"files": []}, {"files": {}}, {"files": {"a": 1}},
            {"config": None}, {"state": 3}, {"files": {"../../etc/passwd": {"bytes": 1, "crc32": 1}}},
            {"files": {"drafter.safetensors": {"bytes": 1 << 62, "crc32": 1}}},
            {"files": {"drafter.safetensors": {"bytes": [], "crc32": {}}}},
        )),
    ]  # fmt: skip
    for _ in range(300):
        mutated = bytearray(good)
        for _ in range(draw.randint(1, 8)):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        hostile.append(bytes(mutated[: draw.randint(1, len(mutated))]))
    for text in hostile:
        (folder / MARKER).write_bytes(text)
        with pytest.raises(CheckpointError):
            open_checkpoint(folder).verify()


def test_hostile_tensor_files_are_errors(run):
    """A part whose header claims an exabyte must not be believed, even when its checksum holds."""
    folder = save(run, 100)
    claim = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 58], "data_offsets": [0, 1 << 60]}}).encode()
    (folder / PARTS[0]).write_bytes(len(claim).to_bytes(8, "little") + claim)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes"):
        open_checkpoint(folder)
    marker = json.loads((folder / MARKER).read_text())
    marker["files"][PARTS[0]]["bytes"] = 8 + len(claim)
    (folder / MARKER).write_text(forged(marker))
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(folder).tensors(PARTS[0])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_costs_the_new_checkpoint_only(small_disk):
    """Else a full disk ends the run, or takes the last good checkpoint with it."""
    run = opened(small_disk)
    save(run, 100)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.write_part(200, PARTS[0], {"weight": torch.zeros(1 << 17)})
    with pytest.raises(CheckpointError, match="was not written"):
        run.commit(200, PARTS[:1], {}, {})
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.save_export(200, lambda folder: (folder / "model.safetensors").write_bytes(bytes(1 << 19)))
    assert run.newest_valid().step == 100
    save(run, 300)
    assert run.newest_valid().step == 300
    run.unlock()


@pytest.mark.parametrize("again", [False, True])
def test_a_disk_that_is_full_at_the_start_is_said(small_disk, again):
    """A stack at a start or a resume, of which the user must guess that the disk is full."""
    run = RunDirectory(small_disk / "run")
    if again:
        run.lock()
        run.prepare(ResumePoint(None, None))
        run.unlock()
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; make room"):
        run.lock()
        run.prepare(ResumePoint(None, None))
        run.write_probe("token")
        run.write_config("seed: 1")
    run.unlock()
    assert not list(small_disk.rglob("*.partial"))


def test_the_config_is_written_whole(run):
    """Users look up in config.yaml what a run was; half of it would mislead them."""
    run.write_config(yaml.safe_dump({"seed": 1}))
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"seed": 1}
