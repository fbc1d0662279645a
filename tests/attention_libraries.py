"""FlashMLA, FlashInfer and our own kernels of attention, made up for the CPU: their signatures and rules, and their answers in fp64.

And the inputs and comparisons of the tests of attention.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch

from dsv4.fast import attention_engines, dispatch
from dsv4.formats import KV_LAYOUTS
from dsv4.reference import attention as reference
from dsv4.reference.kv_cache import load_kv, store_kv
from dsv4.types import AttentionResult, PagedRows

BYTES = {584: "v4", 528: "v41", 288: "v41_fp4", 512: "uniform_fp8"}


def softmax(q, rows, there, scale):
    """Output fp64 and natural lse of q [tokens, heads, d] over rows [tokens, picks, d] that are there."""
    scores = (q.double() @ rows.double().mT * scale).masked_fill(~there[:, None], -torch.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights @ torch.where(there[..., None], rows, 0.0).double(), lse


class FlashMLA:
    """Records calls. A schedule is for one set of shapes."""

    def __init__(self, inline=False):
        self.calls, self.inline = [], inline

    def functions(self):
        names = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
        return {name: getattr(self, name) for name in names}

    def get_mla_metadata(self):
        return SimpleNamespace(tile_scheduler_metadata=None), None

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v, attn_sink, *, use_legacy):
        self.calls.append(("rows", tuple(q.shape), tuple(kv.shape), tuple(indices.shape), use_legacy))
        assert q.dtype == kv.dtype == torch.bfloat16
        assert indices.dtype == torch.int32
        assert (q.shape[1] in (64, 128), q.shape[2], kv.shape[1:], indices.shape[1], d_v) == (True, 512, (1, 512), 1, 512)
        assert indices.shape[2] % 128 == 0
        assert q.is_contiguous()
        assert indices.is_contiguous()
        there = (indices[:, 0] >= 0) & (indices[:, 0] < len(kv))
        return self._finish(q, kv[:, 0][torch.where(there, indices[:, 0], 0).long()], there, sm_scale, attn_sink, True)

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, meta, *, softmax_scale, is_fp8_kvcache, indices, attn_sink, use_legacy,
        extra_k_cache=None, extra_indices_in_kvcache=None,
    ):  # fmt: skip
        shapes = tuple(None if one is None else tuple(one.shape) for one in (q, k_cache, indices, extra_k_cache, extra_indices_in_kvcache))
        self.calls.append(("pages", *shapes, use_legacy, meta.tile_scheduler_metadata is not None))
        assert (block_table, cache_seqlens, head_dim_v, is_fp8_kvcache) == (None, None, 512, True)
        assert meta.tile_scheduler_metadata in (None, shapes[:1] + shapes[2:3] + shapes[4:])
        meta.tile_scheduler_metadata = shapes[:1] + shapes[2:3] + shapes[4:]
        assert (q.shape[1], q.shape[2] in (64, 128), q.shape[3]) == (1, True, 512)
        lists = [self._rows(k_cache, indices)]
        if extra_k_cache is not None:
            lists.append(self._rows(extra_k_cache, extra_indices_in_kvcache))
        rows, there = (torch.cat(parts, 1) for parts in zip(*lists, strict=True))
        output, _, lse = self._finish(q[:, 0], rows, there, softmax_scale, attn_sink, True)
        return output[:, None], lse[..., None]

    def _rows(self, cache, indices):
        assert indices.dtype == torch.int32
        assert indices.shape[1] == 1
        assert indices.shape[2] % 64 == 0
        pages, size, _, token = cache.shape
        assert ((indices == -1) | ((indices >= 0) & (indices < pages * size))).all(), "an address outside of the cache"
        layout = BYTES[token] + ("_inline" if self.inline else "")
        assert cache.stride(0) % KV_LAYOUTS[layout].stride_multiple == 0
        flat = cache.as_strided((pages, size * token), (cache.stride(0), 1))
        return load_kv(flat, indices[:, 0], layout=layout, page_size=size), indices[:, 0] >= 0

    def _finish(self, q, rows, there, scale, sink, infinite):
        output, lse = softmax(q, rows, there, scale)
        if sink is not None:
            assert (sink.dtype, sink.shape) == (torch.float32, (q.shape[1],))
            output = output * torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink.double()))[..., None]
        return output.to(torch.bfloat16), None, torch.where(lse == -torch.inf, torch.inf, lse).float()


class FlashInfer:
    """`mla`, with the planned wrapper (SM90) and the sparse MLA of SM120. Records calls."""

    def __init__(self):
        library = self
        self.calls = []

        class Metadata:
            @classmethod
            def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
                return SimpleNamespace(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)

        class Wrapper:
            def __init__(self, workspace, *, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend):
                assert (use_cuda_graph, backend, workspace.dtype) == (True, "fa3", torch.uint8)
                self.buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}

            def plan(self, *, metadata, sm_scale, num_heads, **rest):
                assert rest == {
                    "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1, "causal": False, "q_data_type": torch.bfloat16,
                    "kv_data_type": torch.bfloat16, "query_layout": "split", "kv_cache_layout": "split", "lse_mode": "base2",
                }  # fmt: skip
                for name, buffer in self.buffers.items():
                    given = getattr(metadata, name)
                    assert (given.dtype, given.shape, given.is_contiguous()) == (torch.int32, buffer.shape, True)
                    buffer.copy_(given)
                self.scale, self.shape = sm_scale, (len(metadata.kv_len_arr), num_heads)

            def run(self, *, query, kv_cache, out, lse, return_lse):
                (q, rope_q), (rows, rope) = query, kv_cache
                library.calls.append(("rows", tuple(q.shape), tuple(rows.shape)))
                assert (tuple(q.shape[:2]), return_lse, rows.shape[1:], rope.shape[1:]) == (self.shape, True, (1, 512), (1, 64))
                assert q.is_contiguous()
                assert out.is_contiguous()
                assert lse.is_contiguous()
                picks = self.buffers["kv_indices"].view(self.shape[0], -1)
                assert (picks.shape[1] == self.buffers["kv_len_arr"]).all()
                assert ((picks >= 0) & (picks < len(rows))).all()
                assert not rows[0].any()
                places = picks.long()
                scores = q.float() @ rows[places, 0].float().mT + rope_q.float() @ rope[places, 0].float().mT
                scores = scores.double() * self.scale
                total = scores.logsumexp(2)
                assert total.isfinite().all()
                out.copy_((scores - total[..., None]).exp() @ rows[places, 0].double())
                lse.copy_(total / torch.log(torch.tensor(2.0, dtype=torch.float64)))

        class Sparse:
            def __init__(self, *, kv_scale_format, extra_kv_fp4, compute_precision, device):
                assert compute_precision == "bf16"
                self.inline, self.fp4 = kv_scale_format == "ue8m0_g32_inline", extra_kv_fp4

            def run(self, q, cache, indices, output, scale, *, out_lse, return_lse, lse_scale, extra_kv_cache=None, extra_indices=None):
                library.calls.append(("pages", tuple(q.shape), tuple(indices.shape), self.inline, self.fp4))
                assert return_lse
                assert abs(lse_scale - 0.6931471805599453) < 2**-52
                assert extra_kv_cache is None or extra_kv_cache.shape[-1] == (288 if self.fp4 else 528)
                reader = FlashMLA(self.inline)
                lists = [reader._rows(cache, indices[:, None])]
                if extra_kv_cache is not None:
                    lists.append(reader._rows(extra_kv_cache, extra_indices[:, None]))
                result, lse = softmax(q, *(torch.cat(parts, 1) for parts in zip(*lists, strict=True)), scale)
                output.copy_(result)
                out_lse.copy_(lse)

        self.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=Metadata, SparseMLASm120Wrapper=Sparse)


class Kernels:
    """The launches of `dsv4.fast.kernels.attention`, by the reference. Records what they were given."""

    def __init__(self):
        self.calls = []

    def attend_paged(
        self, q, main_pages, main_layout, main_page_size, slots, lengths, extra_pages, extra_layout, extra_page_size, extra_slots,
        extra_lengths, sink, scale, output, lse, *, splits, parts, part_lses,
    ):  # fmt: skip
        main = PagedRows(main_pages, main_layout.name, main_page_size)
        extra = None if extra_pages is None else PagedRows(extra_pages, extra_layout.name, extra_page_size)
        self._note("paged", q, splits, parts, part_lses, slots)
        more = {"lengths": lengths, "extra": extra, "extra_slots": extra_slots, "extra_lengths": extra_lengths}
        self._put(reference.paged_attention(q, main, slots, sink, scale=scale, **more), output, lse)

    def attend_rows(
        self, q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, scale, output, lse, *, splits, parts, part_lses
    ):
        self._note("rows", q, splits, parts, part_lses, indices)
        more = {"lengths": lengths, "extra_kv": extra_kv, "extra_indices": extra_indices, "extra_lengths": extra_lengths}
        self._put(reference.sparse_attention(q, kv, indices, sink, scale=scale, **more), output, lse)

    def merge(self, parts, part_lses, sink, output, lse):
        self._put(reference.merge_splits(parts, part_lses, sink), output, lse)

    def _note(self, name, q, splits, parts, part_lses, picks):
        if splits > 1:
            assert (parts.dtype, parts.shape, parts.is_contiguous()) == (torch.float32, (splits, *q.shape), True)
            assert (part_lses.dtype, part_lses.shape) == (torch.float32, (splits, *q.shape[:2]))
        else:
            assert parts is None
            assert part_lses is None
        self.calls.append((name, tuple(q.shape), tuple(picks.shape), splits))

    def _put(self, result: AttentionResult, output, lse):
        assert output.is_contiguous()
        assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        output.copy_(result.output)
        lse.copy_(result.lse)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def picks_of(rows, *shape, seed=0, dtype=torch.int32):
    """Numbers with absent ones on both sides, and some twice."""
    return torch.randint(-3, rows + 3, shape, generator=generator(seed), dtype=dtype)


def cache(layout, page_size, pages=4, *, gap=0, seed=5):
    """Pages of random rows; slot 0 and the last one hold NaN, and nobody may read them unless they are picked."""
    count = pages * page_size
    memory = torch.zeros(pages, KV_LAYOUTS[layout].page_bytes(page_size) + gap, dtype=torch.uint8)
    stored = store_kv(normal(count, 512, seed=seed).bfloat16(), memory, torch.arange(count), layout=layout, page_size=page_size)
    return PagedRows(stored, layout, page_size)


def queries(tokens, heads, dim=512, seed=1):
    return (2 * normal(tokens, heads, dim, seed=seed)).bfloat16()


def same(got, expected):
    assert isinstance(got, AttentionResult)
    for one, other in zip(got, expected, strict=True):
        assert (one.dtype, one.shape, one.is_contiguous()) == (other.dtype, other.shape, True)
        assert torch.equal(one.view(torch.int16 if one.dtype == torch.bfloat16 else torch.int32), other.view_as(other).view(
            torch.int16 if one.dtype == torch.bfloat16 else torch.int32
        ))  # fmt: skip


def near(got, expected, sink=True):
    """Within two roundings to bf16 (one after a sink in a second step) of outputs that do not cancel, and 2^-20 of lse."""
    assert got.output.dtype == torch.bfloat16
    error = (got.output.double() - expected.output.double()).abs()
    assert (error <= 2.0**-7 * expected.output.double().abs() + 2.0**-12).all()
    seen = expected.lse > -torch.inf
    assert torch.equal(got.lse > -torch.inf, seen)
    assert not got.output[~seen].any()
    assert ((got.lse - expected.lse)[seen].abs() <= 2.0**-20 * (1 + expected.lse[seen].abs())).all()


def our_kernels(monkeypatch):
    """Our kernels on the CPU, by the reference; every function has them."""
    spy = Kernels()
    module = ModuleType("dsv4.fast.kernels.attention")
    for name in ("attend_paged", "attend_rows", "merge"):
        setattr(module, name, getattr(spy, name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
    anywhere(monkeypatch, "triton")
    return spy


def anywhere(monkeypatch, backend):
    for function, rows in dispatch.TABLES.items():
        if function.startswith("attention."):
            changed = tuple(replace(row, device=dispatch.any_device) if row.backend == backend else row for row in rows)
            monkeypatch.setitem(dispatch.TABLES, function, changed)


def programs(monkeypatch, count):
    monkeypatch.setattr(attention_engines, "programs_at_once", lambda device: count)
