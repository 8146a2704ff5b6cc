"""Log-probabilities as the engine hands them on."""

from collections.abc import Sequence

from paceline.engine.step import TokenLogprobs
from paceline.kernels.logprobs import Logprobs


def logprob_lists(logprobs: Logprobs, tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per token; the i-th with ``tops[i]`` alternatives, of which ``logprobs`` has at least so many."""
    columns = (logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), tops, strict=True)
    return [TokenLogprobs(logprob, rank, ids[:top], values[:top]) for logprob, rank, ids, values, top in rows]
