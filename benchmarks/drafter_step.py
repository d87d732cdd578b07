"""The drafter's step, forward and backward with the head's loss, without the optimiser, at the Qwen3-8B shape.

    python -m benchmarks.drafter_step [--tiny] [--profile] [--check]

--profile adds where the step's time goes, by class of kernel. --check, instead of the times: the useful work against torch's own count,
loss and gradients against the float32 twin on fresh rows, and 200 packets that may neither wait for the device nor compile; it exits with
code 1 if one of these does not hold.
"""

import argparse
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from common import compile_cache
from common.cli import run_script
from common.config import ObjectiveConfig
from common.data.rows import Row
from common.drafter import block_mask
from common.drafter.backbone import Drafter
from common.drafter.spec import FULL, SLIDING, DrafterSpec
from common.objective.block_loss import Result, base_loss
from common.objective.blocks import Blocks, build_blocks, draw_anchors
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
"""Tokens, documents and anchors of a packet."""
KERNEL_CLASSES = {  # the first class with a matching part of the kernel's name
    "attention": ("flex_attention", "_attention"),
    "head": ("cross_entropy",),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "copies and fills": ("Memcpy", "Memset", "copy", "fill"),
    "pointwise": ("triton_", "elementwise", "reduce", "vectorized"),
}


def useful_flop(spec: DrafterSpec, row_tokens: int, anchors: int, pairs: int) -> dict[str, int]:
    """{part: FLOP} of a step, nothing recomputed: three products per matrix (forward, two gradients), two per row of the frozen head.

    Attention counts what torch's FlopCounterMode counts for flash attention (its backward 2.5 forwards) over the visible `pairs` alone.
    What is not computed here counts too, so that figures compare with those of other trainers: the gradient of the features (0.7%), the
    last layer's rows without a label (0.7%), the first layer's queries, keys and values of masked slots, which are all alike (1.6%).
    """
    D, T, Q = spec.hidden_size, row_tokens, anchors * spec.block_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = 2 * D * (T * 2 * key + Q * (2 * query + 2 * key + 3 * spec.intermediate_size))
    return {
        "matrices": 3 * (2 * T * len(spec.taps) * D * D + spec.layers * layer),
        "attention": int(3.5 * 4 * query * pairs) * spec.layers,
        "head": 2 * 2 * anchors * (spec.block_size - 1) * spec.vocab_size * D,
    }


def visible_pairs(blocks: Blocks, spec: DrafterSpec) -> int:
    """Visible (query, key) pairs of a packet in a full layer."""
    context = int((blocks.anchor_A - blocks.lo_A)[blocks.keep_A].sum())
    return spec.block_size * (context + spec.block_size * int(blocks.keep_A.sum()))


def random_row(generator: np.random.Generator, row_tokens: int, documents: int, vocab_size: int, even: bool = True) -> Row:
    """A row of random tokens, fully supervised: documents of equal length, or of random ones with random unsupervised tokens."""
    if even:
        starts = np.arange(documents) * (row_tokens // documents)
    else:
        starts = np.sort(np.append(0, 1 + generator.choice(row_tokens - 1, documents - 1, replace=False)))
    index = np.arange(row_tokens)
    loss_mask = np.ones(row_tokens, np.uint8) if even else (generator.random(row_tokens) < 0.9).astype(np.uint8)
    document_start = starts[np.searchsorted(starts, index, side="right") - 1].astype(np.int32)
    return Row(generator.integers(0, vocab_size, row_tokens).astype(np.int32), document_start, loss_mask, row_tokens, documents)


def draw_blocks(spec: DrafterSpec, row: Row, anchors: int, number: int = 0) -> Blocks:
    """A packet's blocks, on the host."""
    anchor, keep = draw_anchors(row, anchors, seed=0, number=number)
    return build_blocks(row, anchor, keep, spec.block_size, spec.mask_token_id, window=spec.window)


def even_packet(spec: DrafterSpec, case: tuple[int, int, int]) -> tuple[Blocks, int]:
    """The blocks of one of CASES, on the host, and their visible pairs."""
    row_tokens, documents, anchors = case
    blocks = draw_blocks(spec, random_row(np.random.default_rng(0), row_tokens, documents, spec.vocab_size), anchors)
    return blocks, visible_pairs(blocks, spec)


class Step:
    """A drafter of random weights with a random vocabulary, and its forward and backward on one packet."""

    def __init__(self, spec: DrafterSpec, dtype: torch.dtype, device: torch.device, compiled: bool = True, checkpointing: bool = False):
        self.spec = spec
        generator = torch.Generator(device).manual_seed(0)
        draw = {"generator": generator, "device": device, "dtype": dtype}
        self.model = Drafter(spec, dtype, device, checkpointing)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        embedding, head = (torch.randn(spec.vocab_size, spec.hidden_size, **draw).mul_(0.02) for _ in range(2))
        self.vocabulary = Vocabulary(embedding, head, 1.0, None)
        self._draw = draw
        self.forward = compile_cache.handle("drafter", self._run, device, (id(self),), recompute=RECOMPUTE) if compiled else self._run

    def _run(self, *inputs: Any) -> torch.Tensor:
        return self.model(*inputs)

    def features(self, rows: int) -> torch.Tensor:
        """Random features of a target: [rows, M*D]."""
        return torch.randn(rows, len(self.spec.taps) * self.spec.hidden_size, **self._draw)

    def __call__(self, features_TF: torch.Tensor, blocks: Blocks, head: Literal["fused", "checkpoint"] = "fused") -> Result:
        self.model.zero_grad(set_to_none=True)
        embeddings_UD = self.vocabulary.embed(blocks.tokens_U)
        hidden_AJD = self.forward(embeddings_UD, blocks.positions_AK, features_TF, blocks.context_positions_T, blocks.mask)
        result = base_loss(hidden_AJD, self.vocabulary, blocks, ObjectiveConfig(head=head))
        result.loss_sum.backward()
        return result

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step, by parameter, in float32."""
        return {name: parameter.grad.float() for name, parameter in self.model.named_parameters() if parameter.grad is not None}


def measure_case(
    spec: DrafterSpec,
    dtype: torch.dtype,
    device: torch.device,
    case: tuple[int, int, int],
    ceiling: float,
    repeats: int,
    profile: bool = False,
    checkpointing: bool = False,
) -> None:
    """Report the time of a step on one of CASES against the ceiling, a rate in TFLOP/s."""
    row_tokens, documents, anchors = case
    forget_steps()
    step = Step(spec, dtype, device, checkpointing=checkpointing)
    blocks, pairs = even_packet(spec, case)
    flop = useful_flop(spec, row_tokens, anchors, pairs)
    features, blocks = step.features(row_tokens), blocks.to(device)
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


def forget_steps() -> None:
    """Free the drafters of earlier cases, which their compiled kernels hold, or they count in this one's memory."""
    compile_cache.reset()
    torch._dynamo.reset()
    gc.collect()


def report_profile(function: Callable[[], object], device: torch.device, case: tuple[int, int, int], steps: int = 3, top: int = 25) -> None:
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


def check(device: torch.device, tiny: bool) -> bool:
    """Report whether counts, values and steadiness are as they should be; returns whether they all are."""
    spec = dataclasses.replace(TINY if tiny else SPEC, layers=2, taps=(0, 2), layer_types=(FULL, SLIDING), window=80)
    if not tiny:
        spec = dataclasses.replace(spec, hidden_size=1024, intermediate_size=1536, heads=8, kv_heads=2, vocab_size=4096, mask_token_id=4095)
    row_tokens, anchors = (256, 64) if tiny else (3072, 512)
    generator = np.random.default_rng(0)
    good = check_useful_flop(device)
    for dtype in (torch.float32, torch.bfloat16):
        forget_steps()
        step = Step(spec, dtype, device)
        row = random_row(generator, row_tokens, 7, spec.vocab_size, even=False)
        good &= check_values(step, dtype, draw_blocks(spec, row, anchors).to(device), device)
    return steady(step, device, generator, row_tokens, anchors, packets=5 if tiny else 200) and good


def check_useful_flop(device: torch.device) -> bool:
    """`useful_flop` against torch's count of a tiny step on the CPU, and the visible pairs against a mask that is written out.

    There the path of plain products computes all pairs, and attention's backward pass costs two forwards.
    """
    spec, anchors, row_tokens = TINY, 8, 24
    queries, query = anchors * spec.block_size, spec.heads * spec.head_dim
    step = Step(spec, torch.float32, torch.device("cpu"))
    blocks, features_TF = even_packet(spec, (row_tokens, 1, anchors))[0], step.features(row_tokens).requires_grad_()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step(features_TF, blocks)
    flop = useful_flop(spec, row_tokens, anchors, queries * (row_tokens + queries))
    not_computed = 6 * anchors * spec.hidden_size * (query + 3 * spec.intermediate_size)  # slot 0 of the last layer
    not_computed += 6 * (queries - anchors - 1) * spec.hidden_size * (spec.heads + 2 * spec.kv_heads) * spec.head_dim  # the mask token's
    expected = flop["matrices"] + flop["head"] + flop["attention"] * 3 / 3.5 - not_computed
    uneven = draw_blocks(spec, random_row(np.random.default_rng(1), 64, 3, spec.vocab_size, even=False), anchors)
    dense = block_mask.dense_mask(block_mask.MaskSpec(64, anchors, spec.block_size), uneven.anchor_A, uneven.lo_A, uneven.keep_A)
    empty_slots = spec.block_size * int((~uneven.keep_A).sum())  # they see themselves
    good = counter.get_total_flops() == expected and visible_pairs(uneven, spec) == int(dense.sum()) - empty_slots
    row_tokens, _, anchors = CASES["full"][0]
    useful_tflop = sum(useful_flop(SPEC, row_tokens, anchors, even_packet(SPEC, CASES["full"][0])[1]).values()) / 1e12
    measure.report(device, benchmark="drafter_step_check", check="useful work", useful_tflop=useful_tflop, good=good)
    return good


def check_values(step: Step, dtype: torch.dtype, blocks: Blocks, device: torch.device) -> bool:
    """Loss and every gradient of the fast step against its slow twin in float32."""
    twin = Step(step.spec, torch.float32, device, compiled=False)
    twin.model.load_state_dict(step.model.state_dict())
    twin.vocabulary = Vocabulary(step.vocabulary.embedding.float(), step.vocabulary.head.float(), 1.0, None)
    features_TF = step.features(len(blocks.context_positions_T))
    dense = dataclasses.replace(blocks, mask=blocks.mask._replace(full_tiles=None, sliding_tiles=None))
    loss, truth = step(features_TF, blocks).loss_sum.item(), twin(features_TF.float(), dense, head="checkpoint").loss_sum.item()
    true_gradients = twin.gradients()
    errors = {name: ((g - true_gradients[name]).norm() / true_gradients[name].norm()).item() for name, g in step.gradients().items()}
    error, worst = max((error, name) for name, error in errors.items())
    loss_error = abs(loss - truth) / truth
    good = max(loss_error, error) < (1e-3 if dtype == torch.float32 else 3e-2)
    case = dict(check="values", dtype=str(dtype), loss_error=loss_error, worst=worst, error=error)
    measure.report(device, benchmark="drafter_step_check", **case, good=good)
    return good


def steady(step: Step, device: torch.device, generator: np.random.Generator, row_tokens: int, anchors: int, packets: int) -> bool:
    """Fresh packets of random documents and supervised counts: no wait for the device, no compile, memory flat."""
    features_TF, before = step.features(row_tokens), compile_cache.stats()["compiles"]
    reserved = []
    for number in range(packets):
        row = random_row(generator, row_tokens, int(generator.integers(1, 20)), step.spec.vocab_size, even=False)
        row.loss_mask[int(generator.integers(0, row_tokens)) :] = 0
        blocks = draw_blocks(step.spec, row, anchors, number)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        step(features_TF, blocks.to(device))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            reserved.append(torch.cuda.memory_reserved(device))
    growth_gib = (reserved[-1] - reserved[len(reserved) // 4]) / 2**30 if reserved else 0.0
    compiles = compile_cache.stats()["compiles"] - before
    good = compiles == 0 and growth_gib < 0.1
    case = dict(check="steady", packets=packets, compiles=compiles, reserved_growth_gib=growth_gib)
    measure.report(device, benchmark="drafter_step_check", **case, good=good)
    return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("tiny", "profile", "check"):
        parser.add_argument(f"--{flag}", action="store_true")
    asked = parser.parse_args(argv)
    device = measure.device_of(asked.tiny)
    if asked.check:
        return 0 if check(device, asked.tiny) else 1
    spec, dtype, repeats = (TINY, torch.float32, 2) if asked.tiny else (SPEC, torch.bfloat16, 10)
    cases = CASES["tiny" if asked.tiny else "full"]
    size, seconds = (128, 0.01) if asked.tiny else (8192, 2.0)
    ceiling = measure.ceiling_tflops(device, dtype, size)
    for case in cases:
        measure_case(spec, dtype, device, case, ceiling, repeats, asked.profile)
    measure_case(spec, dtype, device, cases[0], ceiling, repeats, checkpointing=True)
    sustained = measure.sustained_tflops(device, dtype, size, seconds)
    measure.report(device, benchmark="ceiling", seconds=seconds, sustained_tflops=sustained, ceiling_tflops=ceiling)
    return 0


if __name__ == "__main__":
    run_script(main)
