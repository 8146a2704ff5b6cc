import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.triton.embedding import embedding


@pytest.mark.parametrize(("count", "width"), [(0, 64), (1, 4096), (7, 1500), (33, 96)])
def test_rows_of_the_embedding(device, dtype, rng, count, width):
    weight = torch.randn(301, width, generator=rng, device=device).to(dtype)
    tokens = torch.randint(0, 301, (count,), generator=rng, device=device, dtype=torch.int32)
    assert torch.equal(embedding(tokens, weight), F.embedding(tokens, weight))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="dependent launch needs a GPU")
def test_dependent_launch(device, rng):
    weight = torch.randn(301, 4096, generator=rng, device=device)
    for _ in range(20):
        tokens = torch.randint(0, 301, (64,), generator=rng, device=device, dtype=torch.int32)
        assert torch.equal(embedding(tokens, weight, pdl=True), F.embedding(tokens, weight))
