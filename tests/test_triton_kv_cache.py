"""The KV cache's Triton kernels without a GPU: in the interpreter, in a process of its own, against the reference; and compiled for SM80
and SM90. On a GPU the first run there."""

from dataclasses import replace

import pytest
import torch

from dsv4.fast import dispatch, kv_bodies, kv_cache_ops
from dsv4.fast import kv_cache as fast
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import kv_cache as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import kv_cache, kv_records, kv_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
every_layout = pytest.mark.parametrize("layout", KV_LAYOUTS)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=163)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function in [name for name in dispatch.TABLES if name.startswith("kv_cache.")]:
        rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES[function])
        monkeypatch.setitem(dispatch.TABLES, function, rows)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def ints(least, past, *shape, seed=0, dtype=torch.int64):
    return torch.randint(least, past, shape, generator=generator(seed), dtype=dtype).to(DEVICE)


def rows_of(count, seed=0):
    """Rows of many magnitudes: ordinary, zero, minus zero, tiny, with a NaN, with an infinity, huge."""
    x = torch.randn(count, 512, generator=generator(seed)) * torch.exp2(ints(-20, 8, count, 1, seed=seed).cpu().float())
    for row, change in enumerate((1.0, 0.0, -0.0, 2.0**-120, torch.nan, torch.inf, 2.0**90)):
        x[row : row + 1, 17:300:5] *= change
    return x.bfloat16().to(DEVICE)


def pages_of(layout, pages, page_size, *, gap=0, offset=0):
    """Pages of random bytes, `gap` bytes apart, from the byte `offset` of their memory on; and all of that memory."""
    width = page_size * KV_LAYOUTS[layout].token_bytes
    memory = ints(0, 256, offset + pages * (width + gap), seed=9, dtype=torch.uint8)
    return memory.as_strided((pages, width), (width + gap, 1), offset), memory


def check_store(kv, layout, page_size, slots, *, pages=5, gap=0, offset=0, **options):
    """The bytes of the pages, and of everything around them."""
    before, memory = pages_of(layout, pages, page_size, gap=gap, offset=offset)
    around = torch.ones_like(memory, dtype=torch.bool)
    around.as_strided(before.shape, before.stride(), offset).fill_(False)
    expected = reference.store_kv(kv, before, slots, layout=layout, page_size=page_size, **options)
    kept = memory.clone()
    target = kept.as_strided(before.shape, before.stride(), offset)
    assert fast.store_kv(kv, target, slots, layout=layout, page_size=page_size, **options, impl="triton") is target
    assert torch.equal(target, expected)
    assert torch.equal(kept[around], memory[around])


def same_rows(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(*(torch.where(rows.isnan(), 0.0, rows).view(torch.int16) for rows in (got, expected)))


@kernel
@every_layout
def test_records(layout):
    kv = rows_of(9)
    floors = ("official", "flashmla", "none", "flashinfer") if KV_LAYOUTS[layout].scale == "ue8m0" else ("official",)
    for floor in floors:
        got = fast.quantize_kv(kv, layout=layout, amax_floor=floor, impl="triton")
        assert torch.equal(got, reference.quantize_kv(kv, layout=layout, amax_floor=floor))
    wide = rows_of(4).repeat(1, 3)
    for given in (wide[:, 100:612], wide[:, 101:613], wide[:, ::3][:, :512], kv[:0]):
        assert torch.equal(fast.quantize_kv(given, layout=layout, impl="triton"), reference.quantize_kv(given, layout=layout))


@kernel
@every_layout
@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_stores(layout, page_size):
    kv, total = rows_of(14), 5 * page_size
    slots = ints(-2, total + 2, 14)
    slots[5:9] = slots[0]
    check_store(kv, layout, page_size, slots, gap=16)
    check_store(kv, layout, page_size, slots.int(), gap=29, offset=13)
    check_store(reference.quantize_kv(kv, layout=layout), layout, page_size, slots, gap=29, offset=13)
    check_store(kv, layout, page_size, torch.full_like(slots, -1))
    check_store(kv[:0], layout, page_size, slots[:0])


@triton.jit
def answers(slots, last, result, rows, SEARCH: tl.constexpr, ROWS: tl.constexpr):
    """Which rows keep their slots."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    kept = (slot >= 0) & kv_rows.is_last(first, row, slot, slots, last, rows, SEARCH)
    tl.store(result + row, kept.to(tl.int32), mask=row < rows)


@kernel
@pytest.mark.parametrize("searched", [2048, 16])
@pytest.mark.parametrize("height", [1, 4])
def test_no_row_but_the_last_keeps_a_slot(searched, height, monkeypatch):
    """Whatever the order of programs: the interpreter runs them one after another, so that the pages would be right anyhow."""
    monkeypatch.setattr(kv_rows, "MOST_SEARCHED", searched)
    for slots in (ints(-3, 90, 300), torch.full((300,), 5, device=DEVICE), torch.arange(300, device=DEVICE) % 150):
        numbers = slots.tolist()
        expected = [int(slot >= 0 and slot not in numbers[row + 1 :]) for row, slot in enumerate(numbers)]
        last, result = kv_rows.last_rows(slots, 300), torch.empty(300, dtype=torch.int32, device=DEVICE)
        answers[(-(-300 // height),)](slots, slots if last is None else last, result, 300, SEARCH=last is None, ROWS=height)
        assert result.tolist() == expected


@kernel
@pytest.mark.parametrize("searched", [2048, 16])
def test_the_last_of_many_rows_wins(searched, monkeypatch):
    """Across programs and blocks, by search and by claim; absent slots claim nothing."""
    monkeypatch.setattr(kv_rows, "MOST_SEARCHED", searched)
    slots = ints(-3, 13, 150)
    assert (kv_rows.last_rows(slots, 10) is None) == (searched == 2048)
    records = ints(0, 256, 150, 288, dtype=torch.uint8)
    for given in (slots, slots.int(), torch.full_like(slots, 7), torch.full_like(slots, 10)):
        check_store(records, "v41_fp4", 2, given)
    check_store(rows_of(40), "uniform_fp8", 2, slots[:40])


@kernel
def test_up_to_2048_rows_look_for_themselves():
    for rows in (1, 2048, 2049, 65536):
        slots = torch.arange(rows, device=DEVICE) % 900
        last = kv_rows.last_rows(slots, 1000)
        if rows <= 2048:
            assert last is None
        else:
            whole, rest = divmod(rows, 900)
            assert last[:900].tolist() == [slot + 900 * (whole if slot < rest else whole - 1) for slot in range(900)]


@kernel
@pytest.mark.parametrize("rows", [2048, 2049])
def test_every_row_has_one_slot(rows):
    """By search and by claim; the rows next to the last one have another slot, or no slot at all."""
    records = ints(0, 256, rows, 512, dtype=torch.uint8)
    slots = torch.full((rows,), 7, device=DEVICE)
    check_store(records, "uniform_fp8", 2, slots)
    slots[-3:] = torch.tensor([9, 7, -1], device=DEVICE)
    check_store(records, "uniform_fp8", 2, slots)


SLOTS = {
    "any": lambda: ints(-3, 90, 300),
    "one": lambda: torch.full((300,), 5, device=DEVICE),
    "by turns": lambda: torch.arange(300, device=DEVICE) % 150,
    "one of two": lambda: torch.where(torch.arange(300, device=DEVICE) % 2 > 0, 7, torch.arange(300, device=DEVICE)),
    "absent": lambda: torch.full((300,), -1, device=DEVICE),
}


def scratches(slots, total, expected):
    """What may lie where the claims go: what no claim can be, rows of other slots, and each row of the slot itself."""
    rows = len(slots)
    for value in (-1, 0, rows - 1, rows, 2**31 - 1, -(2**31)):
        yield torch.full((total,), value, dtype=torch.int32, device=DEVICE)
    yield ints(-5, rows + 5, total, dtype=torch.int32)
    yield expected.roll(1)
    for nth in range(3):  # the first, second and third row of each slot, and the last ones in the end
        own = expected.clone()
        for slot in range(total):
            own[slot] = next(iter((slots == slot).nonzero().flatten()[nth:].tolist()), own[slot])
        yield own


@kernel
@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("tile", [(128, 4), (32, 1)])
def test_claims_do_not_believe_what_they_find(kind, tile, monkeypatch):
    """In memory that nobody cleared, whatever it holds, claims end as the last rows, and elements of other slots stay as they were."""
    monkeypatch.setattr(kv_rows, "CLAIM_TILE", tile)
    slots, total = SLOTS[kind](), 300
    expected = torch.full((total,), -1, dtype=torch.int32, device=DEVICE)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = row
    for given in (slots, slots.int()):
        for last in scratches(slots, total, expected):
            wanted = torch.where(expected >= 0, expected, last)
            kv_rows.claim(given, last)
            assert torch.equal(last, wanted)


@kernel
def test_claims_see_the_slots_that_there_are():
    slots = torch.tensor([3, 12, 3, 10, -7, 9, 12, 2**40], device=DEVICE)
    last = torch.tensor([6, 1, 6, 0, 6, 4, 7, 3, 4, 3], dtype=torch.int32, device=DEVICE)
    wanted = last.clone()
    wanted[3], wanted[9] = 2, 5
    kv_rows.claim(slots, last)
    assert torch.equal(last, wanted)


@kernel
def test_offsets_beyond_int32():
    """KV-04: pages of 33792 bytes, the last two begin before and behind byte 2^31. Memory that nobody touches takes none."""
    slots = torch.tensor([0, -1, 63, 64, 4067200, 4067264], device=DEVICE)
    pages, kv = torch.empty(63552, 33792, dtype=torch.uint8, device=DEVICE), rows_of(7)[:1].repeat(6, 1)
    fast.store_kv(kv, pages, slots, layout="v41", page_size=64, impl="triton")
    got = fast.load_kv(pages, slots, layout="v41", page_size=64, impl="triton")
    assert torch.equal(got, got[:1] * (slots >= 0)[:, None])
    assert torch.equal(pages[63551, :512], pages[0, :512])
    assert torch.equal(pages[63551, 64 * 512 : 64 * 512 + 16], reference.quantize_kv(kv[:1], layout="v41")[0, 512:])


@kernel
@every_layout
def test_loads(layout):
    for page_size, gap, offset in ((1, 0, 0), (64, 29, 13)):
        pages, _ = pages_of(layout, 3, page_size, gap=gap, offset=offset)
        slots = ints(-3, 3 * page_size + 3, 3, 5)
        for given in (slots, slots.int(), slots.t(), slots[0, 0], slots[:0]):
            expected = reference.load_kv(pages, given, layout=layout, page_size=page_size)
            same_rows(fast.load_kv(pages, given, layout=layout, page_size=page_size, impl="triton"), expected)


@kernel
def test_every_code_and_every_scale_byte_is_read():
    byte = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for layout in ("v41", "v41_fp4"):
        chosen = KV_LAYOUTS[layout]
        records = torch.cat([byte.repeat(256, 2)[:, : chosen.data_bytes], byte[:, None].repeat(1, chosen.scale_bytes)], 1)
        pages = kv_bodies.paged(records, chosen, 64)
        slots = torch.arange(256, device=DEVICE)
        same_rows(*(way(pages, slots, layout=layout, page_size=64, **at) for way, at in (
            (fast.load_kv, {"impl": "triton"}), (reference.load_kv, {}))))  # fmt: skip


@kernel
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("v41", "v41_inline"),
        ("v41_inline", "v41"),
        ("v41_fp4", "v41_fp4_inline"),
        ("v4", "v4"),
        ("uniform_fp8", "uniform_fp8"),
        ("v4", "v41_fp4"),
    ],
)
def test_conversions(source, target):
    for page_size, target_page_size in ((3, None), (2, 5), (6, 4)):
        pages = kv_bodies.paged(reference.quantize_kv(rows_of(12)[:, :] * 0.5, layout=source)[7:], KV_LAYOUTS[source], page_size)
        options = {"source": source, "target": target, "page_size": page_size, "target_page_size": target_page_size}
        assert torch.equal(fast.convert_layout(pages, **options, impl="triton"), reference.convert_layout(pages, **options))


@kernel
@pytest.mark.parametrize(("source", "target"), [("v4", "v41_fp4"), ("v41_fp4_inline", "uniform_fp8")])
def test_conversions_of_numbers_go_through_the_cache_in_chunks(source, target, monkeypatch):
    """Chunks of whole target pages, of one if it is larger; the last of them short."""
    monkeypatch.setattr(kv_cache_ops, "CONVERTED", 5)
    load, counts = kv_cache_ops._triton_load, []
    monkeypatch.setattr(kv_cache_ops, "_triton_load", lambda pages, slots, *more: counts.append(len(slots)) or load(pages, slots, *more))
    pages = kv_bodies.paged(reference.quantize_kv(rows_of(12) * 0.5, layout=source)[7:].repeat(3, 1)[:14], KV_LAYOUTS[source], 2)
    for size, expected in ((1, [5, 5, 4]), (2, [4, 4, 4, 2]), (6, [6, 6, 2]), (20, [14])):
        options = {"source": source, "target": target, "page_size": 2, "target_page_size": size}
        counts.clear()
        assert torch.equal(fast.convert_layout(pages, **options, impl="triton"), reference.convert_layout(pages, **options))
        assert counts == expected


@kernel
@every_layout
def test_norm_rotation_and_store_are_one_launch(layout):
    """The steps' own bytes, and the reference's."""
    kv, weight = rows_of(11).repeat(1, 2)[:, 256:768], rows_of(9)[8]
    kv[4:6] = 1.0
    table, positions = rope_table(rope_frequencies(1e4, device=DEVICE), 40), ints(-2, 43, 11)
    slots = torch.arange(10, -1, -1, device=DEVICE)
    at = {"layout": layout, "page_size": 2}
    wide = torch.cat([weight, weight]).float()
    for given in (weight, wide[512:], torch.cat([weight[:1], weight])[1:], torch.stack([wide[:512], wide[512:]], -1)[:, 0]):
        pages, _ = pages_of(layout, 6, 2)
        normed = (kv, given, table, positions)
        expected = reference.norm_rope_store_kv(*normed, pages, slots, eps=1e-6, **at)
        got = fast.norm_rope_store_kv(*normed, pages.clone(), slots, eps=1e-6, **at, impl="triton")
        assert torch.equal(got, expected)
        from dsv4.fast.kernels.norm_rope import run

        rotated = run(run(kv, weight=given, eps=1e-6, norm="fp32"), table=table, positions=positions)
        assert torch.equal(got, fast.store_kv(rotated, pages.clone(), slots, **at, impl="triton"))


@kernel
@every_layout
@pytest.mark.parametrize(
    ("gap", "offset", "expected"), [(16, 1, 1), (17, 16, 1), (18, 2, 2), (16, 4, 4), (20, 8, 4), (24, 16, 8), (32, 16, 16)]
)
def test_pages_of_every_alignment(layout, gap, offset, expected):
    """Nothing around the pages changes, and their bytes are those of the reference, whatever divides their addresses and distances."""
    chosen = KV_LAYOUTS[layout]
    page_size = 2 if chosen.token_bytes % 16 else 1  # so that the pages are no less aligned than their gaps
    pages, _ = pages_of(layout, 5, page_size, gap=gap, offset=offset)
    assert kv_rows.alignment(chosen, pages) == expected
    kv, slots = rows_of(9), torch.tensor([3, 4, 1, -1, 4, 0, 2, 99, 1], device=DEVICE)
    records = reference.quantize_kv(kv, layout=layout)
    check_store(kv, layout, page_size, slots, gap=gap, offset=offset)
    check_store(records, layout, page_size, slots, gap=gap, offset=offset)
    memory = torch.zeros(offset + 9 * (records.shape[1] + gap), dtype=torch.uint8, device=DEVICE)
    apart = memory.as_strided(records.shape, (records.shape[1] + gap, 1), offset).copy_(records)
    check_store(apart, layout, page_size, slots)
    same_rows(*(way(pages, slots, layout=layout, page_size=page_size, **at) for way, at in (
        (fast.load_kv, {"impl": "triton"}), (reference.load_kv, {}))))  # fmt: skip
    options = {"source": layout, "target": layout, "page_size": page_size, "target_page_size": 3}
    assert torch.equal(fast.convert_layout(pages, **options, impl="triton"), reference.convert_layout(pages, **options))


@kernel
@pytest.mark.parametrize(("gap", "offset"), [(1, 0), (0, 1), (2, 2), (4, 12), (0, 16)])
@pytest.mark.parametrize(("source", "target"), [("v41", "v41_inline"), ("v4", "v4"), ("v41_fp4_inline", "v41_fp4")])
def test_moves_write_every_byte(source, target, gap, offset):
    """Slots that the source has not and the ends of pages are zeroed, and nothing else is touched."""
    have, want = KV_LAYOUTS[source], KV_LAYOUTS[target]
    pages = kv_bodies.paged(reference.quantize_kv(rows_of(10) * 0.5, layout=source)[7:].repeat(3, 1)[:8], have, 2)
    for size in (1, 3, 5, 9):
        expected = reference.convert_layout(pages, source=source, target=target, page_size=2, target_page_size=size)
        count, width = expected.shape
        memory = ints(1, 256, offset + count * (width + gap) + 16, dtype=torch.uint8)
        kept = memory.clone()
        kv_cache.move(pages, memory.as_strided((count, width), (width + gap, 1), offset), have, want, 2, size)
        kept.as_strided((count, width), (width + gap, 1), offset).copy_(expected)
        assert torch.equal(memory, kept)


def normed_and_stored(layout, kv, weight, table, positions):
    """What the twins read back from one page of rows normed, rotated and stored."""
    pages, _ = pages_of(layout, 1, len(kv))
    given = (kv, weight, table, positions, pages, torch.arange(len(kv), device=DEVICE))
    at = {"layout": layout, "page_size": len(kv)}
    expected = reference.norm_rope_store_kv(*given, eps=1e-6, **at)
    got = fast.norm_rope_store_kv(*given[:4], pages.clone(), given[5], eps=1e-6, **at, impl="triton")
    same_rows(*(reference.load_kv(each, given[5], **at) for each in (got, expected)))
    return got, expected


@kernel
@every_layout
@pytest.mark.parametrize("rotated", [2, 32, 96, 128, 448, 512])
def test_tables_of_every_width(layout, rotated):
    kv, weight, positions = rows_of(7, seed=3), rows_of(9)[8], ints(-2, 43, 7)
    kv[4:6] = 1.0
    table = rope_table(rope_frequencies(1e4, rotated, device=DEVICE), 40)
    assert table.shape[1] == rotated
    assert torch.equal(*normed_and_stored(layout, kv, weight, table, positions))


@kernel
@pytest.mark.parametrize("layout", ["v4", "v41_fp4", "uniform_fp8"])
def test_norms_at_the_edges_of_bf16(layout):
    """Rows and weights of the largest, least normal and least numbers there are, of both signs, and of no numbers."""
    edges = torch.tensor([torch.finfo(torch.bfloat16).max, 2.0**-126, 2.0**-133, 1.0, -0.0, -torch.finfo(torch.bfloat16).max, -(2.0**-133)])
    mixed = edges[ints(0, len(edges), 512).cpu()]
    rows = torch.stack([*(edge.repeat(512) for edge in edges), mixed, mixed.roll(1), mixed * 2.0**-60]).bfloat16().to(DEVICE)
    table, positions = rope_table(rope_frequencies(1e4, device=DEVICE), 40), ints(-2, 43, len(rows))
    for kind in (torch.bfloat16, torch.float32):
        for weight in (*rows[:3], rows[7], torch.where(rows[7] == 1, torch.nan, rows[3]), torch.where(rows[7] == 1, torch.inf, rows[3])):
            normed_and_stored(layout, rows, weight.to(kind), table, positions)


@kernel
def test_slots_of_entries():
    table = ints(-2, 50, 5, 14, dtype=torch.int32)
    requests, indices = ints(-1, 6, 700, dtype=torch.int32), ints(-5, 130, 700)
    for given in (table[:, :7], table[:, ::2], table.long()[:, 3:9], table[:0], table[:, :0]):
        for page_size in (1, 2, 16):
            for numbers in ((requests, indices), (requests.long(), indices.int()), (requests[:0], indices[:0])):
                expected = reference.page_slots(given, *numbers, page_size=page_size)
                assert torch.equal(fast.page_slots(given, *numbers, page_size=page_size, impl="triton"), expected)


def ptx(function, capability, types, constants):
    """A kernel's text for a capability, on the way to a whole binary."""
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, places)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])


TYPES = {
    "kv": "*i32", "weight": "*i32", "table": "*fp32", "positions": "*i64", "pages": "*u8", "slots": "*i64", "last": "*i32", "eps": "fp32",
    "records": "*u8", "source": "*u8", "target": "*u8", "result": "*i16", "block_table": "*i32", "requests": "*i32", "indices": "*i64",
}  # fmt: skip


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["v4", "v41_fp4_inline", "uniform_fp8"])
def test_kernels_of_rows_compile_and_leave_e4m3_alone_where_there_is_none(layout, capability):
    native = capability >= 89
    chosen = KV_LAYOUTS[layout]
    options = kv_rows.layout_options(chosen, 64) | {"ROWS": 4, "NATIVE": native, "ALIGN": 16}
    storing = options | {"ZEROES": False, "SLOTS": True, "WARPS": 4}
    plain = storing | {"ROTATED": 0, "TAIL": 0, "SEARCH": False, "EARLY": native}
    normed = storing | {"ROTATED": 64, "TAIL": kv_cache.tail_of(chosen, 64), "SEARCH": True, "EARLY": False}
    texts = [
        ptx(kv_cache.store_kernel, capability, TYPES, normed),
        ptx(kv_cache.store_kernel, capability, TYPES | {"weight": "*i64"}, normed),
        ptx(kv_cache.store_kernel, capability, TYPES | {"total": "i64"}, plain),
        ptx(kv_cache.load_kernel, capability, TYPES, options),
    ]
    for text in texts:
        assert ("e4m3x2" in text) == native
        # Subnormal numbers count. No sum of squares is one, and no scale.
        assert ".ftz" not in text.replace("rsqrt.approx.ftz.f64", "").replace("rcp.approx.ftz.f32", "")


@compiled
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_records_compile(capability):
    layout, pages = KV_LAYOUTS["v4"], torch.empty(2, 37440, dtype=torch.uint8)
    sizes = kv_records._tiles((pages, layout, 64), (pages, layout, 64)) | {"ROWS": 4}
    early = capability >= 90
    ptx(kv_records.records_kernel, capability, TYPES, sizes | {"PAGE": 64, "INLINE": False, "SEARCH": not early, "EARLY": early})
    pages = {"SOURCE_PAGE": 256, "TARGET_PAGE": 64, "SOURCE_INLINE": False, "TARGET_INLINE": True}
    ptx(kv_records.move_kernel, capability, TYPES, sizes | pages | {"PAD": 64, "PADS": 64, "PAD_ALIGN": 16})
    ptx(kv_cache.page_slots_kernel, capability, TYPES, {"PAGE": 64, "ROWS": 256})
    ptx(kv_rows.claim_kernel, capability, TYPES, {"EARLY": early, "ROWS": 128})
