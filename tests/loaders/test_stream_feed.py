"""StreamFeed: every document of a stream once, with its own tokens, on any number of ranks, which end together."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from equipoise import BalancedBatchSampler, ThdCollator, recipe
from equipoise.loaders.ahead import Gate
from equipoise.loaders.stream import Stream
from equipoise.loaders.stream_feed import StreamFeed
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.unindexed import Unindexed

from tests.strategies import cost

SHARDS = ((5, 1, 30, 3), (3, 7, 0, 2, 8), (4, 6, 1, 45, 2, 9), (), (12,))
"""Tokens of the documents of each part."""


def token(part: int, ordinal: int, position: int) -> int:
    return (part * 100 + ordinal) * 1000 + position


def documents(part: int, epoch: int, shards: tuple = SHARDS, bad: tuple = ()):
    for ordinal, tokens in enumerate(shards[part]):
        ids = [token(part, ordinal, position) for position in range(tokens)]
        if (part, ordinal) in bad:
            ids[0] = -1
        labels = [each if each % 3 else -100 for each in ids]
        yield {"input_ids": ids, "labels": labels, "name": f"{part}.{ordinal}", "weights": [0.5 * each for each in ids]}


class Run:
    """A feed, its sampler and its trainer on one rank."""

    def __init__(
        self, rank: int, world: int, *, cp: int = 1, name: str = "vrsp", shards: tuple = SHARDS, **options
    ) -> None:
        bad, on_error = options.pop("bad", ()), options.pop("on_error", "raise")
        timeout = options.pop("timeout", 60)
        num_workers, opened = options.pop("num_workers", 0), partial(documents, shards=shards, bad=bad)
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks here may have workers
        chosen = recipe(
            name, attend="none", **({"options": WlbQueues(thresholds=(9,), max_delay=3)} if name == "wlb" else {})
        )
        size = {"documents_per_step": 5, "max_tokens_per_rank": 16 // cp, "too_long": "split"} | options
        stream = Stream(open=size.pop("open", opened), num_parts=len(shards))
        self.feed = StreamFeed(
            stream,
            group=None if world == 1 else dist.new_group(backend="gloo"),
            num_workers=num_workers,
            timeout=timeout,
            on_error=on_error,
        )
        index = Unindexed(more=self.feed.more, num_parts=len(shards))
        self.sampler = BalancedBatchSampler(
            index, chosen, dp=size.pop("dp", world // cp), cp=cp, rank=rank, cost=cost, **size
        )
        admission: Any = self.sampler.admission
        self.base = getattr(admission, "base", admission)
        self.collator, self.state = ThdCollator(chosen), self.sampler.state_dict()

    def batches(self, epoch: int):
        """The rest of an epoch, from the state."""
        if self.state["epoch"] != epoch:
            self.sampler.set_epoch(epoch)
            self.state = self.sampler.state_dict()
        self.sampler.load_state_dict(self.state)
        gate, method = Gate(), multiprocessing.get_start_method()
        multiprocessing.set_start_method("fork", force=True)  # as outside of the test's ranks
        try:
            for batch in self.feed.batches(self.sampler, self.collator, gate):
                if batch.slot == 0:
                    gate.begin()
                yield batch
                self.state = batch.state()
        finally:
            multiprocessing.set_start_method(method, force=True)


ORDER = [(p, o) for o in range(9) for p in range(len(SHARDS)) if o < len(SHARDS[p])]


def rows(batch) -> list[tuple]:
    """(epoch, step, part, ordinal, position, label) of each token here, which must be the document's own."""
    out = []
    labels = batch.labels.tolist()
    for at, (ids, doc, position) in enumerate(
        zip(batch.input_ids.tolist(), batch.doc_ids.tolist(), batch.position_ids.tolist(), strict=True)
    ):
        if batch.documents[doc] < 0:
            assert labels[at] == -100
            continue
        part, ordinal = divmod(ids // 1000, 100)
        assert ids % 1000 == position and batch.weights[at] == 0.5 * ids and batch.name[doc] == f"{part}.{ordinal}"
        assert labels[at] in (ids + 1, -100)
        out.append((batch.epoch, batch.step, part, ordinal, position, labels[at] != -100))
    return out


def read(
    rank: int, world: int, epochs: int, options: dict, state: dict | None = None, stop: int | None = None
) -> tuple:
    """Rows by batch and the number of slots of each step; until so many batches were read."""
    run, seen, slots = Run(rank, world, **options), [], []
    if state is not None:
        run.state = json.loads(json.dumps(state))
    for epoch in range(run.state["epoch"], epochs):
        for batch in run.batches(epoch):
            seen.append((rows(batch), batch.num_targets_step, batch.documents.tolist()))
            slots.append((batch.epoch, batch.step, batch.slot, batch.num_slots))
            if len(seen) == stop:
                return seen, slots, batch.state(), run.feed.failed, run.base.describe()
    assert not run.feed._teller.held or run.sampler.last != "partial"
    return seen, slots, run.state, run.feed.failed, run.base.describe()


def whole(told: list[tuple]) -> Counter:
    """Tokens of all ranks together."""
    return Counter(row for rank in told for batch, _, _ in rank[0] for row in batch)


def expected(epochs: int, shards: tuple = SHARDS, bad: tuple = ()) -> Counter:
    return Counter(
        (part, ordinal, position)
        for part, tokens in enumerate(shards)
        for ordinal, count in enumerate(tokens)
        for position in range(count)
        if (part, ordinal) not in bad
        for _ in range(epochs)
    )


LAYOUTS = {
    "partial": [(1, 1, "vrsp", 0), (2, 1, "static", 1), (2, 2, "vrsp", 0), (3, 1, "wlb", 0), (4, 2, "vrsp", 0)],
    "drop": [(2, 1, "static", 0), (3, 3, "vrsp", 0)],
    "carry": [(1, 1, "vrsp", 0), (2, 1, "wlb", 0), (4, 1, "vrsp", 0), (4, 4, "static", 0)],
}


@pytest.mark.parametrize("last", ["partial", "drop", "carry"])
def test_every_token_once_on_any_number_of_ranks_and_the_same_steps(ranks, last: str) -> None:
    """Parts of 0 to 6 documents on 1 to 4 ranks: ranks end together, and the steps hold the same documents everywhere."""
    steps = []
    for world, cp, name, num_workers in LAYOUTS[last]:
        told = ranks.run(read, world, 2, {"cp": cp, "name": name, "last": last, "num_workers": num_workers})
        assert len({json.dumps(rank[1]) for rank in told}) == 1, "ranks made other micro-batches"
        seen = whole(told)
        tokens = Counter(row[2:5] for row in seen.elements())
        if last == "partial":
            assert tokens == expected(2)
        elif last == "carry":
            assert max(tokens.values()) <= 2 and not expected(1) - tokens
        if name != "wlb":
            steps.append(seen)
        for epoch, step in {row[:2] for row in seen}:
            targets = {n for rank in told for batch, n, _ in rank[0] for row in batch if row[:2] == (epoch, step)}
            assert targets <= {None, sum(n for row, n in seen.items() if row[:2] == (epoch, step) and row[5])}
    assert all(each == steps[0] for each in steps)


@pytest.mark.filterwarnings("ignore:the run is resumed under another configuration")
@pytest.mark.parametrize("name", ["vrsp", "wlb"])
def test_resumed_on_other_ranks_again_and_again(ranks, name: str) -> None:
    """Chained, also in the middle of a step: 2 ranks, then 4, 1, 3, 2 x cp 2; the tokens of an unbroken run, each once."""
    options = {"name": name, "last": "carry", "max_tokens_per_rank": 16}
    unbroken = Counter(row[2:5] for row in whole(ranks.run(read, 2, 3, options)).elements())
    for stops in ((3, 2, 4, 1, 5), (1, 1, 1, 1, 1), (6, 3, 1, 2, 3)):
        seen: list[tuple] = []
        state = None
        for (world, cp), stop in zip(((2, 1), (4, 1), (1, 1), (3, 1), (2, 2)), stops, strict=True):
            part = ranks.run(read, world, 3, {**options, "cp": cp}, state, stop)
            state, seen = part[0][2], [*seen, *part]
            assert len({json.dumps(rank[2]) for rank in part}) == 1, "ranks have other states"
        seen += ranks.run(read, 2, 3, options, state)
        assert Counter(row[2:5] for row in whole(seen).elements()) == unbroken


def test_ranks_whose_documents_differ_end_together(ranks) -> None:
    """A5: rank 0 reads documents of 95 tokens, rank 1 of 20; as many micro-batches on both."""
    shards = ((95,) * 5, (20,) * 5)
    told = ranks.run(
        read, 2, 1, {"shards": shards, "max_tokens_per_rank": 100, "too_long": "error", "documents_per_step": 4}
    )
    assert told[0][1] == told[1][1]
    assert Counter(row[2:5] for row in whole(told).elements()) == expected(1, shards)


@pytest.mark.parametrize("world", [2, 4])
def test_three_shards_serve_any_ranks_evenly(ranks, world: int) -> None:
    """B9: shards of 4, 5 and 6 documents."""
    shards = ((4,) * 4, (4,) * 5, (4,) * 6)
    told = ranks.run(read, world, 1, {"shards": shards, "max_tokens_per_rank": 8, "documents_per_step": world})
    counts = [sum(document >= 0 for _, _, documents in rank[0] for document in documents) for rank in told]
    assert sum(counts) == 15 and max(counts) - min(counts) <= 1


def test_what_one_rank_cannot_read_is_the_same_error_on_all(ranks) -> None:
    told = ranks.run(failing, 3, {"bad": ((1, 3),)})
    assert len(set(told)) == 1
    assert "document 3 of part 1 of the stream (stream) cannot be read: it holds the token id -1, below 0" in told[0]


def failing(rank: int, world: int, options: dict) -> str:
    run = Run(rank, world, **options)
    with pytest.raises((ValueError, RuntimeError)) as error:
        list(run.batches(0))
    assert run.feed._teller._reader is None
    return str(error.value)


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_skipped_is_so_on_all_ranks_and_told(ranks, world: int) -> None:
    bad = ((0, 2), (1, 0), (2, 5))
    told = ranks.run(read, world, 1, {"bad": bad, "on_error": "skip"})
    assert Counter(row[2:5] for row in whole(told).elements()) == expected(1, bad=bad)
    for rank in told:
        assert rank[3] == {(0, part, ordinal): "it holds the token id -1, below 0" for part, ordinal in bad}
        assert "16 documents of a stream so far; 1 empty dropped; 3 that could not be read skipped" in rank[4]


def mixed(part: int, epoch: int):
    yield {"input_ids": [part, 1], "labels": [1, 1]} if part == 0 else [part, 1]
    yield {"input_ids": [part, 2], "labels": [1, 1]}


def test_columns_are_those_of_the_first_document_on_all_ranks(ranks) -> None:
    told = ranks.run(failing, 2, {"open": mixed, "shards": ((2, 2), (2, 2))})
    assert (
        set(told) == {told[0]}
        and "document 0 of part 1 of the stream (stream): its columns are {'input_ids': 'array'}" in told[0]
    )
    seen = ranks.run(skipping, 2)
    assert seen == [[(0, 1, 0)], [(0, 1, 0)]]


def skipping(rank: int, world: int) -> list:
    run = Run(rank, world, open=mixed, shards=((2, 2), (2, 2)), on_error="skip")
    assert sum(int((batch.documents >= 0).sum()) for batch in run.batches(0)) <= 3
    return list(run.feed.failed)


def slow_then_dead(part: int, epoch: int):
    yield [1, 2]
    if part == 1:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    yield [3, 4]


def test_a_killed_worker_is_an_error_on_all_ranks(ranks) -> None:
    told = ranks.run(failing, 2, {"open": slow_then_dead, "shards": ((2, 2), (2, 2)), "num_workers": 1})
    assert set(told) == {told[0]} and "the worker that reads parts [1] of the stream (stream) was killed" in told[0]


def broken_off(rank: int, world: int) -> list:
    """Iterations that are left after n batches, alike on all ranks, and one that is read to its end."""
    run, seen, begin = Run(rank, world), [], None
    for stop in (1, 3, 5, 99):
        begin = begin or run.state
        run.state = begin
        seen.append([rows(batch) for _, batch in zip(range(stop), run.batches(0), strict=False)])
        run.sampler.set_epoch(0)
    return seen


def test_an_iteration_broken_off_starts_over(ranks) -> None:
    for seen in ranks.run(broken_off, 2):
        assert all(part == seen[-1][: len(part)] for part in seen)


def test_nothing_stays_in_memory_but_what_is_to_come() -> None:
    run = Run(0, 1, shards=((2,) * 300, (3,) * 300), documents_per_step=6)
    before, most = threading.active_count(), 0
    for _ in run.batches(0):
        most = max(most, len(run.feed._teller.held))
    assert most <= 12 and not run.feed._teller.held and threading.active_count() == before


def test_the_group_must_be_that_of_the_plan() -> None:
    run = Run(0, 1, dp=2)
    with pytest.raises(ValueError, match="the plan is for 2, the group has 1: initialise torch.distributed"):
        run.feed.batches(run.sampler, run.collator, Gate())
