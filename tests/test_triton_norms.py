"""The Triton kernels of norms and rotations against the reference, bit for bit.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, which must be asked for before triton is imported: one test runs
this file again in a process of its own.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.fast import dispatch
from dsv4.fast import norms as fast
from dsv4.fast import rotary as fast_rotary
from dsv4.reference import norms, rotary
from interpreted import INTERPRETED, passes

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
FUNCTIONS = ("norms.rms_norm", "norms.head_rms_norm", "norms.hadamard", "rotary.apply_rope", "rotary.norm_rope")
INF, NAN = float("inf"), float("nan")
TABLE = rotary.rope_table(rotary.rope_frequencies(1e4), 70).to(DEVICE)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=64)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function in FUNCTIONS:
        rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES[function])
        monkeypatch.setitem(dispatch.TABLES, function, rows)


def rows(*shape, seed=0):
    """bf16 rows of all sizes, the first ones special, the last one of subnormal numbers."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=source) * torch.exp2(torch.randint(-30, 30, (shape[0], *(1,) * (len(shape) - 1)), generator=source))
    for row, value in zip(range(1, shape[0]), (0.0, -0.0, INF, NAN), strict=False):
        x[row].view(-1)[3] = value
        x[row] = x[row] if value != 0 else value
    x[-1] = torch.where(x[-1] < 0, -3 * 2.0**-133, 2.0**-133) if shape[0] > 6 else x[-1]
    return x.bfloat16().to(DEVICE)


def weight(n, dtype=torch.bfloat16):
    return (1 + torch.randn(n, generator=torch.Generator().manual_seed(9)) / 4).to(dtype).to(DEVICE)


def positions(count, dtype=torch.int64):
    drawn = torch.randint(-4, 74, (count,), generator=torch.Generator().manual_seed(5))
    drawn[-1] = 2**31 - 1
    return drawn.to(dtype).to(DEVICE)


def same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    bits = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.isnan(), expected.isnan())
    left, right = (torch.where(value.isnan(), 0.0, value).view(bits) for value in (got, expected))
    assert torch.equal(left, right)


@kernel
@pytest.mark.parametrize("n", [6, 128, 512, 1280, 1536, 7168])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 1e-20), (torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_rms_norm(n, dtype, eps):
    for tokens in (1, 9):
        x = rows(tokens, n)
        same(fast.rms_norm(x, weight(n, dtype), eps=eps, impl="triton"), norms.rms_norm(x, weight(n, dtype), eps=eps))


def placed(values):
    """The same values behind a gap of one, with gaps between them, and at an address that no word of two begins at."""
    yield torch.cat([values[:1], values])[1:]
    yield torch.stack([values, values], -1)[:, 0]
    if DEVICE == "cpu":
        size = values.element_size()
        memory = torch.empty(size * (len(values) + 2), dtype=torch.uint8)
        begin = size if memory.data_ptr() % (2 * size) == 0 else 0
        numbers = torch.frombuffer(memory.numpy(), dtype=values.dtype, offset=begin, count=len(values))
        yield numbers.copy_(values)


@kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_from_anywhere(dtype):
    from dsv4.fast.kernels.rows import weight_words

    x, w, at = rows(9, 128), weight(128, dtype), positions(9)
    for given in (w, *placed(w)):
        words = weight_words(given)
        assert words.data_ptr() % words.element_size() == 0
        assert torch.equal(words.view(dtype), w)
        same(fast.rms_norm(x, given, eps=1e-6, impl="triton"), norms.rms_norm(x, w, eps=1e-6))
        got = fast_rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=given, impl="triton")
        same(got, rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w))


@kernel
@pytest.mark.parametrize("precision", ["fp32", "bf16_chain"])
@pytest.mark.parametrize("n", [64, 512])
def test_head_rms_norm(precision, n):
    x = rows(7, 3, n)
    same(fast.head_rms_norm(x, eps=1e-6, precision=precision, impl="triton"), norms.head_rms_norm(x, eps=1e-6, precision=precision))


@kernel
@pytest.mark.parametrize("n", [1, 2, 16, 128, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hadamard(n, dtype):
    x = rows(7, 2 * max(n, 4)).to(dtype)[:, : 2 * n].unflatten(-1, (2, n))
    same(fast.hadamard(x, impl="triton"), norms.hadamard(x))


@kernel
@pytest.mark.parametrize("shape", [(512,), (3, 128), (2, 2, 64), (66,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("inverse", [False, True])
def test_apply_rope(shape, dtype, inverse):
    for tokens in (1, 19):
        x, at = rows(tokens, *shape), positions(tokens, dtype)
        kept = x.clone()
        got = fast_rotary.apply_rope(x, TABLE, at, inverse=inverse, impl="triton")
        same(got, rotary.apply_rope(x, TABLE, at, inverse=inverse))
        assert torch.equal(x.view(torch.int16), kept.view(torch.int16))


@kernel
def test_rotating_back_keeps_the_sign_of_a_zero():
    x = torch.tensor([[-0.0, -1.0], [0.0, 1.0], [-0.0, -0.0]]).bfloat16().to(DEVICE)
    table, at = rotary.rope_table(rotary.rope_frequencies(1e4, 2), 1).to(DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for inverse in (False, True):
        same(fast_rotary.apply_rope(x, table, at, inverse=inverse, impl="triton"), rotary.apply_rope(x, table, at, inverse=inverse))


@kernel
@pytest.mark.parametrize("dims", [2, 6, 24])
def test_other_widths_of_a_table(dims):
    table = rotary.rope_table(rotary.rope_frequencies(1e4, dims), 70).to(DEVICE)
    x, at = rows(7, 2, 24), positions(7)
    same(fast_rotary.apply_rope(x, table, at, impl="triton"), rotary.apply_rope(x, table, at))


@kernel
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(512,), (3, 512), (2, 64)])
def test_norm_rope_is_its_steps(dtype, shape):
    w = None if dtype is None else weight(shape[-1], dtype)
    x, at = rows(9, *shape), positions(9)
    got = fast_rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w, impl="triton")
    normed = fast.head_rms_norm(x, eps=1e-6, impl="triton") if w is None else fast.rms_norm(x, w, eps=1e-6, impl="triton")
    same(got, fast_rotary.apply_rope(normed, TABLE, at, impl="triton"))
    same(got, rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w))


@kernel
def test_memory_layouts_and_empty():
    """Strides, and a first element that lies within a word of two."""
    x, at = rows(9, 128), positions(9)
    odd = torch.cat([x.flatten().new_zeros(1), x.flatten()])[1:].view(9, 128)
    wide = torch.stack([x, x], -1).flatten(1)[:, ::2]
    for given in (odd, wide, x.t().contiguous().t()):
        same(fast.rms_norm(given, weight(128), eps=1e-6, impl="triton"), norms.rms_norm(x, weight(128), eps=1e-6))
        same(fast_rotary.apply_rope(given, TABLE, at, impl="triton"), rotary.apply_rope(x, TABLE, at))
    one = torch.cat([x, x[:, :1]], 1)[:1, :128]  # contiguous, for all its odd stride
    same(fast.rms_norm(one, weight(128), eps=1e-6, impl="triton"), norms.rms_norm(x[:1], weight(128), eps=1e-6))
    assert fast.rms_norm(x[:0], weight(128), eps=1e-6, impl="triton").shape == (0, 128)
    assert fast_rotary.apply_rope(x[:0], TABLE, at[:0], impl="triton").shape == (0, 128)
    assert fast.hadamard(x[:, :0].reshape(0, 64), impl="triton").shape == (0, 64)
