"""Nested dictionaries of settings: a hash of one, the differences between two."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(tree: Any) -> str:
    """Short hash of a JSON-able object, equal on all ranks that hold equal values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, as {key: (value in one, value in other)}."""
    found = {}
    for key in sorted(set(one) | set(other)):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found
