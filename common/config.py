"""The run's configuration: one dataclass a section.

One default, one home: the field, with its choices and bounds in its type and its meaning in the docstring beneath it. What is read from
YAML and the command line is checked against these types by `config_reader`, and `train_drafter.py --help` prints them.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Bounds:
    """What a number must satisfy: from `least` to `most`, strictly `above`, strictly `below`; None is no bound."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        return not (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )

    def __str__(self) -> str:
        named = (("at least", self.least), ("at most", self.most), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {bound:,}" for word, bound in named if bound is not None)


Count = Annotated[int, Bounds(least=1, most=10**9)]
Size = Annotated[int, Bounds(least=1, most=10**6)]
Workers = Annotated[int, Bounds(least=1, most=4096)]
HeadSize = Annotated[int, Bounds(least=1, most=4096)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, below=1)]


@dataclass
class TargetConfig:
    path: str = ""
    """Folder of safetensors with config.json and tokenizer, or a hub id such as `Qwen/Qwen3-8B`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute type of the target and of the features that travel; float32 only for small targets and for exact comparisons."""
    trust_remote_code: bool = False
    """Run code that ships with the checkpoint. Leave it off unless you have read that code."""
    execution: Literal["auto", "packed", "batched", "per_document"] = "auto"
    """How the documents of a row run: `packed` (one forward), `batched` (side by side), `per_document` (the reference), `auto` (the first
    of them that a small row shows to be exact)."""
    stages: Workers = 1
    """Ranks that one target is spread over, a chain in which each has a range of its layers: for what one device cannot hold."""
    balance: Literal["time", "bytes"] = "time"
    """What stages are made even in: `time` (arithmetic a token), or `bytes`, where the largest stage would not fit its device."""
    compile: bool = True
    """Compile the target's layers on CUDA."""


@dataclass
class DrafterConfig:
    family: str = "dflash"
    """Kind of drafter, see common/families: `dflash`, `dflash2` (convolutions, a candidate selector), `dspark` (a Markov head) or
    `lilicorr` (a transformer over a lattice of candidates)."""
    layers: Annotated[int, Bounds(least=1, most=1000)] = 5
    """Transformer layers of the drafter."""
    taps: Literal["auto"] | list[int] = "auto"
    """Target layers whose outputs are the features (`auto`: as many as drafter layers, spread over the depth), or their indices."""
    block_size: Annotated[int, Bounds(least=2, most=1024)] = 16
    """Slots of a block: the known token and block_size - 1 proposals; of `dspark` block_size proposals, the first at the known token."""
    mask_token: str | int = "auto"
    """Id (or text) of the token that fills the unknown slots; `auto` takes the family's or an unused row of the embedding."""
    intermediate_size: Size | None = None
    """Width of the MLP; default: the target's."""
    heads: HeadSize | None = None
    """Query heads; default: the target's."""
    kv_heads: HeadSize | None = None
    """Key/value heads; default: `heads` where that is set, else the target's."""
    head_dim: HeadSize | None = None
    """Size of a head; default: the target's."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """`full_attention` or `sliding_attention` per layer; default: all full."""
    window: Annotated[int, Bounds(least=1, most=10**7)] | None = None
    """Positions that a sliding layer sees."""
    rope: Literal["auto", "own"] = "auto"
    """Rotary embedding: `auto` takes the target's frequencies where all engines make one table of them, `own` plain ones at its theta."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type; masters and moments are float32 in any case."""
    init: str = "random"
    """`random`, `target_layers` (copy what has the same role in the target's tapped layers), or the folder of an exported drafter."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time in the layers."""
    compile: bool = True
    """Compile the forward on CUDA."""
    zero_features: bool = False
    """Ablation: train on features set to zero, to see what the target's hidden states are worth."""
    options: Any = field(default=None, metadata={"hidden": True})
    """Settings that only the chosen family has, given as `drafter.<name>`."""


@dataclass
class DataConfig:
    path: str = ""
    """Token store written by `prepare_data.py pack`."""
    pack_tokens: Annotated[int, Bounds(least=2, most=10**7)] = 3072
    """Tokens of a row, the unit that travels; documents are packed into it and never straddle rows."""
    max_document_tokens: Count | None = None
    """Longest document; default: pack_tokens."""
    long_documents: Literal["truncate", "drop"] = "truncate"
    """What happens to longer documents: `truncate` or `drop`. Both are counted."""


@dataclass
class ObjectiveConfig:
    loss: Literal["ce", "kl", "tv", "lk"] = "ce"
    """`ce` on the data's tokens; `kl`, `tv` or `lk` distil the target's own distribution (needs its final hidden state)."""
    teacher: bool = True
    """Keep what a family's own loss compares with the target's distribution (needs its final hidden state); false trains without."""
    weights: Literal["decay", "dpace"] = "decay"
    """`decay`: exp(-(k-1)/gamma) for slot k; `dpace`: by the drafter's own confidence in the prefix (arXiv 2605.18810)."""
    gamma: Annotated[float, Bounds(above=0)] | None = None
    """Decay length in slots; default 7 for block 16, 5 for 10, 4 for 8, interpolated."""
    alpha: Share = 0.5
    """Smoothing of `dpace`."""
    anchors: Count | None = None
    """Blocks per packet; default pack_tokens / 6, rounded up so that blocks fill tiles of 128."""
    head: Literal["fused", "checkpoint"] = "fused"
    """`fused`: the head's input gradient is computed in the forward pass; `checkpoint`: the slow twin that recomputes."""


@dataclass
class OptimConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` for the matrices and AdamW for the vectors: learns more from the same steps, at the same learning rates."""
    lr: Annotated[float, Bounds(least=0, most=100)] = 6e-4
    """Peak learning rate."""
    betas: list[Share] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's moments' decay."""
    weight_decay: Annotated[float, Bounds(least=0, most=1000)] = 0.0
    """Decoupled weight decay."""
    warmup: NotNegative = 0.04
    """Share of all steps (below 1) or number of steps (1 and above) of linear warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """`cosine` to zero, `wsd` (constant, then the last 20% linear to zero; ahead of cosine where both were run) or `constant`."""
    clip: NotNegative = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    steps: Count | None = None
    """Optimiser steps; default: as many as `epochs` give."""
    epochs: Annotated[float, Bounds(above=0, most=10**6)] = 6.0
    """Passes over the data when `steps` is not set."""
    accumulate: Count = 1
    """Packets per drafter and optimiser step."""
    max_skipped: Count = 20
    """Non-finite steps in a row that stop the job."""


@dataclass
class SyncConfig:
    mode: Literal["average", "ddp"] = "average"
    """`average`: the drafters' weights are averaged every `every` steps; `ddp`: gradients are summed at every step."""
    every: Count = 50
    """Steps between two averagings."""
    outer: Literal["mean", "nesterov"] = "mean"
    """What an averaging does: `mean` takes the drafters' mean; `nesterov` goes towards it with momentum (DiLoCo's outer step)."""
    outer_lr: Annotated[float, Bounds(above=0)] = 0.7
    """Share of the way to the mean that `nesterov` goes."""
    outer_momentum: Annotated[float, Bounds(least=0, below=1)] = 0.9
    """Share of the last ways that `nesterov` goes again."""


@dataclass
class TopologyConfig:
    mode: Literal["auto", "solo", "threads", "processes"] = "auto"
    """`solo`, `threads`, `processes`, or `auto` (solo for one rank, processes for several)."""
    targets: Workers | None = None
    """Targets of an exchange group (a node; the whole job in a split launch), each of `target.stages` ranks; default: all but drafters."""
    drafters: Workers | None = None
    """Drafters of an exchange group; default: max(1, round(ranks / 4)), or the next number that leaves whole targets."""
    target_devices: list[str] | None = None
    """Threads mode: the targets' devices, e.g. [cuda:0,cuda:1]; each stage of a target has its own."""
    drafter_devices: list[str] | None = None
    """Threads mode: the drafters' devices."""
    cpu_threads: Annotated[int, Bounds(least=1, most=1024)] = 1
    """Threads of a CPU operator in every worker. Losses are bitwise equal over modes only while it is the same."""
    timeout_s: Annotated[float, Bounds(above=0, most=1e7)] = 600.0
    """Longest wait for another rank before the stalest one is named and the job ends."""


@dataclass
class LinkConfig:
    depth: Annotated[int, Bounds(least=2, most=64)] = 2
    """Packet buffers at each end, at least 2: one is filled while another leaves."""
    backend: Literal["auto", "nccl", "staged"] = "auto"
    """`auto` (NCCL between CUDA devices, gloo on CPU), `nccl`, or `staged` (CUDA features through pinned host memory and gloo)."""


@dataclass
class CheckpointConfig:
    every: Count = 500
    """Steps between checkpoints; a multiple of sync.every where several drafters average."""
    keep: Count = 3
    """Newest checkpoints and exports kept."""
    keep_best: bool = True
    """Also keep the checkpoint and export with the best held-out tau."""
    resume: str = "auto"
    """`auto` (the newest valid checkpoint), `never` (start over), or a checkpoint folder."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys that may differ from the checkpoint's config, e.g. [optim.lr]."""


@dataclass
class ValidationConfig:
    path: str | None = "auto"
    """Token store of held-out conversations; `auto`: `<data.path>-heldout`, if it is there, which must be what `pack --heldout` held out
    of data.path; null: none."""
    every: Count = 500
    """Steps between validations; the last step always validates."""
    rows: Count | None = 64
    """Rows validated, all of them if null."""
    tree_budget: Annotated[int, Bounds(least=1, most=4096)] = 16
    """Nodes of the tree whose acceptance length is reported beside the chain's."""


@dataclass
class LogConfig:
    dir: str | None = None
    """Run directory; default runs/<name of the preset>."""
    every: Count = 10
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
    seed: Annotated[int, Bounds(least=0, most=10**15)] = 0
    """Seed of everything drawn: packing, order, anchors, initial weights."""


BEFORE: dict[str, Any] = {}
"""What a key meant before it existed, where today's default is something else: old checkpoints are read with these."""
