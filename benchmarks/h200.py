"""paceline on one GPU, in process: TPOT, offline throughput, online rates, start-up, mixed traffic, long context.

    python benchmarks/h200.py --out benchmarks/results/h200-DATE.jsonl [--modes bf16,fp8,fp8kv] [--cases tpot,...]

Model: the Llama-3-8B shape with random weights; random prompts, greedy, no end-of-sequence id, no prefix cache. Modes:
``bf16``; ``fp8``: FP8 weights; ``fp8kv``: FP8 weights, keys and values. Every line of the result is one row, written
as soon as it is measured.

TPOT is (wall time for 128 output tokens - wall time for 1) / 127, with ``batch`` requests sent at once. Throughput is
output tokens over wall time, all requests sent at once. Online rows send requests at Poisson times and count TTFT from
the time at which a request was due. One default configuration serves every row, unless a row names its ``flags``.
"""

import argparse
import json
import logging
import platform
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_shape import VOCABULARY, make_llama_shape

from paceline import LLM, SamplingParams
from paceline.engine.request import Request

MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
TPOT = {
    "bf16": [*((1 << power, 2048) for power in range(9)), (1, 128), (8, 128), (64, 128)],
    "fp8": [(1, 2048), (8, 2048), (64, 2048)],
    "fp8kv": [(1, 2048), (8, 2048), (64, 2048)],
}
THROUGHPUT = {
    "bf16": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512), (128, 2048, 768)],
    "fp8": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512)],
    "fp8kv": [(128, 128, 2048), (2048, 128, 512), (2048, 2048, 192), (128, 2048, 512)],
}
RATES = {"bf16": [(8.0, 96), (11.0, 132), (13.0, 156), (14.0, 168), (15.0, 180)]}
BUDGETS = (512, 2048, 8192)
CASES = ("start", "tpot", "throughput", "rps", "http", "mixed", "long", "soak", "memory")


def git_commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


@dataclass
class Results:
    """Writes rows as they come."""

    file: Path
    commit: str
    step_logs: Path | None = None
    mode: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    engines: int = 0

    def add(self, **row: Any) -> None:
        full = {"engine": "paceline", "mode": self.mode, **row, "flags": self.flags, "commit": self.commit}
        line = json.dumps(full)
        print(line, flush=True)
        with self.file.open("a") as out:
            out.write(line + "\n")

    def step_log(self) -> str | None:
        """Where the next engine logs its steps."""
        if self.step_logs is None:
            return None
        self.engines += 1
        knobs = "".join(f"-{knob}={value}" for knob, value in self.flags.items())
        return str(self.step_logs / f"{self.engines}-{self.mode}{knobs}.jsonl")

    def machine(self) -> None:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.add(
            kind="machine",
            gpu=torch.cuda.get_device_name(),
            driver=driver.stdout.strip(),
            torch=torch.__version__,
            triton=package("triton"),
            cuda=torch.version.cuda,
            python=platform.python_version(),
            command=" ".join(["python", "benchmarks/h200.py", *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


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
    """The median of three runs up to 8 requests, where a hiccup of 10 ms would be 2% of the result."""
    for batch, length in cases:
        timed(llm, prompts(batch, length), 8)
        runs = []
        for _ in range(3 if batch <= 8 else 1):
            one = timed(llm, prompts(batch, length), 1)
            many = timed(llm, prompts(batch, length), 128)
            runs.append(((many - one) / 127 * 1e3, one, many))
        tpot_ms, one, many = sorted(runs)[len(runs) // 2]
        results.add(
            kind="tpot",
            batch=batch,
            prompt=length,
            prefill_s=one,
            tpot_ms=tpot_ms,
            runs_ms=[run[0] for run in runs],
            out_tps=batch * 128 / many,
        )


def throughput(llm: LLM, results: Results, cases: list[tuple[int, int, int]]) -> None:
    for length, tokens, count in cases:
        seconds = timed(llm, prompts(count, length), tokens)
        results.add(
            kind="throughput",
            inp=length,
            out=tokens,
            n=count,
            s=seconds,
            out_tps=count * tokens / seconds,
            total_tps=count * (length + tokens) / seconds,
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
        clock, arrivals = 0.0, []
        chance = random.Random(1)
        for prompt in prompts(count, 2048):
            arrivals.append((clock, prompt, 128))
            clock += chance.expovariate(rate)
        started = time.perf_counter()
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
            out_tps=count * 128 / seconds,
        )


def mixed(llm: LLM, results: Results, seconds: float = 10.0) -> None:
    """64 requests decode while prompts of 2,048 tokens keep arriving: when one has its token, the next is sent."""
    core = llm.core
    decoding, tokens = 64, 4096
    gaps: list[float] = []
    last: dict[int, float] = {}
    for id, prompt in enumerate(prompts(decoding, 128)):
        core.add(Request(id=id, prompt=prompt, params=greedy(tokens), seed=0, priority=0, arrival=0.0))
    while len(last) < decoding:
        for output in core.step():
            last[output.request] = time.perf_counter()
    next_id, prompt_tokens, output_tokens = decoding, 0, 0
    fresh = iter(prompts(2000, 2048))
    started = time.perf_counter()

    def send() -> None:
        nonlocal next_id
        core.add(Request(id=next_id, prompt=next(fresh), params=greedy(1), seed=0, priority=0, arrival=float(next_id)))
        next_id += 1

    send()
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
                prompt_tokens += 2048
                send()
    elapsed = time.perf_counter() - started
    for id in range(next_id):
        core.abort(id)
    while core.has_work:
        core.step()
    core.check_idle()
    results.add(
        kind="mixed",
        budget=llm.config.max_num_batched_tokens,
        gap_p50_ms=percentile(gaps, 50) * 1e3,
        gap_p99_ms=percentile(gaps, 99) * 1e3,
        out_tps=output_tokens / elapsed,
        prompt_tps=prompt_tokens / elapsed,
    )


def long_context(llm: LLM, results: Results, length: int = 131_072) -> None:
    batch = prompts(1, length - 130)
    timed(llm, prompts(1, 8192), 2)
    one = timed(llm, batch, 1)
    many = timed(llm, prompts(1, length - 130), 128)
    results.add(kind="long", context=length, prefill_s=one, tpot_ms=(many - one) / 127 * 1e3)


def soak(llm: LLM, results: Results, seconds: float = 300.0) -> None:
    """Random lengths, aborts and preemptions at full load; memory of the GPU and of the process before and after."""
    core, chance = llm.core, random.Random(0)
    resident = memory()
    free = torch.cuda.mem_get_info()[0]
    ids = tokens = aborted = 0
    alive: set[int] = set()
    started = time.perf_counter()
    preempted = core.stats.preemptions
    while time.perf_counter() - started < seconds or core.has_work:
        while len(alive) < 1500 and time.perf_counter() - started < seconds:
            length = int(chance.lognormvariate(5.5, 1.2)) + 1
            prompt = prompts(1, min(length, 6000))[0]
            params = SamplingParams(
                temperature=chance.choice([0.0, 0.8]),
                top_p=chance.choice([1.0, 1.0, 0.9]),
                max_tokens=min(2000, int(chance.lognormvariate(5.5, 1.0)) + 1),
                ignore_eos=True,
            )
            core.add(Request(id=ids, prompt=prompt, params=params, seed=ids, priority=0, arrival=float(ids)))
            alive.add(ids)
            ids += 1
        if alive and chance.random() < 0.3:
            victim = chance.choice(list(alive)) if len(alive) < 50 else next(iter(alive))
            core.abort(victim)
            alive.discard(victim)
            aborted += 1
        for output in core.step():
            assert not output.error, output.error
            tokens += len(output.ids)
            if output.finish is not None:
                alive.discard(output.request)
    core.check_idle()
    results.add(
        kind="soak",
        s=time.perf_counter() - started,
        requests=ids,
        aborted=aborted,
        tokens=tokens,
        preemptions=core.stats.preemptions - preempted,
        gpu_bytes_lost=free - torch.cuda.mem_get_info()[0],
        host_bytes_gained=memory() - resident,
    )


def pressure(llm: LLM, results: Results, count: int = 1024) -> None:
    """Every request asks for what takes most memory: log-probabilities of prompt and reply, penalties, filters."""
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        min_tokens=8,
        logit_bias={5: 1.0},
        logprobs=20,
        prompt_logprobs=20,
        max_tokens=64,
        ignore_eos=True,
    )
    started = time.perf_counter()
    answers = llm.generate(prompts(count, 512), params, progress=False)
    assert not any(answer.outputs[0].error for answer in answers)
    results.add(
        kind="memory",
        n=count,
        s=time.perf_counter() - started,
        gpu_bytes_free=torch.cuda.mem_get_info()[0],
        reserved=torch.cuda.memory_reserved(),
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
    length, tokens, count = 128, 128, 2048
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
        subprocess.run([*bench, *load], check=True, stdout=sys.stderr)
        point = json.loads(file.read_text())["points"][0]
    results.add(
        kind="http",
        inp=length,
        out=tokens,
        n=count,
        out_tps=point["output_tokens_per_s"],
        in_process_tps=in_process,
        ratio=point["output_tokens_per_s"] / in_process,
        valid=point["valid"],
        reasons=point["reasons"],
        requests=point["requests"],
    )


def memory() -> int:
    """Resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def profile(llm: LLM, folder: Path, batch: int, length: int) -> None:
    """Where the time of decode steps goes: a table on the terminal and a trace for chrome://tracing."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    timed(llm, prompts(batch, length), 4)
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        timed(llm, prompts(batch, length), 12)
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60))
    profiler.export_chrome_trace(str(folder / f"trace-{batch}x{length}.json.gz"))


def engine(folder: Path, results: Results, mode: str, **flags: Any) -> LLM:
    """The engine of a mode, and a row for the time that it took to be ready."""
    results.mode, results.flags = mode, flags
    log = results.step_log()
    started = time.perf_counter()
    llm = LLM(folder, load_format="dummy", prefix_cache=False, step_log=log, **MODES[mode], **flags)
    results.add(kind="start", version=package("paceline"), init_s=time.perf_counter() - started)
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--modes", default="bf16,fp8,fp8kv")
    parser.add_argument("--cases", default="tpot,throughput,rps")
    parser.add_argument("--batches", default="", help="only these batches of tpot, for example 1,8,64")
    parser.add_argument("--only", default="", help="only these throughput rows, for example 128x128,2048x128")
    parser.add_argument("--rates", default="", help="only these request rates")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="of the engine, for example max_num_batched_tokens=512; rows name it",
    )
    parser.add_argument("--step-logs", type=Path, help="folder for the steps of the engine of each mode and knobs")
    parser.add_argument("--commit", default="", help="recorded in each row; default: what git says")
    parser.add_argument("--profile", default="", help="BATCHxPROMPT: profile decode steps instead")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    batches = {int(batch) for batch in options.batches.split(",") if batch}
    shapes = set(filter(None, options.only.split(",")))
    knobs = {key: int(value) for key, value in (each.split("=") for each in options.set)}
    rates = {float(rate) for rate in options.rates.split(",") if rate}
    results = Results(options.out, options.commit or git_commit(), options.step_logs)
    if options.step_logs:
        options.step_logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    results.machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama_shape(Path(scratch) / "llama-3-8b")
        for mode in options.modes.split(","):
            if {"start", "tpot", "throughput", "rps", "soak"} & set(cases) or options.profile:
                with engine(folder, results, mode, **knobs) as llm:
                    if options.profile:
                        for shape in options.profile.split(","):
                            batch, length = map(int, shape.split("x"))
                            profile(llm, options.out.parent, batch, length)
                        continue
                    if "tpot" in cases:
                        tpot(llm, results, [case for case in TPOT[mode] if not batches or case[0] in batches])
                    if "throughput" in cases:
                        chosen = [case for case in THROUGHPUT[mode] if not shapes or f"{case[0]}x{case[1]}" in shapes]
                        throughput(llm, results, chosen)
                    if "rps" in cases:
                        online(llm, results, [case for case in RATES.get(mode, []) if not rates or case[0] in rates])
                    if "soak" in cases:
                        soak(llm, results)
            if "http" in cases:
                with engine(folder, results, mode, **knobs) as llm:
                    timed(llm, prompts(64, 128), 8)
                    seconds = timed(llm, prompts(2048, 128), 128)
                http(folder, results, mode, knobs, 2048 * 128 / seconds)
            if "mixed" in cases:
                for budget in BUDGETS:
                    with engine(folder, results, mode, max_num_batched_tokens=budget) as llm:
                        mixed(llm, results)
        if "memory" in cases:
            for mode in options.modes.split(","):
                with engine(folder, results, mode, kv_cache_share=0.95) as llm:
                    pressure(llm, results)
        if "long" in cases:
            long = make_llama_shape(Path(scratch) / "long", max_position_embeddings=131_072)
            for mode in options.modes.split(","):
                with engine(long, results, mode) as llm:
                    long_context(llm, results)


if __name__ == "__main__":
    main()
