"""One real run from nothing but a GGUF file: SmolLM2-135M-Instruct writes conversations, a drafter learns from them, and decodes.

    python -m benchmarks.smollm2_run --gguf SmolLM2-135M-Instruct.Q4_1.gguf --prompts HumanEval.jsonl.gz --work data/smollm2

Stages: convert, synthesize, pack, then train and evaluate for each variant; what --work already holds is not made again. Variants differ
from the preset (`base`) in one thing each, at equal documents, to see what moves the acceptance length most; --data does the same for
the conversations. A report is printed as JSON at the end, and written to --out with the conversations after every stage.
"""

import argparse
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common.cli import run_script
from common.data.packing import pack_rows
from common.data.store import TokenStore
from common.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
PRESET, TOPICS = (REPOSITORY / "launch/presets" / name for name in ("smollm2_135m.yaml", "smollm2_135m_topics.txt"))
ROW_DOCUMENTS, ANCHORS = 32, 128  # conversations of a step, blocks of a conversation
STAGES = ("convert", "synthesize", "pack", "train", "evaluate", "speed")
FILES = {"own": (1, False), "own2": (2, False), "code": (1, True)}  # how many times --num, whether TOPICS are given
DATA = {  # what is trained on: a share of each file
    "half_code": {"own": 0.5, "code": 0.5},
    "code": {"code": 1.0},
    "own": {"own": 1.0},
    "own2": {"own2": 1.0},
    "quarter": {"own": 0.25},
}
VARIANTS: dict[str, list[str]] = {
    "base": [],
    "adamw": ["optim.name=adamw", "optim.lr=1e-3"],
    "cosine": ["optim.schedule=cosine"],
    "decay": ["objective.weights=decay"],
    "kl": ["objective.loss=kl"],
    "lk": ["objective.loss=lk"],
    "anchors64": [f"objective.anchors={ROW_DOCUMENTS * ANCHORS // 2}"],
    "anchors256": [f"objective.anchors={ROW_DOCUMENTS * ANCHORS * 2}"],
    "block16": ["drafter.block_size=16"],
    "lr_half": ["optim.lr=1e-3"],
    "lr_double": ["optim.lr=4e-3"],
    "no_decay": ["optim.weight_decay=0"],
    "layers2": ["drafter.layers=2"],
    "layers8": ["drafter.layers=8"],
    "init_target": ["drafter.init=target_layers"],
}
SAMPLED: dict[str, list[str | int]] = {
    "chain_t1": ["--temperature", 1],
    "tree64_t1": ["--mode", "tree", "--tree-budget", 64, "--temperature", 1],
}


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    run = RealRun(arguments)
    for stage in ("convert", "synthesize", "pack"):
        if stage in arguments.stages:
            run.timed(stage)
    if "train" in arguments.stages:
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda variant: run.timed("train", variant), arguments.variants))
    for stage, variant in itertools.product(("evaluate", "speed"), arguments.variants):
        if stage in arguments.stages:
            run.timed(stage, variant)
    print(json.dumps(run.report))


class RealRun:
    """The stages, each a command line a user would type, and the report they fill."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.work, self.out = arguments, arguments.work, arguments.out or arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.target, self.writing = self.work / "target", threading.Lock()
        self.report: dict[str, dict[str, Any]] = {"seconds": {}, "conversations": {}, "variants": {name: {} for name in arguments.variants}}
        self.files = sorted({"own", *DATA[arguments.data]})

    def timed(self, stage: str, *variant: str) -> None:
        """Run a stage, and write its seconds and all reports so far."""
        begun_s = time.monotonic()
        getattr(self, stage)(*variant)
        name, seconds = ".".join([stage, *variant]), round(time.monotonic() - begun_s, 1)
        print(f"== {name}: {seconds} s", flush=True)
        with self.writing:
            self.report["seconds"][name] = seconds
            (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n")

    def convert(self) -> None:
        """A folder that transformers loads, from the GGUF file."""
        if self.target.exists():
            return
        if not self.arguments.gguf:
            raise UserError(f"{self.target} is not there yet: name the GGUF file that it is made from with --gguf")
        file = self.arguments.gguf[0]
        if len(self.arguments.gguf) > 1:
            file = self.work / "joined.gguf"
            with open(file, "wb") as joined:
                for piece in self.arguments.gguf:
                    joined.write(piece.read_bytes())
        script("prepare_data.py", "convert", "--gguf", file, "--output", self.target)

    def synthesize(self) -> None:
        """The training conversations, and the target's own answers to the benchmark's prompts."""
        a = self.arguments
        for name in self.files:
            factor, with_topics = FILES[name]
            number, output, begun_s = a.num * factor + a.heldout, self.work / f"{name}.jsonl", time.monotonic()
            if not output.exists() and a.restore and (found := a.restore / f"{name}.jsonl.gz").exists():
                with gzip.open(found) as packed, open(output, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
            before = count_lines(output)
            if before < number:
                more = ["--topics", TOPICS] if with_topics else []
                self.write("synthesize", "--num", number, "--output", output, "--max-user-tokens", a.max_user_tokens, *more)
            rows, seconds = read_rows(output), time.monotonic() - begun_s
            self.report["conversations"][name] = {
                "rows": len(rows),
                "rejected": count_lines(self.work / f"{name}.jsonl.rejected.jsonl"),
                "cut": sum(row["cut"] for row in rows),
                "tokens_written": sum(row["tokens"] for row in rows),
                "tokens_per_s": sum(row["tokens"] for row in rows[before:]) / seconds,
            }
            with gzip.open(self.out / f"{name}.jsonl.gz", "wb") as packed:
                packed.write(output.read_bytes())
        asked = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in read_rows(a.prompts)]
        write_rows(self.work / "benchmark_prompts.jsonl", asked)
        self.write("regenerate", "--input", self.work / "benchmark_prompts.jsonl", "--output", self.work / "benchmark.jsonl")

    def write(self, command: str, *more: object) -> None:
        """Have the target write."""
        a = self.arguments
        how = ["--max-tokens", a.max_tokens, "--keep", "cut", "loop", *(["duplicate"] if command == "regenerate" else [])]
        script("prepare_data.py", command, "--target", self.target, "--batch-size", a.batch_size, *how, *more)

    def pack(self) -> None:
        """A store to train on, and one of held-out conversations and of the benchmark's answers to validate on."""
        a = self.arguments
        rows = {name: read_rows(self.work / f"{name}.jsonl") for name in self.files}
        parts = (rows[name][a.heldout :][: int(share * (len(rows[name]) - a.heldout))] for name, share in DATA[a.data].items())
        write_rows(self.work / f"{a.data}_train.jsonl", itertools.chain(*parts))
        write_rows(self.work / "own_heldout.jsonl", rows["own"][: a.heldout])
        self.pack_store(self.work / a.data, self.work / f"{a.data}_train.jsonl")
        self.pack_store(self.work / "heldout", self.work / "own_heldout.jsonl", self.work / "benchmark.jsonl")

    def pack_store(self, folder: Path, *files: Path) -> None:
        """A token store of conversation files, if it is not there yet."""
        if not folder.exists():
            script("prepare_data.py", "pack", *files, "--target", self.target, "--output", folder)

    def train(self, variant: str) -> None:
        """Train on as many documents as every other variant."""
        data = self.work / self.arguments.data
        store = TokenStore.open(data)
        tokens_per_row = -(-int(ROW_DOCUMENTS * store.lengths.mean()) // 128) * 128
        rows = len(pack_rows(store.lengths, tokens_per_row, tokens_per_row, "truncate", seed=0))
        steps = round(self.arguments.documents * rows / len(store))
        folder = self.run_folder(variant)
        begun_s = time.monotonic()
        script(
            "train_drafter.py", "--config", PRESET, f"target.path={self.target}",
            f"data.path={data}", f"data.pack_tokens={tokens_per_row}", f"objective.anchors={ROW_DOCUMENTS * ANCHORS}",
            f"validation.path={self.work / 'heldout'}", f"optim.steps={steps}", f"log.dir={folder}",
            *VARIANTS[variant], *self.arguments.override,
        )  # fmt: skip
        seconds, records = time.monotonic() - begun_s, read_rows(folder / "metrics.jsonl")
        rates = sorted(record["tokens_per_s"] for record in records if "tokens_per_s" in record)
        validated = [record for record in records if "heldout_tau" in record]
        trained = {
            "seconds": seconds,
            "steps": steps,
            "documents": round(steps * len(store) / rows),
            "different_documents": len(store),
            "tokens": int(steps * store.lengths.sum() / rows),
            "median_tokens_per_s": rates[len(rates) // 2] if rates else None,
            "curve": [[record[key] for key in ("step", "loss", "tau")] for record in records if "loss" in record][::5],
            "heldout_tau": {key: value for key, value in validated[-1].items() if key.startswith("heldout_tau")},
            "heldout_tau_by_step": {record["step"]: record["heldout_tau"] for record in validated},
        }
        with self.writing:
            self.report["variants"][variant]["train"] = trained

    def evaluate(self, variant: str) -> None:
        """Greedy decoding replayed in every way; sampling decoded in the ways asked for."""
        for name, rows in self.questions().items():
            write_rows(self.out / f"{name}.jsonl", rows)
        prompts = [self.out / f"{name}.jsonl" for name in self.questions()]
        subprocess.run(self.evaluation(variant, prompts, self.out / "replay.json", "--verify", 0), cwd=REPOSITORY, check=True)
        evaluated = json.loads((self.out / "replay.json").read_text())
        self.report["variants"][variant]["replay"] = {
            "seconds": evaluated["seconds_by_stage"],
            "tau": {run["way"]: run["tau_by_set"] for run in evaluated["runs"]},
            "chain": {name: acceptance([a for a in evaluated["per_prompt"] if a["set"] == name]) for name in self.questions()},
        }
        for decoding in self.arguments.sampled:
            self.timed("decode", variant, decoding)

    def questions(self) -> dict[str, list[dict[str, Any]]]:
        """What is asked, by set."""
        return {
            "humaneval": [{"prompt": row["prompt"]} for row in read_rows(self.arguments.prompts)][: self.arguments.limit],
            "own": [{"messages": row["messages"]} for row in read_rows(self.work / "own_heldout.jsonl")][: self.arguments.limit],
        }

    def decode(self, variant: str, decoding: str) -> None:
        """One way of sampling; it waits for the host, so several processes share the devices and the prompts."""
        groups = self.questions()
        tagged = [(name, row) for name, rows in groups.items() for row in rows]
        count = min(self.arguments.shards, len(tagged))
        shards = [tagged[i::count] for i in range(count)]
        processes = []
        for i, shard in enumerate(shards):
            write_rows(self.out / f"shard{i}.jsonl", [row for _, row in shard])
            device = f"cuda:{i % devices}" if (devices := torch.cuda.device_count()) else "cpu"
            files = [self.out / f"shard{i}.jsonl"], self.out / f"shard{i}.json"
            command = self.evaluation(variant, *files, "--no-compare", "--device", device, *SAMPLED[decoding])
            alone = os.environ | {"OMP_NUM_THREADS": "1"}  # or every process takes all cores
            processes.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, env=alone))
        if any([process.wait() for process in processes]):
            raise UserError("an evaluation failed; its reason stands above")
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
        for i, shard in enumerate(shards):
            evaluated = json.loads((self.out / f"shard{i}.json").read_text())["per_prompt"]
            for (name, _), answer in zip(shard, evaluated, strict=True):
                answers[name].append(answer)
        self.report["variants"][variant][decoding] = {name: acceptance(found) for name, found in answers.items()}

    def speed(self, variant: str) -> None:
        """Against plain decoding, alone on the device."""
        write_rows(self.out / "speed.jsonl", [{"prompt": row["prompt"]} for row in read_rows(self.arguments.prompts)][:8])
        command = self.evaluation(variant, [self.out / "speed.jsonl"], self.out / "speed.json", "--decode")
        subprocess.run(command, cwd=REPOSITORY, check=True)
        evaluated = json.loads((self.out / "speed.json").read_text())
        self.report["variants"][variant]["speed"] = {key: evaluated[key] for key in ("prompts", "tokens", "speedup", "lossless", "tau")}

    def run_folder(self, variant: str) -> Path:
        return self.work / "runs" / f"{self.arguments.data}_{variant}"

    def evaluation(self, variant: str, prompts: Sequence[Path], report: Path, *more: object) -> list[str]:
        """The command line that evaluates on these prompts."""
        command = [
            sys.executable, "evaluate_drafter.py", "--drafter", self.run_folder(variant) / "export/latest", "--target", self.target,
            "--prompts", *prompts, "--json", report,
            "--max-new-tokens", self.arguments.new_tokens, *more,
        ]  # fmt: skip
        return [str(part) for part in command]


def acceptance(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """tau, the histogram of accepted drafts, and the share of verifications that accept slot k, given that slot k-1 was."""
    accepted = [n for answer in answers for n in answer["accepted"]]
    at_least = [sum(n >= slot for n in accepted) for slot in range(max(accepted) + 1)]
    return {
        "prompts": len(answers),
        "tokens": sum(len(answer["output_ids"]) for answer in answers),
        "verifications": len(accepted),
        "tau": sum(n + 1 for n in accepted) / len(accepted),
        "accepted_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
        "acceptance_by_slot": [round(n / len(accepted), 4) for n in at_least[1:]],
        "conditional_by_slot": [round(n / m, 4) for m, n in itertools.pairwise(at_least)],
    }


def script(name: str, *arguments: object) -> None:
    """Run a script of the repository. Raises: UserError if it fails."""
    command = [sys.executable, name, *map(str, arguments)]
    print("$", " ".join(command[1:]), flush=True)
    done = subprocess.run(command, cwd=REPOSITORY)
    if done.returncode:
        raise UserError(f"{name} ended with code {done.returncode}; its reason stands above")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, packed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def count_lines(path: Path) -> int:
    """Lines of a file, 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What was asked for, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, nargs="+", help="the file, or its pieces in order")
    parser.add_argument("--prompts", type=Path, required=True, help="HumanEval.jsonl.gz: rows with a `prompt`")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "data/smollm2", help="folder of everything made on the way")
    parser.add_argument("--out", type=Path, help="folder of report and conversations; default: --work")
    parser.add_argument("--restore", type=Path, help="an --out of before, whose conversations are used")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--data", choices=DATA, default="half_code", help="conversations to train on")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["base"])
    parser.add_argument("--num", type=int, default=8192, help="conversations to train on")
    parser.add_argument("--heldout", type=int, default=256, help="more of them, to evaluate on")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-user-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=2816)
    parser.add_argument("--documents", type=int, default=57600, help="seen in training, over all epochs")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an evaluated answer")
    parser.add_argument("--sampled", nargs="+", choices=SAMPLED, default=[], help="ways of sampling that are decoded beside the replay")
    parser.add_argument("--side-by-side", type=int, default=1, help="variants that train at a time; their seconds say little then")
    parser.add_argument("--shards", type=int, default=8, help="processes that sample side by side")
    parser.add_argument("--limit", type=int, help="prompts of each kind")
    parser.add_argument("--override", nargs="*", default=[], metavar="section.key=value", help="for train_drafter.py")
    arguments = parser.parse_args(argv)
    for path in [arguments.prompts, *(arguments.gguf or [])]:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    return arguments


if __name__ == "__main__":
    run_script(main)
