"""Families of targets, from their files to an exported drafter: captured, learnt from and decoded as transformers itself runs them.

Tiny random models; `python -m benchmarks.families_table` tries all families, here those that users ask for and two of the others.
"""

import json
import random

import pytest

from benchmarks import family_capture
from benchmarks.families_table import examine
from benchmarks.tiny_families import MULTIMODAL, TEXT

ASKED_FOR = {
    "gemma3": ("packed", "chain, tree"),
    "gpt_oss": ("packed", "chain, tree"),
    "lfm2": ("batched", "chain"),
    "qwen3_5_moe_text": ("batched", "chain"),
    "qwen3_next": ("batched", "chain"),
    "qwen3_vl": ("packed", "chain, tree"),
    "smollm3": ("packed", "chain, tree"),
}
REFUSED = {"bloom": "embeddings", "gpt2": "embeddings", "nanochat": "embeddings", "opt": "embeddings", "mamba": "num_attention_heads"}
OTHERS = sorted({*TEXT, *MULTIMODAL} - {*ASKED_FOR, *REFUSED})


@pytest.mark.parametrize("family", ASKED_FOR)
def test_a_family_that_users_ask_for_is_exact_from_its_files_to_an_exported_drafter(family, tmp_path):
    """Features of another model, a head with something left out, or a cache that keeps a rejected draft: each costs the whole gain."""
    found = examine(family, tmp_path)
    assert (found.refused, found.wrong) == ("", [])
    assert (found.execution, found.decoding) == ASKED_FOR[family]


@pytest.mark.parametrize("family", random.Random(0).sample(OTHERS, 2))
def test_other_families_are_exact_or_refused_in_words(family, tmp_path):
    """Whatever transformers runs should be trained for rightly; a family that is silently wrong is found by nobody."""
    found = examine(family, tmp_path)
    assert found.wrong == [] and (found.execution or found.refused)


@pytest.mark.parametrize("family", REFUSED)
def test_what_drafters_cannot_share_is_refused(family, tmp_path):
    """Its drafter would learn on inputs that no engine will ever give it."""
    assert REFUSED[family] in examine(family, tmp_path).refused


@pytest.mark.parametrize("shape", family_capture.SHAPES)
def test_the_time_of_a_layer_is_measured(shape, capsys):
    """Lost otherwise: a benchmark that is found broken on a rented GPU."""
    family_capture.main([shape, "--tiny"])
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [case["compiled"] for case in cases] == [False, True] and all(case["ms_per_layer"] > 0 for case in cases)
