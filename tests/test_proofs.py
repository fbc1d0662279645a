"""Proofs of third-party functions: what is asked of them, and what is kept of the answers."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.fast import backends, dispatch, explain
from dsv4.fast.adapters import deepgemm, flashinfer, flashmla, proofs
from dsv4.fast.adapters.library import Library
from dsv4.fast.adapters.proofs import Answer, Key
from dsv4.fast.dispatch import Implementation, any_arguments, any_device
from dsv4.fast.warmup import prove

CPU, CARD, OTHER_CARD = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
CAPABILITIES = {0: (9, 0), 1: (12, 0)}
LIBRARIES = (deepgemm.LIBRARY, flashinfer.LIBRARY, flashmla.LIBRARY)


class World:
    """A process in which some libraries are installed, and two cards of different generations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.versions: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.wrong: str | None = None
        self.capturing = False
        monkeypatch.setattr(metadata, "version", self._version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CAPABILITIES[torch.device(device).index or 0])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for library in LIBRARIES:
            monkeypatch.setitem(sys.modules, library.module, None)

    def _version(self, distribution: str) -> str:
        if distribution not in self.versions:
            raise metadata.PackageNotFoundError(distribution)
        return self.versions[distribution]

    def process(self, version: str = "1.0") -> Library:
        """A library as a new process finds it, with probes that write down where they run."""
        self.versions["lib"] = version
        self.monkeypatch.setitem(sys.modules, "lib", ModuleType("lib"))

        def probe(name: str) -> Callable[[torch.device], str | None]:
            def run(device: torch.device) -> str | None:
                self.asked.append((name, str(device)))
                return self.wrong

            return run

        return Library("lib", "lib", ("lib",), "pip install lib", probes={"f": probe("f"), "g": probe("g")})

    def install(self, library: Library, version: str, **functions: Callable[..., Any]) -> None:
        forget()
        self.versions[library.distributions[0]] = version
        module = ModuleType(library.module)
        vars(module).update(functions)
        self.monkeypatch.setitem(sys.modules, library.module, module)


def forget() -> None:
    for library in LIBRARIES:
        library._found = False
        library._proofs.clear()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(proofs, "_said", set())
    forget()
    yield World(monkeypatch)
    forget()


def test_an_answer_outlives_the_process(world: World) -> None:
    assert world.process().disproved("f", CARD) is None
    assert world.process().disproved("f", CARD) is None
    world.wrong = "is empty"
    reason = world.process().disproved("g", CARD)
    assert reason == "lib 1.0: g failed its known-answer test: is empty"
    world.wrong = None
    assert world.process().disproved("g", CARD) == reason
    assert world.asked == [("f", "cuda:0"), ("g", "cuda:0")]
    (first, second) = json.loads(proofs.path().read_text())["proofs"]
    assert {**first, "torch": "", "dsv4": ""} == {
        "library": "lib", "version": "1.0", "torch": "", "device": "SM90", "function": "f", "dsv4": "", "wrong": None,
    }  # fmt: skip
    assert second["wrong"] == reason


@pytest.mark.parametrize("change", ["version", "torch", "card", "dsv4"])
def test_whatever_an_answer_depends_on_asks_again(change: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.process().disproved("f", CARD) is None
    world.wrong = "wrong there"
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    if change == "dsv4":
        monkeypatch.setattr(Key.__new__, "__defaults__", ("9.9",))
    device = OTHER_CARD if change == "card" else CARD
    assert "wrong there" in str(world.process("1.1" if change == "version" else "1.0").disproved("f", device))
    assert len(world.asked) == 2


def test_two_cards_of_one_process_prove_apart(world: World) -> None:
    library = world.process()
    assert library.disproved("f", CARD) is None
    world.wrong = "faults"
    assert "faults" in str(library.disproved("f", OTHER_CARD))
    assert library.disproved("f", CARD) is None
    assert world.asked == [("f", "cuda:0"), ("f", "cuda:1")]
    assert {proof["device"] for proof in json.loads(proofs.path().read_text())["proofs"]} == {"SM90", "SM120"}


def test_again_asks_failures_alone(world: World) -> None:
    world.wrong = "out of memory"
    assert world.process().disproved("f", CARD) is not None
    world.wrong = None
    library = world.process()
    assert library.disproved("f", CARD) is not None
    assert library.disproved("f", CARD, again=True) is None
    assert library.disproved("f", CARD, again=True) is None
    assert len(world.asked) == 2
    assert world.process().recalled("f", CARD) == Answer(None)


def test_capturing_refuses_what_is_unproven(world: World) -> None:
    world.capturing = True
    library = world.process()
    assert "f has not proved itself yet and cannot during CUDA graph capture" in str(library.disproved("f", CARD))
    assert library.recalled("f", CARD) is None
    assert not proofs.path().exists()
    world.capturing = False
    assert library.disproved("f", CARD) is None
    world.capturing = True
    assert world.process().disproved("f", CARD) is None  # proved by an earlier process
    assert len(world.asked) == 1


def test_the_cpu_is_not_kept(world: World) -> None:
    assert world.process().disproved("f", CPU) is None
    assert world.process().recalled("f", CPU) is None
    assert not proofs.path().exists()


BROKEN = {
    "empty": "",
    "cut": '{"format": 1, "proofs": [',
    "list": "[]",
    "format": '{"format": 2, "proofs": []}',
    "entry": '{"format": 1, "proofs": [{"library": "lib"}]}',
    "types": json.dumps({"format": 1, "proofs": [{**dict.fromkeys(Key._fields, ""), "version": 1, "wrong": None}]}),
    "answer": json.dumps({"format": 1, "proofs": [{**dict.fromkeys(Key._fields, ""), "wrong": 0}]}),
    "proofs": '{"format": 1, "proofs": 3}',
    "bytes": b"\xff\xfe\x00".decode("latin-1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_ignored_once_and_replaced(case: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    proofs.path().parent.mkdir(parents=True)
    proofs.path().write_text(BROKEN[case], encoding="latin-1")
    with caplog.at_level(logging.INFO, "dsv4.fast"):
        assert [world.process().recalled("f", CARD) for _ in range(3)] == [None] * 3
        assert world.process().disproved("f", CARD) is None
        assert world.process().recalled("f", CARD) == Answer(None)
    assert len(caplog.records) == 1
    assert "proofs" in caplog.text


def test_a_folder_that_cannot_be_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "file" / "below"))
    library = world.process()
    with caplog.at_level(logging.INFO, "dsv4.fast"):
        for function in ("f", "g", "f"):
            assert library.disproved(function, CARD) is None
    assert len(world.asked) == 2
    assert sum("proofs are not kept" in record.getMessage() for record in caplog.records) == 1


def test_writing_is_all_or_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.process().disproved("f", CARD) is None
    before = proofs.path().read_text()

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        assert world.process().disproved("g", CARD) is None
    assert proofs.path().read_text() == before
    assert [path.name for path in proofs.path().parent.iterdir()] == ["proofs.json"]


def test_writers_keep_each_others_answers(world: World) -> None:
    here, there = world.process(), world.process()
    assert here.disproved("f", CARD) is None
    assert there.disproved("g", CARD) is None
    assert len(json.loads(proofs.path().read_text())["proofs"]) == 2


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("DSV4_CACHE", "/mine")
    assert proofs.path() == Path("/mine/proofs.json")
    monkeypatch.delenv("DSV4_CACHE")
    assert proofs.path() == Path("/xdg/dsv4/proofs.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert proofs.path() == Path("/home/me/.cache/dsv4/proofs.json")


def test_reports_try_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """backends() and explain() say "not tried yet"; once the function has proved itself, or failed, they say that."""
    library = world.process()
    monkeypatch.setattr(library, "function", lambda symbol: None)
    rows = (
        Implementation("flashmla", any_device, any_arguments, lambda: None, library=library, symbol="f"),
        Implementation("eager", any_device, any_arguments, lambda: None),
    )
    monkeypatch.setattr(dispatch, "TABLES", {"probe.measure": rows})
    (status, _) = backends(CARD)
    assert (status.usable, status.tried) == (True, False)
    assert "not tried yet: f proves itself in `dsv4 doctor`, in warmup, or at its first call" in status.reason
    assert [line.split()[:2] for line in explain("probe.measure", CARD).splitlines()[1:]] == [["flashmla", "untried:"], ["eager", "chosen"]]
    assert world.asked == []
    (status, _) = backends(CARD, prove=True)
    assert (status.usable, status.tried) == (True, True)
    assert explain("probe.measure", CARD).splitlines()[1].split()[:2] == ["flashmla", "chosen"]
    world.wrong = "computes garbage"
    backends(OTHER_CARD, prove=True)
    (status, _) = backends(OTHER_CARD)
    assert not status.usable
    assert "computes garbage" in explain("probe.measure", OTHER_CARD)
    assert len(world.asked) == 2


def product(a: Any, b: Any, d: Tensor, c: None, recipe: tuple[int, int, int] | None) -> None:
    """DeepGEMM's product in fp64: a scale for each row and 128 k of a, for each row (1d1d) or 128 rows of b."""
    (x, x_scales), (w, w_scales) = a, b
    if recipe is None:
        assert d.dtype == torch.bfloat16
        w_scales = w_scales.repeat_interleave(128, 0)
    else:
        assert (recipe, d.dtype) == ((1, 1, 128), torch.float32)
    wide_x, wide_w = (t.double() * s.double().repeat_interleave(128, 1) for t, s in ((x.float(), x_scales), (w.float(), w_scales)))
    d.copy_((wide_x @ wide_w.T).to(d.dtype))


def does_not_compile(*arguments: Any) -> None:
    raise RuntimeError("Assertion error (csrc/jit/compiler.hpp:168): NVCC compilation failed")


def unscaled(a: Any, b: Any, d: Tensor, c: None, recipe: Any) -> None:
    product((a[0], torch.ones_like(a[1])), b, d, c, recipe)


def first_group_alone(a: Any, b: Any, d: Tensor, c: None, recipe: Any) -> None:
    product((a[0], torch.cat([a[1][:, :1], torch.zeros_like(a[1][:, 1:])], 1)), b, d, c, recipe)


def other_block(a: Any, b: Any, d: Tensor, c: None, recipe: Any) -> None:
    product(a, (b[0], b[1].flip(0)), d, c, recipe)


def softmax(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, sink: Tensor, *, use_legacy: bool
) -> tuple[Tensor, None, Tensor]:
    """FlashMLA's sparse attention, row by row, in fp64."""
    assert use_legacy
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    for row, picks in enumerate(indices[:, 0].tolist()):
        keys = kv[[pick for pick in picks if pick >= 0], 0].double()
        logits = torch.cat([scale * q[row].double() @ keys.T, sink.double()[:, None]], 1)
        lse[row] = logits[:, :-1].logsumexp(1)
        out[row] = (logits.softmax(1)[:, :-1] @ keys)[:, :d_v].to(q.dtype)
    return out, None, lse


def without_sink(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, sink: Tensor, **rest: bool) -> tuple[Tensor, None, Tensor]:
    return softmax(q, kv, indices, scale, d_v, sink - 1e9, **rest)


def unmasked(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, sink: Tensor, **rest: bool) -> tuple[Tensor, None, Tensor]:
    return softmax(q, kv, indices.clamp(min=0), scale, d_v, sink, **rest)


def left_as_it_was(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    return torch.full(x.shape, 0xAB, dtype=torch.uint8), torch.full((x.numel() // 32,), 0xAB, dtype=torch.uint8)


FAILED = "failed its known-answer test: "
PROBED: dict[str, tuple[Library, str, str, Callable[..., Any], str]] = {
    "1d2d": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM, product, ""),
    "1d1d": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM_1D1D, product, ""),
    "1d1d that does not compile": (
        deepgemm.LIBRARY,
        "0.1.5.post1",
        deepgemm.GEMM_1D1D,
        does_not_compile,
        FAILED + "raised RuntimeError: Assertion error (csrc/jit/compiler.hpp:168): NVCC compilation failed",
    ),
    "1d2d without scales": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM, unscaled, FAILED),
    "1d1d without scales": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM_1D1D, unscaled, FAILED),
    "1d2d over one group": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM, first_group_alone, FAILED),
    "1d2d with other blocks": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM, other_block, FAILED),
    "1d1d with other rows": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM_1D1D, other_block, FAILED),
    "a product that is never written": (deepgemm.LIBRARY, "0.1.5.post1", deepgemm.GEMM, lambda *arguments: None, FAILED),
    "softmax": (flashmla.LIBRARY, "1.0.0", flashmla.SPARSE_FORWARD, softmax, ""),
    "softmax without sink": (flashmla.LIBRARY, "1.0.0", flashmla.SPARSE_FORWARD, without_sink, FAILED),
    "softmax that reads -1": (flashmla.LIBRARY, "1.0.0", flashmla.SPARSE_FORWARD, unmasked, FAILED),
    "softmax of another series": (flashmla.LIBRARY, "2.0.0", flashmla.SPARSE_FORWARD, softmax, "is not 1.0.x, whose signatures"),
    "an empty quantiser": (flashinfer.LIBRARY, "0.7.4", flashinfer.MXFP8_QUANTIZE, left_as_it_was, FAILED + "128 of 128 bytes of result 0"),
    "a wheel of the wrong torch": (deepgemm.LIBRARY, "0.2.5", deepgemm.GEMM, product, "is built for torch 2.14; this torch, 2.11.0, takes"),
}


@pytest.mark.parametrize("case", PROBED)
def test_probes(case: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As doctor shows it: usable, or not usable and why."""
    library, version, function, fake, words = PROBED[case]
    unfit = deepgemm.unfit
    monkeypatch.setattr(deepgemm, "unfit", lambda version, torch_version: unfit(version, "2.11.0"))
    monkeypatch.setattr(library, "devices", any_device)
    world.install(library, version, **{function.partition(" ")[0]: fake})
    (proof,) = (proof for proof in prove(CPU) if (proof.library, proof.function) == (library.name, function))
    assert proof.state == ("not usable" if words else "usable")
    assert words in proof.reason
    assert proof.version == f"{library.name} {version}"


def test_proofs_of_a_device_that_a_library_does_not_take(world: World) -> None:
    world.install(flashmla.LIBRARY, "1.0.0", flash_mla_sparse_fwd=softmax)
    for proof in (proof for proof in prove(OTHER_CARD) if proof.library == "sgl-flash-mla"):
        assert (proof.state, proof.reason) == ("not usable", "wants a CUDA device of capability 9.0, 10.0, 10.3, this is SM120")


def test_proofs_can_be_looked_up_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla.LIBRARY, "devices", any_device)
    world.install(flashmla.LIBRARY, "1.0.0", flash_mla_sparse_fwd=lambda *arguments, **more: pytest.fail("was called"))
    (proof,) = (proof for proof in prove(CPU, try_them=False) if proof.function == flashmla.SPARSE_FORWARD)
    assert (proof.state, proof.reason) == ("not tried", "")


SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not SM90, reason="wants an SM90 card")
@pytest.mark.parametrize(
    ("library", "function", "usable"),
    [
        (deepgemm.LIBRARY, deepgemm.GEMM, True),
        (flashmla.LIBRARY, flashmla.SPARSE_FORWARD, True),
        (flashinfer.LIBRARY, flashinfer.INTERLEAVE, True),
        (flashinfer.LIBRARY, flashinfer.MXFP8_QUANTIZE, False),
    ],
)
def test_the_real_functions_on_sm90(library: Library, function: str, usable: bool) -> None:
    if (absent := library.missing()) is not None:
        pytest.skip(absent)
    assert (library.disproved(function, torch.device("cuda")) is None) == usable


@pytest.mark.skipif(not SM90, reason="wants an SM90 card")
def test_the_real_1d1d_of_0_1_5_post1_does_not_compile() -> None:
    if deepgemm.LIBRARY.version() != "sgl-deep-gemm 0.1.5.post1" or deepgemm.LIBRARY.missing():
        pytest.skip("wants sgl-deep-gemm 0.1.5.post1")
    assert "raised" in str(deepgemm.LIBRARY.disproved(deepgemm.GEMM_1D1D, torch.device("cuda")))
