"""The drafter's step, forward and backward with the head's loss, without the optimiser, at the Qwen3-8B shape.

    python benchmarks/drafter_step.py [--tiny] [--profile] [--check] [--sweep]

--profile adds where the step's time goes, by class of kernel. Instead of the times, --check compares loss and gradients with the float32
twin on fresh rows and runs 200 packets that may neither wait for the device nor compile; --sweep times the attention kernels alone, over
their options.
"""

import argparse
import dataclasses
import gc
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
from common.drafter import attention
from common.drafter.attention import attention_kernel
from common.drafter.backbone import Drafter
from common.drafter.spec import FULL, SLIDING, DrafterSpec
from common.objective.block_loss import base_loss
from common.objective.blocks import build_blocks, draw_anchors
from common.target.vocabulary import Vocabulary

SPEC = DrafterSpec(
    hidden_size=4096, intermediate_size=12288, layers=5, heads=32, kv_heads=8, head_dim=128, layer_types=(FULL,) * 5, window=None,
    block_size=16, mask_token_id=151669, taps=(1, 9, 17, 25, 33), target_layers=36, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=None, max_position_embeddings=40960, attention_bias=False, initializer_range=0.02, bos_token_id=151643,
    eos_token_ids=(151645,),
)  # fmt: skip
TINY = dataclasses.replace(
    SPEC, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=8, layer_types=(FULL,) * 2, block_size=4,
    taps=(0, 2), vocab_size=97, mask_token_id=96,
)  # fmt: skip
RECOMPUTE = True
CASES = {"full": [(3072, 1, 512), (12288, 4, 2048)], "tiny": [(128, 1, 32), (256, 4, 64)]}
TILINGS = {  # queries, keys, warps, stages, stages over masked tiles
    "forward": [(128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (128, 64, 8, 3, 3), (128, 64, 8, 2, 2), (128, 64, 8, 4, 1), (128, 128, 8, 2, 1)],
    "queries": [(128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (128, 64, 8, 2, 2), (128, 64, 8, 2, 1), (128, 32, 8, 3, 2), (128, 32, 8, 4, 1)],
    "keys": [(64, 128, 8, 3, 1), (64, 128, 8, 3, 2), (64, 128, 8, 2, 2), (64, 128, 8, 2, 1), (32, 128, 8, 4, 2), (128, 128, 8, 1, 1)],
}
KERNEL_CLASSES = {  # the first class with a matching part of the kernel's name
    "attention": ("flex_attention", "_attention"),
    "head": ("cross_entropy",),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "copies and fills": ("Memcpy", "Memset", "copy", "fill"),
    "pointwise": ("triton_", "elementwise", "reduce", "vectorized"),
}


def useful_flop(spec, row_tokens, anchors, visible_pairs):
    """{part: FLOP} of a step, nothing recomputed: three products per matrix (forward, two gradients), two per row of the frozen head.

    Attention counts what torch's FlopCounterMode counts for flash attention (its backward 2.5 forwards) over the visible pairs alone.
    What is not computed here counts too, so that figures compare with those of other trainers: the gradient of the features (0.7%), the
    last layer's rows without a label (0.7%), the first layer's queries, keys and values of masked slots, which are all alike (1.6%).
    """
    D, T, Q = spec.hidden_size, row_tokens, anchors * spec.block_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = 2 * D * (T * 2 * key + Q * (2 * query + 2 * key + 3 * spec.intermediate_size))
    return {
        "matrices": 3 * (2 * T * len(spec.taps) * D * D + spec.layers * layer),
        "attention": int(3.5 * 4 * query * visible_pairs) * spec.layers,
        "head": 2 * 2 * anchors * (spec.block_size - 1) * spec.vocab_size * D,
    }


def visible_pairs(blocks, spec):
    """Visible (query, key) pairs of a packet in a full layer."""
    context = (blocks.anchor_A - blocks.lo_A)[blocks.keep_A].sum().item()
    return spec.block_size * (context + spec.block_size * int(blocks.keep_A.sum()))


def random_row(generator, row_tokens, documents, vocab_size, even=True):
    """A row of random tokens, fully supervised: documents of equal length, or of random ones with random unsupervised tokens."""
    if even:
        starts = np.arange(documents) * (row_tokens // documents)
    else:
        starts = np.sort(np.append(0, 1 + generator.choice(row_tokens - 1, documents - 1, replace=False)))
    index = np.arange(row_tokens)
    loss_mask = np.ones(row_tokens, np.uint8) if even else (generator.random(row_tokens) < 0.9).astype(np.uint8)
    document_start = starts[np.searchsorted(starts, index, side="right") - 1].astype(np.int32)
    return Row(generator.integers(0, vocab_size, row_tokens).astype(np.int32), document_start, loss_mask, row_tokens, documents)


def draw_blocks(spec, row, anchors, number=0):
    """A packet's blocks, on the host."""
    anchor, keep = draw_anchors(row, anchors, seed=0, number=number)
    return build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, window=spec.window)


class Step:
    """A drafter of random weights with a random vocabulary, and its forward and backward on one packet."""

    def __init__(self, spec, dtype, device, compiled=True, checkpointing=False, seed=0):
        self.spec, self.device = spec, device
        generator = torch.Generator(device).manual_seed(seed)
        draw = {"generator": generator, "device": device, "dtype": dtype}
        self.model = Drafter(spec, dtype, device, checkpointing)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, **draw).mul_(0.02) for _ in range(2))
        self.vocabulary = Vocabulary(embedding, head, 1.0, None)
        self.draw = lambda rows: torch.randn(rows, len(spec.taps) * spec.hidden_size, **draw)
        self.forward = compile_cache.handle("drafter", self._run, device, (id(self),), recompute=RECOMPUTE) if compiled else self._run

    def _run(self, *inputs):
        return self.model(*inputs)

    def __call__(self, features, blocks, head="fused"):
        self.model.zero_grad(set_to_none=True)
        embeddings = self.vocabulary.embed(blocks.tokens_U)
        hidden = self.forward(embeddings, blocks.positions_AK, features, blocks.context_positions_T, blocks.mask)
        result = base_loss(hidden, self.vocabulary, blocks, ObjectiveConfig(head=head))
        result.loss_sum.backward()
        return result

    def gradients(self):
        return {name: parameter.grad.float() for name, parameter in self.model.named_parameters()}


def measure_case(spec, dtype, device, case, ceiling, repeats, profile=False, checkpointing=False):
    row_tokens, documents, anchors = case
    forget_steps()
    step = Step(spec, dtype, device, checkpointing=checkpointing)
    blocks = draw_blocks(spec, random_row(np.random.default_rng(0), row_tokens, documents, spec.vocab_size), anchors)
    flop = useful_flop(spec, row_tokens, anchors, visible_pairs(blocks, spec))
    features, blocks = step.draw(row_tokens), blocks.to(device)
    times = measure.timed(lambda: step(features, blocks), device, repeats=repeats)
    tflops = measure.tflops(sum(flop.values()), times)
    measure.report(
        device,
        benchmark="drafter_step",
        row_tokens=row_tokens,
        documents=documents,
        anchors=anchors,
        activation_checkpointing=checkpointing,
        **times._asdict(),
        ktok_per_s=row_tokens / times.median_ms,
        useful_tflop=sum(flop.values()) / 1e12,
        tflops=tflops,
        share_of_ceiling=tflops / ceiling,
        ceiling_tflops=ceiling,
        peak_gib=measure.peak_gib(lambda: step(features, blocks), device),
        compiles=compile_cache.stats()["compiles"],
    )
    if profile:
        report_profile(lambda: step(features, blocks), device, case)


def forget_steps():
    """Free the drafters of earlier cases, which their compiled kernels hold, or they count in this one's memory."""
    compile_cache.reset()
    torch._dynamo.reset()
    gc.collect()


def report_profile(function, device, case, steps=3, top=25):
    """Where a step's time goes: per class of kernel, then the kernels that take the most."""
    activities = [torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    totals, rows = dict.fromkeys((*KERNEL_CLASSES, "other"), 0.0), []
    for event in profiler.key_averages():
        time_ms = (event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1e3 / steps
        kind = next((k for k, parts in KERNEL_CLASSES.items() if any(p in event.key for p in parts)), "other")
        totals[kind] += time_ms
        rows.append((time_ms, event.count // steps, kind, event.key[:110]))
    measure.report(device, benchmark="drafter_step_profile", row_tokens=case[0], **{f"{k} ms": v for k, v in totals.items()})
    for time_ms, count, kind, name in sorted(rows, reverse=True)[:top]:
        print(f"{time_ms:9.3f} ms {count:5d}x  {kind:16s} {name}", flush=True)


def check(device, tiny):
    """Loss and every gradient of the fast step against the slow twin in float32; then 200 packets without a wait or a compile."""
    spec = dataclasses.replace(TINY if tiny else SPEC, layers=2, taps=(0, 2), layer_types=(FULL, SLIDING), window=80)
    if not tiny:
        spec = dataclasses.replace(spec, hidden_size=1024, intermediate_size=1536, heads=8, kv_heads=2, vocab_size=4096, mask_token_id=4095)
    row_tokens, anchors = CASES["tiny" if tiny else "full"][0][::2]
    generator = np.random.default_rng()
    forget_steps()
    for dtype in (torch.float32, torch.bfloat16):
        fast, slow = Step(spec, dtype, device), Step(spec, torch.float32, torch.device(device), compiled=False)
        slow.model.load_state_dict(fast.model.state_dict())
        slow.vocabulary = Vocabulary(fast.vocabulary.embedding.float(), fast.vocabulary.head.float(), 1.0, None)
        row = random_row(generator, row_tokens, 7, spec.vocab_size, even=False)
        blocks, features = draw_blocks(spec, row, anchors).to(device), fast.draw(row_tokens)
        dense = dataclasses.replace(blocks, mask=blocks.mask._replace(full_tiles=None, sliding_tiles=None))
        losses = fast(features, blocks).loss_sum.item(), slow(features.float(), dense, head="checkpoint").loss_sum.item()
        truth = slow.gradients()
        errors = {name: ((g - truth[name]).norm() / truth[name].norm()).item() for name, g in fast.gradients().items()}
        worst = max(errors, key=errors.get)
        error = abs(losses[0] - losses[1]) / losses[1]
        good = max(error, errors[worst]) < (1e-3 if dtype == torch.float32 else 3e-2)
        measure.report(
            device, benchmark="drafter_step_check", dtype=str(dtype), loss_error=error, worst=worst, error=errors[worst], good=good
        )
    steady(fast, device, generator, row_tokens, anchors, packets=5 if tiny else 200)


def steady(step, device, generator, row_tokens, anchors, packets):
    """Fresh packets of random documents and supervised counts: no wait for the device, no compile, memory flat."""
    features, before = step.draw(row_tokens), compile_cache.stats()["compiles"]
    reserved = []
    for number in range(packets):
        row = random_row(generator, row_tokens, int(generator.integers(1, 20)), step.spec.vocab_size, even=False)
        row.loss_mask[int(generator.integers(0, row_tokens)) :] = 0
        blocks = draw_blocks(step.spec, row, anchors, number)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        step(features, blocks.to(device))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            reserved.append(torch.cuda.memory_reserved(device))
    growth = (reserved[-1] - reserved[len(reserved) // 4]) / 2**30 if reserved else 0.0
    measure.report(
        device,
        benchmark="drafter_step_steady",
        packets=packets,
        compiles=compile_cache.stats()["compiles"] - before,
        reserved_growth_gib=growth,
    )


def sweep(device, tiny, repeats):
    """Times of the attention alone at one layer of the 8B shape: each kernel over its tilings, then whole beside the other twins."""
    spec, (row_tokens, documents, anchors) = (TINY, CASES["tiny"][0]) if tiny else (SPEC, CASES["full"][0])
    dtype, queries = torch.float32 if tiny else torch.bfloat16, anchors * spec.block_size
    blocks = draw_blocks(spec, random_row(np.random.default_rng(0), row_tokens, documents, spec.vocab_size), anchors)
    product_flop = 2 * spec.heads * spec.head_dim * visible_pairs(blocks, spec)
    plan = blocks.mask.to(device)
    mask = attention.SparseMask(attention.MaskSpec(row_tokens, anchors, spec.block_size), plan, plan.full_tiles, None)
    draw = lambda rows, heads: torch.randn(rows, heads, spec.head_dim, device=device, dtype=dtype, requires_grad=True)  # noqa: E731
    inputs = [draw(queries, spec.heads), *(draw(rows, spec.kv_heads) for rows in (row_tokens, row_tokens, queries, queries))]
    gradient = torch.randn_like(inputs[0])
    report = lambda **case: measure.report(device, benchmark="attention_sweep", **case)  # noqa: E731

    def time_whole(name, attend, mask):
        run = compile_cache.handle(f"attention_{name}", lambda q, k, v, bk, bv, mask: attend(q, (k, v), (bk, bv), mask), device)
        both = measure.timed(lambda: torch.autograd.grad(run(*inputs, mask), inputs, gradient), device, repeats=repeats)
        forward = measure.timed(lambda: run(*inputs, mask), device, repeats=repeats)
        report(kernel=name, forward_ms=forward.median_ms, backward_ms=both.median_ms - forward.median_ms)

    if device.type == "cuda":
        for kernel, products, run in kernel_runs(inputs, gradient, mask):
            best = (float("inf"), attention_kernel.TILING[kernel])
            for tiling in TILINGS[kernel]:
                attention_kernel.TILING[kernel] = tiling
                try:
                    times = measure.timed(run, device, repeats=repeats)
                except Exception as error:  # a tiling that does not fit the chip is an answer, too
                    report(kernel=kernel, tiling=tiling, error=f"{type(error).__name__}: {error}"[:160])
                    continue
                best = min(best, (times.median_ms, tiling))
                report(kernel=kernel, tiling=tiling, **times._asdict(), tflops=measure.tflops(products * product_flop, times))
            attention_kernel.TILING[kernel] = best[1]
            report(kernel=kernel, best=best[1], median_ms=best[0])
        time_whole("kernel", attention.attend_kernel, mask)
        time_whole("flex", attention.attend_flex, mask)
    else:
        time_whole("dense", attention.attend_dense, attention.dense_mask(mask.spec, *plan[:3]))


def kernel_runs(inputs, gradient, mask):
    """(kernel, products it makes of a tile, a call that runs it alone) for the three kernels of the drafter's attention."""
    leaves, intervals = [x.detach() for x in inputs], mask.plan[:3]
    static = mask.spec.block_size, 0
    forward = lambda: attention_kernel.attention(*leaves, *intervals, mask.tiles.key_ranges, *static)  # noqa: E731
    out, lse = forward()
    by_queries = lambda: attention_kernel.backward_queries(gradient, leaves, intervals, out, lse, *static)  # noqa: E731
    delta = by_queries()[-1]
    by_keys = lambda: attention_kernel.backward_keys(gradient, leaves, intervals, mask.tiles.key_ranges, lse, delta, *static)  # noqa: E731
    return ("forward", 2, forward), ("queries", 3, by_queries), ("keys", 4, by_keys)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("tiny", "profile", "check", "sweep"):
        parser.add_argument(f"--{flag}", action="store_true")
    asked = parser.parse_args(arguments)
    device = measure.device_of(asked.tiny)
    spec, dtype, repeats = (TINY, torch.float32, 2) if asked.tiny else (SPEC, torch.bfloat16, 10)
    cases = CASES["tiny" if asked.tiny else "full"]
    if asked.check:
        check(device, asked.tiny)
    if asked.sweep:
        sweep(device, asked.tiny, repeats)
    if asked.check or asked.sweep:
        return
    size, seconds = (128, 0.01) if asked.tiny else (8192, 2.0)
    ceiling = measure.ceiling_tflops(device, dtype, size)
    for case in cases:
        measure_case(spec, dtype, device, case, ceiling, repeats, asked.profile)
    measure_case(spec, dtype, device, cases[0], ceiling, repeats, checkpointing=True)
    sustained = measure.sustained_tflops(device, dtype, size, seconds)
    measure.report(device, benchmark="ceiling", seconds=seconds, sustained_tflops=sustained, ceiling_tflops=ceiling)


if __name__ == "__main__":
    run_script(main)
