"""The frozen target: loaded once, tapped at some layers, stopped after the last of them.

Documents of one row never see each other. One by one (`per_document`) is the reference. `packed` runs the whole row in one forward whose
positions restart at every document; `batched` runs documents side by side, filled up on the right, for families whose layers carry a
state from token to token.

Legend: T tokens of a row, B documents of a batch, N tokens of its longest, D hidden size, M taps, F = M*D (+ D when the final hidden
state travels too).
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common import compile_cache
from common.data.rows import Row
from common.errors import UserError
from common.target.adapters import decoder_layers, decoder_of, layer_signature, set_layers
from common.target.attention import VARLEN, register_varlen
from common.target.execution import BATCHED, PACKED, PER_DOCUMENT, Way, choose, document_batches, relative_difference, trial_row
from common.target.loading import load_causal_lm

CUT_TOLERANCE = 1e-3
"""Largest relative difference that leaving out later layers may make to a tap: the rounding of kernels that add in any order."""


class Target:
    """A causal language model (of transformers) that gives out hidden states and nothing else.

    No row holds more than `row_documents` documents. `fallbacks` says in words which faster ways this family cannot take, and why.

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
        self.device, self.dtype, self.taps, self.final_hidden = model.device, model.dtype, tuple(taps), final_hidden
        self._slots = row_documents + 1  # the padding runs as a document too
        self.decoder = decoder_of(model)
        self.hidden_size = self.decoder.config.hidden_size
        layers = decoder_layers(self.decoder)
        if any(not 0 <= tap < len(layers) for tap in taps):
            raise UserError(f"drafter.taps={list(taps)}: the target has layers 0..{len(layers) - 1}")
        self._reference = self.way = Way(PER_DOCUMENT, self.decoder.config._attn_implementation)
        self._destination: Any = None  # where the hooks write the forward in flight
        for index, tap in enumerate(taps):
            layers[tap].register_forward_hook(functools.partial(self._write, index))
        if not final_hidden:
            self._cut(max(taps) + 1)
        self.fallbacks = self._choose(execution)
        if compile_layers and self.way == Way(PACKED, VARLEN):  # other attention gets a mask or none, by the row
            self._compile()

    @property
    def width(self) -> int:
        """Values per token: the taps' hidden states and, if asked for, the final one."""
        return (len(self.taps) + self.final_hidden) * self.hidden_size

    @property
    def execution(self) -> str:
        """How the documents of a row run."""
        return self.way.execution

    @torch.no_grad()
    def capture(self, row: Row, out_TF: Tensor) -> None:
        """Write the features of a row into `out_TF` [T, F]; padding's are finite and mean nothing.

        Source: tap l is the output of decoder layer l (`hidden_states[l + 1]` of transformers).
        """
        if row.valid == 0:
            out_TF.zero_()
        elif self.execution == PACKED:
            self._forward(row.tokens[None], row.positions()[None], (out_TF, None, None), self._varlen_arguments(row))
        elif self.execution == PER_DOCUMENT:
            out_TF[row.valid :].zero_()
            for begin, end in row.spans():
                positions_1N = np.arange(end - begin, dtype=np.int32)[None]
                self._forward(row.tokens[None, begin:end], positions_1N, (out_TF[begin:end], None, None), {})
        else:
            out_TF[row.valid :].zero_()
            for batch in document_batches(row):
                positions_BN = np.broadcast_to(np.arange(batch.tokens_BN.shape[1], dtype=np.int32), batch.tokens_BN.shape)
                destination = out_TF, self._ship(batch.source), self._ship(batch.rows)
                self._forward(batch.tokens_BN, positions_BN, destination, {})

    def features(self, row: Row, way: Way) -> Tensor:
        """Features of a row run in a given way: [T, F]."""
        self._use(way)
        out_TF = torch.zeros(len(row.tokens), self.width, dtype=self.dtype, device=self.device)
        self.capture(row, out_TF)
        return out_TF

    def _use(self, way: Way) -> None:
        self.way = way
        if self.decoder.config._attn_implementation != way.attention:
            self.decoder.set_attn_implementation(way.attention)

    def _choose(self, asked: str) -> list[str]:
        """Take the fastest way that is exact; returns why faster ones are not taken."""
        own, varlen = self._reference.attention, register_varlen()
        half = self.device.type == "cuda" and self.dtype in (torch.bfloat16, torch.float16)
        ways = [Way(PACKED, varlen)] if half else [Way(PACKED, own), Way(PACKED, varlen)]
        config = self.decoder.config
        kinds = set(getattr(config, "layer_types", None) or ())
        way, refused = choose(asked, [*ways, Way(BATCHED, own)], self._reference, self.features, kinds, config.vocab_size, self.hidden_size)
        self._use(way)
        return refused

    def _cut(self, layers: int) -> None:
        """Leave out the layers behind the last tap, if that changes no tap: some families look at their last layers first.

        The norm behind them stays: some families use it elsewhere, and it costs nothing.
        """
        row = trial_row(self.decoder.config.vocab_size)
        truth, whole = self.features(row, self._reference), decoder_layers(self.decoder)
        set_layers(self.decoder, whole[:layers])
        try:
            difference = relative_difference(self.features(row, self._reference), truth, self.hidden_size)
        except Exception:  # the code of any family runs here
            difference = np.inf
        if difference > CUT_TOLERANCE:
            set_layers(self.decoder, whole)

    def _forward(
        self,
        tokens_BN: np.ndarray,
        positions_BN: np.ndarray,
        destination: tuple[Tensor, Tensor | None, Tensor | None],
        extra: dict[str, Any],
    ) -> None:
        ids, positions = self._ship(tokens_BN.astype(np.int64)), self._ship(positions_BN.astype(np.int64))
        self._destination = destination
        final = self.decoder(input_ids=ids, position_ids=positions, use_cache=False, **extra)[0]
        if self.final_hidden:
            self._keep(len(self.taps), final)
        self._destination = None

    def _ship(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _write(self, index, layer, inputs, output):
        self._keep(index, output[0] if isinstance(output, tuple) else output)

    def _keep(self, index, hidden_BND):
        """Write a hidden state into its columns of the features, each token where it belongs."""
        out_TF, source, rows = self._destination
        columns, hidden = out_TF[:, index * self.hidden_size : (index + 1) * self.hidden_size], hidden_BND.flatten(0, 1)
        if source is None:
            columns.copy_(hidden)
        else:
            columns[rows] = hidden[source].to(columns.dtype)

    def _varlen_arguments(self, row):
        """Cumulative lengths, the padding as one more document, filled up with empty ones to one length for all rows, so that nothing
        recompiles."""
        if self.way.attention != VARLEN:
            return {}
        total = len(row.tokens)
        starts = np.flatnonzero(row.document_start == np.arange(total))
        cumulative = np.full(self._slots + 1, total, np.int32)
        cumulative[: len(starts)] = starts
        on_device = self._ship(cumulative)
        return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": total, "max_length_k": total}

    def _compile(self):
        def run(layer, args, kwargs):
            return type(layer).forward(layer, *args, **kwargs)

        for layer in decoder_layers(self.decoder):
            compiled = compile_cache.handle("target_layer", run, self.device, signature=(self.dtype, layer_signature(layer)))
            layer.forward = functools.partial(_call_layer, compiled, layer)


def _call_layer(compiled, layer, *args, **kwargs):
    return compiled(layer, args, kwargs)


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """A frozen causal language model from a folder of safetensors. Raises: UserError if it does not load whole."""
    return load_causal_lm(folder, dtype, device, "target.path", trust_remote_code)
