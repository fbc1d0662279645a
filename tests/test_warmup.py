"""warmup(): afterwards nothing compiles, at any number of tokens; and it says what it did."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.configs import V4_FLASH, V4_FLASH_0731, V4_PRO, V41_FLASH, ModelConfig
from dsv4.fast import (
    WarmupReport,
    attention,
    compiled,
    compressor,
    dispatch,
    eplb,
    hyper_connections,
    indexer,
    kv_cache,
    linear,
    norms,
    output_projection,
    quantization,
    rotary,
    routing,
    scales,
    warmup,
)
from dsv4.fast.adapters import flashmla
from dsv4.fast.warmup import counted
from dsv4.fast.warmup_calls import CALLS
from dsv4.fast.warmup_products import tokens_of_tiles, weights
from dsv4.types import ArgumentError, PagedRows

CPU = torch.device("cpu")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"))]


@pytest.fixture(scope="module", params=DEVICES)
def warmed(request: pytest.FixtureRequest) -> tuple[str, WarmupReport]:
    torch._dynamo.reset()
    compiled._graph.cache_clear()
    return request.param, warmup(V4_FLASH, [3], device=request.param)


def serve(tokens: int, device: str) -> None:
    """What a V4-Flash does with its activations, written down apart from `CALLS`."""
    for width in (4096, 1024, 8192, 2048):
        x = torch.randn(tokens, width, device=device).to(torch.bfloat16)
        for options in ({}, {"scale_layout": "packed"}, {"scale": "fp32", "scale_layout": "mn_major"}):
            codes, grid = quantization.quantize_fp8(x, 128, **options)
            layout = options.get("scale_layout", "rows")
            quantization.dequantize(codes, grid, 128, scale_layout=layout)
        byte = torch.zeros(tokens, width // 128, dtype=torch.uint8, device=device)
        packed = scales.pack_ue8m0(byte)
        scales.unpack_ue8m0(packed, width // 128)
        scales.restride_rows(packed, tokens + 5)
        scales.zero_pad_rows(packed, tokens // 2, scale_layout="packed", out=packed)
    quantization.fake_quantize(torch.randn(tokens, 448, device=device).to(torch.bfloat16), 64)
    quantization.fake_quantize(torch.randn(tokens, 128, device=device).to(torch.bfloat16), 32, format="mxfp4")
    x, weight = (torch.randn(rows, 4096, device=device).to(torch.bfloat16) for rows in (tokens, 256))
    logits = routing.gate_logits(x, weight)
    routing.route(logits, 6, scale=1.5, bias=torch.randn(256, device=device))
    ids, table = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((tokens,), (129280, 6)))
    routing.route(logits, 6, scale=1.5, token_ids=ids, table=table)
    serve_streams(tokens, device)
    serve_cache(tokens, device)
    for format in ("fp4", "fp8"):
        serve_indexer(tokens, format, device)
    serve_attention(tokens, device)
    serve_products(tokens, device)


def serve_streams(tokens: int, device: str) -> None:
    x, y = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((tokens, 4, 4096), (tokens, 4096)))
    fn, scale, base = torch.randn(24, 16384, device=device), torch.ones(3, device=device), torch.zeros(24, device=device)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    mix = hyper_connections.split_mix(hyper_connections.mix_statistics(x, fn, eps=1e-6), scale, base)
    norms.rms_norm(hyper_connections.collapse(x, mix.pre), weight, eps=1e-6)
    hyper_connections.boundary(y, x, mix.post, mix.comb, fn, scale, base, weight, norm_eps=1e-6, rms_eps=1e-6)
    hyper_connections.expand(y, x, mix.post, mix.comb)
    hyper_connections.head_collapse(x, fn[:4], scale[:1], base[:4], norm_eps=1e-6)


def serve_cache(tokens: int, device: str) -> None:
    positions = torch.arange(tokens, device=device)
    table = rotary.rope_table(rotary.rope_frequencies(10000.0, device=device), 512)
    q, kv = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((tokens, 64, 512), (tokens, 512)))
    rotary.apply_rope(rotary.norm_rope(q, table, positions, eps=1e-6), table, positions, inverse=True)
    pages = torch.zeros(4, 149760, dtype=torch.uint8, device=device)
    at = {"layout": "v4", "page_size": 256}
    kv_cache.norm_rope_store_kv(kv, kv[0], table, positions, pages, positions, eps=1e-6, **at)
    kv_cache.load_kv(pages, positions, **at)
    kv_cache.page_slots(torch.zeros(1, 2, dtype=torch.int32, device=device), positions.int(), positions, page_size=256)
    x = torch.randn(tokens, 4096, device=device).to(torch.bfloat16)
    starts, offsets = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([0, tokens], dtype=torch.int32, device=device)
    for ratio, width in ((4, 1024), (128, 512)):
        weight = torch.zeros(width, 4096, dtype=torch.bfloat16, device=device)
        more = {"ratio": ratio, "overlap": ratio == 4, "ape": torch.zeros(ratio, width, device=device)}
        state = compressor.compressor_state(1, 512, ratio=ratio, overlap=ratio == 4, device=device)
        rows = compressor.project(x, weight, weight)
        entries = compressor.compression_plan(starts, offsets, ratio=ratio, tokens=tokens).entries
        pages = torch.zeros(300, 584 * (256 // ratio) + 500, dtype=torch.uint8, device=device)
        more |= {"layout": "v4", "page_size": 256 // ratio, "eps": 1e-6}
        compressor.compress_and_store(*rows, state, starts, offsets, kv[0], table, pages, entries, **more)


def serve_indexer(tokens: int, format: str, device: str) -> None:
    positions = torch.arange(tokens, device=device)
    ends = indexer.visible_entries(positions, ratio=4)
    table = rotary.rope_table(rotary.rope_frequencies(160000.0, device=device), 512)
    q, w, x = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((tokens, 64, 128), (tokens, 64), (tokens, 128)))
    options = {"format": format, "hadamard": True}
    queries = indexer.index_queries(q, w, table, positions, **options)
    keys = indexer.index_keys(x, table, positions, weight=x[0], eps=1e-6, **options)
    at = {"format": format, "page_size": 64}
    pages = torch.zeros(-(-tokens // 64), 64 * (68 if format == "fp4" else 132), dtype=torch.uint8, device=device)
    indexer.store_index_keys(keys, pages, positions, **at)
    keys = indexer.load_index_keys(pages, positions, **at, dim=128)
    indexer.select_entries(queries, keys, ends, 512)
    blocks, requests = torch.arange(len(pages), dtype=torch.int32, device=device)[None], torch.zeros_like(ends)
    for width in (tokens, 700, 5000, 40000):
        logits = indexer.paged_index_logits(queries, pages, blocks, requests, ends, **at, width=width)
        indexer.select_topk(logits, 512, ends=ends, order="index")
        indexer.select_topk(logits, 512, ends=ends, order="index", block_table=blocks, requests=requests, page_size=64)
    logits = indexer.index_logits(queries, keys, starts=requests, ends=ends)
    indexer.select_topk(logits, 512, starts=requests, ends=ends, order="index")


def serve_attention(tokens: int, device: str) -> None:
    q = torch.randn(tokens, 64, 512, device=device).to(torch.bfloat16)
    window = attention.window_indices(torch.arange(tokens, device=device))
    main, extra = (PagedRows(torch.zeros(4, 584 * size + 4096, dtype=torch.uint8, device=device), "v4", size) for size in (256, 64))
    more = {"extra": extra, "extra_slots": torch.full((tokens, 512), -1, dtype=torch.int32, device=device)}
    for function in (attention.decode_attention, attention.prefill_attention):
        function(q, main, window, torch.zeros(64, device=device), **more)
        function(q, main, window, torch.zeros(64, device=device))


def serve_products(tokens: int, device: str) -> None:
    def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        grid = (*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128)
        return codes, torch.full(grid, 127, dtype=torch.uint8, device=device)

    layout = "rows" if device == "cpu" else "mn_major"
    x, norm = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((tokens, 4096), (4096,)))
    normed = linear.norm_quantize(x, norm, eps=1e-6, group=128, scale_layout=layout)
    q = linear.linear_fp8(normed, *weight(1024, 4096))
    linear.linear_fp8(linear.norm_quantize(q, norm[:1024], eps=1e-6, group=128, scale_layout=layout), *weight(64, 1024))
    linear.norm_quantize(q, norm[:1024], eps=1e-6, group=128, scale_layout="packed")
    gate, up = linear.linear_fp8(x, *weight(4096, 4096)).split(2048, 1)
    linear.linear_fp8(linear.swiglu_quantize(gate, up, limit=10.0, group=128, scale_layout=layout), *weight(4096, 2048))
    o, positions = torch.randn(tokens, 64, 512, device=device).to(torch.bfloat16), torch.arange(tokens, device=device)
    table = rotary.rope_table(rotary.rope_frequencies(10000.0, device=device), 512)
    rotated = output_projection.rotate_quantize(o, table, positions, groups=8, scale_layout=layout)
    of_groups = weight(8, 128, 4096)
    for given in (rotated, o.view(tokens, 8, 4096)):
        z = output_projection.project_groups(given, *of_groups)
    output_projection.project_groups(o.view(tokens, 8, 4096), *of_groups, scale="fp32")
    output_projection.project_groups(o.view(tokens, 8, 4096), torch.zeros(8, 128, 4096, dtype=torch.bfloat16, device=device))
    output_projection.project_out(torch.cat([z] * 8, 2), *weight(64, 8192))


def test_afterwards_nothing_compiles(warmed: tuple[str, WarmupReport]) -> None:
    device, report = warmed
    if device == "cpu":  # Triton keeps what earlier tests of this process have compiled
        assert sum(call.graphs for call in report.calls) == 38
    with counted() as count:
        for tokens in (1, 2, 16, 129, 300):
            serve(tokens, device)
    assert count() == (0, 0)


def test_a_second_warmup_compiles_nothing(warmed: tuple[str, WarmupReport]) -> None:
    again = warmup(V4_FLASH, [1, 64], device=warmed[0])
    assert {(call.graphs, call.kernels) for call in again.calls} == {(0, 0)}
    assert len(again.calls) == 2 * len(warmed[1].calls)


def test_the_counter_counts(warmed: tuple[str, WarmupReport]) -> None:
    """A form that no V4-Flash calls does compile, and is seen to."""
    with counted() as count:
        x = torch.zeros(3, 64, dtype=torch.float32, device=warmed[0])
        quantization.fake_quantize(x, 4, format="mxfp4", ties="toward_zero", zero_sign="cleared")
    assert sum(count()) == 1


def test_the_report(warmed: tuple[str, WarmupReport]) -> None:
    device, report = warmed
    names = [call.call for call in report.calls]
    assert "quantization: quantize_fp8, dequantize [4096] 128 ue8m0 packed, 3 tokens" in names
    assert "routing: route 256 experts by token, 3 tokens" in names
    assert len({proof.function for proof in report.proofs}) == 23
    assert report.seconds >= sum(call.seconds for call in report.calls)
    if device == "cpu":
        assert {proof.state for proof in report.proofs} == {"not usable"}
        assert str(report).startswith(f"cpu: {len(names)} calls, {sum(call.graphs for call in report.calls)} graphs and 0 kernels compiled")


EXPECTED_CALLS = {
    "V4-Pro": (V4_PRO, "routing", ["gate_logits 384 experts", "route 384 experts, 6 each", "route 384 experts by token"]),
    "V4.1": (
        V41_FLASH,
        "routing",
        [
            "gate_logits 128 experts",
            "route 128 experts, 3 each",
            "gate_logits 384 experts",
            "route 384 experts, 6 each",
            "route 384 experts with images",
        ],
    ),
    "0731": (V4_FLASH_0731, "routing", ["gate_logits 256 experts", "route 256 experts, 6 each", "route 256 experts by token"]),
    "scales of V4.1": (
        V41_FLASH,
        "scales",
        [f"{what} [{groups}]" for groups in (40, 72, 160, 256) for what in ("packed", "align_mn_major", "128x4")],
    ),
    "output projection of V4.1": (
        V41_FLASH,
        "output_projection",
        ["project_groups, 2", "project_groups_pair packed, 2", "project_groups_pair 128x4, 2", "project_out"],
    ),
}


@pytest.mark.parametrize("case", EXPECTED_CALLS)
def test_calls_of_each_model(case: str) -> None:
    config, component, names = EXPECTED_CALLS[case]
    assert [name for name, _ in CALLS[component](config, 2, CPU)] == names


def test_products_run_at_a_number_of_tokens_of_every_tile() -> None:
    """On CUDA, where tiles are kernels of their own; here as our kernels choose them for an H200."""
    from dsv4.fast.kernels.linear_tiles import plan

    for (n, k), block in ((weights(V4_FLASH)[0], 128), (weights(V41_FLASH)[-1], 32), ((1024, 4096), 0)):
        counts, batch = tokens_of_tiles(n, k, 8 if block == 0 else 1, block, CPU), 8 if block == 0 else 1
        known = {plan(tokens, n, k, batch, block, CPU, words=words) for tokens in counts for words in (True, False)}
        assert counts[0] == 1
        for tokens in (1, 16, 17, 100, 129, 1000, 4000, 4096):
            assert {plan(tokens, n, k, batch, block, CPU, words=words) for words in (True, False)} <= known, tokens


@pytest.mark.parametrize("config", [V4_PRO, V41_FLASH, V4_FLASH_0731])
def test_every_call_of_every_model_runs(config: ModelConfig) -> None:
    with dispatch.use("eager"):
        report = warmup(config, [2, 5], device="cpu")
    assert {(call.graphs, call.kernels) for call in report.calls} == {(0, 0)}


def test_every_component_is_warmed_or_is_part_of_one() -> None:
    """A new component belongs in CALLS, unless no model calls it by itself."""
    components = {function.partition(".")[0] for function in dispatch.TABLES if not function.startswith("probe.")}
    assert eplb.map_to_physical.__module__ == "dsv4.fast.eplb"
    assert components == {*CALLS, "codecs", "eplb"}


def test_libraries_prove_themselves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def probe(device: torch.device) -> str | None:
        order.append("proof")
        return "adds up wrongly"

    def route(*arguments: Any, **options: Any) -> None:
        order.append("call")

    library = flashmla.LIBRARY
    for name, value in {"devices": lambda device: None, "missing": lambda: None, "lacks": lambda symbol: None}.items():
        monkeypatch.setattr(library, name, value)
    monkeypatch.setattr(library, "_proofs", {})
    monkeypatch.setattr(library, "probes", {"f": probe})
    monkeypatch.setattr(routing, "route", route)
    monkeypatch.setattr(routing, "gate_logits", route)
    report = warmup(V4_FLASH, [2], device="cpu", components=["routing"])
    assert order == ["proof", "call", "call", "call"]
    (proof,) = (proof for proof in report.proofs if proof.function == "f")
    assert (proof.state, "adds up wrongly" in proof.reason) == ("not usable", True)


@pytest.mark.parametrize(
    ("shapes", "components", "words"),
    [
        ([], None, "shapes: got none; must be at least one number of tokens"),
        ([4, 0], None, "shapes: got 0; must be at least 1"),
        ([4], ["experts"], "components: got 'experts'; must be one of quantization, scales, routing"),
    ],
)
def test_wrong_arguments(shapes: list[int], components: list[str] | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "default_device", lambda device: SimpleNamespace())
    with pytest.raises(ArgumentError, match=words):
        warmup(V4_FLASH, shapes, components=components)
