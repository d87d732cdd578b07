"""How processes find each other: the store of the launcher's rendezvous, and the number of this attempt at the job."""

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common.errors import UserError


class NotMet(UserError):
    """The ranks did not come together, which the next attempt may do."""


def open_store(timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. Raises: NotMet if there is none."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotMet(
            f"no rendezvous at MASTER_ADDR:MASTER_PORT ({reason}): start with torchrun; is the port taken or unreachable?"
        ) from None
    return store


def agree_on_attempt(store: dist.Store, rank: int, world: int, timeout_s: float) -> int:
    """The number of this attempt at the job, 1 for the first: a name for the part of the store that no earlier attempt wrote to.

    torchrun's store outlives its restarts, and its agents count them differently (https://github.com/pytorch/pytorch/issues/135712).
    So every rank leaves a fresh word, the first rank answers with a number and the words it read, and whoever finds its own word there
    joins. A word of an earlier attempt is answered too, and the answer is given anew when it is replaced.

    Raises: NotMet naming the ranks that did not come.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key):
        return json.loads(store.get(key)) if store.check([key]) else None

    store.set(f"word/{rank}", json.dumps(word))
    number, answered, missing = store.add("attempts", 1) if rank == 0 else 0, None, [0]
    while time.monotonic() < deadline:
        if rank == 0:
            words = [read(f"word/{other}") for other in range(world)]
            if words != answered:
                store.set("answer", json.dumps([number, words]))
                answered = words
            missing = [other for other in range(1, world) if read(f"joined/{other}") != number]
            if not missing:
                return number
        elif (answer := read("answer")) is not None and word in answer[1]:
            store.set(f"joined/{rank}", json.dumps(answer[0]))
            return answer[0]
        time.sleep(0.02)
    raise NotMet(
        f"rank {rank} waited topology.timeout_s={timeout_s:.0f} for {f'ranks {missing}' if rank == 0 else 'rank 0'} to start: "
        "see their logs, or raise topology.timeout_s"
    )
