"""Per-token outputs back in documents: against the rows of each document, for every rule, padded packs and fillers.

python -m pytest tests/attention/test_documents.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equipoise import BalancedBatchSampler, CpGroups, Lengths, ThdBatch, ThdCollator, recipe
from equipoise.attention.documents import gather_documents
from equipoise.loaders.dataset import PlannedDataset
from equipoise.loaders.shapes import Shapes

GROUPS: dict[tuple[int, int], CpGroups] = {}
"""Groups of this rank process: built once, as a training run does."""
RULES = ("zigzag", "zigzag_sequence", "contiguous", "striped", "adaptive", "mixed", "dacp")


def groups_of(dp: int, cp: int) -> CpGroups:
    if (dp, cp) not in GROUPS:
        GROUPS[dp, cp] = CpGroups(dp, cp)
    return GROUPS[dp, cp]


def documents(number: int = 9) -> list[np.ndarray]:
    """Token ids that tell where they are: document · 1000 + position."""
    lengths = [1, 5, 13, 2, 31, 7, 1, 17, 3, 40, 11][:number]
    return [1000 * d + np.arange(n) for d, n in enumerate(lengths)]


def batches(rank: int, dp: int, cp: int, shard: str, pad_tp: int = 0, shapes: Shapes | None = None) -> list[ThdBatch]:
    rows = documents()
    pack = {"pack": "gds", "place": "gds"} if shard == "dacp" else {}
    chosen = recipe("static", shard=shard, attend="none", **pack)
    sampler = BalancedBatchSampler(
        Lengths.from_array(np.array([len(x) for x in rows])),
        chosen,
        max_tokens_per_rank=48,
        dp=dp,
        cp=cp,
        rank=rank,
        documents_per_step=9,
        too_long="split",
        pad_tp=pad_tp,
    )
    collate = ThdCollator(chosen, shapes=shapes)
    dataset = PlannedDataset([{"input_ids": x} for x in rows])
    return [collate(dataset.__getitems__(specs)) for specs in sampler]


def expected(batch: ThdBatch) -> list[torch.Tensor]:
    """The ids of each real piece of the pack."""
    rows, sizes = documents(), batch.cu_seqlens.diff().tolist()
    pieces = zip(batch.documents.tolist(), batch.starts.tolist(), sizes, strict=False)
    return [torch.from_numpy(rows[d][start : start + n]) for d, start, n in pieces if d >= 0]


def gather(rank: int, world: int, dp: int, shard: str, pad_tp: int, shapes: Shapes | None) -> int:
    """How many documents came back right; whatever is wrong is an error here."""
    count = 0
    for batch in batches(rank, dp, world // dp, shard, pad_tp, shapes):
        outputs = torch.stack([batch.input_ids * 1.0, batch.input_ids * -2.0], dim=1)[:, :, None]
        got = gather_documents(outputs, batch, groups_of(dp, world // dp))
        wanted = expected(batch)
        assert len(got) == len(wanted)
        for x, ids in zip(got, wanted, strict=True):
            assert x.shape == (len(ids), 2, 1) and torch.equal(x[:, 0, 0], ids * 1.0)
            assert torch.equal(x[:, 1, 0], ids * -2.0)
        count += len(got)
    return count


@pytest.mark.parametrize("shard", RULES)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_documents_come_back_whole_and_in_order(ranks, world, shard):
    assert min(ranks.run(gather, world, 1, shard, 0, None)) >= 9


@pytest.mark.parametrize("world,dp,pad_tp", [(1, 1, 2), (2, 1, 1), (4, 1, 3), (4, 2, 2)])
def test_padding_is_left_out(ranks, world, dp, pad_tp):
    assert sum(ranks.run(gather, world, dp, "zigzag", pad_tp, None)) >= 9


def test_fillers_are_left_out(ranks):
    shapes = Shapes(pad_to=48, max_docs=20)
    assert min(ranks.run(gather, 2, 1, "zigzag", 0, shapes)) >= 9


def gradients(rank: int, world: int) -> list[tuple[list[int], torch.Tensor]]:
    """Of the sum over ranks of (rank + 1) · Σ w · x², w the row's place in its document plus one."""
    results = []
    for batch in batches(rank, 1, world, "zigzag"):
        x = (batch.input_ids.double() / 1000).requires_grad_()
        got = gather_documents(x, batch, groups_of(1, world))
        loss = sum((torch.arange(1, len(part) + 1) * part**2).sum() for part in got) * (rank + 1)
        (grad,) = torch.autograd.grad(loss, x)
        want = 2 * x.detach() * (batch.position_ids - batch.starts[batch.doc_ids.long()] + 1) * world * (world + 1) / 2
        results.append((batch.documents.tolist(), (grad - want).abs().max() / want.abs().max()))
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_all_ranks_reach_the_rows(ranks, world):
    for told in ranks.run(gradients, world):
        assert max(float(error) for _, error in told) <= 1e-14


def bf16_gradient(rank: int, world: int) -> bool:
    """Summed in fp32: 1 + 1/256 + 1/256 is lost one by one in bf16."""
    batch = batches(rank, 1, world, "contiguous")[0]
    x = torch.ones(len(batch.input_ids), dtype=torch.bfloat16, requires_grad=True)
    weight = 1.0 if rank == 0 else 1 / 256
    loss = sum((part.float() * weight).sum() for part in gather_documents(x, batch, groups_of(1, world)))
    (grad,) = torch.autograd.grad(loss, x)
    return bool((grad == 1 + 2 / 256).all()) and grad.dtype == torch.bfloat16


def test_gradients_are_summed_in_fp32(ranks):
    assert ranks.run(bf16_gradient, 3) == [True] * 3


def complaints(rank: int, world: int) -> list[str]:
    batch = batches(rank, 1, world, "zigzag")[0]
    ids, groups = batch.input_ids.double(), groups_of(1, world)
    tries = [ids[None] if rank else ids, ids[:, None] if rank else ids, ids.float() if rank else ids]
    tries += [torch.tensor(1.0) if rank else ids, ids.clone().requires_grad_(rank == 0)]
    said = []
    for outputs in tries:
        with pytest.raises(ValueError) as error:
            gather_documents(outputs, batch, groups)
        said.append(str(error.value))
    return said


def test_what_does_not_fit_on_one_rank_is_refused_on_all(ranks):
    wanted = [
        "Leave out the batch dimension",
        "one shape behind",
        "one dtype",
        "one row per token",
        "requires_grad alike",
    ]
    for said in ranks.run(complaints, 2):
        assert all(want in text for want, text in zip(wanted, said, strict=True))
