"""How fast conversations become a token store: by 1, 2, 4, ... processes, by the ids that rows carry, and with very many turns.

    python -m benchmarks.packing [--target FOLDER] [--lines 6000] [--tiny]

The conversations are made here, of the quickstart's sentences: about 1,500 tokens each under its tokenizer, which cuts words into more
pieces than a large target's would. A process uses one core; `share` is the speed over that of as many single processes.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from common.cli import positive, run_script
from common.data import preparing
from common.data.chat import Chat, Encoded, load_tokenizer
from common.data.conversations import read_lines
from common.data.parallel import cores
from common.data.written import token_ids

QUICKSTART = Path(__file__).resolve().parents[1] / "launch" / "quickstart"


def conversations(lines: int) -> Iterator[dict[str, Any]]:
    """Rows of five questions and answers out of sentences that occur in the quickstart's conversations."""
    draw, sentences = random.Random(0), set()
    for _, _, line in read_lines(str(QUICKSTART / "train.jsonl.gz")):
        assert isinstance(line, bytes)
        sentences.update(part for message in json.loads(line)["messages"] for part in message["content"].split(". "))
    ordered = sorted(sentences)
    for _ in range(lines):
        said = [". ".join(draw.choices(ordered, k=draw.randint(1, 3 if i % 2 == 0 else 14))) for i in range(10)]
        yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]}


def with_ids(chat: Chat, row: dict[str, Any]) -> dict[str, Any]:
    """A row as `regenerate` would have written it."""
    messages = row["messages"]
    exchanges = [
        (chat.prompt(messages[:i]).tolist(), chat.backend.encode(message["content"], add_special_tokens=False).ids)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return row | {"token_ids": token_ids(chat, row, exchanges)}


def write(path: Path, rows: Iterator[dict[str, Any]]) -> str:
    """Write rows as JSONL; returns the path as `pack` takes it."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def time_pack(path: str, target: str, store: Path, workers: int) -> dict[str, Any]:
    """Pack a file and say how fast."""
    start_s = time.perf_counter()
    summary = preparing.pack([path], target, str(store), workers=workers)
    wall_s = time.perf_counter() - start_s
    tokens = summary["tokens"]
    return {"workers": workers, "documents": summary["documents"], "tokens": tokens, "wall_s": wall_s, "ktok_per_s": tokens / wall_s / 1e3}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(QUICKSTART / "target"), help="folder of the tokenizer")
    parser.add_argument("--lines", type=positive, default=6000)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(argv)
    lines, turns = (200, (20, 60)) if arguments.tiny else (arguments.lines, (300, 3000))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a process beside others: one of them is one core's work
    target, cpu = arguments.target, torch.device("cpu")
    counts = {2, cores(), *(2**i for i in range(1, cores().bit_length()))} - {1}
    preparing.ALONE_BYTES = 0  # small inputs would otherwise stay in this process
    chat = Chat(load_tokenizer(target))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write(folder / "text.jsonl", conversations(lines))
        few = write(folder / "few.jsonl", conversations(10))
        time_pack(few, target, folder / "store", workers=max(counts))  # the server that starts processes has imported everything then
        alone = time_pack(path, target, folder / "store", workers=1)
        measure.report(cpu, benchmark="packing", part="text", **alone, share=1.0)
        for workers in sorted(counts):
            case = time_pack(path, target, folder / "store", workers)
            measure.report(cpu, benchmark="packing", part="text", **case, share=alone["wall_s"] / case["wall_s"] / workers)
        ids = write(folder / "ids.jsonl", (with_ids(chat, row) for row in conversations(lines // 4)))
        measure.report(cpu, benchmark="packing", part="ids", **time_pack(ids, target, folder / "store", workers=1))
    for count in turns:
        long = {"messages": [message for row in conversations(-(-count // 10)) for message in row["messages"]][:count]}
        start_s = time.perf_counter()
        (found,) = chat.documents([long])
        assert isinstance(found, Encoded)
        wall_s = time.perf_counter() - start_s
        measure.report(cpu, benchmark="packing", part="turns", messages=count, tokens=len(found.documents[0][0]), wall_s=wall_s)


if __name__ == "__main__":
    run_script(main)
