"""What is evaluated: a target and a drafter, loaded, and in which ways the drafter can be used."""

from dataclasses import dataclass
from typing import Any

import torch

from common.cli import open_device
from common.data.chat import Chat, load_tokenizer
from common.decoding.speculate import BlockDrafter, Way, load_drafter
from common.decoding.target import DecodingTarget, load_target
from common.drafter.backbone import Drafter
from common.drafter.export import read_feature_dtype
from common.errors import UserError
from common.families.registry import FAMILIES
from common.target.files import TargetSpec, read_spec, resolve
from common.target.vocabulary import Vocabulary


@dataclass(frozen=True)
class Questioned:
    """The target as far as asking it goes: its files are read, its weights are not."""

    spec: TargetSpec
    chat: Chat

    @classmethod
    def open(cls, target: str, chat_template_kwargs: dict[str, Any], trust_remote_code: bool = False) -> "Questioned":
        """Raises: UserError if the folder holds no target."""
        folder = resolve(target)
        return cls(read_spec(folder, trust_remote_code), Chat(load_tokenizer(folder, trust_remote_code), chat_template_kwargs))

    @property
    def stop(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self.spec.eos_token_ids or (self.chat.tokenizer.eos_token_id,)


@dataclass(frozen=True)
class Subject:
    """A target, and a drafter on its first device."""

    asked: Questioned
    target: DecodingTarget
    drafter: Drafter
    vocabulary: Vocabulary

    @classmethod
    def load(cls, asked: Questioned, drafter_folder: str, dtype: str | None, device: str | None, stages: int) -> "Subject":
        """`dtype` None is that of the features the drafter was trained on; the target lies on `stages` devices.

        Raises: UserError if the two do not belong together.
        """
        where, kind = open_device(device), getattr(torch, dtype or read_feature_dtype(drafter_folder))
        drafter = load_drafter(drafter_folder, kind, where)
        drafter.spec.validate(asked.spec)
        target = load_target(asked.spec, drafter.spec.taps, kind, where, stages)
        return cls(asked, target, drafter, target.vocabulary(asked.spec).scaled_by(drafter.spec.embedding_scale))

    def block_size(self, chosen: int | None) -> int:
        """The block size that was chosen, or the trained one. Raises: UserError for one that cannot be served."""
        spec = self.drafter.spec
        sizes = FAMILIES[spec.family].block_sizes(spec)
        if chosen is not None and chosen not in sizes:
            raise UserError(f"--block-size {chosen}: the drafter was trained on blocks of {spec.block_size}; use {sizes.start} to that")
        return chosen or spec.block_size

    def chains(self, longest: int) -> list[Way]:
        """Chains of every block size that can be served, up to `longest`."""
        spec = self.drafter.spec
        return [Way(size) for size in FAMILIES[spec.family].block_sizes(spec) if size <= longest]

    def drafts(self, way: Way) -> int:
        """How many tokens a chain proposes at once."""
        return way.block_size - 1 + self.drafter.spec.sample_from_anchor

    def block_drafter(self, way: Way) -> BlockDrafter:
        return BlockDrafter(self.drafter, self.vocabulary, self.drafter.spec.mask_token_id, *way)
