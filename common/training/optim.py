"""AdamW on flat float32 buffers: masters, gradients and moments, with compute weights that follow the masters.

Everything is decided on the device (division, clipping, skipping), so a step never waits for the GPU.

Legend: P all parameters' elements; matrices come first in the flat buffers, then vectors (norms, biases), which do not decay.
"""

import math

import torch

EPSILON = 1e-8
WSD_SHARE = 0.2
"""Share of all steps in which `wsd` falls to zero; arXiv 2405.18392 finds 10-20% enough."""


class Optimizer:
    """One drafter's optimiser.

    Shapes: masters, gradients, exp_avg, exp_avg_sq float32 [P]. The parameters' storage is replaced: in float32 they are views of the
    masters, else views of one flat buffer in their own type. Build it before anything holds on to their old storage.
    """

    def __init__(self, named_parameters, config, steps):
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        named.sort(key=lambda pair: pair[1].ndim < 2)
        self.config, self.steps, self.steps_done = config, steps, 0
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.decaying = sum(p.numel() for p in self.parameters if p.ndim >= 2)
        (dtype,) = {p.dtype for p in self.parameters}
        device = self.parameters[0].device
        self.compute = torch.cat([p.detach().flatten() for p in self.parameters])
        self.masters = self.compute if dtype == torch.float32 else self.compute.float()
        for parameter, view in zip(self.parameters, self._views(self.compute), strict=True):
            parameter.data = view
        self.gradients, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.masters) for _ in range(3))
        self.updates = torch.zeros((), device=device)  # steps not skipped: Adam's bias correction
        self.skipped_in_a_row = torch.zeros((), device=device)
        self._empty = True

    def _views(self, flat):
        sizes = [p.numel() for p in self.parameters]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self.parameters, strict=True)]

    def accumulate(self):
        """Move every parameter's gradient into the float32 buffer."""
        for parameter, sum_so_far in zip(self.parameters, self._views(self.gradients), strict=True):
            if parameter.grad is not None:
                (sum_so_far.copy_ if self._empty else sum_so_far.add_)(parameter.grad)
                parameter.grad = None
            elif self._empty:
                sum_so_far.zero_()
        self._empty = False

    @torch.no_grad()
    def step(self, weight_sum):
        """Divide the gradients' sum by weight_sum, clip, update, update_weights.

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
        self.updates += 1 - unchanged
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skipped
        if self.config.clip:
            divisor = divisor * (grad_norm / self.config.clip).clamp(min=1)
        self._adamw(divisor, unchanged)
        self.update_weights()
        return {"grad_norm": grad_norm, "skipped": skipped}

    def _adamw(self, divisor, unchanged):
        cut, total = self.decaying, len(self.masters)
        decay = self.config.weight_decay
        for span, weight_decay in [(slice(cut), decay), (slice(cut, total), 0.0)] if decay else [(slice(total), 0.0)]:
            torch._fused_adamw_(
                *([flat[span]] for flat in (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq)),
                [],
                [self.updates],
                lr=self.lr(self.steps_done),
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                weight_decay=weight_decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=unchanged,
            )

    def update_weights(self):
        """Copy the masters to the compute weights."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)

    def lr(self, step):
        """Learning rate of a step, counted from 1."""
        return self.config.lr * schedule(self.config, self.steps, step)

    def master_tensors(self):
        """{parameter's name: float32 view of its master}."""
        return dict(zip(self.names, self._views(self.masters), strict=True))

    def state_tensors(self):
        """All that a resume needs besides the masters, taken between two steps."""
        counts = torch.tensor([self.steps_done, int(self.updates), int(self.skipped_in_a_row)])
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "counts": counts}

    def load_state_tensors(self, tensors):
        """Take up what state_tensors gave; the masters are loaded through master_tensors and update_weights."""
        self.exp_avg.copy_(tensors["exp_avg"])
        self.exp_avg_sq.copy_(tensors["exp_avg_sq"])
        self.steps_done, updates, skipped = tensors["counts"].tolist()
        self.updates.fill_(updates)
        self.skipped_in_a_row.fill_(skipped)
        self._empty = True


def schedule(config, steps, step):
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
