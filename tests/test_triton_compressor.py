"""The compressor's Triton kernels against the reference, bit for bit: entries, state, records.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, which must be asked for before triton is imported: one test runs
this file again in a process of its own.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.fast import compressor as fast
from dsv4.fast import dispatch
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import compressor as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from interpreted import INTERPRETED, passes

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
INF, NAN = float("inf"), float("nan")
KINDS = {
    "overlap": (4, True),
    "8": (8, False),
    "3": (3, False),
    "overlap of 2": (2, True),
    "2": (2, False),
    "1": (1, False),
    "128": (128, False),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=28)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the triton rows run on the CPU, for the interpreter."""
    for function in ("compress", "compress_and_store", "compression_plan"):
        rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES[f"compressor.{function}"])
        monkeypatch.setitem(dispatch.TABLES, f"compressor.{function}", rows)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def same(got, expected):
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.is_floating_point():
            assert torch.equal(left.isnan(), right.isnan())
            left, right = (torch.where(part.isnan(), 0.0, part).contiguous().view(torch.uint8) for part in (left, right))
        assert torch.equal(left, right)


def options(kind, dim):
    ratio, overlap = KINDS[kind]
    return {"ratio": ratio, "overlap": overlap, "ape": random(ratio, dim * (1 + overlap), seed=99) if ratio > 2 else None}


def arguments(kind, lengths, starts, *, dim=6, drafts=1, states=7, seed=0):
    """Values, scores, a state of which tokens before `starts` are numbers and all else NaN, starts, offsets; and the states of requests."""
    ratio, overlap = KINDS[kind]
    tokens, width = sum(lengths), dim * (1 + overlap)
    state = torch.full_like(reference.compressor_state(states, dim, ratio=ratio, overlap=overlap, drafts=drafts, device=DEVICE), NAN)
    rows, ring = torch.randperm(states, generator=torch.Generator().manual_seed(seed))[: len(lengths)], state.shape[1]
    for b, start in enumerate(starts):
        seen = torch.arange(max(start - ring, 0), start)
        if ring:
            state[rows[b], seen % ring] = random(len(seen), 2 * width, seed=seed + 50 + b)
    given = (
        random(tokens, width, seed=seed),
        3 * random(tokens, width, seed=seed + 1),
        state,
        ints(*starts, dtype=torch.int64),
        offsets(lengths),
    )
    return given, rows.to(torch.int32).to(DEVICE)


def check(given, **more):
    values, scores, state, *batch = given
    expected = reference.compress(*given, **more)
    got = fast.compress(values, scores, mine := state.clone(), *batch, **more, impl="triton")
    assert got.state is mine
    same(got, expected)
    rows = more["state_rows"] if more["state_rows"] is None else torch.where(more["state_rows"] < len(state), more["state_rows"], -1)
    same(fast.compression_plan(*batch, ratio=more["ratio"], tokens=len(values), state_rows=rows, impl="triton"), got[1:3])
    return got


@kernel
@each_kind
def test_ragged_requests(kind):
    """First windows, windows begun before, several at once, none; requests without tokens, idle ones, states in any order."""
    r, overlap = KINDS[kind]
    for lengths, starts in (([2 * r + 1, 0, r - 1, 1], [0, 5, r, 2 * r - 1]), ([1] * 4, [r - 1, 3 * r - 1, 0, 7]), ([0, 0], [3, 4])):
        given, rows = arguments(kind, lengths, starts, seed=len(lengths))
        for states in (rows, torch.where(torch.arange(len(rows), device=DEVICE) % 2 == 0, -1, rows).int()):
            check(given, **options(kind, 6), state_rows=states)
    given, _ = arguments(kind, [r + 1, 2], [0, 0])
    check(given, ratio=r, overlap=overlap, state_rows=None)


@kernel
@pytest.mark.parametrize("kind", ["overlap", "1"])
def test_what_is_out_of_range_counts_as_idle(kind):
    r, _ = KINDS[kind]
    given, rows = arguments(kind, [2 * r] * 4, [0, r, 1, 5])
    values, scores, state, starts, cu_seqlens = given
    more = options(kind, 6)
    check(given, **more, state_rows=torch.where(ints(0, 1, 2, 3) == 1, 7, rows).int())
    check((values, scores, state, ints(0, -1, -(2**62), 2**62, dtype=torch.int64), cu_seqlens), **more, state_rows=rows)
    for wrong in ([0, 5, 3, 8, 8], [-1, 2, 4, 6, 8 * r], [0, 2 * r, 4 * r, 9 * r, 8 * r], [0, 2, 2, r, 2 * r]):
        check((values, scores, state, starts, ints(*wrong)), **more, state_rows=rows)
    check((*given[:2], state[:0], *given[3:]), **more, state_rows=rows)


@kernel
def test_more_requests_than_are_looked_at_together():
    """Requests after the first 128 are found as well, and count those before; idle ones on both sides count nothing."""
    lengths = [3 * (b in (0, 5, 126, 127, 128, 129, 130, 139)) for b in range(140)]
    given, rows = arguments("3", lengths, [b % 7 for b in range(140)], dim=2, states=140)
    for idle in ((126, 129), (127, 128), (0, 130, 139)):
        states = rows.clone()
        states[list(idle)] = -1
        got = check(given, **options("3", 2), state_rows=states)
        assert got.requests[got.requests >= 0].unique().tolist() == [b for b in range(140) if lengths[b] and b not in idle]


@kernel
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_widths(dim):
    given, rows = arguments("overlap", [9], [6], dim=dim)
    check(given, **options("overlap", dim), state_rows=rows)


@kernel
@pytest.mark.parametrize("kind", ["overlap", "128"])
def test_any_cut_gives_the_same_bits(kind):
    r, _ = KINDS[kind]
    (values, scores, state, *_), _ = arguments(kind, [2 * r + 1], [0], states=1)
    call = partial(fast.compress, **options(kind, 6), impl="triton")
    expected = call(values, scores, whole := state.clone(), ints(0, dtype=torch.int64), offsets([2 * r + 1]))
    start, got = 0, []
    for length in (r - 1, 1, 1, r - 1, 1):
        mine = slice(start, start + length)
        result = call(values[mine], scores[mine], state, ints(start, dtype=torch.int64), offsets([length]))
        got.append(result.pooled[result.requests >= 0])
        start += length
    same((torch.cat(got), state), (expected.pooled[:2], whole))


@kernel
def test_specials_follow_the_reference(monkeypatch):
    """Minus infinity in the first of sixteen tiles, in all; infinity; NaN; values that meet a weight of zero."""
    from dsv4.fast.kernels import compress

    monkeypatch.setattr(compress, "TILE", 32)
    (values, scores, *rest), rows = arguments("128", [128], [0])
    scores[:64, 0], scores[:, 1], scores[100, 2], scores[4, 3], values[9, 4], scores[127, 5] = -INF, -INF, INF, NAN, INF, 1000.0
    got = check((values, scores, *rest), **options("128", 6), state_rows=rows)
    assert got.pooled[0].isnan().tolist() == [False, True, True, True, False, False]
    assert got.pooled[0, 5] == values[127, 5].bfloat16()


@kernel
def test_nothing():
    for lengths in ([], [0, 0]):
        given, rows = arguments("overlap", lengths, [0] * len(lengths))
        check(given, **options("overlap", 6), state_rows=rows)


PAGE = 4


def cache(kind, layout, lengths, starts, seed=0):
    """Arguments of `compress_and_store`; slots that repeat, and some for rows that will be left over; a table that ends too early."""
    dims, (ratio, _) = KV_LAYOUTS[layout].dims, KINDS[kind]
    given, rows = arguments(kind, lengths, starts, dim=dims, seed=seed)
    count = min(sum(lengths), sum(lengths) // ratio + len(lengths))
    pages = torch.randint(0, 256, (2, KV_LAYOUTS[layout].page_bytes(PAGE)), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    slots = torch.randint(-1, 2 * PAGE + 1, (count,), generator=torch.Generator().manual_seed(seed + 1))
    table = rope_table(rope_frequencies(160000.0, device=DEVICE), 3 * ratio)
    weight = random(dims, seed=7).bfloat16()
    more = {**options(kind, dims), "eps": 1e-6, "layout": layout, "page_size": PAGE, "state_rows": rows}
    return (*given, weight, table, pages.to(DEVICE), slots.to(DEVICE)), more


CACHES = [
    ("overlap", "v4"),
    ("128", "v4"),
    ("2", "v41_fp4"),
    ("1", "v41_fp4_inline"),
    ("8", "v41"),
    ("2", "v41_inline"),
    ("2", "uniform_fp8"),
]


@kernel
@pytest.mark.parametrize(("kind", "layout"), CACHES)
def test_one_launch_into_the_cache(kind, layout):
    r, _ = KINDS[kind]
    for lengths, starts in (([r + 1, 0, 3], [0, 5, 4 * r - 2]), ([1, 1, 1], [r - 1, 0, 3 * r - 1])):
        given, more = cache(kind, layout, lengths, starts)
        mine = [part.clone() for part in given]
        got = fast.compress_and_store(*mine, **more, impl="triton")
        assert got.state is mine[2]
        assert got.pages is mine[7]
        same(got, reference.compress_and_store(*given, **more))


@kernel
def test_weights_of_either_type_from_anywhere():
    given, more = cache("1", "v41_fp4_inline", [2, 1], [0, 2])
    weight = given[5]
    wide = weight.float()
    for placed in (wide, torch.cat([weight[:1], weight])[1:], torch.cat([wide[:1], wide])[1:], torch.stack([wide, wide], -1)[:, 0]):
        mine = [part.clone() for part in given]
        mine[5] = placed
        same(fast.compress_and_store(*mine, **more, impl="triton"), reference.compress_and_store(*given, **more))


@kernel
def test_the_state_of_one_request_is_written_in_its_place():
    """Contiguous, for all its odd stride."""
    given, rows = arguments("3", [4], [2], states=1)
    memory = torch.zeros(given[2].numel() + 9, device=DEVICE)
    state = memory.as_strided(given[2].shape, (given[2].numel() + 1, *given[2].stride()[1:])).copy_(given[2])
    expected = reference.compress(*given, **options("3", 6), state_rows=rows)
    same(fast.compress(*given[:2], state, *given[3:], **options("3", 6), state_rows=rows, impl="triton"), expected)


@kernel
def test_rows_left_over_are_stored_nowhere_and_shadow_nothing():
    given, more = cache("8", "v41", [3, 3, 8], [0, 1, 0])
    given = (*given[:-1], ints(5, 5, 5, 5))
    same(fast.compress_and_store(*(part.clone() for part in given), **more, impl="triton"), reference.compress_and_store(*given, **more))


@kernel
def test_more_rows_than_look_for_their_slot_themselves(monkeypatch):
    """Slots of rows left over are taken away before the last row of each slot is found."""
    from dsv4.fast.kernels import compress, kv_rows

    for module in (compress, kv_rows):
        monkeypatch.setattr(module, "MOST_SEARCHED", 3)
    given, more = cache("2", "v41_fp4", [5, 1, 1, 4], [0, 0, 1, 2])
    given = (*given[:-1], ints(*[3, 3, 1, 3, 1, 0, 3, 1, 3][: len(given[-1])]))
    same(fast.compress_and_store(*(part.clone() for part in given), **more, impl="triton"), reference.compress_and_store(*given, **more))


@kernel
@pytest.mark.skipif(INTERPRETED, reason="the interpreter's bf16 dot is wrong")
def test_products_do_not_depend_on_the_batch():
    x, wkv, wgate = random(300, 4096).bfloat16(), random(512, 4096, seed=1).bfloat16(), random(512, 4096, seed=2).bfloat16()
    whole = fast.project(x, wkv, wgate, impl="triton")
    for rows in (slice(0, 1), slice(7, 24), slice(100, 229)):
        same(fast.project(x[rows], wkv, wgate, impl="triton"), (part[rows] for part in whole))
