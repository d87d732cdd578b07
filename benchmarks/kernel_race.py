"""Two threads call FlexAttention on one device while new shapes keep compiling: which guard survives?

    python -m benchmarks.kernel_race [--seconds 20] [--tiny]

The undeterministic twin of tests/test_kernels.py; common/compile_cache.py tells the story. Modes, each in a process of its own:
- `singleton`: one `torch.compile(flex_attention)` for all;
- `dict`: one per device and shape, created under a lock (the historical fix);
- `cache`: common/compile_cache.py.
Each thread compiles a shape of its own (a number of heads), then makes calls of shapes that exist, and so on; a call is a forward and a
backward. The naive guards get their recompile limit lifted, so that the race alone is measured. `errors` are refusals, `stuck` says that
torch's flag was still up when all threads had ended: then every call fails for the rest of the process. On CPU (--tiny) the naive guards
fail up to torch 2.12: 2.13 hides the flag during Dynamo's own compiles, and since 2.14 it is one per thread.
"""

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from benchmarks import measure
from common import compile_cache
from common.cli import run_script
from common.errors import UserError

TOKENS, HEAD_DIM, THREADS, WARM_CALLS = 256, 64, 2, 20
Guard = Callable[[torch.device, str], Callable[[int], Callable[..., torch.Tensor]]]
"""For a device and a backend: a function from a number of heads to the attention to call."""
PATIENCE_S = 120.0
"""What a mode gets beyond its seconds, to end its last compiles."""
COLUMNS = ("mode", "calls", "errors", "retries", "shapes", "compiled", "stuck", "hangs")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="per mode")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, without inductor")
    parser.add_argument("--warm-calls", type=int, default=WARM_CALLS, help="of shapes that exist, between two new ones")
    asked = parser.parse_args(argv)
    device, backend = measure.device_of(asked.tiny), "aot_eager" if asked.tiny else "inductor"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a hit in the disk cache traces nothing and hides the race
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    print("|", " | ".join(COLUMNS), "|\n|", " | ".join(["---"] * len(COLUMNS)), "|", flush=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention"])
    for mode in GUARDS:
        results = context.Queue()
        process = context.Process(target=_run, args=(results, mode, device, backend, asked.seconds, asked.warm_calls))
        process.start()
        while results.empty() and process.is_alive():
            time.sleep(0.1)
        if results.empty():
            raise UserError(f"mode {mode} ended with code {process.exitcode}; its reason stands above")
        result = results.get()
        process.kill()  # threads that hang would keep it
        measure.report(device, benchmark="kernel_race", **result)
        print("|", " | ".join(str(result[c]) for c in COLUMNS), "|", flush=True)


def _run(results: Any, *arguments: Any) -> None:
    result = run(*arguments)
    if result["hangs"]:
        faulthandler.dump_traceback()  # where
    results.put(result)


def run(mode: str, device: torch.device, backend: str, seconds: float, warm_calls: int) -> dict[str, Any]:
    """Run one mode; `other` holds a message of each kind of error that is not the refusal."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
    if device.type == "cpu":
        setattr(flex, "_validate_device", lambda *_: None)  # noqa: B010  it refuses gradients there; only the race matters here
    attend, heads, existing = GUARDS[mode](device, backend), itertools.count(1), []
    calls: list[int] = []
    refusals: list[int] = []
    other: dict[str, str] = {}

    def call(H: int) -> bool:
        calls.append(H)
        query, key, value = (torch.randn(1, H, TOKENS, HEAD_DIM, device=device, requires_grad=True) for _ in range(3))
        try:
            attend(H)(query, key, value).sum().backward()
            return True
        except Exception as error:
            if compile_cache.REFUSAL in str(error):
                refusals.append(H)
            else:
                other[type(error).__name__] = str(error)[:200]
            return False

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < deadline_s:
            H = next(heads)
            if call(H):
                existing.append(H)
            for _ in range(warm_calls):
                call(draw.choice(existing))

    existing.append(next(heads))
    call(existing[0])
    deadline_s = time.monotonic() + seconds
    workers = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, deadline_s + PATIENCE_S - time.monotonic()))
    return {
        "mode": mode,
        "calls": len(calls),
        "errors": len(refusals),
        "retries": compile_cache.stats()["retries"],
        "shapes": next(heads) - 1,
        "compiled": len(existing),
        "stuck": torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
        "hangs": any(worker.is_alive() for worker in workers),
        "other": other,
    }


def singleton(device: torch.device, backend: str) -> Callable[[int], Callable[..., torch.Tensor]]:
    compiled = torch.compile(flex.flex_attention, backend=backend, dynamic=False)
    return lambda H: compiled


def dict_with_lock(device: torch.device, backend: str) -> Callable[[int], Callable[..., torch.Tensor]]:
    compiled: dict[tuple[torch.device, int], Callable[..., torch.Tensor]] = {}
    lock = threading.Lock()

    def attend(H: int) -> Callable[..., torch.Tensor]:
        with lock:
            if (device, H) not in compiled:
                compiled[device, H] = torch.compile(flex.flex_attention, backend=backend, dynamic=False)
        return compiled[device, H]

    return attend


def cache(device: torch.device, backend: str) -> Callable[[int], Callable[..., torch.Tensor]]:
    return lambda H: compile_cache.handle("attend", flex.flex_attention, device, (H, TOKENS, HEAD_DIM), backend)


GUARDS: dict[str, Guard] = {"singleton": singleton, "dict": dict_with_lock, "cache": cache}

if __name__ == "__main__":
    run_script(main)
