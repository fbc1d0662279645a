"""Fast products with quantised weights and their inputs: the reference bit for bit from every way to run them; which row a card gets; what
is held; graphs, operators, errors."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4.fast import compiled, dispatch, linear_bodies, linear_ops, quantization, recall, use
from dsv4.fast import linear as fast
from dsv4.fast.adapters import deepgemm_linear, flashinfer_linear
from dsv4.fast.adapters.library import Library
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Device
from dsv4.fast.recall import Memory
from dsv4.reference import linear as reference
from dsv4.reference import scales
from dsv4.types import ArgumentError, BackendUnavailable, Mxfp8Pair, Quantized, Unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("inductor", "eager")
TOKENS = (0, 1, 2, 7, 8, 17, 63, 64, 65, 127, 128, 129)
LAYOUTS = ("packed", "128x4")
PRODUCER_LAYOUTS = ("rows", "packed", "128x4", "mn_major")
SIZES = [(128, 256, 128), (9, 200, 128), (70, 96, 32), (33, 100, 32), (1, 1, 128)]  # n, k, block: whole and partial blocks on both sides
every_way = pytest.mark.parametrize("impl", WAYS)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator(seed))).bfloat16().to(DEVICE)


def codes(*shape, seed=0):
    """E4M3 codes of every byte but NaN's two."""
    byte = torch.randint(0, 254, shape, generator=generator(seed), dtype=torch.uint8)
    return (byte + (byte >= 127)).to(torch.uint8).view(torch.float8_e4m3fn).to(DEVICE)


def powers(*shape, seed=0):
    """E8M0 bytes of 2^-7 to 2^8."""
    return torch.randint(120, 136, shape, generator=generator(seed), dtype=torch.uint8).to(DEVICE)


def numbers(*shape, seed=0):
    """fp32 scales that are no powers of two."""
    return (0.5 + torch.rand(*shape, generator=generator(seed))).to(DEVICE)


def grid(n, k, block):
    return -(-n // block), -(-k // block)


def laid(byte, layout):
    return scales.pack_ue8m0(byte) if layout == "packed" else scales.swizzle_128x4(byte)


def pair(rows, k, layout, seed=0):
    return Mxfp8Pair(codes(rows, k, seed=seed), laid(powers(rows, -(-k // 32), seed=seed + 1), layout))


def with_pads(tensor):
    """A tensor, those of packed and MN-major scales as a vector with their pads."""
    padded = tensor.dim() == 2 and tensor.numel() and tensor.stride(0) == 1 and tensor.element_size() == 4
    return tensor.as_strided((tensor.shape[1] * tensor.stride(1),), (1,)) if padded else tensor


def memory(tensor):
    return with_pads(tensor).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(got, expected):
    """Equal bytes, NaN equal to NaN; equal strides of codes and scales, contiguous products."""
    if isinstance(got, tuple):
        for one, other in zip(got, expected, strict=True):
            same(one, other)
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.dtype != torch.bfloat16:
        assert got.stride() == expected.stride() or not got.numel()
    else:
        assert got.is_contiguous()
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = got.nan_to_num(), expected.nan_to_num()
    assert torch.equal(memory(got), memory(expected))


# Products


@every_way
@pytest.mark.parametrize(("n", "k", "block"), SIZES)
def test_linear_fp8(n, k, block, impl):
    """bf16 and codes, scales of both kinds on both sides, strided inputs, partial blocks."""
    weight = codes(n, k, seed=1)
    for tokens in TOKENS:
        x, a = normal(tokens, 2 * k, seed=tokens), codes(2 * tokens, k, seed=tokens)
        of_rows = powers(tokens, -(-k // block)), numbers(-(-k // block), tokens + 3).t()[:tokens]
        for of_weight in (powers(*grid(n, k, block)).view(torch.float8_e8m0fnu), numbers(*grid(n, k, block))):
            for given in (x[:, :k], x[:, ::2], *(Quantized(a[::2], part) for part in of_rows)):
                got = fast.linear_fp8(given, weight, of_weight, block=block, impl=impl)
                same(got, reference.linear_fp8(given, weight, of_weight, block=block))


@every_way
@pytest.mark.parametrize("k", [128, 160, 96, 33])
def test_linear_mxfp8(k, impl):
    """Every mix of layouts, words that are not whole."""
    for tokens in TOKENS:
        for left in LAYOUTS:
            x = pair(tokens, k, left, seed=tokens)
            for right in LAYOUTS:
                weight = pair(70, k, right, seed=99)
                same(fast.linear_mxfp8(x, weight, impl=impl), reference.linear_mxfp8(x, weight))


@every_way
def test_specials(impl):
    """NaN codes and scales make NaN of their rows alone; the smallest and largest powers; zeros of both signs sum to +0."""
    x, weight = codes(5, 64), codes(4, 64, seed=1)
    x.view(torch.uint8)[1, 3], x.view(torch.uint8)[2] = 0x7F, 0x80
    of_x, of_weight = powers(5, 2), powers(1, 2)
    of_x[3, 1], of_x[4, 0] = 255, 0
    got = fast.linear_fp8(Quantized(x, of_x), weight, of_weight, block=32, impl=impl)
    same(got, reference.linear_fp8(Quantized(x, of_x), weight, of_weight, block=32))
    assert got.isnan().any(1).tolist() == [False, True, False, True, False]
    assert got[2].view(torch.int16).tolist() == [0] * 4
    for byte in (0, 1, 253, 255):
        of_weight[0, 1] = byte
        got = fast.linear_fp8(Quantized(x, of_x), weight, of_weight, block=32, impl=impl)
        same(got, reference.linear_fp8(Quantized(x, of_x), weight, of_weight, block=32))
    same(
        fast.linear_fp8(normal(3, 64), weight[:0], of_weight[:0], block=32, impl=impl),
        torch.empty(3, 0, dtype=torch.bfloat16, device=DEVICE),
    )


@every_way
@pytest.mark.parametrize("tokens", [3, 129])
def test_many_tiles(tokens, impl, monkeypatch):
    """Tiles of the weight that end inside a block, and of the inputs, for few tokens and for many."""
    monkeypatch.setattr(linear_bodies, "TILE", 7 * 256)
    monkeypatch.setattr(linear_bodies, "INPUTS", 50 * 256)
    x, weight = normal(tokens, 600), codes(150, 600)
    for of_weight, block in ((numbers(5, 19), 32), (powers(2, 5), 128)):
        same(fast.linear_fp8(x, weight, of_weight, block=block, impl=impl), reference.linear_fp8(x, weight, of_weight, block=block))
    left, right = pair(tokens, 600, "128x4"), pair(70, 600, "packed", seed=3)
    same(fast.linear_mxfp8(left, right, impl=impl), reference.linear_mxfp8(left, right))


@every_way
def test_a_row_is_the_same_in_any_batch(impl):
    x, weight, of_weight = normal(129, 512), codes(96, 512), numbers(1, 4)
    whole = fast.linear_fp8(x, weight, of_weight, impl=impl)
    for rows in (slice(1), slice(3, 5), slice(40, 103), slice(128, None)):
        same(fast.linear_fp8(x[rows], weight, of_weight, impl=impl), whole[rows])


class Held(TorchDispatchMode):
    """Bytes of the largest tensor that an operation reads or makes, those of the arguments not counted."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.most = {tensor.untyped_storage().data_ptr() for tensor in given}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self.given:
                self.most = max(self.most, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("run", [run_compiled, run_eagerly])
@pytest.mark.parametrize("name", ["linear_fp8", "linear_mxfp8"])
def test_no_weight_is_held_in_fp64(name, run):
    """Of 16 MiB that it would take, 2 at a time."""
    n, k = 2048, 1024
    weight = codes(n, k).view(torch.uint8)
    if name == "linear_fp8":
        given = (normal(3, k), None, weight, powers(16, 8), 128)
    else:
        given = (codes(3, k).view(torch.uint8), laid(powers(3, 32), "packed"), weight, laid(powers(n, 32), "128x4"))
    body = getattr(linear_bodies, name)
    body(run, *given)  # compiles
    with Held(*(part for part in given if isinstance(part, torch.Tensor))) as held:
        body(run, *given)
    assert held.most == linear_bodies.TILE * 8 == 2**21


# Inputs


@every_way
@pytest.mark.parametrize("layout", PRODUCER_LAYOUTS)
@pytest.mark.parametrize(("n", "group"), [(384, 32), (640, 128), (32, 32)])
def test_producers(n, group, layout, impl):
    """Codes, scales and pads; halves of one matrix; every floor."""
    weight = 1 + normal(n, seed=7, scale=0.2)
    options = {"group": group, "scale_layout": layout, "impl": impl}
    for tokens in TOKENS:
        x, wide = normal(tokens, n, seed=tokens), normal(tokens, 2 * n, seed=tokens + 1, scale=20.0)
        if tokens > 2:
            x[1], wide[2] = 0, 0
        floor = ("official", "sglang", "flashinfer")[tokens % 3]
        theirs = {"group": group, "scale_layout": layout, "amax_floor": floor}
        for w in (weight, weight.float()):
            got = fast.norm_quantize(x, w, eps=1e-6, amax_floor=floor, **options)
            same(got, reference.norm_quantize(x, w, eps=1e-6, **theirs))
        for limit in (None, 10.0, 0.3):
            got = fast.swiglu_quantize(*wide.split(n, 1), limit=limit, amax_floor=floor, **options)
            same(got, reference.swiglu_quantize(*wide.split(n, 1), limit=limit, **theirs))


@every_way
def test_swiglu_of_specials(impl):
    edge = [0.0, -0.0, 3e38, -3e38, 1e-38, -1e-38, 88.0, -88.0, -120.0, -745.0, 10.0, 10.0625, torch.inf, -torch.inf, torch.nan, 1.0]
    gate = torch.tensor(edge).repeat_interleave(16).view(8, 32).bfloat16().to(DEVICE)
    up = torch.tensor(edge).repeat(16).view(8, 32).bfloat16().to(DEVICE)
    for limit in (None, 10.0):
        for floor in ("official", "none"):
            given = {"limit": limit, "group": 32, "amax_floor": floor}
            same(fast.swiglu_quantize(gate, up, **given, impl=impl), reference.swiglu_quantize(gate, up, **given))
            for row in range(8):  # a group has one special or none
                one = gate[row, row:].repeat_interleave(32)[None, : 32 * 8], up[row].repeat_interleave(32)[None, : 32 * 8]
                same(fast.swiglu_quantize(*one, **given, impl=impl), reference.swiglu_quantize(*one, **given))


@every_way
@pytest.mark.parametrize("layout", ["packed", "128x4"])
def test_a_producer_s_pair_is_a_product_s(layout, impl):
    """Norm, product, SwiGLU, product: what V4.1's serving path chains."""
    n, k = 96, 160
    first, second = (fast.mxfp8_weight(codes(n, k), powers(3, 5), scale_layout=side) for side in LAYOUTS)
    x = Mxfp8Pair(*fast.norm_quantize(normal(9, k), normal(k), eps=1e-20, group=32, scale_layout=layout, impl=impl))
    gate, up = (fast.linear_mxfp8(x, weight, impl=impl) for weight in (first, second))
    expected = [reference.linear_mxfp8(x, weight) for weight in (first, second)]
    same((gate, up), tuple(expected))
    assert torch.equal(gate, up)  # whatever the layout of the weight's scales
    h = fast.swiglu_quantize(gate, up, limit=10.0, group=32, scale_layout=layout, impl=impl)
    same(h, reference.swiglu_quantize(gate, up, limit=10.0, group=32, scale_layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 100), (0, 64), (1, 1)])
def test_mxfp8_weight(n, k, layout):
    weight, of_blocks = codes(n, k), powers(*grid(n, k, 32))
    got = fast.mxfp8_weight(weight, of_blocks.view(torch.float8_e8m0fnu), scale_layout=layout, impl="eager")
    assert got.codes is weight
    assert got.layout == layout
    same(got.scales, reference.mxfp8_weight(weight, of_blocks, scale_layout=layout).scales)


# Which row a call gets


def pretend(monkeypatch, capability):
    """A CPU that says it is a card of this capability, with both libraries proved. What is called is noted, not run."""
    here, called = Device("cuda", capability) if capability else Device("cpu"), []
    monkeypatch.setattr(dispatch, "describe", lambda device: here)
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    monkeypatch.setattr(deepgemm_linear, "describe", lambda device: here)
    for name, answer in {"missing": None, "lacks": None, "disproved": None, "proved": True}.items():
        monkeypatch.setattr(Library, name, lambda *_, answer=answer, **__: answer)
    for function, rows in dispatch.TABLES.items():
        if function.startswith(("linear.", "output_projection.")):
            eager = rows[-1].call
            noted = tuple(
                replace(row, call=lambda *given, row=row, eager=eager: called.append(row.backend) or eager(*given), prepare=None)
                for row in rows
            )
            monkeypatch.setitem(dispatch.TABLES, function, noted)
    return called


SM80, SM90, SM100, SM103, SM120, SM121 = (8, 0), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)
BYTES, FLOATS = powers, numbers
FP8_ROUTES = [
    (SM90, (64, 256, 128), BYTES, "deepgemm"),
    (SM90, (64, 256, 128), FLOATS, "deepgemm"),  # LN-01: scales of any value
    (SM90, (64, 208, 128), FLOATS, "deepgemm"),  # a partial group
    (SM90, (64, 256, 32), BYTES, "triton"),
    (SM90, (64, 200, 128), BYTES, "triton"),  # rows of 200 bytes
    (SM90, (60, 256, 128), BYTES, "triton"),
    (SM100, (64, 256, 128), BYTES, "deepgemm"),
    (SM103, (64, 256, 32), BYTES, "deepgemm"),
    (SM120, (64, 256, 32), BYTES, "deepgemm"),
    (SM100, (64, 256, 128), FLOATS, "triton"),  # LN-01: it would drop mantissas
    (SM100, (64, 208, 128), BYTES, "triton"),
    (SM121, (64, 256, 128), BYTES, "triton"),
    (SM80, (64, 256, 128), BYTES, "triton"),
    (None, (64, 256, 128), BYTES, "inductor"),
]


@pytest.mark.parametrize("demand", [{}, {"batch_invariant": True, "deterministic": True}])
@pytest.mark.parametrize(("capability", "size", "kind", "backend"), FP8_ROUTES)
def test_routes_of_linear_fp8(monkeypatch, capability, size, kind, backend, demand):
    called, (n, k, block) = pretend(monkeypatch, capability), size
    weight, of_weight = codes(n, k), kind(*grid(n, k, block))
    with use(**demand):
        fast.linear_fp8(normal(5, k), weight, of_weight, block=block)
        fast.linear_fp8(Quantized(codes(5, k), kind(5, -(-k // block))), weight, of_weight, block=block)
    assert called == [backend] * 2


PAIR_ROUTES = [
    (SM100, "128x4", "128x4", "flashinfer", "triton"),
    (SM121, "128x4", "128x4", "flashinfer", "triton"),
    (SM120, "packed", "packed", "deepgemm", "deepgemm"),
    (SM100, "packed", "128x4", "triton", "triton"),
    (SM100, "128x4", "packed", "triton", "triton"),
    (SM121, "packed", "packed", "triton", "triton"),
    (SM90, "packed", "packed", "triton", "triton"),
    (SM90, "128x4", "128x4", "triton", "triton"),
    (SM80, "packed", "packed", "triton", "triton"),
    (None, "packed", "128x4", "inductor", "inductor"),
]


@pytest.mark.parametrize(("capability", "left", "right", "backend", "invariant"), PAIR_ROUTES)
def test_routes_of_linear_mxfp8(monkeypatch, capability, left, right, backend, invariant):
    called, x, weight = pretend(monkeypatch, capability), pair(5, 256, left), pair(128, 256, right)
    fast.linear_mxfp8(x, weight)
    with use(deterministic=True):
        fast.linear_mxfp8(x, weight)
    with use(batch_invariant=True):
        fast.linear_mxfp8(x, weight)
    assert called == [backend, invariant, invariant]


@pytest.mark.parametrize("block", [128.0, [128], {}, "128", True, 64])
def test_a_block_is_one_of_two_integers(block):
    weight, of_weight = codes(64, 256), powers(1, 2)
    fast.linear_fp8(normal(5, 256), weight, of_weight)  # what has passed is remembered
    with pytest.raises(ArgumentError, match=r"^block: got .*must be one of 32, 128"):
        fast.linear_fp8(normal(5, 256), weight, of_weight, block=block)


def test_what_has_passed_is_known_by_its_function():
    x, weight = pair(5, 256, "packed"), pair(128, 256, "packed")
    fast.linear_mxfp8(x, weight)
    with pytest.raises(ArgumentError, match=r"^block: got 0"):
        fast.linear_fp8(Quantized(*x), weight.codes, weight.scales, block=0)
    numbers, (rows, of_rows) = normal(5, 256), (codes(64, 256), powers(1, 2))
    fast.linear_fp8(numbers, rows, of_rows)
    with pytest.raises(ArgumentError, match=r"^x"):
        fast.linear_fp8(Quantized(numbers, None), rows, of_rows)


def test_a_device_that_is_not_there_has_no_route():
    with pytest.raises(ArgumentError, match=r"^device: got cuda:99; there are"):
        fast.choose_mxfp8_route("flashinfer", "default", "cuda:99")


def test_the_route_s_layout_is_what_its_backend_takes(monkeypatch):
    """A producer that follows `choose_mxfp8_route` gets the backend that it names."""
    for capability in (SM80, SM90, SM100, SM103, SM120, SM121):
        for consumer in ("flashinfer", "deepgemm", "triton"):
            for mode in ("default", "deterministic", "batch_invariant"):
                with monkeypatch.context() as patch:
                    called = pretend(patch, capability)
                    patch.setattr("dsv4.host.cuda_capability", lambda device, capability=capability: capability)
                    route = fast.choose_mxfp8_route(consumer, mode, "cuda:0")
                    x = Mxfp8Pair(*fast.norm_quantize(normal(5, 256), normal(256), eps=1e-6, group=32, scale_layout=route.layout))
                    weight = fast.mxfp8_weight(codes(128, 256), powers(4, 8), scale_layout=route.layout, impl="eager")
                    with nullcontext() if mode == "default" else use(**{mode: True}):
                        fast.linear_mxfp8(x, weight)
                    assert called[-1] == route.backend, (capability, consumer, mode)


@pytest.mark.parametrize(("capability", "impl", "options", "error", "words"), [
    (None, "deepgemm", {}, BackendUnavailable, "wants a CUDA device of capability 10.0, 10.3, 10.7, 12.0, this is cpu"),
    (SM90, "flashinfer", {}, BackendUnavailable, "wants a CUDA device of capability 10.0, 10.3, 10.7, 12.0, 12.1, this is SM90"),
    (SM100, "flashinfer", {}, Unsupported, "takes 128x4 scales on both sides; got scales"),
    (SM100, "flashinfer", {"batch_invariant": True}, BackendUnavailable, "is not batch-invariant"),
    (SM100, "flashinfer", {"deterministic": True}, BackendUnavailable, "is not deterministic"),
    (SM90, "deepgemm", {}, BackendUnavailable, "wants a CUDA device of capability 10.0, 10.3, 10.7, 12.0, this is SM90"),
    (SM100, "flashmla", {}, ArgumentError, "linear.linear_mxfp8 has flashinfer, deepgemm, triton, inductor, eager"),
])  # fmt: skip
def test_what_is_asked_for_runs_or_says_why(monkeypatch, capability, impl, options, error, words):
    called, x, weight = pretend(monkeypatch, capability), pair(5, 256, "packed"), pair(128, 256, "packed")
    with use(**options):
        with pytest.raises(error, match=words):
            fast.linear_mxfp8(x, weight, impl=impl)
        if impl in dispatch.BACKENDS[1:3]:
            with use({"linear.linear_mxfp8": impl}), pytest.raises(error, match=words):
                fast.linear_mxfp8(x, weight)
    assert not called


def test_norms_of_rows_that_no_program_holds():
    (row,) = (row for row in dispatch.TABLES["linear.norm_quantize"] if row.backend == "triton")
    assert row.arguments({"x": torch.empty(1, 32768)}) is None
    assert "at most 32768" in row.arguments({"x": torch.empty(1, 32896)})


def test_flags():
    """Our products fit themselves to the number of tokens, unless that is not to be."""
    rows = {(name, row.backend): row for name, table in dispatch.TABLES.items() if name.startswith("linear.") for row in table}
    library = ("linear.linear_mxfp8", "flashinfer")
    variant = {key for key, row in rows.items() if not row.batch_invariant}
    products = ("linear.linear_fp8", "linear.linear_mxfp8")
    blas = {(name, backend) for name in products for backend in ("inductor", "eager")}
    assert variant == {library, *blas, *((name, "triton") for name in products)}
    with use(batch_invariant=True):
        assert {key for key, row in rows.items() if not row.batch_invariant} == {library}
    assert {key for key, row in rows.items() if not row.deterministic} == {library}
    assert all(row.graph_safe for row in rows.values())


# What rows of CUDA hand to kernels and libraries


@pytest.fixture
def kernels(monkeypatch):
    """Kernels by the reference, and what they were given besides tensors."""
    asked = []

    def fill(name, make):
        def run(*given):
            asked.append((name, *(part for part in given if not isinstance(part, torch.Tensor))))
            at = len(given) - 3  # codes, scales, group, layout, floor
            group, layout, floor = given[at:]
            got = make(given[: at - 2], {"group": group, "scale_layout": layout, "amax_floor": floor})
            for into, part in zip(given[at - 2 : at], got, strict=True):
                with_pads(into).copy_(with_pads(part.view(into.dtype)))

        return run

    def product(body):
        def run(*given, invariant):
            asked.append(("invariant", invariant))
            return body(run_eagerly, *given)

        return run

    def prepare(*given, invariant):
        return partial(linear_bodies.linear_mxfp8, run_eagerly) if given[3].dtype == torch.int32 else blocks_of_32

    def blocks_of_32(*given):
        return linear_bodies.linear_fp8(run_eagerly, *given, 32)

    def quantize(given, options):
        x = torch.nn.functional.pad(given[0], (0, -given[0].shape[1] % options["group"]))
        got = quantization.quantize_fp8(x, options["group"], impl="eager")
        rows = got.scales.view(torch.uint8)
        made = {"rows": rows, "mn_major": scales.align_mn_major(got.scales.float())}.get(options["scale_layout"])
        return got.codes[:, : given[0].shape[1]], laid(rows, options["scale_layout"]) if made is None else made

    of = {
        ("linear_inputs", "quantize"): fill("quantize", quantize),
        ("linear_inputs", "norm_quantize"): fill(
            "norm", lambda given, options: reference.norm_quantize(*given[:2], eps=given[2], **options)
        ),
        ("linear_inputs", "swiglu_quantize"): fill(
            "swiglu", lambda given, options: reference.swiglu_quantize(*given[:2], limit=given[2], **options)
        ),
        ("linear_choice", "run_fp8"): product(linear_bodies.linear_fp8),
        ("linear_choice", "run_mxfp8"): product(linear_bodies.linear_mxfp8),
        ("linear_choice", "prepare"): prepare,
    }
    monkeypatch.setattr(linear_ops, "kernel", lambda *name: of[name])
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    for function, rows in dispatch.TABLES.items():
        if function.startswith("linear."):
            anywhere = tuple(replace(row, device=dispatch.any_device) for row in rows)
            monkeypatch.setitem(dispatch.TABLES, function, anywhere)
    return asked


def test_rows_of_our_kernels(kernels):
    """Bodies stand for kernels: what a row hands them, and what it makes of their answers."""
    for tokens in (0, 5):
        for n, k, block in SIZES:
            weight, of_weight, x = codes(n, k), numbers(*grid(n, k, block)), normal(tokens, k)
            given = x, Quantized(codes(tokens, k), powers(tokens, -(-k // block)))
            for one in given:
                same(
                    fast.linear_fp8(one, weight, of_weight, block=block, impl="triton"),
                    reference.linear_fp8(one, weight, of_weight, block=block),
                )
        left, right = pair(tokens, 96, "128x4"), pair(9, 96, "packed")
        same(fast.linear_mxfp8(left, right, impl="triton"), reference.linear_mxfp8(left, right))
        for layout in PRODUCER_LAYOUTS:
            x, options = normal(tokens, 256), {"group": 32, "scale_layout": layout, "amax_floor": "flashinfer"}
            got = fast.norm_quantize(x, x.new_ones(256), eps=1e-6, impl="triton", **options)
            same(got, reference.norm_quantize(x, x.new_ones(256), eps=1e-6, **options))
            same(fast.swiglu_quantize(x, x, limit=0.1, impl="triton", **options), reference.swiglu_quantize(x, x, limit=0.1, **options))
    assert ("quantize", 32, "rows", "official") in kernels
    assert {asked[1] for asked in kernels if asked[0] == "invariant"} == {False}
    limits = {asked[1] for asked in kernels if asked[0] == "swiglu"}
    assert limits == {torch.tensor(0.1).item()}  # an fp32 number
    kernels.clear()
    with use(batch_invariant=True):
        fast.linear_fp8(normal(5, 64), codes(9, 64), powers(1, 2), block=32, impl="triton")
        fast.linear_mxfp8(left, right, impl="triton")
    assert [asked for asked in kernels if asked[0] == "invariant"] == [("invariant", True)] * 2


@pytest.mark.parametrize(("capability", "layout"), [(SM90, "mn_major"), (SM100, "packed")])
def test_deepgemm_s_row_quantises_as_its_kernels_read(kernels, monkeypatch, capability, layout):
    monkeypatch.setattr(deepgemm_linear, "describe", lambda device: Device("cuda", capability))
    for name, answer in {"missing": None, "proved": True, "disproved": None}.items():
        monkeypatch.setattr(Library, name, lambda *_, answer=answer, **__: answer)
    handed = []

    def product(x, x_scales, weight, weight_scales, block):
        handed.append((x_scales.dtype, x_scales.shape, x_scales.stride()))
        byte = (
            ((x_scales.view(torch.int32) >> 23).to(torch.uint8))
            if layout == "mn_major"
            else scales.unpack_ue8m0(x_scales, 2).view(torch.uint8)
        )
        return linear_bodies.linear_fp8(run_eagerly, x, byte, weight, weight_scales, block)

    monkeypatch.setattr(deepgemm_linear, "linear_fp8", product)
    x, weight, of_weight = normal(6, 256), codes(64, 256), powers(1, 2)
    same(fast.linear_fp8(x, weight, of_weight, impl="deepgemm"), reference.linear_fp8(x, weight, of_weight))
    assert handed == [(torch.float32, (6, 2), (1, 8)) if layout == "mn_major" else (torch.int32, (6, 1), (1, 8))]
    assert kernels == [("quantize", 128, layout, "official")]
    same(fast.linear_fp8(x[:0], weight, of_weight, impl="deepgemm"), reference.linear_fp8(x[:0], weight, of_weight))
    assert len(handed) == 1


@pytest.mark.skipif(flashinfer_linear.LIBRARY.missing() is None, reason="it is there")
def test_a_library_that_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(dispatch, "describe", lambda device: Device("cuda", SM100))
    with pytest.raises(BackendUnavailable, match="pip install flashinfer-python"):
        fast.linear_mxfp8(pair(5, 256, "128x4"), pair(128, 256, "128x4"), impl="flashinfer")


# Graphs, operators, errors


def test_graphs_per_function():
    """Two at most, whatever the number of tokens and the mode; counted for each function."""
    weight, of_weight, other = codes(40, 64), powers(2, 2), pair(40, 64, "packed")

    def calls(x):
        rows = len(x)
        return {
            "linear_fp8": lambda: fast.linear_fp8(x, weight, of_weight, block=32, impl="inductor"),
            "codes": lambda: fast.linear_fp8(Quantized(codes(rows, 64), numbers(rows, 2)), weight, of_weight, block=32, impl="inductor"),
            "linear_mxfp8": lambda: fast.linear_mxfp8(pair(rows, 64, "128x4"), other, impl="inductor"),
            "norm": lambda: fast.norm_quantize(x, x.new_ones(64), eps=1e-6, group=32, scale_layout="128x4", impl="inductor"),
            "swiglu": lambda: fast.swiglu_quantize(
                x, x, limit=None if rows % 2 else 10.0, group=32, scale_layout="packed", impl="inductor"
            ),
        }

    for name in calls(normal(1, 64)):
        compiled._graph.cache_clear()
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for tokens in (0, 1, 2, 64, 127, 128, 129):
            for x in (normal(tokens, 64), normal(2 * tokens, 64)[::2], normal(tokens, 128)[:, ::2]):
                calls(x)[name]()
                with torch.inference_mode():
                    calls(x.clone())[name]()
        assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2, name


def samples():
    x, byte = normal(5, 160), codes(5, 160).view(torch.uint8)
    weight = codes(9, 160).view(torch.uint8)
    rows = [(name, (x, x[0], 1e-6, 32, name, "official")) for name in PRODUCER_LAYOUTS]
    return [
        ("linear_fp8", (x, None, weight, powers(1, 2), 128)),
        ("linear_fp8", (byte, numbers(5, 5).t(), weight, numbers(1, 5), 32)),
        ("linear_mxfp8", (byte, laid(powers(5, 5), "packed"), weight, laid(powers(9, 5), "128x4"))),
        *(("norm_quantize", given) for _, given in rows),
        *(("swiglu_quantize", (x[:, ::1], x, None, 32, layout, "flashinfer")) for layout in PRODUCER_LAYOUTS),
        ("swiglu_quantize", (normal(5, 320)[:, :160], normal(5, 320)[:, 160:], 10.0, 32, "rows", "official")),
    ]


@pytest.mark.parametrize(("name", "arguments"), samples())
def test_operators(name, arguments):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*arguments, "eager"))


def test_chain_is_one_graph():
    weight, of_weight, other = codes(128, 64), powers(4, 2), fast.mxfp8_weight(codes(96, 64), powers(3, 2))

    def step(x, norm):
        normed = fast.norm_quantize(x, norm, eps=1e-6, group=32, impl="eager")
        h = fast.linear_fp8(normed, weight, of_weight, block=32, impl="eager")
        h = fast.swiglu_quantize(*h.split(64, 1), limit=10.0, group=32, scale_layout="packed", impl="eager")
        return fast.linear_mxfp8(Mxfp8Pair(*h), other, impl="eager"), fast.linear_fp8(x, weight, of_weight, block=32, impl="eager")

    inside = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (6, 129):
        x, norm = normal(tokens, 64), normal(64, seed=1)
        same(inside(x, norm), step(x, norm))


def test_checks_look_again_at_what_is_new(monkeypatch):
    """A kind of arguments that has passed passes again; everything else is looked at."""
    memory = Memory("linear.linear_fp8", fast._operator_fp8)
    monkeypatch.setattr(fast, "_fp8", memory)
    looked, check = [], fast.check.linear_fp8
    monkeypatch.setattr(fast.check, "linear_fp8", lambda *given: looked.append(1) or check(*given))
    x, weight, of_weight = normal(4, 64), codes(9, 64), powers(1, 2)
    given = Quantized(codes(4, 64), powers(4, 2))
    for _ in range(3):
        fast.linear_fp8(x.clone(), torch.nn.Parameter(weight.clone(), False), of_weight, block=32, impl="eager")
        fast.linear_fp8(given, weight, of_weight, block=32, impl="eager")
    assert len(looked) == 2
    for wrong in (x.float(), x[:, :60], Quantized(x, of_weight), (x, of_weight), None):
        with pytest.raises(ArgumentError):
            fast.linear_fp8(wrong, weight, of_weight, block=32, impl="eager")
    for wrong in (weight.t().contiguous().t(), weight.view(torch.uint8), weight[:, :40]):
        with pytest.raises(ArgumentError, match="weight"):
            fast.linear_fp8(x, wrong, of_weight, block=32, impl="eager")
    with pytest.raises(ArgumentError, match="block"):
        fast.linear_fp8(x, weight, of_weight, block=64, impl="eager")
    with pytest.raises(ArgumentError, match="x: got a tensor that requires grad"):
        fast.linear_fp8(x.clone().requires_grad_(), weight, of_weight, block=32, impl="eager")
    with torch.no_grad():
        fast.linear_fp8(x.clone().requires_grad_(), weight, of_weight, block=32, impl="eager")
    monkeypatch.setattr(recall, "MOST", memory._count)
    fast.linear_fp8(x[:3], weight, of_weight, block=32, impl="eager")
    assert memory._count == len(memory._known) == 1


def test_pairs_are_looked_at(monkeypatch):
    monkeypatch.setattr(fast, "_mxfp8", Memory("linear.linear_mxfp8", fast._operator_mxfp8))
    x, weight = pair(4, 64, "packed"), pair(9, 64, "packed")
    for _ in range(2):
        fast.linear_mxfp8(x, weight, impl="eager")
        for wrong in (Quantized(*x), tuple(x), x.codes, x._replace(scales=x.scales[:3]), x._replace(codes=x.codes.view(torch.uint8))):
            with pytest.raises(ArgumentError):
                fast.linear_mxfp8(wrong, weight, impl="eager")
        with pytest.raises(ArgumentError, match="weight"):
            fast.linear_mxfp8(x, weight._replace(codes=codes(9, 32)), impl="eager")


def test_producers_refuse_grad():
    x = normal(4, 64)
    with pytest.raises(ArgumentError, match="no backward"):
        fast.norm_quantize(x.clone().requires_grad_(), x[0], eps=1e-6, group=32)
    with pytest.raises(ArgumentError, match="up: got a tensor that requires grad"):
        fast.swiglu_quantize(x, x.clone().requires_grad_(), group=32)


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    for call in (lambda: fast.norm_quantize(normal(2, 64), normal(64), eps=1e-6, group=32, impl="triton"),
                 lambda: fast.linear_fp8(normal(2, 64), codes(9, 64), powers(1, 2), block=32, impl="triton")):  # fmt: skip
        with pytest.raises(BackendUnavailable, match=r"wants a CUDA device of capability 8\.0 or newer"):
            call()


@pytest.mark.parametrize("name", [name for name in fast.__all__ if inspect.isfunction(getattr(fast, name))])
def test_signatures_equal_the_reference(name):
    assert set(fast.__all__) == set(reference.__all__)
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (fast, reference))
    assert [p for key, p in ours.items() if key != "impl"] == list(theirs.values())
    assert ("impl" in ours) == (name != "choose_mxfp8_route")
