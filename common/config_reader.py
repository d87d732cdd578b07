"""From YAML and `section.key=value` overrides to a Config: reading and checking.

Unknown keys, wrong types and contradictions raise `UserError`. A drafter family's own settings are read as further keys of the `drafter`
section: `families` maps every family's name to the dataclass of its settings, or to None.
"""

import argparse
import copy
import dataclasses
import difflib
import math
import os
import reprlib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from common import yaml_text
from common.config import BEFORE, Bounds, Config
from common.config_help import PLAIN, Families, describe_keys, options_of, type_name
from common.errors import UserError

DEFAULT_PRESET = Path(__file__).resolve().parent.parent / "launch" / "presets" / "quickstart.yaml"
PATHS = ("target.path", "data.path", "validation.path", "drafter.init", "checkpoint.resume", "log.dir")
NAME_BYTES, PATH_BYTES = 255, 4000
"""The longest name of a file and of a path that Linux takes; of a path, less what the suite writes beneath it."""


def load(path: str | Path | None = None, overrides: Sequence[str] = (), families: Families = PLAIN) -> Config:
    """Read a YAML file, apply `section.key=value` overrides and validate.

    Raises: UserError with the key, what was got and what to write.
    """
    path = Path(path or DEFAULT_PRESET)
    try:
        tree = yaml_text.read(path) or {}
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(f"--config {_plain(str(path))}: {reason}; presets are in {DEFAULT_PRESET.parent}") from None
    except ValueError as error:
        raise UserError(f"--config {_plain(str(path))} is not valid YAML: {_plain(' '.join(str(error).split()))}; mend the file") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config {path} holds a {type(tree).__name__}; it must be sections such as `target:` with keys beneath")
    data = _path_of(tree, "data")
    for override in overrides:
        _apply_override(tree, override)
    named = {override.partition("=")[0] for override in overrides}
    if "data.path" in named and "validation.path" not in named and _path_of(tree, "data") != data and _path_of(tree, "validation"):
        tree["validation"]["path"] = "auto"  # other data than the preset's have other held-out conversations: those beside them
    config = from_dict(tree, families)
    if config.log.dir is None:
        config.log.dir = f"runs/{path.stem}"
    validate(config)
    return config


def _path_of(tree: Mapping[str, Any], section: str) -> Any:
    """The `path` of a section that was read, None where there is none."""
    keys = tree.get(section)
    return keys.get("path") if isinstance(keys, dict) else None


def from_dict(tree: Mapping[str, Any], families: Families = PLAIN) -> Config:
    """Build a Config from nested dicts, refusing unknown keys, wrong types and values out of bounds."""
    tree = dict(tree)
    section, options = tree.get("drafter"), None
    if isinstance(section, dict):
        family = section.get("family", "dflash")
        if not isinstance(family, str) or family not in families:
            raise UserError(f"drafter.family={_shown(family)} is not known; use one of {', '.join(families)}{_near(family, families)}")
        if (settings := families[family]) is not None:
            names = {f.name for f in dataclasses.fields(settings)}
            options = build(settings, {key: value for key, value in section.items() if key in names}, "drafter.")
            tree["drafter"] = {key: value for key, value in section.items() if key not in names}
    config = build(Config, tree, "")
    config.drafter.options = options
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts, a family's own settings among those of the `drafter` section."""
    tree = dataclasses.asdict(config)
    tree["drafter"] |= tree["drafter"].pop("options") or {}
    return tree


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def with_defaults(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A config saved by an older release, with the keys that came later as they behaved then; keys that are gone are left out."""
    defaults: dict[str, Any] = dataclasses.asdict(Config())
    for key, value in BEFORE.items():
        section, _, name = key.partition(".")
        defaults[section][name] = value
    filled = copy.deepcopy(dict(current))
    for section, values in filled.items():
        old = saved.get(section, defaults.get(section))
        if isinstance(values, dict):
            filled[section] = {key: (old or {}).get(key, defaults.get(section, {}).get(key, value)) for key, value in values.items()}
        else:
            filled[section] = old
    return filled


def validate(config: Config) -> None:
    """Refuse contradictions that need nothing but the config itself. Raises: UserError."""
    if not config.target.path:
        raise UserError("target.path is empty: name a folder of safetensors or a hub id, e.g. target.path=Qwen/Qwen3-8B")
    if not config.data.path:
        raise UserError("data.path is empty: pack conversations first (prepare_data.py pack ... --output DIR), then data.path=DIR")
    for key in PATHS:
        section, name = key.split(".")
        _check_path(key, getattr(getattr(config, section), name))
    if (anchors := config.objective.anchors or 1) > config.data.pack_tokens:
        raise UserError(
            f"objective.anchors={anchors} exceeds data.pack_tokens={config.data.pack_tokens}: a block starts at a token; write fewer, or "
            "leave it out for a sixth of them"
        )
    layer_types, layers = config.drafter.layer_types, config.drafter.layers
    if layer_types is not None:
        if len(layer_types) != layers:
            raise UserError(
                f"drafter.layer_types={layer_types} must name full_attention or sliding_attention for each of the {layers} layers"
            )
        if "sliding_attention" in layer_types and config.drafter.window is None:
            raise UserError("drafter.layer_types has sliding_attention but drafter.window is not set; write e.g. drafter.window=4096")
    if len(config.optim.betas) != 2:
        raise UserError(f"optim.betas={config.optim.betas} must be two numbers in [0, 1), e.g. [0.9,0.95]")


def _check_path(key: str, path: str | None) -> None:
    """Refuse what cannot be the name of a file or folder, before anything looks for it. Raises: UserError."""
    if path is None:
        return
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b""
    if not name or b"\0" in name or len(name) > PATH_BYTES or max(map(len, name.split(b"/"))) > NAME_BYTES:
        raise UserError(
            f"{key}={_shown(path)} cannot be a path: it must not be empty, a name in it has at most {NAME_BYTES} bytes, all of it "
            f"{PATH_BYTES}; write a shorter one"
        )


def check_averaging(config: Config, drafters: int, key: str) -> None:
    """With several averaging drafters `key`'s steps must be averaging steps: between them the replicas differ.

    Raises: UserError naming the nearest valid values.
    """
    section, name = key.split(".")
    every, sync = getattr(getattr(config, section), name), config.sync.every
    if drafters > 1 and config.sync.mode == "average" and every % sync:
        low, high = every // sync * sync, (every // sync + 1) * sync
        advice = f"{low} or {high}" if low else f"{high}"
        raise UserError(f"{key}={every} is not a multiple of sync.every={sync}: replicas differ between averages; use {advice}")


def from_command_line(argv: Sequence[str], description: str, families: Families = PLAIN) -> Config:
    """The Config of a script that takes `--config FILE` and overrides; `--help` prints every key."""
    parser = argparse.ArgumentParser(
        description=description, epilog=describe_keys(families), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help=f"YAML file; default: {DEFAULT_PRESET.relative_to(DEFAULT_PRESET.parents[2])}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any of the keys below")
    arguments = parser.parse_intermixed_args(argv)
    return load(arguments.config, arguments.overrides, families)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {_shown(override)} has no `=`; write section.key=value, e.g. optim.lr=1e-3")
    *sections, leaf = key.split(".")
    for section in sections:
        if tree.get(section) is None:  # an empty section of a preset
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"override {_shown(override)}: {_plain(section)} is a value, not a section")
    try:
        tree[leaf] = yaml_text.parse(text)
    except ValueError:
        raise UserError(f"override {_shown(override)}: the value is not valid YAML; quote it, e.g. {_plain(key)}='\"text\"'") from None


class _Short(reprlib.Repr):
    """Values as messages show them: a document of aliases, or a number of ten thousand digits, must not fill the screen."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlist = 3, 200, 200, 64

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**40 else "(a number of more than 40 digits)"


def _shown(value: Any) -> str:
    """A value as a message shows it: as Python writes it, but short."""
    return _Short().repr(value)


def _plain(value: Any) -> str:
    """The same, of a text without quotes."""
    return value if isinstance(value, str) and len(value) <= 200 else _shown(value)


def _near(name: Any, choices: typing.Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(choices), n=1) if isinstance(name, str) and len(name) < 100 else []
    return f" (did you mean {match[0]}?)" if match else ""


def build(cls: Any, tree: Mapping[Any, Any], prefix: str) -> Any:
    """A dataclass of settings by their names, with `prefix` before them in messages. Raises: UserError for what does not fit."""
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("hidden")}
    values = {}
    for key, value in tree.items():
        if key not in fields:
            raise UserError(f"unknown key {prefix}{_plain(key)}{_near(key, fields)}; known: {', '.join(prefix + f for f in fields)}")
        annotation = fields[key].type
        if dataclasses.is_dataclass(annotation):
            if not isinstance(value or {}, dict):
                raise UserError(f"{prefix}{key} is a section; got {_shown(value)}; write {prefix}{key}.<key>=value")
            values[key] = build(annotation, value or {}, f"{prefix}{key}.")
        else:
            values[key] = _convert(value, annotation, prefix + key)
    return cls(**values)


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """The value as the annotation's type. Raises: UserError where it is none, or out of its bounds or choices."""
    for option in options_of(annotation):
        arguments, bounds = typing.get_args(option), None
        origin = typing.get_origin(option)
        if origin is typing.Annotated:
            option, bounds = arguments
        if origin is list and isinstance(value, list):
            return [_convert(v, arguments[0], f"{key}[{i}]") for i, v in enumerate(value)]
        if origin is typing.Literal and value in arguments:
            return value
        if origin is typing.Literal and option is annotation:
            raise UserError(f"{key}={_plain(value)} is not known; use one of {', '.join(arguments)}{_near(value, arguments)}")
        converted = _scalar(value, option, key) if isinstance(option, type) else None
        if converted is not None:
            if isinstance(bounds, Bounds) and not bounds.hold(converted):
                raise UserError(f"{key}={_plain(value)} must be {bounds}")
            return converted
        if option is type(None) and value is None:
            return None
    raise UserError(f"{key}={_shown(value)} must be {type_name(annotation)}")


def _scalar(value: Any, kind: type, key: str) -> Any:
    """The value as `kind`, or None if it is none."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):  # YAML reads 1e-3 as text
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        if not math.isfinite(number):
            raise UserError(f"{key}={_shown(value)} must be a finite number")
        return number
    if kind is int and isinstance(value, bool):
        return None
    return value if kind in (int, str, bool) and isinstance(value, kind) else None
