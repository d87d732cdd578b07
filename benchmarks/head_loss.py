"""The head: loss and its gradient for every slot, fused against checkpointed, over chunk sizes; and its pointwise kernel alone.

    python benchmarks/head_loss.py [--tiny]

Shape of Qwen3-8B (4096 x 151,936, block 16), 512 blocks (3,072 tokens) and 2,048. Useful work is two products a row.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import measure
from common import compile_cache
from common.cli import run_script
from common.config import ObjectiveConfig
from common.data.rows import Row
from common.objective.block_loss import base_loss
from common.objective.blocks import build_blocks, draw_anchors
from common.objective.head import slot_values_and_gradients
from common.target.vocabulary import Vocabulary

FULL = dict(hidden=4096, rows=151936, block_size=16, dtype=torch.bfloat16)
TINY = dict(hidden=32, rows=301, block_size=4, dtype=torch.float32)
TILINGS = [(1024, 8, 32), (1024, 16, 32), (512, 8, 16), (512, 16, 16), (512, 32, 16), (256, 16, 8)]


def useful_flop(anchors, shape):
    """Two products for each predicted slot: the logits, and the gradient of the hidden state."""
    return 2 * 2 * anchors * (shape["block_size"] - 1) * shape["rows"] * shape["hidden"]


def inputs(anchors, shape, device, tokens_per_document=3072):
    """Random hidden states, vocabulary and blocks of fully supervised documents, six tokens an anchor."""
    T = 6 * anchors
    index = np.arange(T, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, shape["rows"], T).astype(np.int32)
    row = Row(tokens, index - index % tokens_per_document, np.ones(T, np.uint8), T, -(-T // tokens_per_document))
    blocks = build_blocks(row, *draw_anchors(row, anchors, seed=0, number=0), shape["block_size"], mask_token_id=0)
    head = torch.randn(shape["rows"], shape["hidden"], device=device).mul_(shape["hidden"] ** -0.5).to(shape["dtype"])
    hidden = torch.randn(anchors, shape["block_size"] - 1, shape["hidden"], device=device, dtype=shape["dtype"], requires_grad=True)
    return hidden, Vocabulary(head, head, 1.0, None), blocks.to(device)


def whole(anchors, shape, device, ceiling, chunks, repeats):
    hidden, vocabulary, blocks = inputs(anchors, shape, device)
    cases = [("fused", "decay", None), ("fused", "dpace", None), ("checkpoint", "decay", None)]
    for head, weights, chunk in cases + [("fused", "decay", chunk) for chunk in chunks]:
        config = ObjectiveConfig(head=head, weights=weights)

        def run(config=config, chunk=chunk):
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


def pointwise(anchors, shape, device, repeats):
    """The kernel between the two products, against one read and one write of the logits at the speed of a copy."""
    rows = anchors * (shape["block_size"] - 1)
    logits = torch.randn(rows, shape["rows"], device=device).to(shape["dtype"])
    labels = torch.randint(shape["rows"], (rows,), device=device)
    compiled = compile_cache.handle("head_benchmark", slot_values_and_gradients, device, (rows,))
    cases = {"compiled torch": lambda: compiled(logits, labels, None, "ce", None)}
    if device.type == "cuda":
        from common.objective.head_kernel import cross_entropy_

        cases |= {f"triton {t}": lambda t=t: cross_entropy_(logits, labels, None, t) for t in TILINGS}
    floor_ms = 2e3 * logits.nbytes / measure.copy_bytes_per_s(device, min(2**31, logits.nbytes))
    for name, run in cases.items():
        times = measure.timed(run, device, repeats=repeats)
        measure.report(device, benchmark="head_pointwise", kernel=name, rows=rows, **times._asdict(), floor_ms=floor_ms)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    shape, device, repeats = TINY if tiny else FULL, measure.device_of(tiny), 2 if tiny else 10
    ceiling = measure.ceiling_tflops(device, shape["dtype"], 128 if tiny else 8192)
    pointwise(8 if tiny else 128, shape, device, repeats)
    for anchors, chunks in [(8, (3,))] if tiny else [(512, (64, 136, 256, 512)), (2048, (136, 256, 272, 512))]:
        whole(anchors, shape, device, ceiling, chunks, repeats)


if __name__ == "__main__":
    run_script(main)
