"""One engine, as a choice for a load: what it takes, how many GPUs that needs, what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.advisor.prices import Hardware
from paceline.lab.capacity import Capacity, load
from paceline.lab.point import Point
from paceline.lab.slo import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for, alike of every engine."""

    target_load: float | None
    """Requests/s to be served; None: replicas as full as `headroom` lets them be."""
    headroom: float
    """Share of the goodput that each replica is to keep free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Figures are None where the engine keeps the constraints at no valid load, or has no price."""

    engine: str
    hardware: Hardware
    """Of one replica."""
    hour_price: float | None
    """Of one replica."""
    highest_load: float | None
    """That keeps the constraints: offered requests/s, or requests at once."""
    broken_load: float | None
    """The lowest that breaks one."""
    goodput_rps: float | None
    """Of one replica at ``highest_load``."""
    tokens_per_request: float | None
    """Output tokens, mean."""
    replicas: int | None = None
    """For the target load."""
    gpus: int | None = None
    cost_per_hour: float | None = None
    """Of all replicas."""
    cost_per_million_tokens: float | None = None
    """Output tokens: at the target load, of all replicas; without one, of a replica full but for its headroom."""
    cost_if_higher: float | None = None
    """The same if its limit is where the lowest broken load was, and 0 if no load broke: the true cost lies between."""
    lost: str = ""
    """Why it is not the choice; empty: it is."""

    @property
    def qualified(self) -> bool:
        return self.cost_per_million_tokens is not None

    @property
    def ranked_cost(self) -> float | None:
        """What engines are ranked by: an hour at the target load, which lengths of replies cannot blur; without a
        load, a million tokens."""
        return self.cost_per_million_tokens if self.cost_per_hour is None else self.cost_per_hour


def candidate(
    engine: str,
    reach: Capacity,
    constraints: Sequence[Constraint],
    hardware: Hardware,
    gpu_hour: float | None,
    plan: Plan,
) -> Candidate:
    """Works out an engine's figures from its capacity on ``hardware`` at ``gpu_hour`` a GPU."""
    best, broken = reach.best, reach.broken
    goodput = None if best is None else goodput_of(best, constraints)
    tokens = best.output_tokens / best.requests.ok if best is not None and best.requests.ok else None
    hour = None if gpu_hour is None else gpu_hour * hardware.count
    found = Candidate(
        engine=engine,
        hardware=hardware,
        hour_price=hour,
        highest_load=None if best is None else load(best),
        broken_load=None if broken is None else load(broken),
        goodput_rps=goodput,
        tokens_per_request=tokens,
    )
    if best is None or not goodput or not tokens:
        return found
    replicas = None if plan.target_load is None else replicas_for(plan.target_load, goodput, plan.headroom)
    found = replace(found, replicas=replicas, gpus=None if replicas is None else replicas * hardware.count)
    if hour is None:
        return found
    higher = 0.0 if broken is None else _per_million(hour, goodput * _growth(best, broken), tokens, plan)
    return replace(
        found,
        cost_per_hour=None if replicas is None else replicas * hour,
        cost_per_million_tokens=_per_million(hour, goodput, tokens, plan),
        cost_if_higher=higher,
    )


def replicas_for(target_load: float, goodput: float, headroom: float) -> int:
    """The fewest whose goodput, less the headroom, adds up to the load."""
    # The rounding keeps 3 replicas 3 where the division gives 3.0000000000000004.
    return max(1, math.ceil(round(target_load / (goodput * (1 - headroom)), 9)))


def goodput_of(point: Point, constraints: Sequence[Constraint]) -> float | None:
    """Requests/s in time. Where the point was measured for other constraints, its completed requests/s stand in: it
    keeps these by their statistics, and a percentile leaves few requests out."""
    return point.goodput_rps if measured_for(point, constraints) else point.requests_per_s


def measured_for(point: Point, constraints: Sequence[Constraint]) -> bool:
    asked = {(item.metric, item.statistic, item.comparison, item.limit_s) for item in constraints}
    parsed = [Constraint.parse(text) for text in point.constraints]
    return {(item.metric, item.statistic, item.comparison, item.limit_s) for item in parsed} == asked


def _growth(best: Point, broken: Point) -> float:
    """How much more than ``best`` an engine may serve that breaks only at ``broken``, at least 1. It may take all that
    was offered; of requests at once, all that was completed."""
    if broken.offered_rate is not None:
        return load(broken) / load(best)
    if not broken.requests_per_s or not best.requests_per_s:
        return 1.0
    return max(1.0, broken.requests_per_s / best.requests_per_s)


def _per_million(hour_price: float, goodput: float, tokens_per_request: float, plan: Plan) -> float:
    if plan.target_load is None:
        hourly, rate = hour_price, goodput * (1 - plan.headroom)
    else:
        hourly, rate = hour_price * replicas_for(plan.target_load, goodput, plan.headroom), plan.target_load
    return hourly / (rate * tokens_per_request * 3600) * 1e6
