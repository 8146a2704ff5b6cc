"""cuDNN's attention over the paged cache, against attention written out; what prepares it also without a GPU."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.cudnn_attention import CudnnPrefill, PrefillRows, _gather

QUERIES = [40, 1, 0, 129, 300, 17, 77]
CONTEXTS = [40, 70, 5, 129, 1027, 500, 2049]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not CudnnPrefill.available(CUDA), reason="needs a GPU and the extra cudnn")


class Case:
    """Rows with shuffled blocks; blocks that no row owns hold NaN, and so do the slots past a context."""

    def __init__(self, q_heads, kv_heads, head_dim, block_size, dtype, device):
        torch.manual_seed(1)
        needed = [-(-context // block_size) for context in CONTEXTS]
        blocks = 2 * sum(needed) + 1
        order = (torch.randperm(blocks - 1, device=device) + 1).int()
        # Entries past a context point past the cache.
        self.table = torch.full((len(CONTEXTS), max(needed) + 3), 1 << 20, dtype=torch.int32, device=device)
        data = torch.full((blocks, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device)
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
                cache[block, :, slot] = torch.randn(context, kv_heads, head_dim, device=device).to(dtype)
            keys, values = (cache[block, :, slot].float().transpose(0, 1) for cache in (self.keys, self.values))
            keys, values = (x.repeat_interleave(q_heads // kv_heads, 0) for x in (keys, values))
            seen = token <= torch.arange(context - QUERIES[row], context, device=device)[:, None]
            attended = F.scaled_dot_product_attention(queries[row].transpose(0, 1), keys, values, attn_mask=seen)
            expected.append(attended.transpose(0, 1))
        self.expected = torch.cat(expected)

    def attend(self, prefill, **options):
        rows = (self.table, self.start, self.context, max(QUERIES), max(CONTEXTS))
        return prefill.attend(self.query, self.keys, self.values, *rows, **options)

    def check(self, result):
        assert not result.isnan().any()
        error = (result.float() - self.expected).norm() / self.expected.norm()
        assert error < 1e-2


def test_rows_are_rounded_up():
    table = torch.tensor([[5, 6, 7, 99], [8, 99, 99, 99], [9, 10, 99, 99]], dtype=torch.int32)
    start = torch.tensor([0, 2, 2, 35], dtype=torch.int32)
    rows = PrefillRows.of(table, start, torch.tensor([33, 7, 32], dtype=torch.int32), 33, 130, 16, 12)
    assert (rows.max_query, rows.max_context) == (128, 256)
    assert rows.query_lens.tolist() == [2, 0, 33, 0]
    assert rows.context_lens.tolist() == [33, 7, 32, 0]
    assert rows.offsets.tolist() == [0, 24, 24, 420, 420]
    assert rows.block_table.tolist() == [
        [5, 6, 7] + [5] * 13,
        [8] + [8] * 15,
        [9, 10] + [9] * 14,
        [0] * 16,
    ]
    # Only the first row has queries and an unfinished last block.
    tails = {(int(b), int(s)) for b, s in zip(rows.tail_block, rows.tail_slot, strict=True)}
    assert tails == {(0, 0)} | {(7, slot) for slot in range(1, 16)}


def test_wider_table_than_the_contexts():
    table = torch.arange(1, 41, dtype=torch.int32).view(1, 40)
    lens = torch.tensor([100], dtype=torch.int32)
    rows = PrefillRows.of(table, torch.tensor([0, 100], dtype=torch.int32), lens, 100, 100, 16, 8)
    assert rows.block_table.tolist() == [[1, 2, 3, 4, 5, 6, 7, 1]]


def test_gathered_blocks():
    data = torch.randn(6, 2, 3, 4, 8)
    table = torch.tensor([[5, 1, 2], [4, 0, 0]], dtype=torch.int32)
    for cache in (data[:, 0], data[:, 1]):
        gathered = _gather(cache, table)
        for row in range(2):
            assert torch.equal(gathered[row], torch.cat([cache[block] for block in table[row].tolist()], 1))


class WrittenOut(CudnnPrefill):
    """cuDNN's graph in torch: every row of the plan, from the tensors that the graph is given."""

    def __init__(self, path):
        self.path, self.clear_tails = path, True

    def _execute(self, query, keys, values, rows, out, scale):
        for row, (n, context) in enumerate(zip(rows.query_lens.tolist(), rows.context_lens.tolist(), strict=True)):
            if self.path == "padded":
                asked, result = query[row, :n], out[row, :n]
            else:
                first = int(rows.offsets[row]) // query[0].numel()
                asked, result = query[first : first + n], out[first : first + n]
            if self.path == "gathered":
                k, v = keys[row], values[row]
            else:
                k, v = (cache[rows.block_table[row].long()].transpose(0, 1).flatten(1, 2) for cache in (keys, values))
            k, v = (x.repeat_interleave(asked.shape[1] // len(x), 0).float() for x in (k, v))
            token = torch.arange(k.shape[1])
            scores = asked.float().transpose(0, 1) @ k.transpose(1, 2) * scale
            seen = token <= torch.arange(context - n, context)[:, None]
            # A product with values that are masked, as cuDNN has it: their NaN would be seen.
            result.copy_((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))


@pytest.mark.parametrize("path", ["paged", "padded", "gathered"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_the_graph_is_given(path, block_size):
    """Fresh rows and rows with a cached prefix, one token and none; NaN in the blocks of others stays there."""
    case = Case(4, 2, 32, block_size, torch.bfloat16, torch.device("cpu"))
    case.check(case.attend(WrittenOut(path)))


@pytest.mark.parametrize("path", ["paged", "padded", "gathered"])
def test_tokens_of_no_row_are_not_written(path):
    case = Case(4, 2, 32, 64, torch.bfloat16, torch.device("cpu"))
    more = torch.zeros(3, *case.query.shape[1:], dtype=torch.bfloat16)
    case.query = torch.cat((more, case.query, more[:2]))
    case.start += 3
    out = torch.full_like(case.query, 7.0)
    case.check(case.attend(WrittenOut(path), out=out)[3:-2])
    assert (out[:3] == 7).all()
    assert (out[-2:] == 7).all()


def test_nothing_to_attend():
    case = Case(4, 2, 32, 16, torch.bfloat16, torch.device("cpu"))
    nothing = torch.zeros(0, dtype=torch.int32)
    caches = (case.keys, case.values, case.table[:0], nothing.new_zeros(1), nothing)
    assert WrittenOut("paged").attend(case.query[:0], *caches, 0, 0).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "query", case.query.float()), "float32"),
        (lambda case: setattr(case, "query", case.query.transpose(0, 1)), "contiguous"),
    ],
)
def test_refused_inputs(change, message):
    case = Case(4, 2, 32, 16, torch.bfloat16, torch.device("cpu"))
    change(case)
    with pytest.raises(ValueError, match=message):
        case.attend(WrittenOut("paged"))


def test_unavailable_without_a_gpu():
    assert not CudnnPrefill.available(torch.device("cpu"))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"),
    [(32, 8, 128, 64), (32, 8, 128, 16), (32, 8, 128, 128), (14, 2, 64, 32), (6, 2, 96, 16), (8, 1, 256, 64)],
)
def test_mixed_prefixes(q_heads, kv_heads, head_dim, block_size, dtype):
    """Fresh rows and rows with a cached prefix, one token and none; NaN in the blocks of others stays there."""
    case = Case(q_heads, kv_heads, head_dim, block_size, dtype, CUDA)
    case.check(case.attend(CudnnPrefill(CUDA)))


@on_gpu
def test_nothing_is_written_past_the_rows():
    case = Case(8, 2, 128, 64, torch.bfloat16, CUDA)
    out = torch.full((len(case.query) + 200, 8, 128), 7.0, dtype=torch.bfloat16, device=CUDA)
    case.check(case.attend(CudnnPrefill(CUDA), out=out[: len(case.query)]))
    assert (out[len(case.query) :] == 7).all()


@on_gpu
def test_lengths_are_read_on_the_device():
    """A captured call computes rows whose lengths changed after the capture."""
    case = Case(8, 2, 128, 64, torch.bfloat16, CUDA)
    prefill = CudnnPrefill(CUDA)
    eager = case.attend(prefill).clone()
    start, context = case.start.clone(), case.context.clone()
    case.start.copy_(torch.arange(len(start)))
    case.context.fill_(1)
    out = torch.zeros_like(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.attend(prefill, out=out)
    case.start.copy_(start)
    case.context.copy_(context)
    graph.replay()
    assert torch.equal(out, eager)
