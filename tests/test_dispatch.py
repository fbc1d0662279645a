"""Which implementation a call gets: precedence, reasons in words, every capability, and the arrows between the packages."""

import ast
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
import dsv4.fast
from dsv4.fast import backends, dispatch, explain, ops, routing, scales, use
from dsv4.fast.adapters.library import Library
from dsv4.fast.dispatch import Device, Implementation, any_arguments, any_device, cuda_exactly, cuda_from, cuda_of
from dsv4.types import ArgumentError, BackendUnavailable, Unsupported

PACKAGE = Path(dsv4.__file__).parent
CPU = torch.device("cpu")
CARD, OTHER_CARD = torch.device("cuda", 0), torch.device("cuda", 1)
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1))

Capability = tuple[int, int]


def fake_cards(monkeypatch: pytest.MonkeyPatch, *capabilities: Capability) -> None:
    """Make cuda:i a card of the i-th capability."""

    def describe(device: torch.device) -> Device:
        return Device("cuda", capabilities[device.index or 0]) if device.type == "cuda" else Device(device.type)

    monkeypatch.setattr(dispatch, "describe", describe)


@pytest.fixture(autouse=True)
def toolchains_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_IMPL", raising=False)
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    monkeypatch.setattr(dispatch, "_said", set())


def absent(name: str) -> Library:
    return Library(name=name, module=f"no_{name}", distributions=(f"no-{name}",), install=f"pip install {name}==1.2")


def answers(name: str) -> Callable[..., Any]:
    return lambda *arguments: name


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """probe.measure, with a row for each sort of refusal."""

    def short(arguments: Any) -> str | None:
        return None if arguments["rows"] < 8 else f"takes fewer than 8 rows, got {arguments['rows']}"

    rows = (
        Implementation("triton", cuda_from(8, 0), any_arguments, answers("triton"), batch_invariant=False),
        Implementation("deepgemm", cuda_exactly((9, 0)), any_arguments, answers("deepgemm"), library=absent("deepgemm"), symbol="f"),
        Implementation("flashmla", any_device, short, answers("flashmla"), deterministic=False),
        Implementation("inductor", any_device, any_arguments, answers("inductor")),
        Implementation("eager", any_device, any_arguments, answers("eager")),
    )
    monkeypatch.setitem(dispatch.TABLES, "probe.measure", rows)


def chosen(device: torch.device = CPU, impl: str | None = None, rows: int = 9) -> str:
    return dispatch.resolve("probe.measure", device, {"rows": rows}, impl).backend


@pytest.mark.usefixtures("table")
def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == "inductor"
    monkeypatch.setenv("DSV4_IMPL", "probe=eager")
    assert chosen() == "eager"
    with use({"probe": "inductor"}):
        assert chosen() == "inductor"
        assert chosen(impl="eager") == "eager"
        with use({"probe.measure": "eager"}):
            assert chosen() == "eager"
        with use("eager"):
            assert chosen() == "inductor"  # what names the component counts before what names everything
        assert chosen() == "inductor"
    assert chosen() == "eager"
    with use("inductor"):
        assert chosen() == "inductor"
    with use("flashinfer"):
        assert chosen() == "eager"  # not a backend of this function: the environment still counts
    monkeypatch.setenv("DSV4_IMPL", "eager, probe.measure=inductor")
    assert chosen() == "inductor"


@pytest.mark.usefixtures("table")
def test_use_is_undone_by_an_error() -> None:
    with pytest.raises(KeyError), use("eager"):
        raise KeyError
    assert chosen() == "inductor"


REFUSED: dict[str, tuple[str, torch.device, type[Exception], tuple[str, ...]]] = {
    "wrong device": (
        "triton",
        CPU,
        BackendUnavailable,
        ("'triton': probe.measure: wants a CUDA device of capability 8.0 or newer, this is cpu",),
    ),
    "a library that is absent": (
        "deepgemm",
        CARD,
        BackendUnavailable,
        ("'deepgemm': probe.measure: deepgemm is not installed", "Install it with: pip install deepgemm==1.2"),
    ),
    "arguments": ("flashmla", CPU, Unsupported, ("impl: got 'flashmla'; probe.measure: takes fewer than 8 rows, got 9", "Leave impl out")),
    "not of this function": ("flashinfer", CPU, ArgumentError, ("probe.measure has triton, deepgemm, flashmla, inductor, eager",)),
}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("case", REFUSED)
def test_an_explicit_choice_runs_or_raises(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impl, device, error, words = REFUSED[case]
    fake_cards(monkeypatch, (9, 0))
    with ExitStack() as ways:
        with pytest.raises(error) as by_argument:
            chosen(device, impl)
        if case != "not of this function":
            ways.enter_context(use({"probe": impl}))
            with pytest.raises(error, match=r"probe\.measure"):
                chosen(device)
    for word in words:
        assert word in str(by_argument.value)


@pytest.mark.usefixtures("table")
def test_no_install_command_for_a_device_that_no_install_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards(monkeypatch, (9, 1))
    with pytest.raises(BackendUnavailable, match=r"wants a CUDA device of capability 9.0, this is SM91$"):
        chosen(CARD, "deepgemm")


@pytest.mark.usefixtures("table")
def test_the_default_says_once_what_it_passes_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_cards(monkeypatch, (9, 0))
    with caplog.at_level(logging.INFO, "dsv4.fast"), use(batch_invariant=True):
        for _ in range(3):
            assert chosen(CARD) == "inductor"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "probe.measure: passing over triton: is not batch-invariant, which use(batch_invariant=True) demands"),
        ("INFO", "probe.measure: passing over deepgemm: deepgemm is not installed"),
        ("INFO", "probe.measure: passing over flashmla: takes fewer than 8 rows, got 9"),
    ]


@pytest.mark.usefixtures("table")
def test_demanded_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards(monkeypatch, (8, 0))
    assert chosen(CARD) == "triton"
    assert chosen(CPU, rows=3) == "flashmla"
    with use(deterministic=True):
        assert chosen(CPU, rows=3) == "inductor"
        with use(deterministic=False):
            assert chosen(CPU, rows=3) == "flashmla"
        with pytest.raises(BackendUnavailable, match=r"is not deterministic, which use\(deterministic=True\) demands"):
            chosen(CPU, "flashmla", rows=3)
    with use("triton", batch_invariant=True), pytest.raises(BackendUnavailable, match="is not batch-invariant"):
        chosen(CARD)


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ({"impl": "cutlass"}, "impl: got 'cutlass'; must be one of triton, deepgemm, flashinfer, flashmla, inductor, eager"),
        ({"impl": {"scale": "eager"}}, "impl: got 'scale'; must name a component or function of dsv4.fast: "),
        ({"impl": {"scales.pack": "eager"}}, "impl: got 'scales.pack'; must name"),
        ({"impl": {"scales": "Triton"}}, "impl: got 'Triton'; must be one of"),
    ],
)
def test_unknown_names(demand: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words), use(**demand):
        pass


def test_unknown_names_in_the_environment_and_in_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_IMPL", "scales=fastest")
    with pytest.raises(ArgumentError, match="DSV4_IMPL: got 'fastest'; must be one of"):
        scales.pack_ue8m0(torch.zeros(1, 4, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match=r"function: got 'scales\.pack'; must be one of"):
        explain("scales.pack")
    monkeypatch.delenv("DSV4_IMPL")
    with pytest.raises(ArgumentError, match=r"impl: got 'cublas'; scales\.pack_ue8m0 has triton, deepgemm, eager, inductor"):
        scales.pack_ue8m0(torch.zeros(1, 4, dtype=torch.uint8), impl="cublas")


@pytest.mark.usefixtures("table")
def test_threads_do_not_see_each_others_demands() -> None:
    seen: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def demand() -> None:
        with use("eager"):
            inside.set()
            done.wait(30)
            seen["demanding"] = chosen()

    thread = threading.Thread(target=demand)
    thread.start()
    assert inside.wait(30)
    with use({"probe": "flashmla"}):
        seen["here"] = chosen(rows=1)
    seen["plain"] = chosen()
    done.set()
    thread.join()
    assert seen == {"demanding": "eager", "here": "flashmla", "plain": "inductor"}


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (cuda_from(8, 9), {(8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)}),
        (cuda_from(9), {(9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)}),
        (cuda_of(10, 12), {(10, 0), (10, 3), (10, 7), (12, 0), (12, 1)}),
        (cuda_exactly((9, 0), (12, 0)), {(9, 0), (12, 0)}),
    ],
)
def test_device_rules(rule: dispatch.DeviceRule, allowed: set[Capability]) -> None:
    assert {capability for capability in CAPABILITIES if rule(Device("cuda", capability)) is None} == allowed
    assert rule(Device("cpu")) is not None
    assert "this is SM86" in (rule(Device("cuda", (8, 6))) or "this is SM86")


# What each function's default is on a bare machine, on every CUDA card and on the CPU, and where a library is tried if asked for.
DEEPGEMM_ON = {(9, 0), (10, 0), (10, 3), (10, 7), (12, 0)}  # not 12.1, where it faults
FLASHINFER_ON = {(9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)}
MXFP8_ON = {(10, 0), (10, 3), (10, 7), (12, 0), (12, 1)}  # empty below SM100
DEEPGEMM_PAIRS_ON = DEEPGEMM_ON - {(9, 0)}
FLASHMLA_ON = {(9, 0), (10, 0), (10, 3)}
MLA_ON = {(9, 0), (12, 0), (12, 1)}  # FlashInfer's: bf16 rows on SM90, pages of V4.1 on SM120
EXPECTED: dict[str, tuple[str, str, dict[str, set[Capability]]]] = {
    "attention.decode_attention": ("triton", "eager", {"flashmla": FLASHMLA_ON, "flashinfer": MLA_ON}),
    "attention.draft_attention": ("triton", "eager", {}),
    "attention.merge_splits": ("triton", "eager", {}),
    "attention.paged_attention": ("triton", "eager", {"flashmla": FLASHMLA_ON, "flashinfer": MLA_ON}),
    "attention.prefill_attention": ("triton", "eager", {"flashmla": FLASHMLA_ON, "flashinfer": MLA_ON}),
    "attention.sparse_attention": ("triton", "eager", {"flashmla": FLASHMLA_ON, "flashinfer": {(9, 0)}}),
    "attention.window_indices": ("inductor", "inductor", {}),
    "codecs.decode_e2m1": ("inductor", "inductor", {}),
    "codecs.decode_e4m3": ("inductor", "inductor", {}),
    "codecs.decode_e5m2": ("inductor", "inductor", {}),
    "codecs.decode_e8m0": ("inductor", "inductor", {}),
    "codecs.encode_e2m1": ("inductor", "inductor", {}),
    "codecs.encode_e4m3": ("inductor", "inductor", {}),
    "codecs.encode_e8m0": ("inductor", "inductor", {}),
    "codecs.pack_fp4": ("inductor", "inductor", {}),
    "codecs.unpack_fp4": ("inductor", "inductor", {}),
    "quantization.dequantize": ("triton", "inductor", {}),
    "quantization.fake_quantize": ("triton", "inductor", {}),
    "quantization.quantize_fp4_e4m3": ("triton", "inductor", {}),
    "quantization.quantize_fp8": ("triton", "inductor", {"flashinfer": MXFP8_ON}),
    "quantization.quantize_fp8_blocks": ("triton", "inductor", {}),
    "quantization.quantize_mxfp4": ("triton", "inductor", {}),
    "scales.align_mn_major": ("triton", "eager", {"deepgemm": DEEPGEMM_ON}),
    "scales.deinterleave_hopper_fp4": ("triton", "eager", {}),
    "scales.interleave_hopper_fp4": ("triton", "eager", {}),
    "scales.pack_ue8m0": ("triton", "eager", {"deepgemm": DEEPGEMM_ON}),
    "scales.packed_from_128x4": ("triton", "eager", {}),
    "scales.packed_to_128x4": ("triton", "eager", {}),
    "scales.restride_rows": ("triton", "eager", {}),
    "scales.swizzle_128x4": ("triton", "eager", {"flashinfer": FLASHINFER_ON}),
    "scales.unpack_ue8m0": ("triton", "eager", {}),
    "scales.unswizzle_128x4": ("triton", "eager", {}),
    "scales.utccp_rows": ("triton", "eager", {}),
    "scales.zero_pad_rows": ("triton", "eager", {}),
    "scales.zero_pad_rows_": ("triton", "eager", {}),
    "eplb.map_to_physical": ("inductor", "inductor", {}),
    "routing.append_shared_slots": ("inductor", "inductor", {}),
    "routing.count_experts": ("eager", "eager", {}),
    "routing.gate_logits": ("triton", "eager", {}),
    "routing.gate_scores": ("inductor", "inductor", {}),
    "routing.mask_padding": ("inductor", "inductor", {}),
    "routing.pack_topk": ("inductor", "inductor", {}),
    "routing.remap_home_rank_slots": ("inductor", "inductor", {}),
    "routing.route": ("triton", "inductor", {}),
    "routing.route_hash": ("inductor", "inductor", {}),
    "routing.route_topk": ("triton", "inductor", {}),
    "routing.route_weights": ("inductor", "inductor", {}),
    "norms.hadamard": ("triton", "inductor", {}),
    "norms.head_rms_norm": ("triton", "inductor", {}),
    "norms.rms_norm": ("triton", "inductor", {}),
    "rotary.apply_rope": ("triton", "inductor", {}),
    "rotary.norm_rope": ("triton", "inductor", {}),
    "hyper_connections.boundary": ("triton", "inductor", {}),
    "hyper_connections.collapse": ("triton", "inductor", {}),
    "hyper_connections.expand": ("triton", "inductor", {}),
    "hyper_connections.head_collapse": ("triton", "inductor", {}),
    "hyper_connections.mix_statistics": ("triton", "eager", {}),
    "hyper_connections.split_mix": ("triton", "eager", {}),
    "kv_cache.convert_layout": ("triton", "inductor", {}),
    "kv_cache.load_kv": ("triton", "inductor", {}),
    "kv_cache.norm_rope_store_kv": ("triton", "inductor", {}),
    "kv_cache.page_slots": ("triton", "eager", {}),
    "kv_cache.quantize_kv": ("triton", "inductor", {}),
    "kv_cache.store_kv": ("triton", "inductor", {}),
    "compressor.compress": ("triton", "inductor", {}),
    "compressor.compress_and_store": ("triton", "inductor", {}),
    "compressor.compression_plan": ("triton", "eager", {}),
    "compressor.project": ("triton", "eager", {}),
    "indexer.candidate_blocks": ("triton", "inductor", {}),
    "indexer.index_keys": ("triton", "inductor", {}),
    "indexer.index_logits": ("triton", "eager", {"deepgemm": DEEPGEMM_ON}),
    "indexer.index_queries": ("triton", "inductor", {}),
    "indexer.load_index_keys": ("triton", "eager", {}),
    "indexer.paged_index_logits": ("triton", "eager", {"deepgemm": {(9, 0)}}),
    "indexer.restrict_to_blocks": ("triton", "eager", {}),
    "indexer.select_candidates": ("triton", "inductor", {"deepgemm": DEEPGEMM_ON}),
    "indexer.select_entries": ("triton", "inductor", {"deepgemm": DEEPGEMM_ON}),
    "indexer.select_topk": ("triton", "inductor", {"flashinfer": FLASHINFER_ON}),
    "indexer.store_index_keys": ("triton", "eager", {}),
    "indexer.visible_entries": ("triton", "eager", {}),
    "linear.linear_fp8": ("triton", "inductor", {"deepgemm": DEEPGEMM_ON}),
    "linear.linear_mxfp8": ("triton", "inductor", {"flashinfer": MXFP8_ON, "deepgemm": DEEPGEMM_PAIRS_ON}),
    "linear.norm_quantize": ("triton", "inductor", {}),
    "linear.swiglu_quantize": ("triton", "inductor", {}),
    "output_projection.project_groups": ("triton", "inductor", {"deepgemm": DEEPGEMM_ON}),
    "output_projection.project_groups_pair": ("triton", "inductor", {"deepgemm": DEEPGEMM_ON}),
    "output_projection.rotate_quantize": ("triton", "inductor", {}),
}
ARGUMENTS = {"scales": torch.zeros(128, 4, dtype=torch.uint8)}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("function", EXPECTED)
def test_cd_01_every_function_on_every_capability(function: str, capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards(monkeypatch, capability)
    on_cuda, on_cpu, libraries = EXPECTED[function]
    rows = [replace(row, arguments=any_arguments, preferred=None) for row in dispatch.TABLES[function]]
    monkeypatch.setitem(dispatch.TABLES, function, tuple(rows))
    assert dispatch.resolve(function, CARD, {}).backend == on_cuda
    assert dispatch.resolve(function, CPU, {}).backend == on_cpu
    tried = {row.backend for row in rows if row.library is not None and row.device(Device("cuda", capability)) is None}
    assert tried == {name for name, there in libraries.items() if capability in there}
    assert {row.backend for row in rows if row.library is not None} == set(libraries)


@pytest.mark.parametrize(
    "function", ["norms.rms_norm", "norms.head_rms_norm", "hyper_connections.collapse", "hyper_connections.head_collapse"]
)
def test_uncompiled_rows_are_preferred_on_a_cpu_alone(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a width that Triton does not take, on a card, are the compiler's."""
    fake_cards(monkeypatch, (9, 0))
    name = "x" if function.startswith("norms") else "streams"
    assert dispatch.resolve(function, CPU, {name: torch.empty(2, 4, 7)}).backend == "eager"
    assert dispatch.resolve(function, CARD, {name: torch.empty(2, 4, 7, device="meta")}).backend == "inductor"
    assert dispatch.resolve(function, CARD, {name: torch.empty(2, 4, 64, device="meta")}).backend == "triton"


def test_the_literal_table_is_complete() -> None:
    assert {function for function in dispatch.TABLES if not function.startswith("probe")} == set(EXPECTED)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_function_has_a_row_of_our_own_on_every_capability(capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, rows in dispatch.TABLES.items():
        assert any(row.library is None and row.device(Device("cuda", capability)) is None for row in rows), function


def test_an_unknown_generation_and_another_kind_of_device_have_our_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards(monkeypatch, (7, 5))
    assert dispatch.resolve("codecs.decode_e8m0", CARD, {}).backend == "inductor"
    assert dispatch.resolve("scales.pack_ue8m0", CARD, ARGUMENTS).backend == "eager"
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: "no C++ compiler found" if backend == "inductor" else None)
    assert dispatch.resolve("codecs.decode_e8m0", CPU, {}).backend == "eager"


@pytest.mark.usefixtures("table")
def test_cd_01_two_cards_of_one_process_resolve_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards(monkeypatch, (9, 0), (7, 5))
    for _ in range(2):
        assert (chosen(CARD), chosen(OTHER_CARD)) == ("triton", "inductor")
    with pytest.raises(BackendUnavailable, match=r"capability 9\.0, this is SM75"):
        chosen(OTHER_CARD, "deepgemm")


def test_calls_go_where_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operator: the argument, use() for a component, and an in-place operator under its function's name."""
    byte, called = torch.arange(8, dtype=torch.uint8).view(2, 4), []
    for function in ("scales.pack_ue8m0", "scales.zero_pad_rows_"):
        rows = [
            Implementation(row.backend, row.device, row.arguments, _spy(called, row), library=row.library, symbol=row.symbol)
            for row in dispatch.TABLES[function]
        ]
        monkeypatch.setitem(dispatch.TABLES, function, tuple(rows))
    packed = scales.pack_ue8m0(byte, impl="eager")
    with use({"scales": "eager"}):
        scales.pack_ue8m0(byte)
        scales.pack_ue8m0(byte, impl="inductor")
    with use({"scales.zero_pad_rows": "eager"}):
        scales.zero_pad_rows(packed, 1, scale_layout="packed", out=packed)
    assert called == ["eager", "eager", "inductor", "eager"]


def _spy(called: list[str], row: Implementation) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        called.append(row.backend)
        return row.call(*arguments)

    return call


@pytest.mark.usefixtures("table")
def test_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = {row.backend: row for row in backends() if row.function == "probe.measure"}
    assert {name: row.usable for name, row in status.items()} == {
        "triton": False,
        "deepgemm": False,
        "flashmla": True,
        "inductor": True,
        "eager": True,
    }
    assert status["triton"].reason == "wants a CUDA device of capability 8.0 or newer, this is cpu"
    assert (status["triton"].batch_invariant, status["flashmla"].deterministic) == (False, False)
    with use({"probe": "eager"}):
        lines = explain("probe.measure").splitlines()
    assert lines[0] == "probe.measure on cpu, eager demanded"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["triton", "no:"],
        ["deepgemm", "no:"],
        ["flashmla", "usable"],
        ["inductor", "usable"],
        ["eager", "chosen"],
    ]


def modules(folder: str = "") -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        name = "dsv4." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> set[str]:
    """Everything of dsv4 that a module imports, anywhere in it: `from a import b` counts as a and as a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide an arrow"
            found |= {str(node.module)} | {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.partition(".")[0] == "dsv4"}


def under(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == package or name.startswith(package + ".") for package in packages)}


def test_arrows_point_one_way() -> None:
    """formats, configs, types, checks, host <- reference; the same <- fast; both <- parity."""
    graph = {name: imports(tree) for name, tree in modules()}
    assert {"dsv4.fast.scales", "dsv4.reference.scales", "dsv4.types"} <= set(graph)
    forbidden = {
        "dsv4.reference": ("dsv4.fast", "dsv4.parity", "dsv4.cli"),
        "dsv4.fast": ("dsv4.reference", "dsv4.parity", "dsv4.cli"),
        "dsv4.parity": ("dsv4.cli",),
    }
    for name, imported in graph.items():
        package = next((package for package in forbidden if under({name}, package)), None)
        shared = not under({name}, *forbidden, "dsv4.cli")
        targets = ("dsv4.reference", "dsv4.fast", "dsv4.parity", "dsv4.cli") if shared else forbidden.get(package or "", ())
        assert not under(imported, *targets), name


def test_third_party_libraries_are_called_in_adapters_alone() -> None:
    libraries = {"deep_gemm", "flashinfer", "flash_mla", "tvm_ffi"}
    for name, tree in modules():
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots = {module.partition(".")[0] for module in found}
        assert not roots & libraries or name.startswith("dsv4.fast.adapters."), name
        assert "triton" not in roots or name.startswith("dsv4.fast.kernels.") or name in ("dsv4.fast.dispatch", "dsv4.fast.status"), name


def test_signatures_differ_by_the_fast_keywords_alone() -> None:
    extra = {"impl", "out", "workspace"}
    stems = {name for name in dsv4.fast.__all__ if inspect.ismodule(getattr(dsv4.fast, name))}
    assert {"codecs", "quantization", "scales"} <= stems
    for stem in sorted(stems):
        reference, fast = importlib.import_module(f"dsv4.reference.{stem}"), importlib.import_module(f"dsv4.fast.{stem}")
        assert sorted(reference.__all__) == sorted(fast.__all__), stem
        for name in reference.__all__:
            if not inspect.isfunction(getattr(reference, name)):
                continue
            ours, theirs = (inspect.signature(getattr(side, name), eval_str=True) for side in (fast, reference))
            added = {key for key in ours.parameters if key not in theirs.parameters}
            assert added <= extra, (stem, name)
            assert all(ours.parameters[key].kind is inspect.Parameter.KEYWORD_ONLY for key in added), (stem, name)
            kept = [value for key, value in ours.parameters.items() if key not in added]
            assert kept == list(theirs.parameters.values()), (stem, name)
            assert ours.return_annotation == theirs.return_annotation, (stem, name)


def test_every_function_is_an_operator_with_impl_last() -> None:
    for function in dispatch.TABLES:
        assert ops.argument_names(function.partition(".")[2])[-1] == "impl"


def test_a_component_wide_choice_goes_to_the_functions_that_have_it() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with use({"routing": "inductor"}):
        assert dispatch.resolve("routing.count_experts", CPU, {}).backend == "eager"
        assert dispatch.resolve("routing.route", CPU, {}).backend == "inductor"
        routing.count_experts(ids, torch.zeros(1, dtype=torch.int32))
    with (
        pytest.raises(ArgumentError, match=r"^impl: got 'inductor'; routing\.count_experts has eager"),
        use({"routing.count_experts": "inductor"}),
    ):
        pass


@pytest.mark.parametrize("choice", [5, True, ("eager",), b"eager"])
def test_choices_are_words(choice: object) -> None:
    with pytest.raises(ArgumentError, match=r"^impl: got "), use(choice):  # type: ignore[arg-type]
        pass


def test_the_environment_and_devices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_IMPL", "eager,inductor")
    with pytest.raises(ArgumentError, match=r"^DSV4_IMPL: got 'eager,inductor'; must name each component or function once"):
        scales.pack_ue8m0(torch.zeros(1, 4, dtype=torch.uint8))
    monkeypatch.delenv("DSV4_IMPL")
    with pytest.raises(ArgumentError, match=r"^device: got 'garbage'"):
        explain("scales.pack_ue8m0", "garbage")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"^device: got 'cuda'; there is no CUDA device here"):
        explain("scales.pack_ue8m0", "cuda")
