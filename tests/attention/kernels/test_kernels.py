"""The kernel contract, the same for every backend: any tiles, exact results for exactly the touched rows.

Random tiles, not only those of named plans, since mistakes in grouping and merging hide from regular ones. The CUDA
backend's layout is tested here on CPU with a stand-in for the varlen kernel; the real one needs a GPU and is skipped.
"""

from __future__ import annotations

import itertools
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from equipoise.attention import bands
from equipoise.attention.kernels import cpu, cuda, reference
from equipoise.attention.kernels.contract import KERNELS, Scores, add_, kernel_for, merge_, rows_of, sum_dtype, take
from equipoise.attention.kernels.grouping import LARGE, batches, layers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, disjoint_tiles, mask_of, mask_of_segments

CPU = torch.device("cpu")


class DenseVarlen:
    """flash-attention's varlen interface computed densely, windows as its documentation states them."""

    def mask(self, call: cuda.Call) -> torch.Tensor:
        q, k = call.cu_q.tolist(), call.cu_k.tolist()
        assert call.cu_q.dtype == call.cu_k.dtype == torch.int32
        assert call.max_q == max(np.diff(q)) and call.max_k == max(np.diff(k))
        pieces = [[*q[i : i + 2], *k[i : i + 2], *call.window] for i in range(len(q) - 1)]
        return torch.from_numpy(mask_of_segments(np.array(pieces), q[-1], k[-1]) > 0)

    caps = True

    def forward(self, call, q, k, v, scores):
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and q.shape[2] == v.shape[2]
        return reference.dense(q, k, v, self.mask(call), scores.scale, scores.softcap)

    def backward(self, call, dout, q, k, v, out, lse, scores):
        assert lse.is_contiguous() and dout.is_contiguous()
        mask = self.mask(call)
        whole = reference.ReferenceHandle(mask=mask, q_rows=slice(0, len(q)), k_rows=slice(0, len(k)))
        return reference.backward(whole, dout, q, k, v, out, lse, scores)


class CudaLayout:
    """The CUDA backend over the stand-in."""

    def prepare(self, tiles, num_q, num_k, device):
        return cuda.prepare(tiles, num_q, num_k, device, DenseVarlen())

    forward = staticmethod(cuda.forward)
    backward = staticmethod(cuda.backward)


BACKENDS = {"cpu": cpu, "reference": reference, "cuda layout": CudaLayout()}


def tensors(num_q, num_k, heads, kv_heads, dtype=torch.float64, dim=5, seed=0, value_dim=None):
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = dim if value_dim is None else value_dim
    shapes = [(num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, value_dim), (num_q, heads, value_dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def expected(mask, q, k, v, dout, scale, softcap=None):
    """Dense out, lse, dq, dk, dv in fp64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, lse = reference.dense(q, k, v, torch.from_numpy(mask), scale, softcap)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, (q, k, v), dout.double()))]


def spread(rows, part, like):
    whole = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
    add_(whole, rows, part)
    return whole


def run(kernel, tiles, q, k, v, dout, scale, final=None, softcap=None, device=CPU):
    """out, lse, dq, dk, dv over all rows."""
    scores = Scores(scale=scale, softcap=softcap)
    handle = kernel.prepare(tiles, len(q), len(k), device)
    part, part_lse = kernel.forward(handle, q, k, v, scores)
    out = torch.zeros(dout.shape, dtype=sum_dtype(q.dtype), device=device)
    lse_TH = torch.full(q.shape[:2], -torch.inf, dtype=out.dtype, device=device)
    merge_(out, lse_TH, handle.q_rows, part, part_lse.transpose(0, 1))
    lse = lse_TH.transpose(0, 1)
    assert part_lse.dtype == out.dtype and part_lse.isfinite().all()
    final_out, final_lse = final or (out.to(q.dtype), lse)
    dq, dk, dv = kernel.backward(handle, dout, q, k, v, final_out, final_lse, scores)
    return out, lse, spread(handle.q_rows, dq, q), spread(handle.k_rows, dk, k), spread(handle.k_rows, dv, v)


def assert_close(got, want, bound):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), name
        assert (a[finite].double() - b[finite]).abs().max() <= bound if finite.any() else True, name


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
@PROMISE
@given(disjoint_tiles(24, 20), st.sampled_from([(4, 2), (4, 1), (2, 2)]))
def test_any_tiles_give_exact_results(kernel, tiles, heads):
    q, k, v, dout = tensors(24, 20, *heads)
    want = expected(mask_of(tiles, 24, 20) > 0, q, k, v, dout, 0.7)
    assert_close(run(kernel, tiles, q, k, v, dout, 0.7), want, 1e-12)


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
def test_rows_without_keys_are_not_touched(kernel):
    """Through merge_ they stay out 0, lse -inf."""
    tiles = np.array([[2, 5, 1, 4, 0, bands.NO_LIMIT]])
    q, k, v, dout = tensors(8, 6, 2, 1)
    out, lse, *_ = run(kernel, tiles, q, k, v, dout, 1.0)
    assert (out[[0, 1, 5, 6, 7]] == 0).all() and (lse[:, [0, 1, 5, 6, 7]] == -torch.inf).all()
    assert lse[:, 2:5].isfinite().all()


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("num_q,num_k", [(5, 4), (0, 4), (5, 0)])
def test_no_tiles_give_no_rows(kernel, num_q, num_k):
    q, k, v, dout = tensors(num_q, num_k, 2, 1)
    got = run(kernel, np.zeros((0, 6), np.int64), q, k, v, dout, 1.0)
    assert (got[1] == -torch.inf).all() and all((x == 0).all() for x in (got[0], *got[2:]))


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
def test_lse_is_a_natural_logarithm(kernel):
    q, k, v, _ = tensors(1, 3, 1, 1)
    handle = kernel.prepare(np.array([[0, 1, 0, 3, -bands.NO_LIMIT, bands.NO_LIMIT]]), 1, 3, CPU)
    _, lse = kernel.forward(handle, q, k, v, Scores(scale=0.5))
    assert torch.allclose(lse[0, 0].exp(), (0.5 * (k[:, 0] @ q[0, 0])).exp().sum(), rtol=1e-14)


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
def test_backward_takes_the_final_out_and_lse(kernel):
    """Half of the keys at a time, with the whole's out and lse, gives the whole's gradients in two summands."""
    q, k, v, dout = tensors(9, 9, 4, 2)
    halves = [np.array([[0, 9, 0, 4, 0, bands.NO_LIMIT]]), np.array([[0, 9, 4, 9, 0, bands.NO_LIMIT]])]
    want = expected(np.tril(np.ones((9, 9), bool)), q, k, v, dout, 0.3)
    parts = [run(kernel, half, q, k, v, dout, 0.3, final=(want[0], want[1]))[2:] for half in halves]
    for a, b, whole in zip(*parts, want[2:], strict=True):
        assert (a + b - whole).abs().max() <= 1e-13


@pytest.mark.parametrize("lengths", [(1, 2, 3, 5, 8, 13, 21, 34), (40,) * 12, (600, 3, 3, 520, 64, 65, 66, 1)])
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_documents_batch_exactly(lengths, dtype, bound):
    """Padding to the longest of a group, views without a copy, and documents too large to batch."""
    cu = np.concatenate([[0], np.cumsum(lengths)])
    tiles = np.array([[a, b, a, b, 0, bands.NO_LIMIT] for a, b in itertools.pairwise(cu)])
    q, k, v, dout = tensors(cu[-1], cu[-1], 2, 1, dtype)
    want = expected(mask_of(tiles, cu[-1], cu[-1]) > 0, q, k, v, dout, 0.4)
    assert_close(run(cpu, tiles, q, k, v, dout, 0.4), want, bound)


@pytest.mark.parametrize("length", [20, 300])
def test_bf16_errs_no_more_than_twice_naive_bf16(length):
    """Below 256 rows backward goes through fp32, above it does not."""
    tiles = np.array([[a, a + length, a, a + length, 0, bands.NO_LIMIT] for a in (0, length)])
    q, k, v, dout = tensors(2 * length, 2 * length, 2, 1, torch.bfloat16, dim=32)
    mask = mask_of(tiles, 2 * length, 2 * length) > 0
    want = expected(mask, q, k, v, dout, 0.2)
    got = run(cpu, tiles, q, k, v, dout, 0.2, final=(want[0].bfloat16(), want[1].float()))
    ql, kl, vl = (x.clone().requires_grad_() for x in (q, k, v))
    scores = (ql.transpose(0, 1) @ kl.expand(-1, 2, -1).permute(1, 2, 0) * 0.2).masked_fill(
        ~torch.from_numpy(mask), -torch.inf
    )
    naive = (scores.softmax(-1) @ vl.expand(-1, 2, -1).transpose(0, 1)).transpose(0, 1)
    plain = [naive.detach(), *torch.autograd.grad(naive, (ql, kl, vl), dout)]
    for ours, exact, theirs in zip([got[0], *got[2:]], [want[0], *want[2:]], plain, strict=True):
        rounding = (exact.bfloat16() - exact).abs().max()
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + rounding


def test_strided_operands_are_read_right():
    """K and V of a received buffer are two halves of [rows, 2, heads, dim]; heads may be a slice of more."""
    q, k, v, dout = tensors(40, 40, 2, 1)
    kv, wide = torch.stack((k, v), 1), torch.cat((q, q), 1)
    tiles = np.array([[0, 40, 0, 40, 0, bands.NO_LIMIT]])
    strided = run(cpu, tiles, wide[:, :2], kv[:, 0], kv[:, 1], dout, 0.3)
    assert_close(strided, run(cpu, tiles, q, k, v, dout, 0.3), 0)


# ---- Merging. ----


def test_merging_nothing_with_nothing_stays_nothing():
    out, lse = torch.zeros(2, 1, 3), torch.full((2, 1), -torch.inf)
    merge_(out, lse, slice(0, 2), torch.zeros(2, 1, 3), torch.tensor([[-torch.inf], [2.0]]))
    assert torch.equal(lse, torch.tensor([[-torch.inf], [2.0]])) and (out == 0).all()
    merge_(out, lse, slice(0, 2), torch.ones(2, 1, 3), torch.tensor([[-torch.inf], [-torch.inf]]))
    assert torch.equal(lse, torch.tensor([[-torch.inf], [2.0]])) and (out == 0).all()


@pytest.mark.parametrize("gap", [-2000.0, -200.0, 0.0, 200.0, 2000.0])
@pytest.mark.parametrize("rows", [slice(0, 1), torch.tensor([0])])
def test_lse_far_apart_merges_finitely(gap, rows):
    out, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
    merge_(out, lse, rows, torch.full((1, 1, 2), 3.0), torch.full((1, 1), gap))
    weight = 1 / (1 + np.exp(-gap)) if gap > -700 else 0.0
    assert torch.allclose(out, torch.full((1, 1, 2), 1 + 2 * weight)) and lse.isfinite().all()


def test_nan_is_not_hidden():
    out, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
    merge_(out, lse, slice(0, 1), torch.ones(1, 1, 2), torch.full((1, 1), torch.nan))
    assert lse.isnan().all()


def test_rows_are_slices_where_they_can_be():
    assert rows_of(np.array([3, 4, 5]), CPU) == slice(3, 6) and rows_of(np.array([], np.int64), CPU) == slice(0, 0)
    for index in ([3, 5], [4, 3], [1, 1], [0, 2, 1, 3]):
        rows = rows_of(np.array(index), CPU)
        assert take(torch.arange(9), rows).tolist() == index and not isinstance(rows, slice)


# ---- Grouping. ----


@PROMISE
@given(disjoint_tiles(30, 30))
def test_every_piece_is_in_one_batch_and_no_query_row_twice_in_one(tiles):
    pieces = bands.squares(tiles)
    groups = batches(pieces, 30)
    assert sorted(i for g in groups for i in g.tolist()) == list(range(len(pieces)))
    for group in groups:
        rows = np.concatenate([np.arange(*pieces[i, :2]) for i in group])
        assert len(np.unique(rows)) == len(rows)
        assert len({bool(pieces[i, 4] == bands.FULL) for i in group}) == 1


def test_equal_documents_are_one_call_and_large_ones_go_alone():
    tiles = np.array([[a, a + 8, a, a + 8, 0, bands.NO_LIMIT] for a in range(0, 512, 8)])
    handle = cpu.prepare(tiles, 512, 512, CPU)
    assert len(handle.calls) == 1 and handle.whole
    large = np.array([[a, a + LARGE, a, a + LARGE, 1] for a in (0, LARGE)])
    assert len(batches(large, 2 * LARGE)) == 2


def test_layers_keep_apart_what_overlaps():
    intervals = np.array([[0, 4], [2, 6], [6, 8], [0, 8], [0, 1]])
    assert layers(intervals, np.zeros(5, np.int64), 8).tolist() == [0, 1, 0, 2, 3]
    assert layers(intervals, np.arange(5), 8).tolist() == [0] * 5


def test_a_thousand_documents_are_few_varlen_calls():
    """Two windows (causal and full), whatever the number of documents."""
    cu = np.arange(0, 7001, 7)
    tiles = np.array([[a + 2, b, a, b - 1, 0, bands.NO_LIMIT] for a, b in itertools.pairwise(cu)])
    assert len(cuda.prepare(tiles, 7000, 7000, CPU, DenseVarlen()).calls) == 2


# ---- Choosing. ----


def test_documents_of_one_token_share_the_call_of_the_others():
    """Such a token sees all its keys, which is causal as well as full."""
    start = np.array([0, 1, 5, 6])
    tiles = np.column_stack([start, [1, 5, 6, 9], start, [1, 5, 6, 9], np.zeros(4), np.full(4, bands.NO_LIMIT)])
    handle = cuda.prepare(tiles.astype(np.int64), 9, 9, torch.device("cpu"), cuda.TorchVarlen())
    assert len(handle.calls) == 1 and handle.whole


def test_a_backend_is_chosen_by_device_or_by_name():
    assert kernel_for(CPU) is cpu and kernel_for(CPU, "reference") is reference
    assert kernel_for(torch.device("cuda")) is cuda
    with pytest.raises(ValueError, match="needs tensors on cuda; got cpu"):
        kernel_for(CPU, "cuda")
    with pytest.raises(ValueError, match="cpu, cuda, reference; got kernel='fast'"):
        kernel_for(CPU, "fast")
    with pytest.raises(ValueError, match="No attention kernel for meta"):
        kernel_for(torch.device("meta"))
    assert set(KERNELS) == {"cpu", "cuda", "reference"}


def test_cuda_says_what_it_cannot_do():
    q, _, v, _ = tensors(4, 4, 1, 1)
    with pytest.raises(ValueError, match=r"fp16 or bf16.*torch.float64 and 5"):
        cuda.check(q, v, Scores(scale=1.0))
    q, _, v, _ = tensors(4, 4, 1, 1, torch.bfloat16, dim=192, value_dim=264)
    with pytest.raises(ValueError, match="head dim of 8, 16, … 256; got torch.bfloat16 and 264"):
        cuda.check(q, v, Scores(scale=1.0))


def flash_forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left,
    window_size_right,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """aten::_flash_attention_forward, dense."""
    assert dropout == 0.0 and causal == ((window_size_left, window_size_right) == (-1, 0))
    call = SimpleNamespace(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, window=(window_size_left, window_size_right))
    out, lse = DenseVarlen().forward(call, q, k, v, Scores(scale=scale))
    nothing = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), lse, nothing, nothing, out.new_empty(0)


def flash_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """aten::_flash_attention_backward, dense."""
    call = SimpleNamespace(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, window=(window_size_left, window_size_right))
    return tuple(x.to(q.dtype) for x in DenseVarlen().backward(call, dout, q, k, v, out, lse, Scores(scale=scale)))


@pytest.mark.parametrize("hi", [bands.NO_LIMIT, 5])
def test_torch_varlen_is_called_as_it_is_declared(hi):
    """torch's own varlen_attn and its backward operator, over stand-ins for the two CUDA kernels beneath them."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    try:
        tiles = np.array([[2, 12, 0, 9, 0, hi], [12, 20, 9, 18, 0, hi]])
        q, k, v, dout = tensors(20, 18, 4, 2, torch.bfloat16, dim=8)
        out, lse, *grads = expected(mask_of(tiles, 20, 18) > 0, q, k, v, dout, 0.3)
        handle = cuda.prepare(tiles, 20, 18, CPU, cuda.TorchVarlen())
        got_out, got_lse = cuda.forward(handle, q, k, v, Scores(scale=0.3))
        got = cuda.backward(handle, dout, q, k, v, out.bfloat16(), lse.float(), Scores(scale=0.3))
    finally:
        library._destroy()
    assert (got_lse - take(lse.transpose(0, 1), handle.q_rows).transpose(0, 1)).abs().max() <= 1e-5
    wanted = (take(out, handle.q_rows), take(grads[0], handle.q_rows), *(take(g, handle.k_rows) for g in grads[1:]))
    for a, b in zip((got_out, *got), wanted, strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()


# ---- The contract, each backend in low precision on its own device. ----


class VarlenEngine:
    """The CUDA backend over one of its two engines."""

    def __init__(self, engine):
        self.engine = engine

    def check(self, q, v, scores):
        cuda.check(q, v, scores, self.engine)

    def prepare(self, tiles, num_q, num_k, device):
        return cuda.prepare(tiles, num_q, num_k, device, self.engine)

    forward = staticmethod(cuda.forward)
    backward = staticmethod(cuda.backward)


EVERY = {
    "cpu": (cpu, "cpu"),
    "reference": (reference, "cpu"),
    "torch varlen": (VarlenEngine(cuda.TorchVarlen()), "cuda"),
    "flash-attn 2": (VarlenEngine(cuda.FlashAttention2()), "cuda"),
}


def documents(*lengths, window=None):
    cu = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return [[a, b, a, b, 0, bands.NO_LIMIT if window is None else window - 1] for a, b in itertools.pairwise(cu)]


SHAPES = {
    "GQA": {"tiles": documents(1, 2, 33, 130, 7), "heads": (4, 2)},
    "MQA": {"tiles": documents(40, 60), "heads": (4, 1)},
    "MHA, long": {"tiles": documents(300), "heads": (2, 2)},
    "more keys than queries": {"tiles": [[0, 30, 0, 90, -60, bands.NO_LIMIT]], "heads": (4, 2)},
    "more queries than keys": {"tiles": [[0, 90, 0, 30, 0, bands.NO_LIMIT], [0, 90, 30, 41, -80, 9]], "heads": (4, 2)},
    "rows without keys": {"tiles": [[20, 50, 10, 70, 0, bands.NO_LIMIT]], "heads": (4, 2)},
    "a window": {"tiles": documents(1, 20, 130, window=16), "heads": (4, 2)},
    "values of 16": {"tiles": documents(20, 70), "heads": (4, 2), "value_dim": 16},
    "values of 64": {"tiles": documents(20, 70), "heads": (4, 4), "value_dim": 64},
    "capped scores": {"tiles": documents(20, 70), "heads": (4, 2), "softcap": 1.5},
}


def naive_bf16(mask, q, k, v, dout, scale, softcap):
    """out, dq, dk, dv as plain products and softmax in bf16 give them; rows without keys give 0."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v)]
    scores = q.transpose(0, 1) @ wide[0].transpose(1, 2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    visible, some = torch.from_numpy(mask), torch.from_numpy(mask.any(1))
    scores = scores.masked_fill(~(visible | ~some[:, None]), -torch.inf)
    out = (scores.softmax(-1) @ wide[1]).transpose(0, 1) * some[:, None, None]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", EVERY)
def test_the_contract_in_bf16(name, shape):
    """FlashAttention's rule: |ours - R| <= 2 |P - R| + 2 |(R + 0.3 - 0.3) - R|, R exact, P naive bf16."""
    kernel, device = EVERY[name]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{name} needs a GPU")
    if name == "flash-attn 2" and find_spec("flash_attn") is None:
        pytest.skip("flash-attn 2 is not installed")
    tiles, softcap, dim = np.array(shape["tiles"]), shape.get("softcap"), 32
    num_q, num_k = 100 if shape["tiles"][0][0] else tiles[:, 1].max(), tiles[:, 3].max()
    inputs = tensors(num_q, num_k, *shape["heads"], torch.bfloat16, dim, value_dim=shape.get("value_dim"))
    mask, scale = mask_of(tiles, num_q, num_k) > 0, 0.2
    on = [x.to(device) for x in inputs]
    if softcap is not None and name in ("cpu", "torch varlen"):
        with pytest.raises(ValueError, match="does not cap scores; got softcap=1.5"):
            kernel.check(on[0], on[2], Scores(scale=scale, softcap=softcap))
        return
    kernel.check(on[0], on[2], Scores(scale=scale, softcap=softcap))
    exact_out, exact_lse, *exact = expected(mask, *inputs, scale, softcap)
    final = (exact_out.bfloat16().to(device), exact_lse.float().to(device))
    out, lse, *grads = (x.cpu() for x in run(kernel, tiles, *on, scale, final, softcap, torch.device(device)))
    assert torch.equal(lse.isfinite(), exact_lse.isfinite()) and torch.equal(
        lse.isfinite().any(0), torch.from_numpy(mask.any(1))
    )
    assert torch.allclose(lse.double()[exact_lse.isfinite()], exact_lse[exact_lse.isfinite()], atol=1e-3, rtol=1e-3)
    assert (out[~torch.from_numpy(mask.any(1))] == 0).all()
    plain = naive_bf16(mask, *inputs, scale, softcap)
    for ours, want, theirs in zip([out, *grads], [exact_out, *exact], plain, strict=True):
        rounding = ((want.bfloat16() + 0.3 - 0.3).double() - want).abs().max()
        assert (ours.double() - want).abs().max() <= 2 * (theirs.double() - want).abs().max() + 2 * rounding


# ---- Values of another head dim, capped scores: exact. ----


@pytest.mark.parametrize("kernel", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("dim,value_dim", [(5, 3), (3, 5), (8, 1)])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(tiles=disjoint_tiles(24, 20), heads=st.sampled_from([(4, 2), (4, 1), (2, 2)]))
def test_values_of_another_head_dim_are_exact(kernel, dim, value_dim, tiles, heads):
    q, k, v, dout = tensors(24, 20, *heads, dim=dim, value_dim=value_dim)
    want = expected(mask_of(tiles, 24, 20) > 0, q, k, v, dout, 0.7)
    got = run(kernel, tiles, q, k, v, dout, 0.7)
    assert got[0].shape[2] == value_dim and got[2].shape[2] == got[3].shape[2] == dim
    assert_close(got, want, 1e-12)


@pytest.mark.parametrize("kernel", [reference, CudaLayout()], ids=["reference", "cuda layout"])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(tiles=disjoint_tiles(24, 20), softcap=st.sampled_from([0.3, 1.0, 30.0]))
def test_capped_scores_are_exact(kernel, tiles, softcap):
    q, k, v, dout = tensors(24, 20, 4, 2)
    want = expected(mask_of(tiles, 24, 20) > 0, q, k, v, dout, 0.7, softcap)
    assert_close(run(kernel, tiles, q, k, v, dout, 0.7, softcap=softcap), want, 1e-12)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan")])
def test_a_cap_that_bounds_nothing_is_refused(softcap):
    with pytest.raises(ValueError, match="must be positive"):
        Scores(scale=1.0, softcap=softcap)


def test_flash_attention_2_is_called_as_it_is_declared(monkeypatch):
    """Over a stand-in for its two private functions, as flash-attn 2.7 declares them."""
    asked = []

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        assert dropout_p == 0.0 and causal == ((window_size_left, window_size_right) == (-1, 0))
        asked.append(softcap)
        call = SimpleNamespace(
            cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
            window=(window_size_left, window_size_right),
        )  # fmt: skip
        out, lse = DenseVarlen().forward(call, q, k, v, Scores(scale=softmax_scale, softcap=softcap or None))
        return out.to(q.dtype), lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        assert deterministic and alibi_slopes is None and softmax_lse.shape == (q.shape[1], len(q))
        call = SimpleNamespace(
            cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=max_seqlen_q, max_k=max_seqlen_k,
            window=(window_size_left, window_size_right),
        )  # fmt: skip
        scores = Scores(scale=softmax_scale, softcap=softcap or None)
        for x, part in zip(
            (dq, dk, dv), DenseVarlen().backward(call, dout, q, k, v, out, softmax_lse, scores), strict=True
        ):
            x.copy_(part)

    module = SimpleNamespace(
        _flash_attn_varlen_forward=_flash_attn_varlen_forward, _flash_attn_varlen_backward=_flash_attn_varlen_backward
    )
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_interface=module))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    tiles = np.array([[2, 12, 0, 9, 0, 5], [12, 20, 9, 18, 0, 5]])
    q, k, v, dout = tensors(20, 18, 4, 2, dim=8, value_dim=6)
    for softcap in (None, 0.8):
        want = expected(mask_of(tiles, 20, 18) > 0, q, k, v, dout, 0.3, softcap)
        assert_close(run(VarlenEngine(cuda.FlashAttention2()), tiles, q, k, v, dout, 0.3, softcap=softcap), want, 1e-12)
    assert set(asked) == {0.0, 0.8}
