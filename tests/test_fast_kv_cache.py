"""Fast KV cache: the reference byte for byte on every way, then pages that begin anywhere, duplicates, operators, graphs, errors."""

import inspect

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import compiled, dispatch, kv_bodies, norms, rotary, use
from dsv4.fast import kv_cache as fast
from dsv4.formats import AMAX_FLOORS, KV_LAYOUTS
from dsv4.reference import kv_cache as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, BackendUnavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("triton", "inductor", "eager") if DEVICE == "cuda" else ("inductor", "eager")
SIZES = (1, 2, 64, 256)
every_layout = pytest.mark.parametrize("layout", KV_LAYOUTS)
every_way = pytest.mark.parametrize("impl", WAYS)


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


def memory_of(layout, pages, page_size, *, gap=0, offset=0, seed=9):
    """Random bytes for pages `gap` bytes apart, from the byte `offset` on, and how to see the pages in them."""
    width = page_size * KV_LAYOUTS[layout].token_bytes
    memory = ints(0, 256, offset + pages * (width + gap), seed=seed, dtype=torch.uint8)
    return memory, lambda bytes: bytes.as_strided((pages, width), (width + gap, 1), offset)


def check_store(kv, layout, page_size, slots, impl, *, pages=5, gap=0, offset=0, **options):
    """The bytes of the pages, and of everything around them."""
    memory, seen = memory_of(layout, pages, page_size, gap=gap, offset=offset)
    options |= {"layout": layout, "page_size": page_size}
    kept = memory.clone()
    target = seen(kept)
    assert fast.store_kv(kv, target, slots, **options, impl=impl) is target
    expected = memory.clone()
    seen(expected).copy_(reference.store_kv(kv, seen(memory), slots, **options))
    assert torch.equal(kept, expected)


def same_rows(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(*(torch.where(rows.isnan(), 0.0, rows).view(torch.int16) for rows in (got, expected)))


# Literals


@every_way
def test_a_page_of_v4_by_literals(impl):
    """Spec A 12: P = 64, slot 70: the page begins at byte 37440, its data at 40896, its scales at 74352."""
    pages = torch.full((2, 37440), 7, dtype=torch.uint8, device=DEVICE)
    row = torch.cat([torch.full((448,), 448.0), torch.full((64,), 1.5)]).bfloat16().to(DEVICE)
    fast.store_kv(row[None], pages, torch.tensor([70], device=DEVICE), layout="v4", page_size=64, impl=impl)
    flat = pages.flatten()
    assert flat[40896:41344].tolist() == [0x7E] * 448
    assert flat[41344:41472].tolist() == [0xC0, 0x3F] * 64
    assert flat[74352:74360].tolist() == [127] * 7 + [0]
    assert int((flat != 7).sum()) == 584


@every_way
def test_layers_of_one_pool_do_not_write_into_each_other(impl):
    """KV-01: views of a layer keep the offset of the layer."""
    pool = torch.zeros(3, 2, 4 * 528, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(8, device=DEVICE)
    for layer in range(3):
        row = torch.full((8, 512), layer + 1.0, dtype=torch.bfloat16, device=DEVICE)
        fast.store_kv(row, pool[layer], slots, layout="v41", page_size=4, impl=impl)
    for layer in range(3):
        assert (fast.load_kv(pool[layer], slots, layout="v41", page_size=4, impl=impl) == layer + 1).all()


@every_way
def test_offsets_beyond_int32(impl):
    """KV-04: pages of 33792 bytes, the last two begin before and behind byte 2^31. Memory that nobody touches takes none."""
    slots = torch.tensor([0, -1, 63, 64, 4067200, 4067264], device=DEVICE)
    pages = torch.empty(63552, 33792, dtype=torch.uint8, device=DEVICE)
    kv = rows_of(8)[7:].repeat(6, 1)
    fast.store_kv(kv, pages, slots, layout="v41", page_size=64, impl=impl)
    got = fast.load_kv(pages, slots, layout="v41", page_size=64, impl=impl)
    record = reference.quantize_kv(kv[:1], layout="v41")[0]
    for page in (0, 1, 63550, 63551):
        assert torch.equal(pages[page, :512], record[:512])
        assert torch.equal(pages[page, 64 * 512 : 64 * 512 + 16], record[512:])
    assert not got[1].any()
    assert all(torch.equal(got[row], got[0]) for row in (2, 3, 4, 5))


@every_way
def test_slots_of_entries_by_literals(impl):
    table = torch.tensor([[5, 2, -1], [0, 7, 3]], dtype=torch.int32, device=DEVICE)
    requests = torch.tensor([0, 0, 0, 0, 1, 1, -1, 2, 1, 1], dtype=torch.int32, device=DEVICE)
    indices = torch.tensor([0, 5, 7, 8, 11, 12, 0, 0, -1, 2**40], device=DEVICE)
    got = fast.page_slots(table, requests, indices, page_size=4, impl=impl)
    assert got.tolist() == [20, 9, 11, -1, 15, -1, -1, -1, -1, -1]


# The reference, byte for byte


@every_layout
@every_way
def test_records(layout, impl):
    kv = rows_of(200)
    ue8m0 = KV_LAYOUTS[layout].scale == "ue8m0"
    for floor in [floor.name for floor in AMAX_FLOORS.values() if floor.least_byte_fp8 is not None] if ue8m0 else ["official"]:
        got = fast.quantize_kv(kv, layout=layout, amax_floor=floor, impl=impl)
        assert torch.equal(got, reference.quantize_kv(kv, layout=layout, amax_floor=floor))
    for given in (kv[:0], kv[:1], rows_of(9).repeat(1, 3)[:, 101:613], rows_of(9).repeat(1, 3)[:, ::3]):
        assert torch.equal(fast.quantize_kv(given, layout=layout, impl=impl), reference.quantize_kv(given, layout=layout))


@every_layout
@every_way
@pytest.mark.parametrize("page_size", SIZES)
def test_stores(layout, impl, page_size):
    """Rows and records; slots with duplicates, -1, and beyond the cache; pages that begin at odd bytes and lie apart."""
    kv, total = rows_of(40), 5 * page_size
    slots = ints(-3, total + 3, 40)
    slots[10:14] = slots[3]
    records = reference.quantize_kv(kv, layout=layout)
    for gap, offset in ((0, 0), (8, 16), (29, 13), (4, 0)):
        for given in (kv, records):
            check_store(given, layout, page_size, slots, impl, gap=gap, offset=offset)
    for numbers in (slots.int(), torch.full_like(slots, -1), torch.full_like(slots, total), torch.full_like(slots, total - 1)):
        check_store(kv, layout, page_size, numbers, impl)
    check_store(rows_of(80)[::2], layout, page_size, ints(0, total, 80, seed=1)[::2], impl, pages=6)
    check_store(records.repeat(1, 2)[:, 3 : 3 + records.shape[1]], layout, page_size, slots, impl)
    for count in (0, 1):
        check_store(kv[:count], layout, page_size, slots[:count], impl)
    empty = torch.empty(0, page_size * KV_LAYOUTS[layout].token_bytes, dtype=torch.uint8, device=DEVICE)
    assert fast.store_kv(kv, empty, slots, layout=layout, page_size=page_size, impl=impl) is empty


@every_layout
@every_way
@pytest.mark.parametrize("page_size", SIZES)
def test_loads(layout, impl, page_size):
    """Random bytes: NaN codes and scales among them."""
    for gap, offset in ((0, 0), (8, 16), (29, 13)):
        memory, seen = memory_of(layout, 3, page_size, gap=gap, offset=offset)
        slots = ints(-3, 3 * page_size + 3, 7, 5)
        for given in (slots, slots.int(), slots.t(), slots[0, 0], slots[:0], torch.full_like(slots, -1)):
            expected = reference.load_kv(seen(memory), given, layout=layout, page_size=page_size)
            same_rows(fast.load_kv(seen(memory), given, layout=layout, page_size=page_size, impl=impl), expected)
    nothing = torch.empty(0, page_size * KV_LAYOUTS[layout].token_bytes, dtype=torch.uint8, device=DEVICE)
    assert not fast.load_kv(nothing, slots, layout=layout, page_size=page_size, impl=impl).any()


@pytest.mark.parametrize("layout", ["v4", "v41_fp4_inline"])
@pytest.mark.parametrize("page_size", SIZES)
def test_rows_of_a_slot_are_told_apart_without_looking_at_the_device(layout, page_size):
    """What inductor and eager do on a GPU: as many writes as rows, and equal ones where they meet."""
    chosen, kv, total = KV_LAYOUTS[layout], rows_of(40), 5 * page_size
    records = reference.quantize_kv(kv, layout=layout)
    memory, seen = memory_of(layout, 5, page_size)
    pages = seen(memory)
    slots = ints(-3, total + 3, 40)
    for given in (slots, slots.int(), torch.full_like(slots, -1), torch.full_like(slots, total - 1), slots.sort().values):
        written, places = kv_bodies._by_sorting(records, pages, given, total, chosen, page_size)
        assert len(written) == len(places) == 40
        for order in (torch.arange(40), torch.arange(39, -1, -1)):
            got = pages.clone()
            for row in order.tolist():
                page, inner = divmod(int(places[row]), page_size)
                for view, first, past in kv_bodies.parts(got, chosen, page_size):
                    view[page, inner] = written[row, first:past]
            assert torch.equal(got, reference.store_kv(records, pages, given, layout=layout, page_size=page_size))


@pytest.mark.parametrize("source", KV_LAYOUTS)
@every_way
def test_conversions(source, impl):
    """Between all layouts and page sizes: moves byte for byte, others through bf16."""
    rows = rows_of(12 * 8 + 7)[7:]
    for page_size, target_page_size, gap in ((4, None, 8), (6, 4, 5), (2, 64, 0), (64, 1, 0)):
        pages = len(rows) // page_size + 1
        memory, seen = memory_of(source, pages, page_size, gap=gap, offset=gap)
        slots = torch.arange(pages * page_size, device=DEVICE)
        stored = reference.store_kv(rows[slots % len(rows)], seen(memory), slots, layout=source, page_size=page_size)
        for target in KV_LAYOUTS:
            options = {"source": source, "target": target, "page_size": page_size, "target_page_size": target_page_size}
            expected = reference.convert_layout(stored, **options)
            assert torch.equal(fast.convert_layout(stored, **options, impl=impl), expected)
        assert torch.equal(fast.convert_layout(stored[:0], **options, impl=impl), expected[:0])


@every_layout
@every_way
def test_norm_rotation_and_store(layout, impl):
    """The three steps of the same way, byte for byte, and the reference's bytes."""
    table, count = rope_table(rope_frequencies(1e4, device=DEVICE), 100), 300
    wide = torch.randn(count, 1024, generator=generator(0)).bfloat16().to(DEVICE)
    eps = 1e-6
    for kv in (wide[:, 300:812], wide[:1, 512:]):
        positions, slots = ints(-3, 103, len(kv)), ints(-9, 4 * 64 + 9, len(kv))
        given = [(wide[0, :512], positions), (wide[0, :512].float(), positions.int())]
        for weight, numbers in given if layout == "v4" else given[:1]:
            pages, at = memory_of(layout, 4, 64)[0].view(4, -1), {"layout": layout, "page_size": 64}
            got = fast.norm_rope_store_kv(kv, weight, table, numbers, kept := pages.clone(), slots, eps=eps, **at, impl=impl)
            assert got is kept
            rotated = rotary.apply_rope(norms.rms_norm(kv, weight, eps=eps, impl=impl), table, numbers, impl=impl)
            assert torch.equal(got, fast.store_kv(rotated, pages.clone(), slots, **at, impl=impl))
            assert torch.equal(got, reference.norm_rope_store_kv(kv, weight, table, numbers, pages, slots, eps=eps, **at))
    before = pages.clone()
    fast.norm_rope_store_kv(kv[:0], weight, table, numbers[:0], pages, slots[:0], eps=eps, **at, impl=impl)
    assert torch.equal(pages, before)


@every_way
def test_slots_of_entries(impl):
    table = ints(-2, 50, 10, 7, dtype=torch.int32)
    requests, indices = ints(-1, 6, 700, dtype=torch.int32), ints(-5, 130, 700)
    narrow = requests[:9], indices[:9]
    for given, page_size, numbers in (
        *((table[::2], size, (requests, indices)) for size in (2, 16)),
        (table.long()[:5], 2, (requests.long(), indices.int())),
        *((few, 2, narrow) for few in (table[:0], table[:, :0], table[:1])),
        *((table, 2, (requests[:count], indices[:count])) for count in (0, 1)),
    ):
        expected = reference.page_slots(given, *numbers, page_size=page_size)
        got = fast.page_slots(given, *numbers, page_size=page_size, impl=impl)
        assert got.dtype == torch.int64
        assert torch.equal(got, expected)


# Operators and graphs


def samples():
    pages = torch.zeros(3, 4 * 584, dtype=torch.uint8, device=DEVICE)  # NaN is not equal to itself
    kv, slots = rows_of(4), ints(-1, 12, 4)
    at = ("v4", 4)
    table = rope_table(rope_frequencies(1e4, device=DEVICE), 10)
    return {
        "quantize_kv": (kv, "v4", "official"),
        "store_kv": (kv, pages, slots, *at, "official"),
        "load_kv": (pages, slots, *at),
        "convert_layout": (pages, "v4", "v41_fp4", 4, 8),
        "norm_rope_store_kv": (kv, kv[0], table, ints(0, 10, 4), pages, slots, 1e-6, *at, "official"),
        "page_slots": (ints(0, 9, 3, 5, dtype=torch.int32), ints(0, 3, 4, dtype=torch.int32), ints(0, 20, 4), 4),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_chain_is_one_graph():
    """Store, load and conversion in one graph, in the caller's pages."""

    def step(kv, pages, table, requests, indices):
        slots = fast.page_slots(table, requests, indices, page_size=4, impl="eager")
        fast.store_kv(kv, pages, slots, layout="v41", page_size=4, impl="eager")
        moved = fast.convert_layout(pages, source="v41", target="v41_inline", page_size=4, impl="eager")
        return fast.load_kv(moved, slots, layout="v41_inline", page_size=4, impl="eager")

    pages = torch.zeros(8, 4 * 528, dtype=torch.uint8, device=DEVICE)
    given = rows_of(20)[8:], ints(0, 8, 3, 5, dtype=torch.int32), ints(0, 3, 12, dtype=torch.int32), ints(0, 20, 12)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(given[0], plain := pages.clone(), *given[1:])
    same_rows(traced(given[0], kept := pages.clone(), *given[1:]), expected)
    assert torch.equal(kept, plain)


def test_graphs_per_function():
    """One for any number of rows and pages, contiguous or not, in inference mode or out of it."""
    table = rope_table(rope_frequencies(1e4, device=DEVICE), 50)

    def run(name, count):
        kv, slots = rows_of(2 * count)[::2], ints(-1, 4 * count + 3, count)
        memory, seen = memory_of("v4", count + 1, 4, gap=count)
        at = {"layout": "v4", "page_size": 4, "impl": "inductor"}
        match name:
            case "quantize":
                fast.quantize_kv(kv, layout="v4", impl="inductor")
            case "load":
                fast.load_kv(seen(memory), slots, **at)
            case "fused":
                fast.norm_rope_store_kv(kv, kv[0], table[: count + 1], slots, seen(memory), slots, eps=1e-6, **at)
            case "slots":
                entries = ints(0, 9, count, 5, dtype=torch.int32)
                fast.page_slots(entries, entries[:, 0], slots, page_size=4, impl="inductor")

    for name in ("quantize", "load", "fused", "slots"):
        compiled._graph.cache_clear()
        torch._dynamo.reset()
        counters.clear()
        for count in (1, 2, 17, 40):
            run(name, count)
            with torch.inference_mode():
                run(name, count)
        assert 1 <= counters["stats"]["unique_graphs"] <= 2, name


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@every_way
def test_replays_follow_their_inputs(impl):
    """Rows and slots switched in place; duplicates and slots that do not exist among them."""
    kv, slots = rows_of(64), ints(-3, 260, 64)
    pages = torch.zeros(4, 64 * 584, dtype=torch.uint8, device=DEVICE)
    at = {"layout": "v4", "page_size": 64}
    fast.store_kv(kv, pages.clone(), slots, **at, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast.store_kv(kv, pages, slots, **at, impl=impl)
    for seed in range(4):
        kv.copy_(rows_of(64, seed=seed))
        slots.copy_(ints(-3, 260, 64, seed=seed) if seed else torch.full((64,), -1))
        expected = reference.store_kv(kv, pages, slots, **at)
        graph.replay()
        assert torch.equal(pages, expected)


# Errors


def test_gradients_are_refused():
    pages, slots = torch.zeros(1, 8 * 584, dtype=torch.uint8, device=DEVICE), ints(0, 8, 3)
    table = rope_table(rope_frequencies(1e4, device=DEVICE), 10)
    at = {"layout": "v4", "page_size": 8}
    for call in (
        lambda x: fast.quantize_kv(x, layout="v4"),
        lambda x: fast.store_kv(x, pages, slots, **at),
        lambda x: fast.norm_rope_store_kv(x, x.detach()[0], table, slots, pages, slots, eps=1e-6, **at),
        lambda x: fast.norm_rope_store_kv(x.detach(), x[0], table, slots, pages, slots, eps=1e-6, **at),
    ):
        x = rows_of(10)[7:].requires_grad_()
        with pytest.raises(ArgumentError, match="no backward"):
            call(x)
        with torch.no_grad():
            call(x)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("layout", {"layout": "v5"}),
        ("amax_floor", {"amax_floor": "official_fp4"}),
        ("page_size", {"page_size": 0}),
        ("pages", {"page_size": 9}),
        ("kv", {"kv": torch.zeros(3, 511, dtype=torch.bfloat16)}),
        ("kv", {"kv": torch.zeros(3, 512)}),
        ("kv", {"kv": torch.zeros(3, 583, dtype=torch.uint8)}),
        ("slots", {"slots": torch.zeros(4, dtype=torch.int64)}),
        ("slots", {"slots": torch.zeros(3)}),
        ("impl", {"impl": "flashmla"}),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(argument, change):
    pages = torch.zeros(1, 8 * 584, dtype=torch.uint8, device=DEVICE)
    good = {"kv": rows_of(3), "slots": ints(0, 8, 3), "layout": "v4", "page_size": 8, "amax_floor": "official"}
    given = good | {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ArgumentError) as caught:
        fast.store_kv(pages=pages, **given)
    assert caught.value.argument == argument
    assert not pages.any()


def test_pages_that_overlap_are_not_written_to():
    memory = torch.zeros(2 * 584, dtype=torch.uint8, device=DEVICE)
    for stride in (0, 100):
        overlapping = memory.as_strided((2, 584), (stride, 1))
        with pytest.raises(ArgumentError, match="pages"):
            fast.store_kv(rows_of(1), overlapping, ints(0, 1, 1), layout="v4", page_size=1)


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.quantize_kv(rows_of(3), layout="v4", impl="triton")


def test_every_way_keeps_what_may_be_demanded():
    for function, rows in dispatch.TABLES.items():
        if function.startswith("kv_cache."):
            assert all(row.deterministic and row.batch_invariant and row.graph_safe for row in rows)
    with use(batch_invariant=True, deterministic=True):
        fast.quantize_kv(rows_of(3), layout="v41")


@pytest.mark.parametrize("name", fast.__all__)
def test_signatures_equal_the_reference(name):
    ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (fast, reference))
    assert [parameter for key, parameter in ours.items() if key != "impl"] == list(theirs.values())
    assert set(fast.__all__) == set(reference.__all__)


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_records_that_lie_in_the_pages_are_read_before_they_are_written(backend: str) -> None:
    pages = torch.randint(0, 256, (2, 4 * 528), dtype=torch.uint8)
    slots, at = torch.tensor([3, 2, 1, 0]), {"layout": "v41_inline", "page_size": 4}
    expected = reference.store_kv(pages.view(-1).view(8, 528)[:4], pages, slots, **at)
    assert torch.equal(fast.store_kv(pages.view(-1).view(8, 528)[:4], pages, slots, **at, impl=backend), expected)
