"""What drafters exchange to stay one drafter: their weights every K steps (`average`), or their gradients at every step (`ddp`).

Source: local SGD with plain averaging, or with DiLoCo's outer step (arXiv 2311.08105); the optimiser's moments stay local.
"""

import torch
from torch import Tensor

from common.config import SyncConfig
from common.distributed.comms import Comm
from common.metrics import Metrics
from common.training.optim import Optimizer

CHUNK = 1 << 26  # elements averaged at a time: full link bandwidth, and no second copy of all weights


class Averaging:
    """Called once before every optimiser step with the gradients, once after it with the weights."""

    def __init__(self, config: SyncConfig, comm: Comm, optimizer: Optimizer, last_step: int):
        self._ddp = config.mode == "ddp" and comm.size > 1
        self._every = config.every if config.mode == "average" and comm.size > 1 else None
        self._comm, self._optimizer, self._last_step = comm, optimizer, last_step
        self._outer = config if self._every and config.outer == "nesterov" else None
        self._common: Tensor | None = None  # the masters after the last averaging
        if self._outer:
            self._velocity = optimizer.keep("outer_velocity", torch.zeros_like(optimizer.masters))

    @property
    def interval(self) -> int:
        """Steps between two meetings of the drafters."""
        return self._every or 1

    def gradients(self, weight_sum: Tensor) -> Tensor:
        """Sum gradients and loss weights over the drafters where they are exchanged; returns the weight sum to divide by."""
        if self._outer and self._common is None:  # the first step of this run: a resume is loaded by now, and was averaged
            self._common = self._optimizer.masters.clone()
        if self._ddp:
            self._comm.sum_(self._optimizer.gradients)
            self._comm.sum_(weight_sum)
        return weight_sum

    def due(self, step: int) -> bool:
        """Whether drafters meet after this step: then, and only then, may they agree on anything else, such as a stop."""
        return self._every is None or step % self._every == 0 or step == self._last_step

    def weights(self, step: int) -> Metrics:
        """Average the fp32 masters if it is time; returns metrics.

        `replica_distance` is the norm of this replica's difference from the mean just before, relative to the mean's norm.
        """
        if self._every is None or not self.due(step):
            return {}
        squares = torch.zeros(2, dtype=torch.float32, device=self._optimizer.masters.device)
        for part in self._optimizer.masters.split(CHUNK):
            mean = self._comm.mean_(part.clone())
            squares += torch.stack([torch.dist(part, mean).square(), mean.norm().square()])
            part.copy_(mean)
        if self._outer and self._common is not None:
            self._outer_step(self._outer, self._common)
        self._optimizer.copy_masters_to_weights()
        distance = (squares[0] / squares[1].clamp(min=1e-30)).sqrt()
        return {"replica_distance": (distance, torch.ones_like(distance))}

    def _outer_step(self, config: SyncConfig, common: Tensor) -> None:
        """Go from the last common weights along the way to the mean, with Nesterov's momentum: every replica does the same."""
        way = self._optimizer.masters.sub_(common)
        self._velocity.mul_(config.outer_momentum).add_(way)
        common.add_(way.add_(self._velocity, alpha=config.outer_momentum), alpha=config.outer_lr)
        self._optimizer.masters.copy_(common)
