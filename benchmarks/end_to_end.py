"""Solo on one device: does a whole step take longer than its target's and its drafter's work one after the other?

    python -m benchmarks.end_to_end [--steps 30] [--tiny]

The Qwen3-8B shape with random weights, packets of 12,288 tokens. Prints tokens a second of whole steps (target, drafter, optimiser,
loading, metrics) and, measured in the same process right after, of target and drafter alone; `efficiency` is the first against
1 / (1 / target + 1 / drafter).
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks import measure, scaling
from common.cli import run_script


class ComparedTrainer(scaling.TimedTrainer):
    """A trainer that measures its parts when it has measured the whole."""

    def report(self, seconds: float) -> None:
        steps, ktok = self.plan.schedule.steps - scaling.WARMUP_STEPS, self.plan.shape.row_tokens / 1e3
        assignment, device = next(self.plan.schedule.assignments()), self.context.device
        packet = self.context.link.take(assignment, 0)

        def capture() -> None:
            with torch.no_grad():
                self.context.link.capture(assignment, packet)

        def learn() -> None:
            self.learner.step(1, self.learner.backward(packet, assignment.number).weight_sum)

        target_s, drafter_s = (measure.timed(part, device).median_ms / 1e3 for part in (capture, learn))
        measure.report(
            device,
            benchmark="end_to_end",
            row_tokens=self.plan.shape.row_tokens,
            ktok_per_s=ktok * steps / seconds,
            target_ktok_per_s=ktok / target_s,
            drafter_ktok_per_s=ktok / drafter_s,
            efficiency=(target_s + drafter_s) * steps / seconds,
            peak_gib=scaling.peak_gib(device),
        )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(argv)
    scaling.run_job(scaling.Setting(asked.tiny, asked.steps, drafters=1), ComparedTrainer)


if __name__ == "__main__":
    run_script(main)
