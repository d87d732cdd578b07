"""Hostile files and servers by the thousand: what a user can be given must be read, or refused in a line of words, soon.

python -m benchmarks.fuzz                                       10,000 cases of every kind
python -m benchmarks.fuzz --kinds tokenizer store --cases 500   some

A case is drawn from (kind, --seed, its number) alone. Anything but a UserError or a Rejected is printed with the numbers that bring it
back (`--first N --cases 1`), once for each place that it came from; so is a case that takes longer than --slow-s. tests/test_fuzz.py runs
a small share of each kind.
"""

import argparse
import contextlib
import faulthandler
import io
import random
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm
from transformers.utils import logging

from benchmarks.fuzz_kinds import KINDS, REFUSED
from common.cli import run_script

LONGEST_WORDS = 2000
"""Characters that a refusal may have: the list of all keys of a section takes most of it."""


def fuzz(kind: str, seed: int, numbers: Iterable[int], slow_s: float) -> Iterator[tuple[int, str, str]]:
    """Try these cases of a kind, and yield what goes wrong: the case, the place that it came from, and what was said."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = KINDS[kind](Path(place))
        for number in numbers:
            begun_s, wrong = time.process_time(), None
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    case(random.Random(f"{kind} {seed} {number}"))
            except REFUSED as error:
                if "\n" in str(error) or len(str(error)) > LONGEST_WORDS:
                    wrong = number, "no line of words", str(error)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of the tokenizers' Rust is no Exception
                wrong = number, _where(error), str(error)
            if wrong is None and (took_s := time.process_time() - begun_s) > slow_s:
                wrong = number, "slow", f"{took_s:.1f} s"
            if wrong is not None:
                yield wrong


def _where(error: BaseException) -> str:
    """What was raised, and from which lines: the last of ours and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename][-1]
    places = dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (ours, frames[-1]))
    return f"{type(error).__name__} from {' and '.join(places)}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-s", type=float, default=6.0, help="of processor time")
    asked = parser.parse_args(argv)
    logging.set_verbosity_error()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))  # a file that asks for more is found
    numbers, problems = range(asked.first, asked.first + asked.cases), 0
    for kind in asked.kinds:
        found = Counter[str]()
        for number, where, words in fuzz(kind, asked.seed, tqdm(numbers, desc=kind, disable=None), asked.slow_s):
            found[where] += 1
            if found[where] == 1:
                print(f"{kind}, case {number}: {where}: {words[:300]!r}", flush=True)
        print(f"{kind}: {asked.cases:,} cases, {found.total()} went wrong {dict(found) or ''}", flush=True)
        problems += found.total()
    return int(problems > 0)


if __name__ == "__main__":
    run_script(main)
