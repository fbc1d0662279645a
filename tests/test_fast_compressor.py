"""Fast compressor: the reference bit for bit, whatever the cut, the batch and the state; operators, graphs, errors."""

import inspect
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import compiled, compressor_ops, dispatch, kv_cache, norms, rotary, use
from dsv4.fast import compressor as fast
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import compressor as reference
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import ArgumentError, BackendUnavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("triton", "inductor", "eager") if DEVICE == "cuda" else ("inductor", "eager")
INF, NAN = float("inf"), float("nan")
KINDS = {"overlap": (4, True), "128": (128, False), "8": (8, False), "2": (2, False), "1": (1, False)}
each_kind = pytest.mark.parametrize("kind", KINDS)
DIM, DRAFTS, PAGE = 6, 2, 4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensor(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def same(got, expected):
    """Equal bits, NaN equal to NaN."""
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.is_floating_point():
            assert torch.equal(left.isnan(), right.isnan())
            left, right = (torch.where(part.isnan(), 0.0, part).contiguous().view(torch.uint8) for part in (left, right))
        assert torch.equal(left, right)


def options(kind, dim=DIM):
    ratio, overlap = KINDS[kind]
    return {"ratio": ratio, "overlap": overlap, "ape": random(ratio, dim * (1 + overlap), seed=99) if ratio > 2 else None}


def empty_state(kind, states, dim=DIM, drafts=DRAFTS):
    """Rings that hold NaN: whatever is read before it is written shows."""
    ratio, overlap = KINDS[kind]
    return torch.full_like(fast.compressor_state(states, dim, ratio=ratio, overlap=overlap, drafts=drafts, device=DEVICE), NAN)


def arguments(kind, lengths, starts, *, states=7, dim=DIM, seed=0):
    """Values, scores, a state of which tokens before `starts` are numbers and all else NaN, starts, offsets; and the states of requests."""
    _, overlap = KINDS[kind]
    tokens, width = sum(lengths), dim * (1 + overlap)
    state = empty_state(kind, states, dim)
    rows = torch.randperm(states, generator=torch.Generator().manual_seed(seed))[: len(lengths)]
    ring = state.shape[1]
    for b, start in enumerate(starts):
        seen = torch.arange(max(start - ring, 0), start)
        if ring:
            state[rows[b], seen % ring] = random(len(seen), 2 * width, seed=seed + 50 + b)
    given = random(tokens, width, seed=seed), 3 * random(tokens, width, seed=seed + 1), state, tensor(*starts), offsets(lengths)
    return given, rows.to(torch.int32).to(DEVICE)


def check(given, impl, **more):
    """One call against the reference; the caller's state is the one that is updated."""
    values, scores, state, *batch = given
    expected = reference.compress(*given, **more)
    got = fast.compress(values, scores, mine := state.clone(), *batch, **more, impl=impl)
    assert got.state is mine
    same(got, expected)
    same(fast.compression_plan(*batch, ratio=more["ratio"], tokens=len(values), state_rows=idle(more["state_rows"], len(state))), got[1:3])
    return got


def idle(rows, states):
    return rows if rows is None else torch.where(rows < states, rows, -1)


# The reference, bit for bit


@each_kind
@pytest.mark.parametrize("impl", WAYS)
def test_ragged_requests(kind, impl):
    """First windows, windows begun before, several at once, none; requests without tokens, idle ones, states in any order."""
    r, _ = KINDS[kind]
    more = options(kind)
    for lengths, starts in (
        ([3 * r + 1, 0, r - 1, 1, 2 * r, r], [0, 5, r, 2 * r - 1, r + 1, 3]),
        ([1] * 5, [r - 1, 2 * r - 1, 0, 4 * r - 1, 7]),
        ([1, 1], [r, r]),
        ([4 * r + 3], [0]),
        ([0, 0], [3, 4]),
    ):
        given, rows = arguments(kind, lengths, starts, seed=len(lengths))
        check(given, impl, **more, state_rows=rows)
        halted = rows.clone()
        halted[::2] = -1
        got = check(given, impl, **more, state_rows=halted)
        assert not (got.requests.cpu().unsqueeze(1) == torch.arange(0, len(lengths), 2)).any()
        check(given, impl, **more, state_rows=torch.full_like(rows, -1))


@each_kind
def test_without_state_rows_or_bias(kind):
    r, overlap = KINDS[kind]
    given, _ = arguments(kind, [r + 1, 2, 3 * r], [0, 0, 0])
    check(given, "eager", ratio=r, overlap=overlap, state_rows=None)


@each_kind
@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_what_is_out_of_range_counts_as_idle(kind, impl):
    r, _ = KINDS[kind]
    given, rows = arguments(kind, [2 * r] * 4, [0, r, 1, 5])
    values, scores, state, starts, cu_seqlens = given
    run = partial(check, impl=impl, **options(kind))
    run(given, state_rows=torch.where(tensor(0, 1, 2, 3) == 1, 7, rows).int())
    run((values, scores, state, tensor(0, -1, -(2**62), 2**62), cu_seqlens), state_rows=rows)
    for wrong in ([0, 5, 3, 8, 8], [-1, 2, 4, 6, 8 * r], [0, 2 * r, 4 * r, 9 * r, 8 * r], [2, 1, 0, 5 * r, 6 * r]):
        run((values, scores, state, starts, tensor(*wrong, dtype=torch.int32)), state_rows=rows)
    run((values, scores, state, starts, tensor(0, 2, 2, r, 2 * r, dtype=torch.int32)), state_rows=rows)  # tokens of nobody


@each_kind
@pytest.mark.parametrize("impl", WAYS)
def test_any_cut_gives_the_same_bits(kind, impl):
    r, _ = KINDS[kind]
    total = 3 * r + 2
    values, scores = random(total, DIM * (1 + KINDS[kind][1])), random(total, DIM * (1 + KINDS[kind][1]), seed=1)
    call = partial(fast.compress, **options(kind), state_rows=tensor(1, dtype=torch.int32), impl=impl)
    whole, alike = empty_state(kind, 2), empty_state(kind, 2)
    expected = call(values, scores, whole, tensor(0), offsets([total]))
    entries = expected.pooled[: total // r]
    for pieces in ([1] * total, [r - 1, 1, r, total - 2 * r], [total - 1, 1]):
        if impl == "inductor" and len(pieces) > 20:
            continue
        state, start, got = alike.clone(), 0, []
        for length in pieces:
            result = call(values[start : start + length], scores[start : start + length], state, tensor(start), offsets([length]))
            got.append(result.pooled[result.requests >= 0])
            start += length
        same((torch.cat(got), state), (entries, whole))


@each_kind
def test_rolled_back_tokens_leave_no_trace(kind):
    """Two drafts in each call, of which none, one or both are wrong."""
    r, overlap = KINDS[kind]
    total, width = 4 * r + 6, DIM * (1 + overlap)
    values, scores = random(total, width), random(total, width, seed=1)
    call = partial(fast.compress, **options(kind), impl="eager")
    state, found, start, turn = empty_state(kind, 1), {}, tensor(0), 0
    while int(start) + 3 <= total:
        at, kept = int(start), 1 + turn % 3
        drafts = [torch.cat([part[at : at + kept], -part[at + kept : at + 3]]) for part in (values, scores)]
        result = call(*drafts, state, start, offsets([3]))
        found |= {entry: row for entry, row in zip(result.entries.tolist(), result.pooled, strict=True) if entry >= 0}
        start = fast.roll_back(start, tensor(kept), drafted=3 - kept, state=state, ratio=r, overlap=overlap)
        turn += 1
    expected = reference.compress(values, scores, empty_state(kind, 1), tensor(0), offsets([total]), **options(kind))
    complete = int(start) // r
    same((torch.stack([found[w] for w in range(complete)]),), (expected.pooled[:complete],))


@each_kind
@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_where_nothing_may_be_counted(kind, impl, monkeypatch):
    """As on a device: all rows that there may be are computed and written, those left over too."""
    r, _ = KINDS[kind]

    def bounds(starts, cu_seqlens, ratio, tokens, rows, ring):
        return rows, min(tokens, len(starts) * ring)

    monkeypatch.setattr(compressor_ops, "_most", bounds)
    for lengths, starts in (([3 * r + 1, 0, r - 1], [0, 5, r]), ([1] * 5, [0, 1, 2, 3, r]), ([9 * r], [1])):
        given, rows = arguments(kind, lengths, starts)
        for states in (rows, torch.where(torch.arange(len(rows), device=DEVICE) == 0, -1, rows).int(), torch.full_like(rows, -1)):
            check(given, impl, **options(kind), state_rows=states)


@pytest.mark.parametrize("impl", WAYS)
def test_specials_follow_the_reference(impl):
    given, rows = arguments("8", [16, 16], [0, 4])
    values, scores, *rest = given
    scores[:8, 0], scores[3, 1], scores[4, 2], values[5, 3], scores[6, 4] = -INF, INF, NAN, INF, -INF
    scores[5, 5], values[8:16, 5] = -INF, NAN
    got = check((values, scores, *rest), impl, **options("8"), state_rows=rows)
    assert got.pooled[0].isnan().tolist() == [True, True, True, False, False, False]


def test_nothing():
    for kind in KINDS:
        for lengths in ([], [0, 0]):
            given, rows = arguments(kind, lengths, [0] * len(lengths))
            got = check(given, "eager", **options(kind), state_rows=rows)
            assert got.pooled.shape == (0, DIM)
            check(given, "inductor", **options(kind), state_rows=rows)


@pytest.mark.parametrize("impl", [way for way in WAYS if way != "triton"])
def test_strided_arguments(impl):
    (values, scores, state, starts, cu_seqlens), rows = arguments("overlap", [9, 5], [0, 7])
    wide = torch.cat([values, scores, values], 1)
    apart = torch.full((7, 12, 26), 5.0, device=DEVICE)[:, 1:11, 1:25]
    apart.copy_(state)
    got = fast.compress(
        wide[:, :12], wide[:, 12:24], apart, torch.stack([starts, starts], 1)[:, 0], cu_seqlens, **options("overlap"),
        state_rows=torch.stack([rows, rows], 1)[:, 0], impl=impl,
    )  # fmt: skip
    same(got, reference.compress(values, scores, state, starts, cu_seqlens, **options("overlap"), state_rows=rows))
    assert apart._base[:, 0].eq(5).all()
    assert apart._base[:, 11:].eq(5).all()
    assert apart._base[:, :, 25].eq(5).all()


@pytest.mark.parametrize("impl", WAYS)
def test_a_window_does_not_depend_on_its_batch(impl):
    """CP-09."""
    (values, scores, state, *_), rows = arguments("overlap", [8] * 64, [0] * 64, states=64)
    run = partial(fast.compress, **options("overlap"), impl=impl)
    whole = run(values, scores, state.clone(), tensor(*[0] * 64), offsets([8] * 64), state_rows=rows)
    for count in (1, 6, 17):
        part = run(
            values[: 8 * count], scores[: 8 * count], state.clone(), tensor(*[0] * count), offsets([8] * count), state_rows=rows[:count]
        )
        live = part.requests >= 0
        same((part.pooled[live],), (whole.pooled[: 2 * count],))


# Products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_whole_numbers_are_exact(dtype):
    for tokens, width in ((0, 5), (1, 300), (33, 256), (70, 7)):
        x, wkv, wgate = ((random(rows, 90, seed=rows + n) * 9).round() for n, rows in enumerate((tokens, width, width)))
        got = fast.project(x.bfloat16(), wkv.to(dtype), wgate.bfloat16())
        same(got, ((x.double() @ wkv.double().T).float() + 0.0, (x.double() @ wgate.double().T).float() + 0.0))


def test_products_do_not_depend_on_the_batch():
    spread = random(200, 512, seed=2).mul(6).exp()
    x, wkv, wgate = (random(200, 512) * spread).bfloat16(), random(280, 512, seed=1).bfloat16(), random(280, 512, seed=3)
    whole = fast.project(x, wkv, wgate, impl="eager")
    same(whole, reference.project(x, wkv, wgate))
    for length in (1, 2, 31, 32, 33, 129):
        same(fast.project(x[:length], wkv, wgate, impl="eager"), (part[:length] for part in whole))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    same(fast.project(x[order], wkv, wgate, impl="eager"), (part[order] for part in whole))


# Into the cache


def cache(kind, layout, lengths, starts, seed=0):
    """Arguments of `compress_and_store` with all its options; slots that repeat, and some for rows that will be left over."""
    dims = KV_LAYOUTS[layout].dims
    ratio, _ = KINDS[kind]
    given, rows = arguments(kind, lengths, starts, dim=dims, seed=seed)
    count = min(sum(lengths), sum(lengths) // ratio + len(lengths))
    pages = torch.randint(0, 256, (3, KV_LAYOUTS[layout].page_bytes(PAGE)), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    slots = torch.randint(-1, 3 * PAGE + 1, (count,), generator=torch.Generator().manual_seed(seed + 1))
    table = rope_table(rope_frequencies(160000.0, device=DEVICE), 3 * ratio)  # entries after the third are beyond it
    weight = random(dims, seed=7).bfloat16()
    more = {**options(kind, dims), "eps": 1e-6, "layout": layout, "page_size": PAGE, "state_rows": rows}
    return (*given, weight, table, pages.to(DEVICE), slots.to(DEVICE)), more


def by_steps(module, given, more, **impl):
    """The four functions one after another, on a state and pages of their own."""
    values, scores, state, starts, cu_seqlens, weight, table, pages, slots = given
    names = ("ratio", "overlap", "ape", "state_rows")
    steps = {"store_kv": module.store_kv, "apply_rope": rotary.apply_rope, "rms_norm": norms.rms_norm}
    got = fast.compress(values, scores, state.clone(), starts, cu_seqlens, **{name: more[name] for name in names}, **impl)
    there = got.requests >= 0
    latents = torch.where(there[:, None], steps["rms_norm"](got.pooled, weight, eps=more["eps"], **impl), 0.0)
    rows = steps["apply_rope"](latents, table, torch.where(there, got.entries * more["ratio"], -1), **impl)
    stored = steps["store_kv"](
        rows, pages.clone(), torch.where(there, slots, -1), layout=more["layout"], page_size=more["page_size"],
        amax_floor=more.get("amax_floor", "official"), **impl,
    )  # fmt: skip
    return latents, got.requests, got.entries, got.state, stored


CACHES = [("overlap", "v4"), ("128", "v4"), ("2", "v41_fp4"), ("1", "v41_fp4_inline"), ("8", "v41"), ("2", "uniform_fp8")]


@pytest.mark.parametrize(("kind", "layout"), CACHES)
@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_one_call_into_the_cache_is_its_steps(kind, layout, impl):
    r, _ = KINDS[kind]
    for lengths, starts in (([2 * r + 1, 0, r, 3], [0, 5, r + 1, 4 * r - 2]), ([1, 1, 1], [r - 1, 0, 3 * r - 1]), ([1], [r])):
        given, more = cache(kind, layout, lengths, starts)
        mine = [part.clone() for part in given]
        got = fast.compress_and_store(*mine, **more, impl=impl)
        assert got.state is mine[2]
        assert got.pages is mine[7]
        same(got, by_steps(kv_cache, given, more, impl=impl))
        same(got, reference.compress_and_store(*given, **more))
        assert not got.latents[got.requests < 0].any()


@pytest.mark.parametrize(("kind", "layout"), [("overlap", "v4"), ("2", "v41_fp4")])
def test_one_graph_into_the_cache_is_its_steps(kind, layout):
    r, _ = KINDS[kind]
    for lengths, starts in (([2 * r + 1, 0, r, 3], [0, 5, r + 1, 4 * r - 2]), ([1, 1, 1], [r - 1, 0, 3 * r - 1]), ([1], [r])):
        given, more = cache(kind, layout, lengths, starts)
        got = fast.compress_and_store(*(part.clone() for part in given), **more, impl="inductor")
        same(got, by_steps(kv_cache, given, more, impl="eager"))


def test_rows_left_over_are_stored_nowhere():
    given, more = cache("8", "v41", [3, 3, 8], [0, 1, 0])
    *rest, pages, _ = given
    got = fast.compress_and_store(*rest, mine := pages.clone(), tensor(0, 5, 5, 5), **more, impl="eager")
    assert got.requests.tolist() == [2, -1, -1, -1]
    changed = (mine != pages).view(3, -1).nonzero()
    width = KV_LAYOUTS["v41"].token_bytes
    assert len(changed) <= width
    assert set(changed[:, 0].tolist()) == {0}


# Operators and graphs


def samples():
    given, rows = arguments("overlap", [5, 3], [0, 7])
    cached, more = cache("2", "v41_fp4", [4, 1], [0, 3])
    return {
        "project": (random(5, 32).bfloat16(), random(6, 32).bfloat16(), random(6, 32)),
        "compression_plan": (given[3], given[4], 4, 8, rows),
        "compress": (*given, 4, True, options("overlap")["ape"], rows),
        "compress_and_store": (*cached, 2, False, None, 1e-6, "v41_fp4", PAGE, "official", more["state_rows"]),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_chain_is_one_graph():
    """Products, plan, entries and cache, the state and the pages updated in it."""
    given, more = cache("2", "v41_fp4", [5, 4], [0, 3])
    _, _, state, starts, cu_seqlens, weight, table, pages, slots = given
    x, wkv, wgate = random(9, 32).bfloat16(), random(512, 32, seed=1).bfloat16(), random(512, 32, seed=2).bfloat16()

    def step(x, state, pages):
        values, scores = fast.project(x, wkv, wgate, impl="eager")
        result = fast.compress_and_store(values, scores, state, starts, cu_seqlens, weight, table, pages, slots, **more, impl="eager")
        return result.latents, result.requests, result.state, result.pages

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(x, state.clone(), pages.clone())
    mine = state.clone(), pages.clone()
    same(traced(x, *mine), expected)
    same(mine, expected[2:])


def test_graphs_per_function():
    compiled._graph.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    for lengths, starts in (([], []), ([1], [3]), ([1], [0]), ([127], [0]), ([64, 64], [5, 9]), ([1] * 129, [3] * 129), ([0, 9], [1, 1])):
        (values, scores, *batch), rows = arguments("overlap", lengths, starts, states=130)
        for apart in (values, torch.cat([values, values], 1)[:, :12]):
            fast.compress(apart, scores, *batch, **options("overlap"), state_rows=rows, impl="inductor")
            with torch.inference_mode():
                fast.compress(
                    apart.clone(), scores, *(part.clone() for part in batch), **options("overlap"), state_rows=rows, impl="inductor"
                )
    (values, scores, _, *batch), _ = arguments("overlap", [9], [0], states=1)
    fast.compress(values, scores, empty_state("overlap", 1, drafts=7), *batch, **options("overlap"), impl="inductor")
    assert counters["stats"]["unique_graphs"] == 1
    counters.clear()
    for lengths, starts in (([1], [1]), ([127], [0]), ([1] * 6, [1] * 6)):
        given, more = cache("2", "v41_fp4", lengths, starts)
        fast.compress_and_store(*given, **more, impl="inductor")
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
def test_replays_follow_their_inputs():
    given, more = cache("overlap", "v4", [1] * 6, [3] * 6)
    mine = [part.clone() for part in given]
    fast.compress_and_store(*mine, **more)
    for part, original in zip(mine, given, strict=True):
        part.copy_(original)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fast.compress_and_store(*mine, **more)
    for step in range(6):
        mine[0].copy_(random(*mine[0].shape, seed=step))
        mine[3].add_(1)
        expected = reference.compress_and_store(*(part.clone() for part in mine), **more)
        graph.replay()
        same(got, expected)


# Errors


def test_gradients_are_refused():
    given, rows = arguments("8", [8], [0])
    cached, more = cache("2", "v41", [2], [0])
    for call in (
        lambda: fast.project(random(2, 8).bfloat16().requires_grad_(), random(3, 8), random(3, 8)),
        lambda: fast.compress(given[0].clone().requires_grad_(), *given[1:], **options("8"), state_rows=rows),
        lambda: fast.compress_and_store(cached[0], cached[1].clone().requires_grad_(), *cached[2:], **more),
    ):
        with use("eager"):
            with pytest.raises(ArgumentError, match="no backward"):
                call()
            with torch.no_grad():
                call()


def test_nothing_is_written_when_arguments_are_wrong():
    given, more = cache("8", "v41", [16], [0])
    for changed in ({"layout": "v5"}, {"page_size": 99}, {"ratio": 7}, {"eps": -1.0}, {"amax_floor": "none of these"}):
        mine = [part.clone() for part in given]
        with pytest.raises(ArgumentError) as caught:
            fast.compress_and_store(*mine, **{**more, **changed})
        assert caught.value.argument in {"pages" if "page_size" in changed else "ape" if "ratio" in changed else next(iter(changed))}
        same(mine, given)
    state = given[2][:1].expand(7, -1, -1)
    with pytest.raises(ArgumentError, match=r"^state: got strides"):
        fast.compress(*given[:2], state, *given[3:5], **options("8", 512))


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    given, rows = arguments("8", [8], [0])
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.compress(*given, **options("8"), state_rows=rows, impl="triton")


def test_triton_refuses_a_state_that_it_cannot_write():
    given, _ = arguments("8", [8], [0])
    (row,) = (row for row in dispatch.TABLES["compressor.compress"] if row.backend == "triton")
    asked = {"values": given[0], "state": given[2], "overlap": False}
    assert row.arguments(asked) is None
    assert "contiguous state" in row.arguments({**asked, "state": given[2].transpose(0, 1)})
    assert "even number" in row.arguments({**asked, "values": given[0][:, :5]})


def test_every_way_keeps_what_may_be_demanded():
    with use(batch_invariant=True, deterministic=True):
        for function, rows in dispatch.TABLES.items():
            if function.startswith("compressor."):
                assert all(row.deterministic and row.batch_invariant and row.graph_safe for row in rows)
        fast.project(random(3, 8).bfloat16(), random(4, 8), random(4, 8))


@pytest.mark.parametrize("name", fast.__all__)
def test_signatures_equal_the_reference(name):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (fast, reference))
    assert [p for key, p in ours.items() if key != "impl"] == list(theirs.values())


@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_offsets_that_point_nowhere(backend: str, ratio: int) -> None:
    """An idle request's offsets are not followed, and no tokens are no tokens whatever the offsets say."""
    ring = 0 if ratio == 1 else ratio
    for tokens, offsets in ((1, [100, 101]), (0, [0, 1]), (3, [-5, -2]), (3, [1, 9])):
        values, state = torch.randn(tokens, 2), torch.zeros(1, ring, 4)
        starts, cu_seqlens = torch.tensor([0]), torch.tensor(offsets, dtype=torch.int32)
        expected = reference.compress(values, values, state, starts, cu_seqlens, ratio=ratio)
        actual = fast.compress(values, values, state.clone(), starts, cu_seqlens, ratio=ratio, impl=backend)
        assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
