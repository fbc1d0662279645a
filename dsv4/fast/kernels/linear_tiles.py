"""Tiles of the products in `linear` and `project_groups`, and which of them a product takes.

How an element is summed must not depend on the number of tokens: `parts_of` does not know it, and a tile changes nothing but speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

TURN = 128  # of k, as `linear_products.SPAN`
NUMBERS = 0  # bf16, where others have a block
PROGRAMS = 96  # of ROWS_APART rows each: where a weight has fewer, k is cut into parts
ROWS_APART, LEAST_TURNS = 64, 4  # turns of a part
MEMORY = {(8, 0): 163, (8, 7): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # KiB of shared memory of a program, else 227


@dataclass(frozen=True)
class Tile:
    """What a program multiplies at once, and by how many warps and buffers."""

    tokens: int
    rows: int  # of the weight, of a piece
    pieces: int = 1
    swapped: bool = False
    warps: int = 4
    stages: int = 4
    shares: bool = True  # 32 rows of a pair's weight are taken to have one scale, and a tile where they do not is summed again
    band: int = 8  # tiles of tokens whose programs follow each other, so that they meet in the cache
    span: int = TURN  # of k, in a turn; of bf16 alone
    cost: int = 0  # of a turn, in units of about a cycle of an H200: measured for many tokens where a comment says so, else estimated

    def programs(self, tokens: int, n: int) -> int:
        """How many cover a product."""
        return -(-tokens // self.tokens) * -(-n // (self.rows * self.pieces))

    def stage(self, block: int) -> int:
        """Bytes of shared memory of a turn."""
        return (self.tokens + self.rows * self.pieces) * (2 * self.span if block == NUMBERS else TURN)


# Of up to so many tokens; and of more, by block: the one of the least estimated time. Tiles of fewer than 16 tokens would multiply by other
# instructions, with other bits.
FEW = {16: Tile(16, 64, swapped=True, stages=5), 32: Tile(32, 64, swapped=True, stages=5), 64: Tile(64, 64, stages=5)}
MANY = {
    32: (  # measured
        Tile(128, 64, 2, warps=8, cost=2160),
        Tile(128, 64, cost=880),
        Tile(64, 128, cost=915),
        Tile(64, 64, stages=5, cost=590),
    ),
    128: (Tile(128, 128, warps=8, stages=5, cost=1170), Tile(128, 64, cost=880), Tile(64, 64, stages=5, cost=590)),
}
PART_BYTES = 2400  # a cycle, of parts written and read
MORE = {  # what a search may try beside these
    32: (
        Tile(16, 64, swapped=True, stages=8),
        Tile(16, 128, swapped=True, warps=8, stages=5),
        Tile(16, 128, swapped=True, stages=5),
        Tile(32, 128, swapped=True, warps=8, stages=4),
        Tile(64, 128, warps=8),
        Tile(128, 128, warps=8),
        Tile(128, 128, warps=8, stages=5),
        Tile(128, 64, 3, warps=8),
        Tile(128, 64, 4, warps=8, stages=3),
        Tile(128, 128, 2, warps=8, stages=3),
        Tile(256, 64, 2, warps=8, stages=3),
        Tile(128, 64, 3, warps=8, stages=3, band=16),
        Tile(128, 64, 2, warps=8, band=16),
    ),
    128: (
        Tile(16, 64, swapped=True, stages=8),
        Tile(16, 128, swapped=True, warps=8, stages=5),
        Tile(64, 128),
        Tile(128, 128, warps=8, stages=4),
        Tile(128, 256, warps=8),
        Tile(128, 128, 2, warps=8),
        Tile(256, 128, warps=8),
    ),
}
MANY[NUMBERS] = (  # measured, but for the last two
    Tile(256, 128, warps=8, span=64, cost=4330),
    Tile(128, 128, warps=8, span=64, cost=2340),
    Tile(128, 64, span=64, cost=1760),
    Tile(64, 64, span=64, stages=6, cost=1170),
)
MORE[NUMBERS] = (
    Tile(16, 64, swapped=True, stages=8),
    Tile(16, 64, swapped=True, stages=10, span=64),
    Tile(16, 128, swapped=True),
    Tile(16, 128, swapped=True, warps=8),
    Tile(64, 128, stages=3),
    Tile(64, 64),
    Tile(128, 128, warps=8, stages=6, span=64),
    Tile(128, 128, span=64),
    Tile(128, 256, warps=8, span=64),
    Tile(128, 256, warps=8, stages=3, span=64),
    Tile(128, 256, warps=8, span=64, band=16),
)


class Plan(NamedTuple):
    """How a product runs. `parts` follow from its sizes; `alone`: a program for each."""

    tile: Tile
    parts: int
    alone: bool


def parts_of(n: int, k: int, batch: int) -> int:
    """How many sums of consecutive groups make an element, whatever the number of tokens."""
    programs, turns, parts = batch * -(-n // ROWS_APART), -(-k // TURN), 1
    while programs * parts < PROGRAMS and turns >= 2 * parts * LEAST_TURNS:
        parts *= 2
    return parts


def candidates(tokens: int, block: int) -> tuple[Tile, ...]:
    """Tiles that a search for a product of so many tokens may try, each with and without programs for the parts."""
    known = dict.fromkeys((*FEW.values(), *MANY[block], *MORE[block]))
    return tuple(tile for tile in known if tile.tokens < max(2 * tokens, 17) and (tile.tokens >= 64 or tokens <= 4 * tile.tokens))


def plan(tokens: int, n: int, k: int, batch: int, block: int, device: torch.device, *, words: bool = True) -> Plan:
    """How a product runs. `words`: its scales are words, which take few registers."""
    processors, capability = device_of(device)
    memory = MEMORY.get(capability, 227) * 1024 - 4096
    parts, turns = parts_of(n, k, batch), -(-k // TURN)

    def time(tile: Tile, alone: bool) -> int:
        pieces = parts if alone else 1
        rounds = -(-batch * tile.programs(tokens, n) * pieces // processors)
        return rounds * tile.cost * -(-turns // pieces) + (8 * parts * batch * tokens * n // PART_BYTES if alone else 0)

    few = next((tile for most, tile in FEW.items() if tokens <= most), None)
    fits = [tile for tile in MANY[block] if 2 * tile.stage(block) <= memory and ((parts == 1 and words) or tile.rows * tile.pieces <= 128)]
    choices = [(tile, alone) for tile in fits for alone in ((False, True) if parts > 1 else (False,))]
    tile, alone = (few, parts > 1) if few else min(choices, key=lambda choice: time(*choice))
    return Plan(replace(tile, stages=min(tile.stages, memory // tile.stage(block))), parts, alone)


def device_of(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and capability; of the interpreter those of an H200."""
    return _cuda_device(device.index) if device.type == "cuda" else (132, (9, 0))


@cache
def _cuda_device(index: int) -> tuple[int, tuple[int, int]]:
    return torch.cuda.get_device_properties(index).multi_processor_count, torch.cuda.get_device_capability(index)
