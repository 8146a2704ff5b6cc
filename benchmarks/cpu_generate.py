"""Speed on a CPU, as a ratio in one run against `transformers` generate: same weights, same dtype, same threads.

    python benchmarks/cpu_generate.py --out benchmarks/results/cpu_generate.json

Every case is a set of requests, each with its prompt length and its output length; decoding is greedy and no
end-of-sequence id ends it, on both sides. paceline gets the requests in one `LLM.generate` call. transformers gets them
as one left-padded batch, which runs to the longest output; what it generates for a request beyond that request's length
is not counted. So both sides make the same useful tokens, and the ratio of speeds is the inverse ratio of times.

The runs alternate, and each round changes who goes first. A ratio is that of the medians; its spread is the lowest
and the highest ratio of a round. The tokens of both sides are compared in every round and must be equal.

Set for a fair match: paceline's prefix cache is off, since the rounds repeat the prompts. transformers runs with
`inference_mode`, SDPA attention and its default cache. Both run in one process with the same `torch` threads.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from paceline import LLM, SamplingParams
from paceline.checkpoint.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoint.source import locate

PASSAGE = """\
A lighthouse keeper on the northern coast wrote down the weather four times a day for thirty-one years. He noted the
wind, the height of the waves, the passing ships, and now and then what he had cooked. When the station was automated,
the notebooks went to a museum in the nearest town, where they lay in a cellar until a student of climate science asked
whether anyone had measured the sea before the war. She found 44,000 entries in a clear hand. Most of them were
ordinary: "Wind from the west, moderate. Two fishing boats. Potatoes." But read one after another they told how the
storms had moved, how the ice came later every decade, and how the birds had changed their route. She typed them into
a table, column by column, and published them together with the recipes, because she could not decide which of them
mattered more. The paper was read by twelve people; the recipes, by some hundred thousand. One of those readers was a
baker, who wrote to her that the bread on page nine only rises when the air pressure is high, and that the keeper must
have known this, since he baked it on no other day.
"""


@dataclass(frozen=True)
class Case:
    """A set of requests that are served together."""

    name: str
    prompt_lengths: list[int]
    output_lengths: list[int]
    required_ratio: float | None
    """The least ratio that counts as success."""

    @property
    def useful_tokens(self) -> int:
        return sum(self.output_lengths)


@dataclass
class Result:
    case: Case
    paceline_s: list[float] = field(default_factory=list)
    transformers_s: list[float] = field(default_factory=list)
    tokens_equal: bool = True

    @property
    def ratio(self) -> float:
        return statistics.median(self.transformers_s) / statistics.median(self.paceline_s)

    @property
    def passed(self) -> bool:
        return self.tokens_equal and self.ratio >= (self.case.required_ratio or 0.0)

    def to_json(self) -> dict[str, Any]:
        rounds = [theirs / ours for ours, theirs in zip(self.paceline_s, self.transformers_s, strict=True)]
        return {
            "case": self.case.name,
            "prompt_lengths": self.case.prompt_lengths,
            "output_lengths": self.case.output_lengths,
            "useful_tokens": self.case.useful_tokens,
            "tokens_equal": self.tokens_equal,
            "ratio": round(self.ratio, 3),
            "ratio_lowest_round": round(min(rounds), 3),
            "ratio_highest_round": round(max(rounds), 3),
            "required_ratio": self.case.required_ratio,
            "paceline": self._side(self.paceline_s),
            "transformers": self._side(self.transformers_s),
        }

    def _side(self, seconds: list[float]) -> dict[str, Any]:
        median = statistics.median(seconds)
        return {
            "median_s": round(median, 4),
            "useful_tokens_per_s": round(self.case.useful_tokens / median, 2),
            "rounds_s": [round(value, 4) for value in seconds],
        }


def cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    prompts = [draw.randint(16, 256) for _ in range(16)]
    outputs = [draw.randint(16, 256) for _ in range(16)]
    return [
        Case("batch 1", [128], [128], required_ratio=1.0),
        Case("16 concurrent, mixed lengths", prompts, outputs, required_ratio=1.5),
        Case("16 concurrent, equal lengths", [128] * 16, [128] * 16, required_ratio=None),
    ]


def prompts_of(case: Case, text: list[int]) -> list[list[int]]:
    """Windows of the passage, read in a circle; each request's starts elsewhere."""
    stride = len(text) // len(case.prompt_lengths)
    circle = text * math.ceil(2 + max(case.prompt_lengths) / len(text))
    return [circle[i * stride : i * stride + length] for i, length in enumerate(case.prompt_lengths)]


def reference_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' own model with the checkpoint's weights in float32."""
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    weights = {name: checkpoint.tensor(name).to(torch.float32) for name in checkpoint.tensor_names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # An end-of-sequence id here would end requests early, also when a call names none.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


def run_transformers(model: PreTrainedModel, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(outputs), do_sample=False)
    rows = made[:, width:].tolist()
    return [row[:count] for row, count in zip(rows, outputs, strict=True)]


def run_paceline(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in outputs]
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, progress=False)]


def measure(case: Case, text: list[int], llm: LLM, model: PreTrainedModel, rounds: int) -> Result:
    prompts, outputs = prompts_of(case, text), case.output_lengths
    result = Result(case)
    brief = [min(count, 8) for count in outputs]
    run_paceline(llm, prompts, brief)
    run_transformers(model, prompts, brief)
    for number in range(rounds):
        made = {}
        for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            start = time.perf_counter()
            if side == "ours":
                made[side] = run_paceline(llm, prompts, outputs)
                result.paceline_s.append(time.perf_counter() - start)
            else:
                made[side] = run_transformers(model, prompts, outputs)
                result.transformers_s.append(time.perf_counter() - start)
        for side, rows in made.items():
            if [len(row) for row in rows] != outputs:
                raise RuntimeError(f"another number of tokens than asked for ({side})")
        result.tokens_equal = result.tokens_equal and made["ours"] == made["theirs"]
        print(f"{case.name}, round {number + 1}: {result.transformers_s[-1] / result.paceline_s[-1]:.2f}x", flush=True)
    return result


def machine() -> dict[str, Any]:
    """What it runs on; ``load_average``: processes that wanted a core in the last minute, so what else was going on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="alias, folder, GGUF file or hub id")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads of both sides")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side, alternating")
    parser.add_argument("--seed", type=int, default=0, help="of the mixed lengths")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()

    machine_before = machine()
    path = locate(options.model)
    checkpoint = open_checkpoint(path)
    text = checkpoint.tokenizer().encode(PASSAGE, add_special_tokens=False)
    model = reference_model(checkpoint)
    llm = LLM(str(path), dtype="float32", threads=options.threads, prefix_cache=False)
    torch.set_num_threads(options.threads)
    results = [measure(case, text, llm, model, options.rounds) for case in cases(options.seed)]
    llm.close()

    for result in results:
        row = result.to_json()
        speeds = [row[side]["useful_tokens_per_s"] for side in ("paceline", "transformers")]
        print(
            f"{row['case']}: {row['ratio']:.2f}x ({row['ratio_lowest_round']:.2f} to {row['ratio_highest_round']:.2f}; "
            f"{speeds[0]:.1f} against {speeds[1]:.1f} tokens/s), tokens equal: {row['tokens_equal']}, "
            f"{'passed' if result.passed else 'FAILED'}"
        )
    if options.out is not None:
        report = {
            "what": "paceline against transformers generate on a CPU; a ratio above 1 means that paceline is faster",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "model": {"name": checkpoint.name, "parameters": model.num_parameters(), "dtype": "float32"},
            "threads": options.threads,
            "seed": options.seed,
            "rounds": options.rounds,
            "machine": machine_before,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("paceline", "torch", "transformers", "tokenizers")},
            "results": [result.to_json() for result in results],
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
