"""Where records go: console, TensorBoard and metrics.jsonl."""

import json
import shutil
import sys
import time


class Log:
    """Writes records: metrics.jsonl, TensorBoard, and a progress line. A file that cannot be written never stops the training."""

    def __init__(self, run_directory, first_step, total_steps, tensorboard, config_text):
        self._path, self._total = run_directory.metrics, total_steps
        self._start = None
        self._events = None
        self._broken = set()
        if tensorboard:
            self._guard("TensorBoard", lambda: self._open_tensorboard(run_directory.tensorboard, first_step, config_text))

    def _open_tensorboard(self, folder, first_step, config_text):
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder), purge_step=first_step)  # steps that are run again are not shown twice
        self._events.add_text("config", "    " + config_text.replace("\n", "\n    "))

    def write(self, record):
        """One logged step: {"step": n, ...}; lists are per slot, from slot 1."""
        self._guard("metrics.jsonl", lambda: self._append(record))
        if self._events is not None:
            self._guard("TensorBoard", lambda: self._to_tensorboard(record))
        if "loss" in record:
            self._progress(record)

    def _append(self, record):
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _to_tensorboard(self, record):
        for name, value in record.items():
            if isinstance(value, list):
                for slot, each in enumerate(value, start=1):
                    if each is not None:
                        self._events.add_scalar(f"{name}/slot_{slot:02d}", each, record["step"])
            elif isinstance(value, (int, float)) and name != "step":
                self._events.add_scalar(name, value, record["step"])
        self._events.flush()

    def _guard(self, what, work):
        try:
            work()
        except OSError as error:
            if what not in self._broken:
                self._broken.add(what)
                print(f"warning: {what} cannot be written ({error.strerror or error}); training goes on without it", file=sys.stderr)

    def _progress(self, record):
        now, step = time.monotonic(), record["step"]
        if self._start is None:
            self._start = (now, step)
        done, rate = step / self._total, (step - self._start[1]) / max(now - self._start[0], 1e-9)
        eta = f"{(self._total - step) / rate:.0f} s" if rate > 0 else "?"
        bar = "#" * int(20 * done) + "." * (20 - int(20 * done))
        numbers = [f"loss {_number(record['loss'], 3)}", f"tau {_number(record.get('tau'), 2)}"]
        numbers += [f"{record['tokens_per_s']:,.0f} tokens/s", f"wait {record['wait_share']:.0%}", f"ETA {eta}"]
        line = f"[{bar}] step {step}/{self._total}  " + "  ".join(numbers)
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="\n" if step == self._total else "", flush=True)
        else:
            print(line, flush=True)

    def close(self):
        if self._events is not None:
            self._guard("TensorBoard", self._events.close)


def _number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"
