"""What `dsv4 bench` times: the cases of each component, and what the suite says of implementations that it cannot or must not time."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import linear, output_projection, routing, suite
from benchmarks.case import Case
from benchmarks.harness import duplicate, tensors
from dsv4 import cli
from dsv4.fast import dispatch
from dsv4.parity.compare import as_integers
from dsv4.types import IndexKeys, Mxfp8Pair, PagedRows, Quantized

CPU = torch.device("cpu")
PART_OF_ANOTHER = {"scales.zero_pad_rows_"}  # zero_pad_rows with out=
WITHOUT_TABLE = {"output_projection.project_out"}  # runs on the backends of another
ONE_OF_EACH = {
    "attention": ("window_indices", 1, 0),
    "codecs": ("unpack_fp4", 1, 0),
    "compressor": ("project", 5, 5),
    "eplb": ("map_to_physical", 5, 0),
    "hyper_connections": ("expand", 1, 0),
    "indexer": ("store_index_keys", 2, 0),
    "kv_cache": ("page_slots", 1, 0),
    "linear": ("norm_quantize", 5, 0),
    "norms": ("hadamard", 2, 0),
    "output_projection": ("rotate_quantize", 6, 0),
    "quantization": ("quantize_mxfp4", 1, 0),
    "rotary": ("norm_rope", 2, 0),
    "routing": ("route", 4, 1),
    "scales": ("zero_pad_rows", 2, 0),
}  # a function, its cases at one shape, and the lines of libraries and torch among theirs


@pytest.fixture(autouse=True)
def cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def cases(component: str) -> Iterator[Case]:
    return suite.cases(component, [1, 3], [(128, 384)], CPU)


def eager(case: Case) -> list[suite.Line]:
    return list(suite.lines([case], CPU, backends=("eager",)))


@pytest.mark.parametrize("component", suite.COMPONENTS)
def test_every_function_has_a_case(component: str) -> None:
    wanted = {function for function in {*dispatch.TABLES, *WITHOUT_TABLE} if function.partition(".")[0] == component} - PART_OF_ANOTHER
    found = list(cases(component))
    assert {case.function for case in found if case.label.startswith("128")} == wanted
    assert all(sum(case.label.startswith(f"{preset}, ") for case in found) >= 5 for preset in ("V4-Flash", "V4-Pro", "V4.1-Flash"))
    assert len({(case.function, case.label) for case in found}) == len(found)


@pytest.mark.parametrize("component", ONE_OF_EACH)
def test_a_component_as_json(component: str, tmp_path: Path) -> None:
    function, count, raw = ONE_OF_EACH[component]
    path = tmp_path / "timings.json"
    asked = ["bench", component, "--function", function, "--backend", "eager", "--device", "cpu", "--shape", "8x128", "--json", str(path)]
    assert cli.main(asked) == 0
    found = json.loads(path.read_text())
    timings = found.pop("timings")
    assert found.keys() == {
        "component", "dsv4", "torch", "python", "device", "capability", "cuda", "threads", "triton",
        "sgl-deep-gemm", "flashinfer", "sgl-flash-mla",
    }  # fmt: skip
    assert (found["component"], found["torch"], found["device"][:4]) == (component, torch.__version__, "cpu ")
    assert sum(line["what"].startswith("raw: ") for line in timings) == raw
    assert [line["what"] for line in timings if not line["what"].startswith("raw: ")] == ["limit: a copy", "eager", "reference"] * count
    assert all(line["host_us"] > 0 and line["gb_s"] > 0 and line["of_limit"] > 0 and not line["note"] for line in timings)


def replace_eager(function: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dispatch.TABLES[function]
    monkeypatch.setitem(dispatch.TABLES, function, tuple(replace(row, call=call) if row.backend == "eager" else row for row in rows))


def test_a_wrong_router_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of 128 x 6 is off by an ulp; the plain step has no counters, and is compared without."""
    (right,) = (row.call for row in dispatch.TABLES["routing.route"] if row.backend == "eager")
    calls = []

    def wrong(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, weights = right(*given, **options)
        weights[77, 3] = torch.nextafter(weights[77, 3], torch.tensor(9.0))
        calls.append(1)
        return ids, weights

    replace_eager("routing.route", wrong, monkeypatch)
    case = next(case for case in routing.sweep(128, 384, CPU) if case.label.endswith("plain"))
    _, line, *_ = eager(case)
    assert (line.what, line.host_us, line.of_limit) == ("eager", None, None)
    assert line.note == "not timed: fails parity: weights: bytes differ"
    assert len(calls) == 1


def test_arbitrary_products_are_held_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 sums of products are right though their bits differ from the reference's; sums of all but a sixteenth are not."""
    case = next(case for case in routing.sweep(4, 8, CPU) if case.function == "routing.gate_logits")
    replace_eager("routing.gate_logits", lambda x, weight: x.float() @ weight.float().T, monkeypatch)
    assert eager(case)[1].note == ""
    replace_eager("routing.gate_logits", lambda x, weight: x[:, 256:].float() @ weight[:, 256:].float().T, monkeypatch)
    assert eager(case)[1].note == "not timed: fails parity: result: outside the bound"


def of_products(component: str) -> list[Case]:
    """Cases of products and of pairs from one, of 130 tokens: more than are compared."""
    module = {"linear": linear, "output_projection": output_projection}[component]
    return [case for case in module.sweep(130, 640, CPU) if isinstance(case, linear.Product | output_projection.Groups)]


@pytest.mark.parametrize("component", ["linear", "output_projection"])
def test_some_rows_and_columns_of_a_product_are_compared(component: str) -> None:
    """The part of the result that is compared is the result of that part of the arguments."""
    for case in of_products(component):
        reference = getattr(import_module(f"dsv4.reference.{component}"), case.function.partition(".")[2])
        result, part = case.call(reference, case.args[0]), reference(*case.judged(), **case.options)
        if isinstance(part, Mxfp8Pair):
            part = Quantized(part.codes, linear.in_rows(part.scales, *part.codes.shape, 32))
        compared = case.part(result)
        assert [as_integers(one).tolist() for one in tensors(compared)] == [as_integers(one).tolist() for one in tensors(part)]
        assert 0 < sum(one.numel() for one in tensors(compared)) < sum(one.numel() for one in tensors(result))


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of the next group, and one block of outputs that nobody has written."""
    case = next(case for case in of_products("linear") if case.label.endswith("e8m0"))
    (right,) = (row.call for row in dispatch.TABLES["linear.linear_fp8"] if row.backend == "eager")
    assert eager(case)[1].note == ""
    replace_eager("linear.linear_fp8", lambda x, scales, *rest: right(x, scales.roll(1, 1), *rest), monkeypatch)
    assert eager(case)[1].note == "not timed: fails parity: result: outside the bound"
    replace_eager("linear.linear_fp8", lambda *given: right(*given).index_fill_(1, torch.arange(512, 640), 0.0), monkeypatch)
    assert eager(case)[1].note == "not timed: fails parity: result: outside the bound"


def test_scales_of_producers_are_compared_in_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of many is off."""
    (right,) = (row.call for row in dispatch.TABLES["linear.swiglu_quantize"] if row.backend == "eager")

    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        codes, scales = right(*given)
        if scales.dtype == torch.float32:
            scales[2, 1] *= 2
        else:
            scales.view(-1)[4] += 1  # in 128x4 the first word of row 1
        return codes, scales

    chosen = [case for case in linear.sweep(5, 384, CPU) if case.function == "linear.swiglu_quantize"]
    assert [eager(case)[1].note for case in chosen] == [""] * 5
    replace_eager("linear.swiglu_quantize", wrong, monkeypatch)
    notes = {case.options["scale_layout"]: eager(case)[1].note for case in chosen if case.options["scale_layout"] != "packed"}
    assert notes == dict.fromkeys(("rows", "mn_major", "128x4"), "not timed: fails parity: scales: a choice that the bound does not permit")


def test_operands_rotate_together() -> None:
    """A copy of the first argument has a weight of its own, and a call takes it from there."""
    case = next(case for case in of_products("linear") if case.function == "linear.linear_mxfp8")
    first = duplicate(case.args[0])
    assert [type(part) for part in first] == [Mxfp8Pair, Mxfp8Pair]
    seen = []
    case.call(lambda x, weight: seen.append((x, weight)), first)
    assert seen == [(first[0], first[1])]
    assert not {part.data_ptr() for part in tensors(first)} & {part.data_ptr() for part in tensors(case.args[0])}


def test_a_function_without_a_table_runs_on_another_s_backends() -> None:
    case = next(case for case in output_projection.sweep(3, 96, CPU) if case.table == "linear.linear_fp8")
    assert [(line.function, line.what, line.note) for line in eager(case)] == [
        ("output_projection.project_out", what, "") for what in ("limit: a copy", "eager", "reference")
    ]


def test_counters_start_anew_for_each_implementation() -> None:
    case = next(case for case in routing.sweep(128, 384, CPU) if "serving" in case.label)
    assert eager(case)[1].note == ""
    assert not case.options["counts"].any()
    assert eager(case)[1].note == ""


def test_what_refuses_or_raises_is_said_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Tensor:
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE\nat some place")

    replace_eager("codecs.pack_fp4", fails, monkeypatch)
    case = Case("codecs.pack_fp4", "", (torch.zeros(4, 2, dtype=torch.uint8),), raw={"a": fails, "b": "b is not installed", "c": len})
    notes = {line.what: line.note for line in eager(case)}
    assert notes == {
        "limit: a copy": "",
        "eager": "not timed: raised RuntimeError: CUDA_ERROR_INVALID_VALUE",
        "raw: a": "not timed: RuntimeError: CUDA_ERROR_INVALID_VALUE",
        "raw: b": "not timed: b is not installed",
        "raw: c": "",
        "reference": "",
    }


def test_a_named_limit_takes_the_place_of_the_copy() -> None:
    case = Case("codecs.pack_fp4", "", (torch.zeros(4, 2, dtype=torch.uint8),), limit=("an empty kernel", len))
    limit, line, _ = eager(case)
    assert (limit.what, limit.gb_s, limit.of_limit) == ("limit: an empty kernel", None, 1.0)
    assert line.of_limit == pytest.approx(limit.host_us / line.host_us)


def test_a_first_argument_may_be_several_tensors() -> None:
    """Keys of codes and scales are copied as what they are, pages of another argument too, and count with all their bytes."""
    rows = PagedRows(torch.arange(6, dtype=torch.uint8).view(2, 3), "v4", 3)
    keys = IndexKeys(torch.arange(6, dtype=torch.uint8).view(3, 2), torch.arange(3.0))
    copy = duplicate((keys, rows, None))
    assert [type(part) for part in copy] == [IndexKeys, PagedRows, type(None)]
    assert [part.tolist() for part in tensors(copy)] == [part.tolist() for part in (*keys, rows.pages)]
    assert not {part.data_ptr() for part in tensors(copy)} & {part.data_ptr() for part in (*keys, rows.pages)}
    assert (copy[1].layout, copy[1].page_size) == ("v4", 3)
    own = Case("indexer.load_index_keys", "", (keys, rows), {"more": keys}).fresh()
    assert own.args[0] is keys
    assert own.args[1].pages is not rows.pages
    assert own.options["more"].codes is not keys.codes


def test_copies_keep_padded_strides() -> None:
    padded = torch.arange(16).view(2, 8)[:, :5].T
    copy = duplicate(padded)
    assert (copy.stride(), copy.tolist()) == ((1, 8), padded.tolist())
    assert copy.data_ptr() != padded.data_ptr()
