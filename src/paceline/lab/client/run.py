"""Sends a stage and writes its log."""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import fmean

import msgspec

from paceline.lab.client.address import Address, resolve
from paceline.lab.client.log import LogWriter, compress, header
from paceline.lab.client.machine import machine
from paceline.lab.client.plan import COUNTERS, LENGTH, START, Counters, Item, Plan, Turn
from paceline.lab.client.probe import probe
from paceline.lab.client.request_bytes import RequestMaker, is_chat
from paceline.lab.command_line import command_line
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target

CHUNKS_PER_WORKER = 10_000
"""Chunks a second that one worker takes with room to spare."""
CHUNKS_PER_STREAM = 20
"""A second: what is assumed of one reply where the load has no rate."""
SETTLE_S = 0.1
"""From the news that all workers are ready to the start."""
CLOSE_S = 10.0
"""Longest wait for a worker to write its last entries."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a stage so far."""

    sent: int
    ended: int
    failed: int
    """Of those ended, as far as is known before the log is read."""
    total: int
    elapsed_s: float


class LoadWorkerFailed(RuntimeError):
    """A worker process broke; its standard error says why. The log has what it wrote until then."""


def run_stage(
    target: Target,
    stage: Stage,
    log: Path,
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Sends the stage's requests when they are due and logs what comes back, until all have ended or the deadline.

    The log can be read however this ends; an exception (KeyboardInterrupt too) is raised again once it is closed.

    Args:
        log: the file that is written; one that exists is replaced.
        workers: processes that send; None: as many as the load needs, at most half the cores.
        on_progress: called some times a second, in this thread.

    Raises:
        ValueError: the target's URL is none, or a prompt that needs a reply is not messages.
        LoadWorkerFailed: see there.
    """
    address = resolve(target)
    options = probe(target, stage, address)
    maker = RequestMaker.of(target, stage, options, address.host, address.prefix)
    plans = _plans(stage, log, address, maker, workers or default_workers(stage))
    log.parent.mkdir(parents=True, exist_ok=True)
    writer = LogWriter(log, new=True)
    interrupted = True
    try:
        writer.json(
            b"H",
            header(
                stage,
                target,
                options=options,
                machine=machine(),
                command=command_line(),
                started_at=datetime.now(UTC).isoformat(),
            ),
        )
        _carry_out(plans, writer, len(stage.requests), on_progress)
        interrupted = False
    finally:
        writer.json(b"F", {"interrupted": interrupted})
        writer.close()
    compress(log)


def default_workers(stage: Stage) -> int:
    """One for every `CHUNKS_PER_WORKER` that are expected a second, but at most half the cores: the other half is for
    a server on this machine."""
    if not stage.requests:
        return 1
    if stage.offered_rate is not None:
        chunks = stage.offered_rate * fmean(request.output_tokens for request in stage.requests)
    else:
        chunks = (stage.batch or len(stage.requests)) * CHUNKS_PER_STREAM
    return max(1, min(ceil(chunks / CHUNKS_PER_WORKER), len(os.sched_getaffinity(0)) // 2))


def _plans(stage: Stage, log: Path, address: Address, maker: RequestMaker, workers: int) -> list[Plan]:
    """Deals the requests out; those that wait for each other go to the same worker."""
    needed = {request.after for request in stage.requests if request.needs}
    items: dict[int, list[Item]] = defaultdict(list)
    worker_of: dict[int, int] = {}
    roots = 0
    for request in stage.requests:
        if request.after is None:
            worker_of[request.id] = roots % workers
            roots += 1
        elif request.after in worker_of:
            worker_of[request.id] = worker_of[request.after]
        else:
            raise ValueError(f"request {request.id} waits for request {request.after}, which is not before it")
        items[worker_of[request.id]].append(_item(request, maker, in_turns=request.needs or request.id in needed))
    return [Plan(str(log), address, maker, stage.deadline_s, each) for each in items.values()]


def _item(request: PlannedRequest, maker: RequestMaker, *, in_turns: bool) -> Item:
    turn = None
    if in_turns:
        if not is_chat(request.prompt):
            raise ValueError(f"request {request.id}: turns are messages, and its prompt is not")
        turn = Turn(request.prompt, request.output_tokens)  # type: ignore[arg-type]
    payload = b"" if request.needs else maker.make(request.prompt, request.output_tokens)
    return Item(request.id, request.due, request.after, payload, turn)


def _carry_out(
    plans: Sequence[Plan], log: LogWriter, total: int, on_progress: Callable[[Progress], None] | None
) -> None:
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    command = [sys.executable, "-P", "-m", "paceline.lab.client.worker"]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in plans:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
            )
            stack.callback(_stop, process)
            processes.append(process)
        for process, plan in zip(processes, plans, strict=True):
            data = msgspec.msgpack.encode(plan)
            _tell(process, LENGTH.pack(len(data)) + data)
        for process in processes:
            if not _news(process):
                raise LoadWorkerFailed(f"a load worker exited with status {process.wait()}")
        start = time.monotonic() + SETTLE_S
        log.frame(b"S", START.pack(start))
        for process in processes:
            _tell(process, START.pack(start))
        _watch(processes, start, total, on_progress)
    if any(process.returncode for process in processes):
        raise LoadWorkerFailed(f"load workers exited with status {[process.returncode for process in processes]}")


def _watch(
    processes: "Sequence[subprocess.Popen[bytes]]",
    start: float,
    total: int,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    """Until all workers have ended their output."""
    latest = {process.pid: Counters() for process in processes}
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                news = _news(key.data)
                if not news:
                    selector.unregister(key.fileobj)
                    continue
                latest[key.data.pid] = Counters(*COUNTERS.unpack(news[-COUNTERS.size :]))
            if on_progress is not None:
                parts = latest.values()
                on_progress(
                    Progress(
                        sent=sum(part.sent for part in parts),
                        ended=sum(part.ended for part in parts),
                        failed=sum(part.failed for part in parts),
                        total=total,
                        elapsed_s=max(0.0, time.monotonic() - start),
                    )
                )


def _news(process: "subprocess.Popen[bytes]") -> bytes:
    """Whole messages: a worker writes each with one call. Empty when it has exited."""
    assert process.stdout is not None
    return process.stdout.read(COUNTERS.size * 100) or b""


def _tell(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    try:
        while view:
            view = view[process.stdin.write(view) or 0 :]
    except BrokenPipeError:
        raise LoadWorkerFailed(f"a load worker exited with status {process.wait()}") from None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a worker: closing its input makes it write what it has and exit."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
