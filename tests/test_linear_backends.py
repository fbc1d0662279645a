"""Products of linear layers through libraries: every form of call, spied on; what each card takes and refuses; probes."""

import sys
from functools import partial
from importlib import metadata
from types import ModuleType

import pytest
import torch

from dsv4.fast import linear_ops
from dsv4.fast import scales as fast_scales
from dsv4.fast.adapters import deepgemm, deepgemm_linear, flashinfer_linear
from dsv4.fast.adapters.deepgemm import LIBRARY as DEEPGEMM
from dsv4.fast.adapters.flashinfer import LIBRARY as FLASHINFER
from dsv4.fast.adapters.products import SIZES, Product
from dsv4.fast.dispatch import Device
from dsv4.types import Unsupported

CPU = torch.device("cpu")
SM90, SM100, SM103, SM107, SM120, SM121 = (9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)
PACKED = (SM100, SM103, SM107, SM120)
NAN_CODE, NAN_SCALE = 0x7F, 255


def aligned(rows):
    return -(-rows // 4) * 4


def power(byte):
    """E8M0 bytes as fp64, 255 as NaN."""
    return torch.where(byte == NAN_SCALE, torch.nan, torch.exp2(byte.double() - 127))


def e4m3(codes):
    return codes.view(torch.float8_e4m3fn).double()


def expand(by_block, block, rows, columns, group):
    """Scales [.., blocks, groups] for every number of [.., rows, columns]."""
    return by_block.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(group, -1)[..., :columns]


def unpacked(words, groups):
    """The bytes of packed words [.., rows, words], the first group lowest, as fp64 powers of two."""
    parts = torch.stack([(words >> (8 * place)) & 0xFF for place in range(4)], -1)
    assert not parts.flatten(-2)[..., groups:].any(), "bytes of groups that are not there"
    return power(parts.flatten(-2)[..., :groups])


class DeepGEMM:
    """Signatures and rules of the wheels 0.1.5.post1 and 0.2.5, and answers in fp64. A call must give all that the library would else
    make itself: scales in the layout that its kernels read. Records recipes and left scales. `twist` spoils the operands' numbers."""

    def __init__(self, capability):
        self.packed, self.calls, self.twist = capability[0] in (10, 12), [], lambda a, sa, b, sb, y: y(a, sa, b, sb)

    def functions(self):
        return {name: getattr(self, name) for name in ("fp8_gemm_nt", "fp8_einsum", "einsum")}

    def fp8_gemm_nt(self, a, b, d, c=None, recipe=None):
        (x, sa), (w, sb) = a, b
        self.calls.append((recipe, sa, sb))
        assert (c, d.stride(1), x.dim(), w.dim()) == (None, 1, 2, 2)
        assert d.shape == (len(x), len(w))
        if recipe == (1, 1, 128) and not self.packed:  # 1d1d
            assert d.dtype == torch.float32
            assert sb.shape == (len(w), -(-w.shape[1] // 128))
            return self._finish(x[None], sa[None].double(), w[None], sb[None].double(), d[None], 1, 128)
        self._operands(x[None], w[None], d[None])
        scales = self._scales(sa[None], sb[None], x[None], w[None], recipe)
        return self._finish(x[None], scales[0], w[None], scales[1], d[None], *scales[2:])

    def fp8_einsum(self, expr, a, b, d, c, recipe):
        assert (expr, c) == ("bhr,hdr->bhd", None)
        (x, sa), (w, sb) = (a[0].transpose(0, 1), a[1].transpose(0, 1)), b
        self.calls.append((recipe, sa, sb))
        self._operands(x, w, d.transpose(0, 1))
        scales = self._scales(sa, sb, x, w, recipe)
        self._finish(x, scales[0], w, scales[1], d.transpose(0, 1), *scales[2:])

    def einsum(self, expr, a, b, d, c, use_cublaslt):
        assert (expr, c, use_cublaslt) == ("bhr,hdr->bhd", None, False)
        self.calls.append((None, a, b))
        x = a.transpose(0, 1)
        assert x.dtype == b.dtype == torch.bfloat16
        self._operands(x, b, d.transpose(0, 1), torch.bfloat16, 8)
        result = self.twist(x.double(), None, b.double(), None, lambda a, sa, b, sb: a @ b.mT)
        if result is not None:
            d.copy_(result.transpose(0, 1))

    def _operands(self, x, w, d, dtype=torch.float8_e4m3fn, multiple=16):
        for tensor, kind, step in ((x, dtype, multiple), (w, dtype, multiple), (d, torch.bfloat16, 8)):
            assert tensor.dtype == kind
            assert tensor.stride(-1) == 1
            assert tensor.data_ptr() % 16 == 0
            assert all(stride % step == 0 for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1)
        assert x.shape[2] % multiple == 0
        assert w.shape[1] % 8 == 0

    def _scales(self, sa, sb, x, w, recipe):
        """Scales as fp64 [batch, rows, groups] and [batch, blocks, groups], the rows of a block, the numbers of a group."""
        (batch, m, k), n = x.shape, w.shape[1]
        if not self.packed:
            assert recipe in (None, (1, 128, 128))
            groups = -(-k // 128)
            assert sa.dtype == sb.dtype == torch.float32
            assert sa.shape == (batch, m, groups)
            assert sa.stride()[1:] == (1, aligned(m))
            assert batch == 1 or sa.stride(0) == aligned(m) * groups
            assert sa.data_ptr() % 16 == 0
            blocks = -(-n // 128)
            assert sb.shape == (batch, blocks, groups)
            assert sb.stride() == (blocks * groups, groups, 1)
            return sa.double(), sb.double(), 128, 128
        assert recipe[:2] == (1, 1)
        group = recipe[2]
        assert group in (32, 128)
        words = -(-k // (4 * group))
        for scales, rows in ((sa, m), (sb, n)):
            assert scales.dtype == torch.int32
            assert scales.shape == (batch, rows, words)
            assert scales.stride()[1:] == (1, aligned(rows))
            assert batch == 1 or scales.stride(0) == aligned(rows) * words
            assert scales.data_ptr() % 16 == 0
        assert k % 128 == 0
        assert n % 64 == 0
        return unpacked(sa, k // group), unpacked(sb, k // group), 1, group

    def _finish(self, x, sa, w, sb, d, rows, group):
        def y(a, sa, b, sb):
            k = a.shape[2]
            return (a * expand(sa, 1, a.shape[1], k, group)) @ (b * expand(sb, rows, b.shape[1], k, group)).mT

        result = self.twist(x.double(), sa, w.double(), sb, y)
        if result is not None:
            d.copy_(result)


class FlashInfer:
    """`mm_mxfp8` of 0.7.4."""

    def __init__(self):
        self.calls, self.twist = [], lambda a, sa, b, sb: (a * sa) @ (b * sb).T

    def mm_mxfp8(
        self, a, b, a_descale, b_descale, out=None, out_dtype=torch.bfloat16, use_8x4_sf_layout=True, backend="auto", *, skip_check=False
    ):
        self.calls.append((a.data_ptr(), b.data_ptr(), a_descale.data_ptr(), b_descale.data_ptr(), out.data_ptr(), backend))
        assert (out_dtype, use_8x4_sf_layout, backend, skip_check) == (torch.bfloat16, False, "cutlass", True)
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        (m, k), n = a.shape, b.shape[1]
        assert a.is_contiguous()
        assert b.T.is_contiguous()
        assert b.shape == (k, n)
        assert k % 32 == n % 32 == 0
        assert min(n, k) >= 128
        scales = []
        for descale, rows in ((a_descale, m), (b_descale, n)):
            assert descale.dtype == torch.uint8
            assert descale.shape == (-(-rows // 128) * 128 * -(-k // 128) * 4,)
            at = torch.arange(rows)[:, None], torch.arange(k // 32)
            place = at[0] // 128 * (-(-k // 128) * 512) + at[1] // 4 * 512 + at[0] % 32 * 16 + at[0] % 128 // 32 * 4 + at[1] % 4
            scales.append(power(descale[place]).repeat_interleave(32, 1))
        result = self.twist(a.double(), scales[0], b.T.double(), scales[1])
        if result is not None:
            out.copy_(result)
        return out


def pretend(monkeypatch, capability, proved=True):
    """Both libraries, made up, on a CPU of this capability. Whether they have proved themselves, or do so at their first call."""
    here = Device("cuda", capability)
    versions = {"sgl-deep-gemm": "0.1.5.post1", "flashinfer-python": "0.7.4"}
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions[name] if name in versions else found(name))
    monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: None)
    monkeypatch.setattr(deepgemm_linear, "describe", lambda device: here)
    spies = DeepGEMM(capability), FlashInfer()
    symbols = (deepgemm.GEMM, deepgemm_linear.GEMM_BLOCK32, deepgemm_linear.MXFP8, deepgemm_linear.EINSUM_FP8, deepgemm_linear.EINSUM)
    for library, name, functions, known in (
        (DEEPGEMM, "deep_gemm", spies[0].functions(), symbols),
        (FLASHINFER, "flashinfer", {"mm_mxfp8": spies[1].mm_mxfp8}, (flashinfer_linear.MM_MXFP8,)),
    ):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(library, "_found", False)
        monkeypatch.setattr(library, "_proofs", {(symbol, "cpu"): None for symbol in known} if proved else {})
    return spies


@pytest.fixture
def hopper(monkeypatch):
    return pretend(monkeypatch, SM90)[0]


def codes_of(*shape, seed=1):
    """E4M3 codes of integers between -3 and 3."""
    numbers = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.float().to(torch.float8_e4m3fn).view(torch.uint8)


def bytes_of(*shape, seed=1):
    return torch.randint(124, 131, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def mn_major(scales):
    """fp32 [rows, .., groups] with columns of rows, NaN in the pads."""
    memory = torch.full((*scales.shape[1:], aligned(len(scales))), torch.nan)
    memory[..., : len(scales)] = scales.movedim(0, -1)
    return memory.movedim(-1, 0)[: len(scales)]


def product_of(x, scales, weight, by_block, block, group):
    """bf16 of the exact product of codes [m, k] and [n, k]."""
    wide = e4m3(x) * expand(scales.double(), 1, *x.shape, group)
    return (wide @ (e4m3(weight) * expand(by_block.double(), block, *weight.shape, group)).T).bfloat16()


def same(result, expected):
    assert result.dtype == expected.dtype == torch.bfloat16
    assert result.is_contiguous()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# SM90: fp32 scales


SHAPES = [(1, 8, 16), (5, 264, 144), (133, 320, 384), (4, 128, 128), (2, 8, 1024)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("stored", ["rows", "transposed", "sliced", "shifted", "mn_major", "e8m0", "e8m0 transposed"])
def test_ln_03_scales_of_x_give_one_call_whatever_their_strides(hopper, m, n, k, stored):
    x, weight, groups = codes_of(m, k), codes_of(n, k, seed=2), -(-k // 128)
    byte = bytes_of(m, groups)
    numbers = power(byte).float() * (1.0 if stored.startswith("e8m0") else 1.5)
    by_block = power(bytes_of(-(-n // 128), groups, seed=3)).float() * 1.25
    given = {
        "rows": lambda: numbers,
        "transposed": lambda: numbers.T.contiguous().T,
        "sliced": lambda: torch.cat([numbers * 0, numbers], 1)[:, groups:],
        "shifted": lambda: torch.cat([torch.zeros(1, groups), mn_major(numbers).T.contiguous().T])[1:],
        "mn_major": lambda: mn_major(numbers),
        "e8m0": lambda: byte,
        "e8m0 transposed": lambda: byte.T.contiguous().T,
    }[stored]()
    result = deepgemm_linear.linear_fp8(x, given, weight, by_block, 128)
    same(result, product_of(x, numbers, weight, by_block, 128, 128))
    (recipe, scales, of_weight) = hopper.calls[-1]
    assert recipe is None
    assert torch.equal(scales, numbers)
    assert of_weight.data_ptr() == by_block.data_ptr()
    as_it_is = given.dtype == torch.float32 and given.stride() == (1, aligned(m)) and given.data_ptr() % 16 == 0
    assert as_it_is or stored != "mn_major"
    assert (scales.data_ptr() == given.data_ptr()) == as_it_is


@pytest.mark.parametrize("stored", ["rows", "transposed", "e8m0", "odd strides of one column"])
def test_ln_03_scales_of_the_weight_give_one_call_whatever_their_strides(hopper, stored):
    n, k = (384, 128) if stored.startswith("odd") else (264, 400)
    x, weight, groups = codes_of(6, k), codes_of(n, k, seed=2), -(-k // 128)
    byte = bytes_of(-(-n // 128), groups)
    by_block = power(byte).float() * (1.0 if stored == "e8m0" else 1.25)
    given = {
        "rows": lambda: by_block,
        "transposed": lambda: by_block.T.contiguous().T,
        "e8m0": lambda: byte,
        "odd strides of one column": lambda: by_block.as_strided((3, 1), (1, 77)),
    }[stored]()
    scales = power(bytes_of(6, groups, seed=3)).float()
    same(deepgemm_linear.linear_fp8(x, scales, weight, given, 128), product_of(x, scales, weight, by_block, 128, 128))


@pytest.mark.parametrize("left", ["rows", "mn_major", "uint8", "e8m0"])
@pytest.mark.parametrize("right", ["blocks", "transposed", "uint8", "e8m0"])
def test_what_is_prepared_takes_tensors_as_they_come_to_the_public_function(hopper, left, right):
    """Twice, for other tensors of the kind; scales that lie right go to the library as they are."""
    m, n, k = 5, 264, 400
    run = None
    for seed in range(3):
        x, weight = codes_of(m, k, seed=seed), codes_of(n, k, seed=seed + 9)
        byte, by_block = bytes_of(m, 4, seed=seed), bytes_of(3, 4, seed=seed + 9)
        scales = power(byte).float() * (1.5 if left in ("rows", "mn_major") else 1.0)
        of_weight = power(by_block).float() * (1.25 if right in ("blocks", "transposed") else 1.0)
        of_x = {"rows": scales, "mn_major": mn_major(scales), "uint8": byte, "e8m0": byte.view(torch.float8_e8m0fnu)}[left]
        e8m0 = by_block.view(torch.float8_e8m0fnu)
        own = {"blocks": of_weight, "transposed": of_weight.T.contiguous().T, "uint8": by_block, "e8m0": e8m0}[right]
        run = run or deepgemm_linear.prepare_gemm(x, linear_ops.as_bytes(of_x), weight, linear_ops.as_bytes(own))
        e4m3_x, e4m3_weight = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
        same(run(e4m3_x, e4m3_weight, own, of_x), product_of(x, scales, weight, of_weight, 128, 128))
        recipe, of_left, of_right = hopper.calls[-1]
        assert recipe is None
        assert (of_left.data_ptr() == of_x.data_ptr()) == (left == "mn_major")
        assert (of_right.data_ptr() == own.data_ptr()) == (right == "blocks")


@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_prepared_for_groups(hopper, bf16):
    o, weight = codes_of(5, 3, 320), codes_of(3, 264, 320, seed=2)
    byte, by_block = bytes_of(5, 3, 3), bytes_of(3, 3, 3, seed=3)
    if bf16:
        given = e4m3(o).bfloat16(), e4m3(weight).bfloat16()
        run = deepgemm_linear.prepare_einsum(given[0], None, given[1], None)
        same(run(*given), deepgemm_linear.einsum_bf16(*given))
        return
    run = deepgemm_linear.prepare_einsum(o, byte, weight, by_block)
    e8m0 = (scales.view(torch.float8_e8m0fnu) for scales in (by_block, byte))
    result = run(o.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn), *e8m0)
    same(result, deepgemm_linear.einsum_fp8(o, byte, weight, by_block))


def test_x_may_be_rows_of_a_wider_matrix(hopper):
    wide, weight, scales, by_block = codes_of(5, 512), codes_of(64, 256, seed=2), torch.rand(5, 2), torch.rand(1, 2)
    x = wide[:, 256:]
    arguments = {"x": x, "x_scales": scales, "weight": weight, "weight_scales": by_block, "block": 128}
    assert deepgemm_linear.takes_linear(arguments) is None
    same(deepgemm_linear.linear_fp8(**arguments), product_of(x, scales, weight, by_block, 128, 128))


def test_nan_codes_and_scales_arrive(hopper):
    x, weight = codes_of(4, 256), codes_of(136, 256, seed=2)
    byte, by_block = bytes_of(4, 2), bytes_of(2, 2)
    x[0, 3], byte[1, 1], by_block[1, 0] = NAN_CODE, NAN_SCALE, NAN_SCALE
    result = deepgemm_linear.linear_fp8(x, byte, weight, by_block, 128)
    there = torch.zeros(4, 136, dtype=torch.bool)
    there[:2], there[:, 128:] = True, True
    assert torch.equal(result.isnan(), there)
    byte[:], by_block[:] = 0, 127  # 2^-127 is a scale like any other
    deepgemm_linear.linear_fp8(x, byte, weight, by_block, 128)
    assert (hopper.calls[-1][1] == 2.0**-127).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "rank", "width"), [(1, 1, 128, 256), (5, 3, 264, 320), (133, 2, 128, 512), (2, 4, 8, 64)])
def test_groups(hopper, tokens, groups, rank, width, bf16):
    o, weight, blocks = codes_of(tokens, groups, width), codes_of(groups, rank, width, seed=2), -(-width // 128)
    if bf16:
        given = {"o": e4m3(o).bfloat16(), "weight": e4m3(weight).bfloat16()}
        expected = torch.einsum("tgk,grk->tgr", given["o"].double(), given["weight"].double()).bfloat16()
        assert deepgemm_linear.takes_groups(given | {"o_scales": None, "weight_scales": None, "scale": "ue8m0"}) is None
        same(deepgemm_linear.einsum_bf16(**given), expected)
        assert hopper.calls[-1][1].data_ptr() == given["o"].data_ptr()
        return
    scales = power(bytes_of(tokens, groups, blocks)).float() * 1.5
    by_block = power(bytes_of(groups, -(-rank // 128), blocks, seed=3)).float() * 1.25
    expected = torch.stack([product_of(o[:, g], scales[:, g], weight[g], by_block[g], 128, 128) for g in range(groups)], 1)
    laid = mn_major(scales)
    transposed = scales.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for given, weights in ((scales, by_block), (transposed, by_block.mT.contiguous().mT), (laid, by_block)):
        arguments = {"o": o, "o_scales": given, "weight": weight, "weight_scales": weights}
        assert deepgemm_linear.takes_groups(arguments | {"scale": "ue8m0"}) is None
        same(deepgemm_linear.einsum_fp8(**arguments), expected)
        assert hopper.calls[-1][0] == (1, 128, 128)
    assert hopper.calls[-1][1].data_ptr() == laid.data_ptr()
    byte, of_weight = bytes_of(tokens, groups, blocks), bytes_of(groups, -(-rank // 128), blocks, seed=3)
    same(
        deepgemm_linear.einsum_fp8(o, byte, weight, of_weight),
        deepgemm_linear.einsum_fp8(o, power(byte).float(), weight, power(of_weight).float()),
    )


def test_groups_may_lie_in_a_wider_tensor(hopper):
    o, weight = codes_of(5, 6, 256)[:, ::2, 128:], codes_of(3, 8, 128, seed=2)
    scales, by_block = torch.rand(5, 6, 2)[:, ::2, :1], torch.rand(3, 1, 1)
    arguments = {"o": o, "o_scales": scales, "weight": weight, "weight_scales": by_block}
    assert deepgemm_linear.takes_groups(arguments | {"scale": "fp32"}) is None
    expected = torch.stack([product_of(o[:, g], scales[:, g], weight[g], by_block[g], 128, 128) for g in range(3)], 1)
    same(deepgemm_linear.einsum_fp8(**arguments), expected)


# SM10x and SM120: packed scales


@pytest.mark.parametrize("capability", PACKED)
@pytest.mark.parametrize(("m", "n", "k", "block"), [
    (1, 64, 128, 128), (5, 320, 640, 128), (133, 256, 1024, 128), (3, 64, 128, 32), (130, 192, 384, 32),
])  # fmt: skip
def test_packed_words(monkeypatch, capability, m, n, k, block):
    spy = pretend(monkeypatch, capability)[0]
    x, weight, groups = codes_of(m, k), codes_of(n, k, seed=2), k // block
    byte, by_block = bytes_of(m, groups), bytes_of(-(-n // block), groups, seed=3)
    byte[0, 0], by_block[0, -1] = 0, 254
    arguments = {"x": x, "x_scales": byte, "weight": weight, "weight_scales": by_block, "block": block}
    assert deepgemm_linear.takes_linear(arguments) is None
    expected = product_of(x, power(byte), weight, power(by_block), block, block)
    same(deepgemm_linear.linear_fp8(**arguments), expected)
    assert spy.calls[-1][0] == (1, 1, block)
    packed = fast_scales.pack_ue8m0(byte)
    given = arguments | {"x_scales": packed}
    assert deepgemm_linear.takes_linear(given) is None
    same(deepgemm_linear.linear_fp8(**given), expected)
    assert spy.calls[-1][1].data_ptr() == packed.data_ptr()
    by_block.fill_(127)[0, 0] = NAN_SCALE
    assert torch.equal(deepgemm_linear.linear_fp8(**arguments)[:, :block].isnan().all(), torch.tensor(True))


@pytest.mark.parametrize("capability", PACKED)
def test_packed_groups(monkeypatch, capability):
    spy = pretend(monkeypatch, capability)[0]
    o, weight = codes_of(5, 3, 640), codes_of(3, 192, 640, seed=2)
    byte, by_block = bytes_of(5, 3, 5), bytes_of(3, 2, 5, seed=3)
    arguments = {"o": o, "o_scales": byte, "weight": weight, "weight_scales": by_block}
    assert deepgemm_linear.takes_groups(arguments | {"scale": "ue8m0"}) is None
    expected = torch.stack([product_of(o[:, g], power(byte[:, g]), weight[g], power(by_block[g]), 128, 128) for g in range(3)], 1)
    same(deepgemm_linear.einsum_fp8(**arguments), expected)
    assert spy.calls[-1][0] == (1, 1, 128)
    packed = fast_scales.pack_ue8m0(byte.transpose(0, 1)).transpose(0, 1)
    assert packed.stride() == (1, 16, 8)
    same(deepgemm_linear.einsum_fp8(**(arguments | {"o_scales": packed})), expected)
    assert spy.calls[-1][1].data_ptr() == packed.data_ptr()
    given = {"o": e4m3(o).bfloat16(), "weight": e4m3(weight).bfloat16()}
    same(deepgemm_linear.einsum_bf16(**given), torch.einsum("tgk,grk->tgr", e4m3(o), e4m3(weight)).bfloat16())


@pytest.mark.parametrize("capability", PACKED)
@pytest.mark.parametrize("m", [1, 5, 133])
def test_pairs_of_packed_scales_go_as_they_are(monkeypatch, capability, m):
    spy = pretend(monkeypatch, capability)[0]
    codes, weight, byte, by_row = codes_of(m, 384), codes_of(192, 384, seed=2), bytes_of(m, 12), bytes_of(192, 12, seed=3)
    scales, of_weight = fast_scales.pack_ue8m0(byte), fast_scales.pack_ue8m0(by_row)
    arguments = {"codes": codes, "scales": scales, "weight": weight, "weight_scales": of_weight}
    assert deepgemm_linear.takes_pairs(arguments) is None
    same(deepgemm_linear.mxfp8(**arguments), product_of(codes, power(byte), weight, power(by_row), 1, 32))
    recipe, left, right = spy.calls[-1]
    assert (recipe, left.data_ptr(), right.data_ptr()) == ((1, 1, 32), scales.data_ptr(), of_weight.data_ptr())


def test_layouts_of_a_left_operand(monkeypatch):
    for capability, layout in ((SM90, "mn_major"), (SM100, "packed"), (SM107, "packed"), (SM120, "packed")):
        pretend(monkeypatch, capability)
        assert deepgemm_linear.scale_layout(CPU) == layout


@pytest.mark.parametrize(("library", "capabilities"), [
    (deepgemm_linear.DEVICES, (SM90, *PACKED)),
    (deepgemm_linear.MXFP8_DEVICES, PACKED),
    (flashinfer_linear.DEVICES, (*PACKED, SM121)),
])  # fmt: skip
def test_devices(library, capabilities):
    for capability in ((8, 0), (8, 9), SM90, *PACKED, (11, 0), SM121):
        assert (library(Device("cuda", capability)) is None) == (capability in capabilities)


# LN-01


@pytest.mark.parametrize("capability", [SM90, *PACKED])
def test_ln_01_fp32_scales_keep_their_mantissas_or_are_refused(monkeypatch, capability):
    """The case of the report: 448 times 3/2 in two groups; without the mantissa two thirds of it."""
    spy = pretend(monkeypatch, capability)[0]
    o, weight = torch.full((4, 2, 256), 0x7E, dtype=torch.uint8), torch.full((2, 64, 256), 0x38, dtype=torch.uint8)
    scales, by_block = torch.full((4, 2, 2), 1.5), torch.ones(2, 1, 2)
    groups = {"o": o, "o_scales": scales, "weight": weight, "weight_scales": by_block}
    linear = {"x": o[:, 0], "x_scales": scales[:, 0], "weight": weight[0], "weight_scales": by_block[0], "block": 128}
    if capability == SM90:
        assert deepgemm_linear.takes_groups(groups | {"scale": "fp32"}) is deepgemm_linear.takes_linear(linear) is None
        assert (deepgemm_linear.einsum_fp8(**groups) == 256 * 672).all()
        assert (deepgemm_linear.linear_fp8(**linear) == 256 * 672).all()
        return
    powers = {"o_scales": torch.full((4, 2, 2), 127, dtype=torch.uint8), "weight_scales": torch.full((2, 1, 2), 127, dtype=torch.uint8)}
    words = "takes E8M0 scales on SM1.*: of fp32 ones it reads the exponents, and drops the mantissas"
    for name in powers:  # one side in fp32 is enough
        given = groups | powers | {name: groups[name]}
        assert torch.tensor(deepgemm_linear.takes_groups(given | {"scale": "ue8m0"}) is not None)
        with pytest.raises(Unsupported, match=words):
            deepgemm_linear.einsum_fp8(**given)
        rows = {"x": o[:, 0], "x_scales": given["o_scales"][:, 0], "weight": weight[0], "weight_scales": given["weight_scales"][0]}
        assert "drops the mantissas" in deepgemm_linear.takes_linear(rows | {"block": 128})
        with pytest.raises(Unsupported, match=words):
            deepgemm_linear.linear_fp8(**rows, block=128)
    assert spy.calls == []
    quantised_here = groups | powers | {"o": o.bfloat16(), "o_scales": None}
    assert "drops the mantissas" in deepgemm_linear.takes_groups(quantised_here | {"scale": "fp32"})
    assert deepgemm_linear.takes_groups(quantised_here | {"scale": "ue8m0"}) is None
    assert deepgemm_linear.takes_groups(groups | powers | {"scale": "fp32"}) is None  # the scale is of what is quantised here


# Refusals


def linear_arguments(m=4, n=256, k=512, block=128, fp32=False):
    byte, by_block = bytes_of(m, -(-k // block)), bytes_of(-(-n // block), -(-k // block))
    scales = (power(byte).float(), power(by_block).float()) if fp32 else (byte, by_block)
    return {"x": codes_of(m, k), "x_scales": scales[0], "weight": codes_of(n, k), "weight_scales": scales[1], "block": block}


def unaligned(codes):
    """The same, from the second byte of its memory on."""
    return torch.empty(codes.numel() * codes.element_size() + 16, dtype=torch.uint8)[codes.element_size() :][
        : codes.numel() * codes.element_size()
    ].view(codes.dtype).view(codes.shape).copy_(codes)  # fmt: skip


def between(codes):
    """The same in rows that are one number longer."""
    return torch.cat([codes, codes[..., :1]], -1)[..., :-1]


ALIGNED = "whose rows begin at multiples of 16 bytes"


@pytest.mark.parametrize(("capability", "change", "words"), [
    (SM90, lambda: {"block": 32}, "takes blocks of 128 on SM90; got 32"),
    (SM90, lambda: linear_arguments(k=520), "takes k in multiples of 16 and n of 8; got k 520 and n 256"),
    (SM90, lambda: linear_arguments(n=260), "takes k in multiples of 16 and n of 8; got k 512 and n 260"),
    (SM90, lambda: {"x": unaligned(codes_of(4, 512))}, f"takes x {ALIGNED}; got strides (512, 1), the first row at "),
    (SM90, lambda: {"weight": unaligned(codes_of(256, 512))}, f"takes weight {ALIGNED}"),
    (SM90, lambda: {"x": between(codes_of(4, 512))}, f"takes x {ALIGNED}; got strides (513, 1)"),
    (SM90, lambda: {"weight": codes_of(512, 256).T}, f"takes weight {ALIGNED}; got strides (1, 256)"),
    (SM100, lambda: {"block": 64}, "takes blocks of 32 or 128; got 64"),
    (SM100, lambda: linear_arguments(k=528), "takes k in multiples of 128 and n of 64 with packed scales; got k 528 and n 256"),
    (SM120, lambda: linear_arguments(n=288, block=32), "takes k in multiples of 128 and n of 64 with packed scales; got k 512 and n 288"),
    (SM120, lambda: {"x": unaligned(codes_of(4, 512))}, f"takes x {ALIGNED}"),
    (SM103, lambda: linear_arguments(fp32=True), "takes E8M0 scales on SM103: of fp32 ones it reads the exponents, and drops the"),
])  # fmt: skip
def test_what_linear_refuses(monkeypatch, capability, change, words):
    pretend(monkeypatch, capability)
    assert deepgemm_linear.takes_linear(linear_arguments()) is None
    assert words in deepgemm_linear.takes_linear(linear_arguments() | change())


def test_bf16_x_is_quantised_before_so_it_may_lie_anywhere(hopper):
    x = unaligned(torch.zeros(4, 512, dtype=torch.bfloat16))
    assert deepgemm_linear.takes_linear(linear_arguments() | {"x": x, "x_scales": None}) is None
    assert "k 500" in deepgemm_linear.takes_linear(linear_arguments(k=500) | {"x": x, "x_scales": None})


def test_blocks_of_32_want_a_proof_of_their_own(monkeypatch):
    pretend(monkeypatch, SM100)
    DEEPGEMM._proofs[deepgemm_linear.GEMM_BLOCK32, "cpu"] = "computes garbage"
    assert deepgemm_linear.takes_linear(linear_arguments(block=32)) == "computes garbage"
    assert deepgemm_linear.takes_linear(linear_arguments()) is None


def group_arguments(tokens=4, groups=2, rank=128, width=512, bf16=False):
    o, weight = codes_of(tokens, groups, width), codes_of(groups, rank, width)
    scales = bytes_of(tokens, groups, -(-width // 128)), bytes_of(groups, -(-rank // 128), -(-width // 128))
    if bf16:
        return {"o": e4m3(o).bfloat16(), "o_scales": None, "weight": e4m3(weight).bfloat16(), "weight_scales": None, "scale": "ue8m0"}
    return {"o": o, "o_scales": scales[0], "weight": weight, "weight_scales": scales[1], "scale": "ue8m0"}


@pytest.mark.parametrize(("capability", "change", "words"), [
    (SM90, lambda: group_arguments(width=520), "takes width in multiples of 16 and rank of 8; got width 520 and rank 128"),
    (SM90, lambda: group_arguments(rank=12), "takes width in multiples of 16 and rank of 8; got width 512 and rank 12"),
    (SM90, lambda: {"o": between(codes_of(4, 2, 512))}, f"takes o {ALIGNED}; got strides (1026, 513, 1)"),
    (SM90, lambda: {"weight": unaligned(codes_of(2, 128, 512))}, f"takes weight {ALIGNED}"),
    (SM90, lambda: group_arguments(bf16=True, width=96), "takes width in multiples of 64 and rank of 8; got width 96 and rank 128"),
    (SM90, lambda: group_arguments(bf16=True, rank=12), "takes width in multiples of 64 and rank of 8; got width 512 and rank 12"),
    (SM90, lambda: group_arguments(bf16=True) | {"o": between(torch.zeros(4, 2, 512).bfloat16())}, f"takes o {ALIGNED}"),
    (SM100, lambda: group_arguments(width=528), "takes k in multiples of 128 and n of 64 with packed scales; got k 528 and n 128"),
    (SM120, lambda: group_arguments(rank=96), "takes k in multiples of 128 and n of 64 with packed scales; got k 512 and n 96"),
])  # fmt: skip
def test_what_groups_refuse(monkeypatch, capability, change, words):
    pretend(monkeypatch, capability)
    for arguments in (group_arguments(), group_arguments(bf16=True)):
        assert deepgemm_linear.takes_groups(arguments) is None
    assert words in deepgemm_linear.takes_groups(group_arguments() | change())


def test_bf16_groups_want_a_proof_of_their_own(hopper):
    DEEPGEMM._proofs[deepgemm_linear.EINSUM, "cpu"] = "computes garbage"
    assert deepgemm_linear.takes_groups(group_arguments(bf16=True)) == "computes garbage"
    assert deepgemm_linear.takes_groups(group_arguments()) is None


def test_a_proof_that_went_well_is_not_asked_for_again(hopper, monkeypatch):
    DEEPGEMM._proofs[deepgemm_linear.EINSUM, "SM90"] = None
    monkeypatch.setattr(DEEPGEMM, "disproved", lambda symbol, device: pytest.fail("was asked"))
    assert deepgemm_linear.takes_groups(group_arguments(bf16=True)) is None


def pair_arguments(m=4, n=256, k=512, swizzled=False):
    layout = fast_scales.swizzle_128x4 if swizzled else fast_scales.pack_ue8m0
    scales, of_weight = (layout(bytes_of(rows, -(-k // 32))) for rows in (m, n))
    return {"codes": codes_of(m, k), "scales": scales, "weight": codes_of(n, k), "weight_scales": of_weight}


@pytest.mark.parametrize(("change", "words"), [
    (lambda: {"scales": pair_arguments(swizzled=True)["scales"]}, "takes packed scales on both sides; got scales in 128x4"),
    (lambda: {"weight_scales": pair_arguments(swizzled=True)["scales"]}, "takes packed scales on both sides; got weight_scales in 128x4"),
    (lambda: pair_arguments(k=480), "takes k in multiples of 128 and n of 64 with packed scales; got k 480 and n 256"),
    (lambda: pair_arguments(n=96), "takes k in multiples of 128 and n of 64 with packed scales; got k 512 and n 96"),
    (lambda: {"scales": pair_arguments()["scales"].contiguous()}, "takes packed scales with strides (1, 4) from a multiple of 16 bytes on; "
                                                                 "got scales with (4, 1)"),
    (lambda: {"weight_scales": pair_arguments()["weight_scales"].T.contiguous().T[1:]}, "got weight_scales with"),
    (lambda: {"codes": unaligned(codes_of(4, 512))}, f"takes codes {ALIGNED}"),
    (lambda: {"weight": unaligned(codes_of(256, 512))}, f"takes weight {ALIGNED}"),
])  # fmt: skip
def test_what_pairs_of_deepgemm_refuse(monkeypatch, change, words):
    pretend(monkeypatch, SM100)
    assert deepgemm_linear.takes_pairs(pair_arguments()) is None
    assert words in deepgemm_linear.takes_pairs(pair_arguments() | change())


@pytest.mark.parametrize(("change", "words"), [
    (lambda: {"scales": pair_arguments()["scales"]}, "takes 128x4 scales on both sides; got scales [4, 4]"),
    (lambda: {"weight_scales": pair_arguments()["weight_scales"]}, "takes 128x4 scales on both sides; got weight_scales [256, 4]"),
    (lambda: {"scales": pair_arguments(swizzled=True)["scales"].transpose(2, 3)}, "takes 128x4 scales on both sides; got scales"),
    (lambda: pair_arguments(k=520, swizzled=True), "takes k and n in multiples of 32 from 128 on; got k 520 and n 256"),
    (lambda: pair_arguments(n=264, swizzled=True), "takes k and n in multiples of 32 from 128 on; got k 512 and n 264"),
    (lambda: pair_arguments(k=96, swizzled=True), "takes k and n in multiples of 32 from 128 on; got k 96 and n 256"),
    (lambda: pair_arguments(n=96, swizzled=True), "takes k and n in multiples of 32 from 128 on; got k 512 and n 96"),
    (lambda: {"codes": codes_of(4, 1024)[:, 512:]}, "takes contiguous tensors that begin at multiples of 16 bytes; codes is not"),
    (lambda: {"weight": unaligned(codes_of(256, 512))}, "takes contiguous tensors that begin at multiples of 16 bytes; weight is not"),
])  # fmt: skip
def test_what_pairs_of_flashinfer_refuse(change, words):
    assert flashinfer_linear.takes_pairs(pair_arguments(swizzled=True)) is None
    assert words in flashinfer_linear.takes_pairs(pair_arguments(swizzled=True) | change())


@pytest.mark.parametrize("capability", [SM90, SM100])
def test_nothing_is_asked_of_a_library_for_an_empty_result(monkeypatch, capability):
    spies = pretend(monkeypatch, capability)
    for m, n in ((0, 256), (4, 0)):
        linear, pair = linear_arguments(m, n), pair_arguments(m, n, swizzled=True)
        assert deepgemm_linear.takes_linear(linear) is deepgemm_linear.takes_pairs(pair) is flashinfer_linear.takes_pairs(pair) is None
        assert deepgemm_linear.linear_fp8(**linear).shape == (m, n)
        assert deepgemm_linear.mxfp8(**pair).shape == flashinfer_linear.mm_mxfp8(**pair).shape == (m, n)
    for tokens, groups, rank in ((0, 2, 128), (4, 0, 128), (4, 2, 0)):
        shape = (tokens, groups, rank)
        given = group_arguments(*shape), group_arguments(*shape, bf16=True)
        assert [deepgemm_linear.takes_groups(arguments) for arguments in given] == [None, None]
        assert deepgemm_linear.einsum_fp8(*(given[0][name] for name in ("o", "o_scales", "weight", "weight_scales"))).shape == shape
        assert deepgemm_linear.einsum_bf16(given[1]["o"], given[1]["weight"]).shape == shape
    assert spies[0].calls == spies[1].calls == []


# FlashInfer


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 160, 160), (133, 256, 512), (256, 128, 384)])
def test_pairs_of_flashinfer(monkeypatch, m, n, k):
    spy = pretend(monkeypatch, SM100)[1]
    codes, weight, byte, by_row = codes_of(m, k), codes_of(n, k, seed=2), bytes_of(m, k // 32), bytes_of(n, k // 32, seed=3)
    scales, of_weight = fast_scales.swizzle_128x4(byte), fast_scales.swizzle_128x4(by_row)
    arguments = {"codes": codes, "scales": scales, "weight": weight, "weight_scales": of_weight}
    assert flashinfer_linear.takes_pairs(arguments) is None
    result = flashinfer_linear.mm_mxfp8(**arguments)
    same(result, product_of(codes, power(byte), weight, power(by_row), 1, 32))
    assert spy.calls == [(*(tensor.data_ptr() for tensor in (codes, weight, scales, of_weight, result)), "cutlass")]


# Probes


FORMS = {  # proofs of DeepGEMM on a device: those that pass
    SM90: {deepgemm.GEMM, deepgemm.GEMM_1D1D, deepgemm_linear.EINSUM_FP8, deepgemm_linear.EINSUM},
    SM100: {deepgemm.GEMM, deepgemm_linear.GEMM_BLOCK32, deepgemm_linear.MXFP8, deepgemm_linear.EINSUM_FP8, deepgemm_linear.EINSUM},
}
FORMS[SM120] = FORMS[SM100]


@pytest.mark.parametrize("capability", FORMS)
def test_probes_pass_on_right_answers(monkeypatch, capability):
    pretend(monkeypatch, capability, proved=False)
    for symbol in FORMS[capability]:
        assert DEEPGEMM.disproved(symbol, CPU) is None
    assert FLASHINFER.disproved(flashinfer_linear.MM_MXFP8, CPU) is None
    if capability == SM90:
        for symbol in (deepgemm_linear.GEMM_BLOCK32, deepgemm_linear.MXFP8):
            assert "is of SM10x and SM120" in DEEPGEMM.disproved(symbol, CPU)


def rolled(scales, dim):
    return None if scales is None else scales.roll(1, dim)


def cut(scales):
    """Without mantissas."""
    return None if scales is None else torch.exp2(scales.log2().floor())


WRONG = {
    "unwritten": lambda a, sa, b, sb, y: None,
    "zeros": lambda a, sa, b, sb, y: 0 * y(a, sa, b, sb),
    "no scales of x": lambda a, sa, b, sb, y: y(a, torch.ones_like(sa), b, sb),
    "no scales of the weight": lambda a, sa, b, sb, y: y(a, sa, b, torch.ones_like(sb)),
    "scales of the row before": lambda a, sa, b, sb, y: y(a, rolled(sa, 1), b, sb),
    "scales of the block before": lambda a, sa, b, sb, y: y(a, sa, b, rolled(sb, 1)),
    "scales of the group before": lambda a, sa, b, sb, y: y(a, rolled(sa, 2), b, sb),
    "weight scales of the group before": lambda a, sa, b, sb, y: y(a, sa, b, rolled(sb, 2)),
    "scales swapped": lambda a, sa, b, sb, y: y(a, sb[:, :1].expand_as(sa), b, sa[:, :1].expand_as(sb)),
    "the first group alone": lambda a, sa, b, sb, y: y(a, torch.cat([sa[..., :1], 0 * sa[..., 1:]], 2), b, sb),
    "without mantissas of x": lambda a, sa, b, sb, y: y(a, cut(sa), b, sb),
    "without mantissas of the weight": lambda a, sa, b, sb, y: y(a, sa, b, cut(sb)),
    "words in the other byte order": lambda a, sa, b, sb, y: y(a, sa.unflatten(2, (-1, 4)).flip(3).flatten(2), b, sb),
    "rows one on": lambda a, sa, b, sb, y: y(rolled(a, 1), rolled(sa, 1), b, sb),
    "columns one on": lambda a, sa, b, sb, y: y(a, sa, rolled(b, 1), sb),
    "rows 64 on": lambda a, sa, b, sb, y: y(a.roll(64, 1), sa if sa is None else sa.roll(64, 1), b, sb),
    "operands swapped": lambda a, sa, b, sb, y: y(a, sa, b, sb).flatten(1).unflatten(1, (-1, a.shape[1])).transpose(1, 2),
    "groups the other way": lambda a, sa, b, sb, y: y(a, sa, b.flip(0), sb if sb is None else sb.flip(0)),
    "scales of another matrix": lambda a, sa, b, sb, y: y(a, rolled(sa, 0), b, sb),
    "weight scales of another matrix": lambda a, sa, b, sb, y: y(a, sa, b, rolled(sb, 0)),
    "the matrix before": lambda a, sa, b, sb, y: rolled(y(a, sa, b, sb), 0),
    "a tail of k left out": lambda a, sa, b, sb, y: y(torch.cat([a[..., :-32], 0 * a[..., -32:]], 2), sa, b, sb),
}
OF_SCALES = {name for name in WRONG if "scales" in name or "mantissas" in name or "words" in name or name == "the first group alone"}
OF_BATCHES = {"groups the other way", "scales of another matrix", "weight scales of another matrix", "the matrix before"}


def applies(name, capability, symbol):
    batched = symbol in (deepgemm_linear.EINSUM_FP8, deepgemm_linear.EINSUM)
    if (name in OF_BATCHES and not batched) or (name in OF_SCALES and symbol == deepgemm_linear.EINSUM):
        return False
    return not (("mantissas" in name and capability != SM90) or ("words" in name and capability == SM90))


CASES = [
    (capability, symbol, name)
    for capability, symbols in FORMS.items()
    for symbol in sorted(symbols - {deepgemm.GEMM_1D1D})
    for name in WRONG
    if applies(name, capability, symbol)
]


@pytest.mark.parametrize(("capability", "symbol", "name"), CASES)
def test_probes_of_deepgemm_fail_on_wrong_answers(monkeypatch, capability, symbol, name):
    spy = pretend(monkeypatch, capability, proved=False)[0]
    spy.twist = WRONG[name]
    assert f"{symbol} failed its known-answer test: " in DEEPGEMM.disproved(symbol, CPU)
    assert "raised" not in DEEPGEMM.disproved(symbol, CPU)


@pytest.mark.parametrize("wrong", [
    lambda a, sa, b, sb: None,
    lambda a, sa, b, sb: (a * sa.roll(1, 0)) @ (b * sb).T,
    lambda a, sa, b, sb: (a * sa) @ (b * sb.roll(1, 0)).T,
    lambda a, sa, b, sb: (a * sa.roll(32, 1)) @ (b * sb).T,
    lambda a, sa, b, sb: (a * sa) @ b.T,
    lambda a, sa, b, sb: (a * sb[: len(a)]) @ (b * sb).T,
    lambda a, sa, b, sb: (a * sa) @ (b.roll(1, 0) * sb).T,
])  # fmt: skip
def test_the_probe_of_flashinfer_fails_on_wrong_answers(monkeypatch, wrong):
    spy = pretend(monkeypatch, SM100, proved=False)[1]
    spy.twist = wrong
    assert "mm_mxfp8 failed its known-answer test: " in FLASHINFER.disproved(flashinfer_linear.MM_MXFP8, CPU)
    assert "raised" not in FLASHINFER.disproved(flashinfer_linear.MM_MXFP8, CPU)


@pytest.mark.parametrize("options", [
    {"k": 256, "group": 128, "block": 128, "batches": 3, "mantissas": True}, {"k": 1024, "group": 128, "block": 128, "batches": 3},
    {"k": 256, "group": 32, "block": 32}, {"k": 256, "group": 32, "block": 1},
])  # fmt: skip
def test_answers_are_exact_in_few_bits(options):
    """The sum over a group, that a tensor core adds up, wants 8 bits; the whole sum, in any order, less than the 24 of fp32."""
    product = Product.of(**options)
    x, weight, group = product.x.double(), product.weight.double(), options["group"]
    inner = (x[..., :group].abs() @ weight[..., :group].abs().mT).max()
    assert inner / 0.25 < 2**8
    scaled = x.abs() * expand(product.x_scales.double(), 1, *x.shape[1:], group)
    other = weight.abs() * expand(product.weight_scales.double(), options["block"], *weight.shape[1:], group)
    least = 0.25 * (0.25 * 0.25 / (8 if options.get("mantissas") else 1))
    assert (scaled @ other.mT).max() / least < 2**24
    assert torch.equal(product.x.to(torch.float8_e4m3fn).double(), x)
    assert torch.equal(product.weight.to(torch.float8_e4m3fn).double(), weight)
    assert [len(answer) for answer in product.answers()] == [2 * 256 * len(x) * m for m in SIZES]


# The real ones


def real(library, *capabilities):
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() in capabilities
    return pytest.mark.skipif(not here or library.missing() is not None, reason="wants a card and its library")


@real(DEEPGEMM, SM90)
@pytest.mark.parametrize("symbol", [deepgemm.GEMM, deepgemm_linear.EINSUM_FP8, deepgemm_linear.EINSUM])
def test_the_real_products_of_sm90_prove_themselves(symbol):
    assert DEEPGEMM.disproved(symbol, torch.device("cuda"), again=True) is None


@real(DEEPGEMM, SM90)
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (300, 512, 4096)])
def test_the_real_product_with_scales_of_every_layout(m, n, k):
    x, weight, groups = codes_of(m, k), codes_of(n, k, seed=2), -(-k // 128)
    byte, of_weight = bytes_of(m, groups), bytes_of(-(-n // 128), groups, seed=3)
    expected = product_of(x, power(byte), weight, power(of_weight), 128, 128)
    call = partial(deepgemm_linear.linear_fp8, block=128)
    numbers = power(byte).float().cuda()
    forms = byte.cuda(), numbers, numbers.T.contiguous().T, fast_scales.align_mn_major(numbers)
    for given in forms:
        for weights in (of_weight.cuda(), power(of_weight).float().cuda()):
            same(call(x.cuda(), given, weight.cuda(), weights).cpu(), expected)


@real(DEEPGEMM, SM90)
@pytest.mark.parametrize(("tokens", "groups", "rank", "width"), [(1, 1, 128, 256), (5, 3, 264, 320), (133, 2, 1024, 4096)])
def test_the_real_products_of_groups(tokens, groups, rank, width):
    o, weight, blocks = codes_of(tokens, groups, width), codes_of(groups, rank, width, seed=2), -(-width // 128)
    byte, of_weight = bytes_of(tokens, groups, blocks), bytes_of(groups, -(-rank // 128), blocks, seed=3)
    columns = [product_of(o[:, g], power(byte[:, g]), weight[g], power(of_weight[g]), 128, 128) for g in range(groups)]
    for given in (byte.cuda(), power(byte).float().cuda()):
        same(deepgemm_linear.einsum_fp8(o.cuda(), given, weight.cuda(), of_weight.cuda()).cpu(), torch.stack(columns, 1))
    expected = torch.einsum("tgk,grk->tgr", e4m3(o), e4m3(weight)).bfloat16()
    same(deepgemm_linear.einsum_bf16(e4m3(o).bfloat16().cuda(), e4m3(weight).bfloat16().cuda()).cpu(), expected)


@real(DEEPGEMM, *PACKED)
@pytest.mark.parametrize("symbol", sorted(FORMS[SM100]))
def test_the_real_products_of_newer_cards_prove_themselves(symbol):
    assert DEEPGEMM.disproved(symbol, torch.device("cuda"), again=True) is None


@real(FLASHINFER, *PACKED, SM121)
def test_the_real_product_of_flashinfer_proves_itself():
    assert FLASHINFER.disproved(flashinfer_linear.MM_MXFP8, torch.device("cuda"), again=True) is None
