"""The optimiser: AdamW as torch defines it, on flat buffers, with steps that skip themselves."""

import math

import pytest
import torch

from common.config import OptimConfig
from common.training.muon import orthogonal
from common.training.optim import Optimizer, schedule


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)).to(dtype)


def config(**changes):
    return OptimConfig(**dict(lr=1e-2, weight_decay=0.1, schedule="constant", warmup=0, clip=0.5) | changes)


def backward(model, seed, weight=1.0):
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    (model(inputs).square().sum() * weight).backward()


def run(optimizer, model, seeds, weight_sum=4.0):
    for seed in seeds:
        backward(model, seed)
        optimizer.accumulate()
        optimizer.step(torch.tensor(weight_sum))


def everything(optimizer):
    return [optimizer.masters, optimizer.compute, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.updates]


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_steps_equal_torch_adamw_in_float64(clip):
    """Sum over two packets, division by the weights, clipping, decay of matrices only: the recipe's numbers mean what they say."""
    model, twin = network(), network(torch.float64)
    optimizer = Optimizer(model.named_parameters(), config(clip=clip), steps=20)
    groups = [{"params": [p for p in twin.parameters() if p.ndim >= 2]}]
    groups.append({"params": [p for p in twin.parameters() if p.ndim < 2], "weight_decay": 0.0})
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(10):
        for packet in (seed, seed + 100):
            backward(model, packet)
            optimizer.accumulate()
            assert all(p.grad is None for p in model.parameters())
            backward(twin, packet, weight=1 / 8)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip or math.inf)
        reference.step()
        reference.zero_grad()
        result = optimizer.step(torch.tensor(8.0))
        assert result["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5) and not result["skipped"]
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(optimizer.master_tensors()[name], parameter)


def test_bfloat16_weights_follow_float32_masters():
    """Updates smaller than bfloat16 can hold must add up in the masters and not be lost."""
    model = network(torch.bfloat16)
    optimizer = Optimizer(model.named_parameters(), config(lr=1e-5, clip=0), steps=100)
    before = optimizer.masters.clone()
    run(optimizer, model, range(50))
    moved = (optimizer.masters - before).abs()
    assert 1e-4 < moved.median() < 1e-3
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, optimizer.master_tensors()[name].bfloat16())


@pytest.mark.parametrize("fault", ["gradient", "weight_sum", "empty"])
def test_a_bad_step_changes_nothing(fault):
    """One bad packet must leave no trace: neither weights nor moments nor the count behind the bias correction."""
    model, undisturbed = network(), network()
    optimizer, twin = (Optimizer(m.named_parameters(), config(), steps=20) for m in (model, undisturbed))
    run(optimizer, model, range(3))
    run(twin, undisturbed, range(3))
    backward(model, 50)
    if fault == "gradient":
        model[0].weight.grad[0, 0] = math.inf
    optimizer.accumulate()
    result = optimizer.step(torch.tensor({"gradient": 4.0, "weight_sum": math.nan, "empty": 0.0}[fault]))
    assert result["skipped"].item() == (fault != "empty") == optimizer.skipped_in_a_row.item()
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizer), everything(twin), strict=True))
    run(optimizer, model, range(3, 6))
    run(twin, undisturbed, range(3, 6))
    assert optimizer.skipped_in_a_row == 0 and torch.equal(optimizer.masters, twin.masters)


def test_a_step_without_gradients_is_no_repetition_of_the_last():
    """A packet of weight 0 leaves no gradients behind; the buffer's old content must not be applied again."""
    model = network()
    optimizer = Optimizer(model.named_parameters(), config(weight_decay=0), steps=20)
    run(optimizer, model, range(2))
    optimizer.accumulate()
    assert not optimizer.gradients.any()
    assert optimizer.step(torch.tensor(4.0))["grad_norm"] == 0


def test_resume_is_exact():
    """Five steps, stop, five steps give bitwise what ten steps give."""
    whole = network(torch.bfloat16)
    uninterrupted = Optimizer(whole.named_parameters(), config(schedule="cosine", warmup=0.2), steps=10)
    run(uninterrupted, whole, range(10))
    first = network(torch.bfloat16)
    stopped = Optimizer(first.named_parameters(), config(schedule="cosine", warmup=0.2), steps=10)
    run(stopped, first, range(5))
    saved = {k: v.clone() for k, v in stopped.state_tensors().items()}
    masters = {k: v.clone() for k, v in stopped.master_tensors().items()}
    second = network(torch.bfloat16)
    resumed = Optimizer(second.named_parameters(), config(schedule="cosine", warmup=0.2), steps=10)
    for name, view in resumed.master_tensors().items():
        view.copy_(masters[name])
    resumed.load_state_tensors(saved)
    resumed.copy_masters_to_weights()
    run(resumed, second, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(everything(resumed), everything(uninterrupted), strict=True))


def test_the_form_in_which_moments_are_saved():
    """Else the checkpoints of earlier releases cannot be resumed. They hold matrices before vectors, and no count per group."""
    model = network()
    optimizer = Optimizer(model.named_parameters(), config(), steps=20)
    run(optimizer, model, range(3))
    optimizer.step(torch.tensor(math.nan))
    state, size = optimizer.state_tensors(), sum(p.numel() for p in model.parameters())
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"exp_avg": (size,), "exp_avg_sq": (size,), "counts": (3,)}
    assert state["counts"].tolist() == [4, 3, 1] and state["counts"].dtype == torch.int64
    assert list(optimizer.master_tensors()) == ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]


def test_a_resume_goes_on_counting_skipped_steps():
    """Else a diverged run that its launcher restarts again and again never reaches optim.max_skipped."""
    model, fresh = network(), network()
    optimizer, resumed = (Optimizer(m.named_parameters(), config(), steps=20) for m in (model, fresh))
    run(optimizer, model, range(2), weight_sum=math.inf)
    resumed.load_state_tensors(optimizer.state_tensors())
    assert resumed.skipped_in_a_row == optimizer.skipped_in_a_row == 2


def test_a_step_takes_its_own_steps_rate():
    """Adam's first step moves every weight by the learning rate: here the first of four of the warm-up."""
    model = network()
    optimizer = Optimizer(model.named_parameters(), config(schedule="cosine", warmup=4, weight_decay=0), steps=20)
    before = optimizer.masters.clone()
    run(optimizer, model, [0])
    assert (optimizer.masters - before).abs().max().item() == pytest.approx(1e-2 / 4, rel=1e-3)


def test_schedules_on_paper():
    """Warm-up, peak and end of each schedule, by hand, for 100 steps."""
    cosine = [schedule(config(schedule="cosine", warmup=0.04), 100, s) for s in (1, 4, 5, 52, 53, 100, 101)]
    middle = [(1 + math.cos(math.pi * done / 97)) / 2 for done in (1, 48, 49, 96, 97)]
    assert cosine == pytest.approx([0.25, 1, *middle]) and cosine[-1] == pytest.approx(0)
    wsd = [schedule(config(schedule="wsd", warmup=10), 100, s) for s in (5, 10, 81, 82, 91, 100)]
    assert wsd == pytest.approx([0.5, 1, 1, 19 / 20, 10 / 20, 1 / 20])
    assert [schedule(config(warmup=0), 100, s) for s in (1, 50, 100)] == [1, 1, 1]


def halves(name, tensor):
    """The parts of a fused parameter: here every matrix of an even number of rows is two."""
    return tensor.chunk(2) if len(tensor) % 2 == 0 else (tensor,)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_muon_updates_each_part_of_a_matrix_as_torch_does(clip):
    """A fused q/k/v updated as one matrix would share one scale; what is called Muon must be what papers measured. Vectors get AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 15))
    optimizer = Optimizer(model.named_parameters(), config(name="muon", clip=clip), steps=20, parts=halves)
    matrices = {n: [part.detach().clone() for part in halves(n, p)] for n, p in model.named_parameters() if p.ndim == 2}
    vectors = [p.detach().clone() for p in model.parameters() if p.ndim < 2]
    muon = torch.optim.Muon([p for ps in matrices.values() for p in ps], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(6):
        inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        gradients = {n: p.grad / 4 for n, p in model.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        scale = min(1.0, clip / norm.item()) if clip else 1.0
        for name, parts in matrices.items():
            for part, gradient in zip(parts, halves(name, gradients[name]), strict=True):
                part.grad = gradient * scale
        for vector, gradient in zip(vectors, [g for g in gradients.values() if g.ndim < 2], strict=True):
            vector.grad = gradient * scale
        before = {name: torch.cat([part.detach() for part in parts]) for name, parts in matrices.items()}
        muon.step(), adamw.step()
        optimizer.accumulate()
        optimizer.step(torch.tensor(4.0))
        with torch.no_grad():  # both go on from the same weights: torch's iterations are in bfloat16
            for parameter, vector in zip([p for p in model.parameters() if p.ndim < 2], vectors, strict=True):
                torch.testing.assert_close(parameter, vector, rtol=1e-5, atol=1e-6)
            for name, parts in matrices.items():
                mine = dict(model.named_parameters())[name]
                moved = (torch.cat(parts) - before[name]).norm()
                assert (mine - torch.cat(parts)).norm() < 0.05 * moved
                for part, own in zip(parts, halves(name, mine), strict=True):
                    part.copy_(own)


def test_orthogonal_matrices_move_every_direction_alike():
    """Singular values near one are what Muon is; a transposed or unscaled product would still train, only worse."""
    for shape in ((40, 24), (24, 40), (32, 32)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonal(matrix))
        assert values.min() > 0.3 and values.max() < 1.3
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        alignment = (orthogonal(matrix) * (left @ right)).sum() / orthogonal(matrix).norm() / min(shape) ** 0.5
        assert alignment > 0.95


def test_muon_skips_what_is_not_finite_and_resumes_exactly():
    """One bad packet must not poison the momentum, and a resumed run must go on as the undisturbed one."""
    model, twin = network(), network()
    optimizers = [Optimizer(m.named_parameters(), config(name="muon"), steps=20) for m in (model, twin)]
    run(optimizers[0], model, range(3))
    before = [tensor.clone() for tensor in everything(optimizers[0])]
    model(torch.full((1, 5), torch.inf)).sum().backward()
    optimizers[0].accumulate()
    assert optimizers[0].step(torch.tensor(1.0))["skipped"]
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizers[0]), strict=True))
    optimizers[1].masters.copy_(optimizers[0].masters)
    optimizers[1].copy_masters_to_weights()
    optimizers[1].load_state_tensors({k: v.clone() for k, v in optimizers[0].state_tensors().items()})
    for optimizer, net in zip(optimizers, (model, twin), strict=True):
        run(optimizer, net, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizers[0]), everything(optimizers[1]), strict=True))
