"""What the jobs of all modes have in common."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from common import compile_cache
from common.config import Config
from common.config_reader import check_averaging
from common.data.schedule import Assignment, Schedule
from common.distributed.context import WorkerContext
from common.distributed.layout import Layout
from common.distributed.packet import PacketBuffer, PacketShape

T = TypeVar("T")


class Worker(Protocol):
    """A target's or a drafter's loop."""

    def warm(self) -> None:
        """Compile everything, before the first packet is due."""

    def run(self) -> Any:
        """Work until the schedule ends or the run is stopped."""


class TargetWorker(Worker, Protocol):
    """A target's loop, whose capture a drafter on the same device may call by itself."""

    def capture(self, assignment: Assignment, buffer: PacketBuffer) -> None:
        """Fill a buffer with an assignment's row and its features."""


MakeTarget = Callable[[WorkerContext], TargetWorker]
MakeDrafter = Callable[[WorkerContext], Worker]


class Job:
    """Where and how this process takes part: `connect` builds the contexts of its workers, `run` makes the workers and runs them.

    `is_main` is true of the process that talks to the user.
    """

    layout: Layout
    is_main: bool

    def __init__(self, config: Config):
        self.config = config
        self.contexts: list[WorkerContext] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        compile_cache.reset()  # they hold this job's models; the process, a notebook's, may run another

    def first_per_host(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by one rank of every host before the others (a download, say)."""
        return work()

    def agree(self, tree: dict[str, Any]) -> None:
        """Refuse to start when ranks hold different configs, data or targets. Raises: UserError naming the keys."""

    def connect(self, shapes: Sequence[PacketShape], schedule: Schedule) -> None:
        """Build the links and comms of this process's workers; `shapes` are those of what each stage of a target gives out."""
        raise NotImplementedError

    def run(self, make_target: MakeTarget, make_drafter: MakeDrafter | None) -> None:
        """Make this process's workers, warm them up and run them to their end; `make_drafter` may be None where targets only serve."""
        raise NotImplementedError

    @property
    def drafters(self) -> int:
        """Drafters of the whole job."""
        return len(self.layout.drafters)

    def check(self) -> None:
        """Refuse a config that does not fit the layout. Raises: UserError."""
        check_averaging(self.config, self.drafters, "checkpoint.every")


def was_restarted() -> bool:
    """Whether the launcher started this job again after a death or a requeue."""
    return any(int(os.environ.get(name, 0)) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
