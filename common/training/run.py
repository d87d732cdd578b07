"""A drafter's dealings with the run directory: resume, stop, log, save, and the last word to the user."""

import contextlib
import sys
import time

import torch

from common import compile_cache, config_reader
from common.data.schedule import TRAIN, Assignment
from common.errors import UserError
from common.training.checkpoint import CheckpointError, compare_configs, open_checkpoint
from common.training.log import Log
from common.training.run_directory import RunDirectory

WEIGHTS = "drafter.safetensors"


class Run:
    """The first drafter writes what all share; every drafter writes its own optimiser state."""

    def __init__(self, plan, context, learner):
        self.plan, self.context, self.learner = plan, context, learner
        self.directory = RunDirectory(plan.config.log.dir)
        self.first = context.comm.index == 0
        self.tau = None
        self._log = None
        self._ended = False

    def begin(self, meters):
        """Lock the directory, load what is to be resumed, tell everybody where the run starts; returns the completed steps."""
        if self.first:
            self._open()
        note = self.context.status.wait("start")
        if not self.first:
            self.directory.check_probe(note["probe"])
        step = note["step"]
        if note["checkpoint"] is not None:
            self._resume(open_checkpoint(note["checkpoint"]), meters)
        self._ended = step >= self.plan.schedule.steps
        if self.first and not self._ended:
            self.directory.rewind_log(step)
            text = config_reader.to_yaml(self.plan.config)
            self.directory.write_config(text)
            if (compiled := self.kernel_counters())["kernels/compiles"]:
                print("{kernels/compiles} kernels compiled in {kernels/compile_s:.0f} s".format(**compiled), flush=True)
            self._log = Log(self.directory, step + 1, self.plan.schedule.steps, self.plan.config.log.tensorboard, text)
        self.reset_rates()
        return step

    def _open(self):
        self.directory.lock()
        self.directory.clear_stop()
        probe = f"{time.time_ns():x}"
        self.directory.write_probe(probe)
        checkpoint = self.directory.resume_point(self.plan.config.checkpoint.resume, self.context.restarted)
        if checkpoint is not None:
            notes = compare_configs(checkpoint.config, config_reader.to_dict(self.plan.config), self.plan.config.checkpoint.allow_changes)
            self._check_inputs(checkpoint)
            old, new = checkpoint.state["drafters"], self.context.comm.size
            if old != new:
                notes.append(
                    f"{old} drafters were, {new} are: weights go on from the average, rows are scheduled anew, moments are shared out"
                )
            print("\n".join([f"resuming from {checkpoint.path} (step {checkpoint.step})", *notes]), flush=True)
        step, path = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
        if step >= self.plan.schedule.steps:
            print(
                f"{self.directory.path} is finished (step {step} of {self.plan.schedule.steps}): nothing to do; name a new log.dir=DIR, "
                "raise optim.steps, or start over with checkpoint.resume=never",
                flush=True,
            )
        self.context.status.put("start", {"step": step, "checkpoint": path, "probe": probe})

    def _inputs(self):
        return {"data.path": self.plan.rows.store.fingerprint, "target.path": self.plan.target.fingerprint}

    def _check_inputs(self, checkpoint):
        for key, mine in self._inputs().items():
            theirs = checkpoint.state["inputs"][key]
            if theirs != mine and key not in self.plan.config.checkpoint.allow_changes:
                raise UserError(
                    f"{key}: its content changed since {checkpoint.path} was written (fingerprint {theirs}, now {mine}); restore it, "
                    f"allow it with checkpoint.allow_changes=[{key}], or start elsewhere with log.dir=DIR"
                )

    def _resume(self, checkpoint, meters):
        drafters = checkpoint.state["drafters"]
        state = checkpoint.tensors(_optimizer_file(self.context.comm.index % drafters))
        self.learner.load(checkpoint.tensors(WEIGHTS), state)
        if drafters == self.context.comm.size:
            meters.load_state_tensors(state)
        self.tau = checkpoint.state["heldout_tau"]
        if self.first and not self.directory.has_export(checkpoint.step):  # the last job died between checkpoint and export
            self._export(checkpoint.step)

    def stop_agreed(self, requested):
        """Whether any drafter wants to stop; all ask at the same steps, so all get the same answer."""
        wish = requested or (self.first and self.directory.stop_requested())
        return bool(self.context.comm.sum_(torch.tensor([float(wish)])) > 0)

    def packet(self, message):
        """Count a packet that arrived."""
        self._tokens += message.get("valid")
        self._blocked_s += message.get("blocked_us") / 1e6
        self._busy_s += message.get("busy_us") / 1e6

    @staticmethod
    def kernel_counters():
        """The kernel cache's counters; after the warm-up none of them should move."""
        counted = compile_cache.stats()
        return {f"kernels/{name}": counted[name] for name in ("compiles", "retries", "compile_s")}

    def reset_rates(self):
        self._clock, self._tokens, self._busy_s, self._blocked_s = time.perf_counter(), 0, 0.0, 0.0

    def rates(self, wait_s):
        """What happened since the last call as (sum, count) pairs, so that summing over drafters gives the whole job's rates."""
        now = time.perf_counter()
        elapsed_s = max(now - self._clock, 1e-9)
        share = elapsed_s / self.context.comm.size
        pairs = {
            "tokens_per_s": (self._tokens, share),
            "target_busy": (self._busy_s, share * len(self.context.layout.targets)),
            "target_blocked": (self._blocked_s, share * len(self.context.layout.targets)),
            "wait_share": (wait_s, elapsed_s),
            "drafter_busy": (max(elapsed_s - wait_s, 0.0), elapsed_s),
        }
        self.reset_rates()
        return pairs

    def write(self, step, values):
        """Write one record (the first drafter does)."""
        if "heldout_tau" in values:
            self.tau = values["heldout_tau"]
        if self.first:
            if "loss" in values:
                values = {"lr": self.learner.optimizer.lr(step)} | values | self.kernel_counters()
            self._log.write({"step": step} | {name: value for name, value in values.items() if value is not None})

    def warn_of_faults(self):
        """Name the steps that were skipped since the last record and the packets behind them.

        Raises: UserError after optim.max_skipped in a row.
        """
        count, step, packets = self.learner.faults.read()
        if not count:
            return
        causes = [f"features of packet {number} ({source}) from target {self._target_of(number)}" for source, number in packets.items()]
        schedule, limit = self.plan.schedule, self.plan.config.optim.max_skipped
        numbers = range((step - 1) * schedule.step_packets + self.context.index, step * schedule.step_packets, schedule.drafters)
        mine = f"loss or gradients of packet {', '.join(map(str, numbers))}"
        if self.plan.config.sync.mode == "ddp" and schedule.drafters > 1:
            mine = "loss or gradients of some drafter's packet"  # all skip together
        what = f"drafter {self.context.index} skipped {count} steps, the last was {step}: {' and '.join(causes) or mine} not finite"
        print(f"WARNING: {what}", file=sys.stderr, flush=True)
        if (row := int(self.learner.optimizer.skipped_in_a_row)) >= limit:
            raise UserError(f"{what}; {row} in a row (optim.max_skipped={limit}): look at the target, or lower optim.lr and start again")

    def _target_of(self, number):
        step = number // self.plan.schedule.step_packets + 1
        return self.context.layout.target_of(Assignment(TRAIN, step, number, self.context.index)).index

    def due(self, step):
        return step % self.plan.config.checkpoint.every == 0 or step == self.plan.schedule.steps

    def save(self, step, meters):
        """Checkpoint and export; a disk that fails costs this checkpoint, not the run."""
        self.context.status.phase(step, "checkpoint")
        with self._going_on(f"no checkpoint of step {step}"):
            if self.first:
                self.directory.write_part(step, WEIGHTS, self.learner.master_tensors())
            state = self.learner.optimizer.state_tensors() | meters.state_tensors()
            self.directory.write_part(step, _optimizer_file(self.context.comm.index), state)
        self.context.comm.barrier()
        if self.first:
            self._commit(step)
        self.context.comm.barrier()

    def _commit(self, step):
        chosen = self.plan.config.checkpoint
        names = [WEIGHTS, *(_optimizer_file(d) for d in range(self.context.comm.size))]
        state = {"drafters": self.context.comm.size, "heldout_tau": self.tau, "inputs": self._inputs()}
        with self._going_on(f"no checkpoint of step {step}"):
            self.directory.commit(step, names, config_reader.to_dict(self.plan.config), state)
        self._export(step)
        self.directory.retain(chosen.keep, chosen.keep_best)

    def _export(self, step):
        with self._going_on(f"no export of step {step}"):
            self.directory.save_export(step, self.learner.export)

    @contextlib.contextmanager
    def _going_on(self, what):
        try:
            yield
        except CheckpointError as error:
            print(f"WARNING: {what}: {error}. Training goes on; the previous one stays valid.", file=sys.stderr, flush=True)

    def close(self):
        """Give the run directory back, after an error too: in a notebook the process lives on."""
        if self._log is not None:
            self._log.close()
        self.directory.unlock()

    def end(self, step):
        """Say where everything lies and what to do next."""
        if not self.first:
            return
        if step < self.plan.schedule.steps:
            self.directory.clear_stop()
            print(f"\nstopped after step {step}; start the same command again to go on from the newest checkpoint", flush=True)
        elif not self._ended:
            print(self._last_word(), flush=True)

    def _last_word(self):
        folder, target = self.directory.exports / "latest", self.plan.config.target.path
        prompts = "launch/quickstart/heldout.jsonl" if target == "launch/quickstart/target" else "PROMPTS.jsonl"
        speculative = f'{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {self.plan.drafter.block_size - 1}}}'
        tau = "" if self.tau is None else f"held-out tau on held-out conversations: {self.tau:.2f} tokens per verification\n"
        return (
            f"\n{tau}drafter     {folder}\n"
            f"evaluate    python evaluate_drafter.py --drafter {folder} --target {target} --prompts {prompts} --json out.json\n"
            f"look        tensorboard --logdir {self.directory.tensorboard}\n"
            f"serve       vllm serve {target} --speculative-config '{speculative}'"
        )


def _optimizer_file(drafter):
    return f"optim_drafter{drafter}.safetensors"
