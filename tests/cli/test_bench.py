"""The verbs of `paceline bench`, against a real server whose engine is a clock."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import measured
from paceline.cli.app import app
from paceline.cli.bench.carry_out import ends_as_interruption
from paceline.cli.bench.options import Files
from paceline.lab.experiment import InvalidExperiment, read_experiment, read_shapes
from paceline.lab.results import to_json
from tiny_models import make_tiny

MODEL = {
    "schema_version": 1,
    "name": "quick",
    "step_time": {"fixed_s": 0.004, "weights_s": 0.0, "token_s": 0.0, "row_s": 0.0, "kv_token_s": 0.0, "pair_s": 0.0},
    "engine": {"block_size": 16, "num_blocks": 4000, "max_num_batched_tokens": 8192, "max_num_seqs": 64,
               "max_model_len": 2048, "depth": 1},
}  # fmt: skip


def free_port() -> int:
    """One that stays free: no connection of this machine gets it by chance, as it may one of those that bind gives."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest - 10_000, lowest), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    pytest.fail("no port is free")


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    """Options of a server that the verb starts itself."""
    model = tmp_path_factory.mktemp("model") / "quick.json"
    model.write_text(json.dumps(MODEL))
    port = free_port()
    serve = f"{sys.executable} -m paceline serve --simulate {model} --port {port} --max-num-seqs {{batch}}"
    return ["--url", f"clock=http://127.0.0.1:{port}", "--model", "smollm2", "--command", serve]


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


STATISTICS = {"mean", "p50", "p90", "p95", "p99", "max"}


def check_point(point: dict) -> None:
    """What the documented results promise of each point."""
    plain = {"offered_rate", "batch", "valid", "reasons", "output_tokens_per_s", "goodput_rps", "attainment"}
    assert plain <= set(point)
    assert set(point["requests"]) == {"sent", "ok", "failed"}
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(point[metric]) == STATISTICS


def test_rate_with_all_files(command, tmp_path):
    server = [part.replace("--max-num-seqs {batch}", "") for part in command]
    files = ["--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--csv", tmp_path / "r.csv"]
    code, output = invoke("rate", *server, "--rates", "20,40", "--requests", 30, "--input", 8, "--output", 5,
                          "--slo", "tpot_mean<20ms", "--warmup", 2, "--logs", tmp_path / "logs", *files)  # fmt: skip
    assert code in (0, 1), output
    results = json.loads((tmp_path / "r.json").read_text())
    assert [point["offered_rate"] for point in results["points"]] == [20.0, 40.0]
    for point in results["points"]:
        check_point(point)
        assert point["requests"] == {"sent": 30, "ok": 30, "failed": 0}
        assert point["output_tokens"] == 150
        assert 0.003 < point["tpot_s"]["mean"] < point["e2e_s"]["mean"] / 4
    assert "rate=20" in (tmp_path / "r.html").read_text()
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 3
    # From the logs alone the same points come out.
    code, output = invoke("report", tmp_path / "logs", "--slo", "tpot_mean<20ms", "--json", tmp_path / "again.json")
    assert code == 0, output
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["points"] == results["points"]
    code, output = invoke("compare", tmp_path / "r.json", tmp_path / "again.json")
    assert code == 0, output
    assert "rate=20" in output
    # And a step-time model of the engine, whose steps take 4 ms.
    code, output = invoke("fit", tmp_path / "logs", "--out", tmp_path / "fit.json", "--start", command[5].split()[5])
    assert code == 0, output
    fitted = json.loads((tmp_path / "fit.json").read_text())
    assert fitted["fitted"].startswith("event logs of 2 stages")
    # Eight tokens a prompt, at two rates: it is the sum of some that they tell.
    assert "pair_s" in fitted["fitted"].partition("not determined: ")[2]
    assert "Warning: these stages do not tell" in output
    step = fitted["step_time"]["fixed_s"] + fitted["step_time"]["weights_s"]
    assert 0.003 < step < 1.5 * max(point["tpot_s"]["mean"] for point in results["points"])
    assert set(fitted["error"]) == {"ttft_mean", "tpot_mean", "ttft_each", "tpot_each"}
    assert fitted["error"]["tpot_mean"] < 0.1


def test_batch_restarts_the_engine_for_every_size(command, tmp_path):
    code, output = invoke("batch", *command, "--batches", "1,2", "--requests", 6, "--input", 8, "--output", 4,
                          "--warmup", 1, "--logs", tmp_path / "logs", "--json", tmp_path / "b.json")  # fmt: skip
    assert code in (0, 1), output
    points = json.loads((tmp_path / "b.json").read_text())["points"]
    assert [(point["batch"], point["batch_kind"]) for point in points] == [(1, "engine"), (2, "engine")]
    assert all(point["requests"]["ok"] == 6 for point in points)
    assert "(engine)" in output


def test_an_interrupted_run_leaves_logs_and_a_partial_report(command, tmp_path):
    server = [part.replace("--max-num-seqs {batch}", "") for part in command]
    arguments = ["rate", *server, "--rates", "50,1", "--requests", "20", "--input", "8", "--output", "3",
                 "--warmup", "0", "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "r.json")]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "paceline", "bench", *arguments], stderr=subprocess.DEVNULL)
    second = tmp_path / "logs" / "clock.rate=1.log"
    deadline = time.monotonic() + 60
    while not (second.exists() and second.stat().st_size > 2000) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    with pytest.raises(ConnectionRefusedError):  # Its server has ended with it.
        socket.create_connection(("127.0.0.1", int(command[1].rsplit(":", 1)[1])), 1)
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["interrupted"] is True
    assert [point["name"] for point in results["points"]] == ["rate=50", "rate=1"]
    cut = [any("interrupted" in reason for reason in point["reasons"]) for point in results["points"]]
    assert cut == [False, True]
    code, output = invoke("report", tmp_path / "logs", "--json", tmp_path / "again.json")
    assert code == 0, output
    points = json.loads((tmp_path / "again.json").read_text())["points"]
    assert [point["name"] for point in points] == ["rate=50", "rate=1"]
    assert points[1]["valid"] is False


def test_files_are_written_before_a_reader_of_the_table_goes_away(tmp_path):
    points = tmp_path / "points.json"
    points.write_text(to_json(measured.results([measured.point()])))
    files = Files(json=tmp_path / "r.json", html=tmp_path / "r.html", csv=tmp_path / "r.csv")
    code = (
        "import sys; from pathlib import Path; from paceline.cli.bench.carry_out import finish\n"
        "from paceline.cli.bench.options import Files; from paceline.lab.results import read_results\n"
        "points, *files = map(Path, sys.argv[1:])\n"
        "finish(read_results(points), [], Files(**dict(zip(('json', 'html', 'csv'), files))), interrupted=False)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([sys.executable, "-c", code, points, *files.written], stdout=writer,
                             stderr=subprocess.PIPE, timeout=60)  # fmt: skip
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, b"")
    assert all(path is not None and path.stat().st_size for path in files.written)


def test_the_help_says_batch_only_where_it_is_taken():
    for verb in ("batch", "rate", "replay", "throughput"):
        assert ("{batch}" in invoke(verb, "--help")[1]) == (verb == "batch")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_are_interruptions_too(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), ends_as_interruption():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_as_interruption():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rate"], "--url is missing"),
        (["rate", "--url", "ftp://x"], "not like http://"),
        (["rate", "--url", "http://a", "--rates", "1,x"], "--rates: 'x' is no number"),
        (["rate", "--url", "http://a", "--rates", "0"], "not above 0"),
        (["rate", "--url", "http://a", "--rates", "inf"], "not finite"),
        (["rate", "--url", "http://a:99999"], "not like http://"),
        (["rate", "--url", "http://a", "--rates", "5", "--find", "2"], "no range of loads"),
        (["rate", "--url", "http://a", "--find", "9", "--slo", ""], "slo is missing"),
        (["rate", "--url", "http://a", "--command", "serve {batch}"], "only closed loops have"),
        (["rate", "--url", "http://a", "--command", "serve 'x"], "--command: No closing quotation"),
        (["rate", "--url", "http://a", "--slo", "ttft_p99>1s"], "is no constraint"),
        (["rate", "--url", "http://a", "--deadline", "nan"], "deadline: must be"),
        (["rate", "--url", "http://a", "--json", "/proc/no/x.json"], "cannot be written"),
        (["rate", "--url", "http://a", "--token-ids", "1,99999999999"], "token_ids: must rise"),
        (["replay", "nowhere.csv", "--url", "http://a"], "nowhere.csv: No such file or directory"),
        (["rate", "--url", "http://a", "--slo", "ttft<1s"], "ttft<1s"),
        (["throughput", "--url", "http://a", "--shapes", "128"], "128x128"),
        (["batch", "--url", "http://a", "--url", "http://b", "--command", "x"], "one server"),
        (["batch", "--url", "http://a:1", "--url", "http://a:1"], "same name"),
        (["rate", "--url", "http://a", "--token-ids", "9,1"], "--token-ids"),
        (["run", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments, message):
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output


def test_a_server_that_is_not_there(tmp_path):
    code, output = invoke("rate", "--url", f"http://127.0.0.1:{free_port()}", "--requests", 2, "--logs", tmp_path)
    assert code == 1
    assert "does not answer: Connection refused" in output
    assert "no valid point" not in output


def test_an_experiment_file_and_an_engine_that_fails_leaves_the_others(command, tmp_path):
    """One whose command does not exist, one that ends at once, one that refuses every request, and a good one."""
    port = command[1].rsplit(":", 1)[1]
    serve = [part for part in command[5].split() if part not in ("--max-num-seqs", "{batch}")]
    targets = [
        {"name": "none", "command": ["no-such-command"]},
        {"name": "ends", "command": [sys.executable, "-c", "print('why {0: 1}'); raise SystemExit(3)"]},
        {"name": "refuses", "command": serve, "model": "another"},
        {"name": "good", "command": serve},
    ]
    tables = [f"[[targets]]\nurl='http://127.0.0.1:{port}/v1/'\n" for _ in targets]
    for place, target in enumerate(targets):
        tables[place] += "".join(f"{key} = {json.dumps(value)}\n" for key, value in target.items())
    file = tmp_path / "experiment.toml"
    file.write_text("warmup = 2\n" + "".join(tables) + "[throughput]\nshapes = [[8, 4], [8, 4]]\nrequests = 5\n"
                    "[[stages]]\nname = 'ramp'\nworkload = {kind = 'fixed', input = 4, output = 3, requests = 6}\n"
                    "load = {kind = 'ramp', start_rate = 10, end_rate = 40.0}\n")  # fmt: skip
    code, output = invoke("run", file, "--json", tmp_path / "new" / "x.json", "--logs", tmp_path / "logs")
    assert code == 1
    assert "none: cannot run no-such-command: No such file or directory" in output
    assert "ends: ended by itself with status 3; it printed:\nwhy {0: 1}" in output
    assert "refuses: all requests before the first stage failed: HTTP 404: the model 'another'" in output
    results = json.loads((tmp_path / "new" / "x.json").read_text())
    assert [point["name"] for point in results["points"]] == ["ramp", "8x4", "8x4 #2"]
    assert all(point["target"] == "good" and point["requests"]["failed"] == 0 for point in results["points"])
    assert results["interrupted"] is False  # by nobody
    assert [failure.partition(":")[0] for failure in results["failures"]] == ["none", "ends", "refuses"]
    assert results["targets"][3]["model"] == "smollm2"  # as the server says


ENGINE = "[[targets]]\nname = 'a'\nurl = 'http://a:1'\n"
THROUGHPUT = "[throughput]\nrequests = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1 2", "experiment.toml"),
        ("what = 1", "unknown key what"),
        ("[rate]\nrates=[1]\ninput=1\noutput=1\nrequests=1", "names no"),
        ("[[targets]]\nname='a'\nurl='u'\nmodel='m'\nport=1", "unknown key port"),
        ("[rate]\nrate=[1]", "unknown key rate"),
        ("[rate]\nrates=3", "rates: Expected `array`"),
        ("[rate]\nrates=[1]", "input, output, requests missing"),
        ("warmup = 'two'", "warmup: Expected `int`"),
        (ENGINE, "names no"),
        (2 * ENGINE + THROUGHPUT, "two engines have the same name"),
        ("warmup = -1\n" + ENGINE + THROUGHPUT, "warmup: must be at least 0"),
        ("workers = 0\n" + ENGINE + THROUGHPUT, "workers: must be at least 1"),
        (ENGINE.replace("http://", "") + THROUGHPUT, "url: 'a:1' is not like"),
        (ENGINE + "command = 'serve'\n" + THROUGHPUT, "command: Expected `array`"),
        (ENGINE + THROUGHPUT + "[search]\nover='rate'\nlow=1\nhigh=2", "slo is missing"),
        (ENGINE + THROUGHPUT + "[search]\nover='speed'\nlow=1\nhigh=2", "over must be rate or batch"),
        (ENGINE + "[[stages]]\nname='s'\nworkload={}", "load missing"),
    ],
)
def test_a_wrong_experiment_names_the_key(tmp_path, text, message):
    file = tmp_path / "experiment.toml"
    file.write_text(text)
    with pytest.raises(InvalidExperiment, match=message):
        read_experiment(file)


def test_shapes():
    assert read_shapes("128x128,2048x1") == [(128, 128), (2048, 1)]
    for wrong in ("", "1", "0x1", "axb"):
        with pytest.raises(InvalidExperiment):
            read_shapes(wrong)


def test_the_engine_in_process(tmp_path):
    make_tiny(tmp_path / "tiny", "llama")
    tiny = [tmp_path / "tiny", "--token-ids", "4,200", "--device", "cpu"]
    code, output = invoke("engine", *tiny, "--shapes", "16x3", "--requests", 3, "--json", tmp_path / "e.json")
    assert code in (0, 1), output
    (point,) = json.loads(Path(tmp_path / "e.json").read_text())["points"]
    check_point(point)
    assert point["output_tokens"] == 9
