"""The one way to compile a body here: exact rounding, sizes that never specialise, and an error instead of a silent eager run.

A body is a plain function of tensors whose first dimensions may vary, and of keyword-only options that are fixed for a graph. Every
choice of dtypes, device, other sizes and options gets a code object, so a cache, of its own: torch.compile would otherwise keep all of them
under one, reach its recompile limit and run eagerly without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dsv4.types import BackendUnavailable


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

    Tensors must not be empty: answer those before.
    """
    graph = _graph(body, tuple((t.dtype, t.device, t.dim(), t.shape[1:]) for t in tensors), tuple(sorted(options.items())))
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_autograd_keys()):
        return graph(*(_unbacked(tensor) for tensor in tensors))


def run_eagerly(body: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Run the same body uncompiled, on the same terms: for machines without a C++ compiler, and for debugging."""
    with torch.no_grad():
        return body(*(tensor.detach().contiguous() for tensor in tensors), **options)


@cache
def _graph(body: Callable[..., Any], kinds: tuple[object, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    if not isinstance(body, FunctionType):
        raise BackendUnavailable("inductor", f"{body!r} is not a plain function and cannot be compiled")
    own = FunctionType(body.__code__.replace(), body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    own.__kwdefaults__ = {**(body.__kwdefaults__ or {}), **dict(options)}
    # fullgraph makes reaching the recompile limit an error.
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, options=exact_options())
    return compiled


def _unbacked(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous()
    if plain.dim():
        plain = plain.view(plain.shape)  # a view of its own: the mark must not stay on the caller's tensor
        torch._dynamo.decorators.mark_unbacked(plain, 0)
    return plain
