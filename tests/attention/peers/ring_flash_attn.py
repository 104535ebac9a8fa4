"""equipoise under the names of ring-flash-attn 0.1.8, so that its distributed tests drive it (benchmarks/peer_tests.py).

For tests, no part of the package. What differs: `llama3_flash_attn_prepare_cu_seqlens` returns the boundaries of all
documents, since a plan wants those; options that attention here does not have (dropout, windows, alibi) are taken at their
neutral values only; the log-sum-exp that `return_attn_probs` asks for is computed by a forward of its own.
"""

# T tokens at home, H query heads, K key heads, D head dim, B rows of a batch, S tokens of a row at home.
from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch
import torch.distributed as dist
from equipoise.attention.executor import attend
from equipoise.attention.gather import gather_plan
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.contract import Scores, kernel_for
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.attention.stages import prepare, run_forward
from equipoise.packing.shards import contiguous, from_pieces, striped, zigzag


@cache
def groups() -> CpGroups:
    return CpGroups(dp=1, cp=dist.get_world_size())


def ring_shards(cu, ranks):
    """Rank r holds the r-th of equal pieces of each document."""
    edges = cu[:-1, None] + np.diff(cu)[:, None] * np.arange(ranks + 1) // ranks
    document, rank = np.repeat(np.arange(len(cu) - 1), ranks), np.tile(np.arange(ranks), len(cu) - 1)
    return from_pieces(cu, ranks, edges[:, :-1].ravel(), edges[:, 1:].ravel(), document, rank)


@cache
def plan_of(cu, cut, planner):
    shards = cut(np.array(cu, dtype=np.int64), dist.get_world_size())
    return planner(shards, groups().cp_ranks, groups().cp_index)


def run(q, k, v, cu, cut, planner, causal, dropout_p, window_size, alibi_slopes, return_attn_probs, softmax_scale=None):
    """q [T, H, D], k and v [T, K, D], cu: boundaries of whole documents → out, or (out, lse [H, T], None)."""
    if not causal or dropout_p or tuple(window_size) != (-1, -1) or alibi_slopes is not None:
        raise ValueError("Causal attention without dropout, windows and alibi is what this module can do.")
    plan, scale = plan_of(tuple(cu), cut, planner), softmax_scale or q.shape[-1] ** -0.5
    out = attend(plan, q, k, v, groups(), scale)
    if not return_attn_probs:
        return out
    with torch.no_grad():
        made = prepare(lower(plan, groups().cp_index), kernel_for(q.device), q.device)
        journey = made.journey((k.detach(), v.detach()), groups()[plan.ranks])
        return out, run_forward(made, journey, q.detach(), Scores(scale=scale), None)[1], None


def varlen(cut):
    """A function of local boundaries, as the rings of ring-flash-attn take them: 1/ranks of those of whole documents."""

    def attention(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        cu = (cu_seqlens * dist.get_world_size()).tolist()
        return run(
            q,
            k,
            v,
            cu,
            cut,
            ring_plan,
            causal,
            dropout_p,
            window_size,
            alibi_slopes,
            return_attn_probs,
            softmax_scale,
        )

    return attention


def batched(attention):
    """The same of a batch [B, S, heads, D], each row of which is a document."""

    def of_batch(q, k, v, *rest, return_attn_probs=False, **options):
        B, S = q.shape[:2]
        boundaries, rows = torch.arange(B + 1) * S, (x.flatten(0, 1) for x in (q, k, v))
        out, lse, _ = attention(*rows, boundaries, S, *rest, return_attn_probs=True, **options)
        out = out.unflatten(0, (B, S))
        return (out, lse.unflatten(1, (B, S)).transpose(0, 1), None) if return_attn_probs else out

    return of_batch


def kvpacked(attention, dim):
    return lambda q, kv, *rest, **options: attention(q, *kv.unbind(dim), *rest, **options)


def qkvpacked(attention, dim):
    return lambda qkv, *rest, **options: attention(*qkv.unbind(dim), *rest, **options)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return cu_seqlens, cu_seqlens, longest, longest, slice(0, int(cu_seqlens[-1]))


def llama3_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    heads_k_stride,
    local_k_slice,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    cu = cu_seqlens_q.tolist()
    return run(
        q,
        k,
        v,
        cu,
        contiguous,
        gather_plan,
        causal,
        dropout_p,
        window_size,
        alibi_slopes,
        return_attn_probs,
        softmax_scale,
    )


ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_func = varlen(ring_shards), varlen(zigzag)
ring_flash_attn_func, zigzag_ring_flash_attn_func, stripe_flash_attn_func = map(
    batched, (ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_func, varlen(partial(striped, stripe=1)))
)
ring_flash_attn_varlen_kvpacked_func = kvpacked(ring_flash_attn_varlen_func, 1)
ring_flash_attn_varlen_qkvpacked_func = qkvpacked(ring_flash_attn_varlen_func, 1)
zigzag_ring_flash_attn_varlen_kvpacked_func = kvpacked(zigzag_ring_flash_attn_varlen_func, 1)
zigzag_ring_flash_attn_varlen_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_varlen_func, 1)
llama3_flash_attn_varlen_kvpacked_func = kvpacked(llama3_flash_attn_varlen_func, 1)
llama3_flash_attn_varlen_qkvpacked_func = qkvpacked(llama3_flash_attn_varlen_func, 1)
ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = (
    kvpacked(ring_flash_attn_func, 2),
    qkvpacked(ring_flash_attn_func, 2),
)
zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = (
    kvpacked(zigzag_ring_flash_attn_func, 2),
    qkvpacked(zigzag_ring_flash_attn_func, 2),
)
stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = (
    kvpacked(stripe_flash_attn_func, 2),
    qkvpacked(stripe_flash_attn_func, 2),
)
