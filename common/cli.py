"""What the scripts share: how they end, and the argument types and checks they have in common."""

import argparse
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from common.errors import UserError


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Give a command the flag without which no code of a checkpoint is run."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that ships with the target; read it before")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Give a command the flags that say where its target runs."""
    parser.add_argument("--device", help="where the target runs in this process; default: cuda if there is one")
    parser.add_argument("--stages", type=positive, default=1, help="devices that its layers are spread over, from --device on (1)")


@contextmanager
def writing(flag: str, path: str | Path, advice: str = "make room there, or name another one") -> Generator[None, None, None]:
    """Turn what the disk raises while `path` is written into a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror or error}); {advice}") from None


def whole(text: str) -> int:
    """An argparse type: a whole number from 0."""
    if int(text) < 0:
        raise ValueError
    return int(text)


def check_output(flag: str, path: str | Path) -> None:
    """Make the folder of a file that will be written, and try the file; raises UserError if it cannot be."""
    path = Path(path)
    with writing(flag, path, "name another file"):
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()


def check_input(flag: str, path: str | Path, again: bool = False) -> None:
    """Refuse what is no file that can be read; a pipe is one, unless it is read `again`. Raises: UserError."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
    else:
        pipe = again and not stat.S_ISREG(mode)
        reason = "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file, and has to be read twice" if pipe else None
    if reason:
        raise UserError(f"{flag} {path}: {reason}; name a file that is there")


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""What a disk raises that takes no more."""


def run_script(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call main(argv) and exit: UserError, or a disk that takes no more, becomes one line on stderr and code 2, Ctrl-C code 130."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"error: {error.filename or 'a file'} cannot be written: {error.strerror}; make room", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.exit(130)


def open_device(name: str | None = None) -> torch.device:
    """The torch device of a name, or the CUDA device if there is one, else the CPU.

    Raises: UserError if it is not there.
    """
    try:
        device = torch.empty(0, device=name or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}; use cpu, or a device that is there") from None
    if device.type == "meta":
        raise UserError("--device meta holds no numbers; use cpu, or a device that is there")
    return device
