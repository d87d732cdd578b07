"""Attention that keeps the documents of a packed row apart, under a name of its own among transformers' attention functions.

In half precision on CUDA it is torch's variable-length attention, with sinks and windows. What that kernel does not do (a cap of the
scores, other types, other devices, wide heads) goes document by document in plain operations, which are also the kernel's slow twin.

Legend: T tokens of a row, N of a document, Q of a group of queries, H heads of queries, G of keys and values, C channels of a head.
"""

import inspect
import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface

from common.errors import UserError

VARLEN = "packed_varlen"  # our name among transformers' attention functions
VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
WIDEST_HEAD = 256
"""Channels of a head that the variable-length kernel takes at most."""
QUERY_ROWS = 1024
"""Queries of a document whose scores are held at once by the slow twin."""
IGNORED = frozenset(
    ("dropout", "position_ids", "position_embeddings", "is_causal", "use_cache", "cache", "past_key_values", "cache_position", "layer_idx",
     "cu_seq_lens_k", "max_length_k", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep")
)  # fmt: skip
"""What families hand to their attention that changes nothing here: no dropout, no cache, and every document is causal."""


def register_varlen() -> str:
    """Make `varlen_attention` known to transformers; returns its name."""
    AttentionInterface.register(VARLEN, varlen_attention)
    return VARLEN


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: causal within each document, windows in its positions, `s_aux` as a sink a head.

    Shapes: query [1, H, T, C], key [1, G, T, C], value [1, G, T, C'] -> [1, T, H, C'].
    Raises: UserError where the family asks for more than this.
    """
    if unknown := sorted(name for name, given in other.items() if given is not None and name not in IGNORED):
        raise UserError(f"its attention takes {', '.join(unknown)}, which packed rows do not know")
    if cu_seq_lens_q is None or max_length_q is None:
        raise UserError("it does not pass document lengths on to its attention")
    if not torch.compiler.is_compiling():
        _check_window(module, sliding_window)
    kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None and query.shape[-1] <= WIDEST_HEAD
    if kernel:
        return _by_kernel(query, key, value, scaling, cu_seq_lens_q, max_length_q, sliding_window, s_aux), None
    return by_document(query, key, value, cu_seq_lens_q, scaling, sliding_window, softcap, s_aux), None


def _check_window(module: nn.Module, sliding_window: int | None) -> None:
    """A window that a family puts into its mask alone, which is not made here, would be lost. Raises: UserError."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and isinstance(index, int) and (kinds[index] == "sliding_attention") != (sliding_window is not None):
        raise UserError("it does not tell its attention the window")


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    cumulative: Tensor,
    longest: int,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    channels = value.shape[-1]
    value = nn.functional.pad(value, (0, query.shape[-1] - channels))
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in VARLEN_OPTIONS:  # torch 2.11 has no grouped heads here
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    if scaling is not None:
        options["scale"] = scaling
    inputs = query, key, value, cumulative, cumulative, longest, longest
    if sinks_H is None:
        return cast(Tensor, varlen_attn(*inputs, **options))[None, ..., :channels]
    out_THC, logsumexp_HT = varlen_attn(*inputs, return_aux=AuxRequest(lse=True), **options)
    share_TH = torch.sigmoid(logsumexp_HT.T - sinks_H.float())  # a sink takes the rest of every query's softmax and gives nothing
    return (out_THC * share_TH[..., None]).to(query.dtype)[None, ..., :channels]


@torch.library.custom_op("target::attend_by_document", mutates_args=())  # one node of a compiled layer: where documents end is data
def by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cumulative: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The same, one document after the other.

    Shapes: query [1, H, T, C], key [1, G, T, C], value [1, G, T, C'], cumulative [documents + 1 or more] -> [1, T, H, C'].
    """
    scale, groups, bounds = query.shape[-1] ** -0.5 if scaling is None else scaling, query.shape[1] // key.shape[1], cumulative.tolist()
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    wide = torch.promote_types(query.dtype, torch.float32)
    for begin, end in itertools.pairwise(bounds):
        for first in range(begin, end, QUERY_ROWS):
            last = min(first + QUERY_ROWS, end)
            start = begin if window is None else max(begin, first - window + 1)
            keys, values = (x[0, :, start:last].repeat_interleave(groups, dim=0) for x in (key, value))
            scores_HQN = (query[0, :, first:last] @ keys.transpose(1, 2)).to(wide) * scale
            if softcap is not None:
                scores_HQN = softcap * torch.tanh(scores_HQN / softcap)
            back_QN = torch.arange(first, last, device=query.device)[:, None] - torch.arange(start, last, device=query.device)
            scores_HQN.masked_fill_((back_QN < 0) | (back_QN >= (window or last)), -torch.inf)
            if sinks_H is not None:
                scores_HQN = torch.cat([scores_HQN, sinks_H.to(wide)[:, None, None].expand(-1, last - first, 1)], dim=-1)
            shares_HQN = scores_HQN.softmax(-1)[..., : last - start].to(values.dtype)
            out[first:last] = (shares_HQN @ values).transpose(0, 1)
    return out[None]


@by_document.register_fake
def _(query, key, value, cumulative, scaling, window, softcap, sinks_H):
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
