"""YAML as a user writes it: its value, or one error in words."""

from typing import Any

import yaml

DEEPEST = 100
"""Lists and sections in brackets within each other; a config needs three."""


class _Loader(yaml.SafeLoader):
    """PyYAML looks at every open bracket again for every token: it would take seconds to find that two thousand are too many."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level == DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)


def parse(text: str) -> Any:
    """The value of a YAML text. Raises: ValueError whatever is wrong with it: PyYAML's own scalars raise by the dozen."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
