"""What the tests of writing share: jobs of a tiny target, and conversations that it answers."""

import json
from pathlib import Path

from common.generation.generate import Job

FLAGS = dict(
    answers="sampled", temperature=1.0, top_p=0.95, max_tokens=12, keep=("cut", "loop"), chat_template_kwargs={}, seed=3, server=None,
    concurrency=4, batch_size=4, device="cpu", stages=1,
)  # fmt: skip
QUESTIONS = [["count 1", "and on"], ["count 20"], ["what", "why", "how"], ["go"], ["7"], ["count 3", "again"]]


def open_job(target: Path, output: Path, **changes: object) -> Job:
    """A job that samples short answers on the CPU; `changes` override the command line's arguments."""
    return Job.open(str(target), output, **FLAGS | changes)


def rows_of(path: Path) -> dict[str, dict]:
    """The rows of a JSONL file by their id."""
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def write_questions(path: Path) -> Path:
    """A file of conversations whose answers are somebody else's."""
    turns = [[{"role": r, "content": c} for q in user for r, c in (("user", q), ("assistant", "not the target's"))] for user in QUESTIONS]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path
