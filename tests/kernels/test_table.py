"""The table of the fastest linear layers."""

from importlib import resources

import pytest

from paceline.kernels.table import Cublas, GemvConfig, LinearShape, LinearTable, SkinnyConfig, load_table, shipped_table

TABLE = LinearTable(
    "Some GPU",
    {
        LinearShape("linear", 1, 64, 32, "bf16"): GemvConfig(2, 32, 8, 4, 4),
        LinearShape("linear", 16, 64, 32, "bf16"): SkinnyConfig(64, 32, 2, 4, 4),
        LinearShape("linear", 64, 64, 32, "bf16"): Cublas(),
        LinearShape("gate_up", 16, 64, 32, "w8a8"): SkinnyConfig(64, 32, 1, 4, 8),
    },
)


def test_round_trip(tmp_path):
    (tmp_path / "table.json").write_text(TABLE.to_json())
    assert load_table(tmp_path / "table.json") == TABLE


@pytest.mark.parametrize(("rows", "measured"), [(1, 1), (2, 16), (16, 16), (17, 64), (64, 64)])
def test_the_next_measured_number_of_rows_decides(rows, measured):
    chosen = TABLE.choose(LinearShape("linear", rows, 64, 32, "bf16"))
    assert chosen == TABLE.choices[LinearShape("linear", measured, 64, 32, "bf16")]


@pytest.mark.parametrize(
    "shape",
    [
        LinearShape("linear", 65, 64, 32, "bf16"),
        LinearShape("linear", 1, 65, 32, "bf16"),
        LinearShape("linear", 1, 64, 33, "bf16"),
        LinearShape("linear", 1, 64, 32, "w8a8"),
        LinearShape("gate_up", 1, 64, 32, "bf16"),
    ],
)
def test_no_choice_for_what_nobody_measured(shape):
    assert TABLE.choose(shape) is None


@pytest.mark.parametrize("text", ['{"device": "x"}', '{"device": "x", "linear": [{"op": "linear", "method": "best"}]}'])
def test_what_is_no_table(text):
    with pytest.raises(KeyError):
        LinearTable.from_json(text)


def test_shipped_tables():
    assert shipped_table("no such GPU") is None
    for file in resources.files("paceline.kernels").joinpath("tables").iterdir():
        table = LinearTable.from_json(file.read_text())
        assert shipped_table(table.device) == table
        for shape, choice in table.choices.items():
            if isinstance(choice, GemvConfig):
                assert shape.rows <= 4
                assert shape.op == "linear" or choice.block_k >= shape.k
            if isinstance(choice, SkinnyConfig):
                assert shape.rows <= 64
                assert shape.op == "linear" or choice.splits == 1
