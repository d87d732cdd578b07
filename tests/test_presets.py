"""The presets are the first thing that users run: each must load, and say what to write where it does not fit a machine."""

import re
from pathlib import Path

import pytest

from common import config_reader
from common.distributed.jobs import SoloJob
from common.distributed.roles import split
from common.errors import UserError
from common.families.registry import family_options

PRESETS = sorted(Path(__file__).resolve().parent.parent.glob("launch/presets/*.yaml"))
QWEN3_8B = next(path for path in PRESETS if path.stem == "qwen3_8b")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_loads_and_names_its_own_run_directory(path):
    """A key that was renamed in the code alone stops a new user at the first command; two presets in one directory mix two runs."""
    assert config_reader.load(path, families=family_options()).log.dir == f"runs/{path.stem}"


def test_eight_billion_parameters_run_on_eight_devices_at_the_measured_split():
    """6 + 2, the usual split, leaves four of eight devices waiting at this size."""
    chosen = config_reader.load(QWEN3_8B).topology
    assert split(8, chosen.targets, chosen.drafters) == (3, 5) and split(8, None, None) == (6, 2)


@pytest.mark.parametrize("ranks", [2, 4, 6, 16])
def test_with_another_number_of_ranks_the_error_says_what_to_write(ranks):
    """A preset that sets both counts must not leave its user guessing on a machine of four devices."""
    chosen = config_reader.load(QWEN3_8B).topology
    with pytest.raises(UserError, match="start 8 ranks, or write") as refusal:
        split(ranks, chosen.targets, chosen.drafters)
    overrides = re.findall(r"topology\.\w+=\d+", str(refusal.value).split("or write")[1])
    advised = config_reader.load(QWEN3_8B, overrides).topology
    assert sum(split(ranks, advised.targets, advised.drafters)) == ranks


def test_on_one_device_the_error_says_what_to_write():
    """The same for a user who only wants to see the preset start on one GPU."""
    with pytest.raises(UserError, match=r"topology\.targets=3 needs several ranks") as refusal:
        SoloJob(config_reader.load(QWEN3_8B))
    overrides = re.findall(r"topology\.\w+=1", str(refusal.value))
    job = SoloJob(config_reader.load(QWEN3_8B, overrides))
    assert (len(job.layout.targets), job.drafters) == (1, 1)
