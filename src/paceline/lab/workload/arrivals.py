"""Due times, and stages made of drafts that have them.

Due times are seconds from the start of the stage, absolute, the first at 0. Random ones are scaled so that their mean
rate is the one asked for, not only near it: a Poisson process becomes one of which it is known how many arrive in the
time. With the same seed, times at another rate are the same pattern at another speed, so rates can be compared.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.generator import generator
from paceline.lab.workload.invalid import InvalidWorkload

SEAT_GAP_S = 0.0001
"""Between the first sends of the seats of a closed loop: what one core of a client keeps up with."""


def burst(n: int) -> list[float]:
    """All at once."""
    return [0.0] * n


def constant(n: int, rate: float) -> list[float]:
    """``rate`` a second, evenly."""
    _positive(rate=rate)
    return [index / rate for index in range(n)]


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    """A Poisson process: independent exponential gaps with a mean of ``1 / rate``."""
    _positive(rate=rate)
    return _scaled(generator(seed, "arrivals").standard_exponential(max(0, n - 1)), n, rate)


def gamma(n: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """Independent gamma distributed gaps with a mean of ``1 / rate`` and a coefficient of variation ``cv``: 1 is a
    Poisson process, above come bursts, below it is more even."""
    _positive(rate=rate, cv=cv)
    return _scaled(generator(seed, "arrivals").standard_gamma(cv**-2, max(0, n - 1)), n, rate)


def ramp(n: int, start_rate: float, end_rate: float) -> list[float]:
    """A rate that goes evenly in time from one to the other, so that ``n`` requests end it.

    By the time t, ``start_rate * t + (end_rate - start_rate) * t^2 / 2T`` requests are due, with
    ``T = 2n / (start_rate + end_rate)``; request i is due when that is i.
    """
    _positive(start_rate=start_rate, end_rate=end_rate)
    growth = (end_rate**2 - start_rate**2) / (2 * n) if n else 0.0
    return [2 * i / (start_rate + math.sqrt(start_rate**2 + 2 * growth * i)) for i in range(n)]


def heads(drafts: Sequence[Draft]) -> list[Draft]:
    """Those that wait for no other: the ones that get a due time of their own."""
    return [draft for draft in drafts if draft.after is None]


def open_stage(
    name: str,
    drafts: Sequence[Draft],
    due: Sequence[float],
    load: Mapping[str, Any],
    *,
    offered_rate: float | None,
    deadline_s: float,
    ignore_eos: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> Stage:
    """Requests that are sent when they are due, whatever became of the others.

    Args:
        due: one time for each draft that waits for no other, in their order. The others follow theirs.
        sampling: more fields of every request's body; None: temperature 0.

    Raises:
        InvalidWorkload: due times that do not match the drafts, or not before the deadline.
    """
    first = len(heads(drafts))
    if len(due) != first:
        raise InvalidWorkload(f"due: has {len(due)} times for {first} requests")
    if due and max(due) >= deadline_s:
        raise InvalidWorkload(f"deadline_s: {deadline_s:g} s is over before the last request is due ({max(due):g} s)")
    for index, draft in enumerate(drafts):
        if draft.after is not None and not 0 <= draft.after < index:
            raise InvalidWorkload(f"request {index} follows request {draft.after}, which is not before it")
    times = iter(due)
    requests = [
        _planned(index, draft, next(times) if draft.after is None else draft.delay_s, draft.after)
        for index, draft in enumerate(drafts)
    ]
    return _stage(name, requests, load, offered_rate, None, deadline_s, ignore_eos, sampling)


def closed_stage(
    name: str,
    drafts: Sequence[Draft],
    batch: int,
    *,
    load: Mapping[str, Any] | None = None,
    deadline_s: float,
    ignore_eos: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> Stage:
    """Fixed concurrency: ``batch`` seats, and a request follows at once the one that held its seat.

    Seats start `SEAT_GAP_S` apart. Nobody can send a thousand requests at one instant: the last would be late, and that
    would count as time that the engine took.

    Seats are given out beforehand: the next request takes the one with the fewest output tokens so far, which is the
    one that becomes free first where requests advance together. A session keeps its seat through all its turns, and
    while its user thinks; the stage's requests are in order of the sessions.

    Args:
        load: for reports; None: the concurrency.

    Raises:
        InvalidWorkload: a batch below 1, or a reply that two turns follow, who would need two seats.
    """
    if batch < 1:
        raise InvalidWorkload(f"batch: must be at least 1, not {batch}")
    seats: list[tuple[int, int, int | None]] = [(0, seat, None) for seat in range(batch)]
    requests: list[PlannedRequest] = []
    for session in _sessions(drafts):
        tokens, seat, last = seats[0]
        for draft in session:
            due = draft.delay_s if draft is not session[0] else seat * SEAT_GAP_S if last is None else 0.0
            requests.append(_planned(len(requests), draft, due, last))
            last = requests[-1].id
            tokens += draft.output_tokens
        heapq.heapreplace(seats, (tokens, seat, last))
    load = load or {"kind": "concurrency", "batch": batch}
    return _stage(name, requests, load, None, batch, deadline_s, ignore_eos, sampling)


def _sessions(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """The turns of each session, in order of their first."""
    ends: dict[int, list[Draft]] = {}  # last turn so far -> its session
    sessions = []
    for index, draft in enumerate(drafts):
        if draft.after is None:
            session: list[Draft] = []
            sessions.append(session)
        elif draft.after in ends:
            session = ends.pop(draft.after)
        else:
            raise InvalidWorkload(f"batch: two turns follow request {draft.after}; replay without sessions instead")
        session.append(draft)
        ends[index] = session
    return sessions


def _planned(index: int, draft: Draft, due: float, after: int | None) -> PlannedRequest:
    return PlannedRequest(
        id=index,
        due=due,
        prompt=draft.prompt,
        output_tokens=draft.output_tokens,
        prompt_tokens=draft.prompt_tokens,
        after=after,
        needs=draft.needs,
    )


def _stage(
    name: str,
    requests: list[PlannedRequest],
    load: Mapping[str, Any],
    offered_rate: float | None,
    batch: int | None,
    deadline_s: float,
    ignore_eos: bool,
    sampling: Mapping[str, Any] | None,
) -> Stage:
    if not requests:
        raise InvalidWorkload("requests: there are none")
    return Stage(
        name=name,
        requests=requests,
        load=dict(load),
        deadline_s=deadline_s,
        offered_rate=offered_rate,
        batch=batch,
        ignore_eos=ignore_eos,
        sampling={"temperature": 0} if sampling is None else dict(sampling),
    )


def _scaled(gaps: NDArray[np.float64], n: int, rate: float) -> list[float]:
    """Rounded to nanoseconds: what a platform's logarithm does to the last bit is gone."""
    if n < 2:
        return burst(n)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        raise InvalidWorkload(f"cv: is too large for {n} requests: all would be due at once")
    return [0.0, *np.round(times * ((n - 1) / rate / times[-1]), 9).tolist()]


def _positive(**values: float) -> None:
    for key, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InvalidWorkload(f"{key}: must be above 0, not {value}")
