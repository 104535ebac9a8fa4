"""The peers of `attention.py`, run on CPU and gloo over the very block kernel that equipoise uses there.

`flash_attn` is a module that these peers import and that no CPU has: `stand_in` makes one out of equipoise's CPU kernel,
so that peers gain by its batches of small documents as we do, and what is compared is everything around the kernel. What
the kernel prepares from cu_seqlens is kept between calls, so that peers are not charged for it either; results are copied
to the buffers that flash-attn would have written to.

Each of `contenders` is one way to attend over a pack: the positions that this rank holds, and a function of q, k, v
[tokens, heads, dim]. A peer that is not installed or cannot take the pack is left out, with the reason. Divisibility is
that of the peers: documents of a multiple of 2 x ranks tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from equipoise.attention.bands import NO_LIMIT
from equipoise.attention.counting import Counter, Counts
from equipoise.attention.kernels.contract import Kernel, Scores, covers
from equipoise.packing.shards import Shards, contiguous, from_pieces, zigzag
from torch import Tensor

INSTALL = (
    "pip install --no-deps ring-flash-attn==0.1.8 yunchang==0.6.4 einops hjson py-cpuinfo msgpack && "
    "DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-deps --no-build-isolation deepspeed==0.19.8"
)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    name: str
    positions: Tensor
    """int64[t], what this rank holds, in its order."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """q [t, H, D], k and v [t, K, D] → out [t, H, D]."""
    ours: bool = False


class Varlen:
    """flash-attn's varlen call over a block kernel; bottom-right causal."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._handles: dict[Any, Any] = {}

    def handle(self, cu_q: Any, cu_k: Any, causal: bool) -> Any:
        key = (tuple(_listed(cu_q)), tuple(_listed(cu_k)), causal)
        if key not in self._handles:
            q, k = np.array(key[0]), np.array(key[1])
            lo = q[1:] - k[1:] if causal else np.full(len(q) - 1, -NO_LIMIT)
            tiles = np.stack([q[:-1], q[1:], k[:-1], k[1:], lo, np.full(len(q) - 1, NO_LIMIT)], axis=1)
            tiles = tiles[(q[1:] > q[:-1]) & (k[1:] > k[:-1])]
            self._handles[key] = self.kernel.prepare(tiles, int(q[-1]), int(k[-1]), CPU)
        return self._handles[key]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, scale: float, causal: bool):
        handle = self.handle(cu_q, cu_k, causal)
        assert covers(handle.q_rows, len(q)), "a query row without a key"
        return self.kernel.forward(handle, q, k, v, Scores(scale=scale))

    def backward(self, operands: tuple[Tensor, ...], cu_q: Any, cu_k: Any, scale: float, causal: bool):
        handle = self.handle(cu_q, cu_k, causal)
        assert covers(handle.k_rows, len(operands[2])), "a key row without a query"
        return self.kernel.backward(handle, *operands, Scores(scale=scale))


class Whole(torch.autograd.Function):
    """Causal attention of each document on one process: the kernel alone."""

    @staticmethod
    def forward(ctx, q, k, v, cu, varlen, scale):
        out, lse = varlen.forward(q, k, v, cu, cu, scale, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = varlen, cu, scale
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        varlen, cu, scale = ctx.rest
        dq, dk, dv = varlen.backward((dout, q, k, v, out, lse), cu, cu, scale, True)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def stand_in(kernel: Kernel) -> dict[str, ModuleType]:
    """Modules flash_attn and flash_attn.flash_attn_interface, as of flash-attn 2.8, for `sys.modules`."""
    varlen = Varlen(kernel)

    # Peers ask for the names of the arguments, so they are flash-attn's.
    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        out, lse = varlen.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
        return out.to(q.dtype), lse, None, None

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    ):
        grads = varlen.backward((dout, q, k, v, out, softmax_lse), cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse = varlen.forward(*rows, _equal(q), _equal(k), softmax_scale, causal)
        return out.to(q.dtype).view(q.shape), _batched(lse, q), None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    ):
        rows = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        lse = softmax_lse.transpose(0, 1).flatten(1, 2)
        grads = varlen.backward((*rows, lse), _equal(q), _equal(k), softmax_scale, causal)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad.view(buffer.shape))

    def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **_):
        out, lse = Whole.apply(*qkv.unbind(1), cu_seqlens, varlen, qkv.shape[-1] ** -0.5)
        return out, lse, None

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, **_):
        assert causal, "the stand-in differentiates causal attention only"
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return Whole.apply(*(x.flatten(0, 1) for x in (q, k, v)), _equal(q), varlen, scale)[0].view(q.shape)

    def flash_attn_qkvpacked_func(qkv, **_):
        q, k, v = qkv.unbind(2)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = Whole.apply(*rows, _equal(q), varlen, q.shape[-1] ** -0.5)
        return out.view(q.shape), _batched(lse, q), None

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = "2.8.0"  # type: ignore[attr-defined]
    package.__path__ = []
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    for function in [x for x in locals().values() if callable(x) and getattr(x, "__module__", "") == __name__]:
        if "flash_attn" in getattr(function, "__name__", ""):
            for module in (package, interface):
                setattr(module, function.__name__, function)
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def install(kernel: Kernel) -> None:
    """Put the stand-in where peers import flash_attn from; before the first of them is imported."""
    sys.modules.update(stand_in(kernel))
    # The adapter to transformers does not import with transformers 5.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules["ring_flash_attn.adapters"] = adapters


def missing() -> list[str]:
    """Peers that are not installed."""
    return [name for name in ("ring_flash_attn", "yunchang", "deepspeed", "einops") if find_spec(name) is None]


def per_document(cu: np.ndarray, ranks: int) -> Shards:
    """Rank r holds the r-th of `ranks` equal pieces of each document."""
    pieces = np.arange(ranks)
    length, document = np.diff(cu), np.repeat(np.arange(len(cu) - 1), ranks)
    edges = cu[:-1, None] + length[:, None] * np.arange(ranks + 1) // ranks
    rank = np.tile(pieces, len(cu) - 1)
    return from_pieces(cu, ranks, edges[:, :-1].ravel(), edges[:, 1:].ravel(), document, rank)


def peers(cu: np.ndarray, rank: int, ranks: int, heads: tuple[int, int], kernel: Kernel) -> Iterator[Contender]:
    """Those that are installed and can take this pack. heads: of queries and of KV. All ranks list them alike."""
    absent = missing()
    if "ring_flash_attn" not in absent:
        yield from _ring_flash_attn(cu, rank, ranks)
    if len(cu) == 2:
        yield from _torch(cu, rank, ranks)
        if "yunchang" not in absent:
            yield from _yunchang(cu, rank, ranks, heads)
    if not {"deepspeed", "einops"} & set(absent) and heads[1] % ranks == 0:
        yield _deepspeed(cu, rank, ranks, kernel)


def _ring_flash_attn(cu: np.ndarray, rank: int, ranks: int) -> Iterator[Contender]:
    import ring_flash_attn as peer

    local = torch.from_numpy(cu // ranks).to(torch.int32)
    longest = int(np.diff(cu).max()) // ranks
    group = dist.group.WORLD

    def ring(q, k, v):
        return peer.ring_flash_attn_varlen_func(q, k, v, local, longest, causal=True, group=group)

    def zigzagged(q, k, v):
        return peer.zigzag_ring_flash_attn_varlen_func(q, k, v, local, longest, causal=True, group=group)

    whole = torch.from_numpy(cu).to(torch.int32)
    prepared = peer.llama3_flash_attn_prepare_cu_seqlens(whole, True, rank, ranks)

    def llama3(q, k, v):
        *lengths, mine = prepared
        return peer.llama3_flash_attn_varlen_func(
            q, k, v, *lengths, heads_k_stride=k.shape[1], local_k_slice=mine, causal=True, group=group
        )

    yield Contender(name="ring-flash-attn ring", positions=_held(per_document(cu, ranks), rank), attend=ring)
    yield Contender(name="ring-flash-attn zigzag", positions=_held(zigzag(cu, ranks), rank), attend=zigzagged)
    yield Contender(name="ring-flash-attn llama3", positions=_held(contiguous(cu, ranks), rank), attend=llama3)


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, module, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = module._templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True, scale=scale)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = module, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        module, scale = ctx.rest
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        grads = module._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            op,
            grad_out=dout,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
            scale=scale,
        )
        return (*grads[:3], None, None)


def _torch(cu: np.ndarray, rank: int, ranks: int) -> Iterator[Contender]:
    from torch.distributed.tensor.experimental._context_parallel import _attention as module

    for method in ("alltoall", "allgather"):

        def ring(q, k, v, method=method):
            module.set_rotate_method(method)
            rows = (x.transpose(0, 1)[None] for x in (q, k, v))
            return _TorchRing.apply(*rows, module, q.shape[-1] ** -0.5)[0].transpose(0, 1)

        yield Contender(name=f"torch ring, {method}", positions=_held(zigzag(cu, ranks), rank), attend=ring)


def _yunchang(cu: np.ndarray, rank: int, ranks: int, heads: tuple[int, int]) -> Iterator[Contender]:
    import yunchang

    yunchang.set_seq_parallel_pg(1, ranks, rank, ranks)
    hybrid = yunchang.LongContextAttention(ring_impl_type="zigzag")
    ulysses = yunchang.UlyssesAttention(dist.group.WORLD)

    def batched(module):
        return lambda q, k, v: module(q[None], k[None], v[None], causal=True)[0]

    yield Contender(name="yunchang zigzag", positions=_held(zigzag(cu, ranks), rank), attend=batched(hybrid))
    if heads[1] % ranks == 0:
        yield Contender(name="yunchang Ulysses", positions=_held(contiguous(cu, ranks), rank), attend=batched(ulysses))


def _deepspeed(cu: np.ndarray, rank: int, ranks: int, kernel: Kernel) -> Contender:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    varlen, boundaries = Varlen(kernel), cu.tolist()

    def local(q, k, v):
        return Whole.apply(q[0], k[0], v[0], boundaries, varlen, q.shape[-1] ** -0.5)[0][None]

    module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return Contender(
        name="DeepSpeed Ulysses",
        positions=_held(contiguous(cu, ranks), rank),
        attend=lambda q, k, v: module(q[None], k[None], v[None], 0)[0],
    )


@contextmanager
def counted(counter: Counter) -> Iterator[None]:
    """Count the bytes that peers send: those of point to point as they are, those of collectives as a ring sends them."""
    kept = {
        name: getattr(dist, name) for name in ("batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor")
    }
    ranks = dist.get_world_size()

    def batch_isend_irecv(operations):
        sent = sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        counter.add(Counts(bytes_sent=sent, exchanges=1))
        return kept["batch_isend_irecv"](operations)

    def all_gather_into_tensor(output, x, *rest, **options):
        counter.add(Counts(bytes_sent=(ranks - 1) * x.nbytes, exchanges=1))
        return kept["all_gather_into_tensor"](output, x, *rest, **options)

    def reduce_scatter_tensor(output, x, *rest, **options):
        counter.add(Counts(bytes_sent=(ranks - 1) * output.nbytes, exchanges=1))
        return kept["reduce_scatter_tensor"](output, x, *rest, **options)

    try:
        for function in (batch_isend_irecv, all_gather_into_tensor, reduce_scatter_tensor):
            setattr(dist, function.__name__, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def _held(shards: Shards, rank: int) -> Tensor:
    return torch.from_numpy(shards.positions(rank))


def _listed(cu: Any) -> list[int]:
    return cu.tolist() if isinstance(cu, Tensor) else list(cu)


def _equal(x: Tensor) -> list[int]:
    """Boundaries of a batch [B, S, …] laid end to end."""
    return [i * x.shape[1] for i in range(len(x) + 1)]


def _batched(lse_HT: Tensor, q: Tensor) -> Tensor:
    """[H, B · S] → [B, H, S]."""
    return lse_HT.unflatten(1, q.shape[:2]).transpose(0, 1)
