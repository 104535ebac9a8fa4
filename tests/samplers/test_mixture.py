"""MixedOrder against a loop over draws: shares kept at every prefix, every document seen as often as any other."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.packing.blend import EXHAUSTED, Blend
from equipoise.samplers.groups import GroupedItems
from equipoise.samplers.items import Items
from equipoise.samplers.mixture import MixedOrder
from hypothesis import given, settings
from hypothesis import strategies as st

WITHOUT = "all_exhausted_without_replacement"


@st.composite
def mixtures(draw: st.DrawFn, exhausted: st.SearchStrategy[str] | None = None) -> MixedOrder:
    """One to five sources of like or very unlike size and weight; documents of 0 … 20 tokens, of which packs hold 8."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=5))
    weights = draw(st.lists(st.floats(0.02, 1), min_size=len(sizes), max_size=len(sizes)))
    if draw(st.booleans()):  # ties
        weights = [round(weight * 4) or 1 for weight in weights]
    tokens = np.array(draw(st.lists(st.integers(0, 20), min_size=sum(sizes), max_size=sum(sizes))))
    tokens[np.cumsum([0, *sizes[:-1]])] = 1  # each has something to draw
    blend = Blend(sizes=tuple(sizes), weights=tuple(weights), exhausted=draw(exhausted or st.sampled_from(EXHAUSTED)))
    policy = draw(st.sampled_from(["drop", "truncate", "split"]))
    items = Items.of(Lengths(tokens=tokens, blend=blend), capacity=8, too_long=policy)
    return MixedOrder(items=items, blend=blend, seed=draw(st.integers(0, 2**40)), shuffle=draw(st.booleans()))


def items_by_source(order: MixedOrder) -> list[list[int]]:
    """From each item's document, one by one."""
    owner = np.repeat(np.arange(len(order.blend.sizes)), order.blend.sizes)
    documents = order.items.spans(np.arange(len(order.items)))[0].document
    return [np.flatnonzero(owner[documents] == source).tolist() for source in range(len(order.blend.sizes))]


def drawn_one_by_one(order: MixedOrder) -> list[tuple[int, int]]:
    """(source, which of its draws) of an epoch: whichever source's next draw is due first."""
    counts, shares = [len(items) for items in items_by_source(order)], order.blend.shares.tolist()
    ends = [Fraction(count, share) for count, share in zip(counts, shares, strict=True)]
    end = min(ends) if order.blend.exhausted == "first_exhausted" else max(ends)
    done, drawn = [0] * len(counts), []
    while True:
        due = [
            (Fraction(2 * done[i] + 1, 2 * shares[i]), i)
            for i in range(len(counts))
            if order.blend.exhausted != WITHOUT or done[i] < counts[i]
        ]
        due = [(time, i) for time, i in due if time < end or done[i] == 0 or order.blend.exhausted == WITHOUT]
        if not due:
            return drawn
        source = min(due)[1]
        drawn.append((source, done[source]))
        done[source] += 1


@given(order=mixtures(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_draws_come_as_they_are_due_wherever_one_looks(order: MixedOrder, data: st.DataObject) -> None:
    drawn = drawn_one_by_one(order)
    assert order.size == len(drawn) and order.counts.tolist() == [len(items) for items in items_by_source(order)]
    begin = data.draw(st.integers(0, order.size))
    end = data.draw(st.integers(begin, order.size))
    source, nth = order.schedule(begin, end)
    assert list(zip(source.tolist(), nth.tolist(), strict=True)) == drawn[begin:end]


@given(order=mixtures(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_item_of_a_source_comes_as_often_as_any_other(order: MixedOrder, data: st.DataObject) -> None:
    """After any number of epochs they differ by one at most; the source that sets an epoch's length comes once in each."""
    epochs = 3
    seen = [order.at(epoch * order.size, (epoch + 1) * order.size) for epoch in range(epochs)]
    sources = items_by_source(order)
    assert set(np.concatenate(seen).tolist()) <= set(range(len(order.items)))
    for number in range(1, epochs + 1):
        times = np.bincount(np.concatenate(seen[:number]), minlength=len(order.items))
        for source, items in enumerate(sources):
            drawn = number * int(order.draws[source])
            assert times[items].sum() == drawn
            assert times[items].min() == drawn // len(items) and times[items].max() == -(-drawn // len(items))
    once = [np.array_equal(np.bincount(epoch, minlength=len(order.items))[items], np.ones(len(items), int))
            for epoch in seen for items in sources]  # fmt: skip
    assert sum(once) >= epochs * (len(sources) if order.blend.exhausted == WITHOUT else 1)
    if order.blend.exhausted == "all_exhausted":
        assert all(set(epoch.tolist()) == set(range(len(order.items))) for epoch in seen)
    first = data.draw(st.integers(0, epochs * order.size))
    stop = data.draw(st.integers(first, epochs * order.size))
    assert np.array_equal(order.at(first, stop), np.concatenate(seen)[first:stop])


@given(order=mixtures())
@settings(max_examples=200, deadline=None)
def test_every_prefix_of_an_epoch_has_the_weights_to_within_a_few_documents(order: MixedOrder) -> None:
    weights = np.array(order.blend.weights) / sum(order.blend.weights)
    source, nth = order.schedule(0, order.size)
    drawn = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    for number in range(len(weights)):
        assert np.array_equal(nth[source == number], np.arange((source == number).sum()))
    valid = order.size
    if order.blend.exhausted == WITHOUT:  # up to where the first drops out
        valid = int((drawn < order.counts).all(1).sum()) + 1
    length = np.arange(1, valid + 1)[:, None]
    bound = (1 + weights * (len(weights) - 2)) / 2 + length * 2.0**-30
    lone = order.draws == 1  # drawn once though not due once
    bound = np.where(lone.any(), 2 * bound + 1, bound) + 1e-6
    assert (np.abs(drawn[:valid] - weights * length) <= bound).all()


def test_two_sources_alternate_in_the_ratio_of_their_weights() -> None:
    items = Items.of(Lengths.from_array(np.full(1000, 3)), capacity=8)
    blend = Blend(sizes=(900, 100), weights=(0.75, 0.25), exhausted="first_exhausted")
    order = MixedOrder(items=items, blend=blend)
    assert order.draws.tolist() == [300, 100]
    assert (order.schedule(0, 400)[0].reshape(100, 4).sum(1) == 1).all()  # one in each four
    assert order.describe() == (
        "an epoch of 400 items from 2 sources (300 draws of 900 items, 100 draws of 100 items), first_exhausted"
    )


def test_exhausted_sources_leave_the_others_their_shares() -> None:
    """Weights 2:1:1 of 30, 5 and 100 documents: once the second is through, the first and third go on 2:1."""
    items = Items.of(Lengths.from_array(np.full(135, 3)), capacity=8)
    blend = Blend(sizes=(30, 5, 100), weights=(2, 1, 1), exhausted=WITHOUT)
    source = MixedOrder(items=items, blend=blend).schedule(0, 135)[0]
    assert np.bincount(source[:20]).tolist() == [10, 5, 5] and 1 not in source[20:]
    assert np.bincount(source[20:50], minlength=3).tolist() == [20, 0, 10] and set(source[50:].tolist()) == {2}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    items = Items.of(Lengths.from_array(np.full(40, 3)), capacity=8)
    blend = Blend(sizes=(20, 20), weights=(1, 1), exhausted=WITHOUT)
    orders = [MixedOrder(items=items, blend=blend, seed=seed) for seed in (0, 1)]
    drawn = [order.at(epoch * 40, epoch * 40 + 40).tolist() for order in orders for epoch in range(3)]
    assert len({tuple(each) for each in drawn}) == 6
    assert len({tuple(item % 20 for item in each[side::2]) for each in drawn for side in (0, 1)}) == 12
    assert drawn[0][:6] == [11, 27, 0, 22, 16, 39]  # the order of a run must survive upgrades


def test_passes_that_run_over_epochs_have_orders_of_their_own_too() -> None:
    """20 documents are drawn 30 times an epoch: a whole pass, and half of one that the next epoch ends."""
    items = Items.of(Lengths.from_array(np.full(50, 3)), capacity=8)
    order = MixedOrder(items=items, blend=Blend(sizes=(30, 20), weights=(1, 1), exhausted="all_exhausted"))
    first, second = (order.at(epoch * 60, epoch * 60 + 60)[1::2].tolist() for epoch in (0, 1))
    passes = [first[:20], second[:20], first[20:] + second[20:]]
    assert all(sorted(each) == list(range(30, 50)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_an_epoch_of_more_draws_than_can_be_held_is_addressed_as_one_of_few() -> None:
    """A billion documents and weights of one to a billion: integers stay within 64 bits, nothing is as long as an epoch."""
    items = Items.of(Lengths.from_array(np.full(2, 3)), capacity=8)
    for exhausted in EXHAUSTED:
        order = MixedOrder(items=items, blend=Blend(sizes=(1, 1), weights=(1, 1e-9), exhausted=exhausted))
        order.__dict__["counts"] = np.array([10**9, 10**9])  # no test can hold them
        assert order.size >= 10**9
        for begin in (0, order.size // 2, order.size - 40):
            source, nth = order.schedule(begin, begin + 40)
            for number in set(source.tolist()):
                assert (np.diff(nth[source == number]) == 1).all()
            alone = [order.schedule(at, at + 1) for at in range(begin, begin + 40)]
            assert [(int(one[0]), int(of[0])) for one, of in alone] == list(zip(source, nth, strict=True))
        assert nth[-1] == order.draws[source[-1]] - 1


def test_sources_without_items_and_groups_are_refused() -> None:
    blend = Blend(sizes=(2, 3), weights=(1, 1), exhausted=WITHOUT)
    lengths = Lengths(tokens=np.array([1, 2, 0, 9, 9]), blend=blend)
    with pytest.raises(ValueError, match="all 3 documents of source 1 are empty or were dropped"):
        MixedOrder(items=Items.of(lengths, capacity=8, too_long="drop"), blend=blend)
    grouped = Lengths(tokens=np.array([1, 2, 3, 4, 5]), group=np.array([0, 0, 1, 1, 1]), blend=blend)
    with pytest.raises(ValueError, match="documents of a group stay together"):
        MixedOrder(items=GroupedItems.of(Items.of(grouped, capacity=20)), blend=blend)
