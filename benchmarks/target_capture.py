"""The target's capture at the Qwen3-8B shape: packed rows of mixed documents, stopped after the last tap.

    python -m benchmarks.target_capture [--tiny] [--profile]

The whole model's arithmetic counts (14.8 GFLOP a token), so that figures compare with trainers that run all layers and the head.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from benchmarks import eight_billion, measure
from common import compile_cache
from common.cli import run_script
from common.data.rows import Row
from common.drafter.spec import auto_taps
from common.target.model import Target

GFLOP_PER_TOKEN = 14.8


def mixed_row(generator: np.random.Generator, row_tokens: int, vocab_size: int, shortest: int, longest: int) -> Row:
    """A full row of documents of random lengths."""
    starts = [0]
    while starts[-1] + longest < row_tokens:
        starts.append(starts[-1] + int(generator.integers(shortest, longest)))
    index = np.arange(row_tokens)
    document_start = np.array(starts)[np.searchsorted(starts, index, side="right") - 1].astype(np.int32)
    tokens = generator.integers(0, vocab_size, row_tokens).astype(np.int32)
    return Row(tokens, document_start, np.ones(row_tokens, np.uint8), row_tokens, len(starts))


def executed_flop(shape: eight_billion.Shape, taps: Sequence[int], row: Row) -> int:
    """Arithmetic of the layers that run, attention over each document's own causal pairs."""
    c = shape
    projections = c["hidden_size"] * c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    per_token = 2 * (projections + 3 * c["hidden_size"] * c["intermediate_size"])
    pairs = sum((end - begin) * (end - begin + 1) // 2 for begin, end in row.spans())
    return (max(taps) + 1) * (per_token * row.valid + 4 * c["num_attention_heads"] * c["head_dim"] * pairs)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args(argv)
    device = measure.device_of(asked.tiny)
    shape, dtype, T = (eight_billion.TINY, torch.float32, 128) if asked.tiny else (eight_billion.QWEN3_8B, torch.bfloat16, 12288)
    taps = auto_taps(2 if asked.tiny else 5, shape["num_hidden_layers"])
    ceiling = measure.ceiling_tflops(device, dtype, 128 if asked.tiny else 8192)
    generator = np.random.default_rng(0)
    rows = [mixed_row(generator, T, shape["vocab_size"], T // 64, T // 4) for _ in range(4)]
    for compiled in (False, True):
        model = eight_billion.random_target(shape, device, dtype)
        subject = Target(model, taps, "packed", compile_layers=compiled)
        out = torch.zeros(T, subject.width, dtype=dtype, device=device)
        queue = itertools.cycle(rows)

        def capture(subject: Target = subject, out: torch.Tensor = out, queue: Iterator[Row] = queue) -> None:
            subject.capture(next(queue), out)

        times = measure.timed(capture, device, repeats=2 if asked.tiny else 10)
        executed = sum(executed_flop(shape, taps, row) for row in rows) / len(rows)
        measure.report(
            device,
            benchmark="target_capture",
            row_tokens=T,
            compiled=compiled,
            **times._asdict(),
            ktok_per_s=T / times.median_ms,
            nominal_tflops=T * GFLOP_PER_TOKEN / times.median_ms if not asked.tiny else None,
            executed_tflops=measure.tflops(executed, times),
            share_of_ceiling=measure.tflops(executed, times) / ceiling,
            ceiling_tflops=ceiling,
            peak_gib=measure.peak_gib(capture, device),
            compiles=compile_cache.stats()["compiles"],
        )
        if asked.profile and compiled and not asked.tiny:
            profile(capture, device)
        del model, subject


def profile(capture: Callable[[], object], device: torch.device, top: int = 14) -> None:
    """Print the kernels that a capture spends most time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        capture()
        torch.cuda.synchronize(device)
    rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:110]) for e in profiler.key_averages()), reverse=True)
    for time_ms, count, name in rows[:top]:
        print(f"{time_ms:9.3f} ms {count:5d}x  {name}", flush=True)


if __name__ == "__main__":
    run_script(main)
