"""Where a step's time goes, by class of kernel."""

from collections.abc import Callable

import torch

from benchmarks import measure

KERNEL_CLASSES = {  # the first class with a matching part of the kernel's name
    "attention": ("flex_attention", "_attention"),
    "head": ("cross_entropy",),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "copies and fills": ("Memcpy", "Memset", "copy", "fill"),
    "pointwise": ("triton_", "elementwise", "reduce", "vectorized"),
}


def report_profile(
    function: Callable[[], object], device: torch.device, benchmark: str, row_tokens: int, steps: int = 3, top: int = 25
) -> None:
    """Where the time of `function` goes: per class of kernel, then the kernels that take the most."""
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
    measure.report(device, benchmark=benchmark, row_tokens=row_tokens, **{f"{k} ms": v for k, v in totals.items()})
    for time_ms, count, kind, name in sorted(rows, reverse=True)[:top]:
        print(f"{time_ms:9.3f} ms {count:5d}x  {kind:16s} {name}", flush=True)
