"""The target's frozen embedding and head, which the drafter shares.

Legend: V rows of the embedding, D hidden size, N tokens.
"""

import gc
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import UserError
from common.target.adapters import relative_distance, through_model
from common.target.files import TargetSpec, Tensors
from common.target.loading import load_first_layer

EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
CHECKED_TOKENS = 24
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.02}
"""Largest relative difference between the shared vocabulary and the model's own: rounding is smaller, a forgotten bias is not."""


@dataclass(frozen=True)
class Vocabulary:
    """The target's frozen embedding and head; a scale of the logits is part of the head.

    Shapes: embedding [V, D], head [V, D] (one storage where they are tied and nothing is scaled), bias [V] of the head.
    """

    embedding: Tensor
    head: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None = None

    @classmethod
    def of(cls, spec: TargetSpec, embedding: Tensor, head: Tensor, bias: Tensor | None = None) -> "Vocabulary":
        """The vocabulary of a target; nothing is copied unless logits are scaled."""
        rules = spec.vocabulary
        if rules.logit_scale != 1.0:
            head, bias = head * rules.logit_scale, None if bias is None else bias * rules.logit_scale
        return cls(embedding, head, rules.embedding_scale, rules.logit_softcap, bias)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids, scaled as the target scales them: [...] -> [..., D]."""
        rows = torch.nn.functional.embedding(ids, self.embedding)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def scaled_by(self, scale: float) -> "Vocabulary":
        """The same, its embeddings scaled otherwise: exported drafters take them as they are."""
        return replace(self, scale=scale)

    def uncapped(self, hidden_ND: Tensor) -> Tensor:
        """Logits before the cap: [N, D] -> [N, V]."""
        logits_NV = hidden_ND @ self.head.T
        return logits_NV if self.bias is None else logits_NV + self.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], capped as the target caps them."""
        logits = torch.nn.functional.linear(hidden, self.head, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def load_vocabulary(spec: TargetSpec, dtype: torch.dtype, device: torch.device | str) -> Vocabulary:
    """Embedding and head out of a target's safetensors; a tied head that the files lack is the embedding.

    Where they lie under other names or quantised, transformers loads them, with one layer of the target.
    Raises: UserError if the folder has no embedding or head, or one of another shape.
    """
    tensors = Tensors(spec.folder)
    names = [name for known in (EMBEDDING_NAMES, HEAD_NAMES) if (name := _plain(tensors, known, spec))]
    if not names or (len(names) == 1 and not spec.tie_word_embeddings):
        return vocabulary_of(spec, load_first_layer(spec.folder, dtype, torch.device(device), spec.trust_remote_code))
    embedding, head = (tensors.load(name, dtype, device) for name in (names[0], names[-1]))
    if spec.tie_word_embeddings and torch.equal(embedding, head):
        head = embedding
    bias = names[-1].removesuffix("weight") + "bias"
    return Vocabulary.of(spec, embedding, head, tensors.load(bias, dtype, device) if bias in tensors.names() else None)


def _plain(tensors: Tensors, known: tuple[str, ...], spec: TargetSpec) -> str | None:
    """The first known name under which the files hold a plain tensor. Raises: UserError if its shape is not the config's."""
    name = next((name for name in known if name in tensors.names()), None)
    if name is None or tensors.dtype(name) not in PLAIN:
        return None
    shape = (spec.vocab_size, spec.hidden_size)
    if tensors.shape(name) != shape:
        raise UserError(f"{spec.folder}: {name} is {list(tensors.shape(name))}, not {list(shape)} as in config.json; fetch it again")
    return name


@torch.no_grad()
def vocabulary_of(spec: TargetSpec, model: PreTrainedModel) -> Vocabulary:
    """The vocabulary of a model that transformers has loaded; quantised parts are read off what they compute."""
    embedding, head = (cast(Any, f()) for f in (model.get_input_embeddings, model.get_output_embeddings))
    bias, like = getattr(head, "bias", None), {"device": model.device, "dtype": model.dtype}
    rows, columns = embedding.weight, head.weight
    if not _is_plain(rows):
        rows = embedding(torch.arange(spec.vocab_size, device=model.device)) / getattr(embedding, "embed_scale", 1.0)
    if not _is_plain(columns):
        columns = (head(torch.eye(spec.hidden_size, **like)) - (0.0 if bias is None else bias)).T.contiguous()
    return Vocabulary.of(spec, rows, columns, bias)


def _is_plain(weight: Any) -> bool:
    return type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype in PLAIN


class FirstLayer(NamedTuple):
    """What a model of type `dtype` does to a few tokens: what its first layer gets, what its head gets, and the logits that it gives.

    Shapes: ids_N int64 [N]; embedded_ND, hidden_ND [N, D]; logits_NV [N, V].
    """

    ids_N: Tensor
    embedded_ND: Tensor
    hidden_ND: Tensor
    logits_NV: Tensor

    dtype: torch.dtype

    @classmethod
    @torch.no_grad()
    def of(cls, spec: TargetSpec, model: PreTrainedModel) -> "FirstLayer":
        """See a model do it."""
        ids_N = torch.linspace(0, spec.vocab_size - 1, CHECKED_TOKENS).long().to(model.device)
        return cls(ids_N, *through_model(model, ids_N), model.dtype)


@torch.no_grad()
def check_vocabulary(spec: TargetSpec, seen: FirstLayer, vocabulary: Vocabulary) -> None:
    """Compare the shared vocabulary with what a model itself does to a few tokens, before anything is learnt from it.

    Raises: UserError where the model's first layer gets, or its head gives, something else.
    """
    logits = vocabulary.logits(seen.hidden_ND.to(vocabulary.head.dtype))
    for what, ours, theirs in (
        ("its first layer gets other inputs than the embeddings", vocabulary.embed(seen.ids_N), seen.embedded_ND),
        ("it gives other logits than the head", logits, seen.logits_NV),
    ):
        if not (difference := relative_distance(ours.float(), theirs)) <= CHECK_TOLERANCE[seen.dtype]:
            raise UserError(
                f"{spec.folder}: {what} that its drafter would share (by {difference:.1%}): its family ({spec.model_type}) does more to "
                "them than this suite knows, or the checkpoint does not fit its config.json; it cannot be trained for"
            )


def check_files(spec: TargetSpec, dtype: torch.dtype, device: torch.device) -> None:
    """`check_vocabulary` of what drafters read from a target's files, on the model's first layer, which is enough to tell.

    The layer goes before the vocabulary comes: a stage of a large target has no room for the embedding and head of both.
    Raises: UserError where it is not the model's own.
    """
    seen = FirstLayer.of(spec, load_first_layer(spec.folder, dtype, device, spec.trust_remote_code))
    gc.collect()  # models refer to themselves
    check_vocabulary(spec, seen, load_vocabulary(spec, dtype, device))
