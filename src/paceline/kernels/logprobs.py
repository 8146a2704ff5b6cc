"""Log-probabilities of given tokens and of the most likely ones."""

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.ranking import ranked

LOGPROB_ROWS = 64
"""Rows whose logits callers hold in float32 at the same time."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of N tokens."""

    logprob: Tensor
    """float32 ``[N]``."""
    rank: Tensor
    """int64 ``[N]``: 1 plus the number of tokens with a strictly greater logit."""
    top_ids: Tensor
    """int64 ``[N, top]``, by (logit descending, id ascending)."""
    top_logprobs: Tensor
    """float32 ``[N, top]``."""


def token_logprobs(logits: Tensor, ids: Tensor, top: int, vocab_limit: int) -> Logprobs:
    """Log-probabilities from raw logits.

    Takes several times the memory of ``logits``: the caller hands in a bounded number of rows at a time.

    Args:
        logits: float32 ``[N, V]``, finite.
        ids: int64 ``[N]``, below V.
        top: alternatives to report; 0 for none.
        vocab_limit: ids from here on are padding of the head. They count in the normaliser, as in training, but are
            no alternatives and have no rank.
    """
    logprobs = logits.log_softmax(-1)
    tokens = logits[:, :vocab_limit]
    rank = (tokens > logits.gather(-1, ids[:, None])).sum(-1) + 1
    _, top_ids = ranked(tokens, min(top, vocab_limit)) if top else (None, ids.new_empty(len(ids), 0))
    return Logprobs(logprobs.gather(-1, ids[:, None])[:, 0], rank, top_ids, logprobs.gather(-1, top_ids))
