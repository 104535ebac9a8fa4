"""What ring-flash-attn's distributed tests run, by its own names and with its inputs, held to flash-attention's tolerance.

Those tests print differences and assert nothing. The inputs are theirs: documents (a quarter as long, so that a dense
reference is quick: `benchmarks/peer_tests.py` runs the tests themselves at full length), 5 heads of 128 (8 for llama3), bf16,
the seed of rank 0, qkv packed; KV packed, GQA and documents that no rank count divides are added. The rule is flash-attention's: with R in higher precision and P as
plain bf16 matmuls give it, |ours - R| <= 2 |P - R| + 2 |(R + 0.3 - 0.3) - R|, largest values each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from equipoise.packing.shards import contiguous, zigzag
from torch import Tensor

from tests.attention.oracle import Case, naive, one_process
from tests.attention.peers import ring_flash_attn as names

DOCUMENTS = {"zigzag_ring": (32, 280, 748), "ring": (30, 282, 746), "llama3": (30, 282, 746)}
"""A quarter of those of their tests: 128, 1120, 2992 and 120, 1128, 2984."""
SEED = 42


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One of their functions."""

    name: str
    packed: int = 3
    """Tensors in one: 3 qkv, 2 kv, 1 none."""


def shards_of(name: str, cu: np.ndarray, ranks: int):
    cut = contiguous if name == "llama3" else zigzag if name == "zigzag_ring" else names.ring_shards
    return cut(cu, ranks)


def local(x: Tensor, name: str, cu: np.ndarray, rank: int, ranks: int) -> Tensor:
    return x[torch.from_numpy(shards_of(name, cu, ranks).positions(rank))]


def attend_by_name(rank: int, ranks: int, case: Case, peer: Peer) -> list[Tensor]:
    """out, dq, dk, dv and lse of this rank's tokens."""
    cu = case.cu_seqlens
    q, k, v, dout = (local(x, peer.name, cu, rank, ranks) for x in case.inputs())
    if peer.packed == 3:
        leaves, suffix = [torch.stack([q, k, v], 1)], "_qkvpacked"
    elif peer.packed == 2:
        leaves, suffix = [q, torch.stack([k, v], 1)], "_kvpacked"
    else:
        leaves, suffix = [q, k, v], ""
    leaves = [x.requires_grad_() for x in leaves]
    function = getattr(names, f"{peer.name}_flash_attn_varlen{suffix}_func")
    boundaries = torch.from_numpy(cu).to(torch.int32)
    if peer.name == "llama3":
        *lengths, mine = names.llama3_flash_attn_prepare_cu_seqlens(boundaries, True, rank, ranks)
        options = {"heads_k_stride": 1, "local_k_slice": mine}
    else:
        lengths, options = [boundaries // ranks, int(max(case.lengths)) // ranks], {}
    out, lse, _ = function(
        *leaves,
        *lengths,
        **options,
        dropout_p=0,
        causal=True,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=True,
    )
    out.backward(dout)
    grads = [part for x in leaves for part in (x.grad.unbind(1) if x.grad.ndim == 4 else [x.grad])]
    return [out.detach(), *grads, lse]


@functools.cache
def reference(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """R and P of out, dq, dk, dv, and R of lse [H, T]."""
    q, k, _, _ = (x.float() for x in case.inputs())
    lse = []
    for start, stop in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True):
        keys = k[start:stop].repeat_interleave(case.heads // case.kv_heads, 1)
        scores = torch.einsum("thd,shd->hts", q[start:stop], keys) * case.dim**-0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        lse.append(scores.masked_fill(hidden, -torch.inf).logsumexp(-1))
    return one_process(case, torch.float32), naive(case), torch.cat(lse, 1)


def within_rule(got: Tensor, want: Tensor, plain: Tensor) -> None:
    """flash-attention's rule."""
    rounded = want.to(plain.dtype)
    noise = (rounded + 0.3 - 0.3 - rounded).abs().max()
    bound = 2 * (plain.float() - want).abs().max() + 2 * noise.float()
    error = (got.float() - want).abs().max()
    assert error <= bound, f"error {error:.3g}, allowed {bound:.3g}"


def check(ranks, world: int, case: Case, peer: Peer) -> None:
    want, plain, lse = reference(case)
    results = ranks.run(attend_by_name, world, case, peer)
    for rank, (*got, got_lse) in enumerate(results):
        for x, R, P in zip(got, want, plain, strict=True):
            within_rule(x, *(local(y, peer.name, case.cu_seqlens, rank, world) for y in (R, P)))
        mine = local(lse.T, peer.name, case.cu_seqlens, rank, world).T
        # bf16 products are summed in fp32; lse stays in fp32.
        torch.testing.assert_close(got_lse, mine, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_their_inputs_on_two_ranks(ranks, name: str) -> None:
    shape = {"heads": 5, "kv_heads": 5, "dim": 8 if name == "llama3" else 128}
    check(ranks, 2, Case(lengths=DOCUMENTS[name], dtype=torch.bfloat16, seed=SEED, **shape), Peer(name=name))


@pytest.mark.parametrize("packed", [2, 1])
@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_grouped_heads_on_four_ranks(ranks, name: str, packed: int) -> None:
    lengths = (31, 282, 747) if name == "llama3" else (32, 280, 748)
    case = Case(lengths=lengths, dtype=torch.bfloat16, seed=SEED, heads=4, kv_heads=2, dim=16)
    check(ranks, 4, case, Peer(name=name, packed=packed))


@pytest.mark.parametrize("name", ["ring", "zigzag_ring"])
def test_batches(ranks, name: str) -> None:
    case = Case(lengths=(478, 478), heads=5, kv_heads=5, dim=128, dtype=torch.bfloat16, seed=SEED)
    want, plain, lse = reference(case)
    for rank, (*got, got_lse) in enumerate(ranks.run(attend_batch_by_name, 2, case, name)):
        for x, R, P in zip(got, want, plain, strict=True):
            within_rule(x, *(local(y, name, case.cu_seqlens, rank, 2) for y in (R, P)))
        torch.testing.assert_close(got_lse, local(lse.T, name, case.cu_seqlens, rank, 2).T, rtol=0, atol=1e-4)


def attend_batch_by_name(rank: int, ranks: int, case: Case, name: str) -> list[Tensor]:
    """The same of a batch of two rows, as tokens."""
    q, k, v, dout = (local(x, name, case.cu_seqlens, rank, ranks).unflatten(0, (2, -1)) for x in case.inputs())
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    function = getattr(names, f"{name}_flash_attn_qkvpacked_func")
    out, lse, _ = function(qkv, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    out.backward(dout)
    grads = (x.flatten(0, 1) for x in qkv.grad.unbind(2))
    return [out.detach().flatten(0, 1), *grads, lse.transpose(0, 1).flatten(1, 2)]


def test_boundaries_of_llama3() -> None:
    cu = torch.tensor([0, 7, 14, 16], dtype=torch.int32)
    for rank in range(8):
        cu_q, cu_k, max_q, max_k, mine = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 8)
        assert max_q == (cu_q[1:] - cu_q[:-1]).max() and max_k == (cu_k[1:] - cu_k[:-1]).max()
        assert torch.arange(16)[mine].tolist() == list(range(16))


def test_what_it_cannot_do_is_refused() -> None:
    q = torch.randn(4, 1, 8)
    with pytest.raises(ValueError, match="without dropout"):
        names.run(q, q, q, [0, 4], zigzag, names.ring_plan, False, 0.0, (-1, -1), None, False)
