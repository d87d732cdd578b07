"""Every key of the config in words, for `--help` and for messages."""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from common.config import Config

Families = Mapping[str, type | None]
"""Every family's name, with the dataclass of its own settings, or None."""
PLAIN: Families = {"dflash": None}
TYPE_NAMES = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null"}


def describe_keys(families: Families = PLAIN) -> str:
    """Every key with its default, its type and its meaning, for `--help`."""
    lines = ["keys, each with its default:"]
    sections = [(f.name + ".", f.type) for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)]
    for prefix, section in sections:
        lines += ["", *_describe(section, prefix)]
        for family, settings in families.items() if prefix == "drafter." else ():
            if settings is not None:
                lines += ["", f"  with drafter.family={family}:", *_describe(settings, prefix)]
    return "\n".join([*lines, "", *_describe(Config, "")])


def _describe(section: Any, prefix: str) -> Iterator[str]:
    meanings = _meanings(section)
    for f in dataclasses.fields(section):
        if f.metadata.get("hidden") or dataclasses.is_dataclass(f.type):
            continue
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}" or "''"
        yield f"  {prefix}{f.name}={shown}  ({type_name(f.type)})"
        yield from textwrap.wrap(meanings.get(f.name, ""), 112, initial_indent="      ", subsequent_indent="      ")


@functools.cache
def _meanings(section: type) -> dict[str, str]:
    """The docstrings beneath a dataclass's fields."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    found = {}
    for field, following in zip(tree.body, tree.body[1:], strict=False):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[typing.cast(ast.Name, field.target).id] = " ".join(str(following.value.value).split())
    return found


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (types.UnionType, typing.Union) else (annotation,)


def type_name(annotation: Any) -> str:
    """A type as the user reads it: its name, choices and bounds."""
    names = []
    for option in options_of(annotation):
        arguments = typing.get_args(option)
        match typing.get_origin(option):
            case typing.Literal:
                names.append(", ".join(arguments))
            case typing.Annotated:
                names.append(f"{type_name(arguments[0])} {arguments[1]}")
            case builtin if builtin is list:
                names.append(f"list of {type_name(arguments[0])}")
            case _:
                names.append(TYPE_NAMES[option])
    return " or ".join(names)
