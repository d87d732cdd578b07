"""The head: loss and its gradient for every slot, fused against checkpointed, over chunk sizes; and its pointwise kernel alone.

    python -m benchmarks.head_loss [--tiny] [--check]

Shape of Qwen3-8B (4096 x 151,936, block 16), 512 blocks (3,072 tokens) and 2,048. Useful work is two products a row; --check compares
that, instead of the times, with torch's own count on the CPU, and exits with code 1 if they differ.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from common import compile_cache
from common.cli import run_script
from common.config import ObjectiveConfig
from common.data.rows import Row
from common.objective.block_loss import base_loss
from common.objective.blocks import Blocks, build_blocks, draw_anchors
from common.objective.head import slot_values
from common.objective.losses import LOSSES
from common.target.vocabulary import Vocabulary


class Shape(NamedTuple):
    """The head's matrix, the blocks' slots, and the type of all numbers."""

    hidden: int
    vocab_size: int
    block_size: int
    dtype: torch.dtype


FULL = Shape(4096, 151936, 16, torch.bfloat16)
TINY = Shape(32, 301, 4, torch.float32)
CASES: list[tuple[Literal["fused", "checkpoint"], Literal["decay", "dpace"]]]
CASES = [("fused", "decay"), ("fused", "dpace"), ("checkpoint", "decay")]
TILINGS = [(1024, 8, 32), (1024, 16, 32), (512, 8, 16), (512, 16, 16), (512, 32, 16), (256, 16, 8)]


def useful_flop(anchors: int, shape: Shape) -> int:
    """Two products for each predicted slot: the logits, and the gradient of the hidden state."""
    return 2 * 2 * anchors * (shape.block_size - 1) * shape.vocab_size * shape.hidden


def inputs(anchors: int, shape: Shape, device: torch.device, document_tokens: int = 3072) -> tuple[torch.Tensor, Vocabulary, Blocks]:
    """Random hidden states, vocabulary and blocks of fully supervised documents, six tokens an anchor."""
    T = 6 * anchors
    index = np.arange(T, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, T).astype(np.int32)
    row = Row(tokens, index - index % document_tokens, np.ones(T, np.uint8), T, -(-T // document_tokens))
    blocks = build_blocks(row, *draw_anchors(row, anchors, seed=0, number=0), shape.block_size, mask_token_id=0)
    head = torch.randn(shape.vocab_size, shape.hidden, device=device).mul_(shape.hidden**-0.5).to(shape.dtype)
    hidden = torch.randn(anchors, shape.block_size - 1, shape.hidden, device=device, dtype=shape.dtype, requires_grad=True)
    return hidden, Vocabulary(head, head, 1.0, None), blocks.to(device)


def whole(anchors: int, shape: Shape, device: torch.device, ceiling: float, chunks: Sequence[int], repeats: int) -> None:
    """The loss of all slots and its gradient, against the ceiling, a rate in TFLOP/s; `chunks` are anchors of a chunk to try."""
    hidden, vocabulary, blocks = inputs(anchors, shape, device)
    for head, weights, chunk in [(*case, None) for case in CASES] + [(*CASES[0], chunk) for chunk in chunks]:
        config = ObjectiveConfig(head=head, weights=weights)

        def run(config: ObjectiveConfig = config, chunk: int | None = chunk) -> None:
            hidden.grad = None
            base_loss(hidden, vocabulary, blocks, config, chunk_anchors=chunk).loss_sum.backward()

        times = measure.timed(run, device, repeats=repeats)
        tflops = measure.tflops(useful_flop(anchors, shape), times)
        measure.report(
            device,
            benchmark="head_loss",
            head=head,
            weights=weights,
            anchors=anchors,
            chunk_anchors=chunk or "default",
            **times._asdict(),
            useful_tflops=tflops,
            share_of_ceiling=tflops / ceiling,
            ceiling_tflops=ceiling,
            peak_gib=measure.peak_gib(run, device),
        )


def pointwise(anchors: int, shape: Shape, device: torch.device, repeats: int) -> None:
    """The kernel between the two products, against one read and one write of the logits at the speed of a copy."""
    rows = anchors * (shape.block_size - 1)
    logits = torch.randn(rows, shape.vocab_size, device=device).to(shape.dtype)
    labels = torch.randint(shape.vocab_size, (rows,), device=device)
    floor_ms = 2e3 * logits.nbytes / measure.copy_bytes_per_s(device, min(2**31, logits.nbytes))
    for name, run in pointwise_runs(logits, labels, device).items():
        times = measure.timed(run, device, repeats=repeats)
        measure.report(device, benchmark="head_pointwise", kernel=name, rows=rows, **times._asdict(), floor_ms=floor_ms)


def pointwise_runs(logits: torch.Tensor, labels: torch.Tensor, device: torch.device) -> dict[str, Callable[[], object]]:
    """What computes each row's loss and the gradient of its logits: autograd over compiled torch, and the Triton kernel by its tilings."""
    compiled, leaf = compile_cache.handle("head_benchmark", slot_values, device, tuple(logits.shape)), logits.clone().requires_grad_()

    def by_autograd() -> object:
        terms, _, _ = compiled(leaf, labels, None, LOSSES["ce"], None)
        return torch.autograd.grad(terms.sum(), leaf)

    runs: dict[str, Callable[[], object]] = {"compiled torch": by_autograd}
    if device.type == "cuda":
        from common.objective.head_kernel import cross_entropy_  # Triton comes with torch for CUDA only

        runs |= {f"triton {tiling}": lambda tiling=tiling: cross_entropy_(logits, labels, None, tiling) for tiling in TILINGS}
    return runs


def check() -> bool:
    """Report whether the fused head does two products a slot, no more: the share of the ceiling is measured against this count."""
    device = torch.device("cpu")
    hidden, vocabulary, blocks = inputs(8, TINY, device)
    with FlopCounterMode(display=False) as counter:
        base_loss(hidden, vocabulary, blocks, ObjectiveConfig()).loss_sum.backward()
    good = counter.get_total_flops() == useful_flop(8, TINY)
    measure.report(device, benchmark="head_loss_check", counted=counter.get_total_flops(), useful=useful_flop(8, TINY), good=good)
    return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(argv)
    if asked.check:
        return 0 if check() else 1
    tiny, device = asked.tiny, measure.device_of(asked.tiny)
    shape, repeats = (TINY, 2) if tiny else (FULL, 10)
    ceiling = measure.ceiling_tflops(device, shape.dtype, 128 if tiny else 8192)
    pointwise(8 if tiny else 128, shape, device, repeats)
    for anchors, chunks in [(8, (3,))] if tiny else [(512, (64, 136, 256, 512)), (2048, (136, 256, 272, 512))]:
        whole(anchors, shape, device, ceiling, chunks, repeats)
    return 0


if __name__ == "__main__":
    run_script(main)
