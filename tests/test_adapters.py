"""Third-party libraries, made up in sys.modules: absent, broken, of the wrong torch, wrong, empty, right; and the real ones, if any."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.fast import backends, dispatch, scales
from dsv4.fast.adapters import deepgemm, flashinfer
from dsv4.fast.adapters.library import Library, known_answer
from dsv4.fast.dispatch import any_device
from dsv4.types import BackendUnavailable, Unsupported

CPU = torch.device("cpu")
TORCH = torch.__version__
HERE = ".".join(TORCH.split(".")[:2])
BYTE = torch.arange(40, dtype=torch.uint8).view(8, 5)


class Installed:
    """Installs made-up modules and says which versions are there; every library forgets what it knew, before and after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.versions: dict[str, str] = {}
        monkeypatch.setattr(metadata, "version", self._version)
        for module in ("deep_gemm", "flashinfer"):
            monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
        forget()

    def _version(self, distribution: str) -> str:
        if distribution not in self.versions:
            raise metadata.PackageNotFoundError(distribution)
        return self.versions[distribution]

    def put(self, distribution: str, module: str, version: str, **functions: Callable[..., Any]) -> None:
        forget()
        self.versions[distribution] = version
        fake = ModuleType(module)
        for name, function in functions.items():
            setattr(fake, name, function)
        self.monkeypatch.setitem(sys.modules, module, fake)


def forget() -> None:
    for library in (deepgemm.LIBRARY, flashinfer.LIBRARY):
        library._found = False
        library._proofs.clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Rows with a library pass for any device, so that the made-up functions run on the CPU."""
    for function, rows in dispatch.TABLES.items():
        anywhere = tuple(_anywhere(row) for row in rows)
        monkeypatch.setitem(dispatch.TABLES, function, anywhere)
    monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: None)
    yield Installed(monkeypatch)
    forget()


def _anywhere(row: dispatch.Implementation) -> dispatch.Implementation:
    return row if row.library is None else replace(row, device=any_device)


def packed_by_loops(numbers: Tensor) -> Tensor:
    """DeepGEMM's packer in plain Python, garbage in the pad words."""
    rows, groups = numbers.shape
    aligned, words = -(-rows // 4) * 4, -(-groups // 4)
    memory = torch.full((words, aligned, 4), 0xEE, dtype=torch.uint8)
    memory[:, :rows] = 0
    exponents = numbers.view(torch.int32) >> 23
    for row in range(rows):
        for group in range(groups):
            memory[group // 4, row, group % 4] = int(exponents[row, group])
    return memory.view(torch.int32)[..., 0].T[:rows]


def aligned_by_loops(numbers: Tensor) -> Tensor:
    return numbers.T.contiguous().T


def interleaved_by_loops(byte: Tensor) -> Tensor:
    rows, groups = byte.shape
    out = torch.zeros(-(-rows // 128) * -(-groups // 4) * 512, dtype=torch.uint8)
    for r in range(rows):
        for g in range(groups):
            out[r // 128 * -(-groups // 4) * 512 + g // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = byte[r, g]
    return out


def mxfp8_by_loops(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """FlashInfer's quantiser on values whose scale is plain: the smallest power of two that 448 of reaches the largest magnitude."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    byte = torch.zeros(amax.shape, dtype=torch.uint8)
    for index, value in enumerate(amax.flatten().tolist()):
        byte.view(-1)[index] = next(b for b in range(255) if 448 * 2.0 ** (b - 127) >= value)
    scale = 2.0 ** (byte.float() - 127)[..., None]
    codes = (groups / scale).flatten(-2).to(torch.float8_e4m3fn)
    return codes, interleaved_by_loops(byte) if swizzled else byte.flatten()


def routed_by_loops(logits: Tensor, token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """FlashInfer's router by token id: weights first, not scaled."""
    ids = torch.stack([table[token] for token in token_ids.tolist()])
    weights = [[(1 + logits[row, expert].double().exp()).log() ** 0.5 for expert in chosen] for row, chosen in enumerate(ids.tolist())]
    scores = torch.tensor(weights, dtype=torch.float32)
    return scores / scores.sum(1, keepdim=True), ids


def fused_moe(route: Callable[..., Any]) -> dict[str, Any]:
    return {"fused_moe": SimpleNamespace(hash_topk=route)}


def left_as_it_was(like: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an empty kernel: results of the right shapes and dtypes that hold what was in memory."""
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not kept:
            results = like(*arguments)
            kept.append(results if isinstance(results, tuple) else (results,))
        garbage = tuple(torch.full_like(result.view(torch.uint8), 0xAB).view(result.dtype) for result in kept[0])
        return garbage if len(garbage) > 1 else garbage[0]

    return call


DEEPGEMM = {deepgemm.PACK: packed_by_loops, deepgemm.ALIGN: aligned_by_loops}
FLASHINFER = {flashinfer.INTERLEAVE: interleaved_by_loops, flashinfer.MXFP8_QUANTIZE: mxfp8_by_loops}


def test_absent(installed: Installed) -> None:
    for call, library in ((scales.pack_ue8m0, "sgl-deep-gemm"), (scales.swizzle_128x4, "flashinfer")):
        with pytest.raises(BackendUnavailable) as error:
            call(BYTE, impl={"sgl-deep-gemm": "deepgemm"}.get(library, library))
        assert f"{library} is not installed. Install it with: pip install" in str(error.value)


def test_import_error(installed: Installed) -> None:
    installed.versions |= {"sgl-deep-gemm": "0.1.5.post1"}
    with pytest.raises(BackendUnavailable, match=f"sgl-deep-gemm 0.1.5.post1 does not import under torch {HERE}.*: ModuleNotFoundError"):
        scales.pack_ue8m0(BYTE, impl="deepgemm")


def test_cd_04_missing_symbol_is_known_before_any_call(installed: Installed) -> None:
    """Availability names the symbol; the default goes on without it."""
    installed.put("sgl-deep-gemm", "deep_gemm", "0.1.5.post1", **{deepgemm.ALIGN: aligned_by_loops})
    reasons = {(status.function, status.backend): status for status in backends("cpu")}
    assert reasons["scales.align_mn_major", "deepgemm"].usable
    lacking = reasons["scales.pack_ue8m0", "deepgemm"]
    assert not lacking.usable
    assert f"sgl-deep-gemm 0.1.5.post1 has no {deepgemm.PACK}" in lacking.reason
    assert scales.pack_ue8m0(BYTE).shape == (8, 2)
    with pytest.raises(BackendUnavailable, match=f"has no {deepgemm.PACK}"):
        scales.pack_ue8m0(BYTE, impl="deepgemm")


def test_right_answers_are_used(installed: Installed) -> None:
    installed.put("sgl-deep-gemm", "deep_gemm", "0.1.5.post1", **DEEPGEMM)
    installed.put("flashinfer-python", "flashinfer", "0.7.4", **FLASHINFER)
    for call, given, impl in (
        (scales.pack_ue8m0, BYTE, "deepgemm"),
        (scales.pack_ue8m0, BYTE.T.contiguous().T, "deepgemm"),
        (scales.align_mn_major, torch.randn(8, 5), "deepgemm"),
        (scales.align_mn_major, torch.randn(8, 1), "deepgemm"),  # the library hands its input back here
        (scales.swizzle_128x4, BYTE, "flashinfer"),
    ):
        got, want = call(given, impl=impl), call(given, impl="eager")
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(got, want)
        assert got.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    x = torch.tensor([[1.0] * 32 + [-6.0] * 32], dtype=torch.bfloat16)
    codes, byte = flashinfer.mxfp8_quantize(x, False)
    assert (codes.dtype, codes.tolist()) == (torch.uint8, [[0x78] * 32 + [0xFC] * 32])
    assert byte.tolist() == [119, 121]
    assert flashinfer.LIBRARY.disproved(flashinfer.MXFP8_QUANTIZE, CPU) is None


def test_the_router_by_token_id(installed: Installed) -> None:
    installed.put("flashinfer-python", "flashinfer", "0.7.4", **fused_moe(routed_by_loops))
    assert flashinfer.LIBRARY.disproved(flashinfer.HASH_TOPK, CPU) is None
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    ids, weights = flashinfer.hash_topk(torch.tensor([[100.0, 25.0, 225.0]]), torch.tensor([0]), table)
    assert (ids.tolist(), ids.dtype) == ([[2, 0]], torch.int32)
    assert [round(weight, 6) for weight in weights[0].tolist()] == [0.6, 0.4]


def test_rows_that_the_library_leaves_undefined_are_refused(installed: Installed) -> None:
    installed.put("sgl-deep-gemm", "deep_gemm", "0.1.5.post1", **DEEPGEMM)
    with pytest.raises(Unsupported, match="leaves pad words undefined, so rows must be a multiple of 4; got 7"):
        scales.pack_ue8m0(BYTE[:7], impl="deepgemm")
    with pytest.raises(Unsupported, match=r"not empty; got \[2, 2, 4, 5\]"):
        scales.pack_ue8m0(BYTE.new_zeros(2, 2, 4, 5), impl="deepgemm")
    installed.put("flashinfer-python", "flashinfer", "0.7.4", **FLASHINFER)
    with pytest.raises(Unsupported, match=r"not empty; got \[0, 5\]"):
        scales.swizzle_128x4(BYTE[:0], impl="flashinfer")


WRONG: dict[str, tuple[Library, str, dict[str, Callable[..., Any]], str]] = {
    "an empty quantiser": (
        flashinfer.LIBRARY,
        flashinfer.MXFP8_QUANTIZE,
        {flashinfer.MXFP8_QUANTIZE: left_as_it_was(mxfp8_by_loops)},
        "128 of 128 bytes of result 0 differ, byte 0 is 0xab, not 0x78",
    ),
    "swizzled scales in rows": (
        flashinfer.LIBRARY,
        flashinfer.MXFP8_QUANTIZE,
        {flashinfer.MXFP8_QUANTIZE: lambda x, swizzled: mxfp8_by_loops(x, False)},
        "result 1 has 4 bytes, not 512",
    ),
    "scales to the nearest power": (
        flashinfer.LIBRARY,
        flashinfer.MXFP8_QUANTIZE,
        {flashinfer.MXFP8_QUANTIZE: lambda x, swizzled: (mxfp8_by_loops(x, swizzled)[0], mxfp8_by_loops(x, swizzled)[1] - 1)},
        "4 of 4 bytes of result 1 differ, byte 0 is 0x76, not 0x77",
    ),
    "an interleave that moves nothing": (
        flashinfer.LIBRARY,
        flashinfer.INTERLEAVE,
        {flashinfer.INTERLEAVE: lambda byte: torch.nn.functional.pad(byte, (0, 3, 0, 94)).flatten()},
        "bytes of result 0 differ",
    ),
    "a router with ids first": (
        flashinfer.LIBRARY,
        flashinfer.HASH_TOPK,
        fused_moe(lambda *given: routed_by_loops(*given)[::-1]),
        "bytes of result 0 differ",
    ),
    "a router by the place of a token": (
        flashinfer.LIBRARY,
        flashinfer.HASH_TOPK,
        fused_moe(lambda logits, token_ids, table: routed_by_loops(logits, torch.arange(len(token_ids)), table)),
        "4 of 32 bytes of result 0 differ, byte 16 is 0x03, not 0x04",
    ),
    "a router whose weights are not normalised": (
        flashinfer.LIBRARY,
        flashinfer.HASH_TOPK,
        fused_moe(lambda *given: (50 * routed_by_loops(*given)[0], routed_by_loops(*given)[1])),
        "bytes of result 1 differ",
    ),
    "an interleave that raises": (
        flashinfer.LIBRARY,
        flashinfer.INTERLEAVE,
        {flashinfer.INTERLEAVE: lambda byte: 1 // 0},
        "raised ZeroDivisionError: integer division or modulo by zero",
    ),
    "a packer in the other byte order": (
        deepgemm.LIBRARY,
        deepgemm.PACK,
        {deepgemm.PACK: lambda numbers: packed_by_loops(torch.nn.functional.pad(numbers, (0, 3)).unflatten(1, (2, 4)).flip(2).flatten(1))},
        "bytes of result 0 differ, byte 0 is 0x03, not 0x00",
    ),
    "a packer that keeps the strides": (
        deepgemm.LIBRARY,
        deepgemm.PACK,
        {deepgemm.PACK: lambda numbers: packed_by_loops(numbers).contiguous()},
        r"strides (2, 1), not (1, 4)",
    ),
    "an alignment of other numbers": (
        deepgemm.LIBRARY,
        deepgemm.ALIGN,
        {deepgemm.ALIGN: lambda numbers: aligned_by_loops(numbers + 2.0**-126)},
        "bytes of result 0 differ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers_are_refused(case: str, installed: Installed) -> None:
    library, symbol, functions, words = WRONG[case]
    version = "0.7.4" if library is flashinfer.LIBRARY else "0.1.5.post1"
    installed.put(library.distributions[0], library.module, version, **functions)
    reason = library.disproved(symbol, CPU)
    assert reason is not None
    assert reason.startswith(f"{library.name} {version}: {symbol} failed its known-answer test: ")
    assert words in reason


def test_a_wrong_library_is_passed_over_by_default_and_refused_by_name(installed: Installed) -> None:
    installed.put("flashinfer-python", "flashinfer", "0.7.4", **WRONG["an interleave that moves nothing"][2])
    assert torch.equal(scales.swizzle_128x4(BYTE), scales.swizzle_128x4(BYTE, impl="eager"))
    with pytest.raises(BackendUnavailable, match=r"flashinfer 0.7.4: block_scale_interleave failed its known-answer test"):
        scales.swizzle_128x4(BYTE, impl="flashinfer")
    (status,) = (s for s in backends("cpu", prove=True) if (s.function, s.backend) == ("scales.swizzle_128x4", "flashinfer"))
    assert not status.usable


def test_a_probe_runs_once(installed: Installed) -> None:
    calls: list[int] = []

    def count(byte: Tensor) -> Tensor:
        calls.append(byte.shape[0])
        return interleaved_by_loops(byte)

    installed.put("flashinfer-python", "flashinfer", "0.7.4", **{flashinfer.INTERLEAVE: count})
    for _ in range(3):
        scales.swizzle_128x4(BYTE, impl="flashinfer")
    assert calls == [34, 34, 8, 8, 8]  # the known case twice, then the calls


def test_nothing_is_proved_during_graph_capture(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.put("flashinfer-python", "flashinfer", "0.7.4", **FLASHINFER)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(flashinfer.LIBRARY.probes, flashinfer.INTERLEAVE, lambda device: None)
    card = torch.device("cuda", 0)
    reason = flashinfer.LIBRARY.disproved(flashinfer.INTERLEAVE, card)
    assert reason is not None
    assert "cannot during CUDA graph capture: call it, or warm up, before capturing" in reason
    capturing[0] = False
    assert flashinfer.LIBRARY.disproved(flashinfer.INTERLEAVE, card) is None  # the refusal was not kept
    capturing[0] = True
    assert flashinfer.LIBRARY.disproved(flashinfer.INTERLEAVE, card) is None  # the proof was


@pytest.mark.parametrize("prefix", [0, 7])
def test_a_survivor_of_memory_is_not_an_answer(prefix: int) -> None:
    """A result that equals one poison is caught by the other."""
    for poison in (0xAB, 0x54):
        want = bytes([1] * prefix + [poison] * 4)
        stale = iter([torch.tensor(list(want), dtype=torch.uint8), torch.tensor([1] * prefix + [poison ^ 0xFF] * 4, dtype=torch.uint8)])
        assert known_answer(lambda stale=stale: (next(stale),), (want,), CPU) is not None
        assert known_answer(lambda want=want: (torch.tensor(list(want), dtype=torch.uint8),), (want,), CPU) is None


@pytest.mark.parametrize(
    ("torch_version", "command"),
    [
        ("2.11.0+cu130", "pip install sgl-deep-gemm==0.1.5.post1"),
        ("2.13.0", "pip install sgl-deep-gemm==0.2.0"),
        ("2.14.1+cu130", "pip install sgl-deep-gemm==0.2.5"),
        ("2.12.0", "pip install 'torch==2.11.*' sgl-deep-gemm==0.1.5.post1  (no wheel is known to fit torch 2.12.0)"),
    ],
)
def test_install_command_for_the_torch_at_hand(torch_version: str, command: str) -> None:
    assert deepgemm.install_command(torch_version) == command
    assert deepgemm.LIBRARY.install == deepgemm.install_command(TORCH)


@pytest.mark.parametrize(
    ("version", "torch_version", "reason"),
    [
        ("0.1.5.post1", "2.11.0+cu130", None),
        ("0.2.0", "2.13.0+cpu", None),
        ("0.2.5", "2.14.1", None),
        ("0.2.5", "2.11.0", "is built for torch 2.14; this torch, 2.11.0, takes 0.1.5 or 0.1.5.post1"),
        ("0.1.5.post1", "2.12.0", "is built for torch 2.11; this torch, 2.12.0, has no wheel"),
        ("0.2.1.post1", "2.11.0", "is not known to fit any torch; this torch, 2.11.0, takes 0.1.5 or 0.1.5.post1"),
        ("0.1.4", "2.11.0", "is not known to fit any torch; this torch, 2.11.0, takes 0.1.5 or 0.1.5.post1"),
    ],
)
def test_wheels_of_the_wrong_torch(version: str, torch_version: str, reason: str | None) -> None:
    assert deepgemm.unfit(version, torch_version) == reason


def test_a_wheel_of_the_wrong_torch_is_not_even_imported(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: "is built for torch 2.14")
    installed.put("sgl-deep-gemm", "deep_gemm", "0.2.5", **DEEPGEMM)
    monkeypatch.setattr("dsv4.fast.adapters.library.import_module", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(BackendUnavailable, match=r"sgl-deep-gemm 0\.2\.5 is built for torch 2\.14. Install it with: pip install"):
        scales.pack_ue8m0(BYTE, impl="deepgemm")


def test_a_flashinfer_of_another_series(installed: Installed) -> None:
    installed.put("flashinfer-python", "flashinfer", "0.6.15.post1", **FLASHINFER)
    with pytest.raises(BackendUnavailable, match=r"flashinfer 0\.6\.15\.post1 is not 0\.7\.x"):
        scales.swizzle_128x4(BYTE, impl="flashinfer")


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or flashinfer.LIBRARY.missing() is not None,
    reason="wants an SM90 card and FlashInfer",
)


@on_hopper
def test_the_real_quantiser_is_found_empty_on_sm90() -> None:
    reason = flashinfer.LIBRARY.disproved(flashinfer.MXFP8_QUANTIZE, torch.device("cuda"))
    assert reason is not None
    assert "mxfp8_quantize failed its known-answer test" in reason


@on_hopper
@pytest.mark.parametrize("symbol", [flashinfer.INTERLEAVE, flashinfer.HASH_TOPK])
def test_the_real_functions_prove_themselves(symbol: str) -> None:
    assert flashinfer.LIBRARY.disproved(symbol, torch.device("cuda")) is None


@pytest.mark.skipif(
    not torch.cuda.is_available() or deepgemm.LIBRARY.missing() is not None, reason="wants a CUDA device and an sgl-deep-gemm that fits"
)
@pytest.mark.parametrize("symbol", [deepgemm.PACK, deepgemm.ALIGN])
def test_the_real_transforms_prove_themselves(symbol: str) -> None:
    assert deepgemm.LIBRARY.disproved(symbol, torch.device("cuda")) is None
