"""Fast indexer: the reference on every way, cases from public bug reports, made-up libraries, operators, graphs, errors."""

import inspect
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import compiled, dispatch, use
from dsv4.fast import indexer as fast
from dsv4.fast.adapters import deepgemm, deepgemm_mqa, flashinfer
from dsv4.formats import INDEX_LAYOUTS
from dsv4.reference import indexer as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, BackendUnavailable, IndexKeys, IndexQueries, Unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("triton", "inductor", "eager") if DEVICE == "cuda" else ("inductor", "eager")
LOGIT_WAYS = ("triton", "eager") if DEVICE == "cuda" else ("eager",)
INF, NAN = float("inf"), float("nan")
FORMATS = tuple(INDEX_LAYOUTS)
every_way = pytest.mark.parametrize("impl", WAYS)
logit_ways = pytest.mark.parametrize("impl", LOGIT_WAYS)
each_format = pytest.mark.parametrize("format", FORMATS)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed)).bfloat16().to(DEVICE)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def drawn(least, past, *shape, seed=0, dtype=torch.int64):
    return torch.randint(least, past, shape, generator=generator(seed), dtype=dtype).to(DEVICE)


def rotary(dim, positions=4096):
    return rope_table(rope_frequencies(1e4, min(dim, 64), device=DEVICE), positions)


def coded(format, tokens, heads, entries, dim, *, seed=0, weight_dtype="fp32"):
    """Queries and keys of normal numbers, by the reference."""
    table = rotary(dim)
    at = torch.arange(max(tokens, entries), device=DEVICE)
    w = normal(tokens, heads, seed=seed + 1)
    queries = reference.index_queries(
        normal(tokens, heads, dim, seed=seed), w, table, at[:tokens], format=format, weight_dtype=weight_dtype
    )
    return queries, reference.index_keys(normal(entries, dim, seed=seed + 2), table, at[:entries], format=format)


def lattice(format, tokens, heads, entries, dim, seed=0):
    """Queries and keys whose logits are exact in fp32 in whatever order: small whole numbers, scales powers of two."""
    numbers = [drawn(-3, 4, *shape, dim, seed=seed + i) for i, shape in enumerate(((tokens, heads), (entries,)))]
    weights = drawn(-2, 3, tokens, heads, seed=seed + 2).float()
    powers = drawn(-1, 2, entries, seed=seed + 3)
    if format == "fp8":
        codes = [part.to(torch.float8_e4m3fn) for part in numbers]
        return IndexQueries(codes[0], None, weights), IndexKeys(codes[1], torch.exp2(powers.float()))
    code = ints(13, 12, 10, 0, 2, 4, 5, dtype=torch.uint8)  # of -3 to 3
    packed = [code[part + 3].view(*part.shape[:-1], -1, 2) for part in numbers]
    q, k = (part[..., 0] | (part[..., 1] << 4) for part in packed)
    words = (127 + powers).to(torch.int32) * 0x01010101
    return IndexQueries(q, torch.full((tokens, heads), 0x7F7F7F7F, dtype=torch.int32, device=DEVICE), weights), IndexKeys(k, words)


def same(got, expected):
    for left, right in zip(got, expected, strict=True):
        if right is None:
            assert left is None
            continue
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(left.isnan(), right.isnan())
            left, right = (torch.where(part.isnan(), 0.0, part) for part in (left, right))
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def close(got, expected):
    """Equal on the CPU; on a GPU, whose sums are fp32 and whose FP8 products have 14 bits, near, and -inf at the same places."""
    assert got.dtype == expected.dtype
    assert torch.equal(got == -INF, expected == -INF)
    if DEVICE == "cpu":
        assert torch.equal(got, expected)
    elif (expected > -INF).any():
        there, bits = expected > -INF, 7 if got.dtype == torch.bfloat16 else 9
        assert (got - expected)[there].abs().max() <= 2.0**-bits * expected[there].abs().max()


# Codes


@every_way
@each_format
@pytest.mark.parametrize("hadamard", [False, True])
def test_queries_and_keys(format, hadamard, impl):
    """All kinds of rows, positions that the table does not have, every floor, ties and sign, weights of both dtypes."""
    for heads, dim, seed in ((64, 128, 1),) if impl == "inductor" else ((3, 32, 0), (64, 128, 1), (1, 64, 2)):
        q = normal(9, heads, dim, seed=seed) * torch.exp2(drawn(-20, 8, 9, heads, 1, seed=seed).float()).bfloat16()
        q[0], q[1, 0, 3], q[2, 0, 1], q[3, 0, :32] = 0.0, NAN, INF, -(2.0**-130)
        positions = ints(0, 1, 2, 3, 77, -1, 4096, 4095, 9, dtype=torch.int64 if seed else torch.int32)
        w, table = normal(9, heads, seed=9), rotary(dim)
        kinds = (None, "even", "kept", "fp32"), ("flashmla", "toward_zero", "cleared", "bf16")
        for floor, ties, sign, dtype in kinds[:1] if impl == "inductor" and hadamard else kinds:
            options = {"format": format, "hadamard": hadamard, "amax_floor": floor, "ties": ties, "zero_sign": sign}
            kind = {"weight_dtype": dtype if format == "fp4" else "fp32"}
            expected = reference.index_queries(q, w, table, positions, **options, **kind)
            same(fast.index_queries(q, w, table, positions, **options, **kind, impl=impl), expected)
            x = q[:, 0]
            for weight in (None, normal(dim, seed=5).float()) if impl == "inductor" else (None, normal(dim), normal(dim).float()):
                norm = {"weight": weight, "eps": None if weight is None else 1e-20}
                expected = reference.index_keys(x, table, positions, **norm, **options)
                same(fast.index_keys(x, table, positions, **norm, **options, impl=impl), expected)


@every_way
def test_both_sides_are_transformed(impl):
    """IX-15: q = e0 against e0, e1 and (.6, .6, .6, .6) in one head scores 1, 0 and .6, transformed or not."""
    table, at = rotary(4, 1), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    q = torch.tensor([[[1.0, 0, 0, 0]]], device=DEVICE).bfloat16()
    x = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.6] * 4], device=DEVICE).bfloat16()
    w = torch.full((1, 1), 2.0, device=DEVICE).bfloat16()  # 2 / sqrt(4) = 1
    for hadamard in (False, True):
        options = {"format": "fp8", "hadamard": hadamard}
        queries = fast.index_queries(q, w, table, at[:1], **options, impl=impl)
        keys = fast.index_keys(x, table, at, **options, impl=impl)
        got = fast.index_logits(queries, keys, ends=ints(3))[0]
        assert (got - torch.tensor([1.0, 0.0, 0.6], device=DEVICE)).abs().max() < 2.0**-8


# Pages


@every_way
def test_pages_are_planar(impl):
    """IX-13: four slots of 8 numbers, 1 to 32, and scales 1, 2, 4, 8: token 1 is 9 to 16 with scale 2."""
    impl = "eager" if impl == "inductor" else impl
    codes = torch.arange(1.0, 33.0, device=DEVICE).to(torch.float8_e4m3fn).view(4, 8)
    keys = IndexKeys(codes, torch.tensor([1.0, 2.0, 4.0, 8.0], device=DEVICE))
    pages = torch.full((1, 48), 7, dtype=torch.uint8, device=DEVICE)
    at = {"format": "fp8", "page_size": 4}
    assert fast.store_index_keys(keys, pages, ints(0, 1, 2, 3), **at, impl=impl) is pages
    assert torch.equal(pages[0, :32], codes.view(torch.uint8).flatten())
    assert torch.equal(pages[0, 32:].view(torch.float32), keys.scales)
    same(fast.load_index_keys(pages, ints(3, 1, 2), **at, dim=8, impl=impl), (codes[[3, 1, 2]], keys.scales[[3, 1, 2]]))
    one = fast.load_index_keys(pages, ints(3), **at, dim=8, impl=impl)
    assert len({part.untyped_storage().data_ptr() for part in one}) == 2  # a record of its own is no memory of both


@each_format
@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_stores_and_loads(format, impl):
    """Any number of slots, gaps and offsets; of duplicates the last, of absent ones none; bytes of neighbours untouched."""
    for page_size, gap, offset, count in ((1, 0, 0, 5), (64, 0, 16, 200), (5, 3, 1, 30), (16, 4, 4, 3000)):
        _, keys = coded(format, 1, 1, count, 64)
        width = page_size * INDEX_LAYOUTS[format].token_bytes(64)
        memory = drawn(0, 256, offset + 7 * (width + gap), seed=3, dtype=torch.uint8)
        slots = drawn(-3, 7 * page_size + 9, count, seed=count, dtype=torch.int32 if gap else torch.int64)
        kept = memory.clone()
        pages, expected = (part.as_strided((7, width), (width + gap, 1), offset) for part in (kept, memory))
        at = {"format": format, "page_size": page_size}
        expected.copy_(reference.store_index_keys(keys, expected, slots, **at))
        fast.store_index_keys(keys, pages, slots, **at, impl=impl)
        assert torch.equal(kept, memory)
        same(fast.load_index_keys(pages, slots, **at, dim=64, impl=impl), reference.load_index_keys(expected, slots, **at, dim=64))


# Logits


@logit_ways
@each_format
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_of_the_reference(format, precision, impl):
    for tokens, heads, entries, dim in ((5, 3, 150, 32), (70, 8, 65, 64), (3, 64, 1100, 128), (2, 100, 7, 32)):
        queries, keys = coded(format, tokens, heads, entries, dim)
        ends = drawn(-5, entries + 5, tokens, seed=1, dtype=torch.int32)
        for starts in (None, drawn(-9, entries, tokens, seed=2)):
            got = fast.index_logits(queries, keys, starts=starts, ends=ends, precision=precision, impl=impl)
            close(got, reference.index_logits(queries, keys, starts=starts, ends=ends, precision=precision))


@logit_ways
@each_format
def test_logits_on_a_lattice(format, impl):
    """Exact sums: the same bits, whatever the order, and of every head dimension (IX-21), twenty times over (IX-22)."""
    for dim in (32, 64, 128):
        queries, keys = lattice(format, 20, 64, 300, dim, seed=dim)
        ends = torch.full((20,), 300, device=DEVICE)
        expected = reference.index_logits(queries, keys, ends=ends)
        for _ in range(20 if dim == 128 else 1):
            got = fast.index_logits(queries, keys, ends=ends, impl=impl)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@logit_ways
def test_weights_of_bf16_are_widened(impl):
    queries, keys = coded("fp8", 9, 32, 300, 128)
    narrow = queries.weights.bfloat16()
    ends = torch.full((9,), 300, device=DEVICE)
    got = [fast.index_logits(queries._replace(weights=w), keys, ends=ends, impl=impl) for w in (narrow, narrow.float())]
    assert torch.equal(got[0].view(torch.int32), got[1].view(torch.int32))


@logit_ways
@each_format
def test_a_token_does_not_depend_on_the_others(format, impl):
    queries, keys = coded(format, 130, 8, 260, 64)
    ends = drawn(0, 261, 130, seed=4)
    whole = fast.index_logits(queries, keys, ends=ends, impl=impl)
    for part in (slice(0, 1), slice(7, 10), slice(64, 130)):
        mine = IndexQueries(*(None if value is None else value[part] for value in queries))
        assert torch.equal(fast.index_logits(mine, keys, ends=ends[part], impl=impl), whole[part])


@logit_ways
def test_not_a_number_shows_where_it_is_seen(impl):
    """A key with a NaN scale gives NaN where it is seen and -inf where it is not; a query with one gives NaN all along."""
    queries, keys = coded("fp8", 3, 8, 40, 32)
    keys.scales[7] = NAN
    queries.weights[2, 3] = NAN
    got = fast.index_logits(queries, keys, ends=ints(40, 7, 40), impl=impl)
    assert got.isnan().sum(1).tolist() == [1, 0, 40]
    assert got[0, 7].isnan()
    assert (got[1, 7:] == -INF).all()


@logit_ways
def test_pages_out_of_order(impl):
    """IX-12: pages 7, 2 and 5 of 64 slots; the key of entry t is 1 with scale 1 + t / 64, and the score is the scale."""
    keys = IndexKeys(torch.ones(192, 32, device=DEVICE).to(torch.float8_e4m3fn), 1 + torch.arange(192, device=DEVICE) / 64)
    pages = torch.full((9, 64 * 36), 0x7F, dtype=torch.uint8, device=DEVICE)
    table = ints(7, 2, 5)[None]
    slots = table[0].repeat_interleave(64) * 64 + torch.arange(64, device=DEVICE).repeat(3)
    fast.store_index_keys(keys, pages, slots, format="fp8", page_size=64)
    one = torch.zeros(1, 1, 32, device=DEVICE)
    one[..., 0] = 1.0
    queries = IndexQueries(one.to(torch.float8_e4m3fn), None, torch.ones(1, 1, device=DEVICE))
    at = {"format": "fp8", "page_size": 64, "width": 200, "impl": impl}
    got = fast.paged_index_logits(queries, pages, table, ints(0), ints(131), **at)[0]
    assert [got[t].item() for t in (0, 1, 63, 64, 127, 130)] == [1 + t / 64 for t in (0, 1, 63, 64, 127, 130)]
    assert (got[131:] == -INF).all()


@logit_ways
@each_format
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_paged_logits_of_the_reference(format, precision, impl):
    """Requests and pages that are not there, ends beyond the table, pages at odd places."""
    for page_size, gap in ((16, 3), (64, 16), (5, 0)):
        queries, keys = coded(format, 9, 6, 150, 64)
        needed = -(-150 // page_size)
        width = page_size * INDEX_LAYOUTS[format].token_bytes(64)
        pages = drawn(0, 256, 40, width + gap, seed=8, dtype=torch.uint8)[:, :width]
        order = torch.randperm(40, generator=generator(1))[:needed].to(DEVICE)
        slots = (order.repeat_interleave(page_size) * page_size + torch.arange(page_size, device=DEVICE).repeat(needed))[:150]
        fast.store_index_keys(keys, pages, slots, format=format, page_size=page_size)
        table = torch.full((3, needed + 2), -1, dtype=torch.int32, device=DEVICE)
        table[1, :needed], table[0, 1:3], table[2, 0] = order.int(), order[:2].int(), 40
        given = queries, pages, table, ints(1, 0, 2, -1, 3, 1, 1, 0, 1), ints(150, 48, 99, 5, 5, 0, -3, 200, 17)
        at = {"format": format, "page_size": page_size, "width": 160, "precision": precision}
        close(fast.paged_index_logits(*given, **at, impl=impl), reference.paged_index_logits(*given, **at))


@logit_ways
def test_pages_beyond_int32(impl):
    """IX-10: pages 2^20 bytes apart; page 2048 begins at byte 2^31. Memory that nobody touches takes none."""
    pages = torch.empty(2051, 2**20, dtype=torch.uint8, device=DEVICE)
    queries, keys = coded("fp8", 4, 4, 64, 128)
    for page in (0, 2047, 2048, 2050):
        fast.store_index_keys(keys, pages, page * 64 + torch.arange(64, device=DEVICE), format="fp8", page_size=64)
    one = IndexQueries(queries.codes[:1].expand(4, -1, -1), None, queries.weights[:1].expand(4, -1))
    at = {"format": "fp8", "page_size": 64, "width": 64, "impl": impl}
    got = fast.paged_index_logits(one, pages, ints(0, 2047, 2048, 2050)[:, None], ints(0, 1, 2, 3), ints(64, 64, 64, 64), **at)
    assert all(torch.equal(got[row], got[0]) for row in (1, 2, 3))
    close(got[:1], fast.index_logits(IndexQueries(one.codes[:1], None, one.weights[:1]), keys, ends=ints(64), impl=impl))


# Selection


def check_topk(logits, k, impl, **options):
    for order in ("score", "index"):
        got = fast.select_topk(logits, k, order=order, **options, impl=impl)
        assert torch.equal(got, reference.select_topk(logits, k, order=order, **options))
    sets = fast.select_topk(logits, k, **options, impl=impl)
    assert torch.equal(sets.sort(1).values, got.sort(1).values)
    assert (sets.diff(dim=1)[sets[:, :-1] < 0] == 0).all()  # nothing stands behind a -1
    return got


@every_way
def test_selection_by_literals(impl):
    """IX-01, IX-05, IX-06 and IX-19."""
    many = torch.zeros(2, 8320, device=DEVICE)
    many[0, 100:8300:82] = torch.arange(1.0, 101.0, device=DEVICE)
    many[1, ::27] = INF
    picks = fast.select_topk(many, 2048, order="index", impl=impl)
    winners = torch.arange(100, 8300, 82, device=DEVICE)
    assert torch.isin(winners, picks[0].long()).all()
    assert torch.isin(torch.arange(0, 8320, 27, device=DEVICE), picks[1].long()).all()
    assert all(len(row.unique()) == 2048 and row.min() >= 0 and row.max() < 8320 for row in picks)
    low = -1e5 - 1e5 * torch.rand(149, 1001, generator=generator(0)).to(DEVICE)
    low[:, 13::100] = 0.0
    assert torch.equal(check_topk(low, 64, impl).sort(1).values, low.topk(64).indices.sort(1).values.int())
    nan = torch.full((3, 4096), NAN, device=DEVICE)
    nan[0], nan[0, 17], nan[1, :100] = torch.arange(4096.0, device=DEVICE), NAN, 1.0
    counts = (check_topk(nan, 512, impl) >= 0).sum(1)
    assert counts.tolist() == [512, 100, 0]
    equal = torch.ones(3, 9, device=DEVICE)
    got = fast.select_topk(equal, 2, starts=ints(0, 5, 9), ends=ints(4, 9, 9), order="index", impl=impl)
    assert got.tolist() == [[0, 1], [0, 1], [-1, -1]]


@every_way
def test_selection_at_any_length(impl):
    """IX-03 and IX-26: scores of one binade, in any order, at lengths around every boundary."""
    for length, k in ((1, 1), (4096, 512), (8193, 2048), (16384, 512), (16448, 512), (65536, 512), (779425, 512), (40000, 8192)):
        scores = torch.linspace(1, 1 + 2.0**-8, length, dtype=torch.float64).float()
        row = scores[torch.randperm(length, generator=generator(length))][None].to(DEVICE)
        got = fast.select_topk(row, k, order="index", impl=impl)[0].long()
        assert torch.equal(row[0, got].sort().values, row[0].topk(k).values.sort().values)
        least = row[0, got].min()
        assert torch.equal(got[row[0, got] == least], (row[0] == least).nonzero()[: int((row[0, got] == least).sum()), 0])


@every_way
def test_selection_of_the_reference(impl):
    """Ties, both zeros, NaN, infinities, windows of all kinds, both dtypes, k above and below, slots whose page is not there."""
    for n, k, dtype in ((300, 20, torch.float32), (300, 400, torch.float32), (1000, 128, torch.bfloat16), (20000, 700, torch.float32)):
        logits = (normal(6, n, seed=n).float() * 4).round().div(4).to(dtype)
        logits[0, ::7], logits[1, ::3], logits[2, ::5], logits[2, 1::5], logits[3], logits[4, 9] = NAN, -INF, -0.0, 0.0, -INF, INF
        ends, starts = ints(n, n + 5, n // 2, n, -4, 11), ints(3, -2, 9, 0, 0, 11, dtype=torch.int64)
        for window in ({}, {"ends": ends}, {"starts": starts}, {"starts": starts, "ends": ends}):
            check_topk(logits, k, impl, **window)
        pages = drawn(-2, 50, 3, -(-n // 64) - 1, seed=n, dtype=torch.int32)
        pages[0, 1], pages[2] = 2**30, -1
        requests = ints(0, 1, 2, 3, -1, 1)
        check_topk(logits, k, impl, ends=ends, block_table=pages, requests=requests, page_size=64)
    check_topk(normal(6, 900, seed=1).float()[:, ::3], 50, impl)


@every_way
def test_candidates_of_the_reference(impl):
    for n, block, count in ((100, 8, 5), (1000, 8, 2048), (77, 5, 3), (64, 1, 9), (33, 64, 2), (4000, 8, 40)):
        logits = normal(5, n, seed=n).float().round()
        logits[0, ::3], logits[1], logits[2], logits[3, : n // 2] = NAN, INF, -INF, NAN
        ends = ints(n, n, n - 1, n // 2, 0)
        expected = reference.candidate_blocks(logits, ends, block=block, count=count)
        assert torch.equal(fast.candidate_blocks(logits, ends, block=block, count=count, impl=impl), expected)
        wild = torch.cat([expected, torch.full_like(expected, 10**6)], 1)
        restricted = reference.restrict_to_blocks(logits, wild, block=block)
        got = fast.restrict_to_blocks(logits, wild, block=block, impl="eager" if impl == "inductor" else impl)
        same((got,), (restricted,))


@every_way
@each_format
def test_chunks_do_not_show(format, impl):
    """The chain of its parts, whatever the chunk and the budget."""
    queries, keys = lattice(format, 23, 4, 300, 32, seed=1)
    ends = drawn(0, 301, 23, seed=2, dtype=torch.int32)
    candidates = reference.select_candidates(queries, keys, ends, count=6)
    expected = [reference.select_entries(queries, keys, ends, 40, candidates=some) for some in (None, candidates)]
    for chunk, budget in ((1024, 2**28), (1, 2**28), (7, 2**28), (1024, 1), (1024, 5000)):
        limits = {"chunk": chunk, "budget_bytes": budget, "impl": impl}
        assert torch.equal(fast.select_candidates(queries, keys, ends, count=6, **limits), candidates)
        for some, want in zip((None, candidates), expected, strict=True):
            assert torch.equal(fast.select_entries(queries, keys, ends, 40, candidates=some, **limits), want)


@every_way
@pytest.mark.parametrize("block", [6, 65, 2**40, 2**63 - 1])
def test_blocks_longer_than_a_row(block, impl):
    logits = torch.tensor([[1.0, NAN, -INF, 2.0, 0.0]], device=DEVICE).expand(3, 5)
    ends, blocks = ints(5, 0, 2), ints(0, 1, -1)[:, None]
    found = fast.candidate_blocks(logits, ends, block=block, count=3, impl=impl)
    assert found.tolist() == [[0], [-1], [0]]
    kept = fast.restrict_to_blocks(logits, blocks, block=block, impl="eager" if impl == "inductor" else impl)
    same([kept], [reference.restrict_to_blocks(logits, blocks, block=block)])


@logit_ways
def test_one_key_of_two_numbers(impl):
    queries, keys = lattice("fp8", 1, 2, 1, 2)
    pages = fast.store_index_keys(keys, torch.zeros(2, 13, dtype=torch.uint8, device=DEVICE), ints(2), format="fp8", page_size=2, impl=impl)
    same(fast.load_index_keys(pages, ints(2), format="fp8", page_size=2, dim=2, impl=impl), keys)
    got = fast.paged_index_logits(queries, pages, ints(1)[None], ints(0), ints(1), format="fp8", page_size=2, width=1, impl=impl)
    assert torch.equal(got, reference.index_logits(queries, keys, ends=ints(1)))


@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_visible_entries(impl):
    """IX-17, IX-23: the end of an entry's last token, 0 and 1 for no compression, and nothing that overflows."""
    positions = ints(0, 2, 3, 6, 7, 8, -1, -(2**40), 2**40, 2**63 - 1, dtype=torch.int64)
    for ratio in (0, 1, 2, 4, 128, 2**31, 2**40, 2**62, 2**63 - 1):
        got = fast.visible_entries(positions, ratio=ratio, impl=impl)
        assert torch.equal(got, reference.visible_entries(positions, ratio=ratio))
    assert fast.visible_entries(torch.arange(12, device=DEVICE), ratio=4, impl=impl).tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3]


@every_way
@each_format
def test_nothing_is_a_size(format, impl):
    """IX-09, IX-27: no tokens, no entries, no pages, no width, ends of 0."""
    logit_way = "eager" if impl == "inductor" else impl
    queries, keys = coded(format, 3, 2, 5, 32)
    none, no_keys = IndexQueries(*(None if part is None else part[:0] for part in queries)), IndexKeys(*(part[:0] for part in keys))
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert fast.index_logits(none, keys, ends=ends[:0], impl=logit_way).shape == (0, 5)
    assert fast.index_logits(queries, no_keys, ends=ends, impl=logit_way).shape == (3, 0)
    assert (fast.index_logits(queries, keys, ends=ends, impl=logit_way) == -INF).all()
    table = torch.full((1, 2), -1, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(1, 4 * INDEX_LAYOUTS[format].token_bytes(32), dtype=torch.uint8, device=DEVICE)
    at = {"format": format, "page_size": 4}
    for paged, blocks, width in ((pages, table, 0), (pages[:0], table, 9), (pages, table[:, :0], 9), (pages, table[:0], 9)):
        got = fast.paged_index_logits(queries, paged, blocks, ends, ends + 9, **at, width=width, impl=logit_way)
        assert got.shape == (3, width)
        assert (got == -INF).all()
    assert fast.store_index_keys(keys, pages[:0], ends.new_zeros(5), **at, impl=logit_way).shape[0] == 0
    assert not fast.load_index_keys(pages[:0], ends, **at, dim=32, impl=logit_way).codes.view(torch.uint8).any()
    assert fast.select_topk(torch.zeros(3, 0, device=DEVICE), 4, impl=impl).tolist() == [[-1] * 4] * 3
    assert fast.select_topk(torch.zeros(0, 7, device=DEVICE), 4, impl=impl).shape == (0, 4)
    assert fast.candidate_blocks(torch.zeros(3, 0, device=DEVICE), ends, impl=impl).shape == (3, 0)
    assert fast.restrict_to_blocks(torch.zeros(3, 0, device=DEVICE), ends[:, None], impl=logit_way).shape == (3, 0)
    assert fast.select_entries(none, keys, ends[:0], 4, impl=impl).shape == (0, 4)
    assert fast.select_entries(queries, no_keys, ends, 4, impl=impl).tolist() == [[-1] * 4] * 3
    x, table = normal(0, 2, 32), rotary(32)
    assert fast.index_queries(x, x[..., 0], table, ends[:0], format=format, impl=impl).codes.shape[0] == 0
    assert fast.index_keys(x[:, 0], table, ends[:0], format=format, impl=impl).scales.shape == (0,)


# Libraries, made up


@pytest.fixture
def made_up(monkeypatch):
    """Puts functions into a module of a library's name, whose rows then run on the CPU."""

    def put(library, version, generation=9, **functions):
        module = ModuleType(library.module)
        for name, function in functions.items():
            setattr(module, name, function)
        monkeypatch.setitem(sys.modules, library.module, module)
        monkeypatch.setattr(metadata, "version", lambda name: version)
        monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: None)
        monkeypatch.setattr(deepgemm_mqa, "generation", lambda device: generation)
        library._found = False
        library._proofs.clear()
        for name, rows in dispatch.TABLES.items():
            if name.startswith("indexer."):
                anywhere = tuple(replace(row, device=dispatch.any_device) if row.library is library else row for row in rows)
                monkeypatch.setitem(dispatch.TABLES, name, anywhere)

    yield put
    for library in (deepgemm.LIBRARY, flashinfer.LIBRARY):
        library._found = False
        library._proofs.clear()


class Spy:
    """DeepGEMM's logits in plain torch, with rubbish wherever nothing is promised; keeps what it was given."""

    def __init__(self):
        self.calls = []

    def _scores(self, q, kv, weights, scales=None):
        assert weights.stride(1) == 1
        if q.dtype == torch.float8_e4m3fn:
            assert scales is None
            numbers, keys = q.float(), kv[0].float()
            return torch.einsum("thj,th->tj", (numbers @ keys.T).relu(), weights.float()) * kv[1]
        assert q.dtype == torch.int8
        queries = IndexQueries(q.view(torch.uint8), scales, weights.float())
        ends = torch.full((len(q),), len(kv[0]))
        return reference.index_logits(queries, IndexKeys(kv[0].view(torch.uint8), kv[1]), ends=ends)

    def _full(self, name, q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0, logits_dtype=torch.float):
        self.calls.append((name, q, weights, ks, ke, logits_dtype))
        assert (clean_logits, max_seqlen_k) == (False, 0)
        assert ks.dtype == ke.dtype == torch.int32
        assert ((ks >= 0) & (ke >= ks) & (ke <= len(kv[0]))).all()
        q, scales = q if isinstance(q, tuple) else (q, None)
        scores = self._scores(q, kv, weights, scales)
        columns = torch.arange(len(kv[0]))
        inside = (columns >= ks[:, None]) & (columns < ke[:, None])
        padded = torch.full((len(q), len(columns) + 300), NAN)  # rows of its own pitch
        padded[:, : len(columns)] = torch.where(inside, scores, 77.0)
        return padded.to(logits_dtype)[:, : len(columns)]

    def old(self, *, head_counts=(32, 64)):
        """Functions of 0.1.5."""

        def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
            assert q.shape[1] in head_counts
            assert weights.dtype == torch.float32
            return self._full("fp8", q, kv, weights, ks, ke, clean_logits, max_seqlen_k)

        def fp8_fp4_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0, logits_dtype=torch.float):
            return self._full("fp8_fp4", q, kv, weights, ks, ke, clean_logits, max_seqlen_k, logits_dtype)

        return {"fp8_mqa_logits": fp8_mqa_logits, "fp8_fp4_mqa_logits": fp8_fp4_mqa_logits}

    def new(self, dtype=torch.float32):
        """The function of 0.2.x: keys of a query's own range from column 0 on, rubbish behind them."""

        def fp8_fp4_mqa_logits(q, kv, weights, ks, ke, max_seqlen_k, schedule_meta=None):
            assert schedule_meta is None
            assert weights.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
            whole = self._full("new", q, kv, weights, ks, ke)
            rows = torch.full((len(whole), max_seqlen_k), 55.0)
            for row, (first, past) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
                assert past - first <= max_seqlen_k
                rows[row, : past - first] = whole[row, first:past]
            return rows.to(dtype)

        return {"fp8_fp4_mqa_logits": fp8_fp4_mqa_logits}

    def paged(self, *, old=True):
        """Paged logits of both series, pages one by one, as the block table says."""

        def plain(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None):
            assert schedule_meta == "plan"
            assert (kv_cache.shape[1:3], indices, clean_logits) == ((64, 1), None, False)
            assert context_lens.shape == (len(q), 1)
            assert (context_lens >= 1).all()
            assert ((block_table >= 0) & (block_table < len(kv_cache))).all()
            self.calls.append(("paged", q, weights, context_lens))
            result, dim = torch.full((len(q), max_context_len), 33.0), q.shape[-1]
            for row, length in enumerate(context_lens[:, 0].tolist()):
                for j in range(length):
                    page = kv_cache[block_table[row, j // 64]].reshape(-1)
                    at, place = j % 64, 64 * dim + j % 64 * 4
                    key = page[at * dim : (at + 1) * dim].view(torch.float8_e4m3fn).float()
                    scale = page[place : place + 4].clone().view(torch.float32)
                    result[row, j] = ((q[row, 0].float() @ key).relu() @ weights[row]) * scale
            return result

        def current(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None):
            return plain(q[0], kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)

        def both(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None):
            raise AssertionError("0.1.5 has a function for FP8 alone")

        names = {"fp8_paged_mqa_logits": plain, "fp8_fp4_paged_mqa_logits": both} if old else {"fp8_fp4_paged_mqa_logits": current}
        return {**names, "get_num_sms": lambda: 132, "get_paged_mqa_logits_metadata": lambda lens, page, sms: "plan"}


on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="the library itself runs here")


@on_a_cpu
@pytest.mark.parametrize("series", ["0.1.5", "0.2.5"])
def test_deepgemm_by_both_call_forms(made_up, series):
    """Windows that begin late, end early or before they begin; heads filled up; nothing of the rubbish around shows."""
    spy = Spy()
    made_up(deepgemm.LIBRARY, series, **(spy.old() if series == "0.1.5" else spy.new()))
    for heads, dim in ((8, 128), (32, 64), (64, 128)):
        queries, keys = lattice("fp8", 6, heads, 90, dim, seed=heads)
        starts, ends = ints(0, 5, 90, -4, 40, 7), ints(90, 60, 3, 95, 40, 0, dtype=torch.int64)
        for first in (None, starts):
            expected = reference.index_logits(queries, keys, starts=first, ends=ends)
            for weights in (queries.weights, queries.weights.bfloat16()):
                got = fast.index_logits(queries._replace(weights=weights), keys, starts=first, ends=ends, impl="deepgemm")
                assert torch.equal(got, expected)
                assert got.stride() == fast.index_logits(queries, keys, ends=ends).stride()
        assert spy.calls[-1][0] == ("fp8" if series == "0.1.5" else "new")
        picks = fast.select_entries(queries, keys, ends, 9, chunk=4, impl="eager")
        assert torch.equal(picks, reference.select_entries(queries, keys, ends, 9))
    with pytest.raises(Unsupported, match="no FP4 logits on SM90"):
        fast.index_logits(*lattice("fp4", 2, 8, 9, 128), ends=ints(9, 9), impl="deepgemm")
    with pytest.raises(Unsupported, match="at most 64 heads"):
        fast.index_logits(*lattice("fp8", 2, 65, 9, 128), ends=ints(9, 9), impl="deepgemm")


@on_a_cpu
@pytest.mark.parametrize("format", FORMATS)
def test_deepgemm_on_sm100_takes_weights_of_bf16(made_up, format):
    """From 0.2 on its logits are bf16 there, and nothing else; 0.1.5 takes both and is told which."""
    queries, keys = lattice(format, 4, 16, 50, 128)
    ends = ints(50, 20, 0, 49)
    spy = Spy()
    made_up(deepgemm.LIBRARY, "0.2.5", 10, **spy.new(torch.bfloat16))
    with pytest.raises(Unsupported, match="precision must be bf16"):
        fast.index_logits(queries, keys, ends=ends, impl="deepgemm")
    expected = reference.index_logits(queries, keys, ends=ends, precision="bf16")
    for weights in (queries.weights, queries.weights.bfloat16()):
        got = fast.index_logits(queries._replace(weights=weights), keys, ends=ends, precision="bf16", impl="deepgemm")
        assert torch.equal(got, expected)
        assert spy.calls[-1][2].dtype == torch.bfloat16
    made_up(deepgemm.LIBRARY, "0.1.5", 10, **spy.old(head_counts=(16, 64)))
    for precision in ("fp32", "bf16"):
        got = fast.index_logits(queries, keys, ends=ends, precision=precision, impl="deepgemm")
        assert torch.equal(got, reference.index_logits(queries, keys, ends=ends, precision=precision))
        assert spy.calls[-1][-1] == (torch.bfloat16 if precision == "bf16" else torch.float32)


@on_a_cpu
@pytest.mark.parametrize("old", [True, False])
def test_deepgemm_pages(made_up, old):
    """IX-08, IX-09: tables and lengths that it may believe, also where nobody sees anything."""
    spy = Spy()
    made_up(deepgemm.LIBRARY, "0.1.5" if old else "0.2.5", **spy.paged(old=old))
    queries, keys = lattice("fp8", 5, 8, 150, 128)
    pages = torch.zeros(6, 64 * 132, dtype=torch.uint8)
    order = ints(4, 0, 5)
    slots = order.repeat_interleave(64)[:150] * 64 + torch.arange(192)[:150] % 64
    fast.store_index_keys(keys, pages, slots, format="fp8", page_size=64)
    table = torch.stack([torch.cat([order, ints(-1)]), ints(-1, 6, 4, 0)]).int()
    for ends in (ints(150, 64, 500, 9, 0), torch.zeros(5, dtype=torch.int32)):
        given = queries, pages, table, ints(0, 1, 0, -1, 0), ends
        at = {"format": "fp8", "page_size": 64, "width": 200}
        assert torch.equal(fast.paged_index_logits(*given, **at, impl="deepgemm"), reference.paged_index_logits(*given, **at))
    with pytest.raises(Unsupported, match="pages of 64"):
        fast.paged_index_logits(*given, format="fp8", page_size=32, width=9, impl="deepgemm")


@on_a_cpu
def test_a_deepgemm_that_is_wrong_is_not_used(made_up):
    """A kernel that ignores the scales of keys, or NaN, or the order of pages, fails its probe."""
    right = Spy().old()["fp8_mqa_logits"]
    for wrong in (
        lambda q, kv, weights, ks, ke, **options: right(q, (kv[0], torch.ones_like(kv[1])), weights, ks, ke, **options),
        lambda q, kv, weights, ks, ke, **options: right(q, kv, weights.flip(0), ks, ke, **options).roll(1, 1),
        lambda q, kv, weights, ks, ke, **options: torch.empty(len(q), len(kv[0])),
    ):
        made_up(deepgemm.LIBRARY, "0.1.5", **{**Spy().old(), "fp8_mqa_logits": wrong})
        with pytest.raises(BackendUnavailable, match="known-answer test"):
            fast.index_logits(*lattice("fp8", 2, 64, 9, 128), ends=ints(9, 9), impl="deepgemm")


def flashinfer_by_sorting(scores, offsets, lengths, k, deterministic=False, tie_break=0, dsa_graph_safe=False, row_starts=None):
    """FlashInfer's selection: NaN first, -0 behind 0, -inf like any number; in an order of its own."""
    assert (deterministic, tie_break, dsa_graph_safe) == (True, 1, False)
    result = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if row_starts is None else int(row_starts[row])
        bits = scores[row, first : first + length].view(torch.int32)
        picks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).sort(descending=True, stable=True).indices[:k]
        result[row, : len(picks)] = (picks.flip(0) + offsets[row]).int()
    return result


@on_a_cpu
def test_flashinfer_proves_itself(made_up):
    made_up(flashinfer.LIBRARY, "0.7.4", top_k_ragged_transform=flashinfer_by_sorting)
    assert flashinfer.LIBRARY.disproved(flashinfer.TOP_K, torch.device("cpu")) is None

    def larger_ties(scores, *given, **options):
        picks = flashinfer_by_sorting(scores.flip(1), *given, **{**options, "row_starts": None})
        return torch.where(picks < 0, -1, scores.shape[1] - 1 - picks)

    made_up(flashinfer.LIBRARY, "0.7.4", top_k_ragged_transform=larger_ties)
    assert "known-answer test" in flashinfer.LIBRARY.disproved(flashinfer.TOP_K, torch.device("cpu"))


# Operators and graphs


def samples():
    queries, keys = coded("fp4", 3, 2, 20, 32)
    raw = *queries, *keys
    pages = torch.zeros(3, 4 * 20, dtype=torch.uint8, device=DEVICE)
    slots, ends, table = ints(3, -1, 11), ints(20, 7, 0), ints(1, 2, -1)[None]
    logits = normal(3, 20).float()
    of_rows = rotary(32), ints(0, 1, 2)
    return {
        "visible_entries": (ends, 4),
        "index_queries": (normal(3, 2, 32), normal(3, 2), *of_rows, "fp4", True, "official_fp4", "even", "kept", "bf16"),
        "index_keys": (normal(3, 32), *of_rows, normal(32), 1e-6, False, "fp8", "official", "even", "kept"),
        "store_index_keys": (keys.codes[:3], keys.scales[:3], pages, slots, "fp4", 4),
        "load_index_keys": (pages, slots, "fp4", 4, 32),
        "index_logits": (*raw, ints(0, 1, 2), ends, "fp32"),
        "paged_index_logits": (*queries, pages, table, ints(0, 0, 0), ends, 4, 12, "bf16"),
        "select_topk": (logits, 5, ends, None, "index", table, ints(0, 0, 0), 8),
        "candidate_blocks": (logits, ends, 8, 2),
        "restrict_to_blocks": (logits, ints(0, 2)[None].expand(3, 2), 8),
        "select_entries": (*raw, ends, 5, "fp32", "index", None, 8, 2, 2**20),
        "select_candidates": (*raw, ends, "fp32", 8, 2, 2, 2**20),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_chain_is_one_graph():
    """From projections to slots, in the caller's pages."""

    def step(q, w, x, table, at, pages, blocks, requests):
        ends = fast.visible_entries(at, ratio=1, impl="eager")
        queries = fast.index_queries(q, w, table, at, hadamard=True, impl="eager")
        keys = fast.index_keys(x, table, at, hadamard=True, impl="eager")
        fast.store_index_keys(keys, pages, at, format="fp4", page_size=4, impl="eager")
        options = {"format": "fp4", "page_size": 4, "width": 12, "impl": "eager"}
        logits = fast.paged_index_logits(queries, pages, blocks, requests, ends, **options)
        return fast.select_topk(logits, 3, ends=ends, block_table=blocks, requests=requests, page_size=4, order="score", impl="eager")

    pages = torch.zeros(3, 4 * 20, dtype=torch.uint8, device=DEVICE)
    given = normal(9, 2, 32), normal(9, 2), normal(9, 32, seed=4), rotary(32), torch.arange(9, device=DEVICE)
    tables = ints(0, 1, 2)[None], torch.zeros(9, dtype=torch.int32, device=DEVICE)
    expected = step(*given, plain := pages.clone(), *tables)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*given, kept := pages.clone(), *tables), expected)
    assert torch.equal(kept, plain)


def test_graphs_per_function():
    """One for any number of rows and of entries, in inference mode or out of it."""
    table = rotary(64)

    def run(name, count):
        at = torch.arange(count, device=DEVICE)
        match name:
            case "queries":
                fast.index_queries(normal(count, 2, 64), normal(count, 2), table, at, impl="inductor")
            case "keys":
                fast.index_keys(normal(2 * count, 64)[::2], table, at, weight=table[0].repeat(1), eps=1e-6, hadamard=True, impl="inductor")
            case "picks":
                fast.select_topk(normal(count, 3 * count).float(), 2, ends=at, impl="inductor")
            case "blocks":
                fast.candidate_blocks(normal(count, 7 * count).float(), at + 1, impl="inductor")

    for name in ("queries", "keys", "picks", "blocks"):
        compiled._graph.cache_clear()
        torch._dynamo.reset()
        counters.clear()
        for count in (1, 2, 17, 40):
            run(name, count)
            with torch.inference_mode():
                run(name, count)
        assert 1 <= counters["stats"]["unique_graphs"] <= 2, name


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@each_format
def test_replays_follow_their_inputs(format):
    """Queries, lengths and pages switched in place."""
    queries, keys = coded(format, 8, 64, 640, 128)
    pages = torch.zeros(10, 64 * INDEX_LAYOUTS[format].token_bytes(128), dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(640, device=DEVICE)
    table = torch.arange(10, dtype=torch.int32, device=DEVICE)[None].repeat(8, 1)
    requests, ends = torch.arange(8, dtype=torch.int32, device=DEVICE), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    at = {"format": format, "page_size": 64}

    def step():
        fast.store_index_keys(keys, pages, slots, **at)
        logits = fast.paged_index_logits(queries, pages, table, requests, ends, **at, width=640)
        return fast.select_topk(logits, 64, ends=ends, order="index"), fast.select_entries(queries, keys, ends, 64)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        fresh, other = coded(format, 8, 64, 640, 128, seed=10 * seed)
        for mine, theirs in zip((*queries, *keys, ends), (*fresh, *other, drawn(0, 641, 8, seed=seed, dtype=torch.int32)), strict=True):
            if mine is not None:
                mine.copy_(theirs)
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(results, step(), strict=True))


# Errors


def test_gradients_are_refused():
    table, at = rotary(32), ints(0, 1, 2)
    for call in (
        lambda x: fast.index_queries(x, x[..., 0].detach(), table, at),
        lambda x: fast.index_queries(x.detach(), x[..., 0], table, at),
        lambda x: fast.index_keys(x[:, 0], table, at),
        lambda x: fast.index_keys(x[:, 0].detach(), table, at, weight=x[0, 0], eps=1e-6),
        lambda x: fast.select_topk(x[:, 0], 2),
        lambda x: fast.candidate_blocks(x[:, 0], at),
        lambda x: fast.restrict_to_blocks(x[:, 0], at[:, None]),
    ):
        x = normal(3, 2, 32).requires_grad_()
        with pytest.raises(ArgumentError, match="no backward"):
            call(x)
        with torch.no_grad():
            call(x)


@each_format
def test_gradients_of_weights_and_scales_are_refused(format):
    queries, keys = lattice(format, 2, 3, 9, 32)
    weighted = queries._replace(weights=queries.weights.requires_grad_())
    pages, ends = torch.zeros(2, 9 * 36, dtype=torch.uint8, device=DEVICE), ints(9, 9)
    paged = {"format": format, "page_size": 9, "width": 9}
    calls = [
        ("queries.weights", lambda: fast.index_logits(weighted, keys, ends=ends)),
        ("queries.weights", lambda: fast.paged_index_logits(weighted, pages, ints(0, 1)[:, None], ints(0, 1), ends, **paged)),
        ("queries.weights", lambda: fast.select_entries(weighted, keys, ends, 2)),
        ("queries.weights", lambda: fast.select_candidates(weighted, keys, ends)),
    ]
    if format == "fp8":
        scaled, plain = keys._replace(scales=keys.scales.clone().requires_grad_()), queries._replace(weights=queries.weights.detach())
        calls.append(("keys.scales", lambda: fast.index_logits(plain, scaled, ends=ends)))
    for argument, call in calls:
        with pytest.raises(ArgumentError, match=f"^{argument}: got .*no backward"):
            call()
        with torch.no_grad():
            call()


def test_wrong_arguments_are_named():
    queries, keys = coded("fp4", 3, 2, 9, 32)
    other = coded("fp8", 3, 2, 9, 32)[1]
    ends, logits = ints(1, 2, 3), torch.zeros(3, 9, device=DEVICE)
    for argument, call in (
        ("keys.codes", lambda: fast.index_logits(queries, other, ends=ends)),
        ("ends", lambda: fast.index_logits(queries, keys, ends=ends[:2])),
        ("precision", lambda: fast.index_logits(queries, keys, ends=ends, precision="fp16")),
        ("k", lambda: fast.select_topk(logits, 0)),
        ("order", lambda: fast.select_topk(logits, 1, order="none")),
        ("page_size", lambda: fast.select_topk(logits, 1, block_table=ends[None], requests=ends)),
        ("chunk", lambda: fast.select_entries(queries, keys, ends, 1, chunk=0)),
        ("budget_bytes", lambda: fast.select_candidates(queries, keys, ends, budget_bytes=0)),
        ("pages", lambda: fast.load_index_keys(torch.zeros(1, 9, dtype=torch.uint8), ends, format="fp4", page_size=1, dim=32)),
        (
            "weight_dtype",
            lambda: fast.index_queries(normal(1, 2, 32), normal(1, 2), rotary(32), ends[:1], format="fp8", weight_dtype="bf16"),
        ),
        ("impl", lambda: fast.select_topk(logits, 1, impl="deepgemm")),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.select_topk(torch.zeros(2, 9), 1, impl="triton")


def test_every_way_keeps_what_may_be_demanded():
    for function, rows in dispatch.TABLES.items():
        if function.startswith("indexer."):
            assert all(row.deterministic and row.batch_invariant and row.graph_safe for row in rows)
    with use(batch_invariant=True, deterministic=True):
        fast.select_entries(*coded("fp4", 3, 2, 9, 32), ints(9, 9, 9), 4)


@pytest.mark.parametrize("name", fast.__all__)
def test_signatures_equal_the_reference(name):
    ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (fast, reference))
    assert [parameter for key, parameter in ours.items() if key != "impl"] == list(theirs.values())
    assert set(fast.__all__) == set(reference.__all__)
