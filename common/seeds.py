"""Random generators: what is drawn depends on the seed and on what it is for, and on nothing else."""

import hashlib

import numpy as np


def generator(purpose: str, *key: int) -> np.random.Generator:
    """A numpy generator of its own for every purpose and key, e.g. `generator("anchors", seed, packet)`: no two share their numbers."""
    name = "/".join([purpose, *map(str, key)])
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest()))
