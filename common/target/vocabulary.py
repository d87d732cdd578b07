"""The target's frozen embedding and head, which the drafter shares.

Legend: V rows of the embedding, D hidden size.
"""

from dataclasses import dataclass

import torch

from common.errors import UserError
from common.target.files import Tensors, read_spec

EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True)
class Vocabulary:
    """The target's frozen embedding and head; a scale of the logits is part of the head.

    Shapes: embedding [V, D], head [V, D] (one storage where they are tied and nothing is scaled).
    """

    embedding: torch.Tensor
    head: torch.Tensor
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, spec, embedding, head):
        """The vocabulary of a TargetSpec; nothing is copied unless logits are scaled."""
        return cls(embedding, head if spec.logit_scale == 1.0 else head * spec.logit_scale, spec.embedding_scale, spec.logit_softcap)

    def embed(self, ids):
        """Embeddings of ids, scaled as the target scales them: [...] -> [..., D]."""
        rows = torch.nn.functional.embedding(ids, self.embedding)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def logits(self, hidden):
        """[..., D] -> [..., V], capped as the target caps them."""
        logits = torch.nn.functional.linear(hidden, self.head)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def load_vocabulary(folder, dtype, device):
    """Read embedding and head from a target's safetensors; a tied or absent head is the embedding.

    Raises: UserError if the folder has no embedding under a known name.
    """
    spec, tensors = read_spec(folder), Tensors(folder)
    names = set(tensors.names())
    embedding_name = next((n for n in EMBEDDING_NAMES if n in names), None)
    if embedding_name is None:
        raise UserError(f"{folder} has no embedding named {' or '.join(EMBEDDING_NAMES)}: this family is not supported")
    embedding = tensors.load(embedding_name, dtype, device)
    head_name = next((n for n in HEAD_NAMES if n in names), None)
    head = embedding if spec.tie_word_embeddings or head_name is None else tensors.load(head_name, dtype, device)
    return Vocabulary.of(spec, embedding, head)
