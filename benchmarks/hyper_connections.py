"""Hyper-connections: the boundary between two sublayers beside a copy of the bytes that it must move, its single steps, and what DeepGEMM
and FlashInfer have of them.

FlashInfer's `mhc_post` and `mhc_pre_big_fuse` are timed as they are: the first adds in fp32 and in another order than `expand` promises,
the second returns no `pre`, so neither is a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw, activations, library_call
from dsv4.fast import hyper_connections
from dsv4.fast.adapters import deepgemm, flashinfer

STREAMS = 4
GROUP = 32  # of MXFP8
EPS = 1e-6
NORM_EPS = {True: 1e-20, False: 1e-6}  # of V4.1, of V4


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """A sublayer of each preset as its model wires it, in both outputs, and the steps one by one."""
    for preset, config in PRESETS.items():
        label = f"{preset}, {tokens} tokens, {STREAMS} x {config.hidden_size}"
        yield from _all(label, tokens, config.hidden_size, device, carried=(config.is_v41,))


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens of a hidden size, wired both ways."""
    yield from _all(f"{rows} tokens, {STREAMS} x {columns}", rows, columns, device, carried=(False, True))


def _all(label: str, tokens: int, hidden: int, device: torch.device, *, carried: tuple[bool, ...]) -> Iterator[Case]:
    mixes = STREAMS * (2 + STREAMS)
    streams = activations(tokens * STREAMS, hidden, device).view(tokens, STREAMS, hidden)
    y, weight = activations(tokens, hidden, device), activations(1, hidden, device)[0]
    fn = torch.randn(mixes, STREAMS * hidden, device=device) * (STREAMS * hidden) ** -0.5
    scale, base = torch.tensor([0.6, 1.1, 1.7], device=device), torch.randn(mixes, device=device)
    found = hyper_connections.mix_statistics(streams, fn, eps=EPS)
    mix = hyper_connections.split_mix(found, scale, base)
    for is_v41 in carried:
        outputs: list[dict[str, Any]] = [{}]
        if hidden % GROUP == 0:
            outputs.append({"output": "mxfp8", "scale_layout": "128x4" if is_v41 else "packed"})
        for output in outputs:
            options = {"norm_eps": NORM_EPS[is_v41], "rms_eps": NORM_EPS[is_v41], "carried_pre": mix.pre if is_v41 else None, **output}
            words = f"{label}, {'carried pre' if is_v41 else 'own pre'}, {output.get('output', 'bf16')}"
            args = (y, streams, mix.post, mix.comb, fn, scale, base, weight)
            yield Case("hyper_connections.boundary", words, args, options)
    yield Case("hyper_connections.expand", label, (y, streams, mix.post, mix.comb), raw=_post(streams, mix.post, mix.comb))
    for precision in ("exact", "tf32", "tf32_compensated"):
        raw = {**_prenorm(fn, device), **_pre(streams, fn, scale, base)} if precision == "tf32" else {}
        options = {"eps": EPS, "precision": precision}
        yield Case("hyper_connections.mix_statistics", f"{label}, {precision}", (streams, fn), options, raw)
    yield Case("hyper_connections.split_mix", label, (found, scale, base))
    yield Case("hyper_connections.collapse", label, (streams, mix.pre))
    yield Case("hyper_connections.head_collapse", label, (streams, fn[:STREAMS], scale[:1], base[:STREAMS]), {"norm_eps": EPS})


def _post(streams: Tensor, post: Tensor, comb: Tensor) -> Raw:
    """Four streams in fp32."""
    return library_call(
        flashinfer.LIBRARY, flashinfer.MHC_POST, streams.device, lambda _, given: flashinfer.mhc_post(given, streams, post, comb)
    )


def _prenorm(fn: Tensor, device: torch.device) -> Raw:
    """The products and squares alone, in splits that nobody has added yet."""
    return library_call(deepgemm.LIBRARY, deepgemm.PRENORM, device, lambda _, given: deepgemm.prenorm_gemm(given.flatten(1), fn))


def _pre(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Raw:
    """What follows the statistics, with zeros for these: its time does not depend on them."""
    splits, tokens = deepgemm.PRENORM_SPLITS, len(streams)
    parts = torch.zeros(splits, tokens, len(fn), device=streams.device)
    squares = torch.ones(splits, tokens, device=streams.device)
    return library_call(
        flashinfer.LIBRARY,
        flashinfer.MHC_PRE,
        streams.device,
        lambda _, given: flashinfer.mhc_pre(parts, squares, given, scale, base, EPS, EPS),
    )
