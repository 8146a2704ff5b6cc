"""paceline on one GPU, in process: TPOT, offline throughput, online rates, start-up, mixed traffic, long context.

    python benchmarks/h200.py --out benchmarks/results/h200-DATE.jsonl [--modes bf16,fp8,fp8kv] [--cases tpot,...]

Model: the Llama-3-8B shape with random weights; random prompts, greedy, no end-of-sequence id, no prefix cache. Modes:
``bf16``; ``fp8``: FP8 weights; ``fp8kv``: FP8 weights, keys and values. Every line of the result is one row, written
as soon as it is measured.

TPOT is (wall time for 128 output tokens - wall time for 1) / 127, with ``batch`` requests sent at once. Throughput is
output tokens over wall time, all requests sent at once. Online rows send requests at Poisson times and count TTFT from
the time at which a request was due. One default configuration serves every row, unless a row names its ``flags``:
online rows have the budget of a promise of 20 ms, and one row of long outputs runs as many requests as fit.

With ``--step-logs FOLDER`` every engine logs its steps, and a row names the lines that are its own: ``predict_h200.py``
fits to them. An engine that fails, or a row that is wrong, does not end the run; the exit status then is 1.
"""

import argparse
import json
import logging
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h200_loads as loads
import numpy as np
from h200_floors import attention_s, decode_floor_s, gemm_s
from h200_rows import Results, engine_sizes, git_commit, package
from h200_stress import pressure, soak
from llama_shape import VOCABULARY, make_llama_shape

from paceline import LLM, SamplingParams
from paceline.engine.request import Request
from paceline.engine.sizes import DEFAULTS

MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
TPOT = {
    "bf16": [*((1 << power, 2048) for power in range(9)), (1, 128), (8, 128), (64, 128)],
    "fp8": [(1, 2048), (8, 2048), (64, 2048)],
    "fp8kv": [*((1 << power, 2048) for power in range(7)), (1, 128), (8, 128), (64, 128)],
}
THROUGHPUT = {
    "bf16": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512)],
    "fp8": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512)],
    "fp8kv": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512)],
}
CROWDED = {"bf16": [(128, 2048, 768)]}
"""Throughput rows whose requests together want twice the memory that is there, so that most would be preempted."""
CROWDED_FLAGS = {"max_num_seqs": 384}
"""As many as fit until they end."""
RATES = {"bf16": [(8.0, 96), (11.0, 132), (13.0, 156), (14.0, 168), (15.0, 180)]}
ONLINE_FLAGS = {loads.BUDGET: 640}
"""Steps of at most 20 ms."""
SOAK_KV_BYTES = {"bf16": 24 << 30, "fp8": 24 << 30, "fp8kv": 12 << 30}
"""A quarter of what 1,024 rows want, so that many requests are preempted."""
HTTP = (128, 128, 2048)
CASES = ("start", "tpot", "throughput", "rps", "http", "mixed", "long", "soak", "memory")


def prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng().integers(0, VOCABULARY, (count, length)).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def timed(llm: LLM, batch: list[list[int]], tokens: int) -> float:
    started = time.perf_counter()
    answers = llm.generate(batch, greedy(tokens), progress=False)
    seconds = time.perf_counter() - started
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert made == len(batch) * tokens, f"{made} tokens instead of {len(batch) * tokens}"
    return seconds


def tpot(llm: LLM, results: Results, cases: list[tuple[int, int]]) -> None:
    """The median of five runs up to 8 requests, where a hiccup of 10 ms would be 2% of the result.

    Each time follows prompts: a GPU that rested computes the next 0.4 s of them up to 5% faster, and if only the first
    of the two times did, the second would seem to decode more slowly.
    """
    for batch, length in cases:
        begin, runs = results.logged(llm), []
        for _ in range(5 if batch <= 8 else 1):
            timed(llm, prompts(batch, length), 8)
            one = timed(llm, prompts(batch, length), 1)
            many = timed(llm, prompts(batch, length), loads.BURST_OUTPUT)
            runs.append(((many - one) / (loads.BURST_OUTPUT - 1) * 1e3, one, many))
        tpot_ms, one, many = sorted(runs)[len(runs) // 2]
        results.add(
            kind="tpot",
            batch=batch,
            prompt=length,
            prefill_s=one,
            tpot_ms=tpot_ms,
            runs_ms=[run[0] for run in runs],
            out_tps=batch * loads.BURST_OUTPUT / many,
            **results.steps(llm, begin),
        )


def throughput(llm: LLM, results: Results, cases: list[tuple[int, int, int]]) -> None:
    for length, tokens, count in cases:
        begin = results.logged(llm)
        seconds = timed(llm, prompts(count, length), tokens)
        results.add(
            kind="throughput",
            inp=length,
            out=tokens,
            n=count,
            s=seconds,
            out_tps=count * tokens / seconds,
            total_tps=count * (length + tokens) / seconds,
            **results.steps(llm, begin),
        )


@dataclass
class Timed:
    """When a request was due and when its tokens came."""

    due: float
    tokens: list[float] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share))


def serve(llm: LLM, arrivals: Iterator[tuple[float, list[int], int]]) -> list[Timed]:
    """Sends ``(seconds from the start, prompt, output tokens)``; returns once all are answered."""
    core = llm.core
    served: list[Timed] = []
    started = time.perf_counter()
    pending = next(arrivals, None)
    while pending is not None or core.has_work:
        now = time.perf_counter() - started
        while pending is not None and pending[0] <= now:
            due, prompt, tokens = pending
            core.add(Request(id=len(served), prompt=prompt, params=greedy(tokens), seed=0, priority=0, arrival=due))
            served.append(Timed(due))
            pending = next(arrivals, None)
        if not core.has_work and pending is not None:
            time.sleep(min(0.0005, max(0.0, pending[0] - now)))
            continue
        outputs = core.step()
        now = time.perf_counter() - started
        for output in outputs:
            served[output.request].tokens += [now] * len(output.ids)
    core.check_idle()
    return served


def online(llm: LLM, results: Results, cases: list[tuple[float, int]]) -> None:
    for rate, count in cases:
        due = zip(loads.poisson(rate, count), prompts(count, loads.PROMPT), strict=True)
        arrivals = [(when, prompt, loads.OUTPUT) for when, prompt in due]
        begin, started = results.logged(llm), time.perf_counter()
        served = serve(llm, iter(arrivals))
        seconds = time.perf_counter() - started
        ttft = [one.tokens[0] - one.due for one in served]
        each = [(one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) * 1e3 for one in served]
        results.add(
            kind="rps",
            rps=rate,
            n=count,
            ttft_mean=float(np.mean(ttft)),
            ttft_p50=percentile(ttft, 50),
            ttft_p99=percentile(ttft, 99),
            tpot_mean_ms=float(np.mean(each)),
            tpot_p99_ms=percentile(each, 99),
            out_tps=count * loads.OUTPUT / seconds,
            **results.steps(llm, begin),
        )


def mixed(llm: LLM, seconds: float) -> dict[str, float]:
    """64 requests decode while prompts of 2,048 tokens keep arriving: when one has its token, the next is sent."""
    core = llm.core
    fresh = iter(prompts(2000, loads.PROMPT))
    decoding, tokens = loads.DECODING, loads.DECODING_OUTPUT
    gaps: list[float] = []
    last: dict[int, float] = {}
    for id, prompt in enumerate(prompts(decoding, loads.DECODING_PROMPT)):
        core.add(Request(id=id, prompt=prompt, params=greedy(tokens), seed=0, priority=0, arrival=0.0))
    while len(last) < decoding:
        for output in core.step():
            last[output.request] = time.perf_counter()
    next_id, prompt_tokens, output_tokens = decoding, 0, 0
    started = time.perf_counter()

    def send() -> None:
        nonlocal next_id
        core.add(Request(id=next_id, prompt=next(fresh), params=greedy(1), seed=0, priority=0, arrival=float(next_id)))
        next_id += 1

    for _ in range(loads.ARRIVING):
        send()
    while time.perf_counter() - started < seconds:
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request < decoding:
                gaps.append(now - last[output.request])
                last[output.request] = now
                output_tokens += len(output.ids)
            else:
                prompt_tokens += loads.PROMPT
                send()
    elapsed = time.perf_counter() - started
    for id in range(next_id):
        core.abort(id)
    while core.has_work:
        core.step()
    core.check_idle()
    return {
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
        "out_tps": output_tokens / elapsed,
        "prompt_tps": prompt_tokens / elapsed,
    }


def long_context(llm: LLM, results: Results, mode: str, length: int = 131_072, tokens: int = 128) -> None:
    """One request that fills the context, beside what its parts take at least (`h200_floors`)."""
    timed(llm, prompts(1, length // 16), 2)
    [served] = serve(llm, iter([(0.0, prompts(1, length - tokens)[0], tokens)]))
    assert len(served.tokens) == tokens, f"{len(served.tokens)} tokens instead of {tokens}"
    prefill_s = served.tokens[0] - served.due
    tpot_s = (served.tokens[-1] - served.tokens[0]) / (tokens - 1)
    attention, linear, decode = attention_s(length), gemm_s(mode, length), decode_floor_s(mode, length)
    results.add(
        kind="long",
        context=length,
        prefill_s=prefill_s,
        tpot_ms=tpot_s * 1e3,
        cudnn_attention_s=attention,
        gemm_s=linear,
        prefill_ratio=prefill_s / (attention + linear),
        decode_floor_ms=decode * 1e3,
        decode_ratio=tpot_s / decode,
    )


def http(folder: Path, results: Results, mode: str, knobs: dict[str, int], in_process: float) -> None:
    """A burst by `paceline bench throughput` to `paceline serve`, beside ``in_process`` output tokens a second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paceline = [sys.executable, "-m", "paceline"]
    settings = {**MODES[mode], **knobs}
    flags = [text for knob, value in settings.items() for text in (f"--{knob.replace('_', '-')}", str(value))]
    serve = [*paceline, "serve", str(folder), "--load-format=dummy", "--no-prefix-cache", f"--port={port}", *flags]
    length, tokens, count = HTTP
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "http.json"
        bench = [
            *paceline,
            "bench",
            "throughput",
            f"--url=http://127.0.0.1:{port}",
            f"--model={folder}",
            f"--command={shlex.join(serve)}",
        ]
        load = [f"--shapes={length}x{tokens}", f"--requests={count}", f"--logs={scratch}/logs", f"--json={file}"]
        # It exits with 1 where a point is not valid.
        done = subprocess.run([*bench, *load], check=False, stdout=sys.stderr).returncode
        points = json.loads(file.read_text())["points"] if file.is_file() else []
        assert points, f"paceline bench exited with {done} and measured nothing"
        [point] = points
    results.add(
        kind="http",
        inp=length,
        out=tokens,
        n=count,
        out_tps=point["output_tokens_per_s"],
        in_process_tps=in_process,
        ratio=point["output_tokens_per_s"] / in_process if point["valid"] else None,
        valid=point["valid"],
        reasons=point["reasons"],
        requests=point["requests"],
    )
    assert point["valid"], f"not valid: {point['reasons']}"


def profile(llm: LLM, folder: Path, load: str) -> None:
    """Where the time of steps goes: a table on the terminal and a trace for chrome://tracing and `timeline.py`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    def work() -> None:
        if load == "mixed":
            mixed(llm, 1.0)
        else:
            batch, length = map(int, load.split("x"))
            timed(llm, prompts(batch, length), 12)

    work()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60))
    profiler.export_chrome_trace(str(folder / f"trace-{load}.json.gz"))


def engine(folder: Path, results: Results, mode: str, **flags: Any) -> LLM:
    """The engine of a mode, and a row for the time that it took to be ready."""
    log = results.begin_engine(mode, flags)
    started = time.perf_counter()
    llm = LLM(folder, load_format="dummy", prefix_cache=False, step_log=log, **MODES[mode], **flags)
    ready = time.perf_counter() - started
    logged = {} if results.step_log is None else {"step_log": results.step_log.name}
    results.add(kind="start", version=package("paceline"), init_s=ready, sizes=engine_sizes(llm), **logged)
    while llm.core.idle():  # it captures graphs until the first request comes
        pass
    return llm


@contextmanager
def attempt(failed: list[str], name: str) -> Iterator[None]:
    """Goes on with the next engine where one fails."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        failed.append(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--modes", default="bf16,fp8,fp8kv")
    parser.add_argument("--cases", default="tpot,throughput,rps", help=f"some of {','.join(CASES)}")
    parser.add_argument("--batches", default="", help="only these batches of tpot, for example 1,8,64")
    parser.add_argument("--only", default="", help="only these throughput rows, for example 128x128,2048x128")
    parser.add_argument("--rates", default="", help="only these request rates")
    parser.add_argument(
        "--budgets", default="512,2048,8192", help="max_num_batched_tokens of the mixed rows [default: %(default)s]"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="of the engine, for example max_num_batched_tokens=512; rows name it",
    )
    parser.add_argument("--step-logs", type=Path, help="folder for a step log of each engine; rows name their lines")
    parser.add_argument("--commit", default="", help="recorded in each row; default: what git says")
    parser.add_argument("--profile", default="", help="BATCHxPROMPT or mixed: profile steps instead")
    options = parser.parse_args()
    cases = set(options.cases.split(","))
    modes = options.modes.split(",")
    for given, known in ((cases, CASES), (modes, MODES)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join(known)}")
    batches = {int(batch) for batch in options.batches.split(",") if batch}
    shapes = set(filter(None, options.only.split(",")))
    knobs = {key: int(value) for key, value in (each.split("=") for each in options.set)}
    rates = {float(rate) for rate in options.rates.split(",") if rate}
    budgets = [int(budget) for budget in options.budgets.split(",")]

    def chosen(case: tuple[int, int, int]) -> bool:
        return not shapes or f"{case[0]}x{case[1]}" in shapes

    results = Results(options.out, options.commit or git_commit(), options.step_logs)
    if options.step_logs:
        options.step_logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    results.machine()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama_shape(Path(scratch) / "llama-3-8b")
        if options.profile:
            for mode in modes:
                with engine(folder, results, mode, **knobs) as llm:
                    for load in options.profile.split(","):
                        profile(llm, options.out.parent, load)
            return
        for mode in modes:
            if {"start", "tpot", "throughput"} & cases:
                with attempt(failed, f"{mode} rows"), engine(folder, results, mode, **knobs) as llm:
                    if "tpot" in cases:
                        tpot(llm, results, [case for case in TPOT[mode] if not batches or case[0] in batches])
                    if "throughput" in cases:
                        throughput(llm, results, list(filter(chosen, THROUGHPUT[mode])))
            if "throughput" in cases and (crowded := list(filter(chosen, CROWDED.get(mode, [])))):
                flags = {**CROWDED_FLAGS, **knobs}
                with attempt(failed, f"{mode} crowded"), engine(folder, results, mode, **flags) as llm:
                    throughput(llm, results, crowded)
            if "rps" in cases and mode in RATES:
                flags = {**ONLINE_FLAGS, **knobs}
                with attempt(failed, f"{mode} online"), engine(folder, results, mode, **flags) as llm:
                    online(llm, results, [case for case in RATES[mode] if not rates or case[0] in rates])
            if "http" in cases:
                with attempt(failed, f"{mode} http"):
                    length, tokens, count = HTTP
                    # A server's own default is smaller, and it is the way to the client that is measured.
                    equal = {loads.BUDGET: DEFAULTS["cuda"].max_num_batched_tokens, **knobs}
                    with engine(folder, results, mode, **equal) as llm:
                        timed(llm, prompts(64, length), 8)
                        seconds = timed(llm, prompts(count, length), tokens)
                    http(folder, results, mode, equal, count * tokens / seconds)
            if "mixed" in cases:
                for budget in budgets:
                    flags = {**knobs, loads.BUDGET: budget}
                    with attempt(failed, f"{mode} mixed {budget}"), engine(folder, results, mode, **flags) as llm:
                        begin, figures = results.logged(llm), mixed(llm, loads.MIXED_S)
                        results.add(kind="mixed", budget=budget, **figures, **results.steps(llm, begin))
        if "memory" in cases:
            for mode in modes:
                full: dict[str, Any] = {**knobs, "kv_cache_share": 0.95}
                with attempt(failed, f"{mode} memory"), engine(folder, results, mode, **full) as llm:
                    pressure(llm, results)
        if "long" in cases:
            long = make_llama_shape(Path(scratch) / "long", max_position_embeddings=131_072)
            for mode in modes:
                with attempt(failed, f"{mode} long"), engine(long, results, mode, **knobs) as llm:
                    long_context(llm, results, mode)
        if "soak" in cases:
            for mode in modes:
                flags = {"kv_cache_bytes": SOAK_KV_BYTES[mode], **knobs}
                with attempt(failed, f"{mode} soak"), engine(folder, results, mode, **flags) as llm:
                    soak(llm, results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
