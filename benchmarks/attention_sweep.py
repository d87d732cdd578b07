"""The drafter's attention alone, at one layer of the 8B shape: each kernel over its tilings, then whole beside the other implementations.

    python -m benchmarks.attention_sweep [--tiny]

The kernels' tilings (`TILING` in common/drafter) come from here.
"""

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import drafter_step, measure
from common import compile_cache
from common.cli import run_script
from common.drafter import attention, block_mask

TILINGS = {  # queries, keys, warps, stages, stages over masked tiles
    "forward": [(128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (128, 64, 8, 3, 3), (128, 64, 8, 2, 2), (128, 64, 8, 4, 1), (128, 128, 8, 2, 1)],
    "queries": [(128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (128, 64, 8, 2, 2), (128, 64, 8, 2, 1), (128, 32, 8, 3, 2), (128, 32, 8, 4, 1)],
    "keys": [(64, 128, 8, 3, 1), (64, 128, 8, 3, 2), (64, 128, 8, 2, 2), (64, 128, 8, 2, 1), (32, 128, 8, 4, 2), (128, 128, 8, 1, 1)],
}


class Sweep:
    """Random queries, keys and values of a packet's blocks, and the times of whatever attends over them."""

    def __init__(self, tiny: bool, device: torch.device):
        spec, case = (drafter_step.TINY, "tiny") if tiny else (drafter_step.SPEC, "full")
        row_tokens, _, anchors = drafter_step.CASES[case][0]
        self.device, self.repeats = device, 2 if tiny else 10
        blocks, pairs = drafter_step.even_packet(spec, drafter_step.CASES[case][0])
        self.product_flop = 2 * spec.heads * spec.head_dim * pairs
        self.packet = blocks.mask.to(device)
        self.mask_spec = block_mask.MaskSpec(row_tokens, anchors, spec.block_size)
        queries = anchors * spec.block_size
        kind = {"device": device, "dtype": torch.float32 if tiny else torch.bfloat16, "requires_grad": True}
        heads = [(queries, spec.heads)] + [(rows, spec.kv_heads) for rows in (row_tokens, row_tokens, queries, queries)]
        self.inputs = [torch.randn(rows, count, spec.head_dim, **kind) for rows, count in heads]
        self.gradient = torch.randn_like(self.inputs[0])

    def timed(self, run: Callable[[], object]) -> measure.Times:
        return measure.timed(run, self.device, repeats=self.repeats)

    def report(self, **case: Any) -> None:
        measure.report(self.device, benchmark="attention_sweep", **case)

    def whole(self, name: str, attend: Callable[..., Tensor], mask: Any) -> None:
        """Forward and backward of one implementation."""
        run = compile_cache.handle(f"attention_{name}", lambda q, k, v, bk, bv, mask: attend(q, (k, v), (bk, bv), mask), self.device)
        both = self.timed(lambda: torch.autograd.grad(run(*self.inputs, mask), self.inputs, self.gradient))
        forward = self.timed(lambda: run(*self.inputs, mask))
        self.report(kernel=name, forward_ms=forward.median_ms, backward_ms=both.median_ms - forward.median_ms)

    def tilings(self, kernels: ModuleType, kernel: str, products: int, run: Callable[[], object]) -> None:
        """One kernel, which makes so many products of a tile, over its tilings; the fastest stays in use."""
        best = (float("inf"), kernels.TILING[kernel])
        for tiling in TILINGS[kernel]:
            kernels.TILING[kernel] = tiling
            try:
                times = self.timed(run)
            except Exception as error:  # a tiling that does not fit the chip is an answer, too
                self.report(kernel=kernel, tiling=tiling, error=f"{type(error).__name__}: {error}"[:160])
                continue
            best = min(best, (times.median_ms, tiling))
            self.report(kernel=kernel, tiling=tiling, **times._asdict(), tflops=measure.tflops(products * self.product_flop, times))
        kernels.TILING[kernel] = best[1]
        self.report(kernel=kernel, best=best[1], median_ms=best[0])

    def sparse_mask(self) -> attention.SparseMask:
        tiles = self.packet.full_tiles
        assert tiles is not None, "the cases fill whole tiles"
        return attention.SparseMask(self.mask_spec, self.packet, tiles, None)


def kernel_runs(kernels: ModuleType, sweep: Sweep) -> list[tuple[str, int, Callable[[], object]]]:
    """(kernel, products it makes of a tile, a call that runs it alone) for the three kernels of the drafter's attention."""
    mask = sweep.sparse_mask()
    leaves, intervals, ranges = [x.detach() for x in sweep.inputs], mask.packet[:3], mask.tiles.key_ranges
    static = mask.spec.block_size, 0
    out, lse = kernels.attention(*leaves, *intervals, ranges, *static)

    def by_queries() -> Any:
        return kernels.backward_queries(sweep.gradient, leaves, intervals, out, lse, *static)

    delta = by_queries()[-1]
    return [
        ("forward", 2, lambda: kernels.attention(*leaves, *intervals, ranges, *static)),
        ("queries", 3, by_queries),
        ("keys", 4, lambda: kernels.backward_keys(sweep.gradient, leaves, intervals, ranges, lse, delta, *static)),
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(argv).tiny
    sweep = Sweep(tiny, measure.device_of(tiny))
    if tiny:
        sweep.whole("dense", attention.attend_dense, block_mask.dense_mask(sweep.mask_spec, *sweep.packet[:3]))
        return
    from common.drafter import attention_kernel  # Triton comes with torch for CUDA only

    for kernel, products, run in kernel_runs(attention_kernel, sweep):
        sweep.tilings(attention_kernel, kernel, products, run)
    sweep.whole("kernel", attention.attend_kernel, sweep.sparse_mask())
    sweep.whole("flex", attention.attend_flex, sweep.sparse_mask())


if __name__ == "__main__":
    run_script(main)
