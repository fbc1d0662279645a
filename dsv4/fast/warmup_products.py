"""What a model calls of `linear` and `output_projection`, for `warmup`: its products with quantised weights, and what makes their inputs.

Our kernels have a tile for each range of tokens; on CUDA every product runs once at a number of tokens of each. Elsewhere a product depends
on nothing but its inputs' width, so that weights have few rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.configs import ModelConfig
from dsv4.fast import linear, output_projection
from dsv4.fast.dispatch import describe
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import Mxfp8Pair, Quantized

Call = tuple[str, Callable[[], Any]]

MOST_TOKENS = 4096  # a product of more takes the tiles of these
FEW_TOKENS = 64  # as the largest of our tiles for few
SM90 = (9, 0)  # with kernels of its own for blocks of 32
FEW_ROWS = 128  # of a weight, where no tile depends on them
PAIR_LAYOUTS = ("packed", "128x4")


def weights(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the quantised weights that are not experts', and of the shared experts' (spec A 3.1, 5.2, 7.1; M 5)."""
    queries, hidden, inner = config.q_lora_rank, config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
    heads, index = config.num_attention_heads * config.head_dim, config.index_n_heads * config.index_head_dim
    of_hidden = (queries, config.head_dim, queries + config.head_dim, inner, 2 * inner)
    others = ((heads, queries), (index, queries), (hidden, inner), (hidden, config.o_groups * config.o_lora_rank))
    return sorted({*((n, hidden) for n in of_hidden), *others})


def tokens_of_tiles(n: int, k: int, batch: int, block: int, device: torch.device) -> tuple[int, ...]:
    """Numbers of tokens that together have every tile that our kernels take for a product; `block` is 0 for bf16."""
    tiles = import_module("dsv4.fast.kernels.linear_tiles")
    hopper = import_module("dsv4.fast.kernels.linear_hopper") if block == 32 and describe(device).capability == SM90 else None
    found: dict[Any, int] = {}
    for tokens in (*range(1, 257), *range(320, MOST_TOKENS + 1, 64)):
        for words in (True, False):
            found.setdefault(tiles.plan(tokens, n, k, batch, block, device, words=words), tokens)
        if hopper is not None and tokens > FEW_TOKENS:
            found.setdefault(hopper.choose(tokens, n, tiles.device_of(device)[0]), tokens)
    return tuple(sorted(set(found.values())))


def linear_calls(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Products in FP8, of pairs too on V4.1, and their inputs from a norm or a SwiGLU in the layouts that products take."""
    block, layouts = config.activation_group, ("rows", "packed", "mn_major", *(("128x4",) if config.is_v41 else ()))
    for width in sorted({config.hidden_size, config.q_lora_rank}):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        for layout in layouts:
            normed = partial(linear.norm_quantize, x, x[0], eps=config.rms_norm_eps, group=block, scale_layout=layout)
            yield f"norm_quantize [{width}] {block} {layout}", normed
    inner = config.moe_intermediate_size * config.n_shared_experts
    gate, up = torch.zeros(tokens, 2 * inner, dtype=torch.bfloat16, device=device).split(inner, 1)
    for layout in layouts:
        activated = partial(linear.swiglu_quantize, gate, up, limit=config.swiglu_limit, group=block, scale_layout=layout)
        yield f"swiglu_quantize [{inner}] {block} {layout}", activated
    for n, k in weights(config):
        yield from _products(config, n, k, tokens, device)


def _products(config: ModelConfig, n: int, k: int, tokens: int, device: torch.device) -> Iterator[Call]:
    """One weight's: of bf16, of codes with fp32 scales as DeepGEMM takes them on SM90, and of pairs."""
    block, cuda = config.activation_group, device.type == "cuda"
    rows = n if cuda else min(n, FEW_ROWS)
    weight = torch.zeros(rows, k, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(-(-rows // block), -(-k // block), dtype=torch.uint8, device=device)
    pairs = []
    for layout in PAIR_LAYOUTS if config.is_v41 else ():
        pairs.append(linear.mxfp8_weight(weight, scales, scale_layout=layout))
        yield f"mxfp8_weight [{n}, {k}] {layout}", partial(linear.mxfp8_weight, weight, scales, scale_layout=layout)
    for count in sorted({tokens, *tokens_of_tiles(n, k, 1, block, device)}) if cuda else (tokens,):
        x = torch.zeros(count, k, dtype=torch.bfloat16, device=device)
        fp8 = partial(linear.linear_fp8, weight=weight, weight_scales=scales, block=block)
        yield f"linear_fp8 [{n}, {k}], {count}", partial(fp8, x)
        codes = torch.zeros(count, k, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        yield f"linear_fp8 [{n}, {k}] of codes, {count}", partial(fp8, Quantized(codes, _mn_major(count, k // block, device)))
        for pair in pairs:
            words = _words(count, k, str(pair.layout), device)
            yield f"linear_mxfp8 [{n}, {k}] {pair.layout}, {count}", partial(linear.linear_mxfp8, Mxfp8Pair(codes, words), pair)


def output_calls(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Both forms of wo_a on V4, with its FP8 input; wo_a in bf16 and as a pair on V4.1; and wo_b."""
    groups, rank, width = config.o_groups, config.o_lora_rank, config.num_attention_heads // config.o_groups * config.head_dim
    cuda = device.type == "cuda"
    rows = rank if cuda else min(rank, FEW_ROWS)
    heads = torch.zeros(tokens, config.num_attention_heads, config.head_dim, dtype=torch.bfloat16, device=device)
    table = rope_table(rope_frequencies(config.rope_theta, config.qk_rope_head_dim, device=device), tokens)
    for layout in () if config.is_v41 else ("rows", "packed", "mn_major"):
        rotated = partial(output_projection.rotate_quantize, heads, table, torch.arange(tokens, device=device), groups=groups)
        yield f"rotate_quantize {layout}", partial(rotated, scale_layout=layout)
    numbers = torch.zeros(groups, rows, width, dtype=torch.bfloat16, device=device)
    for count in sorted({tokens, *tokens_of_tiles(rank, width, groups, 0, device)}) if cuda else (tokens,):
        o = torch.zeros(count, groups, width, dtype=torch.bfloat16, device=device)
        yield f"project_groups, {count}", partial(output_projection.project_groups, o, numbers)
        for layout in PAIR_LAYOUTS if config.is_v41 else ():
            yield f"project_groups_pair {layout}, {count}", partial(output_projection.project_groups_pair, o, numbers, scale_layout=layout)
    if not config.is_v41:
        yield from _fp8_groups(groups, rows, width, tokens, device)
    z = torch.zeros(tokens, groups, rank, dtype=torch.bfloat16, device=device)
    block, hidden = config.activation_group, config.hidden_size if cuda else min(config.hidden_size, FEW_ROWS)
    weight = torch.zeros(hidden, groups * rank, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(-(-hidden // block), groups * rank // block, dtype=torch.uint8, device=device)
    yield "project_out", partial(output_projection.project_out, z, weight, scales, block=block)


def _fp8_groups(groups: int, rank: int, width: int, tokens: int, device: torch.device) -> Iterator[Call]:
    """wo_a in FP8: of bf16 with scales of both formats, and of codes."""
    weight = torch.zeros(groups, rank, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(groups, -(-rank // 128), width // 128, dtype=torch.uint8, device=device)
    for count in sorted({tokens, *tokens_of_tiles(rank, width, groups, 128, device)}) if device.type == "cuda" else (tokens,):
        o = torch.zeros(count, groups, width, dtype=torch.bfloat16, device=device)
        for scale in ("ue8m0", "fp32"):
            yield f"project_groups in FP8 {scale}, {count}", partial(output_projection.project_groups, o, weight, scales, scale=scale)
        codes = Quantized(o.to(torch.float8_e4m3fn), _mn_major(count, groups * width // 128, device).unflatten(1, (groups, -1)))
        yield f"project_groups of codes, {count}", partial(output_projection.project_groups, codes, weight, scales)


def _mn_major(rows: int, groups: int, device: torch.device) -> Tensor:
    return torch.zeros(groups, -(-rows // 4) * 4, device=device).t()[:rows]


def _words(rows: int, k: int, scale_layout: str, device: torch.device) -> Tensor:
    columns = -(-k // 128)
    if scale_layout == "128x4":
        return torch.zeros(-(-rows // 128), columns, 32, 4, dtype=torch.int32, device=device)
    return torch.zeros(columns, -(-rows // 4) * 4, dtype=torch.int32, device=device).t()[:rows]
