"""What a start costs when it comes to nothing: a mistake or a finished run must show before models are loaded and GPUs are taken."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from ranks import Job

from common.training.checkpoint import MARKER


def models_must_not_load(rank: int) -> None:
    """Whatever loads a target or makes a drafter fails."""
    import serve_targets
    from common.training import learner, lock

    def loaded(*args: object) -> None:
        raise RuntimeError("a model was loaded")

    serve_targets.load_model = learner.make_drafter = learner.load_vocabulary = loaded
    lock.LOCK_WAIT_S = 0.0


def run_without_models(preset: Path, folder: Path, *overrides: str, ranks: int) -> tuple[list[int], str]:
    """Exit codes and output of a start in which no model can be loaded."""
    with Job(["--config", preset, f"log.dir={folder}", *overrides], ranks, models_must_not_load) as job:
        return job.wait(), job.output


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and content of every file, but for the lock's, which tells who held it last."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture(scope="module")
def finished(tiny_preset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with Job(["--config", tiny_preset, f"log.dir={folder}"]) as job:
        assert job.wait() == [0], job.output
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_has_steps_left_loads_models(tiny_preset, run, ranks):
    """Without it the tests below would pass although nothing was planted."""
    codes, output = run_without_models(tiny_preset, run, "optim.steps=13", ranks=ranks)
    assert 0 not in codes and "a model was loaded" in output


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_finished_run_ends_on_every_rank_without_a_model(tiny_preset, run, ranks):
    """Else a job that its launcher starts again takes eight GPUs for minutes, to find that nothing is left to do."""
    before = files(run)
    codes, output = run_without_models(tiny_preset, run, ranks=ranks)
    assert codes == [0] * ranks, output
    assert output.count("is finished (step 12 of 12): nothing to do") == 1 and files(run) == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_refused_resume_ends_on_every_rank_and_changes_nothing(tiny_preset, run, ranks):
    """Else a typing error is found when the target is loaded; or going back by it has set checkpoints aside already."""
    os.mkdir(run / "checkpoints/.step_00000016")
    (run / "STOP").touch()
    before, resume = files(run), f"checkpoint.resume={run}/checkpoints/step_00000004"
    codes, output = run_without_models(tiny_preset, run, "optim.lr=0.5", resume, ranks=ranks)
    assert codes == [2] * ranks and "optim.lr was 0.002, is 0.5" in output and "Traceback" not in output
    assert files(run) == before and (run / "checkpoints/.step_00000016").exists()


def test_a_directory_in_use_is_refused_on_every_rank(tiny_preset, run):
    """Else the ranks of the second job wait for its main drafter, which has gone, until a timeout."""
    from common.training.run_directory import RunDirectory

    held = RunDirectory(run)
    held.lock()
    try:
        codes, output = run_without_models(tiny_preset, run, ranks=3)
    finally:
        held.unlock()
    assert codes == [2, 2, 2] and f"in use by another job (pid {os.getpid()} on " in output


def test_a_missing_last_export_is_made_from_the_checkpoint(tiny_preset, finished, run):
    """Killed between its last checkpoint and its last export, a run is finished: no later step exports, and no model need be loaded."""
    shutil.rmtree(run / "export")
    codes, output = run_without_models(tiny_preset, run, ranks=1)
    assert codes == [0], output
    for name in ("config.json", "model.safetensors"):
        assert (run / "export/latest" / name).read_bytes() == (finished / "export/latest" / name).read_bytes()


def test_a_latest_that_the_last_job_did_not_come_to_is_mended(tiny_preset, run):
    """Killed between its last export and the link to it, a finished run would serve an older drafter for ever."""
    (run / "export/latest").unlink()
    (run / "export/latest").symlink_to("step_00000004")
    codes, output = run_without_models(tiny_preset, run, ranks=1)
    assert codes == [0] and os.readlink(run / "export/latest") == "step_00000012", output


def no_export(rank: int) -> None:
    """No drafter can be written."""
    from common.drafter import export

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    export.save_file = full
    models_must_not_load(rank)


def test_a_finished_run_without_its_drafter_does_not_end_well(tiny_preset, run):
    """Exit 0 and `nothing to do` for a run whose drafter is not there: the user takes the machine down."""
    shutil.rmtree(run / "export")
    with Job(["--config", tiny_preset, f"log.dir={run}"], 1, no_export) as job:
        assert job.wait() == [2], job.output
        assert "export/latest could not be written" in job.output and "nothing to do" not in job.output


CHANGES = {
    "fewer layers": ("drafter.layers=1", "drafter.layers", r"layers\.1\."),
    "another optimiser": ("optim.name=muon", "optim.name", r"exp_avg_sq is \(\d+,\) there, \(\d+,\) here"),
    "wider": ("drafter.intermediate_size=96", "drafter.intermediate_size", r"mlp.* there, .* here"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_allowed_change_that_does_not_fit_is_refused_before_anything_changes(tiny_preset, run, change):
    """A stack about tensor sizes, after the target was loaded and later checkpoints were set aside."""
    override, key, words = CHANGES[change]
    before, resume = files(run), f"checkpoint.resume={run}/checkpoints/step_00000008"
    codes, output = run_without_models(tiny_preset, run, override, f"checkpoint.allow_changes=[{key}]", resume, ranks=1)
    assert codes == [2] and "Traceback" not in output and re.search(words, output), output
    assert "does not fit this drafter or its optimiser" in output and files(run) == before


def rate_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("WARNING: the learning rate goes from")]


def test_steps_that_make_the_learning_rate_jump_are_said(tiny_preset, run):
    """Raised from 12 to 24, cosine's rate goes up from nothing to half its peak, and the decay's gain is lost without a word."""
    _, output = run_without_models(tiny_preset, run, "optim.steps=24", ranks=1)
    (line,) = rate_lines(output)
    last, now = (float(number) for number in re.findall(r"([\d.e-]+) at step", line))
    assert last < 1e-4 < 9e-4 < now and f"drafter.init={run}/export/latest" in line
    _, output = run_without_models(tiny_preset, run, ranks=1)
    assert "raise optim.steps" not in output and f"drafter.init={run}/export/latest log.dir=DIR" in output


def test_a_wsd_run_is_sent_to_its_last_checkpoint_before_the_decay(tiny_preset, tmp_path):
    """From there more steps change nothing that was learnt."""
    same = ("--config", tiny_preset, f"log.dir={tmp_path}/run", "optim.schedule=wsd")
    with Job(same, 1) as job:
        assert job.wait() == [0], job.output
    stable = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000008"
    with Job(same, 1) as job:
        assert job.wait() == [0] and f"raise optim.steps from before the decay ({stable})" in job.output, job.output
    with Job([*same, "optim.steps=14", stable], 1) as job:
        assert job.wait() == [0] and not rate_lines(job.output), job.output


def test_a_checkpoint_of_an_earlier_release_is_gone_on_from(tiny_preset, run):
    """Keys of the config and counts that were added later must not cost anybody a run; nor those that are gone."""
    from common.trees import digest

    path = run / "checkpoints/step_00000012" / MARKER
    marker = json.loads(path.read_text())
    del marker["config"]["validation"]["tree_budget"], marker["config"]["drafter"]["zero_features"], marker["state"]["tokens_seen"]
    marker["config"]["optim"]["a_key_that_is_gone"] = 3
    del marker["digest"]
    path.write_text(json.dumps(marker | {"digest": digest(marker)}))
    with Job(["--config", tiny_preset, f"log.dir={run}", "optim.steps=14"]) as job:
        assert job.wait() == [0], job.output
        assert "resuming from" in job.output and "step 14/14" in job.output
