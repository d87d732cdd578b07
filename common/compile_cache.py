"""Compiled kernels: one code object per (device, name, signature), compiled before the workers start, called without a lock.

The story, for the next engineer who meets this in a process where several threads drive GPUs:

    RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function.

Symptom. Two drafter threads on cuda:6 and cuda:7 share `torch.compile(flex_attention)`. A few steps in, a call that worked a moment
ago raises. It looks random, and with warm disk caches it is gone on the next run.

Cause. Up to torch 2.13 "an FX trace is running" is one global of the process (`torch.fx._symbolic_trace._is_fx_tracing_flag`), raised
by every trace inside every compile. Every compiled callable checks it on every call, warm or cold, before its body and outside any
lock (`compile_wrapper` in torch/_dynamo/eval_frame.py). While thread A traces anything, thread B's call fails, on any device. (2.13
hides it while Dynamo itself compiles; any other trace still does it.)

On a GPU the same code can also stop for good (both naive guards did, torch 2.11: benchmarks/README.md). Thread A holds Dynamo's compile
lock and, inside its trace of FlexAttention, asks autograd for a gradient. Thread B's first backward call compiles in autograd's one
thread for that GPU and waits there for the lock; A waits for the same autograd thread.

Why the obvious fixes fail. A dict of compiled functions keyed by device and filled under a lock: `torch.compile(...)` compiles
nothing, so the lock protects nothing; the compile comes with the first call, and for the backward possibly in an autograd thread. A
lock round the first call: the check is made by the warm calls, which do not take it. A lock round every call: a caller that holds it
over `backward()` deadlocks with the autograd thread that recomputes a checkpointed layer. `error_on_nested_fx_trace=False`: runs eager
silently and can leave the flag up for good.

What holds, and is done here:
- everything is compiled in warm-up by one thread, forward and backward together; where threads follow, `freeze()` then makes any later
  compile an error;
- a cold call holds one process-wide lock, for the kernel call only, never over autograd; it compiles the backward pass, too, so that
  autograd's threads never compile;
- inductor chooses without timing (`deterministic`): a job computes the same, bit by bit, in whichever process or thread it runs;
- a warm call takes no lock: if the entry check refuses it because of another thread's trace, nothing of it has run, so it waits and
  calls again, which is exact. `stats()["retries"]` counts these; after `freeze()` it stays 0 unless something else compiles;
- every key has its own code object, since Dynamo's cache and its recompile limit (8, then silently eager) hang on the code object.

Fixed upstream in torch 2.14, where the flag is one per thread (pytorch issue 126024, pull request 168999). The compile state per key
and the freeze are worth keeping there. Proof: tests/test_kernels.py; on a GPU: benchmarks/kernel_race.py.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Hashable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

PATIENCE_S = 300.0
"""Longest wait for another thread's trace or compile before it is said to hang."""

PAUSE_S = 0.001
REFUSAL = "Detected that you are using FX to symbolically trace"
RECOMPUTE = {"ban_recompute_materialized_backward": False, "ban_recompute_used_far_apart": False}
"""Lifts the bans on recomputing what a product of the backward pass reads, and what the forward pass reads again later: under the second,
convolutions around the sublayers keep seven tensors of a layer's rows where one or two do, in float32 some of them. The list of what may be
recomputed at all stays in force: under `aggressive_recomputation` it would not, and attention, a custom operator, would run twice."""


class KernelError(RuntimeError):
    """A kernel was asked to compile when it must not, or another thread's trace does not end."""


@dataclass
class Stats:
    compiles: int = 0
    """Kernels compiled, each with its backward."""
    retries: int = 0
    """Calls refused because another thread was tracing, and made again."""
    parked: int = 0
    """Threads that wait for another thread's trace or compile right now."""
    compile_s: float = 0.0
    """Seconds spent in cold calls."""


_stats = Stats()

_stats_lock = threading.Lock()

_cold_lock = threading.RLock()

_handles: dict[Hashable, Callable[..., Any]] = {}

_frozen = False


def handle(
    name: str,
    function: Callable[..., Any],
    device: torch.device | str,
    signature: Hashable = (),
    backend: str | Callable[..., Any] | None = None,
    recompute: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """The compiled form of `function` for one device and one static signature, to be resolved once and kept.

    function: a part of the key by identity, so not a lambda made anew for every call.
    signature: hashable, all that decides how the function compiles: shapes, dtypes, mask constants, which inputs require gradients.
        The grad mode is told apart by the call itself. A call that does not fit what its key was compiled for raises.
    backend: name or callable as in `torch.compile`, default inductor; on CPU the default is no compile, `function` itself is returned.
    recompute: the backward pass recomputes all pointwise work, and nothing else, instead of keeping its results: memory for a little time.
    options: keyword arguments of the backend, e.g. `config_patches={"max_autotune": True}` of inductor.

    Raises (when called): KernelError for a cold key after `freeze()`, for a second compile of a key, for a trace that hangs.
    """
    device = torch.device(device)
    if device.type == "cpu" and backend is None:
        return function
    key = (device, name, signature, function)  # two models on one device bring two bound methods
    return _handles.get(key) or _handles.setdefault(key, _make_handle(key, function, backend or "inductor", recompute, options))


def freeze() -> None:
    """End the warm-up: from here on a kernel that would have to compile raises instead."""
    global _frozen
    _frozen = True


def stats() -> dict[str, Any]:
    """The counters of Stats, as a dict."""
    return asdict(_stats)


def reset() -> None:
    """Forget every kernel and counter; kernels may be compiled again, by the next job of this process."""
    global _frozen, _stats
    _frozen, _stats = False, Stats()
    _handles.clear()


def _make_handle(
    key: tuple[Any, ...], function: Callable[..., Any], backend: str | Callable[..., Any], recompute: bool, options: dict[str, Any]
) -> Callable[..., Any]:
    with_grad, without_grad = (_Kernel((*key, mode), function, backend, recompute, options) for mode in ("grad", "no_grad"))

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        kernel = with_grad if torch.is_grad_enabled() else without_grad
        try:
            return kernel.run(*args, **kwargs)
        except RuntimeError as error:
            kernel.raise_unless_refused(error)
        return kernel.wait_and_run(args, kwargs)

    return call


class _Kernel:
    """One code object, compiled by its first call and never again. `run` is that cold call, then the compiled function itself."""

    def __init__(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        backend: str | Callable[..., Any],
        recompute: bool,
        options: dict[str, Any],
    ):
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        kernel.__code__ = kernel.__code__.replace(co_name=key[1])
        self.title = "kernel {1} on {0}, signature {2}, {4}".format(*key)
        self.backend, self.recompute, self.options = backend, recompute, options
        self.compiled_for: Any = None
        self.compiled = torch.compile(kernel, backend=self._compile, fullgraph=True, dynamic=False)
        self.run: Callable[..., Any] = self._run_cold

    def _run_cold(self, *args: Any, **kwargs: Any) -> Any:
        if _frozen:
            raise KernelError(
                f"{self.title}: first call after the warm-up, with {_shapes((args, kwargs))}; "
                "call it once, forward and backward, before compile_cache.freeze()"
            )
        with _compiling(self.title):
            try:
                return self.compiled(*args, **kwargs)
            finally:  # a checkpoint's recomputation leaves by an exception once it has what it needs
                if self.compiled_for is not None:
                    self.run = self.compiled

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.run is self.compiled:
            raise KernelError(
                f"{self.title}: compiled for {self.compiled_for}, called with {_shapes(inputs)}; "
                "put what differs into the signature (TORCH_LOGS=recompiles names it)"
            )
        backend = torch._dynamo.lookup_backend(self.backend) if isinstance(self.backend, str) else self.backend
        choices = {"force_non_lazy_backward_lowering": True} | (RECOMPUTE if self.recompute else {})
        with torch._functorch.config.patch(choices), torch._inductor.config.patch(deterministic=True):
            compiled = backend(graph, inputs, **self.options)
        self.compiled_for = _shapes(inputs)
        _count("compiles", 1)
        return compiled

    def raise_unless_refused(self, error: RuntimeError) -> None:
        """Return only if the entry check of `compiled` refused this call because of another thread's trace: nothing of it has run."""
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, KernelError):
            raise inner from None
        if REFUSAL not in str(error) or not self._raised_at_entry(error) or _tracing_here():
            raise error

    def _raised_at_entry(self, error: RuntimeError) -> bool:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return len(frames) > 1 and frames[-1].f_code is self.compiled.__code__ and frames[-2].f_globals is globals()

    def wait_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call again until no other thread traces. Raises: KernelError if that takes longer than PATIENCE_S."""
        _count("retries", 1)
        deadline_s = time.monotonic() + PATIENCE_S
        with _parked():
            while time.monotonic() < deadline_s:
                time.sleep(PAUSE_S)
                try:
                    return self.run(*args, **kwargs)
                except RuntimeError as error:
                    self.raise_unless_refused(error)
        raise KernelError(
            f"{self.title}: refused for {PATIENCE_S:g} s because another thread is inside an FX trace; "
            "that trace hangs, or two traces overlapped and left torch's flag up for good: find what compiles after the warm-up"
        )


def _tracing_here() -> bool:
    """Whether this thread's own stack is inside an FX trace, where a compiled call is refused for good reason."""
    frame = sys._getframe()
    while frame and not (frame.f_code.co_name == "trace" and frame.f_globals is vars(torch.fx._symbolic_trace)):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _compiling(title: str) -> Generator[None, None, None]:
    if not _cold_lock.acquire(blocking=False):
        with _parked():
            if not _cold_lock.acquire(timeout=PATIENCE_S):
                raise KernelError(f"{title}: waited {PATIENCE_S:g} s for another thread's compile, which hangs")
    begin_s = time.monotonic()
    try:
        yield
    finally:
        _count("compile_s", time.monotonic() - begin_s)
        _cold_lock.release()


@contextlib.contextmanager
def _parked() -> Generator[None, None, None]:
    _count("parked", 1)
    try:
        yield
    finally:
        _count("parked", -1)


def _count(name: str, amount: float) -> None:
    with _stats_lock:
        setattr(_stats, name, getattr(_stats, name) + amount)


def _shapes(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}", tree)
