"""Random generators that depend on what they are for and on nothing else."""

import numpy as np

STREAM_PACK, STREAM_ORDER = 1, 2  # what a seed is used for; zero would vanish in a SeedSequence


def generator(*key):
    """A numpy generator that depends on the integers of `key` and on nothing else."""
    return np.random.default_rng(np.random.SeedSequence(key))
