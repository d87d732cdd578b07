"""The target's frozen embedding and head, which the drafter shares.

Legend: V rows of the embedding, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError
from common.target.files import TargetSpec, Tensors

EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True)
class Vocabulary:
    """The target's frozen embedding and head; a scale of the logits is part of the head.

    Shapes: embedding [V, D], head [V, D] (one storage where they are tied and nothing is scaled).
    """

    embedding: Tensor
    head: Tensor
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, spec: TargetSpec, embedding: Tensor, head: Tensor) -> "Vocabulary":
        """The vocabulary of a target; nothing is copied unless logits are scaled."""
        rules = spec.vocabulary
        return cls(embedding, head if rules.logit_scale == 1.0 else head * rules.logit_scale, rules.embedding_scale, rules.logit_softcap)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids, scaled as the target scales them: [...] -> [..., D]."""
        rows = torch.nn.functional.embedding(ids, self.embedding)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], capped as the target caps them."""
        logits = torch.nn.functional.linear(hidden, self.head)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def load_vocabulary(spec: TargetSpec, dtype: torch.dtype, device: torch.device | str) -> Vocabulary:
    """Read embedding and head from a target's safetensors; a tied head is the embedding.

    Raises: UserError if the folder has no embedding or head under a known name, or one of another shape.
    """
    tensors, shape = Tensors(spec.folder), (spec.vocab_size, spec.hidden_size)

    def load(what: str, known: tuple[str, ...]) -> Tensor:
        name = next((name for name in known if name in tensors.names()), None)
        if name is None:
            raise UserError(f"{spec.folder} has no {what} named {' or '.join(known)}: this family is not supported")
        if tensors.shape(name) != shape:
            raise UserError(f"{spec.folder}: {name} is {list(tensors.shape(name))}, not {list(shape)} as in config.json; fetch it again")
        return tensors.load(name, dtype, device)

    embedding = load("embedding", EMBEDDING_NAMES)
    return Vocabulary.of(spec, embedding, embedding if spec.tie_word_embeddings else load("head", HEAD_NAMES))
