"""The target's capture a layer, at the shapes of targets that users run beside dense ones: a mixture of experts, a hybrid.

    python -m benchmarks.family_capture {qwen3_30b_a3b,qwen3_5_27b} [--layers N] [--experts NAME] [--tiny] [--profile]

Random weights, so that nothing is downloaded. `--experts` names another of transformers' functions for experts, e.g. deepgemm.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import measure
from benchmarks.target_capture import mixed_row, profile
from benchmarks.tiny_families import config_of
from common import compile_cache
from common.cli import run_script
from common.target.model import Target

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "qwen3_5_27b": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128,
    ),
}  # fmt: skip
"""The numbers of published configs; layers are left out, and their kinds repeat every four."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8, help="layers that are built (8): time a layer is what is measured")
    parser.add_argument("--experts", help="transformers' function for experts (its default)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args(argv)
    device, shape = measure.device_of(asked.tiny), SHAPES[asked.shape]
    dtype, T = (torch.float32, 128) if asked.tiny else (torch.bfloat16, 12288)
    config = config_of(shape["model_type"]) if asked.tiny else AutoConfig.for_model(**shape | {"num_hidden_layers": asked.layers})
    layers = config.num_hidden_layers
    row = mixed_row(np.random.default_rng(0), T, config.vocab_size, T // 64, T // 4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    for compiled in (False, True):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, **({"experts_implementation": asked.experts} if asked.experts else {}))
        subject = Target(model.eval().requires_grad_(False), [layers - 1], compile_layers=compiled)
        out = torch.zeros(T, subject.width, dtype=dtype, device=device)
        subject.warm(row, out)
        times = measure.timed(lambda subject=subject, out=out: subject.capture(row, out), device, repeats=2 if asked.tiny else 10)
        layer_ms = times.median_ms / layers
        measure.report(
            device,
            benchmark="family_capture",
            shape=asked.shape,
            execution=subject.execution,
            fallbacks=subject.fallbacks,
            experts=asked.experts,
            row_tokens=T,
            compiled=compiled,
            **times._asdict(),
            ms_per_layer=layer_ms,
            ktok_per_s=T / (layer_ms * shape["num_hidden_layers"]),
            compiles=compile_cache.stats()["compiles"],
        )
        if asked.profile and not asked.tiny:
            profile(lambda subject=subject, out=out: subject.capture(row, out), device)
        del model, subject
    torch.set_default_dtype(before)


if __name__ == "__main__":
    run_script(main)
