"""What every rank would import, and compute once for itself: done where ranks are forked from, which imports this (tests/ranks.py)."""
# ruff: noqa: F401

import pytest
import torch._dynamo
import torch.distributed.run
import transformers.models.qwen3.modeling_qwen3
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import prepare_data
import train_drafter
from common.config_help import describe_keys
from common.families.registry import family_options

get_checkpoint_conversion_mapping("qwen3")
describe_keys(family_options())
