"""The sampling kernels against the plain-torch sampler."""

import math

import numpy as np
import pytest
import torch

from paceline.kernels.sampling import FilteredRows, RandomRows, SamplingBatch
from paceline.kernels.sampling import sample as reference
from paceline.kernels.triton.filtering import CANDIDATES
from paceline.kernels.triton.sampling import sample
from paceline.kernels.triton.seats import RECORD, SeatTable


def draw(logits, device, limit=None, *, positions=None, order=None, **fields):
    """Ids and status by the kernels, and by the reference; ``fields`` of the records, one value or one for each row."""
    rows, width = logits.shape
    limit = limit or width
    records = np.zeros(rows, RECORD)
    for name, values in {"top_p": math.inf, **fields}.items():
        records[name] = values
    filters = bool((records["top_k"] > 0).any())
    positions = torch.arange(rows) * 977 if positions is None else positions
    table = SeatTable(rows + 3, device)
    seats = list(range(rows + 2, 2, -1))  # not the order of the batch
    table.write(seats, records)
    where = torch.tensor(seats, dtype=torch.int32)
    order = torch.arange(rows) if order is None else order
    ids, status = sample(
        logits[order].to(device),
        where[order].to(device),
        positions[order].int().to(device),
        table,
        limit,
        filters=filters,
    )
    assert not table.counters.any()
    assert torch.equal(table.last_token[where[order].long()].cpu(), ids.cpu())
    return ids.cpu().tolist(), status.cpu().tolist(), expected(logits.float(), records, positions, limit, order)


def expected(logits, records, positions, limit, order):
    columns = {name: torch.from_numpy(records[name].copy()) for name in RECORD.names}
    random = np.nonzero((records["temperature"] > 0) & (records["top_k"] == 0))[0]
    filtered = np.nonzero(records["top_k"] > 0)[0]

    def plain(rows):
        return {
            "rows": torch.from_numpy(rows),
            "temperature": columns["temperature"][rows][:, None],
            "seed": columns["seed"][rows],
            "candidate": columns["candidate"][rows].long(),
        }

    batch = SamplingBatch(
        vocab_limit=limit,
        random=RandomRows(**plain(random)) if len(random) else None,
        filtered=FilteredRows(
            **plain(filtered),
            top_k=columns["top_k"][filtered].long()[:, None],
            top_p=columns["top_p"][filtered][:, None],
            min_p=columns["min_p"][filtered][:, None],
            needs_mass=True,
        )
        if len(filtered)
        else None,
    )
    return reference(logits, batch, positions).ids[order].tolist()


def seeds(rows):
    return np.random.default_rng(rows).integers(-(2**63), 2**63 - 1, rows)


@pytest.mark.parametrize(("rows", "width", "limit"), [(1, 77, 77), (5, 4096, 4000), (9, 9001, 8999)])
def test_unfiltered_tokens_equal_the_reference(device, rows, width, limit):
    """failure 29: nor is padding of the head sampled."""
    torch.manual_seed(rows)
    ids, status, wanted = draw(
        torch.randn(rows, width) * 3,
        device,
        limit,
        temperature=np.resize([0.0, 1.0, 0.3, 2.5, 0.01], rows),
        seed=seeds(rows),
        candidate=np.arange(rows) % 3,
    )
    assert ids == wanted
    assert status == [0] * rows


FILTERS = [
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 300, "top_p": 0.8},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_p": 0.95, "min_p": 0.002},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.2},
    {"top_k": 4000},
    {"top_k": 4000, "top_p": 0.99},
]


@pytest.mark.parametrize(("flat", "ties"), [(0.3, False), (3.0, True)])
def test_filtered_tokens_equal_the_reference(device, flat, ties):
    """Also where more is kept than is held at once, and where the kept set ends among equals."""
    torch.manual_seed(7)
    width, limit = 4501, 4490
    rows = len(FILTERS) + 1  # the last does not filter
    logits = torch.randn(rows, width) * flat
    if ties:
        logits = logits.bfloat16()
    assert limit > 4 * CANDIDATES.value
    fields = {
        "top_k": [f.get("top_k", limit) for f in FILTERS] + [0],
        "top_p": [f.get("top_p", math.inf) for f in FILTERS] + [math.inf],
        "min_p": [f.get("min_p", 0.0) for f in FILTERS] + [0.0],
        "temperature": np.resize([1.0, 0.7], rows),
        "seed": seeds(rows),
    }
    ids, status, wanted = draw(logits, device, limit, **fields)
    assert ids == wanted
    assert status == [0] * rows
    order = torch.randperm(rows)[:3]
    assert draw(logits, device, limit, order=order, **fields)[0] == [wanted[i] for i in order]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1e-9])
def test_of_equals_the_lowest_ids_are_kept(device, top_p):
    """All tokens are equally likely: 10% of 5,000 are the first 500."""
    kept = math.ceil(5000 * top_p)
    rows = 3
    fields = {"temperature": 1.0, "top_k": 5000, "top_p": top_p, "seed": seeds(rows)}
    ids, _, wanted = draw(torch.zeros(rows, 5000), device, **fields)
    assert ids == wanted
    assert max(ids) < kept


def test_masked_tokens_are_not_kept(device):
    """Fewer tokens are possible than top_k asks for."""
    logits = torch.full((3, 5000), -1e30)
    bias = torch.full((5000,), -math.inf)
    bias[[5, 4500]] = 1e30
    bias = bias.to(device)
    fields = {"temperature": 1.0, "top_k": 50, "top_p": [math.inf, 0.99, 1e-9], "seed": seeds(3)}
    ids, status, _ = draw(logits, device, bias=bias.data_ptr(), **fields)
    assert set(ids) <= {5, 4500}
    assert ids[2] == 5
    assert status == [0, 0, 0]


def test_lowest_id_wins_among_equals(device):
    logits = torch.zeros(2, 9000)
    logits[:, [17, 40, 8000]] = 5.0
    assert draw(logits, device)[0] == [17, 17]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_with_bad_logits_fails_alone(device, bad, row):
    torch.manual_seed(3)
    logits = torch.randn(3, 5000)
    fields = {"temperature": [0.0, 1.0, 1.0], "top_k": [0, 0, 40], "seed": seeds(3)}
    wanted = draw(logits, device, **fields)[0]
    logits[row, 4500] = bad
    wanted[row] = 0
    ids, status, _ = draw(logits, device, **fields)
    assert status == [int(i == row) for i in range(3)]
    assert ids == wanted


def test_a_row_without_any_possible_token_fails_alone(device):
    bias = torch.full((100,), -math.inf, device=device)
    fields = {"temperature": [1.0, 1.0, 0.0, 0.0], "top_k": [9, 9, 0, 0], "bias": [bias.data_ptr(), 0] * 2}
    ids, status, _ = draw(torch.randn(4, 100), device, **fields)
    assert status == [2, 0, 2, 0]
    assert (ids[0], ids[2]) == (0, 0)


def test_tiny_temperatures_and_huge_logits_stay_finite(device):
    """failure 22"""
    logits = torch.tensor([[1e30, -1e30, 9e29, 0.0]] * 2)
    ids, status, _ = draw(logits, device, temperature=0.001, top_k=[0, 3])
    assert (ids, status) == ([0, 0], [0, 0])
