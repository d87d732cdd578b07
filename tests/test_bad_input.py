"""Mistakes a user makes: each ends with exit code 2 and one line that says what is wrong, what was got and what to write. No stack."""

import functools
import json
import os
import shutil
import socket

import numpy as np
import pytest
import torch
from conftest import build_target
from ranks import Job

from common.config_reader import load
from common.data.store import StoreWriter, TokenStore
from common.errors import UserError


def output_of(arguments, ranks=1, sabotage=None, code=2):
    with Job(arguments, ranks, sabotage) as job:
        assert job.wait() == [code] * ranks, job.output
        assert "Traceback" not in job.output, job.output
        return job.output


ONE_RANK = {
    "a config that is not there": (["--config", "nowhere.yaml"], ["--config nowhere.yaml", "no such file", "launch/presets"]),
    "an unknown key": (["optim.learning_rate=1"], ["optim.learning_rate", "known: ", "optim.lr,"]),
    "a value of the wrong type": (["optim.steps=many"], ["optim.steps='many'", "must be int"]),
    "a truth value instead of a number": (["optim.steps=true"], ["optim.steps=True", "must be int"]),
    "a number that is none": (["optim.lr=.nan"], ["optim.lr=nan", "must be a finite number"]),
    "a path with an equals sign": (["target.path=/nowhere/a=b"], ["target.path=/nowhere/a=b", "no such folder"]),
    "a target that is not there": (["target.path=/nowhere"], ["target.path=/nowhere", "no such folder"]),
    "a store that is not there": (["data.path=/nowhere"], ["/nowhere is not a token store", "prepare_data.py pack"]),
    "taps out of range": (["drafter.taps=[1,4]"], ["drafter.taps=[1, 4]", "0..3"]),
    "taps that a shallow target does not have": (["drafter.taps=auto"], ["drafter.taps=auto", "4 target layers", "drafter.taps=["]),
    "a mask token that is the end token": (["drafter.mask_token=258"], ["drafter.mask_token=258", "end", "drafter.mask_token=auto"]),
    "a mask token that is the padding": (["drafter.mask_token=256"], ["drafter.mask_token=256", "padding", "drafter.mask_token=auto"]),
    "a mask token beyond the embedding": (["drafter.mask_token=272"], ["drafter.mask_token=272", "0..271", "drafter.mask_token=auto"]),
    "a mask token that occurs in the data": (
        ["drafter.mask_token=17"],
        ["drafter.mask_token=17 occurs in the data", "drafter.mask_token=auto"],
    ),
    "heads that do not divide": (["drafter.heads=3", "drafter.kv_heads=2"], ["drafter.heads=3", "multiple of drafter.kv_heads=2"]),
    "documents longer than a row": (["data.max_document_tokens=256"], ["data.max_document_tokens=256", "data.pack_tokens=128"]),
    "more packets a step than rows": (["optim.accumulate=1000"], ["optim.accumulate=1000", "use more data"]),
    "a row of one token": (["data.pack_tokens=1"], ["data.pack_tokens=1 must be at least 2"]),
    "taps without brackets": (["drafter.taps=1,2"], ["drafter.taps='1,2' must be auto or list of int"]),
    "a seed that is no whole number": (["seed=1e30"], ["seed='1e30' must be int"]),
    "a window beyond all rows": (["drafter.window=1000000000000"], ["drafter.window=1000000000000 must be", "at most 10,000,000"]),
    "a timeout beyond the clock": (["topology.timeout_s=1e18"], ["topology.timeout_s=1e18 must be", "at most"]),
    "more blocks than tokens": (["objective.anchors=129"], ["objective.anchors=129 exceeds data.pack_tokens=128"]),
    "a name that is too long": ([f"log.dir=runs/{'x' * 256}"], ["log.dir='runs/xxx", "at most 255 bytes"]),
    "only documents that are too long": (
        ["data.long_documents=drop", "data.max_document_tokens=2"],
        ["data.long_documents=drop leaves none of the 48 documents", "truncate"],
    ),
    "a single buffer": (["link.depth=1"], ["link.depth=1", "at least 2"]),
    "roles for one rank": (["topology.targets=2"], ["topology.targets=2", "torchrun"]),
    "processes without torchrun": (["topology.mode=processes"], ["topology.mode=processes", "torchrun --nproc_per_node"]),
    "a device that is not there": (
        ["topology.mode=threads", "topology.target_devices=[cuda:99]", "topology.drafter_devices=[cpu]"],
        ["cuda:99 does not exist", "CUDA devices"],
    ),
    "a word that is no device": (
        ["topology.mode=threads", "topology.target_devices=[gpu0]", "topology.drafter_devices=[cpu]"],
        ["'gpu0' is no device", "cuda:0"],
    ),
    "a checkpoint that is not there": (["checkpoint.resume=/nowhere/step_00000005"], ["checkpoint.resume=/nowhere", "state.json"]),
    "a run directory that cannot be made": (["log.dir=/dev/null/run"], ["log.dir=/dev/null/run", "cannot be written"]),
}


@pytest.mark.parametrize("mistake", ONE_RANK)
def test_one_rank(tiny_preset, tmp_path, mistake):
    overrides, words = ONE_RANK[mistake]
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run", *overrides])
    for word in words:
        assert word in output


SEVERAL_RANKS = {
    "more drafters than ranks": (["topology.drafters=3"], ["topology.drafters=3", "2 ranks"]),
    "several ranks in a mode of one": (["topology.mode=solo"], ["topology.mode=solo", "2 ranks were started"]),
}


@pytest.mark.parametrize("mistake", SEVERAL_RANKS)
def test_several_ranks(tiny_preset, tmp_path, mistake):
    overrides, words = SEVERAL_RANKS[mistake]
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run", *overrides], ranks=2)
    for word in words:
        assert word in output


@pytest.mark.parametrize(("key", "other"), [("checkpoint.every", "validation.every"), ("validation.every", "checkpoint.every")])
def test_checkpoints_and_validation_between_averagings_are_refused(tiny_preset, tiny_heldout, tmp_path, key, other):
    """A checkpoint of replicas that differ could not be resumed exactly, and a held-out tau of them would be nobody's."""
    overrides = (f"log.dir={tmp_path}/run", f"validation.path={tiny_heldout}", "topology.drafters=2", "sync.every=3", f"{other}=6")
    output = output_of(["--config", tiny_preset, *overrides, f"{key}=7"], ranks=3)
    assert f"{key}=7 is not a multiple of sync.every=3" in output and "use 6 or 9" in output


def _other_seed(rank):
    from common import config_reader

    load = config_reader.load
    config_reader.load = lambda path, overrides, families: load(path, [*overrides, f"seed={rank}"], families)


def _other_torch(rank):
    torch.__version__ = f"2.{rank}.0"


def _own_directory(root, rank):
    from common.training import run_directory

    run_directory.PROBE_WAIT_S = 1.0
    os.makedirs(f"{root}/{rank}", exist_ok=True)
    os.chdir(f"{root}/{rank}")


def test_ranks_of_different_configs_are_refused(tiny_preset, tmp_path):
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run"], ranks=2, sabotage=_other_seed)
    assert "differ in seed: 0 against 1" in output


def test_ranks_of_different_releases_are_refused(tiny_preset, tmp_path):
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run"], ranks=2, sabotage=_other_torch)
    assert "'2.0.0' against '2.1.0'" in output


def test_an_unshared_run_directory_is_refused(tiny_preset, tmp_path):
    """Two drafters on two disks would each keep half a checkpoint."""
    with Job(
        ["--config", tiny_preset, "log.dir=run", "topology.drafters=2", "topology.timeout_s=20"],
        ranks=3,
        sabotage=functools.partial(_own_directory, tmp_path),
    ) as job:
        assert all(code in (1, 2) for code in job.wait()), job.output
        assert "shared" in job.output and "log.dir=DIR" in job.output and "Traceback" not in job.output


def _host_the_store(port, rank):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def test_a_taken_port_is_named(tiny_preset, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sabotage = functools.partial(_host_the_store, taken.getsockname()[1])
        with Job(["--config", tiny_preset, f"log.dir={tmp_path}/run"], 2, sabotage) as job:
            job.wait_until(lambda: job.processes[0].exitcode is not None)
            assert job.processes[0].exitcode == 2 and "Traceback" not in job.output
            assert "no rendezvous" in job.output and "torchrun" in job.output


def damaged(store, folder, name, change):
    shutil.copytree(store, folder)
    data = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(change(data))
    return folder


def test_a_truncated_store_is_refused(tiny_preset, tiny_store, tmp_path):
    folder = damaged(tiny_store, tmp_path / "store", "tokens.bin", lambda data: data[:-4])
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run", f"data.path={folder}"])
    assert "is damaged" in output and "pack it again" in output


def test_a_store_of_another_tokenizer_is_refused(tiny_preset, tiny_target, tmp_path):
    """The same ids would mean other words: the drafter would learn noise."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run", f"target.path={target}"])
    assert "another tokenizer" in output and "pack it again with --target" in output


def test_tokens_beyond_the_vocabulary_are_refused(tiny_preset, tmp_path):
    """On a GPU such an id is an assertion in a kernel that names nothing."""
    writer = StoreWriter(tmp_path / "store", {})
    for _ in range(8):
        writer.add(np.full(100, 300), np.ones(100))
    writer.close()
    output = output_of(["--config", tiny_preset, f"log.dir={tmp_path}/run", f"data.path={tmp_path}/store"])
    assert "300" in output and "272" in output and "pack it again with --target" in output


@pytest.fixture(scope="module")
def finished(tiny_preset, tmp_path_factory):
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    output_of(["--config", tiny_preset, f"log.dir={folder}", "optim.steps=4"], code=0)
    return folder


@pytest.mark.parametrize(("change", "words"), [({"hidden_size": 48}, "48"), ({"num_hidden_layers": 5}, "5")])
def test_a_drafter_of_another_target_is_refused(tiny_preset, finished, tmp_path, change, words):
    build_target(tmp_path / "target", **change)
    output = output_of(
        ["--config", tiny_preset, f"log.dir={tmp_path}/run", f"target.path={tmp_path}/target", f"drafter.init={finished}/export/latest"]
    )
    assert "another target" in output and words in output


def test_a_resume_with_changed_keys_is_refused(tiny_preset, finished):
    output = output_of(["--config", tiny_preset, f"log.dir={finished}", "optim.lr=0.5"])
    assert "optim.lr was 0.002, is 0.5" in output and "checkpoint.allow_changes=[optim.lr]" in output


@pytest.mark.parametrize("what", ["data.path", "target.path"])
def test_a_resume_on_other_content_under_the_same_path_is_refused(tiny_preset, tiny_target, tiny_store, tiny_heldout, tmp_path, what):
    """A store packed anew, or a target trained on, changes what is learnt while the config stays the same."""
    shutil.copytree(tiny_target, tmp_path / "target")
    shutil.copytree(tiny_store, tmp_path / "store")
    same = ["--config", tiny_preset, f"log.dir={tmp_path}/run", f"target.path={tmp_path}/target", f"data.path={tmp_path}/store"]
    output_of([*same, "optim.steps=4"], code=0)
    if what == "data.path":
        shutil.copytree(tiny_heldout, tmp_path / "store", dirs_exist_ok=True)
    else:
        build_target(tmp_path / "target", seed=1)
    output = output_of([*same, "optim.steps=8", "data.pack_tokens=128"])
    assert f"{what}: its content changed" in output and f"checkpoint.allow_changes=[{what}]" in output


def test_a_finished_run_started_again_changes_nothing(tiny_preset, finished):
    before = {path: path.read_bytes() for path in finished.rglob("*.safetensors")}
    output = output_of(["--config", tiny_preset, f"log.dir={finished}", "optim.steps=4"], code=0)
    assert "log.dir=" in output and "checkpoint.resume=never" in output
    assert before == {path: path.read_bytes() for path in finished.rglob("*.safetensors")}


def test_a_hostile_store_index_is_an_error(tiny_store, tmp_path):
    """An index that points outside the tokens, or claims an exabyte, must end as UserError: seeded mutations of meta and offsets."""
    draw = np.random.default_rng(0)
    for trial in range(60):
        name = ("meta.json", "offsets.bin")[trial % 2]

        def mutate(data):
            for _ in range(draw.integers(1, 6)):
                data[draw.integers(len(data))] = draw.integers(256)
            return data

        folder = damaged(tiny_store, tmp_path / str(trial), name, mutate)
        if (folder / name).read_bytes() == (tiny_store / name).read_bytes():
            continue
        with pytest.raises(UserError):
            TokenStore.open(folder)


def test_a_heldout_store_of_another_target_is_named(tiny_target, tiny_store, tmp_path):
    """Who is only told to pack a store again does not know which, and may have named another target's."""
    mine = [f"target.path={tiny_target}", f"data.path={tiny_store}", "drafter.mask_token=auto", f"log.dir={tmp_path}/run"]
    output = output_of([*mine, "validation.path=launch/quickstart/heldout"])
    assert "validation.path=launch/quickstart/heldout" in output and "write validation.path=auto" in output
    assert f"({tiny_store}-heldout" in output and "validation.path=null" in output


def test_an_empty_section_of_a_preset_may_be_overridden(tmp_path):
    """Whoever comments a section out to its head has made no mistake."""
    (tmp_path / "preset.yaml").write_text("target: {path: t}\ndata: {path: d}\noptim:\n")
    assert load(tmp_path / "preset.yaml", ["optim.lr=1e-3"]).optim.lr == 1e-3
