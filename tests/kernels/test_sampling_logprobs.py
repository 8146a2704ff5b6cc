import pytest
import torch

from paceline.kernels.logprobs import token_logprobs
from paceline.kernels.ranking import ranked, ranked_by_keys


def naive_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("rank", [ranked, ranked_by_keys])
@pytest.mark.parametrize("k", [1, 7, 95, 100])
def test_ranked_orders_by_value_then_id(k, rank):
    torch.manual_seed(0)
    values = torch.randn(20, 100).mul(4).round()  # many ties, 0.0 and -0.0
    values[3] = -torch.inf
    values[4, 50] = torch.inf
    values[5] = -values[5]
    top, ids = rank(values, k)
    for row in range(20):
        assert ids[row].tolist() == naive_order(values[row])[:k]
    assert torch.equal(top, values.gather(-1, ids))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_against_log_softmax(top):
    torch.manual_seed(1)
    logits = torch.randn(9, 300).mul(8).round() / 2
    ids = torch.randint(300, (9,))
    result = token_logprobs(logits, ids, top, vocab_limit=300)
    expected = logits.double().log_softmax(-1)
    for row in range(9):
        token = int(ids[row])
        assert result.logprob[row].item() == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert result.rank[row].item() == 1 + sum(value > logits[row, token] for value in logits[row])
        best = naive_order(logits[row])[:top]
        assert result.top_ids[row].tolist() == best
        assert result.top_logprobs[row].tolist() == pytest.approx(expected[row, best].tolist(), abs=1e-5)


def test_padding_of_the_head_is_no_alternative():
    """failure 29: ids past the tokenizer's are not reported; they still count in the normaliser."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0, 8.0]])
    result = token_logprobs(logits, torch.tensor([2]), 5, vocab_limit=3)
    assert result.top_ids.tolist() == [[1, 2, 0]]
    assert result.rank.tolist() == [2]
    assert result.logprob[0].item() == pytest.approx(logits.log_softmax(-1)[0, 2].item())


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(2)
    logits, ids = torch.randn(7, 5003) * 3, torch.randint(5003, (7,))
    together = token_logprobs(logits, ids, 5, 5003)
    for row in range(7):
        alone = token_logprobs(logits[row : row + 1], ids[row : row + 1], 5, 5003)
        for name in ("logprob", "rank", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])
