"""The run's configuration: dataclasses, YAML presets, `section.key=value` overrides, validation.

One default, one home: the dataclass field, with its meaning in the docstring beneath it. Unknown keys, wrong types and
contradictions raise `UserError`, which every script turns into one line on stderr and exit code 2.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

DEFAULT_PRESET = Path(__file__).resolve().parent.parent / "launch" / "presets" / "quickstart.yaml"


class UserError(Exception):
    """A mistake of the caller's: the message says what is wrong, what was got and what to write instead."""


@dataclass
class TargetConfig:
    path: str = ""
    """Folder of safetensors with config.json and tokenizer, or a hub id such as `Qwen/Qwen3-8B`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: str = "bfloat16"
    """Compute type of the target and of the features that travel: bfloat16, float16 or float32."""
    trust_remote_code: bool = False
    """Run code that ships with the checkpoint. Leave it off unless you have read that code."""
    execution: str = "auto"
    """How the documents of a row run: `packed` (one forward), `per_document` (the reference), `auto` (packed where the family allows)."""
    compile: bool = True
    """Compile the target's layers on CUDA."""


@dataclass
class DrafterConfig:
    layers: int = 5
    """Transformer layers of the drafter."""
    taps: str | list[int] = "auto"
    """Target layers whose outputs are the features (`auto`: as many as drafter layers, spread over the depth), or their indices."""
    block_size: int = 16
    """Slots of a block: the known token and block_size - 1 proposals."""
    mask_token: str | int = "auto"
    """Id (or text) of the token that fills the unknown slots; `auto` takes the family's or an unused row of the embedding."""
    intermediate_size: int | None = None
    """Width of the MLP; default: the target's."""
    heads: int | None = None
    """Query heads; default: the target's."""
    kv_heads: int | None = None
    """Key/value heads; default: `heads` where that is set, else the target's."""
    head_dim: int | None = None
    """Size of a head; default: the target's."""
    layer_types: list[str] | None = None
    """`full_attention` or `sliding_attention` per layer; default: all full."""
    window: int | None = None
    """Positions that a sliding layer sees."""
    dtype: str = "bfloat16"
    """Compute type; masters and moments are float32 in any case."""
    init: str = "random"
    """`random`, `target_layers` (copy the target's tapped layers where shapes match), or the folder of an exported drafter."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time in the layers."""
    compile: bool = True
    """Compile the forward on CUDA."""
    zero_features: bool = False
    """Ablation: train on features set to zero, to see what the target's hidden states are worth."""


@dataclass
class DataConfig:
    path: str = ""
    """Token store written by `prepare_data.py pack`."""
    pack_tokens: int = 3072
    """Tokens of a row, the unit that travels; documents are packed into it and never straddle rows."""
    max_document_tokens: int | None = None
    """Longest document; default: pack_tokens."""
    long_documents: str = "truncate"
    """What happens to longer documents: `truncate` or `drop`. Both are counted."""


@dataclass
class ObjectiveConfig:
    loss: str = "ce"
    """`ce` on the data's tokens; `kl`, `tv` or `lk` distil the target's own distribution (needs its final hidden state)."""
    weights: str = "decay"
    """`decay`: exp(-(k-1)/gamma) for slot k; `dpace`: by the drafter's own confidence in the prefix (arXiv 2605.18810)."""
    gamma: float | None = None
    """Decay length in slots; default 7 for block 16, 5 for 10, 4 for 8, interpolated."""
    alpha: float = 0.5
    """Smoothing of `dpace`."""
    anchors: int | None = None
    """Blocks per packet; default pack_tokens / 6, rounded up so that blocks fill tiles of 128."""
    head: str = "fused"
    """`fused`: the head's input gradient is computed in the forward pass; `checkpoint`: the slow twin that recomputes."""


@dataclass
class OptimConfig:
    lr: float = 6e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's moments' decay."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup: float = 0.04
    """Share of all steps (below 1) or number of steps (1 and above) of linear warm-up."""
    schedule: str = "cosine"
    """`cosine` to zero, `wsd` (constant, then the last 20% linear to zero; ahead of cosine where both were run) or `constant`."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    steps: int | None = None
    """Optimiser steps; default: as many as `epochs` give."""
    epochs: float = 6.0
    """Passes over the data when `steps` is not set."""
    accumulate: int = 1
    """Packets per drafter and optimiser step."""
    max_skipped: int = 20
    """Non-finite steps in a row that stop the job."""


@dataclass
class SyncConfig:
    mode: str = "average"
    """`average`: the drafters' weights are averaged every `every` steps; `ddp`: gradients are summed at every step."""
    every: int = 50
    """Steps between two averagings."""


@dataclass
class TopologyConfig:
    mode: str = "auto"
    """`solo`, `threads`, `processes`, or `auto` (solo for one rank, processes for several)."""
    targets: int | None = None
    """Targets per cell; default: the ranks that are not drafters."""
    drafters: int | None = None
    """Drafters per cell; default: max(1, round(ranks / 4))."""
    target_devices: list[str] | None = None
    """Threads mode: the targets' devices, e.g. [cuda:0,cuda:1]."""
    drafter_devices: list[str] | None = None
    """Threads mode: the drafters' devices."""
    cpu_threads: int = 1
    """Threads of a CPU operator in every worker. Losses are bitwise equal over modes only while it is the same."""
    timeout_s: float = 600.0
    """Longest wait for another rank before the stalest one is named and the job ends."""


@dataclass
class LinkConfig:
    depth: int = 2
    """Packet buffers at each end, at least 2: one is filled while another leaves."""
    backend: str = "auto"
    """`auto` (NCCL between CUDA devices, gloo on CPU), `nccl`, or `staged` (CUDA features through pinned host memory and gloo)."""


@dataclass
class CheckpointConfig:
    every: int = 500
    """Steps between checkpoints; a multiple of sync.every where several drafters average."""
    keep: int = 3
    """Newest checkpoints and exports kept."""
    keep_best: bool = True
    """Also keep the checkpoint and export with the best walk tau."""
    resume: str = "auto"
    """`auto` (the newest valid checkpoint), `never` (start over), or a checkpoint folder."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys that may differ from the checkpoint's config, e.g. [optim.lr]."""


@dataclass
class ValidationConfig:
    path: str | None = "auto"
    """Token store of held-out conversations; `auto`: `<data.path>-heldout`, as `pack --heldout` writes it, if it exists; null: none."""
    every: int = 500
    """Steps between validations; the last step always validates."""
    rows: int | None = 64
    """Rows validated, all of them if null."""
    tree_budget: int = 16
    """Nodes of the tree whose acceptance length is reported beside the chain's."""


@dataclass
class LogConfig:
    dir: str | None = None
    """Run directory; default runs/<name of the preset>."""
    every: int = 10
    """Steps between log lines."""
    tensorboard: bool = True
    """Write event files."""


@dataclass
class Config:
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    seed: int = 0
    """Seed of everything drawn: packing, order, anchors, initial weights."""


CHOICES = {
    "target.dtype": ("bfloat16", "float16", "float32"),
    "target.execution": ("auto", "packed", "per_document"),
    "drafter.dtype": ("bfloat16", "float32"),
    "data.long_documents": ("truncate", "drop"),
    "objective.loss": ("ce", "kl", "tv", "lk"),
    "objective.weights": ("decay", "dpace"),
    "objective.head": ("fused", "checkpoint"),
    "optim.schedule": ("cosine", "wsd", "constant"),
    "sync.mode": ("average", "ddp"),
    "topology.mode": ("auto", "solo", "threads", "processes"),
    "link.backend": ("auto", "nccl", "staged"),
}
AT_LEAST_ONE = (
    "drafter.layers", "data.pack_tokens", "optim.accumulate", "optim.max_skipped", "sync.every", "topology.cpu_threads",
    "checkpoint.every", "checkpoint.keep", "validation.every", "log.every", "objective.anchors",
    "optim.steps", "topology.targets", "topology.drafters", "validation.rows", "validation.tree_budget", "drafter.window",
    "data.max_document_tokens",
    "drafter.heads", "drafter.kv_heads", "drafter.head_dim", "drafter.intermediate_size",
)  # fmt: skip


def load(path=None, overrides=()):
    """Read a YAML file, apply `section.key=value` overrides and validate.

    Raises: UserError with the key, what was got and what to write.
    """
    path = Path(path or DEFAULT_PRESET)
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; presets are in {DEFAULT_PRESET.parent}")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config {path} holds a {type(tree).__name__}; it must be sections such as `target:` with keys beneath")
    for override in overrides:
        _apply_override(tree, override)
    config = from_dict(tree)
    if config.log.dir is None:
        config.log.dir = f"runs/{path.stem}"
    validate(config)
    return config


def from_dict(tree):
    """Build a Config from nested dicts, refusing unknown keys and wrong types."""
    return _build(Config, tree, "")


def to_dict(config):
    return dataclasses.asdict(config)


def to_yaml(config):
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def digest(tree):
    """Short hash of a JSON-able object, equal on all ranks that hold equal values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def differences(one, other, prefix=""):
    """Dotted keys whose values differ, as {key: (value in one, value in other)}."""
    found = {}
    for key in sorted(set(one) | set(other)):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def get(config, dotted):
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def validate(config):
    """Refuse contradictions that need nothing but the config itself."""
    for key, choices in CHOICES.items():
        if get(config, key) not in choices:
            raise UserError(
                f"{key}={get(config, key)} is not known; use one of {', '.join(choices)}{_near(str(get(config, key)), choices)}"
            )
    for key in AT_LEAST_ONE:
        if get(config, key) is not None and get(config, key) < 1:
            raise UserError(f"{key}={get(config, key)} must be at least 1")
    if config.link.depth < 2:
        raise UserError(f"link.depth={config.link.depth}: a target fills the next buffer before the last has left; use 2 or more")
    if config.drafter.block_size < 2:
        raise UserError(
            f"drafter.block_size={config.drafter.block_size}: a block needs the known token and a proposal; use 2 or more, e.g. 16"
        )
    if not config.target.path:
        raise UserError("target.path is empty: name a folder of safetensors or a hub id, e.g. target.path=Qwen/Qwen3-8B")
    if not config.data.path:
        raise UserError("data.path is empty: pack conversations first (prepare_data.py pack ... --output DIR), then data.path=DIR")
    if config.seed < 0:
        raise UserError(f"seed={config.seed} must not be negative")
    layer_types, layers = config.drafter.layer_types, config.drafter.layers
    if layer_types is not None:
        wrong = [t for t in layer_types if t not in ("full_attention", "sliding_attention")]
        if wrong or len(layer_types) != layers:
            raise UserError(
                f"drafter.layer_types={layer_types} must name full_attention or sliding_attention for each of the {layers} layers"
            )
        if "sliding_attention" in layer_types and config.drafter.window is None:
            raise UserError("drafter.layer_types has sliding_attention but drafter.window is not set; write e.g. drafter.window=4096")
    if config.objective.gamma is not None and config.objective.gamma <= 0:
        raise UserError(f"objective.gamma={config.objective.gamma} must be above 0, in slots")
    if not 0 <= config.objective.alpha < 1:
        raise UserError(f"objective.alpha={config.objective.alpha} must lie in [0, 1)")
    if config.optim.lr < 0 or config.optim.warmup < 0 or config.optim.clip < 0 or config.optim.weight_decay < 0:
        raise UserError("optim.lr, optim.warmup, optim.clip and optim.weight_decay must not be negative")
    if len(config.optim.betas) != 2 or not all(0 <= b < 1 for b in config.optim.betas):
        raise UserError(f"optim.betas={config.optim.betas} must be two numbers in [0, 1), e.g. [0.9,0.95]")
    if config.optim.steps is None and config.optim.epochs <= 0:
        raise UserError(f"optim.epochs={config.optim.epochs} must be above 0 (or set optim.steps)")
    if config.topology.timeout_s <= 0:
        raise UserError(f"topology.timeout_s={config.topology.timeout_s} must be above 0, in seconds")


def check_averaging(config, drafters, key):
    """With several averaging drafters `key`'s steps must be averaging steps: between them the replicas differ.

    Raises: UserError naming the nearest valid values.
    """
    section, name = key.split(".")
    every, sync = getattr(getattr(config, section), name), config.sync.every
    if drafters > 1 and config.sync.mode == "average" and every % sync:
        low, high = every // sync * sync, (every // sync + 1) * sync
        advice = f"{low} or {high}" if low else f"{high}"
        raise UserError(f"{key}={every} is not a multiple of sync.every={sync}: replicas differ between averages; use {advice}")


def from_command_line(argv, description):
    """The Config of a script that takes `--config FILE` and overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help=f"YAML file; default: {DEFAULT_PRESET.relative_to(DEFAULT_PRESET.parents[2])}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="see common/config.py")
    arguments = parser.parse_intermixed_args(argv)
    return load(arguments.config, arguments.overrides)


def json_object(text):
    """An argparse type: a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def positive(text):
    """An argparse type: a whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def check_output(flag, path):
    """Make the folder of a file that will be written, and try the file; raises UserError if it cannot be."""
    path = Path(path)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror}); name another file") from None


def run_script(main):
    """Call main(argv) and exit: UserError becomes one line on stderr and code 2, Ctrl-C code 130."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.exit(130)


def _apply_override(tree, override):
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r} has no `=`; write section.key=value, e.g. optim.lr=1e-3")
    *sections, leaf = key.split(".")
    for section in sections:
        if tree.get(section) is None:  # an empty section of a preset
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section")
    try:
        tree[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML; quote it, e.g. {key}='\"text\"'") from None


def _near(name, choices):
    match = difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def _build(cls, tree, prefix):
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in tree.items():
        if key not in fields:
            raise UserError(f"unknown key {prefix}{key}{_near(str(key), list(fields))}; known: {', '.join(prefix + f for f in fields)}")
        annotation = fields[key].type
        if dataclasses.is_dataclass(annotation):
            if not isinstance(value or {}, dict):
                raise UserError(f"{prefix}{key} is a section; got {value!r}; write {prefix}{key}.<key>=value")
            values[key] = _build(annotation, value or {}, f"{prefix}{key}.")
        else:
            values[key] = _convert(value, annotation, prefix + key)
    return cls(**values)


def _convert(value, annotation, key):
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):  # YAML reads 1e-3 as text
            try:
                number = float(value)
            except ValueError:
                continue
            if not math.isfinite(number):
                raise UserError(f"{key}={value!r} must be a finite number")
            return number
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option in (str, bool) and isinstance(value, option):
            return value
        if typing.get_origin(option) is list and isinstance(value, list):
            (inner,) = typing.get_args(option)
            return [_convert(v, inner, f"{key}[{i}]") for i, v in enumerate(value)]
    wanted = " or ".join(getattr(o, "__name__", str(o)) if typing.get_origin(o) is None else str(o) for o in options)
    raise UserError(f"{key}={value!r} must be {wanted.replace('NoneType', 'null')}")
