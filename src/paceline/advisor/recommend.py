"""Which engine for a promise and a load, on how many GPUs, at what cost, and why the others lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.advisor.candidate import Candidate, Plan, candidate, measured_for
from paceline.advisor.prices import Hardware, Prices
from paceline.advisor.reasons import Case, shortfall, why_lost
from paceline.lab.capacity import capacity, capacity_found
from paceline.lab.point import Point
from paceline.lab.report.curves import axis_of, workload_of
from paceline.lab.report.engines import Engine, engines
from paceline.lab.report.text import listing, number
from paceline.lab.results import Results
from paceline.lab.search import SearchResult
from paceline.lab.slo import Constraint, parse_constraints

HEADROOM = 0.2
SIMILAR = 0.1
"""Mean lengths of two engines' requests may differ by this share before a caution says so."""


class NoAdvice(ValueError):
    """What was given does not allow a recommendation; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    currency: str
    constraints: list[str]
    target_load: float | None
    """Requests/s."""
    headroom: float
    load_unit: str
    """Of the candidates' loads: ``requests/s`` or ``requests at once``."""
    candidates: list[Candidate]
    """Best first; those that cannot be chosen last."""
    cautions: list[str]

    @property
    def choice(self) -> Candidate | None:
        """None: no engine keeps the constraints and has a price."""
        return next((item for item in self.candidates if item.qualified), None)


def recommend(
    results: Sequence[Results],
    prices: Prices,
    constraints: Sequence[Constraint] = (),
    target_load: float | None = None,
    *,
    headroom: float = HEADROOM,
    hardware: Mapping[str, Hardware] | None = None,
    workload: str | None = None,
) -> Recommendation:
    """Ranks engines by what they cost while the constraints are kept.

    Args:
        results: Runs of one workload, engines alone or together.
        constraints: Empty: those that the runs were made for.
        target_load: Requests/s. The GPUs for it are counted in whole replicas.
        headroom: Share of each replica's goodput left free, 0 to below 1.
        hardware: What a replica of each engine runs on; the key ``""`` stands for engines that are not named. Without:
            what the results name, else one of the only GPU that has a price.
        workload: Where the runs have several, the one to judge by.

    Raises:
        NoAdvice: no constraint is known, the runs have several workloads, it is not known what engines run on, or
            ``hardware`` names an engine that is none of them.
    """
    if not 0 <= headroom < 1:
        raise NoAdvice(f"headroom is {headroom}; it is a share from 0 to below 1")
    if target_load is not None and not 0 < target_load < float("inf"):
        raise NoAdvice(f"the load is {target_load}; it is a number of requests/s above 0")
    found = engines(results)
    if not found:
        raise NoAdvice("the results name no engine")
    known = {name for engine in found for name in (engine.name, engine.target.name, "")}
    if strange := sorted(set(hardware or {}) - known):
        names = listing([repr(engine.name) for engine in found])
        raise NoAdvice(f"the results have no engine {strange[0]!r} to run on a GPU; they have {names}")
    stated = {", ".join(run.constraints) for run in results if run.constraints}
    if not constraints and len(stated) != 1:
        made = f"were made for {' and for '.join(sorted(stated))}" if stated else "have none"
        raise NoAdvice(f"the constraints to keep are not known: the runs {made}; give them, like ttft_p99 < 1s")
    constraints = list(constraints) or parse_constraints(stated.pop())
    points = _points(found, workload)
    axis = "rate" if any(axis_of(point) == "rate" for chosen in points.values() for point in chosen) else "batch"
    points = {name: [point for point in chosen if axis_of(point) == axis] for name, chosen in points.items()}
    plan = Plan(target_load=target_load, headroom=headroom)
    cases = []
    for engine in found:
        machine = _hardware(engine, prices, hardware or {})
        own = points[engine.name]
        search = _search(engine, axis, constraints)
        reach = capacity(own, constraints) if search is None or workload else capacity_found(own, search)
        judged = candidate(engine.name, reach, constraints, machine, prices.of(machine.gpu), plan)
        cases.append(Case(judged, reach, own, machine))
    cases.sort(key=_rank)
    unit = "requests/s" if axis == "rate" else "requests at once"
    ranked = []
    for case in cases:
        if not case.candidate.qualified:
            ranked.append(replace(case.candidate, lost=shortfall(case, constraints, unit, axis)))
        elif case is cases[0]:
            ranked.append(case.candidate)
        else:
            ranked.append(
                replace(case.candidate, lost=why_lost(case, cases[0], constraints, plan, unit, prices.currency))
            )
    return Recommendation(
        currency=prices.currency,
        constraints=[constraint.text for constraint in constraints],
        target_load=target_load,
        headroom=headroom,
        load_unit=unit,
        candidates=ranked,
        cautions=_cautions(cases, constraints),
    )


def _points(found: Sequence[Engine], workload: str | None) -> dict[str, list[Point]]:
    """Of every engine those under a load that can be promised: not bursts."""
    points = {engine.name: [p for p in engine.points if axis_of(p) != "stage"] for engine in found}
    known = sorted({workload_of(point) for chosen in points.values() for point in chosen})
    if workload is not None and workload not in known:
        raise NoAdvice(f"no workload {workload!r}; the results have {listing(known) or 'none'}")
    if workload is None and len(known) > 1:
        raise NoAdvice(f"the results have several workloads, choose one: {listing([repr(name) for name in known])}")
    return {name: [p for p in chosen if workload in (None, workload_of(p))] for name, chosen in points.items()}


def _hardware(engine: Engine, prices: Prices, given: Mapping[str, Hardware]) -> Hardware:
    for name in (engine.name, engine.target.name, ""):
        if name in given:
            return given[name]
    if len(engine.target.gpus) == 1:
        return Hardware(engine.target.gpus[0].name, engine.target.gpus[0].count)
    if len(prices.gpu_hour) == 1:
        return Hardware(next(iter(prices.gpu_hour)))
    raise NoAdvice(
        f"what {engine.name} ran on is not known, and there are prices of several GPUs: name it, like "
        f"{engine.target.name}=1x{next(iter(prices.gpu_hour))}"
    )


def _search(engine: Engine, axis: str, constraints: Sequence[Constraint]) -> SearchResult | None:
    """The engine's search for these very constraints, if it found a load."""
    asked = {replace(item, text="") for item in constraints}
    for search in engine.searches:
        own = {replace(Constraint.parse(text), text="") for text in search.constraints}
        if search.over == axis and search.load is not None and own == asked:
            return search
    return None


def _rank(case: Case) -> tuple[bool, float, float, str]:
    item = case.candidate
    return (
        not item.qualified,
        item.ranked_cost or 0.0,
        -(item.goodput_rps or 0.0) / (item.hour_price or 1.0),  # of equal costs the one with more room
        item.engine,
    )


def _cautions(cases: Sequence[Case], constraints: Sequence[Constraint]) -> list[str]:
    found = []
    for case in cases:
        name, best = case.candidate.engine, case.reach.best
        if case.reach.invalid:
            found.append(f"{name}: points left out because they are not valid: {case.reach.invalid}.")
        if case.reach.kept_above is not None:
            found.append(f"{name}: a load above one that breaks was kept. Repeat these points.")
        if best is not None and case.reach.broken is None:
            found.append(f"{name}: no valid load broke a constraint, so it may take more than is said.")
        if best is not None and not measured_for(best, constraints):
            found.append(f"{name} was measured for other constraints: its goodput is that of completed requests.")
    bests = [(case.candidate.engine, case.reach.best) for case in cases if case.reach.best is not None]
    for engine, point in bests[1:]:
        if not _similar(point, bests[0][1]):
            found.append(
                f"{engine} and {bests[0][0]} were measured on different requests ({_lengths(point)} and "
                f"{_lengths(bests[0][1])} tokens in and out, on average): their costs are not comparable."
            )
    return found


def _similar(one: Point, other: Point) -> bool:
    pairs = zip(_means(one), _means(other), strict=True)
    return all(abs(a - b) <= SIMILAR * max(a, b) for a, b in pairs)


def _means(point: Point) -> tuple[float, float]:
    count = max(1, point.requests.ok)
    return point.prompt_tokens / count, point.output_tokens / count


def _lengths(point: Point) -> str:
    return " and ".join(number(mean) for mean in _means(point))
