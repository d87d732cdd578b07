"""The optimiser's step at the size of the Qwen3-8B drafter (1.05 billion parameters), against the floor set by memory.

    python -m benchmarks.optimizer_step [--tiny]

The floor of a step: read the bfloat16 gradients (2 bytes a parameter), read and write master and both moments (24), write the compute
weights (2), at the speed of a copy. Each further packet of the step adds its gradients to the float32 buffer (2 + 8).
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks import measure
from common.cli import run_script
from common.config import OptimConfig
from common.training.optim import Optimizer

STEP_BYTES = 2 + 24 + 2
PACKET_BYTES = 2 + 8


def drafter_shapes(
    hidden: int, intermediate: int, layers: int, taps: int, heads: int, kv_heads: int, head_dim: int
) -> list[tuple[int, ...]]:
    """Shapes of a drafter's parameters."""
    layer: list[tuple[int, ...]] = [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * intermediate, hidden),
        (hidden, intermediate),
        *[(head_dim,)] * 2,
        *[(hidden,)] * 2,
    ]
    return [(hidden, taps * hidden), (hidden,), (hidden,), *layer * layers]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(argv).tiny
    device, dtype = measure.device_of(tiny), torch.bfloat16
    shapes = drafter_shapes(*(32, 64, 2, 2, 2, 1, 16) if tiny else (4096, 12288, 5, 5, 32, 8, 128))
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02) for shape in shapes]
    gradients = [torch.randn_like(p) for p in parameters]
    optimizer = Optimizer([(f"{i}", p) for i, p in enumerate(parameters)], OptimConfig(), steps=1000)
    weight_sum = torch.tensor(1000.0, device=device)

    def another_packet() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.accumulate()

    def whole_step() -> None:
        another_packet()
        optimizer.step(weight_sum)

    count = len(optimizer.masters)
    bytes_per_s = measure.copy_bytes_per_s(device, 2**12 if tiny else 2**31)
    for run, floor_bytes in ((whole_step, STEP_BYTES), (another_packet, PACKET_BYTES)):
        times = measure.timed(run, device, repeats=2 if tiny else 10)
        floor_ms = 1e3 * floor_bytes * count / bytes_per_s
        measure.report(
            device,
            benchmark="optimizer_step",
            part=run.__name__,
            parameters=count,
            **times._asdict(),
            floor_ms=floor_ms,
            copy_gb_per_s=bytes_per_s / 1e9,
            peak_gib=measure.peak_gib(run, device),
        )


if __name__ == "__main__":
    run_script(main)
