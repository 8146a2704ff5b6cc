"""The table of points."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.lab.capacity import kept
from paceline.lab.point import Point
from paceline.lab.report.curves import Look, Panel, load_of
from paceline.lab.report.text import MISSING, error_lines, milliseconds, number, percent
from paceline.lab.slo import METRICS, STATISTICS, Constraint

# Statistics shown of each metric, beside those that a constraint names.
SHOWN = {"ttft": {"p50", "p99"}, "tpot": {"p50", "p99"}, "itl": {"p99"}, "e2e": {"p50"}}

KEPT, BROKEN = "\N{CHECK MARK}", "\N{MULTIPLICATION X}"


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: str = ""
    """What it is sorted by; empty: missing, which is last."""
    kind: str = ""
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cell: Callable[[str, Point], Cell]
    """Of an engine and a point of it."""
    words: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    valid: bool
    cells: list[Cell]


def point_table(
    panel: Panel, looks: dict[str, Look], constraints: Sequence[Constraint]
) -> tuple[list[Column], list[Row]]:
    """A row for each point, by load, engines beside each other. Columns without a single value are left out."""
    points = _in_order(panel)
    columns = [Column("Engine", lambda engine, _: Cell(engine, engine, "words", looks[engine].colour), words=True)]
    columns += _load_columns()
    for metric in METRICS:
        named = {item.statistic for item in constraints if item.metric == metric}
        shown = [statistic for statistic in STATISTICS if statistic in SHOWN[metric] | named]
        columns += [_latency(metric, statistic, constraints) for statistic in shown]
        if metric == "ttft" and any(_is_late(point) for _, point in points):
            columns.append(Column("from send p99", lambda _, point: _seconds(point.ttft_from_send_s.p99)))
    columns += _rate_columns(points)
    columns += _gpu_columns()
    columns += _client_columns()
    columns = [column for column in columns if any(column.cell(*pair).value for pair in points)]
    return columns, [Row(point.valid, [column.cell(engine, point) for column in columns]) for engine, point in points]


def remarks(panel: Panel) -> list[str]:
    """Of each point that is not valid the reasons, and of valid ones what must be known."""
    found = []
    for engine, point in _in_order(panel):
        if point.valid and not point.notes and not point.errors:
            continue
        head = f"{engine}, {point.name}" + ("" if point.valid else ", not valid")
        found.append(f"{head}: {'; '.join([*point.reasons, *point.notes, *error_lines(point)])}.")
    return found


def _in_order(panel: Panel) -> list[tuple[str, Point]]:
    pairs = [(engine, point) for engine, points in panel.curves.items() for point in points]
    order = list(dict.fromkeys(load_of(point) for _, point in pairs))
    if panel.axis != "stage":
        order.sort(key=float)
    return sorted(pairs, key=lambda pair: order.index(load_of(pair[1])))


def _load_columns() -> list[Column]:
    def sent(_: str, point: Point) -> Cell:
        return _number(None if point.offered_rate is None else point.achieved_rate)

    def failed(_: str, point: Point) -> Cell:
        count = point.requests.failed
        return Cell(f"{count:,}", str(count), "no" if count else "")

    return [
        Column("Stage", lambda _, point: Cell(point.name, point.name, "words"), words=True),
        Column("Valid", _validity, words=True),
        Column("Offered/s", lambda _, point: _number(point.offered_rate)),
        Column("Sent/s", sent),
        Column("At once", lambda _, point: _number(point.batch)),
        Column(
            "Set by", lambda _, point: Cell(point.batch_kind or MISSING, point.batch_kind or "", "words"), words=True
        ),
        Column("Requests", lambda _, point: Cell(f"{point.requests.sent:,}", str(point.requests.sent))),
        Column("Failed", failed),
    ]


def _rate_columns(points: Sequence[tuple[str, Point]]) -> list[Column]:
    engines = list(dict.fromkeys(engine for engine, _ in points))
    base = {
        load_of(point): point.output_tokens_per_s for engine, point in points if engine == engines[0] and point.valid
    }

    def speed_up(_: str, point: Point) -> Cell:
        own, other = point.output_tokens_per_s, base.get(load_of(point))
        return _number(own / other if own and other and point.valid else None)

    columns = [Column("Output tokens/s", lambda _, point: _rate(point, "output_tokens_per_s"))]
    if len(engines) > 1:
        columns.append(Column(f"x {engines[0]}", speed_up))
    return [
        *columns,
        Column("Goodput/s", lambda _, point: _rate(point, "goodput_rps")),
        Column("Attainment", lambda _, point: Cell(percent(point.attainment), _key(point.attainment))),
    ]


def _gpu_columns() -> list[Column]:
    def energy(_: str, point: Point) -> Cell:
        joules = (point.gpu or {}).get("energy_j")
        return _number(joules / point.output_tokens if joules is not None and point.output_tokens else None)

    return [
        Column("GPU power (W)", lambda _, point: _number((point.gpu or {}).get("power_w"))),
        Column("GPU J/token", energy),
    ]


def _client_columns() -> list[Column]:
    def of(name: str, cell: Callable[[float | None], Cell]) -> Callable[[str, Point], Cell]:
        return lambda _, point: cell(point.client.get(name))

    return [
        Column("Client late p99", of("lateness_p99_s", _seconds)),
        Column("Client loop p99", of("loop_delay_p99_s", _seconds)),
        Column("Client CPU", of("cpu", lambda share: Cell(percent(share), _key(share)))),
        Column("Workers", of("workers", _number)),
    ]


def _latency(metric: str, statistic: str, constraints: Sequence[Constraint]) -> Column:
    limit = next((item for item in constraints if (item.metric, item.statistic) == (metric, statistic)), None)

    def cell(_: str, point: Point) -> Cell:
        value: float | None = getattr(getattr(point, f"{metric}_s"), statistic)
        text = milliseconds(value) + _plus_minus(point, f"{metric}_s.{statistic}", value)
        if limit is None or value is None:
            return Cell(text, _key(value))
        good = kept(point, limit)  # A percentile within its limit is not kept where too many requests failed.
        return Cell(f"{text} {KEPT if good else BROKEN}", _key(value), "yes" if good else "no")

    return Column(f"{metric.upper()} {statistic}", cell)


def _is_late(point: Point) -> bool:
    """Whether the client sent so late that TTFT from the actual send is another figure."""
    due, sent = point.ttft_s.p99, point.ttft_from_send_s.p99
    return due is not None and sent is not None and due - sent > max(0.001, 0.01 * due)


def _validity(_: str, point: Point) -> Cell:
    if point.valid:
        return Cell("yes, see below" if point.notes else "yes", "1", "words")
    return Cell(
        "no: " + ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in point.reasons)), "0", "words no"
    )


def _seconds(value: float | None) -> Cell:
    return Cell(milliseconds(value), _key(value))


def _number(value: float | None) -> Cell:
    return Cell(number(value), _key(value))


def _rate(point: Point, name: str) -> Cell:
    value: float | None = getattr(point, name)
    return Cell(number(value) + _plus_minus(point, name, value), _key(value))


def _plus_minus(point: Point, name: str, value: float | None) -> str:
    """Half of its interval, where it has one."""
    if not value or (interval := point.intervals.get(name)) is None:
        return ""
    return f" \N{PLUS-MINUS SIGN}{percent((interval[1] - interval[0]) / 2 / value)}"


def _key(value: float | None) -> str:
    return "" if value is None else repr(float(value))
