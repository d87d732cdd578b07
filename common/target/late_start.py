"""Lets a decoder begin at a later layer, with the residual stream that an earlier stage of a chain has computed.

The decoder's own forward runs, so that masks, rotary tables and whatever else a family makes for its layers is made as always, and each
layer keeps its number. The layers before the first give on what they get, and the first one is handed the residual stream.

Legend: B documents of a batch, N tokens, D hidden size.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from common.errors import UserError
from common.target.adapters import decoder_layers

MADE_ANEW = frozenset(
    ("hidden_states", "attention_mask", "position_ids", "position_embeddings", "position_embeddings_local", "position_embeddings_global",
     "cache_position", "cache", "past_key_values", "past_key_value", "use_cache", "output_attentions", "output_router_logits",
     "output_hidden_states", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
)  # fmt: skip
"""What families hand to a layer beside the residual stream that follows from positions and lengths alone, or is off here."""


class LateStart:
    """Makes a decoder's forward begin at layer `first`, from 1: call `run` instead of the decoder. Its embedding is not used.

    Raises: UserError for a family whose layers take more from earlier ones, or from the tokens, than the residual stream.
    """

    def __init__(self, decoder: nn.Module, first: int, embedded_BND: Tensor):
        self._decoder: Any = decoder
        self._residual: Tensor | None = None
        layers = decoder_layers(decoder)
        for layer in layers[:first]:
            layer.forward = _give_on
        if self._look(layers[1], embedded_BND).hidden.ndim < embedded_BND.ndim:  # it took the first entry of what layer 0 gave out
            for layer in layers[:first]:
                layer.forward = _give_on_in_a_tuple
        if unknown := sorted(self._look(layers[first], embedded_BND).others):
            raise UserError(
                f"target.stages: layers of this family take {', '.join(unknown)} beside the residual stream, and a later stage of a "
                "chain has no more than that; use target.stages=1"
            )
        layers[first].register_forward_pre_hook(self._enter, with_kwargs=True)

    def run(self, residual_BND: Tensor, **arguments: Any) -> Any:
        """The decoder's output."""
        self._residual = residual_BND.contiguous()
        return self._decoder(inputs_embeds=self._residual, **arguments)

    def _enter(self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (self._residual, *inputs[1:]), kwargs
        return inputs, kwargs | {"hidden_states": self._residual}

    def _look(self, layer: nn.Module, embedded_BND: Tensor) -> "_Arrived":
        """What a forward brings to a layer."""

        def arrived(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Arrived(inputs, kwargs)

        hook = layer.register_forward_pre_hook(arrived, with_kwargs=True)
        try:
            self._decoder(inputs_embeds=embedded_BND, use_cache=False)
        except _Arrived as found:
            return found
        finally:
            hook.remove()
        raise AssertionError("a decoder runs its layers in order")


class _Arrived(Exception):
    """Ends a forward that has shown what it had to."""

    def __init__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]):
        self.hidden: Tensor = inputs[0] if inputs else kwargs["hidden_states"]
        self.others = {key for key, value in kwargs.items() if not _is_nothing(value) and key not in MADE_ANEW}
        self.others |= {f"input {i}" for i, value in enumerate(inputs) if i and not _is_nothing(value)}


def _is_nothing(value: Any) -> bool:
    """None, or what families hand from layer to layer for those that share keys, while none does."""
    return value is None or (isinstance(value, (Mapping, list, tuple)) and not value)


def _give_on(hidden_states: Tensor, *others: Any, **arguments: Any) -> Tensor:
    return hidden_states


def _give_on_in_a_tuple(hidden_states: Tensor, *others: Any, **arguments: Any) -> tuple[Tensor]:
    return (hidden_states,)
