"""StreamAdmission: the order of a stream, cut into steps, every document exactly once, resumed anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from equipoise import recipe
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.admission import StepSize, Window
from equipoise.samplers.carry import Held, QueuedAdmission
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.stream import StreamAdmission
from equipoise.samplers.stream_items import FAILED, StreamItems, item_of
from equipoise.samplers.stream_order import Arrivals, Place, told
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import cost

CAP = 8
Parts = list[list[int]]


def tokens_in(parts: Parts, epoch: int) -> Parts:
    """Each epoch reads the documents of a part in an order of its own; its length stays."""
    return [part if not part else part[epoch % len(part) :] + part[: epoch % len(part)] for part in parts]


def source(parts: Parts, asked: list[int] | None = None):
    def more(place: Place, count: int, columns: dict[str, str] | None) -> Arrivals:
        if asked is not None:
            asked.append(count)
        return told(tokens_in(parts, place.epoch))(place, count, columns)

    return more


def admission(parts: Parts, *, asked: list[int] | None = None, **options) -> StreamAdmission:
    size = {name: options.pop(name) for name in list(options) if name.endswith("_per_step")}
    too_long = options.pop("too_long", "split")
    return StreamAdmission(
        items=StreamItems(capacity=CAP, too_long=too_long),
        more=source(parts, asked),
        num_parts=len(parts),
        step_size=StepSize(**size),
        **options,
    )


def oracle(parts: Parts, size: dict, last: str, too_long: str, epochs: int) -> list[list[list[tuple]]]:
    """Steps by epoch, each a list of (epoch of the stream, part, ordinal, start, stop): one document after the other."""
    out, rest = [], []
    for epoch in range(epochs):
        lengths, items = tokens_in(parts, epoch), rest
        for ordinal in range(max(map(len, lengths))):
            for part in range(len(parts)):
                if ordinal < len(lengths[part]):
                    tokens = lengths[part][ordinal]
                    if tokens > CAP and too_long == "drop":
                        continue
                    end = CAP if tokens > CAP and too_long == "truncate" else max(tokens, 0)
                    items += [(epoch, part, ordinal, at, min(at + CAP, end)) for at in range(0, end, CAP)]
        steps, step = [], []
        for item in items:
            full = len(step) == size.get("documents_per_step", -1)
            budget = size.get("tokens_per_step", 10**9)
            if full or sum(i[4] - i[3] for i in step) + item[4] - item[3] > budget:
                steps, step = [*steps, step], []
            step.append(item)
        complete = len(step) == size.get("documents_per_step", -1) or (
            sum(i[4] - i[3] for i in step) == size.get("tokens_per_step", -1)
        )
        rest = []
        if step and (complete or last == "partial"):
            steps.append(step)
        elif last == "carry":
            rest = step
        out.append(steps)
    return out


def content(admission: StreamAdmission, window: Window) -> list[tuple]:
    spans = window.spans
    epoch, part, ordinal = admission.items.where(spans.document)
    return list(zip(*(each.tolist() for each in (epoch, part, ordinal, spans.start, spans.stop)), strict=True))


@st.composite
def streams(draw: st.DrawFn) -> Parts:
    tokens = st.one_of(st.integers(0, 8), st.integers(0, 40), st.just(FAILED))
    return draw(st.lists(st.lists(tokens, max_size=8), min_size=1, max_size=5))


SIZES = st.one_of(
    st.builds(lambda n: {"documents_per_step": n}, st.integers(1, 9)),
    st.builds(lambda n: {"tokens_per_step": n}, st.integers(CAP, 60)),
)
LAST = st.sampled_from(["partial", "drop", "carry"])
TOO_LONG = st.sampled_from(["split", "drop", "truncate"])


def without_a_step(truth: list[list[list[tuple]]]) -> int | None:
    """The first epoch that has no step."""
    return next((epoch for epoch, steps in enumerate(truth) if not steps), None)


@given(parts=streams(), size=SIZES, last=LAST, too_long=TOO_LONG)
@settings(max_examples=300, deadline=None)
def test_steps_are_those_of_the_documents_one_after_the_other(
    parts: Parts, size: dict, last: str, too_long: str
) -> None:
    truth = oracle(parts, size, last, too_long, 3)
    bad = without_a_step(truth)
    stream = admission(parts, last=last, too_long=too_long, **size)
    for epoch, steps in enumerate(truth):
        if epoch == bad:
            with pytest.raises(ValueError, match="no document is left|leaves no step at all"):
                stream.window(epoch, 0)
            return
        for step, expected in enumerate(steps):
            window = stream.window(epoch, step)
            assert window is not None and content(stream, window) == expected
            assert window.num_targets == sum(
                stop - start - (stop == end_of(parts, too_long, epoch, part, ordinal))
                for epoch, part, ordinal, start, stop in expected
            )
            assert len(np.unique(window.spans.document)) == len({row[:3] for row in expected})
        assert stream.window(epoch, len(steps)) is None
    counts = stream.items.counts
    flat = [tokens for part in parts for tokens in part]
    if last != "carry":
        assert counts.documents == 3 * len(flat)
        assert counts.empty == 3 * flat.count(0) and counts.failed == 3 * flat.count(FAILED)
        long = [tokens for tokens in flat if tokens > CAP]
        lost = {"drop": sum(long), "truncate": sum(long) - CAP * len(long), "split": 0}[too_long]
        assert counts.long == 3 * len(long) and counts.lost_tokens == 3 * lost


def end_of(parts: Parts, too_long: str, epoch: int, part: int, ordinal: int) -> int:
    tokens = tokens_in(parts, epoch)[part][ordinal]
    return min(tokens, CAP) if too_long == "truncate" else tokens


@given(parts=streams(), size=SIZES, last=LAST, too_long=TOO_LONG, data=st.data())
@settings(max_examples=300, deadline=None)
def test_resumed_anywhere_and_again_as_if_never_stopped(
    parts: Parts, size: dict, last: str, too_long: str, data: st.DataObject
) -> None:
    """Chained resumes at drawn places, the epochs' ends among them: the steps and the counts of an unbroken run."""
    truth = oracle(parts, size, last, too_long, 3)
    if without_a_step(truth) is not None:
        return
    stream = admission(parts, last=last, too_long=too_long, **size)
    for epoch, steps in enumerate(truth):
        for step in range(len(steps) + 1):
            if data.draw(st.integers(0, 2)) == 0:
                position, start = (
                    (stream.position(epoch, step), stream.start(epoch)) if step else (stream.start(epoch),) * 2
                )
                other = admission(parts, last=last, too_long=too_long, **size)
                other.resume(epoch, step, *json.loads(json.dumps([position, start])))
                stream = other
            window = stream.window(epoch, step)
            if step < len(steps):
                assert window is not None and content(stream, window) == steps[step]
            else:
                assert window is None
    whole = admission(parts, last=last, too_long=too_long, **size)
    for epoch, steps in enumerate(truth):
        assert all(whole.window(epoch, step) is not None for step in range(len(steps)))
        assert whole.window(epoch, len(steps)) is None
    assert whole.items.counts == stream.items.counts


@dataclass
class Queued:
    """A stream behind WLB's queues, and a state as the sampler makes it."""

    parts: Parts
    size: dict
    last: str

    def __post_init__(self) -> None:
        self.base = admission(self.parts, last=self.last, **self.size)
        cluster = Cluster(dp=1, max_tokens_per_rank=2 * CAP)
        self.admission = QueuedAdmission(
            base=self.base,
            queues=WlbQueues(thresholds=(6,), max_delay=3),
            cluster=cluster,
            cost=cost,  # type: ignore[arg-type]
        )

    def state(self, epoch: int, step: int) -> list:
        return [
            self.admission.position(epoch, step),
            self.admission.start(epoch),
            self.admission.held(epoch, step).to_state(),
        ]

    def load(self, epoch: int, step: int, state: list) -> None:
        position, start, held = json.loads(json.dumps(state))
        self.admission.resume(epoch, step, position, start)
        self.admission.put(epoch, step, Held.from_state(held))


@given(parts=streams(), documents=st.integers(2, 9), last=LAST, data=st.data())
@settings(max_examples=200, deadline=None)
def test_queues_over_a_stream_hold_back_and_resume_exactly(
    parts: Parts, documents: int, last: str, data: st.DataObject
) -> None:
    """What waits is read again after a resume, what was released before it is not; each epoch's items come once."""
    size = {"documents_per_step": documents}
    truth = oracle(parts, size, last, "split", 2)
    if without_a_step(truth) is not None:
        return
    whole, broken = Queued(parts, size, last), Queued(parts, size, last)
    for epoch, steps in enumerate(truth):
        came, step = [], 0
        while (window := whole.admission.window(epoch, step)) is not None:
            if data.draw(st.booleans()):
                state = broken.state(epoch, step)
                broken = Queued(parts, size, last)
                broken.load(epoch, step, state)
            again = broken.admission.window(epoch, step)
            assert again is not None and again.num_slots == window.num_slots
            assert content(broken.base, again) == content(whole.base, window)
            came += content(whole.base, window)
            step += 1
        assert broken.admission.window(epoch, step) is None
        assert sorted(came) == sorted(row for rows in steps for row in rows)


@given(parts=streams(), size=SIZES, too_long=TOO_LONG, data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_left_of_a_step_is_read_again(parts: Parts, size: dict, too_long: str, data: st.DataObject) -> None:
    """A step under way is parted: what is left of it, then the next steps, in a run that was resumed between."""
    truth = oracle(parts, size, "partial", too_long, 1)[0]
    if not truth:
        return
    stream = admission(parts, too_long=too_long, **size)
    cut = data.draw(st.integers(0, len(truth) - 1))
    windows = [stream.window(0, step) for step in range(cut + 1)]
    spans = windows[cut].spans  # type: ignore[union-attr]
    left = spans.take(np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))))
    items = [[n, start // CAP] for n, start in zip(left.document.tolist(), left.start.tolist(), strict=True)]
    behind = {name: stream.position(0, cut + 1)[name] for name in ("edge", "counts", "columns")}
    position = json.loads(json.dumps({**stream.position(0, cut), **behind, "held": sorted(items)}))
    other = admission(parts, too_long=too_long, **size)
    other.resume(0, cut + 1, position, stream.start(0))
    other.catch_up(np.array([item_of(*item) for item in items], np.int64))
    rest = replace(windows[cut], spans=left)  # type: ignore[type-var]
    assert content(other, rest) == [row for row in truth[cut] if row in content(stream, rest)]
    assert len(other.unreleased()[0]) >= len(np.unique(left.document))
    other.released(rest)
    assert other._waiting.size == 0
    for step in range(cut + 1, len(truth)):
        assert content(other, other.window(0, step)) == truth[step]  # type: ignore[arg-type]
    assert other.window(0, len(truth)) is None and not len(other.unreleased()[0])


def test_three_shards_of_four_five_and_six() -> None:
    """B9: assigned are documents, not shards; the order is by rounds."""
    stream = admission([[1] * 4, [1] * 5, [1] * 6], documents_per_step=4)
    rows = [content(stream, stream.window(0, step)) for step in range(4)]  # type: ignore[arg-type]
    assert [row[1:3] for step in rows for row in step] == [
        (part, ordinal) for ordinal in range(6) for part in range(3) if ordinal < 4 + part
    ]
    assert stream.window(0, 4) is None


def test_memory_is_that_of_the_last_steps() -> None:
    stream = admission([[3] * 4000, [5] * 4000], documents_per_step=10)
    known = []
    for step in range(800):
        assert stream.window(0, step) is not None
        known.append(len(stream.items.rows))
    assert max(known) <= 10 * 20 and len(stream._positions) < 40 and len(stream._members) < 40


def test_few_more_documents_are_asked_for_than_a_step_takes() -> None:
    asked: list[int] = []
    stream = admission([[3] * 500, [5] * 500], documents_per_step=10, asked=asked)
    for step in range(50):
        stream.window(0, step)
    assert sum(asked) == 500
    asked.clear()
    stream = admission([[3] * 500, [5] * 500], tokens_per_step=400, asked=asked)
    for step in range(5):
        stream.window(0, step)
    assert 500 <= sum(asked) <= 700 and len(asked) < 20


def test_a_step_of_all_there_is_is_read_a_share_at_a_time() -> None:
    asked: list[int] = []
    stream = admission([[3] * 10, [5] * 20], documents_per_step=1 << 40, asked=asked)
    window = stream.window(0, 0)
    assert window is not None and len(window.spans) == 30 and max(asked) <= 1 << 16


def test_going_on_in_the_same_run_reads_nothing_again() -> None:
    asked: list[int] = []
    stream = admission([[3] * 7, [5] * 7], documents_per_step=4, last="carry", asked=asked)
    for epoch in range(2):
        stream.resume(epoch, 0, stream.start(epoch), stream.start(epoch))
        step = 0
        while stream.window(epoch, step) is not None:
            step += 1
            if step == 1:
                stream.resume(epoch, step, stream.position(epoch, step), stream.start(epoch))
        assert step == 3 + epoch
        stream.resume(epoch, step, stream.position(epoch, step), stream.start(epoch))
        before = len(asked)
        assert stream.window(epoch, step) is None and len(asked) == before
    assert sum(asked) == 2 * 14 + 4 + 2


def test_an_iteration_broken_off_starts_over_with_what_was_carried() -> None:
    stream = admission([[3] * 5], documents_per_step=3, last="carry")
    for step in range(2):
        stream.window(0, step)
    first = content(stream, stream.window(1, 0))  # type: ignore[arg-type]
    assert first == [(0, 0, 3, 0, 3), (0, 0, 4, 0, 3), (1, 0, 0, 0, 3)]
    stream.window(1, 1)
    assert content(stream, stream.window(1, 0)) == first  # type: ignore[arg-type]
    assert [row[:3] for row in content(stream, stream.window(4, 0))] == [(4, 0, n) for n in range(3)]  # type: ignore[arg-type]


def test_steps_come_in_turn() -> None:
    stream = admission([[3] * 100], documents_per_step=3)
    for step in range(3):
        stream.window(0, step)
    assert content(stream, stream.window(0, 1)) == [(0, 0, n, 0, 3) for n in (3, 4, 5)]  # type: ignore[arg-type]
    for wrong in ((0, 5), (1, 2)):
        with pytest.raises(
            ValueError, match=r"come in turn, not step .*: step 3 of epoch 0 comes next; load the state"
        ):
            stream.window(*wrong)
    with pytest.raises(ValueError, match="where step 9 of epoch 0 begins is not known"):
        stream.position(0, 9)
    with pytest.raises(TypeError, match="a stream has no index"):
        stream.num_steps(0)


def test_refusals_name_the_document() -> None:
    with pytest.raises(ValueError, match="packs_per_step needs lengths that are known ahead"):
        admission([[1]], packs_per_step=2)
    with pytest.raises(ValueError, match="last must be one of"):
        admission([[1]], documents_per_step=2, last="wrap")
    with pytest.raises(ValueError, match="document 1 of part 0 has 9: raise max_tokens_per_rank"):
        admission([[1, 9]], documents_per_step=2, too_long="error").window(0, 0)
    with pytest.raises(ValueError, match=r"tokens_per_step is 5, document 2 of part 0 .* has 7 tokens"):
        stream = admission([[1, 4, 7]], tokens_per_step=5)
        [stream.window(0, step) for step in range(2)]
    with pytest.raises(ValueError, match="no document is left to train on: epoch 0 of the stream has 2 documents"):
        admission([[0], [0]], documents_per_step=2).window(0, 0)
    with pytest.raises(ValueError, match="last='drop' leaves no step at all: .* has 2 documents, 2 items"):
        admission([[1], [1]], documents_per_step=3, last="drop").window(0, 0)


def test_masked_labels_of_a_cut_document_are_not_known() -> None:
    stream = admission([[6, 20]], documents_per_step=1)
    stream.items.columns = {"input_ids": "int", "labels": "int"}
    first, second = stream.window(0, 0), stream.window(0, 1)
    assert first is not None and first.num_targets == 5
    assert second is not None and second.num_targets is None


def test_counts_are_told() -> None:
    stream = admission([[1, 0, 20], [FAILED, 3, 30]], documents_per_step=3, too_long="drop", last="drop")
    with pytest.raises(ValueError, match="leaves no step"):
        stream.window(0, 0)
    stream = admission([[1, 0, 20], [FAILED, 3, 30]], documents_per_step=2, too_long="drop")
    assert stream.window(0, 0) is not None and stream.window(0, 1) is None
    assert stream.describe().startswith(
        "6 documents of a stream so far; 1 empty dropped; 1 that could not be read skipped; 2 longer than 8 tokens dropped "
        "(50 tokens lost)"
    )


@given(
    ends=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_a_place_knows_what_lies_before_it(ends: list[int], cuts: list[int]) -> None:
    """However many documents are asked for at a time, they come in one order, and ``consumed`` counts them by part."""
    order = [(p, o) for o in range(max(ends)) for p in range(len(ends)) if o < ends[p]]
    place, came = Place(epoch=0), []
    for count in cuts:
        if len(place.ends) == len(ends):
            break
        found = told([[1] * n for n in ends])(place, count, None)
        came += list(zip(found.part.tolist(), found.ordinal.tolist(), strict=True))
        place = place.behind(count, len(ends), found.ends)
        assert came == order[: len(came)]
        before = [sum(part == p for part, _ in came) for p in range(len(ends))]
        assert [min(n, end) for n, end in zip(place.consumed(len(ends)).tolist(), ends, strict=True)] == before
        for part, ordinal in came:
            assert all(count <= ordinal for _, count in place.earlier(ordinal, part).ends)


def test_the_recipe_is_not_asked_for_more_than_a_window() -> None:
    """A plan is made of a stream's window as of any other."""
    stream = admission([[3, 5, 2], [7]], documents_per_step=4)
    window = stream.window(0, 0)
    cluster = Cluster(dp=2, max_tokens_per_rank=CAP)
    assert window is not None
    recipe("vrsp", attend="none").solve(window, cluster, cost).check(window.spans)
