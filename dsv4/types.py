"""What both implementations share and nobody computes with: results, named options, errors.

Options are string enums: a function that takes `scale_layout` accepts `ScaleLayout.PACKED` and `"packed"` alike.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ArgumentError(ValueError):
    """A value that is wrong on the host: which argument, what it got, the limit, the way out."""

    def __init__(self, argument: str, got: object, limit: str, remedy: str = "") -> None:
        self.argument, self.got, self.limit, self.remedy = argument, got, limit, remedy
        super().__init__(f"{argument}: got {got}; {limit}" + (f". {remedy}" if remedy else ""))


class Unsupported(ArgumentError):
    """Arguments that the function allows and the chosen implementation does not take."""


class BackendUnavailable(RuntimeError):
    """A backend that was asked for by name and cannot run here: which, why, and how to get it."""

    def __init__(self, backend: str, reason: str, remedy: str = "") -> None:
        self.backend, self.reason, self.remedy = backend, reason, remedy
        super().__init__(f"backend {backend!r}: {reason}" + (f". {remedy}" if remedy else ""))


class Numerics(StrEnum):
    """How the reference rounds."""

    STATED = "stated"  # every rounding and quantiser of the specification
    UNROUNDED = "unrounded"  # quantisers on, roundings off: the oracle of derived bounds
    UNQUANTISED = "unquantised"  # neither


class ScaleFormat(StrEnum):
    """The number that scales a group."""

    UE8M0 = "ue8m0"  # a power of two, rounded up, stored as its exponent byte
    FP32 = "fp32"  # amax / 448 as it is


class ScaleLayout(StrEnum):
    """Where the scale of (row, group) lies. `dsv4.formats.SCALE_LAYOUTS` has the shapes and strides."""

    ROWS = "rows"  # [rows, groups], row-major
    PACKED = "packed"  # int32 words of four groups, column-major, columns aligned to 16 bytes (DeepGEMM)
    SWIZZLED_128X4 = "128x4"  # int32 [row tiles, words, 32, 4] (FlashInfer, cuBLAS)
    MN_MAJOR = "mn_major"  # fp32 [rows, groups], column-major, columns aligned to 16 bytes (DeepGEMM on SM90)


class ScaleRounding(StrEnum):
    """How a positive number becomes a power of two. Activation scales always use CEIL."""

    CEIL = "ceil"  # never below the number: codes never saturate
    FLOOR = "floor"  # the OCP MX rule: the largest values saturate
    NEAREST = "nearest"  # what torch's own cast does, ties upward


class ScaleDivision(StrEnum):
    """How amax becomes a scale that is no power of two. The results can differ by an ulp."""

    RECIPROCAL = "reciprocal"  # amax * fp32(1/limit)
    DIVIDE = "divide"  # amax / limit, rounded once


class Ties(StrEnum):
    """Where a value halfway between two E2M1 magnitudes goes."""

    EVEN = "even"  # to the code with an even mantissa bit
    TOWARD_ZERO = "toward_zero"  # to the smaller magnitude: kernels that compare with a strict >


class ZeroSign(StrEnum):
    """What a negative value that rounds to zero becomes."""

    KEPT = "kept"  # code 8, minus zero: what the hardware conversions do
    CLEARED = "cleared"  # code 0: what DeepGEMM's host helper does


class NibbleOrder(StrEnum):
    """Which element of a pair lies in the low four bits of the byte."""

    LOW_FIRST = "low_first"  # the even element: every DeepSeek checkpoint and kernel
    HIGH_FIRST = "high_first"  # the odd element


class QuantFormat(StrEnum):
    """A quantiser, as one word: what `fake_quantize` takes."""

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    FP4_E4M3 = "fp4_e4m3"


class Quantized(NamedTuple):
    """Codes and the scales that multiply them."""

    codes: Tensor
    scales: Tensor


class Mxfp8Pair(NamedTuple):
    """E4M3 codes in groups of 32 along a row, and their power-of-two scales as words: an operand of a product of two such pairs.

    The type is the tag: `Quantized` says nothing of its group, and scales of groups of 128 look the same.
    """

    codes: Tensor  # e4m3 [rows, k], row-major
    scales: Tensor  # int32, four E8M0 bytes a word: packed [rows, ceil(k/128)], or 128x4 [ceil(rows/128), ceil(k/128), 32, 4]

    @property
    def layout(self) -> ScaleLayout:
        """Where the scales lie: packed if they have two dimensions, else 128x4."""
        return ScaleLayout.PACKED if self.scales.dim() == 2 else ScaleLayout.SWIZZLED_128X4


class ProductMode(StrEnum):
    """What is asked of a product besides its value."""

    DEFAULT = "default"  # the fastest
    DETERMINISTIC = "deterministic"  # the same bits in every run
    BATCH_INVARIANT = "batch_invariant"  # a row's bits do not depend on the rows beside it


class Mxfp8Route(NamedTuple):
    """What to make of a pair, and who multiplies it."""

    layout: ScaleLayout
    backend: str


class ScalePlacement(StrEnum):
    """Who multiplies the routed experts' part by the routed scaling factor (spec M 1.7)."""

    ROUTER = "router"  # the router's weights, as in the official code
    OUTPUT = "output"  # the sum over the routed experts
    DISPATCH = "dispatch"  # the weights, on the way into MegaMoE


class SharedSlots(StrEnum):
    """Where the ids of shared experts that run as extra routed slots lie (spec M 1.8)."""

    NONE = "none"  # the shared expert runs apart
    GLOBAL = "global"  # after all routed experts
    HOME_RANK = "home_rank"  # after the routed experts of the token's own rank; every rank has a replica


class DispatchAlgorithm(StrEnum):
    """Which replica of a logical expert a row is sent to (spec M 2.3)."""

    NONE = "none"  # ids stay logical
    STATIC = "static"  # the rank's own table
    DYNAMIC = "dynamic"  # a random word, modulo the number of replicas
    ROW_MODULO = "row_modulo"  # (rank + 23333 row), modulo the number of replicas
    ROW_INDEX = "row_index"  # row, modulo: every rank picks alike, as it must where all ranks see the same rows
    PROBABILITY = "probability"  # a uniform number against a table of probabilities


class Routed(NamedTuple):
    """What a row is sent to: expert ids int32 [tokens, slots], -1 for none, and fp32 weights, 0 where the id is -1."""

    ids: Tensor
    weights: Tensor


class RouteResult(NamedTuple):
    """A whole routing step: `Routed`, and the load counters with these rows added."""

    ids: Tensor
    weights: Tensor
    counts: Tensor | None


class Placement(NamedTuple):
    """Which physical expert slots hold which logical experts, in one layer (spec M 2.2). `make_placement` builds and checks it."""

    physical_to_logical: Tensor  # int32 [physical], -1 for an empty slot
    replicas: Tensor  # int32 [experts, most replicas], physical ids, padded with -1
    counts: Tensor  # int32 [experts], replicas of each
    rank_map: Tensor | None = None  # int32 [experts]: the replica that this rank uses, for the static algorithm


class Rebalanced(NamedTuple):
    """Placements of all layers, and how often a rank holds an expert that it has already."""

    physical_to_logical: Tensor  # int32 [layers, physical]
    replicas: Tensor  # int32 [layers, experts, most replicas], physical ids, padded with -1
    counts: Tensor  # int32 [layers, experts]
    duplicates: Tensor  # int32 [layers, ranks]: slots whose expert lies in an earlier slot of the rank

    def layer(self, index: int, rank_map: Tensor | None = None) -> Placement:
        """The placement of one layer."""
        return Placement(self.physical_to_logical[index], self.replicas[index], self.counts[index], rank_map)


class HeadNormPrecision(StrEnum):
    """Where the norm of a query head rounds (spec A 2.2)."""

    FP32 = "fp32"  # fp32 inside, one rounding to bf16
    BF16_CHAIN = "bf16_chain"  # DeepSeek's published chain: square, mean, sum with eps, rsqrt and product each rounded to bf16


class StatisticsPrecision(StrEnum):
    """How the projection of the streams takes its fp32 weight (spec A 1.7)."""

    EXACT = "exact"  # the whole fp32 weight
    TF32 = "tf32"  # its upper 19 bits: the tensor cores drop the lowest 13 bits of the significand
    TF32_COMPENSATED = "tf32_compensated"  # two such products, of the upper bits and of what they leave, added


class StreamMix(NamedTuple):
    """How a sublayer reads the residual streams and writes them back (spec A 1.2), all fp32."""

    pre: Tensor  # [tokens, streams]: collapse weights
    post: Tensor  # [tokens, streams]: write-back weights of the sublayer's output
    comb: Tensor  # [tokens, streams, streams], indexed [old, new]


class Boundary(NamedTuple):
    """What lies between two sublayers: the new streams, their mix, and the next sublayer's normalised input."""

    streams: Tensor  # bf16 [tokens, streams, hidden]
    pre: Tensor  # fp32 [tokens, streams], of these streams: V4.1 hands it to the boundary after this one
    post: Tensor  # fp32 [tokens, streams]
    comb: Tensor  # fp32 [tokens, streams, streams]
    normed: Tensor  # bf16 [tokens, hidden], or its e4m3 codes
    scales: Tensor | None  # of the codes, int32 in the layout asked for; None beside bf16


class Projected(NamedTuple):
    """What a compressor keeps of each token, both fp32 [tokens, width]."""

    values: Tensor
    scores: Tensor  # without the positional bias


class CompressionPlan(NamedTuple):
    """Which entries a batch of tokens completes: row by row the request and the entry's number in it, -1 in rows left over."""

    requests: Tensor  # int32 [rows]
    entries: Tensor  # int64 [rows]


class Compressed(NamedTuple):
    """Pooled entries before their norm, what they are, and the state after these tokens."""

    pooled: Tensor  # bf16 [rows, dim]; rows left over are zero
    requests: Tensor  # int32 [rows]
    entries: Tensor  # int64 [rows]
    state: Tensor  # fp32 [states, ring, 2 * width]


class StoredEntries(NamedTuple):
    """Compressed entries in the cache: their latents, what they are, and what was updated."""

    latents: Tensor  # bf16 [rows, dim]: normalised, before the rotation; rows left over are zero
    requests: Tensor  # int32 [rows]
    entries: Tensor  # int64 [rows]
    state: Tensor  # fp32 [states, ring, 2 * width]
    pages: Tensor  # uint8 [pages, stride]


class BoundaryOutput(StrEnum):
    """In what numbers a boundary hands on the next sublayer's input."""

    BF16 = "bf16"
    MXFP8 = "mxfp8"  # E4M3 codes in groups of 32 with UE8M0 scales, as a quantised linear layer takes them


class IndexFormat(StrEnum):
    """The numbers of index queries and keys."""

    FP8 = "fp8"  # E4M3, one fp32 scale a key; a query's scale is multiplied into its weight
    FP4 = "fp4"  # E2M1 in groups of 32 with UE8M0 scales, four of them in an int32 word


class IndexOrder(StrEnum):
    """In what order the picks of a row come; -1 stands behind all of them."""

    ANY = "any"  # the set alone is promised
    SCORE = "score"  # descending score, equal scores by ascending index
    INDEX = "index"  # ascending index


class LogitPrecision(StrEnum):
    """Where index logits are rounded (spec A 10, row 15)."""

    FP32 = "fp32"  # once, at the end
    BF16 = "bf16"  # dot product, weighted head and sum, each to bf16: the official code


class IndexQueries(NamedTuple):
    """Index queries as a kernel of logits takes them."""

    codes: Tensor  # E4M3 [tokens, heads, dim], or uint8 [tokens, heads, dim / 2]
    scales: Tensor | None  # int32 [tokens, heads], four UE8M0 bytes, the first group lowest; None with E4M3
    weights: Tensor  # fp32 or bf16 [tokens, heads]


class IndexKeys(NamedTuple):
    """Index keys: codes and their scales."""

    codes: Tensor  # E4M3 [entries, dim], or uint8 [entries, dim / 2]
    scales: Tensor  # fp32 [entries], or int32 [entries], four UE8M0 bytes, the first group lowest


class PagedRows(NamedTuple):
    """Keys and values of a cache: pages, and how to read them."""

    pages: Tensor  # uint8 [pages, stride]
    layout: str  # a name of `dsv4.formats.KV_LAYOUTS`
    page_size: int  # slots of a page


class AttentionResult(NamedTuple):
    """What attention gives: natural logarithms without the sink, minus infinity (and zeros) where a row sees nothing."""

    output: Tensor  # bf16 [tokens, heads, dim]
    lse: Tensor  # fp32 [tokens, heads]


class AttentionPlan(Protocol):
    """Calls of `decode_attention` or `prefill_attention` up to a size, prepared."""

    @property
    def workspace_bytes(self) -> int:
        """What the plan holds."""

    @property
    def backend(self) -> str:
        """Who runs it."""

    @property
    def splits(self) -> int:
        """Into how many parts a token's picks are split; 0 where a library decides."""

    @property
    def reason(self) -> str:
        """Why this backend."""

    def run(
        self,
        q: Tensor,
        main: PagedRows,
        slots: Tensor,
        sink: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        extra: PagedRows | None = None,
        extra_slots: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        scale: float | None = None,
        out: AttentionResult | None = None,
    ) -> AttentionResult:
        """One call, into `out` where it is given."""
