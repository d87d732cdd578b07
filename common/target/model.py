"""The frozen target: loaded once, tapped at some layers, stopped after the last of them.

Documents of one row never see each other. `per_document` runs them one by one and is the reference; `packed` runs the whole row in one
forward whose positions restart at every document, in half precision on CUDA through variable-length attention.

Legend: T tokens of a row, N tokens of a document, D hidden size, M taps, F = M*D (+ D when the final hidden state travels too).
"""

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from common import compile_cache
from common.data.rows import Row
from common.errors import UserError
from common.target.loading import load_causal_lm

VARLEN = "packed_varlen"  # our name among transformers' attention functions
VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
LAYER_KINDS = {"full_attention", "sliding_attention"}
PACKED_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Largest relative difference of a token's features, packed against apart: rounding over many layers stays below, a leak does not."""


class Target:
    """A causal language model (of transformers) that gives out hidden states and nothing else.

    No row holds more than `row_documents` documents.

    Raises: UserError for taps out of range and for families that cannot run as asked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        taps: Sequence[int],
        execution: str = "auto",
        final_hidden: bool = False,
        compile_layers: bool = True,
        row_documents: int = 64,
    ):
        device, dtype = model.device, model.dtype
        self.device, self.dtype, self.taps, self.final_hidden = device, dtype, tuple(taps), final_hidden
        self._slots = row_documents + 1  # the padding runs as a document too
        self.decoder: Any = model.get_decoder()
        self.hidden_size = self.decoder.config.hidden_size
        layers: Any = self.decoder.layers
        if any(not 0 <= tap < len(layers) for tap in taps):
            raise UserError(f"drafter.taps={list(taps)}: the target has layers 0..{len(layers) - 1}")
        if not final_hidden:
            self.decoder.layers = layers[: max(taps) + 1]
            self.decoder.config.num_hidden_layers = max(taps) + 1
            self.decoder.norm = nn.Identity()
        self._varlen = attention_for(device, dtype) == VARLEN
        self._out: Any = None  # where the hooks write the forward in flight
        for index, tap in enumerate(taps):
            layers[tap].register_forward_hook(functools.partial(self._write, index))
        self.execution = self._choose(execution)
        if compile_layers and self._varlen and self.execution == "packed":  # other attention gets a mask or none, by the row
            self._compile()

    @property
    def width(self) -> int:
        """Values per token: the taps' hidden states and, if asked for, the final one."""
        return (len(self.taps) + self.final_hidden) * self.hidden_size

    @torch.no_grad()
    def capture(self, row: Row, out_TF: Tensor) -> None:
        """Write the features of a row into `out_TF` [T, F]; padding's are finite and mean nothing.

        Source: tap l is the output of decoder layer l (`hidden_states[l + 1]` of transformers).
        """
        if row.valid == 0:
            out_TF.zero_()
        elif self.execution == "packed":
            self._forward(row.tokens, row.positions(), out_TF, self._lengths(row))
        else:
            out_TF[row.valid :].zero_()
            for begin, end in row.spans():
                self._forward(row.tokens[begin:end], np.arange(end - begin, dtype=np.int32), out_TF[begin:end], None)

    def _forward(self, tokens_N: np.ndarray, positions_N: np.ndarray, out_NF: Tensor, lengths: np.ndarray | None) -> None:
        ids = self._ship(tokens_N.astype(np.int64))
        positions = self._ship(positions_N.astype(np.int64))
        self._out = out_NF
        extra = {} if lengths is None or not self._varlen else self._varlen_arguments(lengths)
        final = self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra)[0]
        if self.final_hidden:
            out_NF[:, len(self.taps) * self.hidden_size :].copy_(final[0])
        self._out = None

    def _ship(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _write(self, index, layer, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        self._out[:, index * self.hidden_size : (index + 1) * self.hidden_size].copy_(hidden[0])

    @staticmethod
    def _lengths(row: Row) -> np.ndarray:
        """Lengths of a row's documents, its padding as one more."""
        starts = np.flatnonzero(row.document_start == np.arange(len(row.tokens)))
        return np.diff(np.append(starts, len(row.tokens)))

    def _varlen_arguments(self, lengths):
        """Cumulative lengths, filled up with empty documents to one length for all rows, so that nothing recompiles."""
        cumulative = np.full(self._slots + 1, lengths.sum(), np.int32)
        cumulative[: len(lengths) + 1] = np.concatenate([[0], np.cumsum(lengths)])
        on_device = self._ship(cumulative)
        total = int(lengths.sum())
        return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": total, "max_length_k": total}

    def _choose(self, execution):
        """`packed` where the family runs its documents apart in one forward: checked on a small row, not believed."""
        kinds = set(getattr(self.decoder.config, "layer_types", None) or ["full_attention"])
        if execution == "per_document" or not kinds <= LAYER_KINDS:
            if execution == "packed":
                raise UserError(
                    f"target.execution=packed: layers {sorted(kinds - LAYER_KINDS)} carry state over documents; use per_document"
                )
            return self._plain_attention()
        difference = self._packed_difference()
        if difference <= PACKED_TOLERANCE[self.dtype]:
            return "packed"
        if execution == "packed":
            raise UserError(
                f"target.execution=packed: documents of one row change each other by {difference:.1e}; use target.execution=per_document"
            )
        return self._plain_attention()

    def _plain_attention(self):
        self._varlen = False
        self.decoder.set_attn_implementation("sdpa")
        return "per_document"

    def _packed_difference(self):
        """Largest relative difference, over tokens and taps, between a packed row of two documents and the documents by themselves."""
        N, vocabulary = 24, self.decoder.config.vocab_size
        tokens = (np.arange(2 * N) * 7919 % vocabulary).astype(np.int32)
        row = Row(tokens, np.repeat([0, N], N).astype(np.int32), np.ones(2 * N, np.uint8), 2 * N, 2)
        packed, apart = (torch.zeros(2 * N, self.width, dtype=self.dtype, device=self.device) for _ in range(2))
        for self.execution, out in (("packed", packed), ("per_document", apart)):
            if self.execution == "per_document" and self._varlen:
                self.decoder.set_attn_implementation("sdpa")
            self.capture(row, out)
        if self._varlen:
            self.decoder.set_attn_implementation(VARLEN)
        packed, apart = (x.float().unflatten(1, (-1, self.hidden_size)) for x in (packed, apart))
        return float(((packed - apart).norm(dim=-1) / apart.norm(dim=-1).clamp(min=1e-12)).max())

    def _compile(self):
        def run(layer, hidden_states, kwargs):
            return type(layer).forward(layer, hidden_states, **kwargs)

        kinds = getattr(self.decoder.config, "layer_types", None) or ["full_attention"] * len(self.decoder.layers)
        for layer, kind in zip(self.decoder.layers, kinds, strict=False):
            compiled = compile_cache.handle("target_layer", run, self.device, signature=(self.hidden_size, self.dtype, kind))
            layer.forward = functools.partial(_call_layer, compiled, layer)


def _call_layer(compiled, layer, hidden_states, **kwargs):
    return compiled(layer, hidden_states, kwargs)


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
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over torch's variable-length attention: causal within each document.

    Shapes: query [1, H, T, d], key and value [1, G, T, d] -> [1, T, H, d].
    """
    if unknown := [name for name in ("softcap", "s_aux") if other.get(name) is not None]:
        raise UserError(f"target.execution=packed does not know this family's attention ({', '.join(unknown)}); use per_document")
    if cu_seq_lens_q is None or max_length_q is None:
        raise UserError("this target family does not pass document lengths on to its attention; use target.execution=per_document")
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # torch 2.11 has no grouped heads here
    options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    if "enable_gqa" in VARLEN_OPTIONS:
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    if scaling is not None:
        options["scale"] = scaling
    out = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)
    return cast(Tensor, out)[None], None


def attention_for(device: torch.device, dtype: torch.dtype) -> str:
    """The name of transformers' attention function for a target on this device: variable-length attention where it runs."""
    AttentionInterface.register(VARLEN, varlen_attention)
    return VARLEN if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "sdpa"


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """A frozen causal language model from a folder of safetensors, its attention ready for packed documents.

    Raises: UserError if it does not load whole.
    """
    kind = attention_for(device, dtype)
    return load_causal_lm(folder, dtype, device, "target.path", trust_remote_code, attn_implementation=kind)
