"""The operators of dsv4.fast: schemas and fakes. Imports torch alone.

An operator is the outermost call of a public function, so that torch.compile and CUDA graphs see one node and the choice of an
implementation happens when it runs. Operators trade in uint8, int32, fp32 and bf16; public functions view the bytes as float8 types.
`impl` is the last argument of each and names a backend, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("dsv4", "DEF")
_names: dict[str, tuple[str, ...]] = {}


def define(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Define dsv4::name with the arguments and results of `schema`; `fake` gives shapes, dtypes and strides of the results."""
    head, arrow, results = schema.partition("->")
    arguments = head.strip().removeprefix("(").removesuffix(")")
    _library.define(f"{name}({arguments}, str? impl=None) {arrow} {results}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_library)
    _names[name] = tuple(argument.name for argument in getattr(torch.ops.dsv4, name).default._schema.arguments)


def implement(name: str, run: Callable[..., Any]) -> None:
    """Give a defined operator its implementation on every device."""
    _library.impl(name, run, "CompositeExplicitAutograd")


def argument_names(name: str) -> tuple[str, ...]:
    """Names of an operator's arguments, `impl` last."""
    return _names[name]


def names() -> tuple[str, ...]:
    """Every operator there is."""
    return tuple(sorted(_names))
