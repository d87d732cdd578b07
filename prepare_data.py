"""Conversations for training: written by the target itself, packed into a token store, and shown as packed.

python prepare_data.py synthesize --target Qwen/Qwen3-8B --num 100000 --output conversations.jsonl
python prepare_data.py regenerate --target Qwen/Qwen3-8B --input others.jsonl --output conversations.jsonl --server http://host:8000/v1
python prepare_data.py convert --gguf model.gguf --output models/target
python prepare_data.py pack conversations.jsonl --target Qwen/Qwen3-8B --output data/train --heldout 200
python prepare_data.py inspect data/train --document 0

What a target writes is kept as text and as the tokens that it wrote; pack takes these tokens where they are.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cli import add_device, add_trust, check_output, json_object, positive, run_script, writing
from common.errors import UserError

if TYPE_CHECKING:
    from common.generation.generate import Job

Commands = Any
"""What argparse's add_subparsers returns; its class is private."""


def main(argv: list[str]) -> None:
    """Run one command. Raises: UserError for what cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in (add_synthesize, add_regenerate, add_convert, add_pack, add_inspect):
        add_command(commands)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


def add_synthesize(commands: Commands) -> None:
    command = add_writing(commands, "synthesize", run_synthesize, "the target writes conversations, the users' turns too")
    command.add_argument("--num", type=positive, required=True, help="conversations that pass the filters")
    command.add_argument("--turns", type=positive, default=1, help="questions and answers per conversation")
    command.add_argument("--system", help="system message of every conversation")
    command.add_argument("--topics", metavar="FILE", help="a topic a line; the users are told to write about them")
    command.add_argument("--max-user-tokens", type=positive, default=128, help="of a user's turn")


def run_synthesize(arguments: argparse.Namespace) -> None:
    report(open_job(arguments).synthesize(arguments.num))


def add_regenerate(commands: Commands) -> None:
    command = add_writing(commands, "regenerate", run_regenerate, "the target answers the users' turns of given conversations anew")
    command.add_argument("--input", required=True, help="JSONL file, .gz too, in any of pack's shapes")


def run_regenerate(arguments: argparse.Namespace) -> None:
    report(open_job(arguments).regenerate())


def report(summary: dict[str, int]) -> None:
    """Print what became of the rows: JSON on stdout, what a person should know on stderr."""
    print(json.dumps(summary))
    if without := summary.get("without_token_ids"):
        print(
            f"{without} rows carry no token ids, because the server did not give them: pack will tokenize their text, which may not give "
            "the target's own tokens back (vLLM from 0.10.2 on, SGLang and llama.cpp give them)",
            file=sys.stderr,
        )


def add_writing(commands: Commands, name: str, run: Callable[[argparse.Namespace], None], purpose: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=purpose)
    command.add_argument("--target", required=True, help="folder or hub id of the target")
    command.add_argument("--output", required=True, help="JSONL file that rows are appended to; started again, a run goes on where it was")
    command.add_argument("--answers", choices=("greedy", "sampled"), default="greedy")
    command.add_argument("--temperature", type=float, default=1.0, help="of everything sampled")
    command.add_argument("--top-p", type=float, default=0.95, help="of everything sampled")
    command.add_argument("--max-tokens", type=positive, default=1024, help="of an answer")
    command.add_argument("--keep", nargs="+", choices=("cut", "loop", "duplicate"), default=(), help="flawed rows that stay in the output")
    command.add_argument("--chat-template-kwargs", type=json_object, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--server", metavar="URL", help="write through vLLM, SGLang or llama.cpp, e.g. http://host:8000/v1")
    command.add_argument("--concurrency", type=positive, default=64, help="conversations at a time with --server")
    command.add_argument("--batch-size", type=positive, default=256, help="conversations at a time without; more is faster while they fit")
    add_device(command)
    add_trust(command)
    command.set_defaults(run=run)
    return command


def open_job(arguments: argparse.Namespace) -> "Job":
    from common.generation.generate import Job

    return Job.open(**{name: value for name, value in vars(arguments).items() if name not in ("run", "num")})


def add_convert(commands: Commands) -> None:
    command = commands.add_parser("convert", help="a GGUF file to a folder of safetensors that everything here reads")
    command.add_argument("--gguf", required=True, metavar="FILE")
    command.add_argument("--output", required=True, help="folder to write")
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    command.set_defaults(run=run_convert)


def run_convert(arguments: argparse.Namespace) -> None:
    from common.generation.gguf import convert

    convert(arguments.gguf, arguments.output, arguments.dtype)
    print(f"{arguments.output}: written; every weight and every token is that of {arguments.gguf}")


def add_pack(commands: Commands) -> None:
    command = commands.add_parser("pack", help="JSONL conversations to token ids and loss mask")
    command.add_argument("inputs", nargs="+", help="JSONL files, .gz too, `-` for stdin: messages, conversations, prompt/completion, text")
    command.add_argument("--target", required=True, help="folder or hub id of the target, for its tokenizer and chat template")
    command.add_argument("--output", required=True, help="folder of the token store; a store that is there is replaced")
    command.add_argument("--max-tokens", type=positive, help="cut documents to this length")
    command.add_argument("--heldout", type=int, default=0, metavar="N", help="split off N conversations as a store for validation")
    command.add_argument("--heldout-output", help="its folder (default: OUTPUT-heldout)")
    command.add_argument("--chat-template-kwargs", type=json_object, default={}, help="JSON, e.g. '{\"enable_thinking\": false}'")
    command.add_argument("--split-turns", action="store_true", help="a document for each answer, behind the prompt that it is served with")
    command.add_argument("--seed", type=int, default=0, help="of the choice of held-out conversations")
    command.add_argument("--workers", type=positive, metavar="N", help="processes that tokenize (default: one a core)")
    command.add_argument("--json", nargs="?", const="-", type=json_file, help="write the summary to this file, or instead of text")
    add_trust(command)
    command.set_defaults(run=run_pack)


def run_pack(arguments: argparse.Namespace) -> None:
    from common.data.preparing import describe_counts, pack

    if arguments.json not in (None, "-"):
        check_output("--json", arguments.json)
    summary = pack(**{name: value for name, value in vars(arguments).items() if name not in ("run", "json")})
    if arguments.json == "-":
        print(json.dumps(summary, indent=1))
        return
    if arguments.json:
        with writing("--json", arguments.json):
            Path(arguments.json).write_text(json.dumps(summary, indent=1))
    for store in filter(None, (summary, summary["heldout"])):
        share = store["supervised_tokens"] / store["tokens"]
        print(f"{store['folder']}: {store['documents']:,} documents, {store['tokens']:,} tokens, {share:.1%} of them supervised")
    print(describe_counts(summary))


def add_inspect(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="what a token store holds")
    command.add_argument("store")
    command.add_argument("--document", type=int, action="append", metavar="N", help="show document N (from 0); may be repeated")
    command.add_argument("--tokenizer", metavar="FOLDER", help="default: that of the target the store was packed for")
    add_trust(command)
    command.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> None:
    from common.data.chat import Chat, load_tokenizer
    from common.data.preparing import describe_counts
    from common.data.store import TokenStore

    store = TokenStore.open(arguments.store)
    if arguments.document is None:
        print(f"{store.describe()}\n{describe_counts(store.meta.get('pack'))}")
        return
    tokenizer = arguments.tokenizer or store.meta.get("target")
    if not isinstance(tokenizer, str):
        raise UserError(f"{arguments.store} does not say for which target it was packed; name a folder with --tokenizer")
    chat = Chat(load_tokenizer(tokenizer, arguments.trust_remote_code))
    for number in arguments.document:
        if not 0 <= number < len(store):
            raise UserError(f"--document {number}: the store holds documents 0 to {len(store) - 1}")
        print(chat.show(*store.document(number), color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))


def json_file(text: str) -> str:
    if text.endswith((".jsonl", ".gz")):  # an input behind the flag would be lost
        raise ValueError
    return text


if __name__ == "__main__":
    run_script(main)
