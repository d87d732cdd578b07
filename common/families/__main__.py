"""`python -m common.families check DRAFTER --target TARGET`: is this exported drafter ready for the engines?"""

import argparse
from pathlib import Path

from common.cli import add_trust, run_script
from common.data.chat import Chat, load_tokenizer
from common.data.written import packed_otherwise
from common.drafter.export import json_objects
from common.drafter.folder import read_config
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
    folder = resolve(asked.target)
    report = check(asked.drafter, read_spec(folder, asked.trust_remote_code))
    packed_with = json_objects(Path(asked.drafter) / "config.json", read_config(asked.drafter), "packed_with")
    if packed_with:
        for what in packed_otherwise(Chat(load_tokenizer(folder, asked.trust_remote_code)), packed_with):
            print(f"target: its {what} is not what the drafter's data were packed with: what it reads will not be what was trained on")
    print("\n".join(report.lines()))
    if report.errors:
        raise UserError(f"{asked.drafter}: {len(report.errors)} errors; export it again or mend its config.json")


if __name__ == "__main__":
    run_script(main)
