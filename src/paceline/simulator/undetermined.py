"""Which values a least-squares fit leaves open."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Z = 1.96
LARGE = 0.3
"""Half of a 95% interval, as a share of the value, that leaves it open."""
LEAST = 0.01
"""Relative error of a duration that is to be expected, though a fit may have none."""
SINGULAR = 1e-6
"""Singular values below this share of the largest are none."""


def undetermined(columns: Floats, rests: Floats, values: Floats) -> NDArray[np.bool_]:
    """Of each value whether the equations ``columns @ values = target`` leave it open: it is in none of them, or only
    together with others, or its 95% interval reaches further than a third of it.

    The intervals hold however the errors of the equations differ (White, 1980).

    Args:
        columns: [equations, values].
        rests: [equations], what is left of each at these values, or what is to be expected.
        values: [values].
    """
    found = np.ones(len(values), dtype=np.bool_)
    norms = np.linalg.norm(columns, axis=0)
    seen = norms > 0
    if len(rests) <= seen.sum() or not seen.any():
        return found
    left, sizes, right = np.linalg.svd(columns[:, seen] / norms[seen], full_matrices=False)
    known = sizes > SINGULAR * sizes[0]
    spread = (right[known].T / sizes[known]) @ (left[:, known] * rests[:, None]).T
    half = Z * np.linalg.norm(spread, axis=1) / norms[seen]
    mixed = (right[~known] ** 2).sum(axis=0) > SINGULAR
    found[seen] = mixed | (half > LARGE * np.abs(values[seen]))
    return found
