from typing import Any

import pytest

from paceline.engine.config import EngineConfig
from paceline.engine.sizes import Sizes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_format", "pickle"),
        ("device", "abacus"),
        ("dtype", "int3"),
        ("threads", 0),
        ("block_size", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("max_model_len", 0),
        ("kv_cache_bytes", -1),
        ("kv_cache_share", 0.0),
        ("kv_cache_share", 1.5),
        ("kv_cache_share", float("nan")),
        ("depth", 0),
        ("model", 5),
        ("load_format", ["auto"]),
        ("dtype", None),
        ("threads", True),
        ("threads", 1.5),
        ("threads", 2**31),
        ("block_size", "16"),
        ("kv_cache_bytes", "1GiB"),
        ("kv_cache_bytes", 2**63),
        ("kv_cache_share", True),
        ("kv_cache_share", "0.2"),
        ("max_num_seqs", 2.5),
        ("max_num_seqs", 10_000_000),
        ("max_num_seqs", "1"),
        ("max_model_len", 2**64),
        ("max_num_batched_tokens", 1.5),
        ("prefix_cache", "no"),
        ("prefix_cache", 1),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be "):
        EngineConfig(**{"model": "m", field: value})


def test_the_smallest_values_are_accepted() -> None:
    config = EngineConfig(
        model="m", threads=1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1, depth=1
    )
    assert Sizes.of(config, "cpu").max_rows == 2
