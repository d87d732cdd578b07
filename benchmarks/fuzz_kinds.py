"""What benchmarks/fuzz.py tries, a function for each kind of file or answer that a user can be given.

Each is given an empty folder and returns a function that draws a case, tries it, and raises what comes of it.
"""

import contextlib
import http.server
import json
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.hostile import PIECES, damage, hostile_json
from common import config_help, config_reader
from common.config import DrafterConfig
from common.data.chat import Chat, load_tokenizer
from common.data.conversations import Rejected
from common.data.preparing import describe_counts
from common.data.prompts import messages_of
from common.data.store import TokenStore
from common.data.tokenizing import LineTokenizer
from common.decoding.speculate import load_drafter
from common.drafter.export import read_feature_dtype
from common.drafter.mask_token import mask_token
from common.errors import UserError
from common.families.registry import FAMILIES, check, family_options, resolve_spec
from common.families.start import make_drafter
from common.generation.backends import Request, Sampling
from common.generation.conversation_file import ConversationFile
from common.generation.server import ServerBackend
from common.target.files import Tensors, read_spec
from common.target.loading import load_causal_lm
from common.target.meta import UnknownSize, target_size
from common.trees import digest

QUICKSTART = Path(__file__).resolve().parent.parent / "launch" / "quickstart"
REFUSED = (UserError, Rejected, UnknownSize)

Case = Callable[[random.Random], None]
"""Draws a case and tries it."""


def overrides(folder: Path) -> Case:
    """Values of real keys on the command line."""
    keys = [line.split("=")[0].strip() for line in config_help.describe_keys(family_options()).splitlines() if "  (" in line]

    def case(draw: random.Random) -> None:
        given = [f"{draw.choice(keys)}={_yaml(draw)}" for _ in range(draw.randint(1, 2))]
        config_reader.to_yaml(config_reader.load(None, given, family_options()))

    return case


def presets(folder: Path) -> Case:
    """YAML files for --config."""
    presets = [path.read_text() for path in config_reader.DEFAULT_PRESET.parent.glob("*.yaml")]

    def case(draw: random.Random) -> None:
        text = draw.choice(presets)
        at = draw.randrange(len(text))
        text = draw.choice((text[:at] + _yaml(draw) + text[at + draw.randint(0, 9) :], "optim:\n  " + _yaml(draw), _yaml(draw)))
        (folder / "preset.yaml").write_bytes(text.encode(errors="replace"))
        config_reader.to_yaml(config_reader.load(folder / "preset.yaml", (), family_options()))

    return case


def _yaml(draw: random.Random) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 8)))


def target(folder: Path) -> Case:
    """config.json and generation_config.json of a target, and now and then its tensors."""
    config, generation = (json.loads((QUICKSTART / "target" / name).read_text()) for name in ("config.json", "generation_config.json"))
    (folder / "model.safetensors").symlink_to(QUICKSTART / "target" / "model.safetensors")

    def case(draw: random.Random) -> None:
        (folder / "config.json").write_bytes(hostile_json(config, draw))
        (folder / "generation_config.json").write_bytes(hostile_json(generation, draw) if draw.random() < 0.2 else b"{}")
        spec = read_spec(folder)
        resolve_spec(DrafterConfig(layers=2, taps=[1, 3]), spec, folder)
        target_size(folder, 4)
        if draw.random() < 0.3:
            assert spec.vocabulary
            load_causal_lm(folder, torch.float32, torch.device("cpu"), "target.path")

    return case


def tensors(folder: Path) -> Case:
    """A target's safetensors."""
    whole = (QUICKSTART / "target" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8:begin]), whole[begin:]
    shutil.copy(QUICKSTART / "target" / "config.json", folder)

    def case(draw: random.Random) -> None:
        text = hostile_json(header, draw)
        size = len(text) if draw.random() < 0.8 else draw.choice((0, 1, len(text) * 2, 1 << 40, (1 << 64) - 1))
        data = size.to_bytes(8, "little") + text + body[: draw.choice((len(body), len(body) // 2, 0))]
        (folder / "model.safetensors").write_bytes(damage(data, draw) if draw.random() < 0.1 else data)
        read_spec(folder)
        found = Tensors(folder)
        for name in found.names():
            found.shape(name)
        load_causal_lm(folder, torch.float32, torch.device("cpu"), "target.path")

    return case


def tokenizer(folder: Path) -> Case:
    """tokenizer.json, tokenizer_config.json and a chat template."""
    shutil.copytree(QUICKSTART / "target", folder, dirs_exist_ok=True)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    texts = [(folder / names[0]).read_text(), (folder / names[1]).read_text()]
    texts += ['{"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}', '{"<|x|>": 1024}']
    trees = [json.loads(text) for text in texts]
    trees[0]["model"]["vocab"] = dict(list(trees[0]["model"]["vocab"].items())[:40])  # else nearly all mutations would be of a word's id
    trees[0]["model"]["merges"] = []
    spec, store = read_spec(folder), TokenStore.open(QUICKSTART / "heldout")
    messages = [{"role": "user", "content": "What<|im_end|> is it?"}, {"role": "assistant", "content": "A light."}]

    def case(draw: random.Random) -> None:
        changed = draw.sample(range(4), draw.randint(1, 2))
        for i, name in enumerate(names):
            if i in changed:
                (folder / name).write_bytes(hostile_json(trees[i], draw))
            elif i < 2:
                (folder / name).write_text(json.dumps(trees[i]))
            else:
                (folder / name).unlink(missing_ok=True)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if draw.random() < 0.1:
            (folder / "chat_template.jinja").write_bytes(damage(trees[1]["chat_template"].encode(), draw))
        for step in (
            lambda: mask_token(draw.choice(("auto", "<|x|>", 1000)), spec, folder, store.used_ids),
            lambda: store.check_target(folder, spec.vocab_size),
        ):
            with contextlib.suppress(*REFUSED):
                step()
        chat = Chat(load_tokenizer(folder))
        (found,) = chat.documents([{"messages": messages}])
        assert chat.template_digest and chat.vocabulary_digest and chat.vocab_size > 0
        for document in () if isinstance(found, Rejected) else found.documents:
            chat.show(*document, color=False)
        chat.prompt(messages[:1])

    return case


def drafter(folder: Path) -> Case:
    """config.json of an exported drafter of any family, and of one in the speculators format."""
    spec, trees = read_spec(QUICKSTART / "target"), {}
    for name, settings in family_options().items():
        config = DrafterConfig(family=name, layers=2, taps=[1, 3], dtype="float32", options=settings and settings())
        made = make_drafter(config, resolve_spec(config, spec, QUICKSTART / "target"), QUICKSTART / "target", "cpu", seed=0)
        weights = {name: parameter.detach() for name, parameter in made.named_parameters()}
        FAMILIES[name].export(folder / name, weights, made.spec, spec, "bfloat16", "bfloat16")
        trees[folder / name] = json.loads((folder / name / "config.json").read_text())
    plain = trees[folder / "dflash"]
    theirs = {"speculators_model_type": "dflash", "transformer_layer_config": plain, "aux_hidden_state_layer_ids": [2, 4], "block_size": 16}
    theirs |= {"mask_token_id": plain["dflash_config"]["mask_token_id"], "draft_vocab_size": plain["vocab_size"]}
    trees[shutil.copytree(folder / "dflash", folder / "speculators")] = theirs

    def case(draw: random.Random) -> None:
        place = draw.choice(list(trees))
        (place / "config.json").write_bytes(hostile_json(trees[place], draw))
        for step in (
            lambda: check(place, spec).lines(),
            lambda: read_feature_dtype(place),
            lambda: resolve_spec(DrafterConfig(layers=2, taps=[1, 3], init=str(place)), spec, QUICKSTART / "target"),
        ):
            with contextlib.suppress(*REFUSED):
                step()
        load_drafter(place, torch.float32, torch.device("cpu")).spec.validate(spec)

    return case


def store(folder: Path) -> Case:
    """meta.json of a token store, its own digest put right in most cases."""
    shutil.copytree(QUICKSTART / "heldout", folder, dirs_exist_ok=True)
    tree = json.loads((folder / "meta.json").read_text())

    def case(draw: random.Random) -> None:
        data = hostile_json(tree, draw)
        with contextlib.suppress(ValueError, RecursionError):
            meta = json.loads(data)
            if isinstance(meta, dict) and draw.random() < 0.9:
                meta.pop("digest", None)
                data = json.dumps(meta | {"digest": digest(meta)}).encode()
        (folder / "meta.json").write_bytes(data)
        opened = TokenStore.open(folder)
        assert len(opened) and opened.describe() and opened.fingerprint
        describe_counts(opened.meta.get("pack"))
        opened.check_target(QUICKSTART / "target", 1024)
        opened.document(draw.randrange(len(opened)))

    return case


def conversations(folder: Path) -> Case:
    """Lines of JSONL, with written ids and without."""
    lines = LineTokenizer(str(QUICKSTART / "target"), {}, 256, 0)
    said = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A light."}]
    shapes = [
        {"messages": said, "tools": [{"type": "function"}], "id": "a"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "You"}]},
        {"prompt": "Hi", "completion": "You"},
        {"messages": said, "token_ids": {"template_digest": lines.chat.template_digest, "vocabulary_digest": lines.chat.vocabulary_digest,
         "conversation_digest": digest([said, None]), "sequences": [{"ids": [5, 6, 7, 2], "answers": [[1, 4]]}]}},
        {"text": "All of it."},
    ]  # fmt: skip

    def case(draw: random.Random) -> None:
        line = hostile_json(draw.choice(shapes), draw)
        lines(([line], draw.random() < 0.5))
        with contextlib.suppress(ValueError, RecursionError):
            lines.chat.prompt(messages_of(json.loads(line)))

    return case


def reply(folder: Path) -> Case:
    """What a server answers, on a real connection."""
    tokenizer, answer = load_tokenizer(QUICKSTART / "target"), b""
    usage = {"completion_tokens": 2, "prompt_tokens": 3}
    completion = {"choices": [{"text": "A light.", "token_ids": [5, 2], "finish_reason": "stop", "matched_stop": 2}], "usage": usage}
    models = {"object": "list", "data": [{"id": "tiny", "owned_by": "somebody", "max_model_len": 9}]}
    llama = {"content": "A light.", "tokens": [5, 2], "stop_type": "eos", "tokens_predicted": 2}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"

    def give(tree: Any, draw: random.Random | None) -> None:
        nonlocal answer
        body = json.dumps(tree).encode() if draw is None else hostile_json(tree, draw)
        status = b"200" if draw is None or draw.random() < 0.9 else draw.choice((b"302", b"404", b"429", b"500", b"99", b"x"))
        head = b"HTTP/1.1 %s OK\r\nContent-Length: %d\r\nRetry-After: 9\r\n\r\n" % (status, len(body))
        answer = head + body
        if draw is not None and draw.random() < 0.1:
            answer = damage(answer, draw)

    def case(draw: random.Random) -> None:
        kind = draw.randrange(3)
        models["data"][0]["owned_by"] = "llamacpp" if kind == 2 else "somebody"
        give(models, draw if kind == 0 else None)
        backend = ServerBackend(url, tokenizer, 1, retries=0, timeout_s=0.2)
        give(llama if kind == 2 else completion, draw)
        written = backend.write(Request((1, 2), Sampling(0, 1, 8), (2,), 0))
        row = {"id": "a", "messages": [{"role": "assistant", "content": written.text}], "cut": written.cut, "tokens": written.tokens}
        with (
            tempfile.TemporaryDirectory(dir=folder) as place,
            contextlib.closing(ConversationFile(f"{place}/o.jsonl", {}, tokenizer)) as file,
        ):
            file.add([("a", row | {"token_ids": written.ids})])

    return case


def output(folder: Path) -> Case:
    """A JSONL file that an earlier run of synthesize or regenerate left."""
    tokenizer = load_tokenizer(QUICKSTART / "target")
    rows: list[Any] = [{"id": f"{i:08d}", "messages": [{"role": "user", "content": f"{i}"}], "cut": False, "tokens": 1} for i in range(3)]
    settings: dict[str, Any] = {"target": "a", "answer": {"temperature": 0.0, "top_p": 1.0}, "seed": 0}

    def lines(draw: random.Random) -> bytes:
        return b"".join((hostile_json(row, draw) if draw.random() < 0.4 else json.dumps(row).encode()) + b"\n" for row in rows)

    def case(draw: random.Random) -> None:
        path = folder / "out.jsonl"
        path.write_bytes(lines(draw))
        (folder / "out.jsonl.rejected.jsonl").write_bytes(lines(draw) if draw.random() < 0.3 else b"")
        marker = folder / "out.jsonl.settings.json"
        marker.write_bytes(hostile_json(settings, draw) if draw.random() < 0.2 else json.dumps(settings).encode())
        with contextlib.closing(ConversationFile(path, settings, tokenizer)) as file:
            file.add([("b", rows[0] | {"id": "b"})])
            assert file.summary()

    return case


KINDS: dict[str, Callable[[Path], Case]] = {
    kind.__name__: kind for kind in (overrides, presets, target, tensors, tokenizer, drafter, store, conversations, reply, output)
}
