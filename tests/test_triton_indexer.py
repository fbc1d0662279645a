"""The indexer's Triton kernels against the reference: codes, slots and picks byte for byte, logits exactly on a lattice and near elsewhere.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, which must be asked for before triton is imported: one test runs
this file again in a process of its own.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.fast import dispatch
from dsv4.fast import indexer as fast
from dsv4.formats import INDEX_LAYOUTS
from dsv4.reference import indexer as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import IndexKeys, IndexQueries
from interpreted import INTERPRETED, passes

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
each_format = pytest.mark.parametrize("format", INDEX_LAYOUTS)
INF, NAN = float("inf"), float("nan")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=20)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function, rows in dispatch.TABLES.items():
        if function.startswith("indexer."):
            free = tuple(replace(row, device=dispatch.any_device) if row.backend == "triton" else row for row in rows)
            monkeypatch.setitem(dispatch.TABLES, function, free)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed)).bfloat16().to(DEVICE)


def drawn(least, past, *shape, seed=0, dtype=torch.int64):
    return torch.randint(least, past, shape, generator=generator(seed), dtype=dtype).to(DEVICE)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def rotary(dim):
    return rope_table(rope_frequencies(1e4, min(dim, 64), device=DEVICE), 100)


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


def lattice(format, tokens, heads, entries, dim, seed=0):
    """Queries and keys whose logits are exact in fp32 in whatever order."""
    numbers = [drawn(-3, 4, *shape, dim, seed=seed + i) for i, shape in enumerate(((tokens, heads), (entries,)))]
    weights, powers = drawn(-2, 3, tokens, heads, seed=seed + 2).float(), drawn(-1, 2, entries, seed=seed + 3)
    if format == "fp8":
        codes = [part.to(torch.float32).to(torch.float8_e4m3fn) for part in numbers]
        return IndexQueries(codes[0], None, weights), IndexKeys(codes[1], torch.exp2(powers.float()))
    code = ints(13, 12, 10, 0, 2, 4, 5, dtype=torch.uint8)  # of -3 to 3
    q, k = (code[part + 3].view(*part.shape[:-1], -1, 2) for part in numbers)
    words = [(127 + part).to(torch.int32) * 0x01010101 for part in (drawn(-1, 2, tokens, heads, seed=seed + 4), powers)]
    return IndexQueries(q[..., 0] | (q[..., 1] << 4), words[0], weights), IndexKeys(k[..., 0] | (k[..., 1] << 4), words[1])


@kernel
@each_format
def test_queries_and_keys(format):
    for heads, dim in ((3, 32), (64, 128), (2, 64)) if format == "fp4" else ((3, 32), (64, 128), (5, 2), (1, 512)):
        q = normal(9, heads, dim, seed=dim) * torch.exp2(drawn(-20, 8, 9, heads, 1, seed=dim).float()).bfloat16()
        q[0], q[1, 0, 1], q[2, 0, 1], q[3, 0, :32] = 0.0, NAN, INF, -(2.0**-130)
        positions, table, w = ints(0, 1, 2, 3, 77, -1, 100, 99, 9), rotary(dim), normal(9, heads, seed=9)
        for hadamard, floor, ties, sign, dtype in (
            (False, None, "even", "kept", "fp32"),
            (True, None, "toward_zero", "kept", "bf16"),
            (True, "flashmla", "even", "cleared", "fp32"),
        ):
            options = {"format": format, "hadamard": hadamard, "amax_floor": floor, "ties": ties, "zero_sign": sign}
            kind = {"weight_dtype": dtype if format == "fp4" else "fp32"}
            expected = reference.index_queries(q, w, table, positions, **options, **kind)
            same(fast.index_queries(q, w, table, positions, **options, **kind, impl="triton"), expected)
            for weight in (None, normal(dim, seed=5), normal(dim, seed=5).float()):
                norm = {"weight": weight, "eps": None if weight is None else 1e-20}
                expected = reference.index_keys(q[:, 0], table, positions.long(), **norm, **options)
                same(fast.index_keys(q[:, 0], table, positions.long(), **norm, **options, impl="triton"), expected)


@kernel
@each_format
def test_pages(format):
    """Gaps and offsets, duplicates and absent slots, more rows than look for their duplicates themselves."""
    for page_size, gap, offset, count in ((64, 16, 16, 100), (5, 3, 1, 30), (16, 4, 4, 2100)):
        table, at = rotary(32), torch.zeros(count, dtype=torch.int64, device=DEVICE)
        keys = reference.index_keys(normal(count, 32, seed=count), table, at, format=format)
        width = page_size * INDEX_LAYOUTS[format].token_bytes(32)
        memory = drawn(0, 256, offset + 7 * (width + gap), seed=3, dtype=torch.uint8)
        slots = drawn(-3, 7 * page_size + 9, count, seed=count, dtype=torch.int32 if gap == 3 else torch.int64)
        kept = memory.clone()
        pages, expected = (part.as_strided((7, width), (width + gap, 1), offset) for part in (kept, memory))
        options = {"format": format, "page_size": page_size}
        expected.copy_(reference.store_index_keys(keys, expected, slots, **options))
        fast.store_index_keys(keys, pages, slots, **options, impl="triton")
        assert torch.equal(kept, memory)
        got = fast.load_index_keys(pages, slots, **options, dim=32, impl="triton")
        same(got, reference.load_index_keys(expected, slots, **options, dim=32))


@kernel
@each_format
def test_logits_on_a_lattice(format):
    """Every head dimension, heads filled up, windows of all kinds: tiles that nobody sees, some see, all see."""
    for tokens, heads, entries, dim in ((5, 3, 150, 32), (3, 20, 130, 64), (4, 64, 300, 128), (1, 100, 40, 32)):
        queries, keys = lattice(format, tokens, heads, entries, dim, seed=dim)
        ends = torch.cat([ints(entries, 0, entries + 9, 17, 133)[: tokens - 1], ints(entries)])
        for starts in (None, ints(0, 0, 130, 16, -4)[:tokens]):
            got = fast.index_logits(queries, keys, starts=starts, ends=ends, impl="triton")
            same((got,), (reference.index_logits(queries, keys, starts=starts, ends=ends),))


@kernel
@each_format
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_and_pages(format, precision):
    """Ordinary numbers: near, and -inf exactly where it belongs; from pages as from keys."""
    table, at = rotary(64), torch.arange(100, device=DEVICE)
    queries = reference.index_queries(normal(4, 6, 64), normal(4, 6, seed=1), table, at[:4], format=format)
    keys = reference.index_keys(normal(100, 64, seed=2), table, at, format=format)
    for page_size, gap in ((16, 3), (64, 16)):
        needed = -(-100 // page_size)
        width = page_size * INDEX_LAYOUTS[format].token_bytes(64)
        pages = torch.zeros(9, width + gap, dtype=torch.uint8, device=DEVICE)[:, :width]
        order = torch.randperm(9, generator=generator(1))[:needed].to(DEVICE)
        slots = (order.repeat_interleave(page_size) * page_size + torch.arange(page_size, device=DEVICE).repeat(needed))[:100]
        fast.store_index_keys(keys, pages, slots, format=format, page_size=page_size, impl="triton")
        blocks = torch.full((3, needed + 2), -1, dtype=torch.int32, device=DEVICE)
        blocks[1, :needed], blocks[0, 1], blocks[2, 0] = order.int(), order[0].int(), 9
        for requests, ends in ((ints(1, 0, 2, -1), ints(100, 48, 99, 5)), (ints(1, 1, 3, 1), ints(999, 0, 5, 17))):
            given = queries, pages, blocks, requests, ends
            options = {"format": format, "page_size": page_size, "width": 150, "precision": precision}
            near(fast.paged_index_logits(*given, **options, impl="triton"), reference.paged_index_logits(*given, **options))
    options = {"starts": ints(0, 7, 99, 3), "ends": ints(100, 48, 99, 5), "precision": precision}
    near(fast.index_logits(queries, keys, **options, impl="triton"), reference.index_logits(queries, keys, **options))


def near(got, expected):
    """fp32 sums, of 14 bits where FP8 runs on Hopper; in bf16 a unit or two in the last place."""
    assert got.dtype == expected.dtype
    assert torch.equal(got == -INF, expected == -INF)
    there = expected > -INF
    if there.any():
        bits = 7 if got.dtype == torch.bfloat16 else 9 if DEVICE == "cuda" else 20
        assert (got.float() - expected.float())[there].abs().max() <= 2.0**-bits * expected[there].float().abs().max()


@kernel
def test_not_a_number():
    queries, keys = lattice("fp8", 3, 8, 40, 32)
    keys.scales[7], queries.weights[2, 3] = NAN, NAN
    got = fast.index_logits(queries, keys, ends=ints(40, 7, 40), impl="triton")
    assert got.isnan().sum(1).tolist() == [1, 0, 40]
    assert (got[1, 7:] == -INF).all()


@kernel
def test_selection():
    """Ties, both zeros, NaN, infinities, windows, slots, both dtypes, rows in one piece and in several."""
    for n, k, dtype in ((300, 20, torch.float32), (300, 310, torch.float32), (1000, 128, torch.bfloat16), (20000, 150, torch.float32)):
        logits = (normal(6, n, seed=n).float() * 4).round().div(4).to(dtype)
        logits[0, ::7], logits[1, ::3], logits[2, ::5], logits[2, 1::5], logits[3], logits[4, 9] = NAN, -INF, -0.0, 0.0, -INF, INF
        ends, starts = ints(n, n + 5, n // 2, n, -4, 11), ints(3, -2, 9, 0, 0, 11, dtype=torch.int64)
        pages = drawn(-2, 50, 3, -(-n // 64) - 1, seed=n, dtype=torch.int32)
        pages[0, 1], pages[2] = 2**30, -1
        slots = {"block_table": pages, "requests": ints(0, 1, 2, 3, -1, 1), "page_size": 64}
        for order in ("score", "index"):
            for more in ({}, {"ends": ends}, {"starts": starts, "ends": ends}, {"ends": ends, **slots}):
                got = fast.select_topk(logits, k, order=order, **more, impl="triton")
                assert torch.equal(got, reference.select_topk(logits, k, order=order, **more))


@kernel
def test_selection_is_exact_at_every_length():
    """Distinct scores of one binade in any order and in their own, and a tie at the last place, around the sizes of a piece."""
    for length, k in ((1, 1), (255, 7), (257, 200), (8192, 512), (8193, 2048), (16385, 512), (40000, 9)):
        row = torch.linspace(1, 1 + 2.0**-8, length, dtype=torch.float64).float()[torch.randperm(length, generator=generator(1))]
        row = torch.stack([row, torch.ones(length), row.sort().values, row.sort(descending=True).values]).to(DEVICE)
        got = fast.select_topk(row, k, order="score", impl="triton").long()
        assert torch.equal(row.gather(1, got), row.topk(k).values)
        assert got[1].tolist() == got[3].tolist() == list(range(k))


@kernel
def test_picks_of_a_library_are_put_right():
    """What follows FlashInfer's kernel: picks in any order, of NaN and -inf among them, windows, slots."""
    from dsv4.fast.kernels.index_select import finish, plain_scores

    logits = (normal(4, 90).float() * 2).round()
    logits[0, ::2], logits[1], logits[2, 5:9] = NAN, -0.0, -INF
    plain = plain_scores(logits)
    assert torch.equal(plain.view(torch.int32)[1], torch.zeros_like(plain[1]).view(torch.int32))
    assert (plain[0, ::2] == -INF).all()
    starts, ends = ints(0, 3, 0, 80), ints(90, 50, 9, 85)
    slots = ints(3, -1, 7, 1, 0)[None], ints(0, 0, 0, 0), 20
    picks = torch.full((4, 60), -1, dtype=torch.int32, device=DEVICE)
    for row, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        best = plain[row, a:b].sort(descending=True, stable=True).indices[:60].flip(0)
        picks[row, : len(best)] = best.int()
    for order in ("score", "index"):
        expected = reference.select_topk(logits, 60, starts=starts, ends=ends, order=order)
        assert torch.equal(finish(picks, logits, ends, starts, order, None, None, 0), expected)
        more = {"block_table": slots[0], "requests": slots[1], "page_size": slots[2]}
        expected = reference.select_topk(logits, 60, starts=starts, ends=ends, order=order, **more)
        assert torch.equal(finish(picks, logits, ends, starts, order, *slots), expected)


@kernel
def test_blocks():
    for n, block, count in ((100, 8, 5), (1000, 8, 2048), (77, 5, 3), (64, 1, 9), (33, 64, 2)):
        logits = normal(5, n, seed=n).float().round()
        logits[0, ::3], logits[1], logits[2], logits[3, : n // 2] = NAN, INF, -INF, NAN
        ends = ints(n, n, n - 1, n // 2, 0)
        expected = reference.candidate_blocks(logits, ends, block=block, count=count)
        assert torch.equal(fast.candidate_blocks(logits, ends, block=block, count=count, impl="triton"), expected)
        same(
            (fast.restrict_to_blocks(logits, expected, block=block, impl="triton"),),
            (reference.restrict_to_blocks(logits, expected, block=block),),
        )


@kernel
@each_format
def test_chain(format):
    """Entries and candidates from queries and keys, in chunks."""
    queries, keys = lattice(format, 9, 4, 200, 32, seed=1)
    ends = drawn(0, 201, 9, seed=2, dtype=torch.int32)
    candidates = reference.select_candidates(queries, keys, ends, count=6)
    assert torch.equal(fast.select_candidates(queries, keys, ends, count=6, chunk=4, impl="triton"), candidates)
    for some in (None, candidates):
        expected = reference.select_entries(queries, keys, ends, 40, candidates=some)
        for limits in ({}, {"chunk": 2}, {"budget_bytes": 2500}):
            assert torch.equal(fast.select_entries(queries, keys, ends, 40, candidates=some, **limits, impl="triton"), expected)


@kernel
def test_nan_codes_are_marked_for_a_library():
    from dsv4.fast.kernels.index_clean import mark_nan

    codes = drawn(0, 0x7E, 3, 70, 32, seed=2, dtype=torch.uint8)
    codes[0, 5, 31], codes[2, 69, 0] = 0x7F, 0xFF
    factors = normal(3, 70, seed=3).float()
    expected = factors.clone()
    expected[0, 5], expected[2, 69] = NAN, NAN
    assert torch.equal(mark_nan(codes, factors).view(torch.int32), expected.view(torch.int32))


@kernel
def test_unseen_numbers_of_a_library_are_cleaned():
    from dsv4.fast.kernels.index_clean import clean

    logits = torch.full((3, 5000), NAN, device=DEVICE)
    clean(logits, ints(0, 4090, 10), ints(5000, 4200, 3))
    assert logits.isnan().sum(1).tolist() == [5000, 110, 0]
    assert (torch.where(logits.isnan(), -INF, logits) == -INF).all()
    logits = torch.full((2, 100), NAN, device=DEVICE)
    clean(logits, None, ints(90, 100), ints(1, -1, 3, 9)[None], ints(0, 1), 16, 9)
    assert logits.isnan().nonzero()[:, 1].tolist() == [*range(16), *range(32, 48)]


@kernel
def test_visible_entries():
    positions = ints(0, 2, 3, 6, 7, 8, -1, -(2**40), 2**31 - 1, 2**31, 2**40, 2**63 - 1, dtype=torch.int64)
    for ratio in (0, 1, 2, 4, 128):
        assert torch.equal(fast.visible_entries(positions, ratio=ratio, impl="triton"), reference.visible_entries(positions, ratio=ratio))
