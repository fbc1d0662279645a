"""The kernels that make inputs of products: in the interpreter, in a process of its own, against the reference; and compiled for SM80 and
SM90. On a GPU the first run there. What only a device does, products by PTX and approximations, is evaluated here as PTX describes it."""

import re
from itertools import product

import numpy as np
import pytest
import torch

from dsv4.fast import groups
from dsv4.formats import AMAX_FLOORS, align
from dsv4.reference import linear, norms, output_projection
from dsv4.reference.codecs import decode_e8m0
from dsv4.reference.quantization import quantize_fp8
from dsv4.reference.rotary import rope_frequencies, rope_table
from dsv4.reference.scales import align_mn_major
from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import linear_inputs as kernels  # noqa: E402
from dsv4.fast.kernels import linear_inputs_rows as of_rows  # noqa: E402
from dsv4.fast.kernels import linear_inputs_tiles as of_tiles  # noqa: E402
from dsv4.fast.kernels import linear_inputs_words as of_words  # noqa: E402
from dsv4.fast.kernels.codec_bits import has_native_e4m3  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
LAYOUTS = ("rows", "packed", "128x4", "mn_major")
FLOORS = ("official", "sglang", "none", "flashinfer")
INF, NAN = float("inf"), float("nan")
E4M3 = torch.float8_e4m3fn


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=99)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(rows, n, seed=0):
    """bf16 rows of many magnitudes; the first ones zero, minus zero, subnormal, tiny, with a NaN, with an infinity, huge."""
    x = torch.randn(rows, n, generator=generator(seed)) * torch.exp2(torch.randint(-9, 9, (rows, 1), generator=generator(seed)).float())
    for row, change in zip(range(1, rows), (0.0, -0.0, 2.0**-130, 2.0**-40, NAN, INF, 2.0**118), strict=False):
        x[row, 3 : n // 2] *= change
        x[row] = x[row] * change if abs(change) < 1 else x[row]
    return x.bfloat16().to(DEVICE)


def weights(n, dtype=torch.bfloat16):
    return (1 + torch.randn(n, generator=generator(9)) / 4).to(dtype).to(DEVICE)


def outputs(rows, n, group, layout):
    """Memory for codes and scales in which nobody has written."""
    like = torch.empty(rows, align(n, group), dtype=torch.bfloat16, device=DEVICE)
    scales = groups.empty_scales(like, group, "fp32" if layout == "mn_major" else "ue8m0", layout)
    memory(scales).fill_(0xA5)
    return torch.full((rows, n), 0xA5, dtype=torch.uint8, device=DEVICE), scales


def memory(tensor):
    """Every byte of the storage, pads too."""
    count = tensor.untyped_storage().nbytes()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), 0, (count,), (1,))


def same(expected, codes, scales):
    """The same codes, and scales with all of their memory."""
    assert torch.equal(expected.codes.view(torch.uint8), codes)
    want, have = (value.view(torch.uint8) if value.dtype == torch.float8_e8m0fnu else value for value in (expected.scales, scales))
    assert (want.shape, want.dtype) == (have.shape, have.dtype)
    assert want.stride() == have.stride()
    if want.dtype == torch.float32:
        assert torch.equal(want.isnan(), have.isnan())
        want.nan_to_num_(-1.0), have.nan_to_num_(-1.0)
    assert torch.equal(memory(want), memory(have))


def norm(x, weight, eps, group, layout, floor):
    codes, scales = outputs(*x.shape, group, layout)
    kernels.norm_quantize(x, weight, eps, codes, scales, group, layout, floor)
    return codes, scales


def swiglu(gate, up, limit, group, layout, floor):
    codes, scales = outputs(*gate.shape, group, layout)
    kernels.swiglu_quantize(gate, up, limit, codes, scales, group, layout, floor)
    return codes, scales


def check_norm(x, weight, *, eps=1e-6, group=32, layout="rows", floor="official", given=None):
    expected = linear.norm_quantize(x, weight, eps=eps, group=group, scale_layout=layout, amax_floor=floor)
    same(expected, *norm(x if given is None else given, weight, eps, group, layout, floor))


@kernel
@pytest.mark.parametrize(("n", "group"), [(32, 32), (128, 128), (1056, 32), (1152, 128), (1536, 32), (5120, 32), (7168, 128), (8192, 128)])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 1e-20), (torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_norms_of_every_width(n, group, dtype, eps):
    for rows in (1, 11):
        check_norm(numbers(rows, n), weights(n, dtype), eps=eps, group=group)


@kernel
@pytest.mark.parametrize(("n", "group"), [(8256, 32), (16384, 128)])
def test_norms_of_long_rows(n, group):
    check_norm(numbers(9, n), weights(n), group=group, layout="packed")


@kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("group", "n"), [(32, 96), (32, 1120), (128, 640)])
def test_norms_in_every_layout(layout, group, n):
    """Groups and rows that leave pads; every floor, those that are none with weights so small that scales are byte 0."""
    for rows, floor in ((1, "official"), (5, "sglang"), (9, "none"), (9, "flashinfer")):
        x, least = numbers(rows, n), AMAX_FLOORS[floor].least_byte_fp8
        check_norm(x, weights(n) if least else weights(n) * 2.0**-120, group=group, layout=layout, floor=floor)


@kernel
def test_more_rows_than_a_tile_of_scales():
    x = numbers(130, 32)
    check_norm(x, weights(32), layout="128x4")
    gate = torch.where(x.isfinite(), x.abs() + 32, x).bfloat16()
    expected = linear.swiglu_quantize(gate, x, group=32, scale_layout="128x4")
    same(expected, *swiglu(gate, x, None, 32, "128x4", "official"))
    check_plain(x, 32, "128x4", "official")


@kernel
def test_norms_at_the_edges_of_bf16():
    """Rows and weights of the largest, least normal and least numbers there are, of both signs, of NaN and infinity."""
    largest = torch.finfo(torch.bfloat16).max
    edges = torch.tensor([largest, 2.0**-126, 2.0**-133, 1.0, -0.0, -largest, -(2.0**-133), 2.0**40, 2.0**-40])
    mixed = edges[torch.randint(0, len(edges), (512,), generator=generator(3))]
    x = torch.stack([*(edge.repeat(512) for edge in edges), mixed, mixed.roll(1), mixed * 2.0**-60]).bfloat16().to(DEVICE)
    for dtype, eps, floor in ((torch.bfloat16, 0.0, "none"), (torch.float32, 1e-20, "flashinfer")):
        for weight in (*x[:3], x[9], torch.where(x[9] == 1, NAN, x[3]), torch.where(x[9] == 1, INF, x[3])):
            check_norm(x, weight.to(dtype), eps=eps, floor=floor)


@kernel
def test_rows_from_anywhere():
    """Rows with gaps, of odd strides, behind an odd number, and with gaps between their numbers."""
    x = numbers(9, 128)
    odd = torch.cat([x.flatten().new_zeros(1), x.flatten()])[1:].view(9, 128)
    for given in (
        torch.cat([x, x], 1)[:, :128],
        torch.cat([x, x[:, :1]], 1)[:, :128],
        odd,
        torch.stack([x, x], -1)[..., 0],
        x.t().contiguous().t(),
    ):
        check_norm(x, weights(128), given=given)
        exact = gates(9, 128)
        expected = linear.swiglu_quantize(exact, x, group=32)
        same(expected, *swiglu(exact, given, None, 32, "rows", "official"))
        at = torch.arange(9, device=DEVICE)
        rotated = output_projection.rotate_quantize(x.view(9, 2, 64), table(), at, groups=1, group=32)
        same(rotated, *rotate(given.unflatten(1, (2, 64)), table(), at, 1, 32, "rows", "sglang"))
        plain = quantize_fp8(x, 32)
        codes, scales = outputs(9, 128, 32, "rows")
        kernels.quantize(given, codes, scales, 32, "rows", "official")
        same(plain, codes, scales)
    both = torch.cat([gates(9, 128), x], 1)
    same(linear.swiglu_quantize(both[:, :128], x, group=32), *swiglu(both[:, :128], both[:, 128:], None, 32, "rows", "official"))


def gates(rows, n, seed=5):
    """Gates at which silu is their value or a zero: 32 and more, zeros of both signs, and far below."""
    source = generator(seed)
    large = torch.randint(32, 256, (rows, n), generator=source).float()
    zeros = torch.tensor([0.0, -0.0, -200.0, -3e38])[torch.randint(0, 4, (rows, n), generator=source)]
    kind = torch.rand(rows, n, generator=source) + (torch.rand(rows, n // 32, generator=source) < 0.2).repeat_interleave(32, 1)
    return torch.where(kind < 0.7, large, zeros).bfloat16().to(DEVICE)


@kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("group", "n"), [(32, 96), (32, 1120), (128, 640)])
def test_swiglu_where_it_is_exact(layout, group, n):
    for rows, floor in ((1, "official"), (5, "sglang"), (9, "none"), (9, "flashinfer")):
        gate, up = gates(rows, n), numbers(rows, n)
        gate[0, :2] = torch.tensor([NAN, 40.0])
        limit = 1e4 if rows == 9 else None
        expected = linear.swiglu_quantize(gate, up, limit=limit, group=group, scale_layout=layout, amax_floor=floor)
        same(expected, *swiglu(gate, up, limit, group, layout, floor))


@kernel
def test_infinite_gates():
    gate = torch.tensor([INF, -INF, NAN, 50.0, -0.0, -3e38, 3e38, 0.0]).bfloat16().to(DEVICE).repeat_interleave(32)[None].repeat(3, 1)
    gate = torch.where(torch.arange(256, device=DEVICE) % 32 == 7, gate, 64.0)
    up = torch.tensor([[1.0], [-1.0], [0.0]], device=DEVICE).bfloat16().expand(3, 256)
    for limit in (None, 40.0):
        expected = linear.swiglu_quantize(gate, up, limit=limit, group=32, amax_floor="none")
        same(expected, *swiglu(gate, up, limit, 32, "rows", "none"))


@kernel
@pytest.mark.parametrize(("limit", "floor"), [(None, "official"), (10.0, "sglang"), (7.3, "none")])
def test_swiglu_of_any_numbers(limit, floor):
    """Bytes equal in groups whose numbers are the same bf16 at both ends of the error that `linear_inputs_tiles` states; one code off at
    most elsewhere."""
    size = torch.exp2(torch.randint(-6, 5, (24, 1), generator=generator(4)).float())
    gate, up = (torch.randn(24, 2304, generator=generator(seed)).mul(4 if seed else size).bfloat16().to(DEVICE) for seed in (1, 0))
    expected = linear.swiglu_quantize(gate, up, limit=limit, group=32, amax_floor=floor)
    codes, scales = swiglu(gate, up, limit, 32, "rows", floor)
    g, u = gate.double(), up.double()
    if limit is not None:
        bound = torch.tensor(limit).double().item()
        g, u = g.clamp(max=bound), u.clamp(-bound, bound)
    h = g * g.sigmoid() * u
    error = u.abs() * ((2.0**-21 + 2.0**-24) * (g * g.sigmoid()).abs() + 2.0**-149) + 2.0**-24 * h.abs() + 2.0**-149
    low, high = ((h + sign * error).float().bfloat16() for sign in (-1, 1))
    certain = (low == high).unflatten(1, (-1, 32)).all(2)
    assert certain.double().mean() > 0.9
    assert torch.equal(scales[certain], expected.scales.view(torch.uint8)[certain])
    difference = (order(codes.view(E4M3)) - order(expected.codes)).unflatten(1, (-1, 32))
    assert not difference[certain].any()
    equal = scales == expected.scales.view(torch.uint8)
    assert equal.double().mean() > 0.99
    assert difference[equal].abs().max() <= 1


def order(codes):
    """Where codes lie among all of them."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@triton.jit
def silu_kernel(x, result, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, of_tiles._silu(tl.load(x + at), NATIVE))


def check_silu(found, gate):
    """Within the error that `linear_inputs_tiles` states, exact from 17 on, and of the sign of the gate; NaN of infinities."""
    exact = gate / (1 + np.exp(-gate))
    finite = np.isfinite(gate)
    assert np.isnan(found[~finite]).all()
    found, exact, gate = found[finite], exact[finite], gate[finite]
    assert (np.abs(found - exact) <= 2.0**-21 * np.abs(exact) + 2.0**-149).all()
    assert np.array_equal(found[gate >= 17], gate[gate >= 17])
    assert np.array_equal(np.signbit(found), np.signbit(gate))


@kernel
def test_silu_of_every_bf16():
    every = (torch.arange(65536) << 16).to(torch.int32).view(torch.float32).to(DEVICE)
    result = torch.empty_like(every)
    silu_kernel[(64,)](every, result, NATIVE=has_native_e4m3(silu_kernel, every.device), BLOCK=1024, enable_fp_fusion=False)
    with np.errstate(all="ignore"):
        check_silu(result.cpu().double().numpy(), every.cpu().double().numpy())


def fma(a, b, c):
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


@compiled
@pytest.mark.parametrize(("power", "inverse"), list(product((-1, 1), (-1, 1))))
def test_silu_with_the_worst_approximations(power, inverse):
    """ex2.approx.ftz off by 2 ulp and rcp.approx.ftz by 1, either way, for every bf16."""
    gate = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    one, head, tail = np.float32(1), np.float32(of_tiles.LOG2_E.value), np.float32(of_tiles.LOG2_E_REST.value)
    with np.errstate(all="ignore"):
        far = gate < -64
        scale = np.where(far, np.float32(2.0**-64), one)
        raised = flushed(np.exp2(fma(gate, -head, np.where(far, -64, 0)).astype(np.float64)) * (1 + power * 2.0**-22))
        total = scale + fma(raised, gate * -tail, raised)
        first = flushed(1 / total.astype(np.float64) * (1 + inverse * 2.0**-23))
        second = fma(first, fma(-np.fmin(total, np.float32(of_tiles.LARGEST.value)), first, one), first)
        check_silu((gate * scale * second).astype(np.float64), gate.astype(np.float64))


def flushed(exact):
    rounded = exact.astype(np.float32)
    return np.where(np.abs(rounded) < 2.0**-126, np.float32(0), rounded)


def table(dims=32, places=40):
    return rope_table(rope_frequencies(1e4, dims, device=DEVICE), places)


def rotate(o, of, positions, groups_, group, layout, floor):
    """Into memory that nobody has written."""
    tokens, heads, dim = o.shape
    count = heads // groups_ * dim // group
    codes = torch.full((tokens, groups_, heads // groups_ * dim), 0xA5, dtype=torch.uint8, device=DEVICE)
    if layout == "rows":
        scales = torch.full((tokens, groups_, count), 0xA5, dtype=torch.uint8, device=DEVICE)
    else:
        words = count if layout == "mn_major" else -(-count // 4)
        dtype = torch.float32 if layout == "mn_major" else torch.int32
        scales = torch.full((groups_, words, align(tokens, 4)), -1, dtype=dtype, device=DEVICE)[:, :, :tokens].permute(2, 0, 1)
    kernels.rotate_quantize(o, of, positions, groups_, codes, scales, group, layout, floor)
    return codes, scales


@kernel
@pytest.mark.parametrize("layout", ["rows", "packed", "mn_major"])
@pytest.mark.parametrize(
    ("heads", "dim", "turned", "of", "group"),
    [(8, 512, 64, 2, 128), (4, 512, 64, 4, 32), (6, 64, 32, 1, 128), (8, 96, 96, 2, 128), (4, 128, 2, 2, 128), (3, 160, 64, 3, 32)],
)
def test_rotations(layout, heads, dim, turned, of, group):
    """A head of whole groups, groups of whole heads, and neither; pads of tokens and of groups; every floor."""
    turns = table(turned)
    for tokens, floor in ((1, "sglang"), (5, "official"), (9, "none"), (9, "flashinfer")):
        o = numbers(tokens, heads * dim).view(tokens, heads, dim)
        at = torch.randint(-3, 43, (tokens,), generator=generator(tokens)).to(DEVICE)
        for positions in (at, at.int()):
            expected = output_projection.rotate_quantize(o, turns, positions, groups=of, group=group, scale_layout=layout, amax_floor=floor)
            same(expected, *rotate(o, turns, positions, of, group, layout, floor))


def check_plain(x, group, layout, floor):
    """`quantize_fp8` with zeros behind the last number; mn_major is that of the powers of two."""
    rows, n = x.shape
    whole = torch.nn.functional.pad(x, (0, align(n, group) - n))
    expected = quantize_fp8(whole, group, scale_layout="rows" if layout == "mn_major" else layout, amax_floor=floor)
    scales = align_mn_major(decode_e8m0(expected.scales)) if layout == "mn_major" else expected.scales
    found = outputs(rows, n, group, layout)
    kernels.quantize(x, *found, group, layout, floor)
    same(expected._replace(codes=expected.codes[:, :n], scales=scales), *found)


@kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "n", "group"), [(1, 1, 128), (5, 33, 32), (9, 300, 128), (18, 1041, 32), (4, 640, 128)])
def test_plain_rows_may_end_within_a_group(layout, rows, n, group):
    for floor in FLOORS:
        check_plain(numbers(rows, n), group, layout, floor)


@kernel
@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_a_row_does_not_depend_on_its_batch(layout):
    """Alone, among others, in another order: the same bytes; neither norms, SwiGLU nor rotations of arbitrary numbers."""
    x, up, w, turns = numbers(21, 512), numbers(21, 512, seed=2), weights(512), table(64)
    at = torch.arange(21, device=DEVICE)

    def made(rows):
        yield norm(x[rows], w, 1e-6, 128, layout, "official")
        yield swiglu(up[rows], x[rows], 10.0, 128, layout, "official")
        yield rotate(x[rows].unflatten(1, (4, 128)), turns, at[rows], 1, 128, layout, "official")

    whole = list(made(torch.arange(21)))
    for rows in (torch.tensor([0]), torch.tensor([20]), torch.arange(20, -1, -1), torch.arange(3, 8)):
        for (codes, scales), (all_codes, all_scales) in zip(made(rows), whole, strict=True):
            assert torch.equal(codes, all_codes[rows])
            assert torch.equal(scales, all_scales[rows])


@kernel
def test_norms_are_those_of_rms_norm():
    """The row that is quantised is the one that `rms_norm` gives, in two launches."""
    from dsv4.fast import quantization
    from dsv4.fast.kernels.norm_rope import run

    x = numbers(12, 1536)
    for dtype in (torch.bfloat16, torch.float32):
        w = weights(1536, dtype)
        normed = run(x, weight=w, eps=1e-6, norm="fp32")
        assert torch.equal(normed.nan_to_num(), norms.rms_norm(x, w, eps=1e-6).nan_to_num())
        codes, scales = norm(x, w, 1e-6, 32, "rows", "none")
        expected = quantization.quantize_fp8(normed, 32, amax_floor="none", impl="eager" if DEVICE == "cpu" else "triton")
        same(expected, codes, scales)


BF16 = np.uint32(0xFFFF0000)


def to_bf16(x):
    """Bits of the nearest bf16 of fp32, ties to even; NaN is 0x7FFF."""
    bits = x.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


def of_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def least_magnitude(a, b):
    """min.xorsign.abs.bf16x2, but for signs."""
    halves = [np.fmin(np.abs(of_bf16(a >> shift & 0xFFFF)), np.abs(of_bf16(b >> shift & 0xFFFF))) for shift in (0, 16)]
    return to_bf16(halves[0]) | to_bf16(halves[1]) << 16


def chosen_bytes(a, b, select):
    """prmt.b32 without signs."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    found = [(both >> np.uint64(8 * (select >> 4 * place & 7)) & 0xFF) << np.uint64(8 * place) for place in range(4)]
    return sum(found).astype(np.uint32)


PTX = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "prmt.b32": lambda a, b, c: chosen_bytes(a, b, int(c.flat[0])),
    "setp.eq.b32": lambda a, b: a == b,
    "mul.rn.f32": lambda a, b: a * b,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.longdouble) * b.astype(np.longdouble) + c).astype(np.float32),
    "mul.rn.f64": lambda a, b: a * b,
    "cvt.f64.f32": lambda a: a.astype(np.float64),
    "cvt.rn.f32.f64": lambda a: a.astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda a, b: to_bf16(b) | to_bf16(a) << 16,
    "min.xorsign.abs.bf16x2": least_magnitude,
}


def executed(text, operands):
    """What a text of PTX with one branch ahead leaves in the operands; also, where the branch is taken."""
    registers, kinds, taken = dict(operands), {}, None
    for line in re.sub(r"[{};]|//.*", "\n", text).split("\n"):
        line = line.strip()
        if line.startswith(".reg"):
            _, kind, names = line.split(maxsplit=2)
            kinds |= dict.fromkeys(re.split(r",\s*", names), kind)
        elif line.startswith("@"):
            taken, before = registers[line[1:].split()[0]], dict(registers)
        elif line.endswith("DONE:"):
            registers = {name: np.where(taken, before[name], value) if name in before else value for name, value in registers.items()}
        elif line:
            name, rest = line.split(maxsplit=1)
            into, *sources = re.split(r",\s*", rest)
            values = [registers[s] if s in registers else np.full(1, int(s, 0), dtype=np.uint32) for s in sources]
            value = PTX[name](*values)
            if name == "mov.b32":
                value = value.view(np.float32 if kinds.get(into) == ".f32" else np.uint32)
            registers[into] = value
    return registers, taken


def words_of(even, odd):
    return to_bf16(even) | to_bf16(odd) << 16


def check_scaling(x, w, factor):
    """x [2, 4, n] and w of bf16 and fp32 numbers, factor fp64 [n] or a number: bits as `scale_pairs` rounds. The share that was sure."""
    n = x.shape[2]
    factor = np.broadcast_to(np.float64(factor), (n,))
    ordinary = (factor >= of_words.LEAST_FACTOR.value) & (factor <= of_words.LARGEST_FACTOR.value)
    above = np.where(ordinary, factor * of_words.ABOVE.value, 1.0).astype(np.float32)
    below = np.where(ordinary, factor * of_words.BELOW.value, NAN).astype(np.float32)
    parts = [[words_of(x[0, i], x[1, i]) for i in range(4)], list(w[0]), list(w[1]), [factor] * 4, [above] * 4, [below] * 4]
    operands = {f"${4 + 4 * place + i}": part[i] for place, part in enumerate(parts) for i in range(4)}
    registers, sure = executed(of_words.SCALING.value, operands)
    for i in range(4):
        wide = [((x[half, i].astype(np.float64) * factor) * w[half, i].astype(np.float64)).astype(np.float32) for half in (0, 1)]
        expected, found = words_of(*wide), registers[f"${i}"]
        for shift in (0, 16):
            one, other = (of_bf16(bits >> shift & 0xFFFF) for bits in (expected, found))
            assert np.array_equal(np.isnan(one), np.isnan(other))
            known = ~np.isnan(one)
            assert np.array_equal(one[known].view(np.uint32), other[known].view(np.uint32))
    return sure.mean()


@compiled
@pytest.mark.parametrize("wide", [False, True])
def test_fp32_products_are_certain_where_they_are_taken(wide):
    """What `scaled_words` claims, on its own text: ordinary numbers, numbers whose products lie next to the middle of two bf16, and
    numbers at every edge."""
    source, n = np.random.default_rng(7), 100_000

    def bf16(values):
        return of_bf16(to_bf16(values.astype(np.float32)))

    with np.errstate(all="ignore"):
        x, w = (bf16(source.standard_normal((2, 4, n)) * np.exp2(source.integers(-8, 8, (2, 4, n)))) for _ in range(2))
        w = (w * (1 + source.random((2, 4, n)) * 2.0**-8)).astype(np.float32) if wide else w
        factor = np.exp2(source.uniform(-30, 30, n))
        share = check_scaling(x, w, factor)
        assert 0.99 < share < 1
        # Factors for which the first product is a few 2^-26 from the middle of two bf16, or at it.
        middle = of_bf16(to_bf16(source.uniform(1, 2, n).astype(np.float32))) + 2.0**-8
        near = (
            middle.astype(np.float64)
            * (1 + source.integers(-40, 41, n) * 2.0**-26)
            / (x[0, 0].astype(np.float64) * w[0, 0].astype(np.float64))
        )
        assert check_scaling(x, w, np.abs(near)) < 0.9
        edges = [0.0, -0.0, 2.0**-133, 2.0**-126, 1.0, 2.0**60, 2.0**127, INF, NAN, 2.0**-80, 2.0**-40, 3.0, 2.0**-110]
        edges = np.float32([*edges, 255 * 2.0**-80, 211 * 2.0**-82])  # products that are no whole subnormal numbers
        x, w = (edges[source.integers(0, len(edges), (2, 4, n))] for _ in range(2))
        for number in (0.0, 2.0**-120, 2.0**-40, 1.1, 2.0**40, 2.0**41, 2.0**100, INF, NAN):
            check_scaling(x, w, number)


TYPES = {
    "x": "*i32", "weight": "*i32", "codes": "*i16", "scales": "*u8", "gate": "*i32", "up": "*i32", "o": "*i32", "table": "*fp32",
    "positions": "*i64", "eps": "fp32", "limit": "fp32",
}  # fmt: skip


def ptx(function, capability, constants, **types):
    """A kernel's text for a capability, on the way to a whole binary."""
    kinds = TYPES | types
    signature = {name: kinds.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    wholes = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith("stride")]
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in wholes}
    options = {"enable_fp_fusion": False, "num_warps": 4}
    source = ASTSource(function, signature, places, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("group", "layout"), [(128, "mn_major"), (32, "packed")])
def test_kernels_compile_and_leave_e4m3_alone_where_there_is_none(capability, group, layout):
    native = capability >= 89
    kinds = {"scales": "*fp32"} if layout == "mn_major" else {}
    shared = {"GROUP": group, "LAYOUT": layout, "ZEROES": False, "NATIVE": native}
    norm_options = shared | {"PAIRS": 2560, "WIDTH": 512}
    swiglu_options = shared | {"PAIRS": 1152, "LIMITED": True, "HEIGHT": 8, "WIDTH": 64, "CHUNKS": 4}
    heads_options = shared | {"UNITS": 128, "OF_GROUP": 8, "PAIRS": 256, "DIM": 256, "TURNED": 32, "WIDTH": 64, "HEIGHT": 8, "SPARE": 0}
    plain_options = shared | {"ROWS": 16, "GROUPS": 512 // group}
    for function, options, types in (
        (of_rows.norm_kernel, norm_options, {}),
        (of_rows.norm_kernel, norm_options, {"weight": "*i64"}),
        (of_rows.heads_kernel, heads_options, {}),
        (of_tiles.swiglu_kernel, swiglu_options, {}),
        (of_tiles.quantize_kernel, plain_options, {"x": "*bf16", "codes": "*u8"}),
    ):
        text = ptx(function, capability, options, **kinds, **types)
        assert ("e4m3x2" in text) == native
        # Subnormal numbers count. No sum of squares is one, no power or reciprocal of silu that matters.
        assert ".ftz" not in re.sub(r"rsqrt\.approx\.ftz\.f64|rcp\.approx\.ftz\.f32|ex2\.approx\.ftz\.f32", "", text)
        if native and function is not of_tiles.quantize_kernel:
            assert "ld.global.v4" in text
            # Numbers stay in their threads, but for the one sum of a norm.
            assert text.count("bar.sync") == (2 if function is of_rows.norm_kernel else 0)
