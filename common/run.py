"""A drafter's dealings with the run directory: resume, stop, log, save, and the last word to the user."""

import time

import torch

from common import config as configuration
from common.checkpoint import CheckpointError, RunDirectory, compare_configs, open_checkpoint
from common.config import UserError
from common.metrics import Log

WEIGHTS = "drafter.safetensors"


class Run:
    """The first drafter writes what all share; every drafter writes its own optimiser state."""

    def __init__(self, plan, seat, learner):
        self.plan, self.seat, self.learner = plan, seat, learner
        self.directory = RunDirectory(plan.config.log.dir)
        self.first = seat.comm.index == 0
        self.tau = None
        self._log = None
        self._ended = False

    def begin(self):
        """Lock the directory, load what is to be resumed, tell everybody where the run starts; returns the completed steps."""
        if self.first:
            self._open()
        note = self.seat.board.wait("start")
        if not self.first:
            self.directory.check_probe(note["probe"])
        if note["checkpoint"] is not None:
            self._resume(open_checkpoint(note["checkpoint"]))
        if self.first:
            self.directory.rewind_log(note["step"])
            text = configuration.to_yaml(self.plan.config)
            self.directory.write_config(text)
            self._log = Log(self.directory, self.plan.deal.steps, self.plan.config.log.tensorboard, text)
        self._ended = note["step"] >= self.plan.deal.steps
        self._clock, self._tokens, self._busy_s = time.perf_counter(), 0, 0.0
        return note["step"]

    def _open(self):
        self.directory.lock()
        self.directory.clear_stop()
        probe = f"{time.time_ns():x}"
        self.directory.write_probe(probe)
        checkpoint = self.directory.resume_point(self.plan.config.checkpoint.resume, self.seat.restarted)
        if checkpoint is not None:
            notes = compare_configs(checkpoint.config, configuration.to_dict(self.plan.config), self.plan.config.checkpoint.allow_changes)
            self._check_inputs(checkpoint)
            old, new = checkpoint.state["drafters"], self.seat.comm.size
            if old != new:
                notes.append(f"{old} drafters were, {new} are: weights go on from the average, rows are dealt anew, moments are shared out")
            print("\n".join([f"resuming from {checkpoint.path} (step {checkpoint.step})", *notes]), flush=True)
        step, path = (checkpoint.step, str(checkpoint.path)) if checkpoint else (0, None)
        if step >= self.plan.deal.steps:
            print(
                f"{self.directory.path} is finished (step {step} of {self.plan.deal.steps}): nothing to do; name a new log.dir=DIR, "
                "raise optim.steps, or start over with checkpoint.resume=never",
                flush=True,
            )
        self.seat.board.put("start", {"step": step, "checkpoint": path, "probe": probe})

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

    def _resume(self, checkpoint):
        mine = self.seat.comm.index % checkpoint.state["drafters"]
        self.learner.load(checkpoint.tensors(WEIGHTS), checkpoint.tensors(_optimizer_file(mine)))
        self.tau = checkpoint.state["walk_tau"]

    def stop_agreed(self, requested):
        """Whether any drafter wants to stop; all ask at the same steps, so all get the same answer."""
        wish = requested or (self.first and self.directory.stop_requested())
        return bool(self.seat.comm.sum_(torch.tensor([float(wish)])) > 0)

    def packet(self, message):
        """Count a packet that arrived."""
        self._tokens += message.get("valid")
        self._busy_s += message.get("busy_us") / 1e6

    def rates(self, wait_s):
        """What happened since the last call as (sum, count) pairs, so that summing over drafters gives the whole job's rates."""
        now = time.perf_counter()
        elapsed_s = max(now - self._clock, 1e-9)
        share = elapsed_s / self.seat.comm.size
        pairs = {
            "tokens_per_s": (self._tokens, share),
            "target_busy": (self._busy_s, share * len(self.seat.layout.targets)),
            "wait_share": (wait_s, elapsed_s),
            "drafter_busy": (max(elapsed_s - wait_s, 0.0), elapsed_s),
        }
        self._clock, self._tokens, self._busy_s = now, 0, 0.0
        return pairs

    def write(self, step, values):
        """Write one record (the first drafter does)."""
        if "walk_tau" in values:
            self.tau = values["walk_tau"]
        if self.first:
            if "loss" in values:
                values = {"lr": self.learner.optimizer.lr(step)} | values
            self._log.write({"step": step} | {name: value for name, value in values.items() if value is not None})

    def due(self, step):
        return step % self.plan.config.checkpoint.every == 0 or step == self.plan.deal.steps

    def save(self, step):
        """Checkpoint and export; a disk that fails costs this checkpoint, not the run."""
        self.seat.board.phase(step, "checkpoint")
        failures = 0
        try:
            if self.first:
                self.directory.write_part(step, WEIGHTS, self.learner.master_tensors())
            self.directory.write_part(step, _optimizer_file(self.seat.comm.index), self.learner.optimizer.state_tensors())
        except CheckpointError as error:
            self._say(step, error)
            failures = 1
        failures = float(self.seat.comm.sum_(torch.tensor([float(failures)])))
        if self.first and not failures:
            self._commit(step)
        self.seat.comm.barrier()

    def _commit(self, step):
        chosen = self.plan.config.checkpoint
        names = [WEIGHTS, *(_optimizer_file(d) for d in range(self.seat.comm.size))]
        state = {"drafters": self.seat.comm.size, "walk_tau": self.tau, "inputs": self._inputs()}
        try:
            self.directory.commit(step, names, configuration.to_dict(self.plan.config), state)
            self.directory.publish_export(step, self.learner.export)
            self.directory.retain(chosen.keep, chosen.keep_best)
        except CheckpointError as error:
            self._say(step, error)

    def _say(self, step, error):
        print(f"WARNING: no complete checkpoint of step {step}: {error}. Training goes on; the previous checkpoint is valid.", flush=True)

    def end(self, step):
        """Close the files and say where everything lies and what to do next."""
        if not self.first:
            return
        self._log.close()
        if step < self.plan.deal.steps:
            self.directory.clear_stop()
            print(f"\nstopped after step {step}; start the same command again to go on from there", flush=True)
        elif not self._ended:
            print(self._last_word(), flush=True)
        self.directory.unlock()

    def _last_word(self):
        folder, target = self.directory.exports / "latest", self.plan.config.target.path
        prompts = "launch/quickstart/heldout.jsonl" if "quickstart" in target else "PROMPTS.jsonl"
        speculative = f'{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {self.plan.drafter.block_size - 1}}}'
        tau = "" if self.tau is None else f"walk tau on held-out conversations: {self.tau:.2f} tokens per verification\n"
        return (
            f"\n{tau}drafter     {folder}\n"
            f"evaluate    python evaluate_drafter.py --drafter {folder} --target {target} --prompts {prompts} --json out.json\n"
            f"look        tensorboard --logdir {self.directory.tensorboard}\n"
            f"serve       vllm serve {target} --speculative-config '{speculative}'"
        )


def _optimizer_file(drafter):
    return f"optim_drafter{drafter}.safetensors"
