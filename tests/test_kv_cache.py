"""The reference cache against bytes worked out from the specification with integers and fractions, DeepSeek's published code, literals.

The oracle below shares nothing with the package: its table of layouts, its codes and its places are written out here.
"""

from bisect import bisect_left
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.kv_layouts import explain_layout
from dsv4.reference import kv_cache
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.rotary import apply_rope
from dsv4.types import ArgumentError

GOLDEN = Path(__file__).parent / "golden"
INF, NAN = float("inf"), float("nan")

# name: dims in codes, group, bytes of codes, of data, of scales, inline, page multiple, amax floor as a fraction
TABLE = {
    "v4": (448, 64, 448, 576, 8, False, 576),
    "v41": (512, 32, 512, 512, 16, False, 512),
    "v41_fp4": (512, 16, 256, 256, 32, False, 256),
    "v41_inline": (512, 32, 512, 512, 16, True, 528),
    "v41_fp4_inline": (512, 16, 256, 256, 32, True, 288),
    "uniform_fp8": (512, 512, 512, 512, 0, False, 512),
}
LAYOUTS = list(TABLE)
FLOOR = Fraction(float(torch.tensor(1e-4)))  # fp32
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
E4M3 += [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
E4M3 = E4M3[:127]  # 0x7F is NaN
E2M1 = [Fraction(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def nearest(numbers, value):
    """The code of a magnitude: ties to the even code, saturating."""
    i = bisect_left(numbers, value)
    if i == len(numbers):
        return i - 1
    if i and (value - numbers[i - 1] < numbers[i] - value or (value - numbers[i - 1] == numbers[i] - value and i % 2)):
        return i - 1
    return i


def fl32(value):
    """A positive fraction rounded to 24 bits, ties to even."""
    if not value:
        return value
    exponent = 0
    while value * Fraction(2) ** -exponent >= 2**24:
        exponent += 1
    while value * Fraction(2) ** -exponent < 2**23:
        exponent -= 1
    return round(value * Fraction(2) ** -exponent) * Fraction(2) ** exponent


def numbers_of(row):
    """bf16 as (negative, magnitude)."""
    bits = [b & 0xFFFF for b in row.view(torch.int16).tolist()]
    return [(b >> 15, Fraction(float(x)).__abs__()) for b, x in zip(bits, row.tolist(), strict=True)], bits


def record(row, name):
    """Data and scales of a row of finite bf16, as bytes."""
    quantised, group, code_bytes, _, scale_bytes = TABLE[name][:5]
    numbers, bits = numbers_of(row)
    codes, scales = [], []
    for first in range(0, quantised, group):
        members = numbers[first : first + group]
        amax = max(magnitude for _, magnitude in members)
        if name == "uniform_fp8":
            codes += [128 * sign + nearest(E4M3, x) for sign, x in members]
        elif "fp4" in name:
            code = nearest(E4M3, fl32(max(amax, 6 * Fraction(2) ** -9) / 6))
            scales.append(code)
            codes += [8 * sign + nearest(E2M1, fl32(x / E4M3[code])) for sign, x in members]
        else:
            byte = 0
            while 448 * Fraction(2) ** (byte - 127) < max(amax, FLOOR):
                byte += 1
            scales.append(byte)
            codes += [128 * sign + nearest(E4M3, x / Fraction(2) ** (byte - 127)) for sign, x in members]
    if "fp4" in name:
        codes = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert len(codes) == code_bytes
    data = bytes(codes) + b"".join(b.to_bytes(2, "little") for b in bits[quantised:])
    return data, bytes(scales) + bytes(scale_bytes - len(scales))


def page_bytes(name, size):
    data, scales, multiple = TABLE[name][3], TABLE[name][4], TABLE[name][6]
    return -(-size * (data + scales) // multiple) * multiple


def write(memory, name, size, slot, pair):
    """A record into pages, a list of bytearrays."""
    data, scales, inline = TABLE[name][3:6]
    page, i = divmod(slot, size)
    first, second = (i * (data + scales), i * (data + scales) + data) if inline else (i * data, size * data + i * scales)
    memory[page][first : first + data] = pair[0]
    memory[page][second : second + scales] = pair[1]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def noise(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def hard_rows():
    """Normal numbers; every group of another magnitude, from far below the floors to saturation; ties of both code tables; zeros."""
    kv = draw(6, 512)
    kv[1] *= torch.logspace(-7, 3, 512).bfloat16()
    kv[2] = torch.tensor(
        [448.0, 7.5, 0.25, -0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 6.0, 17.0, -19.0, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0]
    ).repeat(32)
    kv[3] = 0
    kv[3, ::3] = -0.0
    kv[4] = torch.tensor([2.0, 0.25, -0.75, 6.0, 0.1, 3.5, 5.0, -2.5]).repeat(64)
    kv[5] = 0
    kv[5, ::64] = torch.tensor([1e-4, -0.0547, 896.0, 1e5, -2688.0, 3000.0, 1e-30, 0.5])
    return kv


def same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "kv_cache.safetensors")


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_page(name, size):
    kv = hard_rows()
    slots = [5, 0, 3, 1, 7, 4]
    pages = noise(-(-8 // size), page_bytes(name, size) + 5)
    expected = [bytearray(row.tolist()) for row in pages]
    for row, slot in zip(kv, slots, strict=True):
        write(expected, name, size, slot, record(row, name))
    stored = kv_cache.store_kv(kv, pages, torch.tensor(slots), layout=name, page_size=size)
    assert stored.tolist() == [list(page) for page in expected]
    records = kv_cache.quantize_kv(kv, layout=name)
    assert records.tolist() == [list(b"".join(record(row, name))) for row in kv]
    assert torch.equal(kv_cache.store_kv(records, pages, torch.tensor(slots), layout=name, page_size=size), stored)


@pytest.mark.parametrize(
    ("name", "size", "stride"),
    [
        ("v4", 256, 149760), ("v4", 64, 37440), ("v4", 2, 1728), ("v41", 256, 135168), ("v41", 128, 67584), ("v41", 64, 33792),
        ("v41_fp4", 256, 73728), ("v41_fp4", 128, 36864), ("v41_fp4", 64, 18432), ("v41_inline", 64, 528 * 64), ("v41_fp4_inline", 3, 864),
        ("uniform_fp8", 64, 32768),
    ],
)  # fmt: skip
def test_page_strides(name, size, stride):
    assert explain_layout(name, page_size=size).page_bytes == stride
    assert page_bytes(name, size) == stride
    converted = kv_cache.convert_layout(noise(1, stride), source=name, target=name, page_size=size, target_page_size=size)
    assert converted.shape == (1, stride)
    short = torch.zeros(1, size * (TABLE[name][3] + TABLE[name][4]) - 1, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="pages: got shape"):
        kv_cache.load_kv(short, torch.zeros(1, dtype=torch.int64), layout=name, page_size=size)


def test_slot_70_of_v4():
    pages = torch.zeros(2, 37440, dtype=torch.uint8)
    stored = kv_cache.store_kv(torch.full((1, 512), 3.0).bfloat16(), pages, torch.tensor([70]), layout="v4", page_size=64).flatten()
    assert stored.nonzero().flatten().tolist() == [
        *range(40896, 40896 + 448), *range(40896 + 448, 40896 + 576), *range(74352, 74359),
    ]  # fmt: skip
    assert stored[40896].item() == 0x7C  # 3 / 2^-7 = 384
    assert stored[40896 + 448 : 40896 + 450].tolist() == [0x40, 0x40]
    assert stored[74352:74360].tolist() == [120] * 7 + [0]
    explained = explain_layout("v4", page_size=64, token=70)
    assert (explained.page, explained.slot, explained.page_start, explained.page_bytes) == (1, 6, 37440, 37440)
    assert explained.page_start + explained.rows[0].start == 40896
    assert [explained.page_start + row.start for row in explained.rows if row.part == "scales"] == list(range(74352, 74359))


@pytest.mark.parametrize(
    ("amax", "floor", "byte"),
    [
        (0.0, "official", 105), (0.5, "official", 118), (1.0, "official", 119), (1.75, "official", 119), (3.5, "official", 120),
        (7.0, "official", 121), (448.0, "official", 127), (450.0, "official", 128), (0.0, "flashmla", 114), (0.0546875, "flashmla", 114),
        (0.055, "flashmla", 115), (1e-3, "official", 109), (1e-3, "flashmla", 114), (0.0, "none", 0), (0.0, "flashinfer", 0),
        (0.0, "sglang", 85),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["v4", "v41", "v41_inline"])
def test_scale_bytes_by_floor(name, amax, floor, byte):
    kv = torch.zeros(1, 512).bfloat16()
    kv[0, 5] = amax
    assert kv_cache.quantize_kv(kv, layout=name, amax_floor=floor)[0, TABLE[name][3]].item() == byte


ROUND_TRIPS = [
    ("v4.window", "v4"), ("v4.window.decode", "v4"), ("v4.compressed.4", "v4"), ("v4.compressed.128", "v4"), ("v4.compressed.8", "v4"),
    ("v41.window", "v41"), ("v41.window", "v41_inline"), ("v41.window.decode", "v41"), ("v41.compressed.2", "v41_fp4"),
    ("v41.compressed.1", "v41_fp4"), ("v41.compressed.1", "v41_fp4_inline"), ("v41.compressed.decode", "v41_fp4_inline"),
]  # fmt: skip


def through_pages(rows, name):
    size, slots = 16, torch.arange(len(rows)).flip(0)
    pages = kv_cache.store_kv(rows, noise(-(-len(rows) // size), page_bytes(name, size)), slots, layout=name, page_size=size)
    return kv_cache.load_kv(pages, slots, layout=name, page_size=size)


@pytest.mark.parametrize(("key", "name"), ROUND_TRIPS)
def test_published_rows_come_back(golden, key, name):
    same_bits(through_pages(golden[key], name), golden[key])


@pytest.mark.parametrize(
    ("source", "expected", "name"),
    [
        ("v4.normed", "v4.normed.window", "v4"),
        ("v41.normed", "v41.normed.window", "v41"),
        ("v41.latent.2", "v41.compressed.2", "v41_fp4"),
        ("v41.latent.1", "v41.compressed.1", "v41_fp4_inline"),
    ],
)
def test_published_rotation_and_quantiser(golden, source, expected, name):
    rows = golden[source]
    rotated = apply_rope(rows, golden[f"{source}.table"], torch.arange(len(rows)))
    same_bits(through_pages(rotated, name), golden[expected])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_of_equal_slots(name):
    kv = draw(6, 512)
    for dtype in (torch.int32, torch.int64):
        slots = torch.tensor([2, 0, 2, -1, 0, 2], dtype=dtype)
        stored = kv_cache.store_kv(kv, noise(1, page_bytes(name, 4)), slots, layout=name, page_size=4)
        alone = kv_cache.store_kv(kv[[5, 4]], noise(1, page_bytes(name, 4)), torch.tensor([2, 0]), layout=name, page_size=4)
        assert torch.equal(stored, alone)


@pytest.mark.parametrize("name", LAYOUTS)
def test_absent_slots(name):
    pages = torch.full((2, page_bytes(name, 3)), 0xFF, dtype=torch.uint8)  # NaN wherever it is read
    for dtype in (torch.int32, torch.int64):
        slots = torch.tensor([-1, 6, -7, 7, torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
        assert torch.equal(kv_cache.store_kv(draw(6, 512), pages, slots, layout=name, page_size=3), pages)
        loaded = kv_cache.load_kv(pages, slots.view(2, 3), layout=name, page_size=3)
        same_bits(loaded, torch.zeros(2, 3, 512).bfloat16())
    assert kv_cache.load_kv(pages, torch.tensor([5]), layout=name, page_size=3).isnan().all()
    none = kv_cache.load_kv(pages[:0], torch.tensor([-1, 0]), layout=name, page_size=3)
    same_bits(none, torch.zeros(2, 512).bfloat16())
    assert kv_cache.store_kv(draw(2, 512), pages[:0], torch.tensor([0, 1]), layout=name, page_size=3).shape == (0, pages.shape[1])
    assert kv_cache.load_kv(pages, torch.zeros(0, 4, dtype=torch.int64), layout=name, page_size=3).shape == (0, 4, 512)


def test_store_is_a_copy():
    pages, kv, slots = noise(2, page_bytes("v4", 4)), draw(2, 512), torch.tensor([1, 6])
    kept = pages.clone(), kv.clone(), slots.clone()
    stored = kv_cache.store_kv(kv, pages, slots, layout="v4", page_size=4)
    assert torch.equal(pages, kept[0])
    assert torch.equal(kv, kept[1])
    assert torch.equal(slots, kept[2])
    assert stored.data_ptr() != pages.data_ptr()
    assert not torch.equal(stored, pages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_kv_01_layers_of_one_pool_do_not_alias(name):
    width = page_bytes(name, 4)
    pool = torch.zeros(3, 2, width + 14, dtype=torch.uint8)
    views = [pool[layer, :, 7 : 7 + width] for layer in range(3)]
    assert [view.data_ptr() - views[0].data_ptr() for view in views] == [0, 2 * (width + 14), 4 * (width + 14)]
    slots = torch.tensor([5, 0, 3])
    rows = [torch.full((3, 512), 6.0 * (layer + 1)).bfloat16() for layer in range(3)]
    for view, kv in zip(views, rows, strict=True):
        view.copy_(kv_cache.store_kv(kv, view, slots, layout=name, page_size=4))
    for view, kv in zip(views, rows, strict=True):
        assert view.storage_offset() % 2 == 1
        same_bits(kv_cache.load_kv(view, slots, layout=name, page_size=4), kv)
    assert pool[:, :, :7].sum() + pool[:, :, 7 + width :].sum() == 0


def test_kv_03_codes_are_of_the_ocp_dialect():
    kv = torch.tensor([1.0, -0.0, 2.0, NAN]).bfloat16().repeat(1, 128)
    assert kv_cache.quantize_kv(kv, layout="uniform_fp8")[0, :4].tolist() == [0x38, 0x80, 0x40, 0x7F]
    pages = torch.tensor([0x38, 0x80, 0x40, 0x7F], dtype=torch.uint8).repeat(1, 128)
    loaded = kv_cache.load_kv(pages, torch.tensor([0]), layout="uniform_fp8", page_size=1)[0, :4]
    assert loaded[:3].tolist() == [1.0, 0.0, 2.0]
    assert loaded[1].signbit()
    assert loaded[3].isnan()
    with pytest.raises(ArgumentError, match="pages: got float8_e4m3fnuz; must be uint8"):
        kv_cache.load_kv(pages.view(torch.float8_e4m3fnuz), torch.tensor([0]), layout="uniform_fp8", page_size=1)


def test_kv_04_offsets_beyond_int32():
    slots = torch.tensor([0, -1, 63, 64, 4067200, 4067264], dtype=torch.int32)
    page, byte = kv_cache._places(slots[[0, 2, 3, 4, 5]], kv_cache.kv_checks.layout("v41"), 64)
    assert page.dtype == byte.dtype == torch.int64
    assert (page[:, 0] * 33792 + byte[:, 0]).tolist() == [0, 63 * 512, 33792, 2_147_481_600, 2_147_515_392]
    one = kv_cache.store_kv(draw(1, 512), noise(1, 33792), torch.tensor([0]), layout="v41", page_size=64)
    many = one.expand(63552, -1)  # as many pages, all of them the same bytes
    loaded = kv_cache.load_kv(many, slots, layout="v41", page_size=64)
    same_bits(loaded[4:], loaded[0].expand(2, -1))
    assert loaded[0].any()
    assert not loaded[1].any()
    canary = noise(33792 + 100)
    stored = kv_cache.store_kv(draw(6, 512), canary[100:].view(1, -1), torch.full((6,), -1), layout="v41", page_size=64)
    assert torch.equal(stored[0], canary[100:])


def test_kv_05_every_code_decodes_and_rows_are_not_rounded_twice():
    table = [float(x) for x in E4M3]
    pages = torch.arange(256, dtype=torch.uint8).repeat(1, 2)
    loaded = kv_cache.load_kv(pages, torch.tensor([0]), layout="uniform_fp8", page_size=1)[0, :256]
    assert loaded[:127].tolist() == table
    assert loaded[128:255].tolist() == [-x for x in table]
    assert loaded[128].signbit()
    assert loaded[[127, 255]].isnan().all()
    ties = torch.tensor([1.0625, 17.0, 1.1875, 19.0]).bfloat16().repeat(1, 128)
    assert through_pages(ties, "uniform_fp8")[0, :4].tolist() == [1.0, 16.0, 1.25, 20.0]
    with pytest.raises(ArgumentError, match="kv: got float32; must be bf16"):
        kv_cache.quantize_kv(torch.zeros(1, 512), layout="uniform_fp8")
    with numerics("unrounded"):  # a row that was never bf16
        exact = torch.tensor([1.0625, 1.0625 + 2.0**-12, 17.0, 17.0 + 2.0**-8], dtype=torch.float64).repeat(1, 128)
        codes = kv_cache.quantize_kv(exact, layout="uniform_fp8")
    assert kv_cache.load_kv(codes, torch.tensor([0]), layout="uniform_fp8", page_size=1)[0, :4].tolist() == [1.0, 1.125, 16.0, 18.0]


def test_cp_08_a_window_that_was_never_written_is_not_read():
    """B hits A's prefix: with A's pages in its table it reads A's window; without, no row of the poisoned ring."""
    size, width, prefix = 64, page_bytes("v4", 64), 300
    pages = torch.full((16, width), 0xFF, dtype=torch.uint8)
    table = torch.tensor([[3, 9, 1, 7, 4], [3, 9, 1, 7, 4], [-1, -1, -1, -1, -1]], dtype=torch.int32)  # A, B with its prefix, B without
    window, kv = torch.arange(prefix - 128, prefix), draw(128, 512)

    def slots(request):
        return kv_cache.page_slots(table, torch.full((128,), request, dtype=torch.int32), window, page_size=size)

    pages = kv_cache.store_kv(kv, pages, slots(0), layout="v4", page_size=size)
    cold, hit, fresh = (kv_cache.load_kv(pages, slots(request), layout="v4", page_size=size) for request in range(3))
    same_bits(hit, cold)
    assert cold.isfinite().all()
    same_bits(fresh, torch.zeros_like(cold))


@pytest.mark.parametrize(
    ("source", "target"), [("v41", "v41_inline"), ("v41_fp4", "v41_fp4_inline"), ("v4", "v4"), ("uniform_fp8", "uniform_fp8")]
)
def test_records_move_byte_for_byte(source, target):
    pages = noise(3, page_bytes(source, 4) + 3)
    moved = kv_cache.convert_layout(pages, source=source, target=target, page_size=4, target_page_size=5)
    assert moved.shape == (3, page_bytes(target, 5))
    expected = [bytearray(page_bytes(target, 5)) for _ in range(3)]
    data, scales, inline = TABLE[source][3:6]
    for slot in range(12):
        page, i = pages[slot // 4].tolist(), slot % 4
        first, second = (i * (data + scales), i * (data + scales) + data) if inline else (i * data, 4 * data + i * scales)
        write(expected, target, 5, slot, (bytes(page[first : first + data]), bytes(page[second : second + scales])))
    assert moved.tolist() == [list(page) for page in expected]
    back = kv_cache.convert_layout(moved, source=target, target=source, page_size=5, target_page_size=4)
    again = kv_cache.convert_layout(back, source=source, target=target, page_size=4, target_page_size=5)
    assert torch.equal(again[:2], moved[:2])


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_conversion_reads_and_stores(source, target):
    kv, slots = hard_rows().clamp(-400, 400), torch.tensor([4, 0, 5, 2, 1, 3])
    pages = kv_cache.store_kv(kv, torch.zeros(2, page_bytes(source, 3), dtype=torch.uint8), slots, layout=source, page_size=3)
    converted = kv_cache.convert_layout(pages, source=source, target=target, page_size=3, target_page_size=4)
    read = kv_cache.load_kv(pages, slots, layout=source, page_size=3)
    stored = kv_cache.load_kv(converted, slots, layout=target, page_size=4)
    numbers = {"v41_inline": "v41", "v41_fp4_inline": "v41_fp4"}
    same_bits(stored, read if numbers.get(source, source) == numbers.get(target, target) else through_pages(read, target))
    assert kv_cache.convert_layout(pages[:0], source=source, target=target, page_size=3).shape == (0, page_bytes(target, 3))


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_specials(special):
    kv = torch.full((1, 512), 3.0).bfloat16()
    kv[0, 33] = special
    for name, byte, code in (("v4", 255, 0x7F), ("v41", 255, 0x7F), ("v41_fp4", 0x7F, 0)):
        group, data = TABLE[name][1], TABLE[name][3]
        records = kv_cache.quantize_kv(kv, layout=name)[0]
        width = group // 2 if "fp4" in name else group
        bad = 33 // group
        assert records[bad * width : (bad + 1) * width].tolist() == [code] * width
        assert records[data + bad].item() == byte
        loaded = through_pages(kv, name)[0]
        assert loaded[bad * group : (bad + 1) * group].isnan().all()
        assert loaded[: bad * group].eq(3).all()
        assert loaded[(bad + 1) * group :].eq(3).all()
    uniform = through_pages(kv, "uniform_fp8")[0]
    assert uniform[33].isnan() if special != special else uniform[33] == (448 if special > 0 else -448)
    kv[0, 33], kv[0, 500] = 3, special
    record_of_rope = kv_cache.quantize_kv(kv, layout="v4")[0]
    assert record_of_rope[448 + 2 * 52 : 448 + 2 * 53].tolist() == kv[:, 500:501].view(torch.uint8)[0].tolist()
    assert record_of_rope[576:].tolist() == [120] * 7 + [0]


def test_scale_bytes_at_both_ends():
    record = torch.zeros(1, 528, dtype=torch.uint8)
    record[0, :64] = 0x38  # 1
    record[0, 512:514] = torch.tensor([0, 255], dtype=torch.uint8)
    loaded = kv_cache.load_kv(record, torch.tensor([0]), layout="v41", page_size=1)[0]
    assert loaded[:32].tolist() == [2.0**-127] * 32
    assert loaded[32:64].isnan().all()


def test_a_row_without_gradient():
    kv = draw(2, 512).requires_grad_()
    pages = torch.zeros(1, page_bytes("v4", 2), dtype=torch.uint8)
    stored = kv_cache.store_kv(kv, pages, torch.tensor([0, 1]), layout="v4", page_size=2)
    assert torch.equal(stored, kv_cache.store_kv(kv.detach(), pages, torch.tensor([0, 1]), layout="v4", page_size=2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_into_the_cache(name):
    kv, weight, table = draw(5, 512), draw(512, seed=1), torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    positions, slots = torch.tensor([0, 8, 3, -1, 9]), torch.tensor([3, 1, -1, 0, 4], dtype=torch.int32)
    pages = noise(2, page_bytes(name, 4))
    stored = kv_cache.norm_rope_store_kv(kv, weight, table, positions, pages, slots, eps=1e-6, layout=name, page_size=4)
    rows = apply_rope(rms_norm(kv, weight, eps=1e-6), table, positions)
    assert torch.equal(stored, kv_cache.store_kv(rows, pages, slots, layout=name, page_size=4))
    same_bits(kv_cache.load_kv(stored, torch.tensor([0, 4]), layout=name, page_size=4), torch.zeros(2, 512).bfloat16())
    for mode in ("unrounded", "unquantised"):
        with numerics(mode):
            other = kv_cache.norm_rope_store_kv(kv, weight, table, positions, pages, slots, eps=1e-6, layout=name, page_size=4)
        there = kv_cache.load_kv(other, slots, layout=name, page_size=4).float()
        step = 1 / 3 if "fp4" in name else 2.0**-3  # a code or two of the largest, in a group whose largest is at most 8
        assert ((there - kv_cache.load_kv(stored, slots, layout=name, page_size=4).float()).abs() <= 8 * step).all()


def test_page_slots():
    table = torch.tensor([[7, -1, 2], [0, 2**31 - 1, -5]], dtype=torch.int32)
    rows = [
        (0, 0, 448), (0, 63, 511), (0, 64, -1), (0, 128, 128), (0, 191, 191), (0, 192, -1), (0, -1, -1), (1, 0, 0),
        (1, 64, (2**31 - 1) * 64),
        (1, 127, (2**31 - 1) * 64 + 63), (1, 128, -1), (2, 0, -1), (-1, 0, -1), (0, 2**62, -1), (0, -(2**62), -1), (2**31 - 1, 0, -1),
    ]  # fmt: skip
    requests, indices, slots = (list(column) for column in zip(*rows, strict=True))
    got = kv_cache.page_slots(table, torch.tensor(requests, dtype=torch.int32), torch.tensor(indices), page_size=64)
    assert got.dtype == torch.int64
    assert got.tolist() == slots
    few = torch.tensor(indices)[:9].to(torch.int32)
    assert kv_cache.page_slots(table, torch.tensor(requests[:9]), few, page_size=64).tolist() == slots[:9]
    empty = torch.zeros(0, dtype=torch.int64)
    assert kv_cache.page_slots(table, empty, empty, page_size=64).shape == (0,)
    assert kv_cache.page_slots(table[:, :0], torch.tensor([0]), torch.tensor([0]), page_size=64).tolist() == [-1]


PAGES, ROWS, SLOTS = torch.zeros(2, 2304, dtype=torch.uint8), torch.zeros(3, 512).bfloat16(), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "v5"}, "layout: got 'v5'; must be one of v4, v41"),
        ({"layout": ["v4"]}, "layout: got ['v4']"),
        ({"page_size": 0}, "page_size: got 0; must be at least 1"),
        ({"page_size": 4}, "pages: got shape [2, 2304]; a page of 4 slots of v4 needs 2336 bytes"),
        ({"page_size": 2.0}, "page_size: got 2.0, a float; must be a whole number"),
        ({"pages": PAGES.to(torch.int8)}, "pages: got int8; must be uint8"),
        ({"pages": PAGES[0]}, "pages: got shape [2304]; must have shape [pages, bytes]"),
        ({"pages": PAGES.T.contiguous().T}, "pages: got strides (1, 2); the bytes of a page must lie next to each other"),
        ({"pages": PAGES[:1].expand(2, -1)}, "pages: got strides (0, 1); must have a place of its own for each element"),
        ({"pages": PAGES.as_strided((2, 2000), (1, 1))}, "pages: got strides (1, 1); pages overlap in memory"),
        ({"kv": ROWS.float()}, "kv: got float32; must be uint8 or bf16"),
        ({"kv": ROWS.double()}, "kv: got float64; must be uint8 or bf16"),
        ({"kv": ROWS[:, :500]}, "kv: got shape [3, 500]; must have shape [tokens, 512]"),
        ({"kv": torch.zeros(3, 512, dtype=torch.uint8)}, "kv: got shape [3, 512]; must have shape [tokens, 584]"),
        ({"slots": SLOTS[:2]}, "slots: got shape [2]; must have shape [3]"),
        ({"slots": SLOTS.float()}, "slots: got float32; must be int32 or int64"),
        ({"amax_floor": "official_fp4"}, "amax_floor: got 'official_fp4'; with the layout v4 must be one of official, sglang"),
        ({"layout": "v41_fp4", "amax_floor": "none"}, "amax_floor: got 'none'; with the layout v41_fp4 must be one of official"),
        ({"layout": "uniform_fp8", "amax_floor": "flashmla"}, "amax_floor: got 'flashmla'; with the layout uniform_fp8"),
    ],
)
def test_store_refuses(changes, message):
    arguments = {"kv": ROWS, "pages": PAGES, "slots": SLOTS, "layout": "v4", "page_size": 3, **changes}
    with pytest.raises(ArgumentError) as raised:
        kv_cache.store_kv(**arguments)
    assert message in str(raised.value)


def test_the_others_refuse():
    weight, table, positions = torch.ones(512), torch.zeros(4, 64), torch.zeros(3, dtype=torch.int64)
    usual = {
        "kv": ROWS, "weight": weight, "table": table, "positions": positions, "pages": PAGES, "slots": SLOTS, "eps": 1e-6, "layout": "v4",
        "page_size": 3,
    }  # fmt: skip
    for changes, message in (
        ({"weight": weight[:500]}, "weight: got shape [500]"),
        ({"table": table[:, :63]}, "table: got shape [4, 63]"),
        ({"table": table[:0]}, "table: got shape [0, 64]"),
        ({"table": torch.zeros(4, 514)}, "table: got shape [4, 514]"),
        ({"positions": positions[:1]}, "positions: got shape [1]"),
        ({"eps": -1.0}, "eps: got -1.0; must be at least 0"),
        ({"eps": NAN}, "eps: got nan"),
        ({"kv": torch.zeros(3, 584, dtype=torch.uint8)}, "kv: got uint8; must be bf16"),
        ({"pages": PAGES[:1].expand(2, -1)}, "pages: got strides (0, 1)"),
    ):
        with pytest.raises(ArgumentError) as raised:
            kv_cache.norm_rope_store_kv(**{**usual, **changes})
        assert message in str(raised.value)
    with pytest.raises(ArgumentError, match="target_page_size: got 0"):
        kv_cache.convert_layout(PAGES, source="v4", target="v41", page_size=3, target_page_size=0)
    with pytest.raises(ArgumentError, match="target: got 'x'"):
        kv_cache.convert_layout(PAGES, source="v4", target="x", page_size=3)
    with pytest.raises(ArgumentError, match="source: got 'x'"):
        kv_cache.convert_layout(PAGES, source="x", target="v4", page_size=3)
    with pytest.raises(ArgumentError, match="indices: got shape"):
        kv_cache.page_slots(torch.zeros(1, 1, dtype=torch.int32), SLOTS, SLOTS[:1], page_size=64)
    with pytest.raises(ArgumentError, match="token: got -1"):
        explain_layout("v4", token=-1)
    kv_cache.load_kv(PAGES[:1].expand(2, -1), SLOTS, layout="v4", page_size=3)  # reading shared pages harms nobody


@pytest.mark.parametrize("token", [0, 5, 70])
@pytest.mark.parametrize("name", LAYOUTS)
def test_explanations(name, token):
    size = 7
    explained = explain_layout(name, page_size=size, token=token)
    quantised, group, code_bytes, data, scales, inline, _ = TABLE[name]
    i = token % size
    first, second = (i * (data + scales), i * (data + scales) + data) if inline else (i * data, size * data + i * scales)
    assert (explained.page, explained.slot, explained.page_start) == (token // size, i, token // size * page_bytes(name, size))
    assert (explained.page_padding.start, explained.page_padding.stop) == (size * (data + scales), page_bytes(name, size))
    width = code_bytes * group // quantised
    expected = [("codes", first + g * width, first + (g + 1) * width, (g * group, g * group + group), g) for g in range(quantised // group)]
    if name == "v4":
        expected.append(("bf16 rope", first + 448, first + 576, (448, 512), None))
    if scales:
        expected += [("scales", second + g, second + g + 1, (g * group, g * group + group), g) for g in range(quantised // group)]
    if name == "v4":
        expected.append(("padding", second + 7, second + 8, None, None))
    assert [tuple(row) for row in explained.rows] == expected
    places = sorted(byte for row in explained.rows for byte in range(row.start, row.stop))
    pages = torch.zeros(token // size + 1, page_bytes(name, size), dtype=torch.uint8)
    ones = torch.full((1, data + scales), 1, dtype=torch.uint8)
    stored = kv_cache.store_kv(ones, pages, torch.tensor([token]), layout=name, page_size=size)
    assert stored[-1].nonzero().flatten().tolist() == places
