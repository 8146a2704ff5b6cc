import numpy as np
import pytest
import torch

from paceline.kernels.philox import philox4x32, random_bits, stream_keys
from paceline.kernels.race import log_waiting_times

# philox4x32 with 10 rounds, from kat_vectors of Random123 (D. E. Shaw Research): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result, make):
    c0, c1, c2, c3 = (make([word]) for word in words(counter))
    k0, k1 = (make([word]) for word in words(key))
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(result)


def test_keys_are_the_same_in_numpy_and_torch():
    seed = np.array([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567])
    candidate = np.array([0, 1, 2, 3, 127, 0])
    position = np.array([1, 2, 3, 2**20, 2**31, 7])
    words = random_bits(seed, candidate, position)
    tensors = [torch.from_numpy(array) for array in (seed, candidate, position)]
    assert [word.tolist() for word in random_bits(*tensors)] == [word.tolist() for word in words]
    assert stream_keys(*tensors).dtype == torch.int32
    assert (stream_keys(*tensors).long() & 0xFFFFFFFF).T.tolist() == [word.tolist() for word in words]


@pytest.mark.parametrize("moving", [0, 1, 2, 3], ids=["seed", "candidate", "position", "token"])
def test_each_argument_gives_an_independent_even_stream(moving):
    """failure 20: draws differ from request to request, from candidate to candidate and from token to token."""
    count, bins = 40_000, 100
    arguments = [torch.full((count,), 5) for _ in range(4)]
    arguments[moving] = torch.arange(count)
    *where, tokens = arguments
    times = log_waiting_times(stream_keys(*where), tokens[:, None])[:, 0].double().exp()
    drawn = (-times).expm1().neg().numpy()  # of an exponential variate: uniform
    histogram = np.bincount((drawn * bins).astype(int).clip(max=bins - 1), minlength=bins)
    expected = count / bins
    chi_square = float(((histogram - expected) ** 2 / expected).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: about 1 in 10,000 lies outside
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
