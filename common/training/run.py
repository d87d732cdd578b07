"""A drafter's dealings with the run directory: go on from a checkpoint, stop, log, save, and the last word to the user."""

import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from common import compile_cache, config_reader
from common.data.schedule import TRAIN, Assignment
from common.distributed.context import WorkerContext
from common.distributed.packet import HostMessage
from common.distributed.stop import STOP_S, slow_stop_advice
from common.errors import UserError
from common.metrics import Meters, Metrics
from common.training.checkpoint import Checkpoint, open_checkpoint
from common.training.clock import CHECKPOINT, RunClock
from common.training.costs import peak_flop_per_s
from common.training.disk import going_on
from common.training.learner import Learner, export_drafter
from common.training.log import Log
from common.training.opening import NOTE, WEIGHTS, fingerprints, optimizer_file
from common.training.plan import RunPlan
from common.training.run_directory import RunDirectory


class Run:
    """What one drafter does beside learning. The first drafter writes what all share; every drafter writes its own optimiser state."""

    def __init__(self, plan: RunPlan, context: WorkerContext, learner: Learner):
        self.plan, self.context, self.learner = plan, context, learner
        self.directory = RunDirectory(plan.run_folder)
        self.first = context.comm.index == 0
        self.tau = None
        self.clock = RunClock(context.device, plan.schedule, plan.config.checkpoint.every)
        self._peak_flop_per_s = peak_flop_per_s(context.device, plan.config.drafter.dtype)
        self._log: Log | None = None
        self._fallbacks = 0
        self._said_slow_stop = False
        self._tokens_before = 0  # all drafters' until this start
        self._tokens_since = 0  # this drafter's since
        self.reset_rates()

    def begin(self, meters: Meters) -> int:
        """Load what is to be resumed and open the log; returns the completed steps."""
        note = self.context.status.wait(NOTE)
        step = note["step"]
        if note["checkpoint"] is not None:
            self._resume(open_checkpoint(note["checkpoint"]), meters)
        if self.first:
            self.directory.rewind_log(step)
            text = config_reader.to_yaml(self.plan.config)
            self.directory.write_config(text)
            if self.learner.slow_path is not None:
                print(f"drafter  {self.learner.slow_path}", flush=True)
            if (compiled := self.kernel_counters())["kernels/compiles"]:
                print("{kernels/compiles} kernels compiled in {kernels/compile_s:.0f} s".format(**compiled), flush=True)
            self._log = Log(self.directory, step + 1, self.plan.schedule.steps, self.plan.config.log.tensorboard, text)
        self.reset_rates()
        self.clock.begin(step)
        return step

    def _resume(self, checkpoint: Checkpoint, meters: Meters) -> None:
        drafters = checkpoint.state["drafters"]
        state = checkpoint.tensors(optimizer_file(self.context.comm.index % drafters))
        self.learner.load(checkpoint.tensors(WEIGHTS), state)
        if drafters == self.context.comm.size:
            meters.load_state_tensors(state)
        self.tau = checkpoint.state["heldout_tau"]
        self._tokens_before = checkpoint.state.get("tokens_seen", 0)  # a checkpoint of an earlier release does not know

    def stop_agreed(self, requested: bool) -> bool:
        """Whether any drafter wants to stop; all ask at the same steps, so all get the same answer."""
        wish = requested or (self.first and self.directory.stop_requested())
        return bool(self.context.comm.sum_(torch.tensor([float(wish)])) > 0)

    def stop_s(self, step: int, interval: int) -> float:
        """Seconds that a graceful stop may take, at a record of this step; said once where a launcher would not wait that long."""
        seconds = self.clock.stop_s(step, interval)
        if not self.first:
            return seconds
        self.context.status.put(STOP_S, seconds)
        if (advice := slow_stop_advice(seconds, self.directory.stop_file)) is not None and not self._said_slow_stop:
            self._said_slow_stop = True
            print(f"a stop with a checkpoint may take {seconds:.0f} s here, and {advice}", flush=True)
        return seconds

    def packet(self, message: HostMessage) -> None:
        """Count a packet that arrived."""
        if message.get("kind") == TRAIN:
            self._tokens += message.get("valid")
            self._tokens_since += message.get("valid")
        self._blocked_s += message.get("blocked_us") / 1e6
        self._busy_s += message.get("busy_us") / 1e6
        self._fallbacks = message.get("fallbacks") + (self.learner.slow_path is not None)

    @staticmethod
    def kernel_counters() -> dict[str, float]:
        """The kernel cache's counters; after the warm-up none of them should move."""
        counted = compile_cache.stats()
        return {f"kernels/{name}": counted[name] for name in ("compiles", "retries", "compile_s")}

    def reset_rates(self) -> None:
        """Begin to count anew."""
        self.clock.reset()
        self.learner.take_useful_flop()
        self._tokens, self._busy_s, self._blocked_s = 0, 0.0, 0.0

    def rates(self, wait_s: float) -> Metrics:
        """What happened since the last call as (sum, count) pairs, so that summing over drafters gives the whole job's rates.

        `tokens_per_s` and `mfu` (useful arithmetic of a drafter's device against its peak, see costs.DrafterFlop) are of training alone;
        the shares of the workers' time are of all time, with validations and checkpoints; `fallbacks` counts the faster ways that target
        and drafter cannot take.
        """
        training_s, all_s = self.clock.lap()
        layout, drafters = self.context.layout, self.context.comm.size
        targets = len(layout.targets) * layout.stages
        pairs: Metrics = {
            "tokens_seen": (self._tokens_since, 1 / drafters),
            "tokens_per_s": (self._tokens, training_s / drafters),
            "target_busy": (self._busy_s, all_s * targets / drafters),
            "target_blocked": (self._blocked_s, all_s * targets / drafters),
            "wait_share": (wait_s, all_s),
            "drafter_busy": (max(all_s - wait_s, 0.0), all_s),
            "fallbacks": (self._fallbacks, 1),
        }
        if self._peak_flop_per_s is not None:
            pairs |= {"mfu": (self.learner.take_useful_flop() / self._peak_flop_per_s, training_s)}
        self.reset_rates()
        return pairs

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one record (the first drafter does)."""
        self.tau = values.get("heldout_tau", self.tau)
        if self._log is None:
            return
        record = {"step": step}
        if "loss" in values:
            record |= {"epoch": step / self.plan.schedule.steps_per_epoch, "lr": self.learner.optimizer.lr(step)}
        record |= {name: value for name, value in values.items() if value is not None}
        if "loss" in values:
            record |= {"tokens_seen": self._tokens_before + round(values["tokens_seen"])}
            record |= {"peak_memory_gib": peak_memory_gib(self.context.device)} | self.kernel_counters()
        self._log.write(record, self.clock.left_s(step) if "loss" in values else None)

    def warn_of_faults(self) -> None:
        """Name the steps that were skipped since the last record and the packets behind them.

        Raises: UserError after optim.max_skipped in a row.
        """
        count, step, packets = self.learner.faults.read()
        if not count:
            return
        causes = [f"features of packet {number} ({source}) from target {self._target_of(number)}" for source, number in packets.items()]
        schedule, limit = self.plan.schedule, self.plan.config.optim.max_skipped
        numbers = range((step - 1) * schedule.step_packets + self.context.index, step * schedule.step_packets, schedule.drafters)
        own = f"loss or gradients of packet {', '.join(map(str, numbers))}"
        if self.plan.config.sync.mode == "ddp" and schedule.drafters > 1:
            own = "loss or gradients of some drafter's packet"  # all skip together
        what = f"drafter {self.context.index} skipped {count} steps, the last was {step}: {' and '.join(causes) or own} not finite"
        print(f"WARNING: {what}", file=sys.stderr, flush=True)
        if (row := int(self.learner.optimizer.skipped_in_a_row)) >= limit:
            raise UserError(f"{what}; {row} in a row (optim.max_skipped={limit}): look at the target, or lower optim.lr and start again")

    def _target_of(self, number: int) -> int:
        step = number // self.plan.schedule.step_packets + 1
        return self.context.layout.target_of(Assignment(TRAIN, step, number, self.context.index)).index

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return step % self.plan.config.checkpoint.every == 0 or step == self.plan.schedule.steps

    def save(self, step: int, meters: Meters) -> None:
        """Checkpoint and export; a disk that fails costs this checkpoint, not the run."""
        self.context.status.phase(step, "checkpoint")
        with self.clock.apart(CHECKPOINT):
            with going_on(f"no checkpoint of step {step}"):
                if self.first:
                    self.directory.write_part(step, WEIGHTS, self.learner.master_tensors())
                state = self.learner.optimizer.state_tensors() | meters.state_tensors()
                self.directory.write_part(step, optimizer_file(self.context.comm.index), state)
            tokens = self.context.comm.sum_(torch.tensor([self._tokens_since]))  # a barrier, too: every part is written
            if self.first:
                self._commit(step, self._tokens_before + int(tokens))
            self.context.comm.barrier()

    def _commit(self, step: int, tokens_seen: int) -> None:
        chosen, drafters = self.plan.config.checkpoint, self.context.comm.size
        names = [WEIGHTS, *map(optimizer_file, range(drafters))]
        state = {"drafters": drafters, "heldout_tau": self.tau, "tokens_seen": tokens_seen, "inputs": fingerprints(self.plan)}
        state |= {"steps": self.plan.schedule.steps}
        with going_on(f"no checkpoint of step {step}"):
            self.directory.commit(step, names, config_reader.to_dict(self.plan.config), state)
        with going_on(f"no export of step {step}"):
            self.directory.save_export(step, lambda folder: export_drafter(self.plan, self.learner.master_tensors(), folder))
        self.directory.retain(chosen.keep, chosen.keep_best)

    def close(self) -> None:
        """Close the log, after an error too."""
        if self._log is not None:
            self._log.close()

    def end(self, step: int) -> None:
        """Say where everything lies and what to do next. Raises: UserError if what the run was for could not be written."""
        if not self.first:
            return
        stopped = step < self.plan.schedule.steps
        if stopped:
            self.directory.clear_stop()
        missing = [] if self.directory.has_checkpoint(step) else [f"checkpoint {self.directory.checkpoints}/step_{step:08d}"]
        missing += [] if self.directory.has_export(step) else [f"drafter {self.directory.exports}/step_{step:08d}"]
        missing += [] if missing or self.directory.latest_is(step) else [f"link {self.directory.exports}/latest to it"]
        if missing:
            raise UserError(
                f"step {step} was trained, but could not be saved: no {' and no '.join(missing)} (the warnings above say why); "
                "make room or mend the directory, and start the same command again: it goes on from the newest checkpoint that is there"
            )
        if stopped:
            print(f"\nstopped after step {step}; start the same command again to go on from the newest checkpoint", flush=True)
        else:
            print(self._last_word(), flush=True)

    def _last_word(self) -> str:
        folder, target = self.directory.exports / "latest", self.plan.config.target.path
        prompts = "launch/quickstart/heldout.jsonl" if target == "launch/quickstart/target" else "PROMPTS.jsonl"
        method, drafts = self.learner.family.method, self.plan.drafter.proposals
        speculative = f'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {drafts}}}'
        tau = "" if self.tau is None else f"held-out tau: {self.tau:.2f} tokens per verification\n"
        return (
            f"\n{tau}drafter     {folder}\n"
            f"evaluate    python evaluate_drafter.py --drafter {folder} --target {target} --prompts {prompts} --json out.json\n"
            f"look        tensorboard --logdir {self.directory.tensorboard}\n"
            f"serve       vllm serve {target} --speculative-config '{speculative}'"
        )


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that tensors have taken on a CUDA device since the start; on the CPU, the most that the process has taken."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / (1 << 30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
