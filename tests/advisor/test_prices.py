"""The file of prices, and what engines run on."""

from pathlib import Path

import pytest

from paceline.advisor.prices import Hardware, InvalidPrices, Prices, read_prices

EXAMPLE = Path(__file__).parents[2] / "examples" / "prices.toml"


def test_the_example_is_read_and_says_that_it_is_made_up() -> None:
    prices = read_prices(EXAMPLE)
    assert prices.currency == "USD"
    assert prices.of("NVIDIA H200") == prices.gpu_hour["H200"]
    assert "made up" in EXAMPLE.read_text()


@pytest.mark.parametrize(
    ("gpu", "price"),
    [
        ("H200", 3.0),
        ("nvidia h200", 3.0),
        ("NVIDIA H200 NVL", 2.5),
        ("NVIDIA H20", 1.0),
        ("NVIDIA GH200 480GB", None),
        ("A100", None),
    ],
)
def test_a_gpu_has_the_price_of_the_longest_name_in_its_own(gpu: str, price: float | None) -> None:
    assert Prices("USD", {"H200": 3.0, "H200 NVL": 2.5, "H20": 1.0}).of(gpu) == price


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpu_hour]\nH200 = 1", "currency is missing"),
        ('currency = "USD"', r"\[gpu_hour\] is missing"),
        ('currency = "USD"\n[gpu_hour]', r"\[gpu_hour\] is missing"),
        ('currency = "USD"\n[gpu_hour]\nH200 = 0', "gpu_hour.H200 is 0"),
        ('currency = "USD"\n[gpu_hour]\nH200 = "3"', "gpu_hour.H200 is '3'"),
        ('currency = "USD"\n[gpu_hour]\nH200 = true', "gpu_hour.H200 is True"),
        ('currency = "USD"\nhours = 2\n[gpu_hour]\nH200 = 1', "unknown key hours"),
        ("currency = ", "prices.toml"),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InvalidPrices, match=message):
        read_prices(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrices, match="No such file"):
        read_prices(tmp_path / "prices.toml")


def test_hardware() -> None:
    assert Hardware.parse("H200") == Hardware("H200", 1)
    assert Hardware.parse("2xH200") == Hardware("H200", 2)
    assert Hardware.parse("8 x NVIDIA H200") == Hardware("NVIDIA H200", 8)
    for text in ("", "0xH200", "  "):
        with pytest.raises(InvalidPrices, match="names no GPUs"):
            Hardware.parse(text)
