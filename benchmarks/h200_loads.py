"""What `h200.py` sends to the engine, for it and for `predict_h200.py`, which simulates the same."""

import random
from typing import Any

BUDGET = "max_num_batched_tokens"
PROMPT, OUTPUT = 2048, 128
"""Tokens of requests that arrive one by one."""
BURST_OUTPUT = 128
"""Tokens of the longer burst of a TPOT row; the shorter one has 1."""
DECODING, DECODING_PROMPT, DECODING_OUTPUT = 64, 128, 4096
"""Mixed traffic: requests that decode all the time, and their tokens."""
ARRIVING = 2
"""Mixed traffic: prompts of ``PROMPT`` tokens that are with the engine at any time."""
MIXED_S = 10.0


def poisson(rate: float, count: int) -> list[float]:
    """Seconds from the start at which requests are due; the same for each run."""
    chance, clock, due = random.Random(1), 0.0, []
    for _ in range(count):
        due.append(clock)
        clock += chance.expovariate(rate)
    return due


def row_name(row: dict[str, Any]) -> str:
    """The load of a row in words, with the flags of its engine."""
    match row["kind"]:
        case "tpot":
            name = f"{row['batch']} x {row['prompt']}"
        case "throughput":
            name = f"({row['inp']}, {row['out']}) x {row['n']}"
        case "rps":
            name = f"{row['rps']:g} requests/s x {row['n']}"
        case "mixed":
            name = f"mixed, budget {row['budget']}"
        case kind:
            raise ValueError(f"{kind}: no load of a simulation")
    flags = {key: value for key, value in row["flags"].items() if (row["kind"], key) != ("mixed", BUDGET)}
    return name + "".join(f", {key}={value}" for key, value in flags.items())
