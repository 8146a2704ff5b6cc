"""The load client against a scripted server."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_server import (
    CHUNKED,
    CLOSE,
    END,
    HANG,
    RESET,
    Arrival,
    Script,
    chunk,
    event,
    scripted_server,
    stream,
    token,
    tokens,
    usage_chunk,
    whole,
)

from paceline.lab.client.log import FRAME, MAGIC, InvalidLog, StageLog, frames, read_log
from paceline.lab.client.run import Progress, default_workers, run_stage
from paceline.lab.client.worker import LINGER_S
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target
from paceline.lab.validity import achieved_rate

Scripts = Callable[[Arrival], Script] | dict[str, Script] | None


def stage_of(requests: Sequence[PlannedRequest], deadline_s: float = 20.0, **more: Any) -> Stage:
    return Stage("test", list(requests), {"kind": "trace"}, deadline_s, **more)


def prompts(*names: str, output: int = 3, gap: float = 0.0) -> list[PlannedRequest]:
    return [PlannedRequest(i, i * gap, name, output) for i, name in enumerate(names)]


def measure(script: Scripts, stage: Stage, path: Path, **more: Any) -> tuple[StageLog, list[Arrival]]:
    """The log, and what the server was asked after the probe."""
    with scripted_server(script) as server:
        run_stage(Target("mock", server.url, "m"), stage, path / "log", **more)
        probed = sum(arrival.body["max_tokens"] == 1 and arrival.prompt == "Hello" for arrival in server.arrivals)
        return read_log(path / "log"), server.arrivals[probed:]


def shortest(late: Sequence[float]) -> float:
    """Of moments that must not be early, how late the promptest is: a busy machine delays some, a fault delays all."""
    assert min(late) >= 0
    return min(late)


def test_times_agree_with_what_the_server_did(tmp_path: Path) -> None:
    """Both read one clock: nothing arrives before it was sent."""
    log, arrivals = measure(lambda a: tokens(8, 0.03), stage_of(prompts(*"abcde", output=8, gap=0.05)), tmp_path)
    assert [record.error for record in log.records] == [None] * 5
    started = log.clock_start
    assert started is not None
    ways = []
    for record, arrival in zip(log.records, arrivals, strict=True):
        assert record.sent is not None
        assert record.headers is not None
        assert record.ended is not None
        assert record.last is not None
        assert record.due <= record.sent <= record.headers <= record.last <= record.ended
        head, *written = (time - started for time in arrival.writes)
        assert record.sent <= arrival.time - started <= head <= record.headers
        assert record.ttft_from_send == pytest.approx(record.deltas[0][0] - (record.begun or 0.0))
        assert record.tpot == pytest.approx((record.last - record.deltas[0][0]) / 7)
        assert record.e2e == pytest.approx(record.last - record.due)
        assert record.expected_tokens == record.output_tokens == len(record.deltas) == 8
        ways += [seen - sent for (seen, _), sent in zip(record.deltas, written, strict=False)]
    assert shortest(ways) < 0.01


def test_send_times_are_absolute(tmp_path: Path) -> None:
    """public failure 91: waits must not add up. 400 requests at 200 a second; an instant server."""
    requests = [PlannedRequest(i, i / 200, str(i), 1) for i in range(400)]
    log, arrivals = measure(lambda a: tokens(1), stage_of(requests, offered_rate=200.0), tmp_path)
    assert all(record.ok for record in log.records)
    assert all(record.due == planned.due for record, planned in zip(log.records, requests, strict=True))
    # 0.05 ms each would be 15 ms by then.
    assert shortest([(record.sent or 0.0) - record.due for record in log.records[300:]]) < 0.01
    start = log.clock_start or 0.0
    assert shortest([a.time - start - int(a.prompt) / 200 for a in arrivals if int(a.prompt) >= 300]) < 0.01
    assert log.client["lateness_max_s"] == max((record.begun or 0.0) - record.due for record in log.records)
    assert {"loop_delay_p50_s", "loop_delay_p99_s", "loop_delay_max_s", "cpu", "chunks_per_s"} <= set(log.client)
    assert log.client["workers"] == 1
    assert log.client["chunks"] >= 400


def test_queueing_is_not_hidden(tmp_path: Path) -> None:
    """public failure 92: the client has no cap, so that the server's queue shows. Here nothing is answered before all
    40 have come."""
    came: list[float] = []

    def script(arrival: Arrival) -> Script:
        if arrival.prompt != "Hello":
            came.append(arrival.time)
        while 0 < len(came) < 40:
            yield 0.01
        yield from tokens(1)

    log, arrivals = measure(script, stage_of(prompts(*["x"] * 40, output=1, gap=0.01)), tmp_path)
    assert all(record.ok for record in log.records)
    end = came[-1] - (log.clock_start or 0.0)
    assert shortest([(record.ttft or 0.0) - (end - record.due) for record in log.records]) < 0.1
    assert len({arrival.connection for arrival in arrivals}) == 40


def test_a_stall_shows(tmp_path: Path) -> None:
    """Open loop is open: while the server stands still, requests are sent as planned, and they wait."""
    all_sent, stood_still = threading.Event(), []

    def script(arrival: Arrival) -> Script:
        if arrival.prompt == "stall":
            assert all_sent.wait(15)  # The whole server.
            stood_still.append(time.monotonic())
        return tokens(1)

    def on_progress(state: Progress) -> None:
        if state.sent == state.total:
            all_sent.set()

    stage = stage_of(prompts("x", "stall", *["x"] * 8, output=1, gap=0.05))
    log, _ = measure(script, stage, tmp_path, on_progress=on_progress)
    end = stood_still[0] - (log.clock_start or 0.0)
    assert max(record.sent or 0.0 for record in log.records) < end
    assert shortest([(record.ttft or 0.0) - (end - record.due) for record in log.records[1:]]) < 0.1


FAILURES: dict[str, tuple[Script, str]] = {
    "status": (whole("503 Service Unavailable", {"error": {"message": "full"}}), "HTTP 503: full"),
    "error": (stream(token(), token(), token(), {"error": {"message": "no memory"}}), "no memory"),
    "error first": (stream({"error": {"message": "no memory"}}), "no memory"),
    "early end": (
        [*stream(token(), token())[:-1], END],
        "the stream ended early: no [DONE]",
    ),
    "closed": ([CHUNKED, chunk(event(token())), CLOSE], "the server closed the connection in the middle of its reply"),
    "closed at once": ([CLOSE], "the server closed the connection before its reply"),
    "reset": ([CHUNKED, chunk(event(token())), 0.05, RESET], "connection failed: Connection reset by peer"),
    "empty": (stream(), "empty reply"),
    "not http": ([b"hello\r\n\r\n"], "not an HTTP reply: 'hello'"),
    "hangs": ([CHUNKED, chunk(event(token())), HANG], "cancelled at the deadline of 2 s"),
    "says nothing": ([HANG], "cancelled at the deadline of 2 s"),
}


def test_failures_are_failures(tmp_path: Path) -> None:
    """public failure 94, public failure 101: in one stage with good replies each is counted right, the stage ends at
    its deadline, and what waits for one that never ends is reported."""
    names = ["good", *FAILURES, "short", "good"]
    scripts = {name: script for name, (script, _) in FAILURES.items()}
    scripts["short"] = stream(token(), token(finish="stop"), usage_chunk(2))
    requests = prompts(*names)
    requests += [
        PlannedRequest(len(names), 0.0, "good", 3, after=names.index("hangs")),
        PlannedRequest(len(names) + 1, 100.0, "good", 3),
        PlannedRequest(len(names) + 2, 0.0, "good", 3, after=names.index("reset")),
    ]
    seen: list[Progress] = []
    log, _ = measure(scripts, stage_of(requests, deadline_s=2.0), tmp_path, on_progress=seen.append)
    assert 2.0 <= seen[-1].elapsed_s < 50
    found = dict(zip([*names, "waits", "late", "seat"], log.records, strict=True))
    for name, (_, error) in FAILURES.items():
        record = found[name]
        assert record.error == error, name
        assert record.sent is not None
        assert record.ttft is record.tpot is record.e2e is None
    assert len(found["error"].deltas) == 3
    assert len(found["hangs"].deltas) == 1
    assert found["hangs"].ended is None
    assert found["status"].status == 503
    for name in ("waits", "late"):
        assert found[name].error == "not sent before the deadline of 2 s"
        assert found[name].sent is None
    assert found["good"].ok
    assert found["seat"].ok, "the seat of a request that failed is free again"
    assert found["seat"].due >= found["reset"].due + 0.05
    assert found["short"].ok
    assert (found["short"].output_tokens, found["short"].expected_tokens) == (2, 3)
    assert not log.interrupted
    assert seen[-1].total == seen[-1].ended == len(requests)
    assert seen[-1].sent == len(requests) - 2
    # It cannot know of errors that only a reader of JSON sees.
    assert seen[-1].failed == len([r for r in log.records if not r.ok]) - 4


def test_no_server(tmp_path: Path) -> None:
    with socket.socket() as bound:  # It does not listen, and nobody else can.
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        run_stage(Target("none", url, "m"), stage_of(prompts("x", "y")), tmp_path / "log")
    log = read_log(tmp_path / "log")
    assert [record.error for record in log.records] == ["connection failed: Connection refused"] * 2
    assert [record.sent for record in log.records] == [None, None]


@contextmanager
def full_server(accepts: threading.Event) -> Iterator[str]:
    """URL of one that answers the probe and then accepts nothing before the event. A connection of its own fills its
    queue, so that none of the client's is half open; the kernel lets them try again after a second."""
    stopped, probed = threading.Event(), False
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.02)

        def serve() -> None:
            nonlocal probed
            while not stopped.is_set():
                if probed and not accepts.wait(0.02):
                    continue
                with suppress(TimeoutError), listener.accept()[0] as sock:
                    if sock.recv(1 << 16):
                        if not probed:
                            listener.listen(0)
                            filler.connect(listener.getsockname())
                            filler.shutdown(socket.SHUT_WR)
                        probed = True
                        sock.sendall(b"".join(step for step in tokens(1) if isinstance(step, bytes)))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(serve)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                stopped.set()


def test_a_server_that_accepts_late_is_not_a_client_that_sends_late(tmp_path: Path) -> None:
    accepts, accepted = threading.Event(), []
    requests = [PlannedRequest(id, 0.3 + 0.02 * id, "x", 1) for id in range(6)]

    def on_progress(state: Progress) -> None:
        """It accepts once all are knocking."""
        links = psutil.net_connections("tcp")
        knocking = [link for link in links if link.status == psutil.CONN_SYN_SENT and link.raddr.port == port]
        if len(knocking) == 6 and not accepts.is_set():
            accepted.append(time.monotonic())
            accepts.set()

    with full_server(accepts) as url:
        port = int(url.rpartition(":")[2])
        stage = stage_of(requests, offered_rate=50.0)
        run_stage(Target("full", url, "m"), stage, tmp_path / "log", workers=1, on_progress=on_progress)
    log = read_log(tmp_path / "log")
    assert [record.error for record in log.records] == [None] * 6
    moment = accepted[0] - (log.clock_start or 0.0)
    begun = [record.begun or 9.0 for record in log.records]
    assert max(begun) < moment < min(record.sent or 0.0 for record in log.records)
    assert log.client["lateness_max_s"] == max(at - request.due for at, request in zip(begun, requests, strict=True))
    for record in log.records:
        assert (record.ttft_from_send or 0.0) > moment - (record.begun or 9.0)
    assert achieved_rate(log) == pytest.approx(5 / (max(begun) - 0.3))


def test_a_server_that_never_accepts(tmp_path: Path) -> None:
    requests = [PlannedRequest(id, 0.1, "x", 1) for id in range(4)]
    with full_server(threading.Event()) as url:
        run_stage(Target("full", url, "m"), stage_of(requests, deadline_s=1.0), tmp_path / "log", workers=1)
    records = read_log(tmp_path / "log").records
    assert [r.error for r in records] == ["the server accepted no connection before the deadline of 1 s"] * 4
    assert [r.sent for r in records] == [None] * 4
    assert all(0.1 <= (r.begun or 0.0) < 1.0 for r in records)


def test_closed_loop_keeps_its_seats(tmp_path: Path) -> None:
    requests = [PlannedRequest(i, 0.0, "x", 2, after=i - 3 if i >= 3 else None) for i in range(15)]
    log, arrivals = measure(lambda a: tokens(2, 0.02), stage_of(requests, batch=3), tmp_path)
    assert all(record.ok for record in log.records)
    for record in log.records[3:]:
        before = log.records[record.id - 3]
        assert record.due == pytest.approx(before.ended, abs=1e-6)
    assert shortest([(record.sent or 0) - record.due for record in log.records[3:]]) < 0.05
    for moment in (record.sent or 0.0 for record in log.records):
        assert sum((r.sent or 0) <= moment < (r.ended or 0) for r in log.records) <= 3
    assert len({arrival.connection for arrival in arrivals}) == 3, "connections are used again"


def test_a_body_that_is_kept_open_keeps_no_seat(tmp_path: Path) -> None:
    """Whoever reads the stream is done with [DONE], however it is split. No body ends before all requests have come."""
    requests = [PlannedRequest(i, 0.0, str(i), 2, after=i - 2 if i >= 2 else None) for i in range(6)]
    came: set[str] = set()

    def script(arrival: Arrival) -> Script:
        if arrival.prompt == "Hello":
            yield from tokens(1)
            return
        came.add(arrival.prompt)
        yield from tokens(2)[:-1]
        done = chunk(event("[DONE]"))
        at = len(done) - 3 * int(arrival.prompt)
        yield done[:at]
        yield 0.01
        yield done[at:]
        while len(came) < 6:
            yield 0.01
        yield END

    log, _ = measure(script, stage_of(requests, batch=2), tmp_path)
    assert [record.error for record in log.records] == [None] * 6
    for record in log.records[2:]:
        before = log.records[record.id - 2]
        assert before.last is not None
        assert before.last + LINGER_S <= record.due <= (record.sent or 0.0)
    assert min(record.ended or 0.0 for record in log.records) > (log.records[-1].sent or 9.0)
    for moment in (record.sent or 0.0 for record in log.records):
        assert sum((r.sent or 0) <= moment < (r.last or 0) for r in log.records) <= 2


def test_turns_carry_the_replies_before(tmp_path: Path) -> None:
    def script(arrival: Arrival) -> Script:
        if arrival.prompt == "fail":
            return whole("500 Internal Server Error", {"error": {"message": "oops"}})
        return stream(*({"choices": [{"delta": {"content": part}}]} for part in (f"{arrival.prompt}", "!")))

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    start = [{"role": "system", "content": "s"}, user("one")]
    requests = [
        PlannedRequest(0, 0.0, start, 2),
        PlannedRequest(1, 0.1, [*start, user("two")], 2, after=0, needs=True),
        PlannedRequest(2, 0.0, [*start, user("two"), user("fail")], 2, after=1, needs=True),
        PlannedRequest(3, 0.0, [*start, user("two"), user("fail"), user("never")], 2, after=2, needs=True),
        PlannedRequest(4, 0.0, [user("other")], 2),
    ]
    log, arrivals = measure(script, stage_of(requests), tmp_path, workers=2)
    asked = {arrival.prompt: arrival.body["messages"] for arrival in arrivals}
    replies = [{"role": "assistant", "content": text} for text in ("one!", "two!")]
    assert asked["two"] == [*start, replies[0], user("two")]
    assert asked["fail"] == [*start, replies[0], user("two"), replies[1], user("fail")]
    assert "never" not in asked
    assert [record.ok for record in log.records] == [True, True, False, False, True]
    assert log.records[1].due == pytest.approx((log.records[0].ended or 0) + 0.1, abs=1e-6)
    assert log.records[3].error == "the reply that it needs, of request 2, failed"
    assert log.client["workers"] == 2
    with_text = read_log(tmp_path / "log", keep_text=True)
    assert [record.text for record in with_text.records] == ["one!", "two!", "", "", "other!"]


def refusing(*names: str) -> Callable[[Arrival], Script]:
    """A server that knows no such fields."""

    def script(arrival: Arrival) -> Script:
        known = {**arrival.body, **arrival.body.get("stream_options", {})}
        if refused := [name for name in names if name in known]:
            return whole("400 Bad Request", {"error": {"message": f"unknown field {refused[0]}"}})
        return tokens(arrival.body["max_tokens"])

    return script


@pytest.mark.parametrize(
    ("refused", "usage", "ignore_eos"),
    [
        ((), "continuous", True),
        (("continuous_usage_stats",), "final", True),
        (("stream_options",), "none", True),
        (("continuous_usage_stats", "ignore_eos"), "final", False),
    ],
)
def test_a_server_is_asked_for_what_it_takes(
    tmp_path: Path, refused: tuple[str, ...], usage: str, ignore_eos: bool
) -> None:
    log, arrivals = measure(refusing(*refused), stage_of(prompts("x")), tmp_path)
    assert log.records[0].ok
    assert log.options == {"usage": usage, "ignore_eos": ignore_eos}
    assert log.records[0].expected_tokens == 3  # What was to be measured, whether or not the server takes it.
    body = arrivals[-1].body
    assert body.get("ignore_eos") == (True if ignore_eos else None)
    assert body.get("stream_options", {}).get("include_usage") == (True if usage != "none" else None)


def test_a_server_that_refuses_everything(tmp_path: Path) -> None:
    log, _ = measure(refusing("model"), stage_of(prompts("x")), tmp_path)
    assert log.records[0].error == "HTTP 400: unknown field model"


def test_what_is_asked(tmp_path: Path) -> None:
    requests = [PlannedRequest(0, 0.0, [7, 8, 9], 3, prompt_tokens=3), PlannedRequest(1, 0.0, "text", 4)]
    requests.append(PlannedRequest(2, 0.0, [{"role": "user", "content": "hi"}], 5))
    with scripted_server() as server:
        target = Target("mock", server.url + "/base/", "the-model", api_key="secret-key", env={"TOKEN": "hidden"})
        stage = stage_of(requests, ignore_eos=False, sampling={"temperature": 0.5, "top_k": 3})
        run_stage(target, stage, tmp_path / "log")
        bodies = {json.dumps(arrival.body.get("prompt", "chat")): arrival for arrival in server.arrivals[1:]}
    ids, text, chat = bodies["[7, 8, 9]"], bodies['"text"'], bodies['"chat"']
    assert (ids.path, text.path, chat.path) == (*["/base/v1/completions"] * 2, "/base/v1/chat/completions")
    assert (ids.body["max_tokens"], text.body["max_tokens"], chat.body["max_tokens"]) == (3, 4, 5)
    assert ids.body["model"] == "the-model"
    assert (ids.body["temperature"], ids.body["top_k"]) == (0.5, 3)
    assert ids.body["stream"] is True
    assert "ignore_eos" not in ids.body
    assert ids.fields["authorization"] == "bearer secret-key"
    log = read_log(tmp_path / "log")
    assert log.stage == stage_of([*map(without_prompt, requests)], ignore_eos=False, sampling=stage.sampling)
    assert (log.target.model, log.target.api_key) == ("the-model", None)
    everything = b"".join(payload for kind, payload in frames(tmp_path / "log") if kind == b"H")
    assert b"secret-key" not in everything
    assert b"hidden" not in everything
    assert log.started_at.endswith("+00:00")
    assert log.machine["cores"] >= 1


def without_prompt(request: PlannedRequest) -> PlannedRequest:
    values = {name: getattr(request, name) for name in request.__slots__}
    return PlannedRequest(**{**values, "prompt": []})


def test_an_idle_connection_that_the_server_closes_is_replaced(tmp_path: Path) -> None:
    """Closed while idle, and closed in answer to the next request."""
    log, arrivals = measure(
        lambda a: [*tokens(1), 0.05, CLOSE], stage_of(prompts(*"abc", output=1, gap=0.2)), tmp_path / "idle"
    )
    assert [record.error for record in log.records] == [None] * 3
    assert len({arrival.connection for arrival in arrivals}) == 3

    used: set[int] = set()

    def second_is_refused(arrival: Arrival) -> Script:
        if arrival.connection in used:
            return [CLOSE]
        used.add(arrival.connection)
        return tokens(1)

    log, arrivals = measure(second_is_refused, stage_of(prompts(*"ab", output=1, gap=0.2)), tmp_path / "race")
    assert [record.error for record in log.records] == [None] * 2
    assert [arrival.prompt for arrival in arrivals] == ["a", "b", "b"]


def test_large_prompts_are_sent_whole(tmp_path: Path) -> None:
    """More than a socket takes at once."""
    long = "word " * 1_000_000
    log, arrivals = measure(lambda a: tokens(1), stage_of(prompts(long, long, output=1)), tmp_path)
    assert [record.error for record in log.records] == [None, None]
    assert all(arrival.prompt == long for arrival in arrivals)


def test_several_workers_share_one_start(tmp_path: Path) -> None:
    names = [str(i) for i in range(60)]
    log, arrivals = measure(lambda a: tokens(1), stage_of(prompts(*names, output=1, gap=0.01)), tmp_path, workers=3)
    assert all(record.ok for record in log.records)
    assert log.client["workers"] == 3
    assert log.clock_start is not None
    for worker in range(3):
        own = [(arrival.time, int(arrival.prompt)) for arrival in arrivals if int(arrival.prompt) % 3 == worker]
        assert shortest([time - log.clock_start - 0.01 * number for time, number in own]) < 0.05


def test_a_stage_without_requests(tmp_path: Path) -> None:
    log, _ = measure(None, stage_of([]), tmp_path)
    assert log.records == []
    assert not log.interrupted


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    requests = prompts(*["x"] * 100, output=100)
    assert default_workers(stage_of(requests, offered_rate=50.0)) == 1
    assert default_workers(stage_of(requests, offered_rate=250.0)) == 3
    assert default_workers(stage_of(requests, offered_rate=5000.0)) == 8
    assert default_workers(stage_of(requests, batch=1200)) == 3
    assert default_workers(stage_of([])) == 1


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *options, *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    big = stream(*(token("x" * 50_000) for _ in range(3)), usage_chunk(3))
    with scripted_server({"big": big}, tls=context) as server:
        target = Target("mock", server.url, "m")
        run_stage(target, stage_of(prompts("x")), tmp_path / "distrusted")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        run_stage(target, stage_of(prompts("big", "x", "y" * 3_000_000, gap=0.1)), tmp_path / "log")
    assert "certificate verify failed" in (read_log(tmp_path / "distrusted").records[0].error or "")
    log = read_log(tmp_path / "log")
    assert [record.error for record in log.records] == [None] * 3
    assert [record.output_tokens for record in log.records] == [3, 3, 3]


INTERRUPTED = """
import sys
from pathlib import Path
from paceline.lab.client.run import run_stage
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target
requests = [PlannedRequest(i, i * 0.1, "x", 3) for i in range(200)]
def on_progress(progress):
    if progress.ended >= 5:
        print("now", flush=True)
run_stage(Target("mock", sys.argv[1], "m"), Stage("s", requests, {}, 60.0), Path(sys.argv[2]), on_progress=on_progress)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", -signal.SIGINT), ("SIGKILL", -signal.SIGKILL)])
def test_an_interrupted_stage_leaves_a_log(tmp_path: Path, name: str, status: int) -> None:
    with scripted_server() as server:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, server.url, str(tmp_path / "log")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        process.send_signal(getattr(signal, name))
        errors = process.communicate(timeout=20)[1]
        assert process.returncode == status
        assert (b"KeyboardInterrupt" in errors) == (name == "SIGINT")
        seen = len(server.arrivals)
        time.sleep(0.3)
        assert len(server.arrivals) <= seen + 1, "the workers ended too"
    log = read_log(tmp_path / "log")
    assert log.interrupted
    assert len(log.records) == 200
    assert sum(record.ok for record in log.records) >= 5
    assert log.records[-1].error == "not sent before the log breaks off"
    if name == "SIGINT":
        assert log.client["workers"] == 1


def test_a_log_that_ends_anywhere_can_be_read(tmp_path: Path) -> None:
    measure(None, stage_of(prompts("x", "y")), tmp_path)
    data = (tmp_path / "log").read_bytes()
    head = len(MAGIC) + FRAME.size + len(next(frames(tmp_path / "log"))[1])
    cut = tmp_path / "cut"
    good = 0
    for size in range(len(data) - 1, 0, -7):
        cut.write_bytes(data[:size])
        try:
            log = read_log(cut)
        except InvalidLog:
            assert size < head
        else:
            good += 1
            assert log.interrupted
            assert len(log.records) == 2
    assert good > 10


def test_progress_that_raises_ends_the_stage(tmp_path: Path) -> None:
    def on_progress(progress: Progress) -> None:
        raise OverflowError

    with pytest.raises(OverflowError):
        measure(lambda a: tokens(3, 0.2), stage_of(prompts("x")), tmp_path, on_progress=on_progress)
    log = read_log(tmp_path / "log")
    assert log.interrupted
    assert log.records[0].error in (
        "not answered before the log breaks off",
        "not sent before the log breaks off",
    )


def test_bad_plans(tmp_path: Path) -> None:
    with scripted_server() as server:
        target = Target("mock", server.url, "m")
        with pytest.raises(ValueError, match="waits for request 1"):
            run_stage(target, stage_of([PlannedRequest(0, 0.0, "x", 1, after=1)]), tmp_path / "log")
        turns = [PlannedRequest(0, 0.0, "x", 1), PlannedRequest(1, 0.0, "y", 1, after=0, needs=True)]
        with pytest.raises(ValueError, match="request 0: turns are messages"):
            run_stage(target, stage_of(turns), tmp_path / "log")
    with pytest.raises(ValueError, match="not a URL"):
        run_stage(Target("mock", "localhost:8000", "m"), stage_of(prompts("x")), tmp_path / "log")
    with pytest.raises(InvalidLog):
        read_log(Path(__file__))
