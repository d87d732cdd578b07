"""The frozen target: loaded once, tapped at some layers, stopped after the last of them.

Documents of one row never see each other. One by one (`per_document`) is the reference. `packed` runs the whole row in one forward whose
positions restart at every document; `batched` runs documents side by side, filled up on the right, for families whose layers carry a
state from token to token.

Of a target that is a chain of stages, a Target runs one: a range of the layers, on the residual stream that the stage before gave out.

Legend: T tokens of a row, B documents of a batch, N tokens of its longest, D hidden size, M taps, F = M*D (+ D when the final hidden
state travels too), G = what the stage before gave out for a token: all features so far, and behind them the residual stream.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from common import compile_cache
from common.data.rows import Row
from common.errors import UserError
from common.target.adapters import decoder_layers, decoder_of, first_line, layer_signature, set_layers
from common.target.attention import VARLEN, register_varlen
from common.target.execution import BATCHED, PACKED, PER_DOCUMENT, Way, document_batches, exact_ways, relative_difference, trial_row
from common.target.late_start import LateStart
from common.target.loading import load_causal_lm
from common.target.placement import Placement

COMPILED_KINDS = {"full_attention", "sliding_attention"}
"""Layers of other kinds bring kernels of their own."""
CUT_TOLERANCE = 1e-3
"""Largest relative difference that leaving out later layers may make to a tap: the rounding of kernels that add in any order."""


class Target:
    """A causal language model (of transformers) that gives out hidden states and nothing else.

    No row holds more than `row_documents` documents. `fallbacks` says in words which faster ways this family cannot take, and why.

    `layers` are those that a stage of a chain runs. All stages of a chain must run the documents in one way: `exact_ways` are those that
    this stage can, the fastest first, and `take_way` tells it which one.

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
        layers: range | None = None,
    ):
        self.device, self.dtype, self.taps, self.final_hidden = model.device, model.dtype, tuple(taps), final_hidden
        self._slots = row_documents + 1  # the padding runs as a document too
        self.decoder = decoder_of(model)
        self.hidden_size = self.decoder.config.hidden_size
        every_layer = decoder_layers(self.decoder)
        if any(not 0 <= tap < len(every_layer) for tap in taps):
            raise UserError(f"drafter.taps={list(taps)}: the target has layers 0..{len(every_layer) - 1}")
        self._reference = self.way = Way(PER_DOCUMENT, self.decoder.config._attn_implementation)
        self._destination: Any = None  # where the hooks write the forward in flight
        for index, tap in enumerate(taps):
            every_layer[tap].register_forward_hook(functools.partial(self._write, index))
        self._compile_layers, self._first = compile_layers, 0
        self._late: LateStart | None = None
        if layers is not None:
            self._become_stage(layers)
        elif not final_hidden:
            self._cut(max(taps) + 1)
        self.exact_ways, self.fallbacks = self._try_ways(execution, all_of_them=layers is not None)
        if layers is None:
            self.take_way(self.exact_ways[0])

    @property
    def width(self) -> int:
        """Values per token: the taps' hidden states and, if asked for, the final one."""
        return (len(self.taps) + self.final_hidden) * self.hidden_size

    @property
    def execution(self) -> str:
        """How the documents of a row run."""
        return self.way.execution

    @torch.no_grad()
    def capture(self, row: Row, out_TF: Tensor, before_TG: Tensor | None = None) -> None:
        """Write the features of a row into `out_TF` [T, F]; padding's are finite and mean nothing.

        A later stage of a chain gets `before_TG` and writes [T, G - D + F]: the features of the stages before, its own behind them.

        Source: tap l is the output of decoder layer l (`hidden_states[l + 1]` of transformers).
        """
        if row.valid == 0:
            out_TF.zero_()
            return
        residual_TD = None
        if before_TG is not None:
            passed = before_TG.shape[1] - self.hidden_size
            out_TF[:, :passed].copy_(before_TG[:, :passed])
            out_TF, residual_TD = out_TF[:, passed:], before_TG[:, passed:]
        if self.execution == PACKED:
            residual_BND = None if residual_TD is None else residual_TD[None]
            self._forward(row.tokens[None], row.positions()[None], residual_BND, (out_TF, None, None), self._varlen_arguments(row))
        elif self.execution == PER_DOCUMENT:
            out_TF[row.valid :].zero_()
            for begin, end in row.spans():
                positions_1N = np.arange(end - begin, dtype=np.int32)[None]
                residual_BND = None if residual_TD is None else residual_TD[None, begin:end]
                self._forward(row.tokens[None, begin:end], positions_1N, residual_BND, (out_TF[begin:end], None, None), {})
        else:
            out_TF[row.valid :].zero_()
            for batch in document_batches(row):
                positions_BN = np.broadcast_to(np.arange(batch.tokens_BN.shape[1], dtype=np.int32), batch.tokens_BN.shape)
                source, rows = self._ship(batch.source), self._ship(batch.rows)
                residual_BND = None
                if residual_TD is not None:
                    residual_BND = residual_TD.new_zeros(*batch.tokens_BN.shape, self.hidden_size)
                    residual_BND.flatten(0, 1)[source] = residual_TD[rows]
                self._forward(batch.tokens_BN, positions_BN, residual_BND, (out_TF, source, rows), {})

    def warm(self, row: Row, out_TF: Tensor, before_TG: Tensor | None = None) -> None:
        """Capture a row, so that everything is compiled; layers that do not compile run as they are, and `fallbacks` says so."""
        try:
            self.capture(row, out_TF, before_TG)
        except (compile_cache.KernelError, TorchDynamoException) as error:
            self.fallbacks.append(f"layers are not compiled: {first_line(error)}")
            for layer in decoder_layers(self.decoder):
                vars(layer).pop("forward", None)
            self.capture(row, out_TF, before_TG)

    def features(self, row: Row, way: Way) -> Tensor:
        """Features of a row run in a given way: [T, F]."""
        self._use(way)
        out_TF = torch.zeros(len(row.tokens), self.width, dtype=self.dtype, device=self.device)
        self.capture(row, out_TF, None if self._late is None else self._noise(row))
        return out_TF

    def _first_features(self, row: Row) -> Tensor:
        """Features of a row by the reference. Raises: UserError where the family does not run at all."""
        try:
            return self.features(row, self._reference)
        except UserError:
            raise
        except Exception as error:  # the code of any family runs here
            raise UserError(f"target family {self.decoder.config.model_type} does not run here: {first_line(error)}") from None

    def _noise(self, row: Row) -> Tensor:
        """What a trial of a later stage begins with: another vector for every token, small beside what a layer adds to it, so that what
        layers do shows."""
        names, which = np.unique(row.tokens, return_inverse=True)
        table = 0.02 * torch.randn(len(names), self.hidden_size, generator=torch.Generator().manual_seed(0))
        return table[torch.from_numpy(which)].to(self.device, self.dtype)

    def _use(self, way: Way) -> None:
        self.way = way
        if self.decoder.config._attn_implementation != way.attention:
            self.decoder.set_attn_implementation(way.attention)

    def take_way(self, way: Way) -> None:
        """Run the documents in this way from now on; layers are compiled where that is exact and worth it."""
        self._use(way)
        if self._compile_layers and way == Way(PACKED, VARLEN):  # other attention gets a mask or none, by the row
            self._compile()

    def _try_ways(self, asked: str, all_of_them: bool) -> tuple[list[Way], list[str]]:
        """The ways that are exact, the fastest first, and why faster ones are not; not more than one unless `all_of_them`."""
        own, varlen = self._reference.attention, register_varlen()
        half = self.device.type == "cuda" and self.dtype in (torch.bfloat16, torch.float16)
        ways = [Way(PACKED, varlen)] if half else [Way(PACKED, own), Way(PACKED, varlen)]
        config = self.decoder.config
        kinds = set(getattr(config, "layer_types", None) or ())
        trial = self.features, kinds, config.vocab_size, self.hidden_size
        return exact_ways(asked, [*ways, Way(BATCHED, own)], self._reference, *trial, all_of_them)

    def _become_stage(self, layers: range) -> None:
        """Run a range of the layers. What the last stage of a chain leaves out behind it is not read, and so not tried."""
        set_layers(self.decoder, decoder_layers(self.decoder)[: layers.stop])
        self._first = layers.start
        if self._first:
            embedded_BND = torch.zeros(1, 2, self.hidden_size, dtype=self.dtype, device=self.device)
            self._late = LateStart(self.decoder, self._first, embedded_BND)
            try:
                self.features(trial_row(self.decoder.config.vocab_size), self._reference)
            except Exception as error:  # the code of any family runs here
                raise UserError(
                    f"target.stages: later layers of this family do not run by themselves ({first_line(error)}); use target.stages=1"
                ) from None

    def _cut(self, layers: int) -> None:
        """Leave out the layers behind the last tap, if that changes no tap: some families look at their last layers first.

        The norm behind them stays: some families use it elsewhere, and it costs nothing.
        """
        row = trial_row(self.decoder.config.vocab_size)
        truth, whole = self._first_features(row), decoder_layers(self.decoder)
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
        residual_BND: Tensor | None,
        destination: tuple[Tensor, Tensor | None, Tensor | None],
        extra: dict[str, Any],
    ) -> None:
        positions = self._ship(positions_BN.astype(np.int64))
        self._destination = destination
        if self._late is None:
            ids = self._ship(tokens_BN.astype(np.int64))
            final = self.decoder(input_ids=ids, position_ids=positions, use_cache=False, **extra)[0]
        else:
            assert residual_BND is not None, "a later stage is given the residual stream"
            final = self._late.run(residual_BND, position_ids=positions, use_cache=False, **extra)[0]
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
        if hidden_BND.dim() != 3:
            raise UserError(f"layers of this family give out {list(hidden_BND.shape)}, not one hidden state a token: it cannot be tapped")
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

        kinds = getattr(self.decoder.config, "layer_types", None) or ()
        for i, layer in enumerate(decoder_layers(self.decoder)):
            if i < self._first or not {*kinds[i : i + 1]} <= COMPILED_KINDS:
                continue
            compiled = compile_cache.handle("target_layer", run, self.device, signature=(self.dtype, layer_signature(layer)))
            layer.forward = functools.partial(_call_layer, compiled, layer)


def _call_layer(compiled, layer, *args, **kwargs):
    return compiled(layer, args, kwargs)


def load_model(
    folder: str | Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False, layers: range | None = None
) -> PreTrainedModel:
    """A frozen causal language model from a folder of safetensors, as far as a Target needs it: no head, of a stage its layers alone.

    Raises: UserError if it does not load whole.
    """
    if layers is None:
        part = Placement(device, outside=False)
    else:
        part = Placement(device, dict.fromkeys(layers, device), embedding=layers.start == 0, outside=False)
    return load_causal_lm(folder, dtype, part, "target.path", trust_remote_code)
