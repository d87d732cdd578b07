"""What a drafter learns from the same data by different recipes: held-out tau, a run each, several side by side on one GPU.

    python -m benchmarks.learning recipes --target data/smollm2/target --data data/smollm2/train --seeds 0 1 2
    python -m benchmarks.learning cost --target ... --data ... --plot benchmarks/cost.png
    python -m benchmarks.learning averaging --target ... --data ... --seeds 0 1 2
    python -m benchmarks.learning selector --target ... --data ... --seeds 0 1 2

`recipes`: the public trainer's recipe and the preset's, 28,800 documents. `cost`: anchors a document and block sizes, 9,600 documents,
against the seconds that the steps take with the GPU to themselves. `averaging`: one drafter with accumulation, and two and four that are
averaged or that share gradients, 9,600 documents, all on one device. `selector`: DFlash2 beside DFlash, and what each of its settings
brings, 28,800 documents. The figures go to --out as they come.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.cli import positive, run_script
from common.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
PRESET = REPOSITORY / "launch/presets/smollm2_135m.yaml"
PUBLIC_RECIPE = [
    "objective.weights=decay", "optim.name=adamw", "optim.lr=1e-3", "optim.weight_decay=0", "optim.schedule=cosine",
    "optim.betas=[0.9,0.999]",
]  # fmt: skip
Variants = dict[str, list[str]]


def rows(tokens: int, anchors: int, steps: int) -> list[str]:
    """Overrides of a run of `steps` rows of so many tokens and blocks, validated once, at its end."""
    ends = [f"{section}.every={steps}" for section in ("validation", "checkpoint")]
    return [f"data.pack_tokens={tokens}", f"objective.anchors={anchors}", f"optim.steps={steps}", "validation.rows=null", *ends]


def recipes() -> Variants:
    """The public trainer's recipe and the preset's."""
    return {"public": rows(9344, 4096, 893) + PUBLIC_RECIPE, "preset": rows(9344, 4096, 893)}


def cost() -> Variants:
    """64, 128 and 256 anchors a document (32 documents a row), blocks of 8 and 16."""
    return {
        f"{anchors} anchors, blocks of {block}": [*rows(9344, 32 * anchors, 300), f"drafter.block_size={block}"]
        for block in (8, 16)
        for anchors in (64, 128, 256)
    }


def averaging() -> Variants:
    """Rows of 8 documents, 1,200 in all: by N drafters that are averaged or share gradients, or by one that accumulates N."""
    variants: Variants = {}
    for drafters in (2, 4):
        run, devices = rows(2304, 1024, 1200 // drafters), ",".join(["default"] * drafters)
        threads = ["topology.mode=threads", "topology.target_devices=[default]", f"topology.drafter_devices=[{devices}]"]
        variants[f"{drafters} accumulated"] = [*run, f"optim.accumulate={drafters}"]
        variants[f"{drafters} ddp"] = [*run, *threads, "sync.mode=ddp"]
        variants[f"{drafters} averaged"] = [*run, *threads, "sync.mode=average", "sync.every=50"]
        variants[f"{drafters} averaged, outer step"] = [*variants[f"{drafters} averaged"], "sync.outer=nesterov"]
    return variants


def selector() -> Variants:
    """DFlash, DFlash2 as it comes, and DFlash2 with one setting changed."""
    run = rows(9344, 4096, 893)
    changed = {
        "label put in": "selector_absent=put_in",
        "without the selector's loss": "selector_weight=0",
        "weight 0.3": "selector_weight=0.3",
        "weight 3": "selector_weight=3",
        "late start": "selector_warmup=0.2",
        "rank 64": "selector_rank=64",
        "8 candidates": "selector_candidates=8",
        "32 candidates": "selector_candidates=32",
        "convolutions of one slot": "conv_taps=1",
        "convolutions of three slots": "conv_taps=3",
    }
    variants = {name: [*run, "drafter.family=dflash2", f"drafter.{override}"] for name, override in changed.items()}
    return {"dflash": run, "dflash2": [*run, "drafter.family=dflash2"]} | variants


STUDIES = {"recipes": recipes, "cost": cost, "averaging": averaging, "selector": selector}


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    variants = STUDIES[arguments.study]()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    jobs = [(name, seed) for seed in arguments.seeds for name in variants]
    with ThreadPoolExecutor(arguments.side_by_side) as pool:
        for (name, seed), record in zip(jobs, pool.map(lambda job: last_record(arguments, variants[job[0]], *job), jobs), strict=True):
            result = results.setdefault(name, {"overrides": variants[name], "tokens": record["tokens_seen"], "held_out_tau": {}})
            result["held_out_tau"][seed] = record["heldout_tau"]
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.study == "cost":
        for name, result in results.items():
            result["gpu_seconds"] = result["tokens"] / rate_alone(arguments, variants[name], name)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if arguments.plot:
        plot(results, arguments.plot)


def train(arguments: argparse.Namespace, overrides: Sequence[str], name: str) -> list[dict[str, Any]]:
    """One run; the lines of its metrics.jsonl."""
    folder = arguments.work / name.replace(" ", "_").replace(",", "")
    overrides = [text.replace("default", arguments.device) for text in overrides]
    command = [
        sys.executable, "train_drafter.py", "--config", str(PRESET), f"target.path={arguments.target}", f"data.path={arguments.data}",
        f"log.dir={folder}", "log.tensorboard=false", *overrides, *arguments.overrides,
    ]  # fmt: skip
    with open(f"{folder}.log", "w") as log:
        ended = subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        raise UserError(f"{' '.join(command)} ended with {ended.returncode}; the end of {folder}.log says why")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_record(arguments: argparse.Namespace, overrides: Sequence[str], name: str, seed: int) -> dict[str, Any]:
    """What one run knew at its end, with the last held-out tau."""
    record: dict[str, Any] = {}
    for line in train(arguments, [*overrides, f"seed={seed}"], f"{name} seed {seed}"):
        record |= line
    print(f"{name}, seed {seed}: {record['heldout_tau']:.3f}", flush=True)
    return record


def rate_alone(arguments: argparse.Namespace, overrides: Sequence[str], name: str, steps: int = 60) -> float:
    """Tokens a second of the variant with the device to itself, over the second half of `steps` steps."""
    ends = [f"optim.steps={steps}", f"checkpoint.every={steps}", "validation.path=null", f"log.every={steps // 2}"]
    return train(arguments, [*overrides, *ends], f"{name} alone")[-1]["tokens_per_s"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Mean and spread (highest less lowest) of each variant, as Markdown."""
    timed = any("gpu_seconds" in result for result in results.values())
    lines = ["| variant | held-out tau by seed | mean | spread |" + (" GPU-seconds |" if timed else ""), "|---" * (5 if timed else 4) + "|"]
    for name, result in results.items():
        taus = list(result["held_out_tau"].values())
        line = f"| {name} | {', '.join(f'{tau:.3f}' for tau in taus)} | {statistics.mean(taus):.3f} | {max(taus) - min(taus):.3f} |"
        lines.append(line + (f" {result['gpu_seconds']:.0f} |" if timed else ""))
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Held-out tau against GPU-seconds as PNG. Raises: UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for ending in sorted({name.split(", ")[1] for name in results}, key=lambda text: int(text.split()[-1])):
        own = {name.split()[0]: result for name, result in results.items() if name.endswith(ending)}
        seconds = [result["gpu_seconds"] for result in own.values()]
        taus = [statistics.mean(result["held_out_tau"].values()) for result in own.values()]
        axes.plot(seconds, taus, marker="o", label=ending)
        for anchors, x, y in zip(own, seconds, taus, strict=True):
            axes.annotate(f"{anchors} anchors", (x, y), textcoords="offset points", xytext=(6, -10), fontsize=8)
    axes.set(xlabel="GPU-seconds (target and drafter on one device)", ylabel="held-out tau", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", required=True, help="its token store")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--side-by-side", type=positive, default=8, help="runs at a time")
    parser.add_argument("--device", default="cuda:0", help="of all workers in threads mode")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="JSON of the figures (default: in --work)")
    parser.add_argument("--plot", type=Path, help="PNG of the study `cost`; needs matplotlib")
    parser.add_argument("overrides", nargs="*", help="further section.key=value of every run")
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = arguments.out or arguments.work / f"{arguments.study}.json"
    return arguments


if __name__ == "__main__":
    run_script(main)
