"""The report's file, read as text: what it says, and that it needs nothing else."""

import html
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from lab.measured import NONE, SLO, invalid, log, point, rate_sweep, results, statistics
from paceline.lab.gpu_watch import Gpus
from paceline.lab.point import Counts, Point, Statistics
from paceline.lab.record import RequestRecord
from paceline.lab.report import write_report
from paceline.lab.report.requests import SLOWEST, STEPS, open_requests, thinned
from paceline.lab.search import SearchResult

RATES = [1.0, 3.0, 5.0, 6.0, 7.0, 8.0]
LAST = "2026-11-30T13:00:00+00:00"


class Elements(HTMLParser):
    """All start tags with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def written(tmp_path: Path, runs: list[Any], logs: list[Any] | None = None) -> str:
    out = tmp_path / "report.html"
    write_report(runs, logs or [], out)
    assert out.stat().st_size < 6e6
    return out.read_text()


def data_of(text: str) -> Any:
    match = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text)
    assert match
    return json.loads(match[1])


def verdicts_of(text: str) -> list[str]:
    items = re.findall(r'<li class="(?:kept|broken|neutral)">(.*?)</li>', text)
    return [html.unescape(re.sub("<.*?>", "", item)) for item in items]


def rows_of(text: str) -> list[list[str]]:
    rows = re.findall(r"<tr(?: class=\"invalid\")?>(.*?)</tr>", text, re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in cells if row]


def traces(text: str, chart: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in reversed(data_of(text)["charts"][chart]["data"])}


def test_two_engines_side_by_side(tmp_path: Path) -> None:
    text = written(tmp_path, [results(rate_sweep("paceline", RATES, 7) + rate_sweep("vllm", RATES, 5))])
    assert verdicts_of(text) == [
        "paceline keeps ttft_p99 < 1s and tpot_p99 < 20ms up to 7 requests/s (goodput 6.76 requests/s, 869 output "
        "tokens/s); at 8 TTFT p99 is 6.21 s, over the limit of 1 s.",
        "vllm keeps ttft_p99 < 1s and tpot_p99 < 20ms up to 5 requests/s (goodput 4.83 requests/s, 621 output "
        "tokens/s); at 6 TTFT p99 is 6.9 s, over the limit of 1 s.",
        "paceline and vllm differ: paceline takes 1.17x to 1.60x the load; the limit of paceline lies between 7 and 8 "
        "requests/s, that of vllm between 5 and 6.",
    ]
    assert [row[:2] for row in rows_of(text)[:2]] == [["paceline", "rate=1"], ["vllm", "rate=1"]]
    assert len(rows_of(text)) == 12
    ttft = data_of(text)["charts"]["chart-0-ttft"]
    assert [shape["y0"] for shape in ttft["layout"]["shapes"]] == [1000]
    assert traces(text, "chart-0-ttft")["vllm"]["x"] == RATES


def test_limits_within_the_same_loads_are_indistinguishable(tmp_path: Path) -> None:
    text = written(tmp_path, [results(rate_sweep("paceline", RATES, 6.2) + rate_sweep("vllm", RATES, 6.5))])
    assert verdicts_of(text)[-1] == (
        "paceline and vllm are indistinguishable in load: the limit of paceline lies between 6 and 7 requests/s, that "
        "of vllm between 6 and 7."
    )


def test_an_engine_that_no_load_broke(tmp_path: Path) -> None:
    text = written(tmp_path, [results(rate_sweep("paceline", [1, 2], 7) + rate_sweep("vllm", [1, 2, 3], 2))])
    found = verdicts_of(text)
    assert "the highest valid load measured: none was high enough to break them" in found[0]
    assert (
        "indistinguishable in load: the limit of paceline lies above 2 requests/s, that of vllm between 2 and 3"
        in found[2]
    )


def test_points_that_are_not_valid_are_shown_as_such_and_decide_nothing(tmp_path: Path) -> None:
    points = rate_sweep("paceline", RATES, 5)
    points[3:] = [invalid(item, "lateness: sent 9 ms late", "loop: busy <script>") for item in points[3:]]
    text = written(tmp_path, [results(points)])
    assert "up to 5 requests/s" in verdicts_of(text)[0]
    assert "none was high enough to break them" in verdicts_of(text)[0]
    assert [row[2] for row in rows_of(text)] == ["yes"] * 3 + ["no: lateness, loop"] * 3
    assert "paceline, rate=8, not valid: lateness: sent 9 ms late; loop: busy &lt;script&gt;." in text
    assert traces(text, "chart-0-ttft")["paceline"]["x"] == RATES[:3]
    assert traces(text, "chart-0-ttft")["paceline, not valid"]["x"] == RATES[3:]


def test_only_points_that_are_not_valid(tmp_path: Path) -> None:
    text = written(tmp_path, [results([invalid(point(rate=1.0), "empty: no request was completed")])])
    assert verdicts_of(text) == [
        "paceline has no verdict, for none of its points is valid (empty: no request was completed)."
    ]


def test_missing_values(tmp_path: Path) -> None:
    """failure 98"""
    points = [point(rate=1.0, tpot=None, tokens=1), point("vllm", rate=1.0, ttft=None, tpot=None)]
    text = written(tmp_path, [results(points)])
    assert verdicts_of(text)[0] == (
        "paceline keeps ttft_p99 < 1s and tpot_p99 < 20ms at no load measured: at 1 requests/s TPOT p99 could not be "
        "measured."
    )
    assert "chart-0-tpot" not in data_of(text)["charts"]
    assert NONE.mean is None
    assert rows_of(text)[1].count("\N{EN DASH}") >= 3


def test_a_limit_that_failures_break_says_so(tmp_path: Path) -> None:
    """The p99 of those completed is within the limit, and was measured."""
    kept = {"ttft_p99 < 1s": False, "tpot_p99 < 20ms": True}
    some = point(rate=2.0, constraints=kept, requests_per_s=2.0)
    points = {
        "5 of 512 requests failed": replace(some, requests=Counts(512, 507, 5)),
        "some replies have none": some,
    }
    for why, broken in points.items():
        text = written(tmp_path, [results([point(rate=1.0), broken])])
        assert verdicts_of(text)[0].endswith(
            f"; at 2 TTFT p99 is 300 ms where it was measured, but {why}, and counting them too few keep it."
        )
        first, second = rows_of(text)
        assert "300 \N{CHECK MARK}" in first
        assert "300 \N{MULTIPLICATION X}" in second
    none = point(rate=2.0, ttft=None, tpot=None)
    text = written(tmp_path, [results([point(rate=1.0), none])])
    assert verdicts_of(text)[0].endswith("; at 2 TTFT p99 could not be measured: all 512 requests failed.")


def test_nothing_was_measured(tmp_path: Path) -> None:
    assert verdicts_of(written(tmp_path, [results([])])) == ["No verdict: no point was measured."]
    assert verdicts_of(written(tmp_path, [])) == ["No verdict: no point was measured."]


def test_without_constraints_the_most_throughput_is_told(tmp_path: Path) -> None:
    text = written(tmp_path, [results(rate_sweep("paceline", RATES, 5, slo=""), slo="")])
    assert "the most of its 6 valid points. No constraint was set." in verdicts_of(text)[0]
    assert set(data_of(text)["charts"]) == {f"chart-0-{name}" for name in ("ttft", "tpot", "itl", "throughput")}


def test_bursts_are_compared_stage_by_stage(tmp_path: Path) -> None:
    points = [
        point(engine, name=name, requests_per_s=rate * (1 + len(name)), slo="")
        for engine, rate in (("paceline", 12.0), ("vllm", 10.0))
        for name in ("128x128", "2048x128")
    ]
    text = written(tmp_path, [results(points, slo="")])
    assert [verdict.partition(":")[0] for verdict in verdicts_of(text)] == ["128x128", "2048x128"]
    assert "vllm 10,240 output tokens/s (0.83x of paceline, of single runs)" in verdicts_of(text)[0]
    assert data_of(text)["charts"]["chart-0-throughput"]["data"][0]["type"] == "bar"


def test_batches_of_the_same_limit_are_compared_by_throughput(tmp_path: Path) -> None:
    points = [
        point(engine, batch=batch, requests_per_s=batch * share, tpot=(0.01, 0.015 if batch < 32 else 0.03))
        for engine, share in (("paceline", 1.0), ("vllm", 0.8))
        for batch in (8, 16, 32)
    ]
    assert verdicts_of(written(tmp_path, [results(points)]))[2] == (
        "paceline and vllm are indistinguishable in load: the limit of paceline lies between 16 and 32 requests at "
        "once, that of vllm between 16 and 32. At the highest load that each keeps paceline makes 2,048 output "
        "tokens/s and vllm 1,638 (1.25x)."
    )


def test_batches_and_rates_have_their_own_charts(tmp_path: Path) -> None:
    points = [*rate_sweep("paceline", RATES, 5), *(point(batch=batch) for batch in (1, 8, 64))]
    charts = data_of(written(tmp_path, [results(points)]))["charts"]
    assert charts["chart-0-ttft"]["layout"]["xaxis"]["title"]["text"] == "offered requests/s"
    assert charts["chart-1-ttft"]["layout"]["xaxis"]["tickvals"] == [1, 8, 64]


def test_workloads_under_the_same_loads_are_kept_apart(tmp_path: Path) -> None:
    points = [
        point(rate=rate, load={"kind": "poisson", "workload": {"kind": "fixed", "input": size, "output": 128}})
        for size in (128, 2048)
        for rate in (1.0, 2.0)
    ]
    text = written(tmp_path, [results(points)])
    assert re.findall("<h2>(Request rates.*?)</h2>", text) == ["Request rates: 128x128", "Request rates: 2048x128"]


def test_a_search_is_the_verdict(tmp_path: Path) -> None:
    search = SearchResult(
        over="rate",
        target="paceline",
        constraints=SLO.split(", "),
        attainment=0.99,
        load=4.5,
        verdict="indistinguishable",
        kept=4.0,
        broken=5.0,
        ended="edge",
        probes=[],
    )
    text = written(tmp_path, [results(rate_sweep("paceline", RATES, 7), searches=[search])])
    assert verdicts_of(text) == [
        "paceline keeps ttft_p99 < 1s and tpot_p99 < 20ms for 99% of the requests up to 4.5 requests/s; 5 breaks. It "
        "is indistinguishable from a load that breaks; surely kept is 4."
    ]


def test_two_runs_of_one_engine_have_names_of_their_own(tmp_path: Path) -> None:
    runs = [results(rate_sweep("paceline", RATES, 5)), results(rate_sweep("paceline", RATES, 7), started_at=LAST)]
    text = written(tmp_path, runs, [log("paceline", stage="rate=3")])
    names = ["paceline (2026-11-30 12:00 UTC)", "paceline (2026-11-30 13:00 UTC)"]
    assert list(traces(text, "chart-0-ttft")) == names[::-1]
    assert data_of(text)["stages"][0]["ttft"]["data"][0]["name"] == names[0]


def test_five_engines_and_fifty_points(tmp_path: Path) -> None:
    engines = ["paceline", "vllm", "sglang", "trtllm", "other"]
    points = [item for engine in engines for item in rate_sweep(engine, [float(rate) for rate in range(1, 11)], 6)]
    logs = [log(engine, stage=f"rate={rate}", count=2000, rate=50.0) for engine in engines for rate in range(1, 4)]
    text = written(tmp_path, [results(points)], logs)
    assert len(rows_of(text)) == 50
    colours = {trace["marker"]["color"] for trace in data_of(text)["charts"]["chart-0-ttft"]["data"]}
    assert len(colours) == 5


def test_requests_of_logs_are_drawn(tmp_path: Path) -> None:
    text = written(tmp_path, [], [log("paceline", stage="rate=3", count=100, failed=7), log("vllm", stage="rate=3")])
    (stage,) = data_of(text)["stages"]
    assert [(trace["name"], len(trace["x"])) for trace in stage["ttft"]["data"]] == [
        ("paceline", 93),
        ("paceline, failed", 7),
        ("vllm", 200),
    ]
    assert max(stage["ttft"]["data"][0]["y"]) > 2  # the stall
    assert stage["note"] == "paceline: 100 requests, 7 failed. vllm: 200 requests, 0 failed."


def test_the_file_is_alone_and_what_others_wrote_is_text(tmp_path: Path) -> None:
    evil = '</script><img src="x" onerror="alert(1)">'
    points = [point(evil, rate=1.0, name=evil)]
    text = written(tmp_path, [results(points, experiment=evil, commands=[evil])], [log(evil, stage=evil)])
    parser = Elements()
    parser.feed(text)
    assert {tag for tag, _ in parser.seen} & {"img", "iframe", "object", "video"} == set()
    links = [attributes[name] for _, attributes in parser.seen for name in ("src", "href") if name in attributes]
    assert links
    assert [link for link in links if not str(link).startswith(("#", "data:"))] == []
    assert parser.seen.count(("script", {})) == 2
    assert "default-src 'none'" in text


def test_lateness_and_energy_have_columns_where_there_are_any(tmp_path: Path) -> None:
    """failure 92"""
    heads = r'<button type="button">(.*?)</button>'
    late = point(rate=1.0, ttft=(0.1, 0.9), ttft_from_send_s=statistics(0.1, 0.2))
    watched = point(rate=1.0, gpu={"power_w": 600.0, "energy_j": 512 * 128 * 2.5})
    assert "from send p99" in re.findall(heads, written(tmp_path, [results([late])]))
    text = written(tmp_path, [results([watched])])
    found = dict(zip(re.findall(heads, text), rows_of(text)[0], strict=True))
    assert "from send p99" not in found
    assert (found["GPU power (W)"], found["GPU J/token"]) == ("600", "2.5")


def test_throughput_is_shown_with_its_interval(tmp_path: Path) -> None:
    known = {"intervals": {"output_tokens_per_s": (120.0, 136.0)}}
    points = [point(rate=1.0, **known), point(rate=2.0), point(**known)]
    text = written(tmp_path, [results(points)])
    assert [cell for row in rows_of(text) for cell in row if "\N{PLUS-MINUS SIGN}" in cell] == 2 * [
        "128 \N{PLUS-MINUS SIGN}6.2%"
    ]
    curve = traces(text, "chart-0-throughput")["paceline"]
    assert (curve["error_y"]["array"], curve["error_y"]["arrayminus"]) == ([8, None], [8, None])
    assert traces(text, "chart-1-throughput")["paceline"]["error_y"]["array"] == [8]


def test_latencies_are_shown_with_their_intervals(tmp_path: Path) -> None:
    known = {"intervals": {"ttft_s.p50": (0.09, 0.12), "tpot_s.mean": (0.01, 0.011)}}
    text = written(tmp_path, [results([point(rate=1.0, **known), point(rate=2.0)], slo="ttft_p50 < 1s")])
    assert [cell for row in rows_of(text) for cell in row if "\N{PLUS-MINUS SIGN}" in cell] == [
        "100 \N{PLUS-MINUS SIGN}15.0% \N{CHECK MARK}"
    ]
    curves = [trace for trace in data_of(text)["charts"]["chart-0-ttft"]["data"] if "p50" in trace["hovertemplate"]]
    assert [curve["error_y"]["array"] for curve in curves] == [[20, None]]
    assert "bars: 95% interval" in text.partition("Time to first token (TTFT)")[2][:200]


def test_what_was_asked_is_drawn(tmp_path: Path) -> None:
    """The attainment that a search asked for, and the limit among the single requests."""
    search = SearchResult(
        over="rate", target="paceline", constraints=SLO.split(", "), attainment=0.95, load=None, verdict=None,
        kept=None, broken=1.0, ended="none kept", probes=[],
    )  # fmt: skip
    run = results([*rate_sweep("paceline", RATES, 5), point(batch=4)], searches=[search])
    data = data_of(written(tmp_path, [run], [log()]))
    shapes = data["charts"]["chart-0-attainment"]["layout"]["shapes"]
    assert [(shape["y0"], shape["label"]["text"]) for shape in shapes] == [(95, "asked: 95%")]
    assert data["charts"]["chart-1-attainment"]["layout"]["shapes"] == []
    assert [shape["y0"] for shape in data["stages"][0]["ttft"]["layout"]["shapes"]] == [1.0]


def test_the_client_and_what_it_sent_are_told(tmp_path: Path) -> None:
    plan = {"kind": "fixed", "input": 32, "output": 8, "requests": 300, "seed": 7}
    client = {"lateness_p99_s": 0.0021, "loop_delay_p99_s": 0.0032, "cpu": 0.25, "workers": 3}
    points = [
        point(rate=rate, client=client, load={"kind": "poisson", "rate": rate, "seed": 5, "workload": plan})
        for rate in (1.0, 2.0)
    ]
    text = written(tmp_path, [results(points)])
    found = dict(zip(re.findall(r'<button type="button">(.*?)</button>', text), rows_of(text)[0], strict=True))
    names = ("Client late p99", "Client loop p99", "Client CPU", "Workers")
    assert [found[name] for name in names] == ["2.1", "3.2", "25.0%", "3"]
    told = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert told["workload"] == "kind=fixed input=32 output=8 requests=300 seed=7"
    assert (told["load"], told["workers"]) == ("kind=poisson seed=5", "3")


def test_every_chart_is_one_that_plotly_knows(tmp_path: Path) -> None:
    points = [*rate_sweep("paceline", RATES, 5), point(), point(batch=4), invalid(point(rate=9.0), "rate: low")]
    data = data_of(written(tmp_path, [results(points)], [log(failed=3)]))
    figures = [*data["charts"].values(), *(stage[name] for stage in data["stages"] for name in ("ttft", "open"))]
    assert len(figures) > 15
    for figure in figures:
        assert go.Figure(figure).data


def test_what_the_run_was_is_told(tmp_path: Path) -> None:
    text = html.unescape(written(tmp_path, [results(rate_sweep("paceline", RATES, 5), interrupted=True)]))
    assert "paceline bench rate --url http://127.0.0.1:8000 --rates 1,3,5,6,7" in text
    assert "paceline serve example/model-8b" in text
    assert "Example CPU" in text
    assert "(last token - first token) / (n - 1)" in text
    assert verdicts_of(text)[0].startswith("Interrupted:")
    assert "x NVIDIA" not in text


def test_an_engine_that_failed_is_told(tmp_path: Path) -> None:
    run = results(rate_sweep("paceline", RATES, 5), failures=["vllm: ended by itself; it printed:\nno <GPU>"])
    assert "vllm: ended by itself; it printed: no <GPU>" in verdicts_of(written(tmp_path, [run]))[0]


def test_gpus_that_were_at_work_are_named(tmp_path: Path) -> None:
    run = results(rate_sweep("paceline", RATES, 5)).with_gpus("paceline", [Gpus("NVIDIA H200", 2, "570.1")])
    assert "2 x NVIDIA H200, driver 570.1" in written(tmp_path, [run])


@pytest.mark.parametrize("count", [3, 40, 5000])
def test_open_requests(count: int) -> None:
    draw = np.random.default_rng(count)
    sent = np.cumsum(draw.exponential(0.1, count))
    ended = sent + draw.exponential(1.0, count)
    records = [RequestRecord(id, a, sent=a, ended=b) for id, (a, b) in enumerate(zip(sent, ended, strict=True))]
    times, counts = open_requests([*records, RequestRecord(count, 0.0)])

    def at(time: float) -> int:
        return int(((sent <= time) & (ended > time)).sum())

    assert len(times) <= max(2 * count, STEPS + 1)
    if count < 1000:
        assert counts == [at(time) for time in np.sort(np.concatenate([sent, ended]))]
    else:
        events = np.concatenate([sent, ended])
        for start, end, shown in list(zip(times, times[1:], counts, strict=False))[:-1:37]:
            most = max([at(start), *(at(time) for time in events if start <= time < end)])
            assert abs(shown - most) <= 1  # times are rounded in the file


def test_the_timeline_keeps_quiet_spans_and_peaks() -> None:
    records = [RequestRecord(id, 0.0, sent=0.001 * id, ended=1.0) for id in range(500)]
    records.append(RequestRecord(500, 99.0, sent=99.0, ended=100.0))
    times, counts = open_requests(records)
    assert max(counts) == 500
    quiet = [count for time, count in zip(times, counts, strict=True) if 2 < time < 98]
    assert quiet
    assert set(quiet) == {0}


def test_thinning_keeps_the_slowest() -> None:
    records = [
        RequestRecord(id, float(id), sent=float(id), deltas=[(id + (5.0 if id % 997 == 0 else 0.1), 1)])
        for id in range(10_000)
    ]
    shown = thinned(records, 500)
    assert len(shown) <= 500 + SLOWEST
    assert {0, 997, 1994, 9970} <= {record.id for record in shown}
    assert [record.id for record in shown] == sorted(record.id for record in shown)


@pytest.mark.parametrize("seed", range(12))
def test_values_may_be_missing_anywhere(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.3 else value

    def some() -> Statistics:
        return Statistics(*(maybe(draw.expovariate(3) * draw.choice([0, 1, 1, 10])) for _ in range(6)))

    def measured(target: str) -> Point:
        ok = draw.choice([0, 1, 500])
        loads = [{"rate": draw.choice([1.0, 2.0])}, {"batch": draw.choice([1, 64])}, {"name": draw.choice("ab")}]
        return point(
            target,
            **draw.choice(loads),
            valid=draw.random() < 0.7,
            reasons=draw.choice([[], ["empty: nothing"]]),
            notes=draw.choice([[], ["saturated: it grew"]]),
            ttft_s=some(),
            tpot_s=some(),
            itl_s=some(),
            e2e_s=some(),
            output_tokens=ok * 100,
            output_tokens_per_s=maybe(draw.choice([0.0, 50.0])),
            goodput_rps=maybe(draw.choice([0.0, 1.2])),
            attainment=maybe(0.9),
            attainment_interval=maybe((0.8, 1.0)),
            gpu=draw.choice([None, {"power_w": 1.0}, {"energy_j": 0.0}]),
        )

    runs = [results([measured(name) for name in "aabbcc"], slo=draw.choice(["", SLO])) for _ in range(2)]
    text = written(tmp_path, runs, [log("a", count=draw.choice([0, 1, 30]), failed=1)])
    assert len(rows_of(text)) == 12
    assert verdicts_of(text)
