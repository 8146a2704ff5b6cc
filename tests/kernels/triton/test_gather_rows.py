import torch

from paceline.kernels.triton.gather_rows import gather_rows


def test_gathers_tokens_positions_and_tables(device):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    torch.manual_seed(0)
    table = torch.randint(1, 1000, (9, 2500), dtype=torch.int32, device=device)
    out = torch.full((4, 2500), -5, dtype=torch.int32, device=device)
    tokens, positions = ints(0, 0, 0, 0), ints(0, 0, 0, 0)
    rows, contexts = [5, 2, 8, 0], [4 * 2400 + 1, 7, 1, 8]
    gather_rows(
        ints(*rows),
        ints(*contexts),
        ints(-1, 44, 0, -1),
        torch.arange(9, dtype=torch.int32, device=device) + 100,
        [table],
        block_size=4,
        tokens=tokens,
        positions=positions,
        out_tables=[out],
    )
    assert tokens.tolist() == [105, 44, 0, 100]
    assert positions.tolist() == [context - 1 for context in contexts]
    for index, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        used = -(-context // 4)
        assert torch.equal(out[index, :used], table[row, :used])
        assert (out[index, used:] == -5).all()
