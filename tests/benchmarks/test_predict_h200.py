"""The predictions of `benchmarks/predict_h200.py`, on rows and step logs of a device whose step times are known."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.engine.request import Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.gpu_model import EngineSizes, GpuModel
from paceline.simulator.simulate import SimulatedRequest, simulate, trace_prompt, virtual_core

TRUE = StepTime(fixed_s=1e-3, weights_s=3e-3, token_s=3e-5, row_s=2e-5, kv_token_s=1e-7, pair_s=2e-8)
SIZES = EngineSizes(
    block_size=16, num_blocks=2001, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=2048, depth=2
)
PROMPT, OUTPUT, BURST_OUTPUT, MIXED_S = 256, 16, 33, 2.0
MACHINE = {"kind": "machine", "gpu": "none", "driver": "1", "torch": "2", "triton": "3", "cuda": "4"}

Made = tuple[list[dict[str, Any]], Path]


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    loads = importlib.import_module("h200_loads")
    for name, value in (("PROMPT", PROMPT), ("OUTPUT", OUTPUT), ("BURST_OUTPUT", BURST_OUTPUT), ("MIXED_S", MIXED_S)):
        monkeypatch.setattr(loads, name, value)
    for name, value in (("DECODING", 8), ("DECODING_PROMPT", 32), ("DECODING_OUTPUT", 1500)):
        monkeypatch.setattr(loads, name, value)
    module = importlib.import_module("predict_h200")
    monkeypatch.setattr(module, "BURST", 40)
    yield module
    for name in ("h200_loads", "predict_h200"):
        del sys.modules[name]


class Device:
    """Serves loads, and writes the log of each engine."""

    def __init__(self, folder: Path, sizes: EngineSizes = SIZES) -> None:
        self.folder, self.sizes = folder, sizes
        self.model = GpuModel(name="true", step_time=TRUE, engine=sizes)
        self.log = folder / f"{sizes.max_num_batched_tokens}.jsonl"
        self.lines = 0

    def row(self, **row: Any) -> dict[str, Any]:
        return {"engine": "paceline", "mode": "bf16", "flags": {}, "commit": "abc", "step_log": self.log.name, **row}

    def start(self) -> dict[str, Any]:
        return self.row(kind="start", sizes=asdict(self.sizes))

    def on_step(self, begin: float, end: float, work: StepWork) -> None:
        if work.tokens:
            with self.log.open("a") as out:
                out.write(json.dumps({**asdict(work), "seconds": end - begin}) + "\n")
            self.lines += 1

    def serve(self, sent: list[tuple[float, int, int]]) -> list[tuple[float, list[float]]]:
        """``(due, prompt, output)`` in; due and the times of its tokens out."""
        requests = [SimulatedRequest(due, trace_prompt(i, prompt), out) for i, (due, prompt, out) in enumerate(sent)]
        outcomes = simulate(requests, self.model, prefix_cache=False, on_step=self.on_step)
        return [(request.due, [at for at, _ in one.tokens]) for request, one in zip(requests, outcomes, strict=True)]


def decode_s(contexts: list[int]) -> float:
    """Of a step in which each row computes one token."""
    work = StepWork(len(contexts), len(contexts), sum(contexts), 0)
    return TRUE.seconds(work)


def mixed_row(device: Device) -> dict[str, Any]:
    """As `h200.py` does it: when a prompt has its token, the next is sent."""
    core, clock = virtual_core(device.model, prefix_cache=False, on_step=device.on_step)
    sent = 0

    def send(prompt: int, output: int) -> None:
        nonlocal sent
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        core.add(Request(id=sent, prompt=[0] * prompt, params=params, seed=0, arrival=clock.now()))
        sent += 1

    for _ in range(8):
        send(32, 1500)
    seen: set[int] = set()
    while len(seen) < 8:
        seen |= {output.request for output in core.step()}
    begin, tokens, prompts = clock.now(), 0, 0
    send(PROMPT, 1)
    send(PROMPT, 1)
    while clock.now() - begin < MIXED_S:
        for output in core.step():
            if output.request < 8:
                tokens += 1
            else:
                prompts += 1
                send(PROMPT, 1)
    seconds = clock.now() - begin
    out, prompt = tokens / seconds, prompts * PROMPT / seconds
    budget = device.sizes.max_num_batched_tokens
    flags = {"max_num_batched_tokens": budget}
    steps = [0, device.lines]
    return device.row(kind="mixed", budget=budget, out_tps=out, prompt_tps=prompt, steps=steps, flags=flags)


@pytest.fixture
def made(predict: ModuleType, tmp_path: Path) -> Made:
    """Rows as `h200.py` writes them, and the folder of their step logs."""
    device = Device(tmp_path)
    rows: list[dict[str, Any]] = [{**MACHINE, "mode": ""}, device.start()]
    rows.append(device.row(kind="http", ratio=0.95))
    for batch, prompt in ((1, 300), (2, 300), (8, 300), (32, 300), (1, 32), (16, 32)):
        begin = device.lines
        times = [max(at[-1] for _, at in device.serve([(0.0, prompt, output)] * batch)) for output in (1, BURST_OUTPUT)]
        tpot = (times[1] - times[0]) / (BURST_OUTPUT - 1) * 1e3
        rows.append(device.row(kind="tpot", batch=batch, prompt=prompt, tpot_ms=tpot, steps=[begin, device.lines]))
    for inp, out, n in ((32, 32, 200), (PROMPT, OUTPUT, 40), (32, 200, 60)):
        begin = device.lines
        seconds = max(at[-1] for _, at in device.serve([(0.0, inp, out)] * n))
        tps = n * out / seconds
        rows.append(
            device.row(kind="throughput", inp=inp, out=out, n=n, s=seconds, out_tps=tps, steps=[begin, device.lines])
        )
    for rate in (10.0, 40.0, 80.0):
        begin, n = device.lines, 60
        due = importlib.import_module("h200_loads").poisson(rate, n)
        served = device.serve([(when, PROMPT, OUTPUT) for when in due])
        rows.append(
            device.row(
                kind="rps",
                rps=rate,
                n=n,
                ttft_mean=sum(at[0] - when for when, at in served) / n,
                tpot_mean_ms=sum((at[-1] - at[0]) / (OUTPUT - 1) for _, at in served) / n * 1e3,
                out_tps=n * OUTPUT / max(at[-1] for _, at in served),
                steps=[begin, device.lines],
            )
        )
    small = Device(tmp_path, EngineSizes(**{**asdict(SIZES), "max_num_batched_tokens": 128}))
    mixed = mixed_row(small)
    return [*rows, small.start(), mixed], tmp_path


def test_each_row_is_predicted_from_the_others(predict: ModuleType, made: Made) -> None:
    rows, folder = made
    found = predict.read_rows(rows, folder)
    assert {mode: len(group) for mode, group in found.items()} == {"bf16": 13}
    predictions = predict.leave_one_out(found["bf16"])
    errors = predict.named_errors(predictions, queues=False)
    assert len(errors) == 6 + 3 + 3 * 3 + 2 - sum(one.queue for one in predictions)
    assert max(map(abs, errors.values())) < 0.02, errors
    assert [one.measured.name for one in predictions if one.queue] == ["80 requests/s x 60"]
    summary = predict.Summary.of(errors)
    assert (summary.count, summary.within, summary.worst) == (len(errors), len(errors), [])
    lines = predict.table(predictions).splitlines()
    assert len(lines) == 2 + len(predict.named_errors(predictions, queues=True))
    assert "| bf16 | mixed, budget 128 | `prompt_tps` |" in lines[-1]
    single = next(one for one in predictions if one.measured.name == "1 x 300")
    by_hand = sum(decode_s([300 + step]) for step in range(1, BURST_OUTPUT)) / (BURST_OUTPUT - 1) * 1e3
    assert single.measured.row["tpot_ms"] == pytest.approx(by_hand)
    assert single.values["tpot_ms"] == pytest.approx(by_hand, rel=0.02)


def test_the_command_writes_the_results_and_a_model(
    predict: ModuleType, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, folder = made
    file, out, models = tmp_path / "rows", tmp_path / "out.json", tmp_path / "models"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models.mkdir()
    options = ["--rows", str(file), "--step-logs", str(folder), "--out", str(out), "--models", str(models)]
    monkeypatch.setattr(sys, "argv", ["predict_h200.py", *options])
    predict.main()
    result = json.loads(out.read_text())
    assert result["commits_of_rows"] == ["abc"]
    assert result["machines_of_rows"] == [{key: value for key, value in MACHINE.items() if key != "kind"}]
    first = result["predictions"][0]
    assert first["error"]["tpot_ms"] == pytest.approx(first["predicted"]["tpot_ms"] / first["measured"]["tpot_ms"] - 1)
    assert set(first["fitted_without_it"]["step_time"]) == set(asdict(TRUE))
    model = GpuModel.load(str(models / "h200-llama3-8b-bf16.json"))
    assert model.engine == SIZES
    assert model.error["left_out_max"] == pytest.approx(result["summary"]["max"], abs=1e-4)
    for name in ("kv_token_s", "pair_s", "token_s"):
        assert getattr(model.step_time, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert result["summary"]["worst"] == []
    assert "| bf16 | 1 x 300 | `tpot_ms` |" in capsys.readouterr().out


def test_a_row_that_was_measured_twice_does_not_predict_itself(
    predict: ModuleType, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, folder = made
    again = next(row for row in rows if row["kind"] == "tpot")
    found = predict.read_rows([*rows, again], folder)["bf16"]
    fit, seen = predict.fit_rows, []

    def fit_rows(others: list[Any]) -> Any:
        seen.append([one.name for one in others])
        return fit(others)

    monkeypatch.setattr(predict, "fit_rows", fit_rows)
    predict.leave_one_out(found[:1] + found[-1:] + found[3:6])
    assert seen[0] == seen[1] == [one.name for one in found[3:6]]


def test_steps_that_are_not_there(predict: ModuleType, made: Made) -> None:
    rows, folder = made
    wrong = [{**row, "steps": [0, 10**6]} if row["kind"] == "tpot" else row for row in rows]
    with pytest.raises(ValueError, match=r"512\.jsonl: has .* steps, not 0 to 1000000"):
        predict.read_rows(wrong, folder)
    with pytest.raises(ValueError, match="no row says how its engine started"):
        predict.read_rows([row for row in rows if row["kind"] != "start"], folder)
