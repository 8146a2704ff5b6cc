"""From the sampling parameters of rows to the tensors that the sampler reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart
from paceline.kernels.sampling import (
    AllowedTokens,
    FilteredRows,
    Penalties,
    RandomRows,
    SamplingBatch,
    TokenBans,
    TokenBias,
)


def sampling_batch(starts: Sequence[RowStart], vocab_limit: int, device: torch.device | str = "cpu") -> SamplingBatch:
    """Tensors for a batch whose row ``i`` samples as ``starts[i]`` says. They hold until the rows change.

    Ids from ``vocab_limit`` on are left out: they are never sampled, and a stray one cannot reach another row's logits.
    """
    params = [start.params for start in starts]
    filtered = [i for i, p in enumerate(params) if not p.greedy and filters(p, vocab_limit)]
    random = [i for i, p in enumerate(params) if not p.greedy and not filters(p, vocab_limit)]
    return SamplingBatch(
        vocab_limit=vocab_limit,
        random=_random(starts, random, device) if random else None,
        filtered=_filtered(starts, filtered, vocab_limit, device) if filtered else None,
        bias=_bias(params, vocab_limit, device),
        allowed=_allowed(params, vocab_limit, device),
        bans=_bans(starts, vocab_limit, device),
        penalties=_penalties(params, device),
    )


def filters(params: SamplingParams, vocab_limit: int) -> bool:
    """Whether top_k, top_p or min_p leave anything out."""
    return 0 < params.top_k < vocab_limit or params.top_p < 1 or params.min_p > 0


def banned_ids(start: RowStart, vocab_limit: int) -> list[int]:
    """Ids that must not be sampled before ``min_tokens``."""
    params = start.params
    if params.min_tokens == 0:
        return []
    banned = known_ids(start.stop_ids, vocab_limit)
    allowed = known_ids(params.allowed_token_ids, vocab_limit)
    others = set(allowed) - set(banned) if params.allowed_token_ids else len(banned) < vocab_limit
    # Where nothing but stop ids may be sampled, the reply ends early: it cannot go on.
    return banned if others else []


def _ints(values: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _floats(values: Sequence[float], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _random(starts: Sequence[RowStart], rows: list[int], device: torch.device | str) -> RandomRows:
    return RandomRows(
        rows=_ints(rows, device),
        temperature=_floats([starts[row].params.temperature for row in rows], device)[:, None],
        seed=_ints([starts[row].seed for row in rows], device),
        candidate=_ints([starts[row].candidate for row in rows], device),
    )


def _filtered(
    starts: Sequence[RowStart], rows: list[int], vocab_limit: int, device: torch.device | str
) -> FilteredRows:
    params = [starts[row].params for row in rows]
    top_p = [p.top_p if p.top_p < 1 else math.inf for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab_limit else vocab_limit for p in params]
    plain = _random(starts, rows, device)
    return FilteredRows(
        rows=plain.rows,
        temperature=plain.temperature,
        seed=plain.seed,
        candidate=plain.candidate,
        top_k=_ints(top_k, device)[:, None],
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
        min_p=_floats([p.min_p for p in params], device)[:, None],
        needs_mass=any(p.top_p < 1 and k == vocab_limit for p, k in zip(params, top_k, strict=True)),
    )


def _bias(params: Sequence[SamplingParams], vocab_limit: int, device: torch.device | str) -> TokenBias | None:
    entries = [
        (row, token, value)
        for row, p in enumerate(params)
        for token, value in p.logit_bias.items()
        if 0 <= token < vocab_limit
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return TokenBias(
        rows=_ints(rows, device),
        ids=_ints(ids, device),
        values=_floats(values, device),
    )


def _allowed(params: Sequence[SamplingParams], vocab_limit: int, device: torch.device | str) -> AllowedTokens | None:
    rows = [row for row, p in enumerate(params) if p.allowed_token_ids]
    if not rows:
        return None
    mask = torch.zeros(len(rows), vocab_limit, dtype=torch.bool)
    for index, row in enumerate(rows):
        mask[index, known_ids(params[row].allowed_token_ids, vocab_limit)] = True
    return AllowedTokens(rows=_ints(rows, device), mask=mask.to(device))


def _bans(starts: Sequence[RowStart], vocab_limit: int, device: torch.device | str) -> TokenBans | None:
    entries = []
    for row, start in enumerate(starts):
        entries += [
            (row, token, start.prompt_len + start.params.min_tokens) for token in banned_ids(start, vocab_limit)
        ]
    if not entries:
        return None
    rows, ids, until = zip(*entries, strict=True)
    return TokenBans(rows=_ints(rows, device), ids=_ints(ids, device), until=_ints(until, device))


def _penalties(params: Sequence[SamplingParams], device: torch.device | str) -> Penalties | None:
    if not any(p.penalises for p in params):
        return None
    return Penalties(
        presence=_floats([p.presence_penalty for p in params], device),
        frequency=_floats([p.frequency_penalty for p in params], device),
        repetition=_floats([p.repetition_penalty for p in params], device),
    )


def known_ids(ids: Sequence[int], vocab_limit: int) -> list[int]:
    """``ids`` below the limit, each once, ascending."""
    return sorted({token for token in ids if 0 <= token < vocab_limit})
