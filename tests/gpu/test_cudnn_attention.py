"""cuDNN's attention over the paged cache, against attention written out; what prepares it also without a GPU."""

from threading import Lock

import pytest
import torch
import torch.nn.functional as F

import interpreted  # noqa: F401
from paceline.kernels.cudnn_attention import CudnnPrefill
from paceline.kernels.triton.prefill_rows import PrefillRows

QUERIES = [40, 1, 0, 129, 300, 17, 77]
CONTEXTS = [40, 70, 5, 129, 1027, 500, 2049]
CUDA = torch.device("cuda")
interpreted_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"
)
on_gpu = pytest.mark.skipif(not CudnnPrefill.available(CUDA), reason="needs a GPU and the extra cudnn")


class Case:
    """Rows with shuffled blocks; blocks that no row owns hold NaN, and so do the slots past a context."""

    def __init__(self, q_heads, kv_heads, head_dim, block_size, dtype, device, cache_dtype=None):
        torch.manual_seed(1)
        needed = [-(-context // block_size) for context in CONTEXTS]
        blocks = 2 * sum(needed) + 1
        order = (torch.randperm(blocks - 1, device=device) + 1).int()
        # Entries past a context point past the cache.
        self.table = torch.full((len(CONTEXTS), max(needed) + 3), 1 << 20, dtype=torch.int32, device=device)
        cache_dtype = cache_dtype or dtype
        data = torch.full((blocks, 2, kv_heads, block_size, head_dim), float("nan"), device=device).to(cache_dtype)
        self.keys, self.values = data[:, 0], data[:, 1]
        self.query = torch.randn(sum(QUERIES), q_heads, head_dim, device=device).to(dtype)
        self.start = torch.tensor([0, *QUERIES], device=device).cumsum(0).int()
        self.context = torch.tensor(CONTEXTS, dtype=torch.int32, device=device)
        expected = []
        queries = self.query.float().split(QUERIES)
        for row, (count, context) in enumerate(zip(needed, CONTEXTS, strict=True)):
            self.table[row, :count], order = order[:count], order[count:]
            token = torch.arange(context, device=device)
            block, slot = self.table[row, token // block_size].long(), token % block_size
            for cache in (self.keys, self.values):
                cache[block, :, slot] = torch.randn(context, kv_heads, head_dim, device=device).to(cache_dtype)
            keys, values = (cache[block, :, slot].float().transpose(0, 1) for cache in (self.keys, self.values))
            keys, values = (x.repeat_interleave(q_heads // kv_heads, 0) for x in (keys, values))
            seen = token <= torch.arange(context - QUERIES[row], context, device=device)[:, None]
            attended = F.scaled_dot_product_attention(queries[row].transpose(0, 1), keys, values, attn_mask=seen)
            expected.append(attended.transpose(0, 1))
        self.expected = torch.cat(expected)

    def attend(self, prefill, **options):
        rows = PrefillRows.of(
            self.table,
            self.start,
            self.context,
            max(QUERIES),
            max(CONTEXTS),
            limit=4096,
            block_size=self.keys.shape[2],
            token_elements=self.query[0].numel(),
            copy=self.keys.dtype == torch.float8_e4m3fn,
        )
        return prefill.attend(self.query, self.keys, self.values, rows, **options)

    def check(self, result):
        assert not result.isnan().any()
        error = (result.float() - self.expected).norm() / self.expected.norm()
        assert error < 1e-2


@interpreted_only
def test_rows_are_rounded_up():
    table = torch.tensor([[5, 6, 7, 99], [8, 99, 99, 99], [9, 10, 99, 99]], dtype=torch.int32)
    start = torch.tensor([0, 2, 2, 35], dtype=torch.int32)
    lens = torch.tensor([33, 7, 32], dtype=torch.int32)
    rows = PrefillRows.of(table, start, lens, 33, 130, limit=8192, block_size=16, token_elements=12)
    assert (rows.max_query, rows.max_context) == (2048, 8192)
    assert rows.query_lens.tolist() == [2, 0, 33, 0]
    assert rows.context_lens.tolist() == [33, 7, 32, 0]
    assert rows.offsets.tolist() == [0, 24, 24, 420, 420]
    assert rows.table.shape == (4, 512)
    assert rows.table[:, :5].tolist() == [[5, 6, 7, 5, 5], [8] * 5, [9, 10, 9, 9, 9], [0] * 5]
    copied = PrefillRows.of(table, start, lens, 33, 33, limit=8192, block_size=16, token_elements=12, copy=True)
    assert copied.copied == 3
    assert copied.table[:3, :5].tolist() == [[0, 1, 2, 0, 0], [3] * 5, [6, 7, 6, 6, 6]]


class WrittenOut(CudnnPrefill):
    """cuDNN's graph in torch: every row of the plan, from the tensors that the graph is given."""

    def __init__(self):
        self._lock = Lock()

    def _execute(self, query, keys, values, rows, out, scale):
        for row, (n, context) in enumerate(zip(rows.query_lens.tolist(), rows.context_lens.tolist(), strict=True)):
            if n == 0:
                continue
            first = int(rows.offsets[row]) // query[0].numel()
            asked, result = query[first : first + n], out[first : first + n]
            table = rows.table[row, : -(-context // keys.shape[2]) + 2].long()
            k, v = (cache[table].transpose(0, 1).flatten(1, 2) for cache in (keys, values))
            k, v = (x.repeat_interleave(asked.shape[1] // len(x), 0).float() for x in (k, v))
            token = torch.arange(k.shape[1])
            scores = asked.float().transpose(0, 1) @ k.transpose(1, 2) * scale
            seen = token <= torch.arange(context - n, context)[:, None]
            # A product with values that are masked, as cuDNN has it: their NaN would be seen.
            result.copy_((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))


@interpreted_only
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_the_graph_is_given(cache_dtype, block_size):
    """Fresh rows and rows with a cached prefix, one token and none; NaN in the blocks of others stays there."""
    case = Case(4, 2, 32, block_size, torch.float16, torch.device("cpu"), cache_dtype)
    case.check(case.attend(WrittenOut()))


@interpreted_only
def test_tokens_of_no_row_are_not_written():
    case = Case(4, 2, 32, 64, torch.float16, torch.device("cpu"))
    more = torch.zeros(3, *case.query.shape[1:], dtype=torch.float16)
    case.query = torch.cat((more, case.query, more[:2]))
    case.start += 3
    out = torch.full_like(case.query, 7.0)
    case.check(case.attend(WrittenOut(), out=out)[3:-2])
    assert (out[:3] == 7).all()
    assert (out[-2:] == 7).all()


@interpreted_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "query", case.query.float()), "float32"),
        (lambda case: setattr(case, "query", case.query.transpose(0, 1)), "contiguous"),
    ],
)
def test_refused_inputs(change, message):
    case = Case(4, 2, 32, 16, torch.float16, torch.device("cpu"))
    change(case)
    with pytest.raises(ValueError, match=message):
        case.attend(WrittenOut())


@on_gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_paged_cache(cache_dtype, block_size):
    """failure 77: NaN in slots that no row owns, or past a context, reaches nobody."""
    case = Case(32, 8, 128, block_size, torch.bfloat16, CUDA, cache_dtype)
    case.check(case.attend(CudnnPrefill(CUDA)))


@on_gpu
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(14, 2, 64), (6, 2, 96), (8, 1, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads(q_heads, kv_heads, head_dim, dtype):
    case = Case(q_heads, kv_heads, head_dim, 64, dtype, CUDA)
    case.check(case.attend(CudnnPrefill(CUDA)))


@on_gpu
def test_one_plan_serves_other_lengths_and_copies_of_other_sizes():
    prefill = CudnnPrefill(CUDA)
    for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        case = Case(32, 8, 128, 64, torch.bfloat16, CUDA, cache_dtype)
        case.check(case.attend(prefill))
        plans = len(prefill._plans)
        case.check(case.attend(prefill, out=torch.full_like(case.query, float("nan"))))
        assert len(prefill._plans) == plans
