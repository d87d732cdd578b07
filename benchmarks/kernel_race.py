"""Two threads call FlexAttention on one device while new shapes keep compiling: which guard survives?

    python -m benchmarks.kernel_race --seconds 20

The undeterministic twin of tests/test_kernels.py; common/kernels.py tells the story. Modes, each in a process of its own:
- `singleton`: one `torch.compile(flex_attention)` for all;
- `dict`: one per device and shape, created under a lock (the historical fix);
- `cache`: common/kernels.py.
Each thread compiles a shape of its own (a number of heads), then makes `warm_calls` calls of shapes that exist, and so on; a call is a
forward and a backward. The naive guards get their recompile limit lifted, so that the race alone is measured. On CPU from torch 2.13 on
they pass: the flag is hidden during Dynamo's own compiles, and since 2.14 it is one per thread.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import threading
import time

import torch
from torch.nn.attention import flex_attention as flex

from common import kernels

TOKENS, HEAD_DIM = 256, 64
MODES = ("singleton", "dict", "cache")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="per mode")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default="inductor", help="aot_eager where there is no GPU")
    args = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a disk-cache hit traces nothing and hides the race
    jobs = [(mode, args.device, args.backend, args.seconds) for mode in MODES]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # errors can leave torch's flag up for good
        results = pool.starmap(measure, jobs, chunksize=1)
    for result in results:
        print(json.dumps(result))
    columns = ("mode", "calls", "errors", "retries", "compiles")
    print("", *columns, "", sep=" | ")
    print("|", *["---"] * len(columns), "", sep=" | ")
    for result in results:
        print("", *(result[column] for column in columns), "", sep=" | ")


def measure(mode, device, backend, seconds, threads=2, warm_calls=20):
    """Run one mode; returns its counts. `other` holds one message of each error that is not the refusal."""
    device = torch.device(device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
    if device.type == "cpu":
        flex._validate_device = lambda *_: None  # it refuses gradients there; only the race matters here
    attend, heads, existing = ATTEND[mode](device, backend), itertools.count(1), []
    counts, counting, other = {"calls": 0, "errors": 0}, threading.Lock(), {}

    def call(H):
        query, key, value = (torch.randn(1, H, TOKENS, HEAD_DIM, device=device, requires_grad=True) for _ in range(3))
        try:
            attend(H)(query, key, value).sum().backward()
            error = None
        except Exception as caught:
            error = caught
            if kernels.REFUSAL not in str(error):
                other.setdefault(type(error).__name__, str(error)[:200])
        with counting:
            counts["calls"] += 1
            counts["errors"] += error is not None
        return error is None

    def work(seed):
        draw = random.Random(seed)
        while time.monotonic() < deadline_s:
            H = next(heads)
            if call(H):
                existing.append(H)
            for _ in range(warm_calls):
                call(draw.choice(existing))

    first = next(heads)
    call(first)
    existing.append(first)
    deadline_s = time.monotonic() + seconds
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shapes = next(heads) - 1
    compiles = kernels.stats()["compiles"] if mode == "cache" else f"{len(existing)} of {shapes} shapes"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "mode": mode,
        **counts,
        "retries": kernels.stats()["retries"],
        "compiles": compiles,
        "other": other,
        "torch": torch.__version__,
        "device": name,
    }


def singleton(device, backend):
    compiled = torch.compile(flex.flex_attention, backend=backend, dynamic=False)
    return lambda H: compiled


def dict_with_lock(device, backend):
    compiled, lock = {}, threading.Lock()

    def get(H):
        with lock:
            if (device, H) not in compiled:
                compiled[device, H] = torch.compile(flex.flex_attention, backend=backend, dynamic=False)
        return compiled[device, H]

    return get


def cache(device, backend):
    return lambda H: kernels.handle("attend", flex.flex_attention, device, (H, TOKENS, HEAD_DIM), backend)


ATTEND = dict(zip(MODES, (singleton, dict_with_lock, cache), strict=True))

if __name__ == "__main__":
    main()
