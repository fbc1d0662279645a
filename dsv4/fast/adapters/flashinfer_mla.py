"""FlashInfer's attention over one latent vector a row: the paged MLA wrapper on SM90, the sparse MLA of V4.1's pages on SM120.

The wrapper takes lists of pages that are complete: no pick can be absent, and how long the lists are is laid down when a call is
planned, with the host waiting. Here every pick is a page of one bf16 row, and the 64 columns that such rows have for RoPE tell who is
there: they are 0 in every row but row 0, whose first is -2^50 against 2^50 in every query. So row 0, of zeros, has a weight of 0 beside any
other row, stands for every pick that is absent, and plans hold for all lists of a width. Its logarithms are to base 2 and know no sink; the
output is scaled to a sink afterwards, and rounded a second time then. Without `backend="fa3"`, which SM90 has, they are off by 6e-4, and
not used.

The sparse MLA rounds queries and weights to E4M3 but for V4.1's pages with `compute_precision="bf16"`: that alone is used.
Source: spec A 6.7; kernels 0b, B.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.fast.adapters import flashmla
from dsv4.fast.adapters.flashinfer import LIBRARY
from dsv4.fast.adapters.flashmla import Paged
from dsv4.fast.adapters.library import as_bytes, known_answer
from dsv4.fast.dispatch import cuda_exactly, describe

MLA = "mla.BatchMLAPagedAttentionWrapper"
METADATA = "mla.MLAPlanMetadata"
SPARSE_MLA = "mla.SparseMLASm120Wrapper"

DIM, ROPE = 512, 64
AWAY = 2.0**50  # its square is subtracted from scores: finite in fp32, and far below any other
LEAST_SCALE = 2.0**-20  # of scores: below, an absent pick is no longer far from any other
NOBODY = -(2.0**80)  # an lse to base 2 that only absent rows have
TOKENS = 8192  # of one plan: its scheduler holds 16384 pieces of work
PARTIAL_ROWS = 64  # of every multiprocessor, twice, for parts of the tokens that the scheduler splits
DEVICES = cuda_exactly((9, 0), (12, 0), (12, 1))
SCALES = {  # layouts that a token's picks come from on SM120, main and extra: the name of the main scales, and whether extra is FP4
    ("v41", "v41"): ("ue8m0_g32", False),
    ("v41", "v41_fp4"): ("ue8m0_g32", True),
    ("v41_inline", "v41_inline"): ("ue8m0_g32_inline", False),
    ("v41_inline", "v41_fp4_inline"): ("ue8m0_g32_inline", True),
}


class RowAttention:
    """The wrapper, planned for `tokens` queries of `heads` heads that take `picks` rows each, row 0 for an absent one.

    Everything is made here, with the host waiting; `run` launches.
    """

    def __init__(self, tokens: int, heads: int, picks: int, scale: float, device: torch.device) -> None:
        numbers = partial(torch.zeros, dtype=torch.int32, device=device)
        offsets = torch.arange(tokens + 1, dtype=torch.int32)
        self.indices = numbers(tokens * picks)
        self.rope_q = torch.zeros(tokens, heads, ROPE, dtype=torch.bfloat16, device=device)
        self.rope_q[..., 0] = AWAY
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        room = 2 * multiprocessors * PARTIAL_ROWS * (2 * DIM + 4) + 16
        self.workspace = torch.empty(room, dtype=torch.uint8, device=device)
        self._wrapper = LIBRARY.function(MLA)(
            self.workspace,
            use_cuda_graph=True,
            qo_indptr=numbers(tokens + 1),
            kv_indptr=numbers(tokens + 1),
            kv_indices=self.indices,
            kv_len_arr=numbers(tokens),
            backend="fa3",
        )
        lists = torch.zeros(tokens * picks, dtype=torch.int32), torch.full((tokens,), picks, dtype=torch.int32)
        self._wrapper.plan(
            metadata=LIBRARY.function(METADATA).csr(offsets, offsets * picks, *lists),
            num_heads=heads,
            head_dim_ckv=DIM,
            head_dim_kpe=ROPE,
            page_size=1,
            causal=False,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2",
        )
        self.integers = getattr(self._wrapper, "_int_workspace_buffer", None)  # the wrapper's own, as its `workspace` is ours

    def run(self, q: Tensor, rows: Tensor, rope: Tensor, output: Tensor, lse: Tensor) -> None:
        """Fill output bf16 [tokens, heads, 512] and lse fp32 [tokens, heads], both without a sink; `indices` have been filled before.

        Args:
            q: bf16 [tokens, heads, 512].
            rows: bf16 [n, 512], row 0 zeros. rope: bf16 [n, 64], of `rope_of`.
            output, lse: contiguous; lse comes to be natural, -inf for queries whose picks are all absent.
        """
        self._wrapper.run(query=(q, self.rope_q), kv_cache=(rows[:, None], rope[:, None]), out=output, lse=lse, return_lse=True)
        nobody = lse < NOBODY
        lse.mul_(math.log(2)).masked_fill_(nobody, -torch.inf)


def rope_of(rows: int, device: torch.device) -> Tensor:
    """bf16 [rows, 64]: the columns that send row 0 away."""
    rope = torch.zeros(rows, ROPE, dtype=torch.bfloat16, device=device)
    rope[0, 0] = -AWAY
    return rope


def scale_to_sink(output: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    """Scale outputs without a sink by e^lse / (e^lse + e^sink), in place; empty rows are 0 before and after."""
    if sink is not None:
        share = torch.sigmoid(lse - sink).masked_fill_(lse == -torch.inf, 0.0)
        torch.mul(output, share[..., None], out=output)


class PageAttention:
    """The sparse MLA of SM120 for one pair of layouts of V4.1, in bf16. It keeps scratch of its own, by shape, from its first calls."""

    def __init__(self, main: str, extra: str | None, device: torch.device) -> None:
        scales, fp4 = SCALES[main, extra or main]
        options: dict[str, Any] = {"kv_scale_format": scales, "extra_kv_fp4": fp4, "compute_precision": "bf16", "device": device}
        self._wrapper = LIBRARY.function(SPARSE_MLA)(**options)

    def run(
        self,
        q: Tensor,
        main: Paged,
        slots: Tensor,
        extra: Paged | None,
        extra_slots: Tensor | None,
        scale: float,
        output: Tensor,
        lse: Tensor,
    ) -> None:
        """Fill output bf16 [tokens, heads, 512] and lse fp32 [tokens, heads], natural, both without a sink.

        Args:
            q: bf16 [tokens, heads, 512].
            main, extra: pages.
            slots, extra_slots: int32 [tokens, picks], -1 for none, contiguous.
            scale: of the scores.
            output, lse: contiguous.
        """
        more = {} if extra is None else {"extra_kv_cache": flashmla.view_of(extra), "extra_indices": extra_slots}
        self._wrapper.run(q, flashmla.view_of(main), slots, output, scale, out_lse=lse, return_lse=True, lse_scale=math.log(2), **more)


def takes_rows(arguments: Mapping[str, Any]) -> str | None:
    """What keeps the wrapper from bf16 rows: it is right on SM90 alone."""
    heads, dim = arguments["q"].shape[1:]
    device = arguments.get("device") or describe(arguments["q"].device)
    if device.capability[0] != 9:
        return f"takes bf16 rows on SM90 alone, for its logarithms are off elsewhere; this is {device}"
    scale = arguments.get("scale")
    if scale is not None and scale < LEAST_SCALE:
        return f"gives absent picks a weight at a scale below 2^-20; got {scale!r}"
    return None if heads <= 128 and dim == DIM else f"takes at most 128 heads of {DIM}; got {heads} heads of {dim}"


def takes_pages(arguments: Mapping[str, Any]) -> str | None:
    """What keeps either from an operator's arguments: on SM90 rows are decoded before, so every layout goes; on SM120 V4.1's go."""
    device = arguments.get("device") or describe(arguments["q"].device)
    if device.capability[0] == 9:
        return takes_rows(arguments)
    pair = arguments["layout"], arguments["extra_layout"] or arguments["layout"]
    if pair not in SCALES:
        known = ", ".join(" with ".join(dict.fromkeys(names)) for names in SCALES)
        return f"on {device} takes {known}, for it rounds queries and weights to E4M3 elsewhere; got {' with '.join(dict.fromkeys(pair))}"
    heads, dim = arguments["q"].shape[1:]
    if heads > 128 or dim != DIM:
        return f"takes at most 128 heads of {DIM}; got {heads} heads of {dim}"
    for name in ("pages", "extra_pages"):
        pages = arguments[name]
        if pages is not None and (not pages.shape[0] or pages.stride(0) % 16 or pages.data_ptr() % 16):
            return (
                f"takes pages, one at least, that begin at a multiple of 16 bytes; got {name} {list(pages.shape)}, {pages.stride(0)} apart"
            )
    return None


def _probe(device: torch.device) -> str | None:
    return _probe_pages(device) if describe(device).capability[0] == 12 else _probe_rows(device)


def _probe_rows(device: torch.device) -> str | None:
    """The queries of FlashMLA's case and one without picks, without a sink; its exponentials are approximate."""
    rows = torch.zeros(9, DIM)
    rows[1:] = torch.arange(1.0, 9.0)[:, None] * torch.tensor(flashmla.PATTERN).repeat(DIM // 4)
    q, given = _three_queries(device), (rows.to(torch.bfloat16).to(device), rope_of(9, device))
    picks = torch.zeros(3, 70, dtype=torch.int32)
    picks[0, 3:6], picks[0, 69], picks[1, [0, 7, 69]] = 2, 2, torch.tensor([3, 6, 1], dtype=torch.int32)

    def answer() -> tuple[Tensor, ...]:
        attention = RowAttention(3, 64, 70, 1.0, device)
        attention.indices.copy_(picks.to(device).reshape(-1))
        output, lse = torch.empty_like(q), torch.empty(3, 64, device=device)
        attention.run(q, *given, output, lse)
        return _read(output, lse)

    outputs = [2.0 * number for number in flashmla.PATTERN] * 128, [6.0 * number for number in flashmla.PATTERN] * 128
    third = [10 / 3 * number for number in flashmla.PATTERN] * 128
    return known_answer(answer, _answers(outputs[0] * 64 + (outputs[1] + third) * 32, [1386] * 64 + [384000, 1099] * 32), device)


def _probe_pages(device: torch.device) -> str | None:
    """Every pair of layouts: the same rows as FlashMLA's case, main and extra, without a sink."""

    class Rows:
        def __init__(self, layout: str) -> None:
            self.pages, self.layout, self.page_size = flashmla.packed_pattern(layout).to(device), layout, 64

    q, slots = _three_queries(device), torch.full((2, 3, 64), -1, dtype=torch.int32)
    slots[0, 0, 7], slots[1, 0, [2, 3]], slots[1, 0, 63] = 65, 65, 65
    slots[0, 1, 0], slots[1, 1, 3], slots[1, 1, 63] = 66, 69, 64
    mine, others = slots.to(device)
    thirds = [[factor * number for number in flashmla.PATTERN] * 128 for factor in (2.0, 6.0, 10 / 3)]
    want = _answers(thirds[0] * 64 + (thirds[1] + thirds[2]) * 32, [1386] * 64 + [384000, 1099] * 32)
    for main, extra in SCALES:

        def answer(main: str = main, extra: str = extra) -> tuple[Tensor, ...]:
            output, lse = torch.empty_like(q), torch.empty(3, 64, device=device)
            PageAttention(main, extra, device).run(q, Rows(main), mine, Rows(extra), others, 1.0, output, lse)
            return _read(output, lse)

        if (wrong := known_answer(answer, want, device)) is not None:
            return f"{main} with {extra}: {wrong}"
    return None


def _three_queries(device: torch.device) -> Tensor:
    q = torch.zeros(3, 64, DIM)
    q[1, ::2, 0] = 64.0
    return q.to(torch.bfloat16).to(device)


def _read(output: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Hundredths of the first two outputs, zeros of the third one, thousandths of their lses, and where the third one's is -inf."""
    hundredths = (100 * output.float()).round().to(torch.int32)
    return hundredths, (1000 * lse[:2]).round().to(torch.int32), (lse[2] == -torch.inf).to(torch.uint8)


def _answers(outputs: list[float], lses: list[int]) -> tuple[bytes, ...]:
    rounded = (100 * torch.tensor([*outputs, *[0.0] * (64 * DIM)]).to(torch.bfloat16).float()).round()
    return as_bytes(rounded.tolist(), torch.int32), as_bytes(lses, torch.int32), bytes([1] * 64)


LIBRARY.probes[MLA] = _probe
