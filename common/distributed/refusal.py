"""One voice for what is the user's mistake: of many ranks and many restarts, one rank an attempt says it, and restarts end at once.

torchrun starts a job again whatever its exit code, and every rank finds the same mistake. So whoever finds it leaves the words in the
launcher's store, which outlives restarts.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from common.distributed.job import was_restarted
from common.distributed.rendezvous import NotMet, open_store
from common.errors import UserError

NOTE = "refusal"
STORE_TIMEOUT_S = 30.0
Main = Callable[[Sequence[str]], int]


def leave_refusal(store: dist.Store, words: str) -> None:
    """Leave the words with which this job and its restarts end; the first who does so is right."""
    store.compare_set(NOTE, "", words)


def one_voice(main: Main) -> Main:
    """Wrap a script's `main`: its UserError is said by one rank, every rank returns 2, and a restart does not try again.

    A restarted job may be refused for what passes by itself, such as a lock that the dead job still holds: that ends one attempt alone.
    """

    @functools.wraps(main)
    def speaking_once(argv: Sequence[str]) -> int:
        store = _launchers_store()
        if store is None:
            return main(argv)
        if store.check([NOTE]):
            return _say_once(store, store.get(NOTE).decode())
        try:
            return main(argv)
        except NotMet:
            raise
        except UserError as error:
            if not was_restarted():
                leave_refusal(store, str(error))
            return _say_once(store, str(error))

    return speaking_once


def _launchers_store() -> dist.Store | None:
    """The store of torchrun's agent; None without one, or where it cannot be reached, which `main` will say."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return open_store(STORE_TIMEOUT_S)
    except UserError:
        return None


def _say_once(store, words):
    """Print the words if no rank of this attempt has; returns when they are printed, for torchrun kills all once one rank has ended."""
    said = f"{NOTE}/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if store.add(said, 1) == 1:
        print(f"error: {words}", file=sys.stderr, flush=True)
        store.set(f"{said}/done", "")
    with contextlib.suppress(dist.DistError):
        store.wait([f"{said}/done"], timedelta(seconds=5))
    return 2
