"""Fast norms and rotations: the reference bit for bit from every way to run them; one pass against its steps, graphs, errors."""

import gc
import inspect
import weakref

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.configs import V4_FLASH
from dsv4.fast import compiled, eager_rows, use
from dsv4.fast import hyper_connections as fast_streams
from dsv4.fast import norms as fast
from dsv4.fast import rotary as fast_rotary
from dsv4.fast.adapters import flashinfer
from dsv4.fast.norms_ops import triton_fits
from dsv4.reference import hyper_connections, norms, rotary
from dsv4.types import ArgumentError, BackendUnavailable, HeadNormPrecision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("triton", "inductor", "eager") if DEVICE == "cuda" else ("inductor", "eager")
INF, NAN = float("inf"), float("nan")
TABLE = rotary.rope_table(rotary.rope_frequencies(16e4, yarn=V4_FLASH.rope_scaling), 300).to(DEVICE)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def rows(*shape, seed=0):
    """bf16 rows of all sizes, the first ones special."""
    x = torch.randn(*shape, generator=generator(seed))
    x = x * torch.exp2(torch.randint(-30, 30, (shape[0], *(1,) * (len(shape) - 1)), generator=generator(seed + 1)).float())
    for row, value in zip(range(1, shape[0]), (0.0, -0.0, INF, NAN), strict=False):
        x[row].view(-1)[3] = value
        x[row] = x[row] if value != 0 else value
    return x.bfloat16().to(DEVICE)


def weight(n, dtype=torch.bfloat16):
    return (1 + torch.randn(n, generator=generator(9)) / 4).to(dtype).to(DEVICE)


def positions(count, dtype=torch.int64, seed=5):
    drawn = torch.randint(-4, 304, (count,), generator=generator(seed))
    drawn[-1] = 2**31 - 1
    return drawn.to(dtype).to(DEVICE)


def same(got, expected):
    """Equal bits, NaN equal to NaN."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    bits = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.isnan(), expected.isnan())
    left, right = (torch.where(value.isnan(), 0.0, value).view(bits) for value in (got, expected))
    assert torch.equal(left, right)


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize(("n", "dtype", "eps"), [(128, torch.float32, 1e-6), (512, torch.bfloat16, 0.0), (7168, torch.bfloat16, 1e-20)])
def test_rms_norm(n, dtype, eps, impl):
    for shape in ((1, n), (17, n), (3, 5, n), (0, n)):
        x = rows(*shape)
        same(fast.rms_norm(x, weight(n, dtype), eps=eps, impl=impl), norms.rms_norm(x, weight(n, dtype), eps=eps))


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16_chain"])
def test_head_rms_norm(precision, impl):
    for shape in ((1, 4, 512), (9, 4, 512), (0, 4, 512)):
        x = rows(*shape)
        same(fast.head_rms_norm(x, eps=1e-6, precision=precision, impl=impl), norms.head_rms_norm(x, eps=1e-6, precision=precision))


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("n", [1, 2, 32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hadamard(n, dtype, impl):
    for shape in ((1, n), (9, 8, n), (0, n)):
        x = rows(*shape[:-1], 8 * n).to(dtype).unflatten(-1, (8, n))
        same(fast.hadamard(x, impl=impl), norms.hadamard(x))


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize(("shape", "dtype"), [((512,), torch.int64), ((4, 128), torch.int32), ((2, 3, 64), torch.int64)])
def test_apply_rope(shape, dtype, impl):
    for tokens in (1, 17, 128, 0):
        x, at = rows(tokens, *shape), positions(max(tokens, 1), dtype)[:tokens]
        kept = x.clone()
        for inverse in (False, True):
            got = fast_rotary.apply_rope(x, TABLE, at, inverse=inverse, impl=impl)
            same(got, rotary.apply_rope(x, TABLE, at, inverse=inverse))
        assert torch.equal(x.view(torch.int16), kept.view(torch.int16))  # RP-05


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_norm_rope_is_its_steps(dtype, impl):
    """One pass, bit for bit the norm and then the rotation, of fast and of the reference."""
    w = None if dtype is None else weight(512, dtype)
    for shape in ((1, 512), (17, 4, 512)):
        x, at = rows(*shape), positions(shape[0])
        got = fast_rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w, impl=impl)
        normed = fast.head_rms_norm(x, eps=1e-6, impl=impl) if w is None else fast.rms_norm(x, w, eps=1e-6, impl=impl)
        same(got, fast_rotary.apply_rope(normed, TABLE, at, impl=impl))
        same(got, rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w))
    assert fast_rotary.norm_rope(x[:0], TABLE, at[:0], eps=1e-6, weight=w, impl=impl).shape == (0, 4, 512)


@pytest.mark.parametrize("impl", WAYS)
def test_memory_layouts(impl):
    """Strides, and a first element that lies within a word of two."""
    x, at = rows(9, 128), positions(9)
    odd = torch.cat([x.flatten().new_zeros(1), x.flatten()])[1:].view(9, 128)
    wide = torch.stack([x, x], -1).flatten(1)[:, ::2]
    for given in (odd, wide, x.t().contiguous().t()):
        same(fast.rms_norm(given, weight(128), eps=1e-6, impl=impl), norms.rms_norm(x, weight(128), eps=1e-6))
        same(fast.hadamard(given, impl=impl), norms.hadamard(x))
        same(fast_rotary.apply_rope(given, TABLE, at, impl=impl), rotary.apply_rope(x, TABLE, at))
    tables, double = TABLE.t().contiguous().t(), torch.stack([at, at], 1)[:, 0]
    same(fast_rotary.apply_rope(x, tables, double, impl=impl), rotary.apply_rope(x, TABLE, at))


def test_graphs_per_function():
    """Two at most, whatever the number of tokens, the leading dimensions or the mode; counted for each function."""
    w = weight(64)

    def both(x):
        at = positions(max(len(x), 1))[: len(x)]
        return {
            "rms_norm": lambda: fast.rms_norm(x, w, eps=1e-6, impl="inductor"),
            "head_rms_norm": lambda: fast.head_rms_norm(x, eps=1e-6, impl="inductor"),
            "chain": lambda: fast.head_rms_norm(x, eps=1e-6, precision="bf16_chain", impl="inductor"),
            "hadamard": lambda: fast.hadamard(x, impl="inductor"),
            "apply_rope": lambda: fast_rotary.apply_rope(x, TABLE, at, impl="inductor"),
            "norm_rope": lambda: fast_rotary.norm_rope(x, TABLE, at, eps=1e-6, weight=w, impl="inductor"),
        }

    compiled._graph.cache_clear()
    torch._dynamo.reset()
    for name in both(rows(1, 64)):
        counters.clear()
        for tokens in (0, 1, 2, 64, 127, 128, 300):
            for x in (rows(tokens, 64), rows(2 * tokens, 64)[::2], rows(tokens, 128)[:, ::2]):
                both(x)[name]()
                with torch.inference_mode():
                    both(x.clone())[name]()
        assert 1 <= counters["stats"]["unique_graphs"] <= 2, name


def samples():
    x, at = rows(3, 2, 64), positions(3)
    return {
        "rms_norm": (x, weight(64), 1e-6),
        "head_rms_norm": (x, 1e-6, "bf16_chain"),
        "hadamard": (x,),
        "apply_rope": (x, TABLE, at, True),
        "norm_rope": (x, TABLE, at, 1e-6, weight(64)),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    arguments = tuple(value[:1] if isinstance(value, torch.Tensor) and value.shape[0] == 3 else value for value in samples()[name])
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*arguments, "eager"))


@pytest.mark.parametrize("most", [1, 64, 200, 64 * 64])
def test_chunks_of_rows(most, monkeypatch):
    """Whatever fits into a buffer: rows one at a time, some and a rest, or all, special ones among them."""
    monkeypatch.setattr(eager_rows, "MOST", most)
    x, streams, pre = rows(17, 64), rows(17, 4, 64), torch.rand(17, 4, generator=generator(3)).to(DEVICE)
    same(fast.rms_norm(x, weight(64), eps=1e-6, impl="eager"), norms.rms_norm(x, weight(64), eps=1e-6))
    for precision in HeadNormPrecision:
        got = fast.head_rms_norm(x, eps=1e-6, precision=precision, impl="eager")
        same(got, norms.head_rms_norm(x, eps=1e-6, precision=precision))
    same(fast_streams.collapse(streams, pre, impl="eager"), hyper_connections.collapse(streams, pre))


@pytest.mark.parametrize("impl", [None, *WAYS])
def test_a_known_kind_does_not_reach_the_operator(impl, monkeypatch):
    """And gets the same bits, of other numbers too; another eps, width or stride is no known kind."""
    fast._rms.forget()  # what other tests called
    x, w = rows(5, 64), weight(64)
    same(fast.rms_norm(x, w, eps=1e-6, impl=impl), norms.rms_norm(x, w, eps=1e-6))
    wide = rows(5, 128)[:, ::2]
    same(fast.rms_norm(wide, w, eps=1e-6, impl=impl), norms.rms_norm(wide, w, eps=1e-6))
    deep = rows(2, 3, 64)
    same(fast.rms_norm(deep, w, eps=1e-6, impl=impl), norms.rms_norm(deep, w, eps=1e-6))

    def reached(*_):
        raise LookupError

    monkeypatch.setattr(fast, "_operator", reached)
    for other in (x, rows(5, 64, seed=8), wide, deep):
        same(fast.rms_norm(other, w, eps=1e-6, impl=impl), norms.rms_norm(other, w, eps=1e-6))
    for given, eps in (((x, w), 1e-5), ((x, w.float()), 1e-6), ((rows(6, 64), w), 1e-6), ((rows(5, 192)[:, ::3], w), 1e-6)):
        with pytest.raises(LookupError):
            fast.rms_norm(*given, eps=eps, impl=impl)
    with pytest.raises(ArgumentError, match="requires grad"):
        fast.rms_norm(x.clone().requires_grad_(), w, eps=1e-6, impl=impl)


@pytest.mark.parametrize("impl", WAYS)
def test_ties_of_fp32_weights(impl):
    """A product with an exact factor that lies between two fp32 numbers, of which one is between two bf16 numbers."""
    for numbers, place, number in (([0, 1, 1, 2, 3, 3], 4, "0x1.56aaacp-1"), ([9, 3, 11, 4, 11, 6], 0, "0x1.c8e39p-1")):
        x, w = torch.tensor([numbers], dtype=torch.bfloat16, device=DEVICE), torch.ones(6, device=DEVICE)
        w[place] = float.fromhex(number)
        same(fast.rms_norm(x, w, eps=1e-20, impl=impl), norms.rms_norm(x, w, eps=1e-20))


@pytest.mark.skipif(DEVICE == "cuda", reason="threads of a CPU")
def test_a_long_row_alone_and_among_others():
    """Torch's threads share a sum that is the only one of a call, in another order: it shows where the mean is between two bf16 numbers."""
    x = torch.zeros(1, 49152, dtype=torch.bfloat16)
    for number, places in ((2.0**27, (14964, 24915, 34107)), (2.0**23, (14321, 31021, 34298)), (2.0**15, (8723, 18365, 40924))):
        x[0, list(places)] = number
    x[0, 44844], x[0, 46585] = 0.25, 2
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for call in (
            lambda x: fast.head_rms_norm(x, eps=0.0, precision="bf16_chain", impl="eager"),
            lambda x: fast.head_rms_norm(x, eps=0.0, impl="eager"),
            lambda x: fast.rms_norm(x, torch.full((49152,), 1.1), eps=0.0, impl="eager"),
        ):
            alone = call(x)
            for count in (2, 6):  # six are a chunk of five and one alone
                same(call(x.expand(count, -1)), alone.expand(count, -1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("impl", WAYS)
def test_a_known_kind_keeps_no_tensor(impl):
    x, w, streams, pre = rows(5, 64), weight(64), rows(5, 4, 64), torch.rand(5, 4, device=DEVICE)
    head = torch.rand(4, 256, device=DEVICE), torch.rand(1, device=DEVICE), torch.rand(4, device=DEVICE)
    given = [weakref.ref(tensor) for tensor in (x, w, streams, pre, *head)]
    for _ in range(2):
        fast.rms_norm(x, w, eps=1e-6, impl=impl)
        fast_streams.collapse(streams, pre, impl=impl)
        fast_streams.head_collapse(streams, *head, norm_eps=1e-6, impl=impl)
    del x, w, streams, pre, head
    gc.collect()
    assert [reference() for reference in given] == [None] * len(given)


def test_chain_is_one_graph():
    def step(x, w, at):
        q = fast_rotary.norm_rope(fast.rms_norm(x, w, eps=1e-6, impl="eager"), TABLE, at, eps=1e-6, impl="eager")
        back = fast_rotary.apply_rope(q, TABLE, at, inverse=True, impl="eager")
        return fast.hadamard(fast.head_rms_norm(back, eps=1e-6, impl="eager"), impl="eager")

    x, at = rows(6, 64), positions(6)
    same(torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight(64), at), step(x, weight(64), at))


@pytest.mark.parametrize("module", [(fast, norms), (fast_rotary, rotary)])
def test_signatures_are_the_reference_s(module):
    ours, theirs = module
    assert ours.__all__ == theirs.__all__
    for name in ours.__all__:
        parameters = dict(inspect.signature(getattr(ours, name)).parameters)
        impl = parameters.pop("impl", None)
        assert (impl is None) == name.startswith("rope_")
        expected = inspect.signature(getattr(theirs, name)).parameters
        assert [(p.name, p.kind, p.default) for p in parameters.values()] == [(p.name, p.kind, p.default) for p in expected.values()]


def test_refusals():
    x, at = rows(2, 64), positions(2)
    grad = x.clone().requires_grad_()
    for call in (
        lambda: fast.rms_norm(grad, weight(64), eps=1e-6),
        lambda: fast.rms_norm(x, weight(64).requires_grad_(), eps=1e-6),
        lambda: fast.head_rms_norm(grad, eps=1e-6),
        lambda: fast.hadamard(grad),
        lambda: fast_rotary.apply_rope(grad, TABLE, at),
        lambda: fast_rotary.norm_rope(grad, TABLE, at, eps=1e-6),
    ):
        with pytest.raises(ArgumentError, match="requires grad"):
            call()
    for wrong in (x.double(), x.float()):
        with pytest.raises(ArgumentError, match="must be bf16"):
            fast.head_rms_norm(wrong, eps=1e-6)
    with pytest.raises(ArgumentError, match="hadamard has triton, inductor, eager"):
        fast.hadamard(x, impl="flashinfer")


def test_rows_that_triton_does_not_take():
    assert triton_fits({"x": torch.empty(2, 16384)}) is None
    assert "even" in triton_fits({"x": torch.empty(2, 7)})
    assert "16384" in triton_fits({"x": torch.empty(2, 16386)})


@pytest.mark.skipif(DEVICE == "cuda", reason="what a CPU lacks")
def test_backends_of_other_devices():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.rms_norm(rows(2, 64), weight(64), eps=1e-6, impl="triton")
    with pytest.raises(ArgumentError, match="rms_norm has triton, inductor, eager"):
        fast.rms_norm(rows(2, 64), weight(64), eps=1e-6, impl="flashinfer")
    with use(batch_invariant=True, deterministic=True):
        fast.rms_norm(rows(2, 64), weight(64), eps=1e-6)


def test_probe_of_flashinfer(monkeypatch):
    """It takes a right norm for right; one without eps, with 1 + w, or that writes nothing is found out."""

    def probe(function):
        monkeypatch.setattr(type(flashinfer.LIBRARY), "function", lambda *_: function)
        return flashinfer.LIBRARY.probes[flashinfer.RMSNORM](torch.device("cpu"))

    assert probe(lambda x, w, eps: norms.rms_norm(x, w, eps=eps)) is None
    assert probe(lambda x, w, eps: norms.rms_norm(x, w, eps=0.0)) is not None
    assert probe(lambda x, w, eps: norms.rms_norm(x, 1 + w, eps=eps)) is not None
    assert probe(lambda x, w, eps: torch.empty_like(x)) is not None
