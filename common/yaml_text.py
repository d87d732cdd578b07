"""YAML as a user writes it, small and without references, by which a kilobyte can stand for a billion values: its value, or one error."""

from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1 << 18
"""Of a preset; ours have some kilobytes."""
DEEPEST = 100
"""Lists and sections in brackets within each other; a config needs three."""


class _Loader(yaml.SafeLoader):
    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """PyYAML looks at every open bracket again for every token: it would take seconds to find that two thousand are too many."""
        if self.flow_level == DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("references such as *name are not read here, write the value out")
        return super().compose_node(parent, index)


def parse(text: str) -> Any:
    """The value of a YAML text. Raises: ValueError whatever is wrong with it: PyYAML's own scalars raise by the dozen."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def read(path: Path) -> Any:
    """The value in a YAML file. Raises: OSError if it cannot be read, ValueError if it is none or too large."""
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 10} KiB")
    return parse(text.decode())
