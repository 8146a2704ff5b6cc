"""Gaps between the tokens of a reply (ITL)."""

import numpy as np

from paceline.lab.record import RequestRecord
from paceline.lab.statistics import Floats

NONE: Floats = np.empty(0)


def count_known(record: RequestRecord) -> bool:
    """Whether the tokens of each delta are known: counted by the server, or one each and as many as the usage says."""
    return record.counted or record.output_tokens == len(record.deltas)


def gaps(record: RequestRecord) -> Floats:
    """Seconds between deltas, each divided by the tokens of the later delta and repeated for each of them.

    Empty for a failed request, for one delta, and where the tokens of the deltas are not known.
    """
    if not record.ok or len(record.deltas) < 2 or not count_known(record):
        return NONE
    table = np.array(record.deltas, dtype=np.float64)
    tokens = table[1:, 1].astype(np.int64)
    return np.repeat(np.diff(table[:, 0]) / np.maximum(tokens, 1), np.maximum(tokens, 0))
