"""Number formats, amax floors, scale layouts and KV layouts as frozen data: nothing here computes on tensors and nothing imports torch.

Sources: spec A 0.3, 0.4, 3.4, 8; spec M 9.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, Literal


def fp32(value: float) -> float:
    """The fp32 nearest to a Python float, as a Python float; infinite past the largest."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@dataclass(frozen=True)
class NumberFormat:
    """A small floating-point format. Bits from the top: sign (if any), exponent, mantissa."""

    name: str
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    nan_codes: tuple[int, ...]
    infinities: bool

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return 1 << (int(self.signed) + self.exponent_bits + self.mantissa_bits)


E4M3: Final = NumberFormat("e4m3", True, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, (0x7F, 0xFF), False)
E5M2: Final = NumberFormat("e5m2", True, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), True)
E8M0: Final = NumberFormat("e8m0", False, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, (0xFF,), False)
E2M1: Final = NumberFormat("e2m1", True, 2, 1, 1, 6.0, 1.0, 0.5, (), False)

E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

E8M0_NAN: Final = 0xFF
E4M3_NAN: Final = 0x7F  # the code that every NaN encodes as, whatever its sign


@dataclass(frozen=True)
class AmaxFloor:
    """What keeps the scale of an all-zero or tiny group away from zero.

    `value` is an fp32 number. It bounds the group's largest magnitude (`bounds="amax"`) or the scale before it is rounded up
    (`bounds="scale"`). `least_byte_fp8` and `least_byte_fp4` give, for FP8 and for FP4 codes, the smallest E8M0 byte that can result; None
    where the floor belongs to the other width.
    """

    name: str
    value: float
    bounds: Literal["amax", "scale"]
    least_byte_fp8: int | None
    least_byte_fp4: int | None
    source: str
    zero_byte_zeroes_codes: bool = False


AMAX_FLOORS: Final[dict[str, AmaxFloor]] = {
    floor.name: floor
    for floor in (
        AmaxFloor("official", fp32(1e-4), "amax", 105, 112, "act_quant of V4 and V4.1; DeepGEMM's host casts, also its FP4 one"),
        AmaxFloor("sglang", fp32(1e-10), "amax", 85, None, "SGLang's per-token-group quantiser and MegaMoE pre-dispatch"),
        AmaxFloor("sglang_packer", fp32(1e-8), "amax", 92, None, "SGLang's test packer"),
        AmaxFloor("flashmla", fp32(1e-4), "scale", 114, 114, "FlashMLA's cache packer; SGLang's V4.1 store and FP4 index"),
        AmaxFloor("none", 0.0, "amax", 0, 0, "no floor: a zero group gets byte 0, tiny values keep codes"),
        AmaxFloor("flashinfer", 0.0, "amax", 0, None, "FlashInfer's mxfp8_quantize: no floor, and byte 0 zeroes the codes", True),
        AmaxFloor("official_fp4", 6 * 2.0**-126, "amax", None, 1, "fp4_act_quant of V4 and V4.1; tile_kernels"),
    )
}
FP4_E4M3_AMAX_FLOOR: Final = 6 * 2.0**-9  # the group of 16 with an E4M3 scale: keeps the scale at its smallest code, 2^-9


@dataclass(frozen=True)
class LayoutOfScales:
    """A scale layout, for `rows` rows of `groups` scales.

    `shape`, `strides` (in elements) and `place` are Python expressions of `rows`, `groups` and `align`. `place` is the index of the
    element that holds the scale of row `r` and group `g`; of an int32 element that scale is byte g % 4, the low one first.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: str
    strides: str
    place: str
    pads: str
    source: str


SCALE_LAYOUTS: Final[dict[str, LayoutOfScales]] = {
    layout.name: layout
    for layout in (
        LayoutOfScales("rows", ("float8_e8m0fnu", "float32"), "(rows, groups)", "(groups, 1)", "(r, g)", "none", "spec M 9.6"),
        LayoutOfScales(
            "packed",
            ("int32",),
            "(rows, align(groups, 4) // 4)",
            "(1, align(rows, 4))",
            "(r, g // 4)",
            "missing groups and words of rows past the last are zero",
            "spec A 8.1",
        ),
        LayoutOfScales(
            "128x4",
            ("int32",),
            "(align(rows, 128) // 128, align(groups, 4) // 4, 32, 4)",
            "(align(groups, 4) // 4 * 128, 128, 4, 1)",
            "(r // 128, g // 4, r % 32, r % 128 // 32)",
            "missing groups and rows are zero",
            "spec A 8.3, 8.4",
        ),
        LayoutOfScales(
            "mn_major",
            ("float32",),
            "(rows, groups)",
            "(1, align(rows, 4))",
            "(r, g)",
            "words of rows past the last are zero",
            "spec A 8.2",
        ),
    )
}

TMA_BYTES: Final = 16  # a column of packed or MN-major scales starts at a multiple of this
TILE_ROWS: Final = 128  # rows of one 128x4 tile
WORD_GROUPS: Final = 4  # groups in one packed word


def align(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class KVLayout:
    """How a page of the KV cache holds its tokens.

    A token of `dims` numbers has `data_bytes` of data and `scale_bytes` of scales. The first `quantised` dims are codes in groups of
    `group`, the others bf16, little-endian. In a page of P slots the data of slot i begins at i * data_bytes and its scales at
    P * data_bytes + i * scale_bytes; `inline` layouts put the scales of a slot right behind its data instead. Bytes of scales past the
    last group are padding. A page's stride is a multiple of `stride_multiple`.
    """

    name: str
    dims: int
    quantised: int
    group: int
    numbers: Literal["e4m3", "e2m1"]
    scale: Literal["ue8m0", "e4m3", "unit"]
    data_bytes: int
    scale_bytes: int
    inline: bool
    stride_multiple: int
    source: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, scales and padding included."""
        return self.data_bytes + self.scale_bytes

    @property
    def groups(self) -> int:
        """Scales of one token; 0 where the scale is 1."""
        return 0 if self.scale == "unit" else self.quantised // self.group

    def page_bytes(self, page_size: int) -> int:
        """The stride of a page of `page_size` slots."""
        return align(page_size * self.token_bytes, self.stride_multiple)

    def data_offset(self, slot: int, page_size: int) -> int:
        """Where in its page the data of a slot begins."""
        return slot * (self.token_bytes if self.inline else self.data_bytes)

    def scale_offset(self, slot: int, page_size: int) -> int:
        """Where in its page the scales of a slot begin."""
        if self.inline:
            return slot * self.token_bytes + self.data_bytes
        return page_size * self.data_bytes + slot * self.scale_bytes


KV_LAYOUTS: Final[dict[str, KVLayout]] = {
    layout.name: layout
    for layout in (
        KVLayout("v4", 512, 448, 64, "e4m3", "ue8m0", 576, 8, False, 576, "SGLang V4, FlashMLA MODEL1"),
        KVLayout("v41", 512, 512, 32, "e4m3", "ue8m0", 512, 16, False, 512, "SGLang V41, FlashInfer fp8_dsv41"),
        KVLayout("v41_fp4", 512, 512, 16, "e2m1", "e4m3", 256, 32, False, 256, "SGLang V41_FP4, FlashInfer fp8_dsv41_fp4_ca"),
        KVLayout("v41_inline", 512, 512, 32, "e4m3", "ue8m0", 512, 16, True, 528, "SGLang V41_NEW, FlashInfer fp8_dsv41_inline"),
        KVLayout("v41_fp4_inline", 512, 512, 16, "e2m1", "e4m3", 256, 32, True, 288, "SGLang V41_FP4_NEW"),
        KVLayout("uniform_fp8", 512, 512, 512, "e4m3", "unit", 512, 0, False, 512, "SGLang UNIFORM_FP8, TRT-LLM-gen"),
    )
}

KV_LAYOUT_PAIRS: Final = (  # layouts that one softmax may read together, besides a layout with itself: main, extra
    ("v41", "v41_fp4"),
    ("v41_inline", "v41_fp4_inline"),
)


@dataclass(frozen=True)
class IndexLayout:
    """How a page of index keys holds its entries, planar: the codes of all slots, then four bytes of scale a slot."""

    name: str
    bits: int  # of a code
    group: int  # numbers a scale is of; 0: the whole key
    scale: Literal["fp32", "ue8m0"]
    source: str

    def data_bytes(self, dim: int) -> int:
        """Bytes of the codes of a key."""
        return dim * self.bits // 8

    def token_bytes(self, dim: int) -> int:
        """Bytes of a key, its scale included."""
        return self.data_bytes(dim) + INDEX_SCALE_BYTES


INDEX_SCALE_BYTES: Final = 4
INDEX_LAYOUTS: Final[dict[str, IndexLayout]] = {
    layout.name: layout
    for layout in (
        IndexLayout("fp8", 8, 0, "fp32", "SGLang and DeepGEMM, 132 bytes a slot of 128 numbers; spec A 5.6"),
        IndexLayout("fp4", 4, 32, "ue8m0", "SGLang and DeepGEMM, 68 bytes a slot of 128 numbers; spec A 5.6"),
    )
}
