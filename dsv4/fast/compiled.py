"""The one way to compile a body here: exact rounding, sizes that never specialise, and an error instead of a silent eager run.

A body is a plain function of tensors whose first dimensions may vary, and of keyword-only options that are fixed for a graph. Every
choice of dtypes, device, other sizes and options gets a code object, so a cache, of its own: torch.compile would otherwise keep all of them
under one, reach its recompile limit and run eagerly without a word.

After the first call a graph goes straight to what inductor made. Dynamo's guards and AOTAutograd's wrapper take longer than small
kernels do, and guard nothing here: the arguments' kinds chose the graph, first dimensions are free, inputs are detached and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import RLock, get_ident
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dsv4.types import BackendUnavailable

Inner = Callable[[list[Any]], Sequence[Tensor]]
OFFSET = -1
_lock = RLock()


@cache
def _autograd_keys() -> torch._C.DispatchKeySet:
    """What a graph is guarded on besides dtypes and shapes, and what differs between a plain call, one in inference mode, and one from a
    compiled graph. With these excluded all three are one.
    """
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
    for autograd in (key.AutogradCPU, key.AutogradCUDA, key.AutogradOther):
        keys = keys.add(autograd)
    return keys


@cache
def exact_options() -> dict[str, Any]:
    """Inductor options that keep every rounding the body states; their names differ between torch versions."""
    import torch._inductor.config

    wanted = {
        "emulate_precision_casts": True,
        "eager_numerics.division_rounding": True,
        "emulate_division_rounding": True,
        "eager_numerics.disable_ftz": True,
    }
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


def run_compiled(body: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Run the compiled form of `body`. First dimensions of the tensors may vary between calls; a 0-d tensor carries a number that may.

    Tensors must not be empty: answer those before. A body does not write to them: it may get copies.
    """
    graph = _graph(body, tuple((t.dtype, t.device, t.dim(), t.shape[1:]) for t in tensors), tuple(sorted(options.items())))
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_autograd_keys()):
        return graph([tensor.detach().contiguous() for tensor in tensors])


def run_eagerly(body: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Run the same body uncompiled, on the same terms: for machines without a C++ compiler, and for debugging."""
    with torch.no_grad():
        return body(*(tensor.detach().contiguous() for tensor in tensors), **options)


@cache
def _graph(body: Callable[..., Any], kinds: tuple[object, ...], options: tuple[tuple[str, Any], ...]) -> Graph:
    if not isinstance(body, FunctionType):
        raise BackendUnavailable("inductor", f"{body!r} is not a plain function and cannot be compiled")
    named = body.__code__.co_varnames[body.__code__.co_argcount :][: body.__code__.co_kwonlyargcount]
    if unknown := [name for name, _ in options if name not in named]:  # a body's **kwargs would not get them
        raise TypeError(f"{body.__name__} has no keyword-only options {', '.join(unknown)}")
    own = FunctionType(body.__code__.replace(), body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    own.__kwdefaults__ = {**(body.__kwdefaults__ or {}), **dict(options)}
    return Graph(own)


class Graph:
    """A compiled body. Called under no_grad and without the autograd keys.

    The first call goes the whole way, then tries whether the short way gives the same bytes. A graph that writes to its inputs, or whose
    inputs and results are not plainly those of the body, keeps the whole way.
    """

    def __init__(self, body: FunctionType) -> None:
        # fullgraph makes reaching the recompile limit an error.
        self._whole = torch.compile(body, fullgraph=True, dynamic=False, backend=self._compile)
        self._inner: Inner | None = None
        self._sources: list[Any] = []  # of the inputs of the inner graph, as Dynamo names them
        self._places: list[tuple[int, int | None]] = []  # and where they are: which tensor, which dimension of it, or OFFSET
        self._single = self._settled = False

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The body's results."""
        if self._inner is not None:
            results = self._inner(self._arguments(tensors))
            return results[0] if self._single else tuple(results)
        marked = [_unbacked(_plain(tensor)) for tensor in tensors]
        if self._settled:
            return self._whole(*marked)
        versions = [tensor._version for tensor in marked]
        with _inner_calls() as calls:
            result = self._whole(*marked)
        self._settled = len(calls) == 1  # Dynamo may be told to stand aside for a while
        if self._settled and [tensor._version for tensor in marked] == versions:
            self._shorten(marked, result, *calls[0])
        return result

    def _compile(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self._sources = [node.meta["grapharg"].source for node in module.graph.nodes if node.op == "placeholder"]
        compiled: Any = compile_fx(module, examples, config_patches=exact_options())
        return compiled  # type: ignore[no-any-return]

    def _shorten(self, tensors: Sequence[Tensor], result: Any, inner: Inner, inputs: Sequence[Any]) -> None:
        """Go the short way from now on, if its inputs can be told and it gives the same bytes."""
        if len(inputs) != len(self._sources):
            return
        known = {source: _index(tensors, given) for source, given in zip(self._sources, inputs, strict=True) if isinstance(given, Tensor)}
        self._places = [(known[s], None) if s in known else _property(s, known) for s in self._sources]
        self._single = isinstance(result, Tensor)
        expected: list[Any] = [result] if self._single else list(result)
        plain = self._single or type(result) is tuple  # another kind of tuple would not come back
        if not plain or any(i < 0 for i, _ in self._places) or not all(isinstance(part, Tensor) for part in expected):
            return
        again = list(inner(self._arguments(tensors)))
        if len(again) == len(expected) and all(map(_same, again, expected)):
            self._inner = inner

    def _arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [
            tensors[i] if dim is None else tensors[i].storage_offset() if dim == OFFSET else tensors[i].shape[dim]
            for i, dim in self._places
        ]


@contextmanager
def _inner_calls() -> Iterator[list[tuple[Inner, list[Any]]]]:
    """Notes the graphs of inductor that this thread calls, with their inputs."""
    from torch._inductor.output_code import CompiledFxGraph

    calls: list[tuple[Inner, list[Any]]] = []
    thread = get_ident()
    with _lock:  # another thread's note is taken away before this one is put there
        plain = CompiledFxGraph.__call__

        def noted(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
            if get_ident() == thread:
                calls.append((graph, list(inputs)))
            return plain(graph, inputs)

        CompiledFxGraph.__call__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield calls
        finally:
            CompiledFxGraph.__call__ = plain  # type: ignore[method-assign]


def _property(source: Any, known: Mapping[Any, int]) -> tuple[int, int | None]:
    """The tensor, and its dimension or OFFSET, that a number of Dynamo's is of; tensor -1 where it is neither a size nor an offset."""
    kind = getattr(getattr(source, "prop", None), "name", "")
    tensor = known.get(getattr(source, "base", None), -1)
    return (tensor, source.idx) if kind == "SIZE" else (tensor, OFFSET) if kind == "STORAGE_OFFSET" else (-1, None)


def _index(tensors: Sequence[Tensor], tensor: Tensor) -> int:
    return next((i for i, other in enumerate(tensors) if other is tensor), -1)


def _same(one: object, other: Tensor) -> bool:
    """Equal bytes, dtype, shape and strides."""
    if not isinstance(one, Tensor) or (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return one is not other and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _plain(tensor: Tensor) -> Tensor:
    """No inference tensor, whose versions nobody counts, and which could not be seen again outside of inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _unbacked(tensor: Tensor) -> Tensor:
    """The tensor with its first dimension marked, and with the strides that every other tensor of its kind has."""
    if not tensor.dim():
        return tensor
    plain = tensor.view(tensor.shape)  # a view of its own: the mark must not stay on the caller's tensor
    if plain.shape[0] == 1 and plain.stride(0) != plain.numel():  # of one row the stride may be anything
        plain = plain.clone(memory_format=torch.contiguous_format)
    torch._dynamo.decorators.mark_unbacked(plain, 0)
    return plain
