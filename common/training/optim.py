"""AdamW or Muon on flat float32 buffers: masters, gradients and moments, with compute weights that follow the masters.

Everything is decided on the device (division, clipping, skipping), so a step never waits for the GPU.

Legend: P all parameters' elements; matrices come first in the flat buffers, then vectors (norms, biases, tables), which do not decay.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from common.config import OptimConfig
from common.errors import UserError
from common.training.muon import Matrix, muon_step

EPSILON = 1e-8
WSD_SHARE = 0.2
"""Share of all steps in which `wsd` falls to zero; arXiv 2405.18392 finds 10-20% enough."""


IsMatrix = Callable[[str, tuple[int, ...]], bool]
"""(a parameter's name, its shape) -> whether it is a matrix, which Muon orthogonalises and weight decay shrinks."""


class ScaledAdamW(torch.optim.AdamW):
    """AdamW with the two attributes by which torch.amp.GradScaler drives its fused kernel, on the device and without a wait.

    The kernel divides the gradients by `grad_scale` and leaves everything as it is where `found_inf` is 1.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class Optimizer:
    """One drafter's optimiser.

    Shapes: masters, gradients, exp_avg float32 [P], exp_avg_sq the same or, with Muon, of the vectors alone. The parameters' storage is
    replaced: in float32 they are views of the masters, else views of one flat buffer in their own type. Build it before anything holds
    on to their old storage. `parts` gives the matrices that a fused parameter is made of, as views; Muon updates each by itself.
    `is_matrix` (name, shape) says which parameters are matrices; all others are treated as vectors.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        steps: int,
        parts: Callable[[str, Tensor], Iterable[Tensor]] = lambda name, tensor: (tensor,),
        is_matrix: IsMatrix = lambda name, shape: len(shape) > 1,
    ):
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        named.sort(key=lambda pair: not is_matrix(pair[0], tuple(pair[1].shape)))
        self._matrix_count = sum(is_matrix(name, tuple(p.shape)) for name, p in named)
        self.config, self.steps, self.steps_done = config, steps, 0
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        (dtype,) = {p.dtype for p in self.parameters}
        self.compute = torch.cat([p.detach().flatten() for p in self.parameters])
        self.masters = self.compute if dtype == torch.float32 else self.compute.float()
        for parameter, view in zip(self.parameters, self._views(self.compute), strict=True):
            parameter.data = view
        self.gradients, self.exp_avg = torch.zeros_like(self.masters), torch.zeros_like(self.masters)
        matrices = sum(p.numel() for p in self.parameters[: self._matrix_count])
        self._by_adamw = matrices if config.name == "muon" else 0  # the elements from here on
        self.exp_avg_sq = torch.zeros_like(self.masters[self._by_adamw :])
        self._matrices = self._make_matrices(parts) if config.name == "muon" else []
        self.skipped_in_a_row = torch.zeros((), device=self.masters.device)
        self._empty = True
        self._kept: dict[str, Tensor] = {}
        self._adamw = self._make_adamw(matrices)

    def _make_matrices(self, parts: Callable[[str, Tensor], Iterable[Tensor]]) -> list[Matrix]:
        found, views = [], map(self._views, (self.masters, self.gradients, self.exp_avg))
        for name, *of_name in itertools.islice(zip(self.names, *views, strict=True), self._matrix_count):
            found += [Matrix(*part) for part in zip(*(parts(name, view) for view in of_name), strict=True)]
        return found

    def _make_adamw(self, matrices: int) -> ScaledAdamW:
        """AdamW over the flat buffers: matrices decay, vectors do not. Its state is views of the buffers, its counts are on the device."""
        spans = (slice(self._by_adamw, matrices), self.config.weight_decay), (slice(matrices, len(self.masters)), 0.0)
        groups = [(span, decay) for span, decay in spans if len(self.masters[span])]
        views = [self.masters[span] for span, _ in groups]
        adamw = ScaledAdamW(
            [{"params": [view], "weight_decay": decay} for view, (_, decay) in zip(views, groups, strict=True)],
            betas=(self.config.betas[0], self.config.betas[1]),
            eps=EPSILON,
            fused=True,
        )
        for view, (span, _) in zip(views, groups, strict=True):
            view.grad = self.gradients[span]
            step = torch.zeros((), device=view.device)
            squares = self.exp_avg_sq[span.start - self._by_adamw : span.stop - self._by_adamw]
            adamw.state[view] = {"step": step, "exp_avg": self.exp_avg[span], "exp_avg_sq": squares}
        return adamw

    @property
    def updates(self) -> Tensor:
        """Steps that changed the weights, behind Adam's bias correction: 0-d on the device."""
        return next(iter(self._adamw.state.values()))["step"]

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self.parameters, strict=True)]

    def accumulate(self) -> None:
        """Move every parameter's gradient into the float32 buffer."""
        for parameter, sum_so_far in zip(self.parameters, self._views(self.gradients), strict=True):
            if parameter.grad is not None:
                (sum_so_far.copy_ if self._empty else sum_so_far.add_)(parameter.grad)
                parameter.grad = None
            elif self._empty:
                sum_so_far.zero_()
        self._empty = False

    @torch.no_grad()
    def step(self, weight_sum: Tensor) -> dict[str, Tensor]:
        """Divide the gradients' sum by weight_sum, clip, and update masters and weights.

        A step that is not finite changes nothing and is reported as skipped; a step of weight 0 changes nothing and is no fault.
        Shapes: weight_sum 0-d on the device -> {grad_norm, skipped}, 0-d on the device.
        """
        self.steps_done += 1
        if self._empty:
            self.gradients.zero_()
        self._empty = True
        divisor = torch.where(weight_sum > 0, weight_sum, 1).float()
        grad_norm = torch.linalg.vector_norm(self.gradients) / divisor
        skipped = ~(torch.isfinite(grad_norm) & torch.isfinite(weight_sum))
        unchanged = (skipped | (weight_sum <= 0)).float()
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skipped
        if self.config.clip:
            divisor = divisor * (grad_norm / self.config.clip).clamp(min=1)
        lr = self.lr(self.steps_done)
        muon_step(self._matrices, lr, self.config.weight_decay, divisor, unchanged)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.grad_scale, self._adamw.found_inf = divisor, unchanged
        self._adamw.step()
        self.copy_masters_to_weights()
        return {"grad_norm": grad_norm, "skipped": skipped}

    def copy_masters_to_weights(self) -> None:
        """Round the masters to the weights that the forward pass uses; in float32 they are the same memory."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)

    def lr(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return self.config.lr * schedule(self.config, self.steps, step)

    def master_tensors(self) -> dict[str, Tensor]:
        """{parameter's name: float32 view of its master}."""
        return dict(zip(self.names, self._views(self.masters), strict=True))

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Have another tensor of this replica saved and loaded with the state; returns it."""
        self._kept[name] = tensor
        return tensor

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resume needs besides the masters, taken between two steps."""
        counts = torch.tensor([self.steps_done, int(self.updates), int(self.skipped_in_a_row)])
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "counts": counts} | self._kept

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what state_tensors gave; the masters are loaded through master_tensors and copy_masters_to_weights."""
        self.exp_avg.copy_(tensors["exp_avg"])
        self.exp_avg_sq.copy_(tensors["exp_avg_sq"])
        for name in self._kept.keys() & tensors.keys():
            self._kept[name].copy_(tensors[name])
        self.steps_done, updates, skipped = tensors["counts"].tolist()
        for state in self._adamw.state.values():
            state["step"].fill_(updates)
        self.skipped_in_a_row.fill_(skipped)
        self._empty = True


def moment_elements(shapes: Mapping[str, tuple[int, ...]], config: OptimConfig, is_matrix: IsMatrix) -> tuple[int, int]:
    """Elements of the first and of the second moment of parameters, by name; Muon keeps no second moment of matrices."""
    sizes = [(math.prod(shape), is_matrix(name, shape)) for name, shape in shapes.items()]
    return sum(size for size, _ in sizes), sum(size for size, matrix in sizes if not matrix or config.name != "muon")


def schedule(config: OptimConfig, steps: int, step: int) -> float:
    """Share of the peak learning rate at a step, counted from 1; it would reach zero one step after the last."""
    warmup = config.warmup * steps if config.warmup < 1 else config.warmup
    if step <= warmup:
        return step / warmup
    left = max(0, steps + 1 - step)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        return min(1.0, left / (WSD_SHARE * steps))
    return (1 - math.cos(math.pi * left / (steps + 1 - warmup))) / 2


def check_warmup(config: OptimConfig, steps: int) -> None:
    """Refuse a warm-up that is longer than the run: the learning rate would never reach its peak. Raises: UserError."""
    if config.warmup > max(steps, 1):
        raise UserError(
            f"optim.warmup={config.warmup:g} steps of warm-up are more than the run's {steps}, so optim.lr would never be reached; "
            f"write a share of the steps such as optim.warmup=0.04, or at most {steps} steps"
        )
