"""Solo on one device: does a whole step take longer than its target's and its drafter's work one after the other?

    python benchmarks/end_to_end.py [--steps 30] [--tiny]

The Qwen3-8B shape with random weights, packets of 12,288 tokens. Prints tokens a second of whole steps (target, drafter, optimiser,
loading, metrics) and, measured in the same process right after, of target and drafter alone; `efficiency` is the first against
1 / (1 / target + 1 / drafter).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import eight_billion, measure, scaling
from common.cli import run_script
from common.distributed import jobs


class ComparedTrainer(scaling.TimedTrainer):
    """A trainer that measures its parts when it has measured the whole."""

    def report(self, seconds):
        steps, ktok = self.plan.schedule.steps - scaling.WARMUP_STEPS, self.plan.shape.row_tokens / 1e3
        assignment, device = next(self.plan.schedule.assignments()), self.context.device
        packet = self.context.link.take(assignment, None)

        def learn():
            self.learner.step(1, self.learner.backward(packet, assignment.number).weight_sum)

        with torch.no_grad():
            target_s = measure.timed(lambda: self.context.link.capture(assignment, packet), device).median_ms / 1e3
        drafter_s = measure.timed(learn, device).median_ms / 1e3
        measure.report(
            device,
            benchmark="end_to_end",
            row_tokens=self.plan.shape.row_tokens,
            ktok_per_s=ktok * steps / seconds,
            target_ktok_per_s=ktok / target_s,
            drafter_ktok_per_s=ktok / drafter_s,
            efficiency=(target_s + drafter_s) * steps / seconds,
            peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        )


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    asked = argparse.Namespace(**vars(parser.parse_args(arguments)), sync="average", link="auto", row_tokens=12288)
    with tempfile.TemporaryDirectory() as folder:
        shape, plan = scaling.make_plan(asked, 1, Path(folder))
        with jobs.join(plan.config) as job:
            job.connect(plan.shape, plan.schedule)

            def make_server(context):
                model = eight_billion.random_target(shape, context.device, plan.shape.dtype)
                return scaling.TimedServer(plan, context, model)

            def make_trainer(context):
                vocabulary = eight_billion.random_vocabulary(plan.target, context.device, getattr(torch, plan.config.drafter.dtype))
                return ComparedTrainer(plan, context, scaling.Stopless, vocabulary)

            job.run(make_server, make_trainer)


if __name__ == "__main__":
    run_script(main)
