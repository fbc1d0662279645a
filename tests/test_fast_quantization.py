"""Fast codecs and quantisers: the reference's bytes from every way to run them, how many graphs they take, operators, errors."""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4.fast.codecs as fast_codecs
import dsv4.fast.quantization as fast
import dsv4.reference.codecs as reference_codecs
import dsv4.reference.quantization as reference
from dsv4.fast import compiled, dispatch, explain, groups
from dsv4.types import ArgumentError, BackendUnavailable

EVERY_BF16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
EVERY_BYTE = torch.arange(256).to(torch.uint8)
FP8_FLOORS = ("official", "sglang", "sglang_packer", "flashmla", "none", "flashinfer")
FP4_FLOORS = ("official_fp4", "official", "flashmla", "none")


def mixed(rows: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of many magnitudes: huge, zero, minus zero, barely normal, subnormal, with a NaN, with an infinity, ordinary."""
    generator = torch.Generator().manual_seed(rows * n)
    x = torch.randn(rows, n, generator=generator) * torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    for row, change in enumerate((2.0**100, 0.0, -0.0, 2.0**-118, 2.0**-130)):
        x[row : row + 1] *= change
    if rows > 6:
        x[5, n // 2], x[6, n - 1] = torch.nan, -torch.inf
    return x.to(dtype)


def same(expected: Any, actual: Any) -> None:
    """Equal dtypes, shapes, strides and bytes; a NaN of bf16 or fp32 equals any other."""
    for want, have in [(expected, actual)] if isinstance(expected, Tensor) else zip(expected, actual, strict=True):
        assert (want.dtype, want.shape) == (have.dtype, have.shape)
        assert want.numel() == 0 or want.stride() == have.stride()
        if want.dtype in (torch.bfloat16, torch.float32):
            integer = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
            equal = (want.view(integer) == have.view(integer)) | (want.isnan() & have.isnan())
        else:
            equal = (want == have) if want.dtype in (torch.int32, torch.uint8) else want.view(torch.uint8) == have.view(torch.uint8)
        assert bool(equal.all()), f"{int((~equal).sum())} of {equal.numel()} differ"


def both(name: str, *arguments: Any, impl: str = "eager", **options: Any) -> None:
    same(getattr(reference, name)(*arguments, **options), getattr(fast, name)(*arguments, **options, impl=impl))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("encode_e4m3", {}),
        *(("encode_e8m0", {"rounding": rounding}) for rounding in ("ceil", "floor", "nearest")),
        *(("encode_e2m1", {"ties": t, "zero_sign": z}) for t, z in product(("even", "toward_zero"), ("kept", "cleared"))),
    ],
)
def test_encoders_over_every_bf16_and_random_fp32(name: str, options: dict[str, str]) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    for x in (EVERY_BF16, bits.view(torch.float32)):
        same(getattr(reference_codecs, name)(x, **options), getattr(fast_codecs, name)(x, **options, impl="eager"))


@pytest.mark.parametrize("name", ["decode_e4m3", "decode_e5m2", "decode_e8m0", "decode_e2m1"])
def test_decoders_over_every_code(name: str) -> None:
    expected, actual = getattr(reference_codecs, name)(EVERY_BYTE), getattr(fast_codecs, name)(EVERY_BYTE, impl="eager")
    assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))


def test_codecs_compiled() -> None:
    same(reference_codecs.encode_e4m3(EVERY_BF16), fast_codecs.encode_e4m3(EVERY_BF16, impl="inductor"))
    same(reference_codecs.decode_e8m0(EVERY_BYTE), fast_codecs.decode_e8m0(EVERY_BYTE, impl="inductor"))
    for order in ("low_first", "high_first"):
        same(reference_codecs.pack_fp4(EVERY_BYTE, order=order), fast_codecs.pack_fp4(EVERY_BYTE, order=order, impl="inductor"))
        same(reference_codecs.unpack_fp4(EVERY_BYTE, order=order), fast_codecs.unpack_fp4(EVERY_BYTE, order=order, impl="inductor"))


def test_staging_through_bf16_would_round_twice() -> None:
    x = torch.tensor([1.0625, 1.0625 + 2**-12, 17.0, 17.0 + 2**-8])
    assert fast_codecs.decode_e4m3(fast_codecs.encode_e4m3(x)).tolist() == [1.0, 1.125, 16.0, 18.0]  # KV-05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "group"), [(0, 128), (1, 32), (9, 1), (9, 2), (131, 16), (8, 64), (130, 128), (9, 512)])
def test_groups_equal_the_reference(dtype: torch.dtype, rows: int, group: int) -> None:
    x = mixed(rows, 3 * group, dtype)
    for floor, layout in product(FP8_FLOORS, ("rows", "packed", "128x4")):
        both("quantize_fp8", x, group, amax_floor=floor, scale_layout=layout)
    for floor, division, layout in product(FP8_FLOORS[:4], ("reciprocal", "divide"), ("rows", "mn_major")):
        both("quantize_fp8", x, group, scale="fp32", amax_floor=floor, division=division, scale_layout=layout)
    both("fake_quantize", x, group)
    if group > 1:
        for floor, ties, sign in product(FP4_FLOORS, ("even", "toward_zero"), ("kept", "cleared")):
            both("quantize_mxfp4", x, group, amax_floor=floor, ties=ties, zero_sign=sign)
        for division, ties in product(("reciprocal", "divide"), ("even", "toward_zero")):
            both("quantize_fp4_e4m3", x, group, division=division, ties=ties)
        both("fake_quantize", x, group, format="mxfp4")
        both("fake_quantize", x, group, format="fp4_e4m3")


@pytest.mark.parametrize(("rows", "group"), [(0, 128), (1, 128), (9, 1), (9, 2), (131, 32), (8, 512)])
def test_dequantize_equals_the_reference(rows: int, group: int) -> None:
    x = mixed(rows, (4 if rows == 1 else 5) * group)
    layouts = (("ue8m0", "rows"), ("ue8m0", "packed"), ("ue8m0", "128x4"), ("fp32", "rows"), ("fp32", "mn_major"))
    for (scale, layout), dtype in product(layouts, (torch.bfloat16, torch.float32)):
        both("dequantize", *reference.quantize_fp8(x, group, scale=scale, scale_layout=layout), group, scale_layout=layout, dtype=dtype)
    if group > 1:
        both("dequantize", *reference.quantize_mxfp4(x, group), group)
        both("dequantize", *reference.quantize_fp4_e4m3(x, group), group)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 200), (128, 128)), ((64, 96), (32, 32)), ((0, 7), (4, 2)), ((33, 70), (1, 64)), ((9, 600), (512, 512)), ((70, 33), (64, 1))],
)
def test_blocks_equal_the_reference(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = mixed(*shape)
    for options in ({}, {"scale": "fp32"}, {"scale": "fp32", "amax_floor": "flashmla", "division": "divide"}, {"amax_floor": "none"}):
        both("quantize_fp8_blocks", weight, block, **options)
        both("dequantize", *reference.quantize_fp8_blocks(weight, block, **options), block)
    grid = -(-shape[0] // block[0]), -(-2 * shape[1] // block[1])
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    both("dequantize", codes, torch.full(grid, 120, dtype=torch.uint8), block)


COMPILED: list[tuple[str, Callable[[Tensor], tuple[Any, ...]], dict[str, Any]]] = [
    ("quantize_fp8", lambda x: (x, 32), {"scale_layout": "packed"}),
    ("quantize_fp8", lambda x: (x, 32), {"scale_layout": "128x4", "amax_floor": "none"}),
    ("quantize_fp8", lambda x: (x, 64), {"scale": "fp32", "scale_layout": "mn_major", "division": "divide"}),
    ("quantize_fp8_blocks", lambda x: (x, (32, 32)), {}),
    ("quantize_mxfp4", lambda x: (x,), {}),
    ("quantize_fp4_e4m3", lambda x: (x,), {}),
    ("fake_quantize", lambda x: (x, 64), {}),
    ("fake_quantize", lambda x: (x, 16), {"format": "fp4_e4m3"}),
    ("dequantize", lambda x: (*reference.quantize_fp8(x, 32, scale_layout="128x4"), 32), {"scale_layout": "128x4"}),
    ("dequantize", lambda x: (*reference.quantize_mxfp4(x), 32), {}),
]


@pytest.mark.parametrize(("name", "arguments", "options"), COMPILED)
def test_compiled_equals_the_reference(name: str, arguments: Callable[[Tensor], tuple[Any, ...]], options: dict[str, Any]) -> None:
    both(name, *arguments(mixed(131, 192)), impl="inductor", **options)


def test_all_sizes_take_two_graphs() -> None:
    wide = mixed(129, 128)
    inputs = [wide[:rows, :64].contiguous() for rows in (0, 1, 2, 127, 128, 129)]
    inputs += [
        mixed(32, 32),
        mixed(8, 64),
        wide[:1, :8],
        wide[:, 64:],
        wide[::2, :64],
        wide.t()[:64, :128].contiguous(),
        wide.view(3, 43, 128),
    ]
    before = counters["stats"]["unique_graphs"]
    for x in inputs:
        both("quantize_fp8", x, 8, impl="inductor")
    with torch.inference_mode():
        for x in (inputs[1], inputs[4].clone(), wide.clone()):
            both("quantize_fp8", x, 8, impl="inductor")
    assert 1 <= counters["stats"]["unique_graphs"] - before <= 2
    both("quantize_fp8", wide, 8, amax_floor="none", impl="inductor")  # a number, not an option of the graph
    assert counters["stats"]["unique_graphs"] - before <= 2


@torch._dynamo.config.patch(recompile_limit=1)
def test_the_limit_of_graphs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph keeps the whole way."""
    monkeypatch.setattr(compiled.Graph, "_shorten", lambda *_: None)
    compiled._graph.cache_clear()
    x = mixed(9, 4, torch.float32)
    both("fake_quantize", x, 4, impl="inductor")
    torch.set_default_dtype(torch.float64)  # graphs are guarded on it
    try:
        with pytest.raises(FailOnRecompileLimitHit):
            fast.fake_quantize(x, 4, impl="inductor")
    finally:
        torch.set_default_dtype(torch.float32)


def samples() -> list[tuple[str, tuple[Any, ...]]]:
    x = mixed(9, 64).nan_to_num()  # opcheck takes NaN for a difference
    codes, scales = torch.ops.dsv4.quantize_fp8(x, 32, "ue8m0", "packed", "official", "", "eager")
    fp8 = [("quantize_fp8", (x, 32, "ue8m0", layout, "official", "")) for layout in ("rows", "packed", "128x4")]
    return [
        *fp8,
        ("quantize_fp8", (x, 32, "fp32", "mn_major", "official", "divide")),
        ("quantize_fp8", (x.view(3, 3, 64).transpose(0, 1), 32, "ue8m0", "rows", "official", "")),
        ("quantize_fp8_blocks", (x, 8, 16, "fp32", "official", "divide")),
        ("quantize_mxfp4", (x[::2], 32, "official_fp4", "even", "kept")),
        ("quantize_fp4_e4m3", (x, 16, "divide", "even", "kept")),
        ("dequantize", (codes, scales, 1, 32, "e4m3", "ue8m0", "packed", "bfloat16")),
        ("fake_quantize", (x.t().contiguous().t(), 32, "mxfp4", "official_fp4", "even", "kept", "")),
        *((f"encode_{name}", (x, *options)) for name, *options in (("e4m3",), ("e8m0", "ceil"), ("e2m1", "even", "kept"))),
        *((f"decode_{name}", (codes[:, ::2] % 120,)) for name in ("e4m3", "e5m2", "e8m0", "e2m1")),
        ("pack_fp4", (codes, "low_first")),
        ("unpack_fp4", (codes, "high_first")),
    ]


@pytest.mark.parametrize(("name", "arguments"), samples())
def test_operators(name: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, arguments, {"impl": "eager"})


X = torch.zeros(4, 64, dtype=torch.bfloat16)
CODES = X.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "argument"),
    [
        ("quantize_fp8", (X.double(), 32), {}, "x"),
        ("quantize_fp8", (X, 48), {}, "group"),
        ("quantize_fp8", (X, 128), {}, "x"),
        ("quantize_fp8", (X, 32), {"scale": "e4m3"}, "scale"),
        ("quantize_fp8", (X, 32), {"scale_layout": "mn_major"}, "scale_layout"),
        ("quantize_fp8", (X.view(2, 2, 64), 32), {"scale_layout": "packed"}, "x"),
        ("quantize_fp8", (X, 32), {"scale": "fp32", "amax_floor": "none"}, "amax_floor"),
        ("quantize_fp8", (X, 32), {"amax_floor": "official_fp4"}, "amax_floor"),
        ("quantize_fp8_blocks", (X, [32, 32]), {}, "block"),
        ("quantize_mxfp4", (X, 1), {}, "group"),
        ("quantize_mxfp4", (X,), {"ties": "up"}, "ties"),
        ("quantize_fp4_e4m3", (X,), {"division": "half"}, "division"),
        ("fake_quantize", (X, 16), {"format": "fp4_e4m3", "amax_floor": "none"}, "amax_floor"),
        ("dequantize", (CODES, None, 32), {}, "scales"),  # QT-14
        ("dequantize", (CODES, torch.zeros(4, 2), 32), {"scale_layout": "packed"}, "scales"),
        ("dequantize", (CODES, torch.zeros(4, 3), 32), {}, "scales"),
        ("dequantize", (CODES, torch.zeros(4, 2), 32), {"dtype": torch.float16}, "dtype"),
    ],
)
def test_wrong_arguments_raise_what_the_reference_raises(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ArgumentError) as expected:
        getattr(reference, name)(*arguments, **options)
    with pytest.raises(ArgumentError) as raised:
        getattr(fast, name)(*arguments, **options)
    assert raised.value.argument == argument
    assert str(raised.value) == str(expected.value)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="no backward"):
        fast.quantize_fp8(X.float().requires_grad_(), 32)
    with torch.no_grad():
        fast.quantize_fp8(X.float().requires_grad_(), 32, impl="eager")
    for backend in ("triton", "flashinfer"):
        with pytest.raises(BackendUnavailable, match="CUDA device of capability"):
            fast.quantize_fp8(X, 32, impl=backend)
    with pytest.raises(ArgumentError, match="has triton, inductor, eager"):
        fast.quantize_mxfp4(X, impl="deepgemm")
    assert "inductor   chosen" in explain("quantization.quantize_fp8", "cpu")


def test_flashinfer_is_for_blackwell_and_its_own_floor() -> None:
    row = next(row for row in dispatch.TABLES["quantization.quantize_fp8"] if row.backend == "flashinfer")
    assert row.device(dispatch.Device("cuda", (9, 0))) is not None  # its kernel is empty there
    assert row.device(dispatch.Device("cuda", (10, 0))) is None
    assert not row.verified
    fits = {"x": X, "group": 32, "scale": "ue8m0", "scale_layout": "128x4", "amax_floor": "flashinfer", "division": ""}
    assert row.arguments(fits) is None
    for other in ({"x": X.float()}, {"group": 128}, {"scale": "fp32"}, {"scale_layout": "packed"}, {"amax_floor": "official"}):
        assert row.arguments(fits | other) is not None


@pytest.mark.parametrize("form", ["fp8", "fp4_e4m3"])
def test_no_body_holds_a_float8_type(form: str) -> None:
    seen: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            seen.extend(leaf.dtype for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    with Watch():
        groups.fake_quantize(compiled.run_eagerly, mixed(9, 32), 32, form, "official" if form == "fp8" else "", "even", "kept", "divide")
    assert torch.int32 in seen
    assert not [dtype for dtype in seen if "float8" in str(dtype)]  # KV-05


@pytest.mark.parametrize(("name", "arguments", "options"), COMPILED)
def test_inside_torch_compile(name: str, arguments: Callable[[Tensor], tuple[Any, ...]], options: dict[str, Any]) -> None:
    torch._dynamo.reset()  # Dynamo keeps the graphs of every partial under one code object
    function = partial(getattr(fast, name), **options, impl="eager")
    inside = torch.compile(function, fullgraph=True, backend="aot_eager")
    for rows in (9, 131):
        same(function(*arguments(mixed(rows, 192))), inside(*arguments(mixed(rows, 192))))


@pytest.mark.parametrize(
    ("name", "arguments", "refused"),
    [
        ("quantize_fp8", {"scale": "fp32"}, True),
        ("quantize_fp8", {"scale": "ue8m0"}, False),
        ("quantize_fp4_e4m3", {}, True),
        ("fake_quantize", {"format": "fp4_e4m3"}, True),
        ("fake_quantize", {"format": "mxfp4"}, False),
    ],
)
def test_inductor_does_not_divide_on_cuda(name, arguments, refused):
    """Seen on an H200: amax 1e-4 of a group gave 0x34700001 for 0x34700000."""
    (row,) = (row for row in dispatch.TABLES[f"quantization.{name}"] if row.backend == "inductor")
    for division in ("divide", "reciprocal"):
        given = {"x": SimpleNamespace(is_cuda=True), "division": division, **arguments}
        assert (row.arguments(given) is not None) == (refused and division == "divide")
        assert row.arguments({**given, "x": torch.empty(1)}) is None
