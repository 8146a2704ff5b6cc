import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.workload import traces
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.traces import TraceRow, jitter, read_trace, scale, shorter

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:58.9799600,4808,10\r\n"
    "2023-11-17 00:00:00.0319601,3180,8\r\n"
    "2023-11-17 00:00:00.0319601,110,27"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
    "2024-05-10 02:00:02.5+02:00,76,15\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.0,GPT-4,1087,0,1087,API log\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}\n\n'
)
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 132, '
    '"type": "text", "turn": 1, "hash_ids": [5, 6]}\n'
    '{"chat_id": 9, "parent_chat_id": 7, "timestamp": 71.5, "input_length": 40, "output_length": 13, '
    '"type": "text", "turn": 2, "hash_ids": [5, 6, 8]}\n'
)


def written(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_bytes(text.encode())
    return file


def test_azure_2023(tmp_path: Path) -> None:
    """CRLF, seven digits, over midnight, and no line end at the end."""
    rows = read_trace(written(tmp_path, AZURE_2023))
    assert rows == [TraceRow(0.0, 4808, 10), TraceRow(1.0520001, 3180, 8), TraceRow(1.0520001, 110, 27)]


def test_azure_2024(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, AZURE_2024))
    assert rows == [TraceRow(0.0, 2162, 5), TraceRow(0.99007, 2399, 6), TraceRow(2.49007, 76, 15)]


def test_burstgpt(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, BURSTGPT)) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 0)]


def test_mooncake_in_order_of_time(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, MOONCAKE))
    assert rows == [TraceRow(0.0, 1024, 7, (0, 2), 512), TraceRow(3.0, 600, 5, (0, 1), 512)]


def test_bailian_chats(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, BAILIAN))
    assert first == TraceRow(0.0, 20, 132, (5, 6), 16, chat="7")
    assert second.time_s == pytest.approx(10.386)
    assert (second.blocks, second.chat, second.parent) == ((5, 6, 8), "9", "7")


def test_a_named_kind_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = written(tmp_path, "\ufeff" + AZURE_2023)
    assert read_trace(file, "azure") == read_trace(written(tmp_path, AZURE_2023))
    with pytest.raises(InvalidWorkload, match=r"trace: no trace kind is named 'azur'; these are: azure, burstgpt"):
        read_trace(file, "azur")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            AZURE_2023.replace("3180", "many"),
            None,
            ":3: ContextTokens must be a number, not 'many'",
        ),
        (AZURE_2023.replace("2023-11-17", "yesterday"), None, ":3: TIMESTAMP must be a date and time, not 'yesterday"),
        (AZURE_2023.replace(",110,27", ""), None, ":4: ContextTokens must be a number, not None"),
        (BURSTGPT, "azure", ":1: has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (BURSTGPT.replace("45.0", "nan"), None, ":3: Timestamp must be a number, not 'nan'"),
        (
            BURSTGPT.replace(",18,", ",-18,"),
            None,
            ":2: Response tokens must be a whole number of at least 0, not '-18'",
        ),
        (MOONCAKE.replace("[0, 2]", "[0, 2"), None, ":2: no JSON: "),
        (MOONCAKE.replace("[0, 2]", '"0"'), None, ":2: hash_ids must be a list of whole numbers"),
        (MOONCAKE.replace("1024", "10.5"), None, ":2: input_length must be a whole number of at least 0, not 10.5"),
        (MOONCAKE + "7\n", None, ":4: must be an object"),
        (BAILIAN.replace('"parent_chat_id": 7, ', ""), None, ":2: has no parent_chat_id"),
        ("when,what\n1,2\n", None, ":1: not the start of a known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", None, ": holds no requests"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, kind: str | None, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InvalidWorkload) as caught:
        read_trace(file, kind)
    assert str(caught.value).startswith(f"{file}{message}")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match=r"nowhere\.csv: .*No such file"):
        read_trace(tmp_path / "nowhere.csv")


def rows_at(*times: float) -> list[TraceRow]:
    return [TraceRow(time, index + 1, 1) for index, time in enumerate(times)]


def test_scale() -> None:
    assert [row.time_s for row in scale(rows_at(0.0, 1.0, 5.0), 2)] == [0.0, 0.5, 2.5]
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidWorkload, match=r"^scale: must be above 0"):
            scale(rows_at(0.0), rate)


def test_slice_by_time_and_by_count() -> None:
    rows = rows_at(0.0, 1.0, 2.5, 3.0, 4.0)
    assert [(row.time_s, row.input_tokens) for row in traces.slice(rows, start_s=2, end_s=4)] == [(0.5, 3), (1.0, 4)]
    assert [(row.time_s, row.input_tokens) for row in traces.slice(rows, first=2, count=2)] == [(0.0, 3), (0.5, 4)]
    assert [row.input_tokens for row in traces.slice(rows, start_s=1, count=2)] == [2, 3]
    assert traces.slice(rows, start_s=9) == []


def test_shorter_counts_both_lengths() -> None:
    rows = [TraceRow(0, 90, 10), TraceRow(0, 90, 11), TraceRow(0, 100, 0)]
    assert shorter(rows, 100) == rows[:1]


def test_jitter_fills_the_ticks() -> None:
    ticks = [3.0 * (index // 200) for index in range(2000)]
    spread = jitter(rows_at(*ticks), seed=5)
    assert [row.input_tokens for row in spread] == list(range(1, 2001))  # in their order
    for tick, row in zip(ticks, spread, strict=True):
        assert tick <= row.time_s < tick + 3
    thirds = Counter(int(row.time_s) % 3 for row in spread)
    assert all(abs(count - 2000 / 3) < 5 * math.sqrt(2000 * 2 / 9) for count in thirds.values())
    assert max(Counter(row.time_s for row in spread).values()) == 1


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 9), st.one_of(st.none(), st.floats(0.1, 9))
)
def test_jitter_passes_no_recorded_time(ticks: list[int], seed: int, tick_s: float | None) -> None:
    rows = rows_at(*sorted(map(float, ticks)))
    spread = jitter(rows, seed, tick_s)
    times = sorted(set(map(float, ticks)))
    for row, moved in zip(rows, spread, strict=True):
        later = [time for time in times if time > row.time_s]
        assert row.time_s <= moved.time_s
        assert not later or moved.time_s <= later[0]
        assert tick_s is None or moved.time_s <= row.time_s + tick_s + 1e-9
    assert [row.time_s for row in spread] == sorted(row.time_s for row in spread)
    assert jitter(rows, seed, tick_s) == spread


def test_large_block_ids_are_kept(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [2**70]}
    assert read_trace(written(tmp_path, json.dumps(line)))[0].blocks == (2**70,)
