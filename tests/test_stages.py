"""A target spread over several devices is still one target: the drafter must not be able to tell."""

import functools
import gc
import json
import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import build_target, build_tokenizer
from ranks import Job
from test_failures import at_the_fourth_call
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Qwen3_5TextConfig, Qwen3MoeConfig

import train_drafter
from common import config_reader
from common.config import Config
from common.decoding.target import DecodingTarget, new_cache
from common.distributed.roles import Announcement, make_layout, split
from common.errors import UserError
from common.target.files import read_spec
from common.target.meta import TargetSize, target_size
from common.target.model import Target, load_model
from common.target.spread import load_spread
from common.target.stages import cut
from common.training import costs
from common.training.description import describe
from common.training.plan import make_plan
from serve_targets import Server

SMALL = dict(
    vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=256, bos_token_id=None, eos_token_id=258, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "sliding": None,
    "mixture": lambda: Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "hybrid": lambda: Qwen3_5TextConfig(
        **SMALL,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


def build(family, folder):
    """Write a random target of four layers."""
    if family == "sliding":
        return build_target(folder, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8, use_sliding_window=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    build_tokenizer(folder)


@pytest.fixture
def preset(tiny_target, tiny_store, tiny_heldout, tmp_path):
    """A YAML preset of a three-step run whose packets are tapped in every part of the target; returns its path."""
    tree = {
        "target": {"path": str(tiny_target), "dtype": "float32"},
        "drafter": {"layers": 2, "taps": [0, 2], "block_size": 4, "dtype": "float32"},
        "data": {"path": str(tiny_store), "pack_tokens": 128},
        "optim": {"lr": 1e-3, "steps": 3},
        "checkpoint": {"every": 3},
        "validation": {"path": str(tiny_heldout), "every": 3, "rows": 2},
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


def run(preset, folder, *overrides):
    train_drafter.main(["--config", str(preset), f"log.dir={folder}", *overrides])
    return records(folder)


def processes(preset, ranks, folder, *overrides):
    with Job(["--config", preset, f"log.dir={folder}", *overrides], ranks) as job:
        assert set(job.wait()) == {0}, job.output[-4000:]
    return records(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_gives_what_one_device_gives_for_every_kind_of_layer(preset, tmp_path, family):
    """Masks, windows, experts and recurrent states belong to a layer's number: a stage that counts anew feeds the drafter noise."""
    build(family, tmp_path / "target")
    options = f"target.path={tmp_path / 'target'}", "objective.loss=kl"  # the final hidden state travels, too
    whole = run(preset, tmp_path / "1", *options)
    for stages in (2, 3):
        assert run(preset, tmp_path / f"{stages}", *options, f"target.stages={stages}") == whole


def test_a_chain_gives_what_one_device_gives_in_every_mode(preset, tmp_path):
    """Else the losses of a 70B target say nothing about the quickstart that the recipe was tried on."""
    whole = run(preset, tmp_path / "solo")
    assert len(whole) == 3 * 3 + 1
    threads = "topology.mode=threads", "target.stages=3", "topology.targets=2", "topology.drafters=1"
    assert run(preset, tmp_path / "threads", *threads) == whole
    assert processes(preset, 4, tmp_path / "processes", "target.stages=3") == whole


def layout_of(hosts, stages, drafters=1, split=False):
    """The layout of a job with so many ranks on each host; in a split launch the last host has the drafters."""
    config = Config()
    config.target.stages, config.topology.drafters = stages, drafters
    announced = [
        Announcement("target" if split and host < len(hosts) - 1 else "drafter", str(host), host, rank)
        for host, ranks in enumerate(hosts)
        for rank in range(ranks)
    ]
    return make_layout(announced, config, 0)


def test_a_chain_stays_on_one_node_where_it_can(tmp_path):
    """Each hop that leaves a node costs network that nobody asked for; a chain longer than a node must still work."""
    chains = {}
    for member in layout_of([3, 3, 1], stages=2, split=True).members[:-1]:
        chains.setdefault(member.index, []).append((member.stage, member.host))
    assert chains == {0: [(0, "0"), (1, "0")], 1: [(0, "1"), (1, "1")], 2: [(0, "0"), (1, "1")]}
    long = layout_of([2, 2, 1], stages=4, split=True)
    assert [m.name for m in long.members] == [f"target 0 stage {i} of 4" for i in range(4)] + ["drafter 0"]
    assert [(one.host, other.host) for one, other in long.hops()] == [("0", "0"), ("0", "1"), ("1", "1")]


@pytest.mark.parametrize(
    ("ranks", "stages", "targets", "drafters"), [(8, 2, 3, 2), (8, 3, 2, 2), (8, 4, 1, 4), (8, 7, 1, 1), (3, 2, 1, 1), (16, 4, 3, 4)]
)
def test_default_split_leaves_whole_targets(ranks, stages, targets, drafters):
    assert split(ranks, None, None, stages) == (targets, drafters)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (
            lambda: split(8, None, 1, 2),
            r"topology\.targets=3 of target\.stages=2 ranks each .* 8 ranks.*topology\.targets=3 topology\.drafters=2",
        ),
        (lambda: split(4, None, None, 4), r"start 5 ranks, or let a chain span nodes"),
        (lambda: layout_of([3, 1], stages=2, split=True), r"3 ranks serve, which is no multiple of target\.stages=2: .* with 2 ranks"),
        (lambda: cut([1, 1, 1], 4), r"target\.stages=4, but the target runs 3 layers .*target\.stages=3 or less"),
    ],
)
def test_what_does_not_add_up_is_refused_in_words(attempt, words):
    """Else a rank that has no place waits for ever, or a stage without a layer fails with a stack."""
    with pytest.raises(UserError, match=words):
        attempt()


def test_the_start_up_says_what_each_stage_runs_and_holds(tiny_preset, tiny_target, monkeypatch):
    """A user cuts a target by these figures; embedding and experts count in bytes, and what a token does not go through costs no time."""
    job = SimpleNamespace(first_per_host=lambda find: find(), drafters=1)

    def said(*overrides):
        plan = make_plan(config_reader.load(tiny_preset, ["objective.loss=kl", *overrides]), job)
        assert [shape.width for shape in plan.stage_shapes][-1] == plan.shape.width == 3 * 32
        return plan, describe(plan, layout_of([2 * plan.config.target.stages + 1], plan.config.target.stages))

    plan, text = said("target.stages=3")
    assert "stages   layers 0-0, 1-1, 2-3: even in arithmetic a token" in text
    assert "split    2 targets of 3 stages + 1 drafters" in text and text.count("GiB") == 2
    assert [shape.width // 32 for shape in plan.stage_shapes] == [1 + sum(t < s.layers.stop for t in (1, 2)) for s in plan.stages[:-1]] + [
        3
    ]
    sizes = costs.stage_sizes(plan)
    assert sum(size.held for size in sizes) == target_size(tiny_target, None).held == costs.stage_sizes(said()[0])[0].held
    monkeypatch.setattr(
        "common.target.stages.part_sizes", lambda *_: (TargetSize(1000, 0), [TargetSize(held, 1) for held in (10, 10, 500, 500)])
    )
    assert "layers 0-0, 1-3: even in bytes" in said("target.stages=2", "target.balance=bytes")[1]
    assert "layers 0-1, 2-3: even in arithmetic" in said("target.stages=2")[1]


@pytest.mark.parametrize(("costs", "sizes"), [([1] * 7, [3, 2, 2]), ([9, 1, 1, 1, 1], [1, 2, 2]), ([1, 2, 3, 4, 5, 6], [3, 2, 1])])
def test_layers_are_cut_where_stages_cost_alike(costs, sizes):
    """A chain is as fast as its slowest stage, and fits if its largest does."""
    assert sorted(cut(costs, 3)) == sorted(sizes)
    assert max(sum(part) for part in _parts(costs, cut(costs, 3))) == max(sum(part) for part in _parts(costs, sizes))


def _parts(costs, sizes):
    costs = iter(costs)
    return [[next(costs) for _ in range(size)] for size in sizes]


def middle_stage(act, rank):
    """What happens to the middle of three stages before its fourth packet."""
    if rank == 1:
        at_the_fourth_call(Server, "_capture", act)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    threading.Event().wait()


def ask_for_a_stop():
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("act", [die, hang])
def test_a_stage_that_dies_or_hangs_is_named_and_ends_the_job(preset, tmp_path, act):
    """Its neighbours wait for it and not for a drafter: else eight ranks burn their allocation, or blame each other."""
    options = "target.stages=3", "optim.steps=100000", "topology.timeout_s=2"
    with Job(["--config", preset, f"log.dir={tmp_path / 'run'}", *options], 4, functools.partial(middle_stage, act)) as job:
        others = [process for rank, process in enumerate(job.processes) if rank != 1]
        job.wait_until(lambda: not any(process.is_alive() for process in others), timeout_s=40)
        assert all(process.exitcode > 0 for process in others)
        error = next(line for line in job.output.splitlines() if line.startswith(("error", "Traceback")))
        assert error.startswith("error: target 0 stage 1 of 3 (rank 1 on "), job.output


def test_a_stop_reaches_every_stage_and_another_chain_goes_on(preset, tmp_path, monkeypatch, capsys):
    """SIGUSR1 to a middle stage ends all ranks with 0; whoever then has fewer devices, or more, goes on bit by bit."""
    options = "sync.every=2", "checkpoint.every=100000", "validation.path=null", "optim.schedule=constant", "optim.warmup=0"
    without_end = *options, "optim.steps=100000"
    command = ["--config", preset, f"log.dir={tmp_path / 'run'}", *without_end, "target.stages=3"]
    with Job(command, 4, functools.partial(middle_stage, ask_for_a_stop)) as job:
        assert job.wait() == [0] * 4, job.output
        first = int(re.search(r"stopped after step (\d+)", job.output)[1])
    with monkeypatch.context() as patch:
        patch.setattr(Server, "_capture", Server._capture)  # what `at_the_fourth_call` puts there is taken away again
        at_the_fourth_call(Server, "_capture", ask_for_a_stop)
        run(preset, tmp_path / "run", *without_end, "topology.mode=threads", "target.stages=2")
    second = int(re.search(r"stopped after step (\d+)", capsys.readouterr().out)[1])
    assert 0 < first < second
    assert records(tmp_path / "run") == run(preset, tmp_path / "straight", *options, f"optim.steps={second}")


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory):
    """A target of six layers of 17 MB each."""
    folder = tmp_path_factory.mktemp("wide")
    build_target(folder, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, head_dim=64, num_attention_heads=8)
    return folder


def resident_bytes(what):
    return 1024 * next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stage_reads_its_own_layers_and_nothing_else(wide_target, device):
    """A target is cut because a device does not hold it: a stage that loads the whole first dies as the whole would."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    where = torch.device(device)
    load_model(wide_target, where, torch.float32, layers=range(5, 6))  # what is imported and made once
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident_bytes("VmRSS")
    model = load_model(wide_target, where, torch.float32, layers=range(2, 4))
    parameters = list(model.parameters())
    share = sum(p.numel() * p.itemsize for p in parameters)
    assert all(torch.isfinite(p.sum()) for p in parameters)  # read, whatever was only mapped
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident_bytes("VmHWM")
    whole = sum(file.stat().st_size for file in wide_target.glob("*.safetensors"))
    assert 0.9 * share < peak - before < 1.1 * share + 2**21 < 0.4 * whole


def test_a_family_whose_layers_take_more_than_the_residual_stream_is_refused(tmp_path):
    """Its later stages would run without what earlier layers or the tokens give them, and train on noise."""
    more = dict(num_kv_shared_layers=2, vocab_size_per_layer_input=272, hidden_size_per_layer_input=8, laurel_rank=4)
    config = Gemma3nTextConfig(**SMALL, **more, activation_sparsity_pattern=[0.0] * 4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.device("cpu"), torch.float32, layers=range(2, 4))
    with pytest.raises(UserError, match=r"target\.stages: layers of this family take .* use target\.stages=1"):
        Target(model, [2, 3], layers=range(2, 4))


cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="these numbers are a GPU's")


@cuda_only
def test_a_chain_gives_what_one_device_gives_on_a_gpu(preset, tmp_path):
    """Where layers are compiled and documents are packed by another kernel, the drafter must not be able to tell either."""
    build_target(tmp_path / "target", head_dim=64)
    half = f"target.path={tmp_path / 'target'}", "target.dtype=bfloat16", "drafter.dtype=bfloat16", "topology.mode=threads"
    devices = "topology.drafter_devices=[cuda:0]"

    def losses(stages):
        named = f"topology.target_devices=[{','.join(['cuda:0'] * stages)}]"
        return run(preset, tmp_path / f"{stages}", *half, devices, named, f"target.stages={stages}")

    assert losses(1) == losses(2) == losses(3)


@cuda_only
def test_layers_on_another_device_are_followed(tiny_target, monkeypatch):
    """Masks and rotary tables are made on the first device: a layer elsewhere must get its own copies, and give the result back."""
    spec, device = read_spec(tiny_target), torch.device("cuda:0")
    monkeypatch.setattr("common.target.spread._devices", lambda *_: [device, torch.device("cpu")])
    one, spread = (DecodingTarget(load_spread(spec, torch.float32, device, stages, "--target"), [0, 3]) for stages in (1, 2))
    assert {p.device.type for p in spread.model.parameters()} == {"cuda", "cpu"}
    with torch.no_grad():
        results = [target.forward([5, 6, 7, 8], 0, new_cache(), last_only=True) for target in (one, spread)]
    for ours, theirs in zip(*results, strict=True):
        assert ours.device == theirs.device
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
