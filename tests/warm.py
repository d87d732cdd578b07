"""What every rank would compute once for itself is computed where ranks are forked from, which imports this (tests/ranks.py)."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from common.config_help import describe_keys
from common.families.registry import family_options

get_checkpoint_conversion_mapping("qwen3")
describe_keys(family_options())
