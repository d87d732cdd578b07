"""What the scripts share: how they end, and the argument types and checks they have in common."""

import json
import sys
from collections.abc import Callable
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


def check_output(flag: str, path: str | Path) -> None:
    """Make the folder of a file that will be written, and try the file; raises UserError if it cannot be."""
    path = Path(path)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror}); name another file") from None


def run_script(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call main(argv) and exit: UserError becomes one line on stderr and code 2, Ctrl-C code 130."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
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
