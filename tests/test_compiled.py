"""Compiled bodies: the short way past Dynamo is taken where it gives the same bytes, and nowhere else."""

import threading
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.fast import compiled, dispatch, norms, quantization, routing
from dsv4.fast.compiled import Graph, run_compiled, run_eagerly


def two(x: Tensor, y: Tensor, number: Tensor, *, shift: int) -> tuple[Tensor, Tensor]:
    torch._check(x.shape[0] == y.shape[0])
    return x + y + shift, x.sum(1) * number * y.shape[0]


def swapped(x: Tensor, *, of: int) -> Tensor:
    """Two sizes and one tensor go into the graph."""
    return x[: x.shape[0] - 1].flip(0) + of


def more(x: Tensor) -> Tensor:
    return x + 1


def written(x: Tensor) -> Tensor:
    return x.add_(1) * 2


def own(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    compiled._graph.cache_clear()


def graph_of(body, *tensors: Tensor, **options) -> Graph:
    kinds = tuple((t.dtype, t.device, t.dim(), t.shape[1:]) for t in tensors)
    return compiled._graph(body, kinds, tuple(sorted(options.items())))


def test_the_short_way_is_taken_and_sizes_vary() -> None:
    number = torch.tensor(3.0)
    for rows in (5, 1, 2, 128, 5):
        x, y = torch.randint(-9, 10, (2, rows, 7)).float().unbind()
        for one, other in zip(run_compiled(two, x, y, number, shift=2), run_eagerly(two, x, y, number, shift=2), strict=True):
            assert torch.equal(one, other)
    assert graph_of(two, x, y, number, shift=2)._inner is not None
    for rows in (4, 2, 9):
        x = torch.randn(rows, 3)
        assert torch.equal(run_compiled(swapped, x, of=1), swapped(x, of=1))
    assert graph_of(swapped, x, of=1)._inner is not None


def test_strides_offsets_grad_and_inference_tensors_go_the_short_way() -> None:
    wide, number = torch.randn(9, 20), torch.tensor(0.5)
    y = torch.randn(9, 7)
    run_compiled(two, wide[:, :7], y, number, shift=0)
    with torch.inference_mode():
        inside = torch.randn(9, 7)
    cases = (
        wide[:, 3:10],
        wide[:, ::2][:, :7],
        wide[:, :7].clone().requires_grad_(),
        inside,
        torch.randn(7, 9).t(),
        wide[:1, :7].expand(9, 7),
    )
    for x in cases:
        assert torch.equal(run_compiled(two, x, y, number, shift=0)[0], run_eagerly(two, x, y, number, shift=0)[0])
    assert graph_of(two, y, y, number, shift=0)._inner is not None


def test_the_first_call_may_be_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(run_compiled(more, x), x + 1)
        heads = torch.ones(2, 8, dtype=torch.bfloat16)
        inside = norms.hadamard(heads, impl="inductor")
    assert torch.equal(run_compiled(more, torch.zeros(4, 3)), torch.ones(4, 3))
    assert graph_of(more, x)._inner is not None
    assert torch.equal(norms.hadamard(torch.ones(2, 8, dtype=torch.bfloat16), impl="inductor"), inside)


@pytest.mark.parametrize("first", [torch.zeros(1, 5)[:, 0], torch.zeros(5)[2:3], torch.zeros(1, 3)[:, :2].t()[0]])
def test_one_row_of_any_stride_comes_first(first: Tensor) -> None:
    for x in (first, torch.arange(2.0), torch.zeros(1, 7)[:, 3], torch.arange(9.0)):
        assert torch.equal(run_compiled(more, x), x + 1)
    assert graph_of(more, first)._inner is not None


def test_a_body_that_writes_to_its_inputs_keeps_the_whole_way() -> None:
    for rows in (3, 5, 3):
        x = torch.zeros(rows, 2)
        assert torch.equal(run_compiled(written, x), torch.full((rows, 2), 2.0))
        assert torch.equal(x, torch.ones(rows, 2))
    assert graph_of(written, x)._inner is None


class Named(NamedTuple):
    x: Tensor
    y: Tensor


def named(x: Tensor) -> Named:
    return Named(x + 1, x + 2)


def test_a_named_result_keeps_its_names() -> None:
    for rows in (3, 4):
        assert run_compiled(named, torch.zeros(rows)).y.sum() == 2 * rows


def test_a_first_call_that_dynamo_stands_aside_for_settles_nothing() -> None:
    x = torch.arange(4.0)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(run_compiled(more, x), x + 1)
    assert torch.equal(run_compiled(more, x), x + 1)
    assert graph_of(more, x)._inner is not None


def test_an_option_that_a_body_does_not_name_is_refused() -> None:
    def loose(x: Tensor, **options: int) -> Tensor:
        return x + options.get("of", 0)

    with pytest.raises(TypeError, match="loose has no keyword-only options of"):
        run_compiled(loose, torch.zeros(2), of=1)


def test_a_body_that_returns_its_input() -> None:
    for rows in (3, 4):
        x = torch.randn(rows, 2)
        same, more = run_compiled(own, x)
        assert torch.equal(same, x)
        assert torch.equal(more, x + 1)


def test_a_short_way_with_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the inner graph's arguments not those that are taken for them, results would differ."""
    monkeypatch.setattr(Graph, "_arguments", lambda self, tensors: [t + 1 if isinstance(t, Tensor) else t for t in plain(self, tensors)])
    x = torch.randn(4, 3)
    assert torch.equal(run_compiled(swapped, x, of=1), swapped(x, of=1))
    assert graph_of(swapped, x, of=1)._inner is None


plain = Graph._arguments


def test_serving_functions_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a change of torch that closes the short way is seen."""
    used: list[Graph] = []
    find = compiled._graph
    monkeypatch.setattr(compiled, "_graph", lambda *kinds: used.append(find(*kinds)) or used[-1])
    x = torch.randn(3, 256).bfloat16()
    with dispatch.use("inductor"):
        norms.rms_norm(x, torch.ones(256).bfloat16(), eps=1e-6)
        quantization.quantize_fp8(x, 128)
        routing.route(torch.randn(3, 16), 2, scale=1.0, bias=torch.zeros(16))
    assert len(used) == 3
    assert all(graph._inner is not None for graph in used)


def test_threads_that_compile_at_once_leave_nothing_behind() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    plain, waits = CompiledFxGraph.__call__, threading.Event()

    def other() -> None:
        waiting = compiled._inner_calls()
        waits.set()
        with waiting:
            pass

    thread = threading.Thread(target=other)
    with compiled._inner_calls():
        thread.start()
        waits.wait()
        thread.join(0.3)  # until it waits for this block to end
    thread.join()
    assert CompiledFxGraph.__call__ is plain
