import pytest
import torch

from paceline.kernels.triton.gather_rows import gather_rows


@pytest.mark.parametrize("groups", [1, 2])
def test_gathers_tokens_positions_and_tables(device, groups):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    torch.manual_seed(0)
    tables = [torch.randint(1, 1000, (9, 2500), dtype=torch.int32, device=device) for _ in range(groups)]
    outs = [torch.full((4, 2500), -5, dtype=torch.int32, device=device) for _ in range(groups)]
    tokens, positions, lengths = ints(0, 0, 0, 0), ints(0, 0, 0, 0), ints(0, 0, 0, 0)
    rows, contexts = [5, 2, 8, 0], [4 * 2400, 7, 1, 8]
    context_len = ints(*contexts)
    last_token = torch.arange(9, dtype=torch.int32, device=device) + 100

    def gather():
        gather_rows(
            ints(*rows),
            context_len,
            ints(-1, 44, 0, -1),
            last_token,
            tables,
            block_size=4,
            tokens=tokens,
            positions=positions,
            lengths=lengths,
            out_tables=outs,
        )

    gather()
    assert tokens.tolist() == [105, 44, 0, 100]
    assert positions.tolist() == [context - 1 for context in contexts]
    assert lengths.tolist() == contexts
    for table, out in zip(tables, outs, strict=True):
        for index, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            used = -(-context // 4)
            assert torch.equal(out[index, :used], table[row, :used])
            assert (out[index, used:] == -5).all()
    # The same input goes on: rows whose token was sampled have one more, and here a block more each.
    last_token += 1
    gather()
    assert tokens.tolist() == [106, 44, 0, 101]
    assert lengths.tolist() == [contexts[0] + 1, 7, 1, 9]
    for table, out in zip(tables, outs, strict=True):
        assert torch.equal(out[0, :2401], table[5, :2401])
        assert torch.equal(out[3, :3], table[0, :3])
