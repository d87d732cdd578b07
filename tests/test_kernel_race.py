"""The kernel race at a tiny size on the CPU: the benchmark that a GPU box runs must not have rotted."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from benchmarks import kernel_race
from common import compile_cache


@pytest.fixture
def one_warm_call(monkeypatch):
    compile_cache.reset()
    monkeypatch.setattr(kernel_race, "WARM_CALLS", 1)
    monkeypatch.setattr(flex, "_validate_device", flex._validate_device)  # the benchmark replaces it; put it back
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()
    compile_cache.reset()


def test_cache_survives(one_warm_call):
    """If the cache shows an error here, it is the guard that fails on the GPU."""
    result = kernel_race.run("cache", torch.device("cpu"), "aot_eager", seconds=0.01)
    assert result["errors"] == 0 and result["other"] == {} and not (result["stuck"] or result["hangs"]), result
    assert result["compiled"] == result["shapes"] and result["calls"] > result["shapes"], result


@pytest.mark.parametrize("mode", ["singleton", "dict"])
def test_naive_guards_call_what_the_cache_calls(mode, one_warm_call):
    """A naive mode that fails for another reason than the race would make the comparison worthless."""
    result = kernel_race.run(mode, torch.device("cpu"), "aot_eager", seconds=0.01)
    assert result["other"] == {} and result["compiled"] + result["errors"] >= result["shapes"], result
