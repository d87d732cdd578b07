"""`python -m common.families check DRAFTER --target TARGET`: is this exported drafter ready for the engines?"""

import argparse

from common.cli import add_trust, run_script
from common.errors import UserError
from common.families.registry import check
from common.target.files import read_spec, resolve


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m common.families", description=__doc__)
    check_parser = parser.add_subparsers(required=True).add_parser("check", help="look at an exported drafter as its loaders would")
    check_parser.add_argument("drafter", help="folder with config.json and model.safetensors")
    check_parser.add_argument("--target", required=True, help="the target's folder or hub id")
    add_trust(check_parser)
    asked = parser.parse_args(arguments)
    report = check(asked.drafter, read_spec(resolve(asked.target), asked.trust_remote_code))
    print("\n".join(report.lines()))
    if report.errors:
        raise UserError(f"{asked.drafter}: {len(report.errors)} errors; export it again or mend its config.json")


if __name__ == "__main__":
    run_script(main)
