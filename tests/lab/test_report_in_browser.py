"""The report in headless Chromium: drawn without errors and without a network, sorted and filtered by clicks."""

import shutil
from collections.abc import Iterator

import pytest

from lab.measured import invalid, log, point, rate_sweep, results
from paceline.lab.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="SKIPPED: playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: no report is opened in it")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator["sync_api.Page"]:
    """A report of two engines. An error of all tests: the console said something, or a request left the file."""
    rates = [1.0, 3.0, 5.0, 6.0, 7.0, 8.0]
    points = rate_sweep("paceline", rates, 7) + rate_sweep("vllm", rates, 5)
    points[-1] = invalid(points[-1], "lateness: requests were sent 30 ms late")
    points += [point("paceline", name="128x128"), point("vllm", name="128x128")]
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_report([results(points)], [log("paceline"), log("vllm", failed=4), log("vllm", stage="rate=5")], out)
    said: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(out.as_uri())
        page.wait_for_selector(".main-svg")
        yield page
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_curves_verdicts_and_limits_are_seen(page: "sync_api.Page") -> None:
    assert "up to 7 requests/s" in page.inner_text("#verdicts")
    assert "paceline and vllm differ" in page.inner_text("#verdicts")
    assert page.locator("#chart-0-ttft .scatterlayer .trace path.js-line").count() == 4  # p50 and p99 of two engines
    assert "ttft_p99 < 1s" in (page.locator("#chart-0-ttft").text_content() or "")
    assert page.locator("#chart-1-throughput .barlayer .trace").count() == 2
    assert page.locator("#requests-ttft .scatterlayer .trace").count() == 3  # the failures are the third
    assert page.locator(".plot .main-svg").count() >= 2 * page.locator(".plot").count()
    box = page.locator("#chart-0-ttft .plot-container").bounding_box()
    assert box is not None
    assert box["width"] > 250


def test_a_heading_sorts(page: "sync_api.Page") -> None:
    head = page.locator("#charts table").first.locator("th", has_text="TTFT p99")
    rows = page.locator("#charts table").first.locator("tbody tr")
    column = head.evaluate("(cell) => cell.cellIndex")

    def values() -> list[float]:
        return [float(row.locator("td").nth(column).get_attribute("data-value") or "nan") for row in rows.all()]

    before = values()
    assert before != sorted(before)
    head.locator("button").click()
    assert values() == sorted(before)
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert values() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"


def test_an_engine_is_hidden_in_all_charts(page: "sync_api.Page") -> None:
    page.locator(".legend input[value=vllm]").uncheck()
    assert page.locator("#chart-0-ttft .scatterlayer .trace path.js-line").count() == 2
    assert page.locator("#requests-open .scatterlayer .trace").count() == 1
    page.select_option("#stage", label="rate=5")
    assert page.locator("#requests-ttft .scatterlayer .trace").count() == 0
    page.locator(".legend input[value=vllm]").check()
    assert page.locator("#requests-ttft .scatterlayer .trace").count() == 1
    assert page.inner_text("#stage-note") == "vllm: 200 requests, 0 failed."


def test_it_fits_a_narrow_screen(page: "sync_api.Page") -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    for _ in range(100):  # Charts follow one after another. The page's policy forbids what wait_for_function does.
        if page.evaluate("document.documentElement.scrollWidth") <= 420:
            break
        page.wait_for_timeout(100)
    else:
        pytest.fail("something is wider than the screen")
    box = page.locator("#chart-0-ttft .main-svg").first.bounding_box()
    assert box is not None
    assert 250 < box["width"] < 420
