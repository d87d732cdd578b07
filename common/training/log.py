"""Where records go: console, TensorBoard and metrics.jsonl."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

GROUPS = {
    "speed": ("tokens_per_s", "mfu", "wait_share", "drafter_busy", "target_busy", "target_blocked"),
    "health": ("grad_norm", "skipped", "empty", "replica_distance", "peak_memory_gib"),
}
"""TensorBoard's groups; what is in none of them stands under `train`, held-out figures under `heldout`, lists by slot under `slots`."""
FIRST_PLOTS = {
    "loss": ["^train/loss$"],
    "acceptance length": ["^train/tau$", "^heldout/tau$", "^heldout/tau_tree$"],
    "tokens per second": ["^speed/tokens_per_s$"],
    "gradient norm": ["^health/grad_norm$"],
}
"""What one looks at first, as title and tags, side by side under TensorBoard's Custom Scalars."""


class Log:
    """Writes records: metrics.jsonl, TensorBoard, and a progress line. A file that cannot be written never stops the training."""

    def __init__(self, run_directory: RunDirectory, first_step: int, total_steps: int, tensorboard: bool, config_text: str):
        self._path, self._total = run_directory.metrics, total_steps
        self._events: SummaryWriter | None = None
        self._broken: set[str] = set()
        if tensorboard:
            self._guard("TensorBoard", lambda: self._open_tensorboard(run_directory.tensorboard, first_step, config_text))

    def _open_tensorboard(self, folder: Path, first_step: int, config_text: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder), purge_step=first_step)  # steps that are run again are not shown twice
        self._events.add_text("config", "    " + config_text.replace("\n", "\n    "))
        self._events.add_custom_scalars({"first": {title: ["Multiline", tags] for title, tags in FIRST_PLOTS.items()}})

    def write(self, record: Mapping[str, Any], left_s: float | None = None) -> None:
        """One logged step: {"step": n, ...}; lists are per slot, from slot 1. `left_s` are the seconds to the end of the run."""
        self._guard("metrics.jsonl", lambda: self._append(record))
        if (events := self._events) is not None:
            self._guard("TensorBoard", lambda: self._to_tensorboard(events, record))
        if "loss" in record:
            self._progress(record, left_s)

    def _append(self, record: Mapping[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _to_tensorboard(self, events: "SummaryWriter", record: Mapping[str, Any]) -> None:
        step = record["step"]
        for name, value in record.items():
            if isinstance(value, list):
                for slot, each in enumerate(value, start=1):
                    if each is not None:
                        events.add_scalar(f"slots/{name}/{slot:02d}", each, step)
            elif isinstance(value, (int, float)) and name != "step":
                events.add_scalar(tag(name), value, step)
        events.flush()

    def _guard(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if what not in self._broken:
                self._broken.add(what)
                print(f"warning: {what} cannot be written ({error.strerror or error}); training goes on without it", file=sys.stderr)

    def _progress(self, record: Mapping[str, Any], left_s: float | None) -> None:
        step, done = record["step"], int(20 * record["step"] / self._total)
        numbers = [f"[{'#' * done}{'.' * (20 - done)}] step {step}/{self._total}", f"epoch {record['epoch']:.2f}"]
        numbers += [f"loss {_number(record['loss'], 3)}", f"tau {_number(record.get('tau'), 2)}"]
        numbers += [f"{record['tokens_per_s']:,.0f} tokens/s"]
        numbers += [f"MFU {record['mfu']:.0%}"] if "mfu" in record else []
        numbers += [f"{record['peak_memory_gib']:.1f} GiB", f"wait {record['wait_share']:.0%}", f"ETA {duration(left_s)}"]
        line = "  ".join(numbers)
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="\n" if step == self._total else "", flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """End TensorBoard's file; what was written is on disk already."""
        if self._events is not None:
            self._guard("TensorBoard", self._events.close)


def tag(name: str) -> str:
    """A metric's name in TensorBoard, behind its group."""
    if name.startswith("heldout_"):
        return f"heldout/{name.removeprefix('heldout_')}"
    if name.startswith("kernels/"):
        return f"health/{name.replace('/', '_')}"
    return f"{next((group for group, names in GROUPS.items() if name in names), 'train')}/{name}"


def duration(seconds: float | None) -> str:
    """A time as one says it: `40 s`, `12 min`, `3 h 05 min`."""
    if seconds is None:
        return "?"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
