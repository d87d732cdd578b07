"""All families of drafters from the same documents, blocks and seeds, measured as they will be served: one table.

    python -m benchmarks.families --target data/smollm2/target --data data/smollm2/train --prompts HumanEval.jsonl own_heldout.jsonl

Trains DFlash, DFlash2, LiLiCorr, LiLiCorr with convolutions and DSpark by the preset, several side by side on one GPU, a run a seed. Each
drafter is replayed on the target's greedy answers (chain, tree of 64) and decodes at temperature 1 (the likeliest chain, and one sampled
from the drafter); with the GPU to itself, drafts and verifications are timed. What --work holds already is not made again; the figures go
to --out as they come.

The speed-up is tau times the milliseconds of a plain token, divided by those of a draft and a verification. Every family drafts seven
tokens; DSpark's blocks of eight slots have eight, of which seven are served.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.learning import REPOSITORY, rate_alone, rows, train
from common.cli import positive, run_script
from common.errors import UserError
from common.target.files import Tensors

FAMILIES: dict[str, list[str]] = {
    "DFlash": [],
    "DFlash2": ["drafter.family=dflash2"],
    "LiLiCorr": ["drafter.family=lilicorr"],
    "LiLiCorr, convolutions": ["drafter.family=lilicorr", "drafter.conv_taps=2"],
    "DSpark": ["drafter.family=dspark"],
}
BLOCK, TREE, TOKENS = 8, 64, 9344  # slots of a block, nodes of the tree, tokens of a row
Results = dict[str, dict[str, Any]]


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: Results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for stage in arguments.stages:
        make(arguments, results, stage)
    print(table(results))


def make(arguments: argparse.Namespace, results: Results, stage: str) -> None:
    """Run a stage for every drafter that has no result of it yet; times are those of the first seed."""
    function, alone = STAGES[stage]
    seeds = arguments.seeds[:1] if alone else arguments.seeds
    due = [(name, seed) for seed in seeds for name in arguments.families if stage not in results.get(name, {}).get(str(seed), {})]
    with ThreadPoolExecutor(1 if alone else arguments.side_by_side) as pool:
        for (name, seed), found in zip(due, pool.map(lambda job: function(arguments, *job), due), strict=True):
            results.setdefault(name, {}).setdefault(str(seed), {})[stage] = found
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{stage}: {name}, seed {seed}: {json.dumps(found)}", flush=True)


def trained(arguments: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train one drafter."""
    record: dict[str, Any] = {}
    for line in train(arguments, [*overrides(arguments, name), f"seed={seed}"], run_name(name, seed)):
        record |= line
    tensors = Tensors(exported(arguments, name, seed))
    parameters = sum(math.prod(tensors.shape(tensor)) for tensor in tensors.names())
    return {"heldout_tau": record["heldout_tau"], "tokens": record["tokens_seen"], "parameters": parameters}


def replayed(arguments: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Greedy acceptance lengths, by set of prompts."""
    report = evaluated(arguments, name, seed, "replay", "--replay", "--verify", 0, "--tree-budget", TREE)
    runs = {(run["block_size"], run["tree_budget"]): run["tau_by_set"] for run in report["runs"]}
    return {"chain": runs[served_block(name), None], "tree": runs[BLOCK, TREE]}


def sampled(arguments: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Acceptance lengths at temperature 1: the likeliest chain, and one sampled from the drafter."""
    how = ["--temperature", 1, "--no-compare", "--limit", arguments.limit, "--block-size", served_block(name)]
    return {drafts: evaluated(arguments, name, seed, drafts, *how, "--drafts", drafts)["tau_by_set"] for drafts in ("greedy", "sampled")}


def timed(arguments: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Milliseconds of a draft, a verification and a plain token, and seconds that the training takes, each with the device to itself."""
    chain = evaluated(arguments, name, seed, "chain", "--decode", "--limit", 4, "--block-size", served_block(name))
    tree = evaluated(arguments, name, seed, "tree", "--decode", "--limit", 4, "--mode", "tree", "--tree-budget", TREE, "--no-compare")
    ms = {
        f"{kind}_{part}_ms": 1e3 * report["seconds"][part] / report["verifications"]
        for kind, report in (("chain", chain), ("tree", tree))
        for part in ("draft", "verify")
    }
    seconds = arguments.steps * TOKENS / rate_alone(arguments, overrides(arguments, name), f"{run_name(name, seed)} alone")
    return ms | {"plain_ms": 1e3 * chain["seconds_plain"] / chain["tokens"], "training_s": seconds}


Stage = Callable[[argparse.Namespace, str, int], dict[str, Any]]
STAGES: dict[str, tuple[Stage, bool]] = {
    "train": (trained, False), "replay": (replayed, False), "sample": (sampled, False), "time": (timed, True)
}  # fmt: skip
"""{stage: (what it does for one drafter, whether it needs the device for itself)}."""


def overrides(arguments: argparse.Namespace, name: str) -> list[str]:
    return [*rows(TOKENS, 4096, arguments.steps), f"drafter.block_size={BLOCK}", *FAMILIES[name]]


def run_name(name: str, seed: int) -> str:
    return f"{name} seed {seed}"


def served_block(name: str) -> int:
    """The block size whose chain has seven tokens."""
    return BLOCK - 1 if name == "DSpark" else BLOCK


def exported(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    return arguments.work / run_name(name, seed).replace(" ", "_").replace(",", "") / "export/latest"


def evaluated(arguments: argparse.Namespace, name: str, seed: int, what: str, *how: object) -> dict[str, Any]:
    """The report of evaluate_drafter.py. Raises: UserError if it fails."""
    file = arguments.work / f"{run_name(name, seed)} {what}.json".replace(" ", "_").replace(",", "")
    command = [
        sys.executable, "evaluate_drafter.py", "--drafter", exported(arguments, name, seed), "--target", arguments.target, "--prompts",
        *arguments.prompts, "--max-new-tokens", arguments.new_tokens, "--json", file, *how,
    ]  # fmt: skip
    with open(file.with_suffix(".log"), "w") as log:
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # or every process takes all cores
        ended = subprocess.run([str(part) for part in command], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=alone)
    if ended.returncode:
        raise UserError(f"{' '.join(map(str, command))} ended with {ended.returncode}; the end of {file.with_suffix('.log')} says why")
    return json.loads(file.read_text())


def table(results: Results) -> str:
    """The figures as Markdown: means over the seeds, and for the greedy chain the spread in brackets."""
    sets = sorted({name for seeds in results.values() for found in seeds.values() for name in found.get("replay", {}).get("chain", {})})
    columns = ["chain", "tree of 64", "temperature 1, greedy drafts", "temperature 1, sampled drafts"]
    head = ["family", "parameters", "training s", "draft ms", "verify ms", *(f"{c}: {s}" for s in sets for c in columns), "speed-up"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, seeds in results.items():
        runs = list(seeds.values())
        chains = {s: values(runs, "replay", "chain", s) for s in sets}
        taus = [
            text
            for s in sets
            for text in (
                f"{mean(chains[s])} ({max(chains[s], default=0) - min(chains[s], default=0):.2f})",
                mean(values(runs, "replay", "tree", s)),
                mean(values(runs, "sample", "greedy", s)),
                mean(values(runs, "sample", "sampled", s)),
            )
        ]
        times = [found["time"] for found in runs if "time" in found]
        own = [mean([t[key] for t in times]) for key in ("training_s", "chain_draft_ms", "chain_verify_ms")]
        ups = [
            statistics.mean(found["replay"]["chain"].values()) * t["plain_ms"] / (t["chain_draft_ms"] + t["chain_verify_ms"])
            for found, t in zip(runs, times, strict=False)
            if "replay" in found
        ]
        size = next((f"{found['train']['parameters'] / 1e6:.1f} M" for found in runs if "train" in found), "-")
        lines.append("| " + " | ".join([name, size, *own, *taus, mean(ups)]) + " |")
    return "\n".join(lines)


def values(runs: Sequence[dict[str, Any]], *keys: str) -> list[float]:
    """What every run that has it holds under these keys."""
    found = []
    for run in runs:
        value: Any = run
        for key in keys:
            value = value.get(key) if value else None
        found += [] if value is None else [value]
    return found


def mean(numbers: Sequence[float]) -> str:
    """Two decimals, or a dash for nothing."""
    return f"{statistics.mean(numbers):.2f}" if numbers else "-"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", required=True, help="its token store")
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL, a file a set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--steps", type=positive, default=893, help="of about 32 documents each")
    parser.add_argument("--limit", type=positive, default=40, help="prompts of each set at temperature 1")
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--side-by-side", type=positive, default=5, help="runs at a time")
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=Path("runs/families"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="JSON of the figures (default: in --work)")
    parser.add_argument("overrides", nargs="*", help="further section.key=value of every run")
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = arguments.out or arguments.work / "families.json"
    return arguments


if __name__ == "__main__":
    run_script(main)
