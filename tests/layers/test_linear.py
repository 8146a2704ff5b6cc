import pytest
import torch
import torch.nn.functional as F

from paceline.layers.linear import METHODS, Linear, linear_method

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_methods_equal_the_product(method, dtype, bias):
    if not method.serves(CPU, dtype):
        pytest.skip(f"{method.name} does not serve {dtype} here")
    weight, offset = torch.randn(48, 40).to(dtype), torch.randn(48).to(dtype) if bias else None
    linear = Linear(method, weight, offset)
    for tokens in (0, 1, 2, 17, 130, 256, 257, 600):
        x = torch.randn(tokens, 40).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(linear(x).double(), expected, rtol=2 * eps, atol=100 * eps)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_input_may_be_a_view(method):
    weight = torch.randn(48, 40)
    x = torch.randn(5, 90)[:, 10:50]
    torch.testing.assert_close(Linear(method, weight)(x), x @ weight.T)


def test_every_dtype_has_a_method():
    assert linear_method(CPU, torch.float64).name == "dense"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert linear_method(CPU, dtype).serves(CPU, dtype)
    assert linear_method(torch.device("meta"), torch.float32).name == "dense"
