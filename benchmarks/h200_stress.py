"""Loads of `h200.py` under which nothing may be lost: many aborts and preemptions, and all memory in use."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from h200_rows import Results
from llama_shape import VOCABULARY

from paceline import LLM, SamplingParams
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler

MIB = 1 << 20
WARM_S = 30.0
"""Of the soak: until then allocators may take what they need."""
CROWD = 1500
"""Requests that are there at any time: more than there are rows."""
WAVE = 1000
"""Requests with short prompts and long replies, which outgrow the KV cache together; then as many of the opposite."""
MOST_GAINED = {"gpu_bytes_allocated": 16 * MIB, "gpu_bytes_lost": 1024 * MIB, "host_bytes_gained": 128 * MIB}
"""Of the soak. Live tensors are the same at idle; the allocator may keep more; Python's memory has holes."""
DEMAND = 1.1
"""Of memory pressure: tokens of all requests over those that the KV cache holds."""


def resident() -> int:
    """Bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def held() -> dict[str, int]:
    """By the names of `MOST_GAINED`."""
    return {
        "gpu_bytes_allocated": torch.cuda.memory_allocated(),
        "gpu_bytes_lost": -torch.cuda.mem_get_info()[0],
        "host_bytes_gained": resident(),
    }


@dataclass
class Crowd:
    """Requests of random lengths, some of which leave early; see `WAVE`."""

    llm: LLM
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    alive: dict[int, int] = field(default_factory=dict)
    """Tokens that each request still wants."""
    sent: int = 0
    tokens: int = 0
    finished: int = 0
    aborted_running: int = 0
    aborted_waiting: int = 0

    def run(self, seconds: float) -> None:
        """Full load; then all leave at once, and nothing may be left of them."""
        core, chance = self.llm.core, self.chance
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            while len(self.alive) < CROWD:
                self.send()
            if chance.random() < 0.3:
                self.abort(chance.choice(list(self.alive)))
            self.step()
        for id in list(self.alive):
            self.abort(id)
        while core.has_work:
            self.step()
        core.check_idle()

    def send(self) -> None:
        chance, longest = self.chance, self.llm.core.limits.max_model_len
        if self.sent // WAVE % 2:
            length, tokens = chance.lognormvariate(6.5, 0.8), chance.lognormvariate(3.5, 0.8)
        else:
            length, tokens = chance.lognormvariate(4.0, 0.8), chance.lognormvariate(6.5, 0.8)
        length, most = min(int(length) + 1, longest * 3 // 4), min(int(tokens) + 1, longest // 4)
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.8]),
            top_p=chance.choice([1.0, 1.0, 0.9]),
            max_tokens=most,
            ignore_eos=True,
        )
        prompt = np.random.default_rng(self.sent).integers(0, VOCABULARY, length).tolist()
        now = time.monotonic()
        self.llm.core.add(Request(id=self.sent, prompt=prompt, params=params, seed=self.sent, arrival=now))
        self.alive[self.sent] = most
        self.sent += 1

    def abort(self, id: int) -> None:
        core = self.llm.core
        before = core.stats.running
        core.abort(id)
        del self.alive[id]
        if core.stats.running < before:
            self.aborted_running += 1
        else:
            self.aborted_waiting += 1

    def step(self) -> None:
        for output in self.llm.core.step():
            assert not output.error, output.error
            self.alive[output.request] -= len(output.ids)
            self.tokens += len(output.ids)
            if output.finish is not None:
                assert self.alive.pop(output.request) == 0, "a reply of the wrong length"
                self.finished += 1


def soak(llm: LLM, results: Results, seconds: float = 300.0) -> None:
    """Random lengths, aborts and preemptions at full load: no error, nothing left at idle, and no memory lost after
    the first `WARM_S`."""
    core, started = llm.core, time.perf_counter()
    crowd = Crowd(llm)
    crowd.run(min(WARM_S, seconds / 2))
    before = held()
    crowd.run(seconds - (time.perf_counter() - started))
    gained = {name: now - before[name] for name, now in held().items()}
    results.add(
        kind="soak",
        s=time.perf_counter() - started,
        requests=crowd.sent,
        finished=crowd.finished,
        aborted=crowd.aborted_running + crowd.aborted_waiting,
        aborted_running=crowd.aborted_running,
        aborted_waiting=crowd.aborted_waiting,
        tokens=crowd.tokens,
        preemptions=core.stats.preemptions,
        **gained,
    )
    for name, most in MOST_GAINED.items():
        assert gained[name] <= most, f"{name}: {gained[name]}, more than {most}"
    assert core.stats.preemptions, "nothing was preempted: the KV cache is too large for this load"
    assert min(crowd.finished, crowd.aborted_running, crowd.aborted_waiting), "a kind of end did not occur"


def pressure(llm: LLM, results: Results, count: int = 1024, tokens: int = 512) -> None:
    """Every request asks for what takes most memory: log-probabilities, penalties, filters. Together they want more
    keys and values than fit. The first fill the largest steps, with log-probabilities of their whole prompts, as
    every eighth has."""
    core = llm.core
    scheduler: Scheduler = core._scheduler
    longest = core.limits.max_model_len - tokens
    room = scheduler.kv.pools[0].capacity * scheduler.kv.block_size
    length = max(1, min(longest, int(DEMAND * room / count) - tokens))
    scored: dict[int, int] = {}
    preempted, started = core.stats.preemptions, time.perf_counter()
    for id in range(count):
        size = longest if id < 4 else length
        if scores := id < 4 or id % 8 == 0:
            scored[id] = size - 1
        params = SamplingParams(
            temperature=0.8,
            top_p=0.95,
            repetition_penalty=1.1,
            min_tokens=8,
            logit_bias={5: 1.0},
            logprobs=20,
            prompt_logprobs=20 if scores else None,
            max_tokens=tokens,
            ignore_eos=True,
        )
        prompt = np.random.default_rng(id).integers(0, VOCABULARY, size).tolist()
        core.add(Request(id=id, prompt=prompt, params=params, seed=id, arrival=time.monotonic()))
    made, kv_used, free = 0, 0.0, torch.cuda.mem_get_info()[0]
    while core.has_work:
        for output in core.step():
            assert not output.error, output.error
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.ids)
            made += len(output.ids)
            if output.prompt_logprobs is not None:
                assert len(output.prompt_logprobs) == scored.pop(output.request)
        kv_used = max(kv_used, core.stats.kv_used)
        free = min(free, torch.cuda.mem_get_info()[0])
    core.check_idle()
    preemptions = core.stats.preemptions - preempted
    results.add(
        kind="memory",
        n=count,
        inp=length,
        out=tokens,
        s=time.perf_counter() - started,
        kv_used_most=kv_used,
        preemptions=preemptions,
        gpu_bytes_free=free,
        reserved=torch.cuda.memory_reserved(),
    )
    assert made == count * tokens, f"{made} tokens instead of {count * tokens}"
    assert not scored, f"{len(scored)} prompts have no log-probabilities"
    assert preemptions, "nothing was preempted: the KV cache was not full"
