"""The race that this project was born from, made deterministic, and what the kernel cache promises about it.

Thread A sits inside an FX trace, held by an event. Thread B calls a compiled kernel. A is let go once B has finished or is parked in
the cache: no sleep decides anything.
"""

import contextlib
import threading
import types

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from common import compile_cache

BACKEND = "aot_eager"
RACES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
needs_race = pytest.mark.skipif(not RACES, reason="since torch 2.14 the trace flag is one per thread: this race is gone")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    compile_cache.reset()
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 60.0)
    yield
    compile_cache.reset()


def compute(x, y):
    return torch.sin(x) * y + x


def inputs(size=4):
    generator = torch.Generator().manual_seed(size)
    x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y


def cached(function=compute, name="compute", backend=BACKEND):
    return compile_cache.handle(name, function, "cpu", (4,), backend=backend)


# The race.


def outcome_of(call):
    """Run `call` in a thread; the returned dict gets its `value` or `error`."""
    outcome = {}

    def run():
        try:
            outcome["value"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def race(call, trace):
    """What `call` does in thread B while thread A is inside `trace(hold)`, which calls `hold` from within an FX trace."""
    inside, release = threading.Event(), threading.Event()

    def hold():
        inside.set()
        assert release.wait(60)

    tracer, traced = outcome_of(lambda: trace(hold))
    assert inside.wait(60)
    caller, outcome = outcome_of(call)
    while caller.is_alive() and not compile_cache.stats()["parked"]:
        caller.join(0.001)
    release.set()
    tracer.join()
    caller.join()
    assert "error" not in traced, traced
    return outcome


def foreign_trace(hold):
    """Something outside the cache traces: torch.export, quantisation, another library."""

    def body(x):
        hold()
        return x + 1

    make_fx(body)(torch.ones(2))


def own_compile(hold):
    """The cache compiles another kernel: its backend traces, as inductor's does for every fused pattern and FlexAttention subgraph."""

    def backend(graph, example_inputs):
        foreign_trace(hold)
        return graph

    compile_cache.handle("slow_to_compile", lambda x: x * 2, "cpu", backend=backend)(torch.ones(2))


@pytest.fixture
def as_torch_2_11(monkeypatch):
    """torch 2.13 hides the flag during Dynamo's own compiles behind a second global; take that away."""
    monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext, raising=False)


# The guards that do not hold: shared singleton, the historical fix, and the next idea.


def singleton():
    return torch.compile(compute, backend=BACKEND)


def dict_per_device():
    compiled, lock = {}, threading.Lock()

    def call(x, y):
        with lock:
            if x.device not in compiled:
                compiled[x.device] = torch.compile(compute, backend=BACKEND)
        return compiled[x.device](x, y)

    return call


def lock_on_first_call():
    compiled, lock, warm = torch.compile(compute, backend=BACKEND), threading.Lock(), set()

    def call(x, y):
        key = x.device, x.shape, x.requires_grad
        if key in warm:
            return compiled(x, y)
        with lock:
            result = compiled(x, y)
        warm.add(key)
        return result

    return call


def warm(kernel):
    x, y = inputs()
    kernel(x, y).sum().backward()
    return lambda: kernel(x, y)


def cold(kernel):
    x, y = inputs()
    return lambda: kernel(x, y)


def checkpointed_backward(kernel):
    x, y = inputs()
    loss = checkpoint(kernel, x, y, use_reentrant=False).sum()

    def call():
        loss.backward()
        return x.grad

    return call


def expected(situation):
    x, y = inputs()
    compute(x, y).sum().backward()
    return x.grad if situation is checkpointed_backward else compute(x, y)


@needs_race
@pytest.mark.parametrize("situation", [warm, cold, checkpointed_backward])
@pytest.mark.parametrize("guard", [singleton, dict_per_device, lock_on_first_call])
def test_naive_guards_raise_every_time(guard, situation):
    """If one passes, this file no longer shows the race, and the cache's tests below prove nothing."""
    call = situation(guard())
    for _ in range(3):
        assert compile_cache.REFUSAL in str(race(call, foreign_trace)["error"])


@pytest.mark.parametrize("trace", [foreign_trace, own_compile])
@pytest.mark.parametrize("situation", [warm, cold, checkpointed_backward])
def test_the_cache_passes(situation, trace, as_torch_2_11):
    """Losing this means a training that dies at random whenever anything in the process compiles."""
    outcome = race(situation(cached()), trace)
    assert "error" not in outcome, outcome
    torch.testing.assert_close(outcome["value"], expected(situation), rtol=0, atol=0)
    waits_for_the_lock = situation is cold and trace is own_compile
    assert not RACES or waits_for_the_lock or compile_cache.stats()["retries"] >= 1


def test_flex_attention_passes(monkeypatch, as_torch_2_11):
    """The kernel of the original crash, in the original situation: one thread compiles it for another shape."""
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # it refuses gradients on CPU, where only numerics are missing
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    attend = compile_cache.handle("attend", flex.flex_attention, "cpu", (4, 8), backend=BACKEND)
    before = attend(q, q, q)
    before.sum().backward()

    def backward():
        return torch.autograd.grad(checkpoint(attend, q, q, q, use_reentrant=False).sum(), q)[0]

    outcome = race(backward, own_compile)
    assert "error" not in outcome, outcome
    torch.testing.assert_close(outcome["value"], q.grad, rtol=0, atol=0)
    assert not RACES or compile_cache.stats()["retries"] >= 1


# What else could go wrong.


def test_no_lock_over_autograd():
    """Backward on CUDA runs in a thread of its own; a lock held over it would hang every checkpointed layer."""
    kernel = cached()

    class JoinsWorker(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            worker, outcome = outcome_of(lambda: kernel(*inputs()))  # cold: takes the lock
            worker.join(60)
            assert "value" in outcome, outcome or "the worker hangs"
            return gradient

    other = compile_cache.handle("other", compute, "cpu", backend=BACKEND)
    x, y = inputs()
    JoinsWorker.apply(other(x, y)).sum().backward()
    assert compile_cache.stats()["compiles"] == 2


def test_backward_is_compiled_with_the_forward():
    """A backward compiled later is compiled by autograd's thread, in the middle of the run, under no lock."""
    compiled = []

    def note(what):
        return lambda graph, _: compiled.append(what) or graph

    kernel = cached(backend=aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward")))
    kernel(*inputs())
    assert compiled == ["forward", "backward"]


def test_inductor_decides_without_timing():
    """A choice by timing differs between two processes, and with it the order of sums: equal seeds would not give equal losses."""
    seen = []

    def backend(graph, inputs):
        seen.append(torch._inductor.config.deterministic)
        return graph

    compile_cache.handle("probe", lambda x: x + 1, "cpu", backend=backend)(torch.zeros(2))
    assert seen == [True] and not torch._inductor.config.deterministic


def test_own_trace_is_refused_at_once():
    """Waiting for one's own trace would never end."""
    kernel = cached()
    x, y = inputs()
    kernel(x, y)
    if RACES:
        with pytest.raises(RuntimeError, match=compile_cache.REFUSAL):
            make_fx(kernel)(x, y)
    assert compile_cache.stats()["retries"] == 0


@needs_race
def test_stuck_flag_is_reported(monkeypatch):
    """Two overlapping traces leave torch's flag up for good: the job must say so instead of hanging."""
    kernel = cached()
    kernel(*inputs())
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 0.05)
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    with pytest.raises(compile_cache.KernelError, match=r"kernel compute on cpu.*trace hangs"):
        kernel(*inputs())
    assert compile_cache.stats()["parked"] == 0


def test_hanging_compile_is_reported(monkeypatch):
    """A thread that waits for the lock of a compile that never ends must say which kernel it wanted."""
    monkeypatch.setattr(compile_cache, "PATIENCE_S", 0.05)
    inside, release = threading.Event(), threading.Event()

    def backend(graph, _):
        inside.set()
        release.wait(60)
        return graph

    slow, _ = outcome_of(lambda: cached(backend=backend)(*inputs()))
    inside.wait(60)
    try:
        with pytest.raises(compile_cache.KernelError, match=r"kernel other .*another thread's compile"):
            compile_cache.handle("other", compute, "cpu", backend=BACKEND)(*inputs())
    finally:
        release.set()
        slow.join()


def test_only_a_refusal_at_the_entry_is_repeated():
    """Work that has begun must not be done twice, whatever its error says."""
    calls = []

    def backend(graph, _):
        def run(*_):
            calls.append(1)
            raise RuntimeError(compile_cache.REFUSAL)

        return run

    with pytest.raises(RuntimeError, match=compile_cache.REFUSAL):
        cached(backend=backend)(*inputs())
    assert calls == [1] and compile_cache.stats()["retries"] == 0


def test_second_compile_of_a_key_is_an_error():
    """A signature that leaves something out would recompile in the middle of the run, and run eager after eight of them."""
    kernel = cached()
    kernel(*inputs(4))
    with pytest.raises(compile_cache.KernelError, match=r"kernel compute on cpu, signature \(4,\).*float64\[4\].*float64\[5\]"):
        kernel(*inputs(5))
    kernel(*inputs(4))
    assert compile_cache.stats()["compiles"] == 1


def test_frozen_cold_key_is_an_error():
    """A kernel that the warm-up forgot must name itself, not compile while other threads run."""
    kernel, forgotten = cached(), compile_cache.handle("forgotten", compute, "cpu", (5,), backend=BACKEND)
    kernel(*inputs())
    compile_cache.freeze()
    with pytest.raises(compile_cache.KernelError, match=r"kernel forgotten on cpu, signature \(5,\).*float64\[5\]"):
        forgotten(*inputs(5))
    with torch.no_grad(), pytest.raises(compile_cache.KernelError, match="no_grad"):
        kernel(*inputs())
    worker, outcome = outcome_of(lambda: kernel(*inputs()))
    worker.join()
    assert "value" in outcome, outcome
    compile_cache.reset()
    cached()(*inputs(5))  # the next job of the process, a notebook's second group, warms up anew


def test_more_signatures_than_dynamo_keeps():
    """With one shared code object the ninth signature runs eager and unfused, silently."""
    signatures = range(2, 2 + torch._dynamo.config.recompile_limit + 2)
    for size in signatures:
        compile_cache.handle("compute", compute, "cpu", (size,), backend="eager")(*inputs(size))
    assert compile_cache.stats()["compiles"] == len(signatures)


def test_two_models_on_one_device_keep_apart():
    """Two drafters in one process hand in bound methods under one name; the second must not train the first one's weights."""
    models = [types.SimpleNamespace(weight=torch.tensor(w)) for w in (1.0, 2.0)]
    for model in models:
        model.forward = types.MethodType(lambda self, x: self.weight * x, model)
    results = [compile_cache.handle("model", model.forward, "cpu", backend="eager")(torch.ones(())) for model in models]
    assert [r.item() for r in results] == [1.0, 2.0]


def test_threads_compile_a_key_once():
    """The second thread waits for the first one's compile instead of compiling beside it."""
    kernel = cached()
    for thread, outcome in [outcome_of(lambda: kernel(*inputs())) for _ in range(3)]:
        thread.join()
        assert "value" in outcome, outcome
    assert compile_cache.stats()["compiles"] == 1


def test_gradients_equal_the_plain_ones_under_checkpointing():
    """Otherwise activation checkpointing would change what is learnt."""
    kernel = cached()
    gradients = []
    for function in (compute, kernel, lambda x, y: checkpoint(kernel, x, y, use_reentrant=False)):
        x, y = inputs()
        function(function(x, y), y).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_inlined_in_an_outer_compile():
    """A kernel inside a compiled model must become part of that model's graph, not a graph break."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    kernel = cached()
    outer = torch.compile(lambda x, y: kernel(x, y) * 2, backend=backend, fullgraph=True)
    x, y = inputs()
    torch.testing.assert_close(outer(x, y), compute(x, y) * 2)
    assert len(graphs) == 1 and compile_cache.stats()["compiles"] == 0


@torch.library.custom_op("drafter_tests::costly", mutates_args=())
def costly(x: torch.Tensor) -> torch.Tensor:
    costly.calls += 1
    return x * x


costly.calls = 0
costly.register_fake(torch.empty_like)
costly.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def test_recomputation_stops_at_pointwise_work():
    """Attention run a second time in the backward pass cost 3% of a step; pointwise results kept in float32 cost gigabytes."""
    saved = {}

    def partition(graph, inputs, **keywords):
        from functorch.compile import min_cut_rematerialization_partition

        forward, backward = min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **keywords)
        kept = next(iter(forward.graph.find_nodes(op="output"))).args[0][keywords["num_fwd_outputs"] :]
        saved["products"] = sum(node.target is torch.ops.aten.mm.default for node in backward.graph.nodes)
        made = [node for node in kept if node.op != "placeholder" and node.target is not torch.ops.aten.t.default]
        saved["elements"] = sum(node.meta["val"].numel() for node in made)
        return forward, backward

    def block(x, weight):
        wide = torch.nn.functional.silu(costly(x @ weight).float())
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1)).to(x.dtype) @ weight

    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graph, partition_fn=partition)
    compile_cache.handle("block", block, "cpu", backend=backend, recompute=True)(x, weight).sum().backward()
    assert costly.calls == 1 and saved["products"] == 4  # two gradients for each of the two products
    assert saved["elements"] == 2 * 64 + 8  # a product's result, the costly one's, the rows' norms


def test_cpu_without_a_backend_is_the_function_itself():
    """CPU runs compare bitwise with each other; a compiled kernel would round differently."""
    assert compile_cache.handle("compute", compute, "cpu") is compute
