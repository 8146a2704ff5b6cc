"""One plain sentence on why an engine was not chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.advisor.candidate import Candidate, Plan
from paceline.advisor.prices import Hardware
from paceline.lab.capacity import Capacity, keeps, load
from paceline.lab.point import Point
from paceline.lab.report.text import listing, number
from paceline.lab.report.verdicts import breach
from paceline.lab.slo import Constraint

SAME = 0.005
"""Costs that differ by less than this share are told as the same."""


@dataclass(frozen=True, slots=True)
class Case:
    """A candidate and what speaks for and against it."""

    candidate: Candidate
    reach: Capacity
    points: list[Point]
    hardware: Hardware


def shortfall(case: Case, constraints: Sequence[Constraint], unit: str, axis: str) -> str:
    """Why it cannot be chosen at all."""
    names = listing([constraint.text for constraint in constraints])
    if not case.points:
        loads = "request rates" if axis == "rate" else "numbers of requests at once"
        return f"It was not measured under {loads}, so there is no load that it can promise."
    if not case.reach.valid:
        reason = next((point.reasons[0] for point in case.points if point.reasons), "no reason is given")
        return f"None of its points is valid ({reason})."
    if case.reach.best is None:
        broken = case.reach.broken
        if broken is None:
            return f"No valid point shows a load at which it keeps {names}."
        return f"It keeps {names} at no load measured: at {number(load(broken))} {unit} {breach(broken, constraints)}."
    if case.candidate.hour_price is None:
        return f"There is no price for the GPU it ran on, {case.hardware.gpu}."
    return "How many tokens it made is not known, so there is no cost of them."


def why_lost(case: Case, winner: Case, constraints: Sequence[Constraint], plan: Plan, unit: str, currency: str) -> str:
    """Why another that can be chosen is better."""
    own, best = case.candidate, winner.candidate
    cost, least = own.ranked_cost, best.ranked_cost
    assert cost is not None
    assert least is not None
    same = cost <= least * (1 + SAME)
    if own.broken_load is None:
        costs = f"as much as {best.engine}" if same else f"{_ratio(cost / least)} what {best.engine} costs"
        return (
            f"Its limit is not known: it kept every valid load, up to {number(own.highest_load)} {unit}. By that it "
            f"costs {costs}; measure higher loads."
        )
    if same:
        rooms = number(best.goodput_rps), number(own.goodput_rps)
        if rooms[0] == rooms[1]:
            return f"It costs as much as {best.engine} and has as much room: {rooms[0]} requests/s a replica."
        return (
            f"It costs as much as {best.engine}, which has more room: {' against '.join(rooms)} requests/s a replica."
        )
    if not _told_apart(case, winner):
        return (
            f"Indistinguishable from {best.engine} by these loads: {_span(own)} {currency} a million tokens "
            f"against {_span(best)}."
        )
    text = f"It costs {_ratio(cost / least)} what {best.engine} costs"
    if plan.target_load is not None and own.gpus != best.gpus:
        text += f" and needs {own.gpus} GPUs instead of {best.gpus}"
    return f"{text}: {_cause(case, winner, constraints, unit)}."


def _told_apart(case: Case, winner: Case) -> bool:
    """Whether the engine costs more even if its limit is just below the load that broke it."""
    own, best = case.candidate, winner.candidate
    assert own.cost_if_higher is not None
    assert best.cost_per_million_tokens is not None
    broken = case.reach.broken
    if broken is not None and broken.offered_rate is not None:
        # By the rates alone: goodput has noise that would blur limits which touch.
        assert own.hour_price is not None
        assert best.hour_price is not None
        assert best.highest_load is not None
        return own.hour_price / broken.offered_rate >= best.hour_price / best.highest_load * (1 - 1e-9)
    return own.cost_if_higher >= best.cost_per_million_tokens


def _cause(case: Case, winner: Case, constraints: Sequence[Constraint], unit: str) -> str:
    own, best = case.candidate, winner.candidate
    there = [p for p in case.points if p.valid and load(p) == best.highest_load and not keeps(p, constraints)]
    if there:
        return f"at {number(best.highest_load)} {unit}, which {best.engine} keeps, its {breach(there[0], constraints)}"
    assert own.goodput_rps is not None
    assert best.goodput_rps is not None
    if own.goodput_rps < best.goodput_rps:
        return f"a replica has a goodput of {number(own.goodput_rps)} against {number(best.goodput_rps)} requests/s"
    assert own.hour_price is not None
    assert best.hour_price is not None
    return (
        f"an hour of a replica ({own.hardware}) costs {_ratio(own.hour_price / best.hour_price)} as much, for "
        f"{_ratio(own.goodput_rps / best.goodput_rps)} the goodput"
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _span(item: Candidate) -> str:
    if item.broken_load is None:
        return f"at most {number(item.cost_per_million_tokens)}"
    return f"{number(item.cost_if_higher)} to {number(item.cost_per_million_tokens)}"
