"""Attention through libraries and by plans: every form of call, spied on; what each card gets; refusals; probes; plans."""

import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import ModuleType

import pytest
import torch

from dsv4.fast import attention as fast
from dsv4.fast import attention_bodies as bodies
from dsv4.fast import attention_engines, attention_libraries, attention_plans, dispatch, product_bodies, use
from dsv4.fast.adapters import flashinfer_mla, flashmla
from dsv4.fast.adapters.flashinfer import LIBRARY as FLASHINFER
from dsv4.fast.dispatch import Device
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import attention as reference
from dsv4.types import ArgumentError, AttentionResult, BackendUnavailable, Unsupported
from tests.attention_libraries import (
    FlashInfer,
    FlashMLA,
    anywhere,
    cache,
    near,
    normal,
    our_kernels,
    picks_of,
    programs,
    queries,
    same,
)

CPU = torch.device("cpu")
WAYS = ("inductor", "eager")
FUNCTIONS = ("sparse_attention", "paged_attention", "decode_attention", "prefill_attention")
PICKS = (64, 128, 133, 192, 256, 512, 513, 1024, 1152)  # SA-07
HEADS = (8, 16, 32, 64, 128)
every_way = pytest.mark.parametrize("impl", WAYS)
kernels = pytest.fixture(our_kernels)


# Libraries, spied on


@pytest.fixture
def mla(monkeypatch):
    """FlashMLA on a CPU that says it is an H200."""
    return pretend(monkeypatch, (9, 0))[0]


def pretend(monkeypatch, capability, inline=False, proved=True):
    """Both libraries, made up, on a CPU of this capability. Whether they have proved themselves, or do so at their first call."""
    spies = FlashMLA(inline), FlashInfer()
    here = Device("cuda", capability)
    versions = {"sgl-flash-mla": "1.0.0", "flashinfer-python": "0.7.4"}
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions[name] if name in versions else found(name))
    for library, name, functions in (
        (flashmla.LIBRARY, "flash_mla", spies[0].functions()),
        (FLASHINFER, "flashinfer", {"mla": spies[1].mla}),
    ):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(library, "_found", False)
        known = {(symbol, "cpu"): None for symbol in (flashmla.SPARSE_FORWARD, flashmla.SPARSE_DECODE, flashinfer_mla.MLA)}
        monkeypatch.setattr(library, "_proofs", known if proved else {})
    for module in (flashmla, flashinfer_mla, attention_libraries, attention_plans):
        monkeypatch.setattr(module, "describe", lambda device: here)
    anywhere(monkeypatch, "flashmla")
    anywhere(monkeypatch, "flashinfer")
    return spies


@pytest.mark.parametrize("pairs", [{}, {("v41_inline", "v41_fp4_inline"): False}, {("v41", "v41_fp4"): True}])
def test_probes_of_flashmla_pass_on_right_answers(monkeypatch, pairs):
    pretend(monkeypatch, (10, 0) if pairs else (9, 0), "v41_inline" in str(pairs), proved=False)
    if pairs:
        monkeypatch.setitem(flashmla.PAGED, (10, 0), pairs)
    assert flashmla.LIBRARY.disproved(flashmla.SPARSE_FORWARD, CPU) is None
    assert flashmla.LIBRARY.disproved(flashmla.SPARSE_DECODE, CPU) is None


def wrong_scale(spy):
    plain = spy._finish
    spy._finish = lambda q, rows, there, scale, sink, infinite: plain(q, rows, there, scale * 1.01, sink, infinite)


def no_sink(spy):
    plain = spy._finish
    spy._finish = lambda q, rows, there, scale, sink, infinite: plain(q, rows, there, scale, None, infinite)


def base_two(spy):
    plain = spy._finish
    spy._finish = lambda *given: (*plain(*given)[:2], plain(*given)[2] * 1.4426950408889634)


def minus_infinity(spy):
    plain = spy._finish
    spy._finish = lambda *given: (*plain(*given)[:2], plain(*given)[2].nan_to_num(posinf=-torch.inf))


def first_slot_for_none(spy):
    plain = spy._rows
    spy._rows = lambda cache, indices: (plain(cache, indices.clamp(min=0))[0], plain(cache, indices)[1] | True)


@pytest.mark.parametrize("wrong", [wrong_scale, no_sink, base_two, minus_infinity, first_slot_for_none])
def test_probes_of_flashmla_fail_on_wrong_answers(monkeypatch, wrong):
    spy = pretend(monkeypatch, (9, 0), proved=False)[0]
    wrong(spy)
    assert "failed its known-answer test" in flashmla.LIBRARY.disproved(flashmla.SPARSE_DECODE, CPU)
    if wrong in (wrong_scale, no_sink, base_two):
        assert "failed its known-answer test" in flashmla.LIBRARY.disproved(flashmla.SPARSE_FORWARD, CPU)


@pytest.mark.parametrize("change", ["natural", "row 0 counts", "scale"])
def test_probes_of_flashinfer_fail_on_wrong_answers(monkeypatch, change):
    spy = pretend(monkeypatch, (9, 0), proved=False)[1]
    run, plan = spy.mla.BatchMLAPagedAttentionWrapper.run, spy.mla.BatchMLAPagedAttentionWrapper.plan

    def wrong(self, *, query, kv_cache, out, lse, return_lse):
        rope = kv_cache[1] * 0 if change == "row 0 counts" else kv_cache[1]
        run(self, query=query, kv_cache=(kv_cache[0], rope), out=out, lse=lse, return_lse=return_lse)
        if change == "natural":
            lse *= 0.6931471805599453

    monkeypatch.setattr(spy.mla.BatchMLAPagedAttentionWrapper, "run", wrong)
    if change == "scale":
        changed = lambda self, **options: plan(self, **(options | {"sm_scale": 0.9}))  # noqa: E731
        monkeypatch.setattr(spy.mla.BatchMLAPagedAttentionWrapper, "plan", changed)
    assert "failed its known-answer test" in FLASHINFER.disproved(flashinfer_mla.MLA, CPU)


@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("heads", HEADS)
def test_sa_07_flashmla_pads_heads_and_picks(mla, heads, picks):
    q, sink, rows = queries(1, heads), normal(heads), cache("v4", 64, 2)
    slots = picks_of(128, 1, picks)
    expected = reference.paged_attention(q, rows, slots, sink)
    near(fast.decode_attention(q, rows, slots, sink, impl="flashmla"), expected)
    padded = 64 if heads <= 64 else 128
    wide = -(-picks // 64) * 64
    assert mla.calls[-1][:2] == ("pages", (1, 1, padded, 512))
    assert mla.calls[-1][3] == (1, 1, wide)
    assert mla.calls[-1][-2] is True
    near(fast.prefill_attention(q, rows, slots, sink, impl="flashmla"), expected)
    assert mla.calls[-1][:2] == ("rows", (1, padded, 512))
    assert mla.calls[-1][3] == (1, 1, -(-picks // 128) * 128)


@pytest.mark.parametrize("heads", [8, 64])
def test_flashmla_over_two_lists(mla, heads):
    """SA-01, SA-06: columns past a length hold anything; out of range is never an address; lists of both kinds, empty rows."""
    q, sink, rows, others = queries(4, heads), normal(heads), cache("v4", 64, 2), cache("v4", 2, 30)
    slots, more = picks_of(128, 4, 128, dtype=torch.int64), picks_of(60, 4, 200, seed=3)
    lengths = torch.tensor([0, 5, 128, 64], dtype=torch.int32)
    slots[1, 5:] = 2**30
    options = {"lengths": lengths, "extra": others, "extra_slots": more, "extra_lengths": torch.tensor([0, 200, 7, 199], dtype=torch.int32)}
    expected = reference.paged_attention(q, rows, slots, sink, **options)
    assert (expected.lse[0] == -torch.inf).all()
    for function in (fast.paged_attention, fast.decode_attention, fast.prefill_attention):
        near(function(q, rows, slots, sink, **options, impl="flashmla"), expected)
        near(function(q, rows, slots, **options, impl="flashmla"), reference.paged_attention(q, rows, slots, **options))
    kv, extra = normal(50, 512).bfloat16(), normal(40, 512, seed=2).bfloat16()
    indices, others = picks_of(50, 4, 133), picks_of(40, 4, 64, seed=4)
    for more in ({}, {"extra_kv": extra, "extra_indices": others}):
        near(fast.sparse_attention(q, kv, indices, sink, **more, impl="flashmla"), reference.sparse_attention(q, kv, indices, sink, **more))


def test_flashmla_reads_rows_as_they_are_if_one_list_has_them(mla):
    q, kv, indices = queries(2, 64), normal(50, 512).bfloat16(), picks_of(50, 2, 128)
    fast.sparse_attention(q, kv, indices, impl="flashmla")
    assert mla.calls[-1][2] == (50, 1, 512)


def test_flashmla_reads_a_list_as_it_is(mla, monkeypatch):
    """Numbers of no row are passed over by the kernel, which its proof has seen; what it cannot read is put in its form before."""
    q, kv, indices = queries(2, 64), normal(50, 512).bfloat16(), picks_of(50, 2, 128)
    indices[0, 3:8] = torch.tensor([50, -7, 2**31 - 1, -(2**31), 1000])
    expected = reference.sparse_attention(q, kv, indices)
    put, seen = attention_libraries.put_picks, []
    monkeypatch.setattr(attention_libraries, "put_picks", lambda *given: seen.append(given) or put(*given))
    near(fast.sparse_attention(q, kv, indices, impl="flashmla"), expected)
    assert not seen
    wide = torch.full((2, 256), 7, dtype=torch.int32)
    wide[:, :128] = indices
    for other, options in (
        (wide[:, :128], {}), (wide[:, :100], {}), (indices, {"lengths": torch.tensor([128, 5], dtype=torch.int32)}),
    ):  # fmt: skip
        want = reference.sparse_attention(q, kv, other, **options)
        near(fast.sparse_attention(q, kv, other, impl="flashmla", **options), want)
        assert len(seen) == 1
        seen.clear()
    monkeypatch.setattr(flashmla, "ANY_PICK", ())
    near(fast.sparse_attention(q, kv, indices, impl="flashmla"), expected)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("heads", "lists", "chosen"), [(64, 1, "flashmla"), (128, 1, "flashmla"), (32, 1, "triton"), (64, 2, "triton"), (16, 2, "triton")]
)
def test_who_runs_over_rows(monkeypatch, heads, lists, chosen):
    """FlashMLA where nothing has to be padded or decoded for it."""
    pretend(monkeypatch, (9, 0))
    kv, indices = normal(50, 512).bfloat16(), picks_of(50, 2, 128)
    rows = tuple(replace(row, device=dispatch.any_device) for row in dispatch.TABLES["attention.sparse_attention"])
    monkeypatch.setitem(dispatch.TABLES, "attention.sparse_attention", rows)
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    given = {"q": queries(2, heads), "kv": kv, "indices": indices, "lengths": None, "extra_kv": None, "extra_indices": None}
    given |= {"extra_kv": kv, "extra_indices": indices} if lists == 2 else {}
    assert dispatch.resolve("attention.sparse_attention", CPU, given).backend == chosen


@pytest.mark.parametrize("layout", ["v41", "v41_fp4", "uniform_fp8", "v41_inline"])
def test_layouts_that_only_rows_have(mla, layout):
    """No kernel of SM90 reads V4.1's pages: rows are decoded before."""
    q, rows, slots = queries(3, 16), cache(layout, 8), picks_of(32, 3, 70)
    near(fast.prefill_attention(q, rows, slots, impl="flashmla"), reference.paged_attention(q, rows, slots))
    with pytest.raises(Unsupported, match=f"its kernels of SM90 take v4; got {layout}"):
        fast.decode_attention(q, rows, slots, impl="flashmla")


@pytest.mark.parametrize("backend", ["flashmla", "flashinfer"])
def test_buffers_of_rows(monkeypatch, backend):
    """All rows there are, a row for each pick, or for each row that is picked: the same results, from buffers of the sizes promised."""
    pretend(monkeypatch, (9, 0))
    q, rows, others = queries(6, 8), cache("v4", 16, 40), cache("v4", 4, 30)
    slots, more = picks_of(60, 6, 30), picks_of(120, 6, 40, seed=3)
    options = {"extra": others, "extra_slots": more}
    expected = reference.paged_attention(q, rows, slots, **options)
    near(fast.prefill_attention(q, rows, slots, **options, impl=backend), expected)  # picks of the main list, rows of the extra one
    monkeypatch.setattr(attention_engines, "LARGEST_BUFFER", 150)
    monkeypatch.setattr(attention_libraries, "LARGEST_BUFFER", 150)
    near(fast.prefill_attention(q, rows, slots, **options, impl=backend), expected)  # two tokens at a time
    sizes = {"tokens": 6, "heads": 8, "picks": 30, "layout": "v4", "page_size": 16}
    extra = {"extra_picks": 40, "extra_layout": "v4", "extra_page_size": 4}
    plan = fast.plan_attention("prefill", **sizes, **extra, max_rows=62, impl=backend, device="cpu")
    buffer = plan._engine._buffer
    assert (buffer.rows.shape, buffer.step) == ((1 + 62 + 62, 512), 6)
    near(plan.run(q, rows, slots.clamp(max=59), extra=others, extra_slots=more.clamp(max=59)),
         reference.paged_attention(q, rows, slots.clamp(max=59), extra=others, extra_slots=more.clamp(max=59)))  # fmt: skip


def test_rows_that_are_picked():
    picks = torch.tensor([[5, -1, 2, 5], [9, 2, -1, 0]])
    slots, places = attention_libraries.distinct(picks, 10, 5)
    assert slots.tolist() == [0, 2, 5, 9, -1]
    assert places.tolist() == [[2, -1, 1, 2], [3, 1, -1, 0]]
    slots, places = attention_libraries.distinct(picks, 10, 3)
    assert slots.tolist() == [0, 2, 5]
    assert places.tolist() == [[2, -1, 1, 2], [-1, 1, -1, 0]]


@pytest.mark.parametrize(("what", "words"), [
    ("heads", "takes at most 128 heads of 512; got 130 heads of 512"),
    ("stride", "takes pages that lie a multiple of 576 bytes apart and begin at one of 16; got pages 37448 bytes apart"),
    ("empty", "takes no empty cache; pages has no page"),
])  # fmt: skip
def test_what_flashmla_refuses(mla, what, words):
    q, rows, slots = queries(1, 130 if what == "heads" else 4), cache("v4", 64, 2, gap=8 if what == "stride" else 0), picks_of(128, 1, 64)
    if what == "empty":
        rows = rows._replace(pages=rows.pages[:0])
    with pytest.raises(Unsupported, match=words):
        fast.decode_attention(q, rows, slots, impl="flashmla")
    same(fast.decode_attention(q, rows, slots, impl="eager"), reference.paged_attention(q, rows, slots))


@pytest.mark.parametrize(("heads", "picks"), [(8, 64), (16, 133), (64, 640), (128, 65)])
def test_flashinfer_over_rows(monkeypatch, heads, picks):
    spy = pretend(monkeypatch, (9, 0))[1]
    q, sink, rows, others = queries(3, heads), 3 * normal(heads), cache("v41", 8), cache("v41_fp4", 8, 3)
    slots, more = picks_of(32, 3, picks), picks_of(24, 3, 33, seed=3)
    lengths = torch.tensor([0, picks, 3], dtype=torch.int32)
    options = {"lengths": lengths, "extra": others, "extra_slots": more, "extra_lengths": torch.tensor([0, 33, 0], dtype=torch.int32)}
    expected = reference.paged_attention(q, rows, slots, sink, **options)
    for function in (fast.paged_attention, fast.decode_attention, fast.prefill_attention):
        near(function(q, rows, slots, sink, **options, impl="flashinfer"), expected)
    assert spy.calls[-1][1] == (3, heads, 512)
    for given in (None, torch.tensor([torch.inf, -torch.inf]).repeat(heads // 2)):
        near(function(q, rows, slots, given, **options, impl="flashinfer"), reference.paged_attention(q, rows, slots, given, **options))
    kv, indices = normal(50, 512).bfloat16(), picks_of(50, 3, picks)
    near(fast.sparse_attention(q, kv, indices, sink, impl="flashinfer"), reference.sparse_attention(q, kv, indices, sink))


def test_flashinfer_in_parts(monkeypatch):
    """More tokens than one plan takes: the last part is padded."""
    spy = pretend(monkeypatch, (9, 0))[1]
    monkeypatch.setattr(flashinfer_mla, "TOKENS", 4)
    q, rows, slots, sink = queries(10, 8), cache("v4", 8), picks_of(32, 10, 20), normal(8)
    near(fast.prefill_attention(q, rows, slots, sink, impl="flashinfer"), reference.paged_attention(q, rows, slots, sink))
    assert [call[1][0] for call in spy.calls[-3:]] == [4, 4, 4]


# What SM100 and SM120 would get: signatures, not seen on such cards


@pytest.mark.parametrize(("main", "extra"), [("v41_inline", None), ("v41_inline", "v41_fp4_inline"), ("v41_inline", "v41_inline")])
def test_current_kernels_of_flashmla_take_inline_pages(monkeypatch, main, extra):
    spy = pretend(monkeypatch, (10, 0), inline=True)[0]
    q, sink, rows, slots = queries(3, 32), normal(32), cache(main, 64), picks_of(256, 3, 133)
    options = {} if extra is None else {"extra": cache(extra, 64), "extra_slots": picks_of(256, 3, 512, seed=3)}
    near(
        fast.decode_attention(q, rows, slots, sink, **options, impl="flashmla"), reference.paged_attention(q, rows, slots, sink, **options)
    )
    assert spy.calls[-1][-2] is False


@pytest.mark.parametrize(("main", "extra"), [("v4", None), ("v41", "v41_fp4")])
def test_legacy_kernels_of_flashmla_take_planar_pages_on_sm100(monkeypatch, main, extra):
    spy = pretend(monkeypatch, (10, 3))[0]
    q, rows, slots = queries(3, 32), cache(main, 64), picks_of(256, 3, 133)
    options = {} if extra is None else {"extra": cache(extra, 64), "extra_slots": picks_of(256, 3, 512, seed=3)}
    near(fast.decode_attention(q, rows, slots, **options, impl="flashmla"), reference.paged_attention(q, rows, slots, **options))
    assert spy.calls[-1][-2] is True


@pytest.mark.parametrize(("main", "extra"), [("v41", None), ("v41", "v41_fp4"), ("v41_inline", "v41_fp4_inline")])
def test_flashinfer_takes_pages_of_v41_on_sm120(monkeypatch, main, extra):
    spy = pretend(monkeypatch, (12, 0))[1]
    q, sink, rows, slots = queries(3, 16), normal(16), cache(main, 64), picks_of(256, 3, 133)
    slots[1] = -1
    options = {} if extra is None else {"extra": cache(extra, 64), "extra_slots": picks_of(256, 3, 512, seed=3)}
    near(
        fast.decode_attention(q, rows, slots, sink, **options, impl="flashinfer"),
        reference.paged_attention(q, rows, slots, sink, **options),
    )
    assert spy.calls[-1] == ("pages", (3, 16, 512), (3, 192), main.endswith("inline"), (extra or "").startswith("v41_fp4"))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_probes_of_flashinfer_pass_on_right_answers(monkeypatch, capability):
    pretend(monkeypatch, capability, proved=False)
    monkeypatch.setattr(flashinfer_mla, "SCALES", {("v41", "v41_fp4"): ("ue8m0_g32", True)})
    assert FLASHINFER.disproved(flashinfer_mla.MLA, CPU) is None


REFUSED = [
    ((9, 0), "flashmla", "v41", "its kernels of SM90 take v4; got v41"),
    ((10, 0), "flashmla", "v41_fp4", r"its kernels of SM100 take v4, v41, v41 with v41_fp4, .*; got v41_fp4"),
    ((12, 0), "flashinfer", "v4", "on SM120 takes v41, .*, for it rounds queries and weights to E4M3 elsewhere; got v4"),
]


@pytest.mark.parametrize(("capability", "backend", "layout", "words"), REFUSED)
def test_layouts_are_refused_by_what_kernels_take(monkeypatch, capability, backend, layout, words):
    pretend(monkeypatch, capability)
    q, rows, slots = queries(1, 64), cache(layout, 64), picks_of(256, 1, 64)
    with pytest.raises(Unsupported, match=words):
        fast.decode_attention(q, rows, slots, impl=backend)


def test_bf16_rows_are_refused_where_logarithms_are_off(monkeypatch):
    pretend(monkeypatch, (12, 0))
    with pytest.raises(Unsupported, match="takes bf16 rows on SM90 alone, for its logarithms are off elsewhere; this is SM120"):
        fast.sparse_attention(queries(1, 8), normal(3, 512).bfloat16(), picks_of(3, 1, 2), impl="flashinfer")


# Which row a card gets


CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)]
MLA_ON, FLASHINFER_ON = {(9, 0), (10, 0), (10, 3)}, {(9, 0), (12, 0), (12, 1)}
EXPECTED = {
    **{f"attention.{name}": ("triton", "eager", {"flashmla": MLA_ON, "flashinfer": FLASHINFER_ON}) for name in FUNCTIONS},
    "attention.sparse_attention": ("triton", "eager", {"flashmla": MLA_ON, "flashinfer": {(9, 0)}}),
    "attention.draft_attention": ("triton", "eager", {}),
    "attention.merge_splits": ("triton", "eager", {}),
    "attention.window_indices": ("inductor", "inductor", {}),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("function", EXPECTED)
def test_cd_01_every_function_on_every_capability(function, capability, monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    on_cuda, on_cpu, libraries = EXPECTED[function]
    rows = tuple(replace(row, arguments=dispatch.any_arguments, preferred=None) for row in dispatch.TABLES[function])
    monkeypatch.setitem(dispatch.TABLES, function, rows)
    assert dispatch.resolve(function, card, {}).backend == on_cuda
    assert dispatch.resolve(function, CPU, {}).backend == on_cpu
    tried = {row.backend for row in rows if row.library is not None and row.device(Device("cuda", capability)) is None}
    assert tried == {name for name, there in libraries.items() if capability in there}


def test_which_rows_keep_what_may_be_demanded():
    """Splits and products by the number of tokens are not batch-invariant, and are not made where that is demanded: the row stays."""
    rows = {(name, row.backend): row for name, table in dispatch.TABLES.items() if name.startswith("attention.") for row in table}
    variant = {key for key, row in rows.items() if not row.batch_invariant}
    over_pages = {("attention.paged_attention", "flashmla"), ("attention.decode_attention", "flashmla")}
    compiled = {(f"attention.{name}", "inductor") for name in (*FUNCTIONS, "draft_attention", "merge_splits")}
    libraries = {(f"attention.{name}", "flashinfer") for name in FUNCTIONS}
    adaptive = {("attention.decode_attention", "triton"), *((f"attention.{name}", "eager") for name in (*FUNCTIONS, "draft_attention"))}
    assert variant == {*adaptive, *over_pages, *libraries, *compiled}
    with use(batch_invariant=True):
        assert all(rows[key].batch_invariant for key in adaptive)
    assert all(row.deterministic for row in rows.values())
    assert {key for key, row in rows.items() if not row.graph_safe} == {(f"attention.{name}", "flashinfer") for name in FUNCTIONS}


def test_libraries_that_are_not_batch_invariant_are_refused_when_that_is_demanded(mla):
    q, rows, slots = queries(1, 64), cache("v4", 64), picks_of(256, 1, 64)
    with use(batch_invariant=True):
        with pytest.raises(BackendUnavailable, match="is not batch-invariant"):
            fast.decode_attention(q, rows, slots, impl="flashmla")
        near(fast.prefill_attention(q, rows, slots, impl="flashmla"), reference.paged_attention(q, rows, slots))


def test_support_says_what_kernels_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    support = {(one.backend, one.mode): one for one in fast.attention_support(torch.device("cuda", 0))}
    assert len(support) == 10
    assert support["flashmla", "decode"].layouts == ("v4",)
    assert support["flashmla", "decode"].heads == (64, 128)
    assert support["triton", "decode"].layouts == tuple(KV_LAYOUTS)
    assert support["triton", "prefill"].usable
    assert "is not installed" in support["flashinfer", "prefill"].reason or support["flashinfer", "prefill"].usable
    here = {(one.backend, one.mode): one for one in fast.attention_support("cpu")}
    assert here["eager", "decode"].usable
    assert not here["triton", "decode"].usable
    assert "this is cpu" in here["flashmla", "prefill"].reason


# Plans


SIZES = {"tokens": 6, "heads": 4, "picks": 70, "layout": "v41", "page_size": 8}
EXTRA = {"extra_picks": 90, "extra_layout": "v41_fp4", "extra_page_size": 4}


def plan_inputs(tokens=6, picks=70, extra_picks=90):
    rows, others = cache("v41", 8), cache("v41_fp4", 4, 6)
    given = queries(tokens, 4), rows, picks_of(32, tokens, picks), normal(4)
    return given, {"extra": others, "extra_slots": picks_of(24, tokens, extra_picks, seed=3)}


@every_way
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_plans_run_what_was_planned_and_less(impl, mode):
    plan = fast.plan_attention(mode, **SIZES, **EXTRA, impl=impl, device="cpu")
    assert (plan.backend, plan.splits, plan.workspace_bytes) == (impl, 1, 0)
    assert "asked for" in plan.reason
    for sizes in ((6, 70, 90), (2, 3, 0), (0, 70, 90)):
        given, more = plan_inputs(*sizes)
        expected = reference.paged_attention(*given, **more)
        same(plan.run(*given, **more), expected)
        out = AttentionResult(torch.full_like(expected.output, 7), torch.full_like(expected.lse, 7))
        assert plan.run(*given, **more, out=out) is out
        same(out, expected)
        same(plan.run(*given, scale=0.2), reference.paged_attention(*given, scale=0.2))


def test_a_plan_says_why(monkeypatch):
    plan = fast.plan_attention("decode", **SIZES, device="cpu")
    assert plan.backend == "eager"
    assert plan.reason.startswith("eager on cpu; not triton: wants a CUDA device of capability 8.0 or newer, this is cpu; flashmla: ")


def test_plans_of_our_kernels(kernels, monkeypatch):
    """Splits are those of the planned size, whatever a call has; a demand for batch invariance makes none."""
    programs(monkeypatch, 24)
    given, more = plan_inputs()
    plan = fast.plan_attention("decode", **SIZES, **EXTRA, device="cpu", impl="triton")
    assert (plan.backend, plan.splits) == ("triton", 4)
    assert plan.workspace_bytes == 4 * 6 * 4 * (512 + 1) * 4
    held = {id(tensor): tensor.data_ptr() for tensor in (plan._engine._parts, plan._engine._lses)}
    same(plan.run(*given, **more), reference.paged_attention(*given, **more))
    less, _ = plan_inputs(2, 3)
    same(plan.run(*less), reference.paged_attention(*less))
    assert [call[-1] for call in kernels.calls] == [4, 4]
    assert held == {id(tensor): tensor.data_ptr() for tensor in (plan._engine._parts, plan._engine._lses)}
    for plan in (
        fast.plan_attention("prefill", **SIZES, **EXTRA, device="cpu", impl="triton"),
        fast.plan_attention("decode", **SIZES, **EXTRA, device="cpu", impl="triton", batch_invariant=True),
    ):
        assert (plan.splits, plan.workspace_bytes) == (1, 0)
    with use(batch_invariant=True):
        assert fast.plan_attention("decode", **SIZES, device="cpu", impl="triton").splits == 1
        assert fast.plan_attention("decode", **SIZES, **EXTRA, device="cpu", impl="triton", batch_invariant=False).splits == 4


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_plans_multiply_as_was_demanded_when_they_were_made(monkeypatch, mode):
    fixed = []
    monkeypatch.setattr(bodies, "fixed_products", lambda *pair: fixed.append(1) or product_bodies.fixed_products(*pair))
    given, more = plan_inputs()
    make = partial(fast.plan_attention, mode, **SIZES, **EXTRA, device="cpu", impl="eager")
    with use(batch_invariant=True):
        plans = (make(), make(batch_invariant=True), make(batch_invariant=False))
    for plan, demanded in zip((*plans, make()), (True, True, False, False), strict=True):
        for within in (False, True):
            fixed.clear()
            with use(batch_invariant=within):
                same(plan.run(*given, **more), reference.paged_attention(*given, **more))
            assert bool(fixed) is demanded


@pytest.mark.parametrize("programs_at_once", [1, 60, 132, 192])
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_our_kernels_hold_64_mib_at_most(kernels, monkeypatch, programs_at_once, heads, mode):
    programs(monkeypatch, programs_at_once)
    monkeypatch.setattr(torch, "empty", partial(torch.empty, device="meta"))
    for tokens in (1, 2, 5, 16, 33, 64, 66, 128, 132, 1024, 65536, 10**6):
        sizes = {"tokens": tokens, "heads": heads, "picks": 128, "layout": "v4", "page_size": 64}
        plan = fast.plan_attention(mode, **sizes, extra_picks=2048, extra_layout="v4", extra_page_size=64, device="cpu", impl="triton")
        assert plan.workspace_bytes <= 64 * 2**20


def test_plans_of_flashmla_keep_the_schedule_of_their_size(mla):
    rows, others = cache("v4", 8), cache("v4", 4, 6)
    sizes = {**SIZES, "layout": "v4"}
    plan = fast.plan_attention("decode", **sizes, **EXTRA | {"extra_layout": "v4"}, device="cpu", impl="flashmla")
    assert (plan.backend, plan.splits) == ("flashmla", 0)
    assert plan.workspace_bytes == 6 * 64 * 512 * 2 + 64 * 4 + 6 * 128 * 4 * 2
    for tokens, picks, extra_picks, kept in ((6, 70, 90, False), (6, 70, 90, True), (6, 3, 1, True), (2, 70, 90, False), (6, 70, 90, True)):
        (q, _, slots, sink), more = plan_inputs(tokens, picks, extra_picks)
        more = {"extra": others, "extra_slots": more["extra_slots"]}
        near(plan.run(q, rows, slots, sink, **more), reference.paged_attention(q, rows, slots, sink, **more))
        assert mla.calls[-1][-1] is kept
        assert mla.calls[-1][3] == (tokens, 1, 128)
    near(plan.run(q, rows, slots, sink), reference.paged_attention(q, rows, slots, sink))
    with pytest.raises(Unsupported, match="takes pages that lie a multiple of 576 bytes apart"):
        plan.run(q, cache("v4", 8, gap=8), slots, sink)


def test_plans_of_flashinfer(monkeypatch):
    spy = pretend(monkeypatch, (9, 0))[1]
    plan = fast.plan_attention("decode", **SIZES, **EXTRA, device="cpu", impl="flashinfer")
    (attention, made) = plan._engine._attention, []
    monkeypatch.setattr(spy.mla.BatchMLAPagedAttentionWrapper, "plan", lambda *_, **__: made.append(1))
    for sizes in ((6, 70, 90), (2, 3, 1), (6, 70, 90)):
        given, more = plan_inputs(*sizes)
        near(plan.run(*given, **more), reference.paged_attention(*given, **more))
        near(plan.run(*given), reference.paged_attention(*given))
    assert not made, "a run plans nothing"
    assert plan._engine._attention is attention
    with pytest.raises(Unsupported, match=r"scale: got 0\.5; the plan of this backend has 0\.0441"):
        plan.run(*given, scale=0.5)


@pytest.mark.parametrize(("change", "argument"), [
    ({"mode": "extend"}, "mode"), ({"tokens": -1}, "tokens"), ({"heads": 0}, "heads"), ({"picks": -1}, "picks"),
    ({"layout": "v5"}, "layout"),
    ({"page_size": 0}, "page_size"), ({"extra_picks": 3}, "extra_picks"), ({"extra_layout": "v4", "extra_page_size": 4}, "extra"),
    ({"dim": 256}, "dim"), ({"max_rows": 0}, "max_rows"), ({"impl": "deepgemm"}, "impl"),
])  # fmt: skip
def test_plans_that_cannot_be(change, argument):
    with pytest.raises(ArgumentError) as caught:
        fast.plan_attention(**{"mode": "decode", **SIZES, "device": "cpu", **change})
    assert caught.value.argument == argument


def test_runs_that_were_not_planned():
    plan = fast.plan_attention("decode", **SIZES, **EXTRA, device="cpu", impl="eager")
    (q, rows, slots, sink), more = plan_inputs()
    for argument, changed in (
        ("q", {"q": queries(7, 4), "slots": picks_of(32, 7, 70)}),
        ("q", {"q": queries(6, 5), "sink": None}),
        ("slots", {"slots": picks_of(32, 6, 71)}),
        ("main", {"main": cache("v41", 4)}),
        ("extra_slots", {**more, "extra_slots": picks_of(24, 6, 91)}),
        ("out.output", {"out": AttentionResult(q[:, :3], torch.empty(6, 4))}),
        ("out.output", {"out": AttentionResult(torch.empty(6, 512, 4, dtype=torch.bfloat16).mT, torch.empty(6, 4))}),
        ("out.lse", {"out": AttentionResult(torch.empty_like(q), torch.empty(6, 4, dtype=torch.float64))}),
        ("q", {"q": q.float()}),
    ):
        with pytest.raises(ArgumentError) as caught:
            plan.run(**{"q": q, "main": rows, "slots": slots, "sink": sink, **changed})
        assert caught.value.argument == argument
