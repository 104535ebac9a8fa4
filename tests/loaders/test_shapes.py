"""Micro-batches of fixed sizes hold the same documents as others; documents that could not be read become fillers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from equipoise import BalancedBatchSampler, Lengths, PlannedDataset, ThdBatch, ThdCollator, recipe
from equipoise.loaders.collate import SKIPPED
from equipoise.loaders.shapes import Shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths

MIXES = [
    {"shard": "zigzag"},
    {"pack": "concat", "shard": "zigzag_sequence"},
    {"pack": "wlb", "shard": "contiguous"},
    {"shard": "striped"},
    {"shard": "adaptive"},
]
PER_TOKEN = ("input_ids", "labels", "position_ids", "doc_ids", "weight")


def corpus(lengths: list[int], labels: bool = False) -> list[dict]:
    rng = np.random.default_rng(len(lengths))
    rows = [
        {"input_ids": rng.integers(1, 1000, n).astype(np.int32), "weight": rng.random(n), "id": document}
        for document, n in enumerate(lengths)
    ]
    for row in rows if labels else []:
        row["labels"] = np.where(rng.random(len(row["input_ids"])) < 0.4, -100, row["input_ids"])
    return rows


def fetched(rows: list[dict], mix: dict, cap: int, cp: int = 1, attend: str = "none", **options) -> tuple:
    """The recipe, and for each micro-batch what every rank of its CP group fetches."""
    chosen, dataset = recipe("static", attend=attend, **mix), PlannedDataset(rows)
    options = {"documents_per_step": 9, "too_long": "split", "dp": 1, **options}
    samplers = [
        BalancedBatchSampler(
            Lengths.from_array(np.array([len(row["input_ids"]) for row in rows])),
            chosen,
            max_tokens_per_rank=cap,
            cp=cp,
            rank=rank,
            **options,
        )
        for rank in range(cp)
    ]
    specs = zip(*([spec for (spec,) in sampler] for sampler in samplers), strict=True)
    return chosen, [[dataset.__getitems__([spec])[0] for spec in group] for group in specs]


def gathered(group: list[ThdBatch]) -> dict[str, list]:
    """Values per token of the pack, by position."""
    where = np.concatenate([batch.shard_index.numpy() for batch in group])
    order = np.argsort(where)
    assert np.array_equal(where[order], np.arange(len(where)))
    return {name: np.concatenate([batch[name].numpy() for batch in group])[order].tolist() for name in PER_TOKEN}


@given(
    lengths=document_lengths(max_size=20),
    labels=st.booleans(),
    mix=st.sampled_from(MIXES),
    cp=st.integers(1, 4),
    tp=st.integers(0, 2),
    cap=st.sampled_from([16, 24, 600]),
    max_docs=st.sampled_from([None, 0, 2]),
    bucket=st.sampled_from([None, 1, 7]),
)
@settings(max_examples=200, deadline=None)
def test_sizes_are_fixed_and_nothing_real_changes(
    lengths: list[int], labels: bool, mix: dict, cp: int, tp: int, cap: int, max_docs: int | None, bucket: int | None
) -> None:
    """``max_docs``: how many more than the fullest pack needs."""
    if not any(lengths):
        return
    tp = tp if mix == MIXES[0] else 0
    chosen, groups = fetched(corpus(lengths, labels), mix, cap, cp, pad_tp=tp)
    plain = [[ThdCollator(chosen)([each]) for each in group] for group in groups]
    ends = [group[0].get("cu_seqlens_padded", group[0].cu_seqlens) for group in plain]
    tokens = np.array([int(end[-1]) for end in ends])
    spans, sizes = np.array([group[0].num_docs for group in plain]), np.full(len(plain), cp)
    most = int((spans + (tokens < cap * cp)).max())
    shapes = Shapes(pad_to=cap, max_docs=None if max_docs is None else most + max_docs, max_seqlen_bucket=bucket)
    shapes.check_rule(chosen.shard, tp, cp)
    shapes.check_plan(spans, tokens, sizes)
    for group, before in zip(groups, plain, strict=True):
        shaped = [ThdCollator(chosen, shapes=shapes)([each]) for each in group]
        batch, now, then = shaped[0], gathered(shaped), gathered(before)
        real = len(then["labels"])
        for name in PER_TOKEN:
            assert now[name][:real] == then[name], name
        assert set(now["input_ids"][real:]) <= {0} and set(now["labels"][real:]) <= {-100}
        for name in ("num_targets", "pairs"):
            assert sum(each[name] for each in shaped) == sum(each[name] for each in before)
        assert (batch.sum_len, batch.sum_len_sq) == (before[0].sum_len, before[0].sum_len_sq)
        assert [len(each.input_ids) for each in shaped] == [cap] * cp
        check_boundaries(batch, before[0], shapes, cap * cp, padded=group[0][0].pad_multiple > 1)


def check_boundaries(batch: ThdBatch, before: ThdBatch, shapes: Shapes, tokens: int, padded: bool) -> None:
    cu, docs = batch.cu_seqlens, batch.num_docs
    assert cu.dtype == torch.int32 and docs == len(batch.documents) == len(batch.starts) == len(batch["id"])
    assert (cu[: docs + 1].diff() > 0).all() and (cu[docs:] == cu[-1]).all()
    assert len(cu) == (docs if shapes.max_docs is None else shapes.max_docs) + 1
    ends = batch.get("cu_seqlens_padded", cu)
    assert int(ends[-1]) == tokens and len(ends) == len(cu) and ends.dtype == torch.int32
    assert ("cu_seqlens_padded" in batch) == (bool((ends != cu).any()) or (padded and shapes.max_docs is not None))
    longest, bucket = int(cu.diff().max()), shapes.max_seqlen_bucket or 1
    assert type(batch.max_seqlen) is int and longest <= batch.max_seqlen < longest + bucket
    assert batch.max_seqlen % bucket == 0
    fillers = ends.diff()[before.num_docs : docs]
    assert (batch.documents[before.num_docs :] == -1).all()
    if shapes.max_docs is None:
        assert (fillers <= 512).all() and len(fillers) == -(-int(fillers.sum()) // 512)
    assert before.cu_seqlens.tolist() == cu[: before.num_docs + 1].tolist()


def test_boundaries_do_not_repeat_the_end_unless_asked_to() -> None:
    """Two documents of 512 fill 1024 tokens: no filler of no tokens (AReaL #1103)."""
    chosen, groups = fetched(corpus([512, 512]), {}, 1024)
    ends = ThdCollator(chosen, shapes=Shapes(pad_to=1024))(groups[0]).cu_seqlens
    assert ends.tolist() == [0, 512, 1024]
    batch = ThdCollator(chosen, shapes=Shapes(max_docs=4))(groups[0])
    assert batch.cu_seqlens.tolist() == [0, 512, 1024, 1024, 1024] and batch.num_docs == 2


def test_a_filler_is_cut_short_where_documents_leave_room() -> None:
    chosen, groups = fetched(corpus([100]), {}, 4096)
    for max_docs, fillers in ((None, [500] * 4 + [499] * 4), (4, [1332] * 3), (2, [3996])):
        batch = ThdCollator(chosen, shapes=Shapes(pad_to=4096, max_docs=max_docs))(groups[0])
        assert batch.cu_seqlens.diff()[1 : batch.num_docs].tolist() == fillers
        assert batch.num_docs == 1 + len(fillers) and batch.pairs == 5050


@pytest.mark.parametrize("attend", ["ring", "ulysses"])
def test_attention_covers_fillers_as_any_document(attend: str) -> None:
    chosen, groups = fetched(corpus([30, 11, 5]), {"shard": "contiguous"}, 40, 3, attend)
    for group in groups:
        for each in group:
            batch = ThdCollator(chosen, shapes=Shapes(pad_to=40))([each])
            assert batch.plan.tokens == 120 and [batch.plan.tokens_of(rank) for rank in range(3)] == [40, 40, 40]
            if attend == "ring":
                batch.plan.check(batch.cu_seqlens.numpy())


def test_a_compiled_function_is_compiled_once() -> None:
    """With all three options the same graph serves every batch; without them it does not."""
    chosen, groups = fetched(corpus([40, 3, 9, 61, 30, 8, 17, 5, 50, 22] * 4), {}, 64, documents_per_step=10)
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    def loss(ids, positions, labels, cu_seqlens, max_seqlen):
        first = torch.bucketize(positions, cu_seqlens) * (max_seqlen + len(ids))
        return torch.where(labels == -100, 0, ids * first).sum()

    def compiled(shapes: Shapes, count: int) -> int:
        torch._dynamo.reset()
        graphs.clear()
        run = torch.compile(loss, backend=backend)
        batches = [ThdCollator(chosen, shapes=shapes)(group) for group in groups]
        assert len(batches) >= count
        for batch in batches[:count]:
            given = batch.to_hf()
            run(batch.input_ids, batch.position_ids, batch.labels, given["cu_seq_lens_q"], given["max_length_q"])
        return len(graphs)

    assert compiled(Shapes(pad_to=64, max_docs=12, max_seqlen_bucket=64), 10) == 1
    assert compiled(Shapes(), 4) > 1


def test_fixed_batches_travel_as_others_do() -> None:
    chosen, groups = fetched(corpus([7, 3, 12], labels=True), {}, 16, 2, pad_tp=1)
    for each in groups[0]:
        batch = ThdCollator(chosen, shapes=Shapes(pad_to=16, max_docs=6, max_seqlen_bucket=8))([each])
        twin = pickle.loads(pickle.dumps(batch))
        assert twin._missing and list(twin) == list(batch)
        for name, value in batch.items():
            assert (
                torch.equal(twin[name], value)
                if isinstance(value, torch.Tensor)
                else name == "plan" or twin[name] == value
            )
        params = batch.to_megatron()["packed_seq_params"]
        assert len(params["cu_seqlens_q"]) == len(params["cu_seqlens_kv_padded"]) == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shapes(pad_to=0), "pad_to must be a whole number of at least 1; got 0"),
        (lambda: Shapes(max_docs=1.5), "max_docs must be a whole number"),
        (lambda: Shapes(max_seqlen_bucket=-8), "max_seqlen_bucket must be"),
        (lambda: ThdCollator(recipe("skrull"), shapes=Shapes(pad_to=8)), "shard='dacp' does not"),
        (lambda: ThdCollator(recipe("static", shard="mixed"), shapes=Shapes(pad_to=8)), "shard='mixed' does not"),
        (lambda: Shapes(pad_to=10).check_rule("zigzag", 4, 1), "multiple of 4 tokens; got pad_to=10: use 12"),
        (lambda: Shapes(pad_to=12).check_rule("zigzag", 4, 2), "multiple of 8 tokens; got pad_to=12: use 16"),
        (lambda: plan_of(Shapes(pad_to=9), [1, 1], [9, 10]), "pad_to=9 .* largest of this step has 10"),
        (lambda: plan_of(Shapes(max_docs=3), [4, 3], [9, 9]), "max_docs=3 .* step has 4: raise max_docs to 4"),
        (lambda: plan_of(Shapes(max_docs=3, pad_to=9), [3, 3], [9, 8]), "has 3 and a filler up to pad_to: raise max_docs to 4"),
        (lambda: filled(Shapes(max_docs=1), [5, 6]), "max_docs=1 .* has 2"),
        (lambda: filled(Shapes(pad_to=8), [5, 6]), "pad_to=8 .* has 11"),
        (lambda: filled(Shapes(pad_to=18), [5, 6], cp=2, pad_tp=2), "multiple of 8 tokens for 2 ranks, .*: use 20"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_kept_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def plan_of(shapes: Shapes, spans: list[int], tokens: list[int]) -> None:
    shapes.check_plan(np.array(spans), np.array(tokens), np.ones(len(spans), np.int64))


def filled(shapes: Shapes, lengths: list[int], **options) -> ThdBatch:
    chosen, groups = fetched(corpus(lengths), {}, 16, **options)
    return ThdCollator(chosen, shapes=shapes)(groups[0][:1])


def unread(each: tuple, lost: set[int]) -> tuple:
    """What is fetched where these documents cannot be read."""
    spec, rows = each
    numbers = np.where(spec.spans.document < 0, spec.template, spec.spans.document).tolist()
    rows = {name: [None if n in lost else v for n, v in zip(numbers, vs, strict=True)] for name, vs in rows.items()}
    return spec, {**rows, SKIPPED: {number: f"no {number}" for number in lost}}


@given(
    lengths=document_lengths(max_size=12),
    labels=st.booleans(),
    mix=st.sampled_from(MIXES),
    cp=st.integers(1, 3),
    tp=st.integers(0, 1),
    shapes=st.sampled_from([Shapes(), Shapes(pad_to=24, max_docs=60, max_seqlen_bucket=8)]),
    laid_out=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_documents_that_could_not_be_read_become_fillers(
    lengths: list[int], labels: bool, mix: dict, cp: int, tp: int, shapes: Shapes, laid_out: bool, data: st.DataObject
) -> None:
    """The same whether this rank could not read them or another told so: real documents stay, nothing else has a label."""
    if not any(lengths):
        return
    chosen, groups = fetched(corpus(lengths, labels), mix, 24, cp, pad_tp=tp if mix == MIXES[0] else 0)
    lost = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    for group in groups:
        for each in group:
            whole, batch = (ThdCollator(chosen, shapes=shapes)([one]) for one in (each, unread(each, lost)))
            gone = np.isin(whole.documents.numpy(), list(lost))
            if laid_out:
                whole.complete()
            told = whole.without(lost, "elsewhere")
            assert batch.skipped == tuple((d, f"no {d}") for d in dict.fromkeys(whole.documents[gone].tolist()))
            assert told.skipped == tuple((d, "elsewhere") for d, _ in batch.skipped)
            assert (told is whole) == (not gone.any())
            assert batch.documents.tolist() == np.where(gone, -1, whole.documents).tolist()
            masked = torch.from_numpy(gone)[whole.doc_ids.long()]
            assert torch.equal(batch.input_ids, whole.input_ids.masked_fill(masked, 0))
            assert torch.equal(batch.labels, whole.labels.masked_fill(masked, -100))
            assert batch.num_targets == int((batch.labels != -100).sum())
            same = {
                "segments",
                "behind",
                "documents",
                "starts",
                "sum_len",
                "sum_len_sq",
                "pairs",
                "num_targets",
                "num_docs",
            }
            same |= {"input_ids", "labels", "position_ids", "doc_ids", "shard_index", "cu_seqlens", "max_seqlen"}
            for name in same:
                assert (torch.equal if isinstance(batch[name], torch.Tensor) else int.__eq__)(
                    told[name], batch[name]
                ), name
            if "weight" in batch:
                kept = torch.from_numpy(gone)[batch.doc_ids.long()]
                assert torch.equal(batch.weight, whole.weight.masked_fill(kept, 0))
            pickle.loads(pickle.dumps(told)).complete()
            assert whole.documents.tolist() == ThdCollator(chosen, shapes=shapes)([each]).documents.tolist()


def test_a_micro_batch_of_which_nothing_could_be_read_has_tokens_only() -> None:
    chosen, groups = fetched(corpus([5, 3], labels=True), {}, 8)
    batch = ThdCollator(chosen)([unread(groups[0][0], {0, 1})])
    assert batch.input_ids.tolist() == [0] * 8 and batch.labels.tolist() == [-100] * 8 and batch.num_targets == 0
    assert "weight" not in batch and "id" not in batch and batch.sum_len == 0
    assert sorted(batch.skipped) == [(0, "no 0"), (1, "no 1")]


def test_nothing_is_skipped_without_a_reason() -> None:
    chosen, groups = fetched(corpus([5, 3]), {}, 8)
    spec, rows = unread(groups[0][0], {1})
    with pytest.raises(ValueError, match="tokens of document 1 must be a 1-D array of ids; got shape None"):
        ThdCollator(chosen)([(spec, {**rows, SKIPPED: {}})])
    batch = ThdCollator(chosen)([(spec, {**groups[0][0][1], SKIPPED: {}})])
    assert batch.skipped == () and batch.without({7}) is batch and batch.without(set()) is batch
