"""A target in fixed shapes: a cache of one capacity, so that a forward's kernels can be recorded once and replayed.

Eager transformers keep a GPU waiting for the host: at the 8B shape for nine tenths of the time. A recorded graph has no host in it, but its
shapes and addresses never change. So rows are written where they belong in buffers of `capacity` positions, and masks say what is seen.

Legend: B texts, R rows of a forward, S capacity, H heads of queries, G of keys and values, C channels of a head, F features of a position,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from common.decoding.target import DecodingTarget

GROUPED = "grouped_rows"  # our name among transformers' attention functions


class StaticLayer(CacheLayerMixin):
    """A layer's keys and values at all positions [1, G, S, C]; new rows go to `positions_R`, which the whole cache shares."""

    def __init__(self, cache: "StaticCache"):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, in the shape and on the device of the first rows."""
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.cache.capacity, states.shape[-1]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the rows; returns all positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.cache.positions_R, key_states)
        self.values.index_copy_(2, self.cache.positions_R, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.capacity, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class StaticCache(Cache):
    """Static layers of one capacity."""

    positions_R: Tensor
    """Where the next rows are written: int64 [R]."""

    def __init__(self, layers: int, capacity: int):
        self.capacity = capacity
        super().__init__(layers=[StaticLayer(self) for _ in range(layers)])

    def move(self, sources_R: Tensor, positions_R: Tensor) -> None:
        """Copy the rows at some positions to others: the accepted path of a tree to where a chain would have it."""
        layers: Sequence[Any] = self.layers
        for layer in layers:
            for states in (layer.keys, layer.values):
                states.index_copy_(2, positions_R, states.index_select(2, sources_R))


class StaticTarget:
    """A target over a cache of fixed capacity. A context of any length below it is behind the rows that are run."""

    def __init__(self, target: DecodingTarget, capacity: int):
        self.target, self.capacity, self.device = target, capacity, target.device
        self.cache = StaticCache(target.model.config.get_text_config(decoder=True).num_hidden_layers, capacity)
        AttentionInterface.register(GROUPED, grouped_attention)

    @torch.no_grad()
    def forward(self, ids_R: Tensor, start_1: Tensor, depth_R: Tensor, ancestors_RR: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows that follow `start` positions, each `depth` below the first and behind its `ancestors`, itself among them.

        Texts side by side ([B, R] ids) stand at the same place; what is given out is the first one's.
        Shapes: logits [R, V], features [R, F].
        """
        rows_R = start_1 + torch.arange(len(depth_R), device=self.device)
        positions_R = start_1 + depth_R
        key_S = torch.arange(self.capacity, device=self.device)
        own_S = (key_S - start_1).clamp(0, len(depth_R) - 1)  # a key's row, where it is one of these
        is_own_S = (key_S >= start_1) & (key_S < start_1 + len(depth_R))
        seen_RS = (key_S < start_1) | (is_own_S & ancestors_RR.index_select(1, own_S))
        back_RS = positions_R[:, None] - torch.where(is_own_S, positions_R.index_select(0, own_S), key_S)
        visible = {kind: seen_RS if window is None else seen_RS & (back_RS < window) for kind, window in self.target.windows.items()}
        self.cache.positions_R = rows_R
        model: Any = self.target.model
        own = model.config._attn_implementation
        model.set_attn_implementation(GROUPED)
        try:
            return self.target.run(ids_R, positions_R, visible, self.cache)
        finally:
            model.set_attn_implementation(own)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for few rows over many keys: each key is read once for all heads of its group.

    Shapes: query [B, H, R, C], key [B, G, S, C], value [B, G, S, C'], mask additive [1, 1, R, S] -> [B, R, H, C'].
    """
    batch, heads, rows, channels = query.shape
    groups, wide = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, groups, heads // groups * rows, channels)  # the heads of a group below each other
    scores = (grouped @ key.transpose(2, 3)).to(wide) * (channels**-0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores_BHRS = scores.view(batch, heads, rows, -1) + attention_mask
    if s_aux is not None:
        scores_BHRS = torch.cat((scores_BHRS, s_aux.to(wide)[:, None, None].expand(batch, -1, rows, 1)), dim=-1)
    shares = scores_BHRS.softmax(-1)[..., : key.shape[2]].to(value.dtype).reshape(*grouped.shape[:3], -1)
    return (shares @ value).view(batch, heads, rows, -1).transpose(1, 2), None


def fuse_norms(model: nn.Module) -> int:
    """Give the RMS norms of a model torch's single kernel in place of the seven of plain operations, where both give the same up to
    rounding. Returns how many."""
    fused = 0
    for module in model.modules():
        eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
        if not (type(module).__name__.endswith("RMSNorm") and isinstance(eps, float) and isinstance(weight, Tensor)):
            continue
        kernel = _norm(weight, eps)
        trial = torch.randn(4, len(weight), device=weight.device, generator=torch.Generator(weight.device).manual_seed(0)).to(weight.dtype)
        with torch.no_grad():
            if torch.allclose(module(trial), kernel(trial), rtol=2 * torch.finfo(weight.dtype).eps, atol=1e-6):
                module.forward = kernel
                fused += 1
    return fused


def _norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, (len(weight),), weight, eps)


class Recorded:
    """A function of fixed inputs and outputs whose kernels are recorded when it is made, and replayed when it is called.

    It reads and writes tensors that stay where they are. Elsewhere than on CUDA it is called each time.
    """

    def __init__(self, function: Callable[[], object], device: torch.device):
        self.function: Callable[[], object] = function
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # what is made at a first call must not be recorded
            for _ in range(2):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        self.function = graph.replay

    def __call__(self) -> None:
        self.function()


def fits(target: DecodingTarget) -> bool:
    """Whether a target can run in fixed shapes: its cache holds keys and values a position, on one device."""
    return bool(target.windows) and len({parameter.device for parameter in target.model.parameters()}) == 1


def records(target: DecodingTarget) -> bool:
    """Whether its steps can be recorded, too: by its family's own word nothing in its forward depends on data."""
    return fits(target) and getattr(target.model, "_can_compile_fullgraph", False)
