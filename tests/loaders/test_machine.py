"""Exactly once, whatever happens: a state machine over reading, saving, loading on other ranks and changing epochs.

All ranks of a mesh run side by side in this process, a loader each, and take their micro-batches in lockstep. Token ids are
numbers of their own over the whole data set, so what was trained is told from the batches alone; the labels of each are known.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equipoise import BalancedLoader, Lengths, Stream, recipe
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.admission import Admission
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.loaders.archives import npy, tar_bytes
from tests.strategies import cost

CORPORA = {
    "tail": (5, 1, 30, 3, 3, 7, 0, 2, 8, 4, 6, 1, 45, 2, 9, 12, 0, 3, 5, 2, 20, 11, 4, 17),
    "short": tuple(np.random.default_rng(0).integers(0, 7, 44).tolist()),
    "equal": (7,) * 20,
}
PARTS = 3
RECIPES = {
    "static": recipe("static", attend="none"),
    "vrsp": recipe("vrsp", attend="none"),
    "wlb": recipe("wlb", attend="none", options=WlbQueues(thresholds=(6, 20), max_delay=2)),
}
REFUSALS = {
    "what planned it": "a step under way that another recipe planned",
    "has room for": "documents that fit before",
    "which only queues can release": "documents of a stream that a recipe without queues cannot hold",
    "leaves no step at all": "too few documents for one step",
}


@dataclass(frozen=True)
class Corpus:
    """Documents of these lengths; token n of all of them is the number n."""

    lengths: tuple[int, ...]

    @property
    def rows(self) -> list[dict[str, np.ndarray]]:
        ends = np.cumsum(self.lengths)
        numbers = [np.arange(end - count, end) for end, count in zip(ends.tolist(), self.lengths, strict=True)]
        return [{"input_ids": each, "labels": np.where(each % 3, each, -100)} for each in numbers]

    @property
    def position(self) -> np.ndarray:
        """Of each token in its document."""
        return np.concatenate([np.arange(count) for count in self.lengths])

    def wanted(self, too_long: str, capacity: int) -> np.ndarray:
        """bool[tokens]: what an epoch trains on."""
        length = np.repeat(self.lengths, self.lengths)
        return {
            "split": length > 0,
            "truncate": self.position < capacity,
            "drop": length <= capacity,
        }[too_long]

    def labels(self, labelled: bool, too_long: str, capacity: int) -> np.ndarray:
        """int[tokens]: the next token of the document, -100 where there is none or it is masked."""
        length, following = np.repeat(self.lengths, self.lengths), np.arange(len(self.position)) + 1
        end = np.minimum(length, capacity) if too_long == "truncate" else length
        masked = (self.position + 1 >= end) | (labelled & (following % 3 == 0))
        return np.where(masked, -100, following)


def write_tar(folder: Path, name: str) -> TarShards:
    """The corpus in three shards."""
    rows, shards = Corpus(CORPORA[name]).rows, []
    for part, numbers in enumerate(np.array_split(np.arange(len(rows)), PARTS)):
        members = [
            (f"{at:06d}.{kind}", npy(rows[at][column].astype(np.int32)))
            for at in numbers.tolist()
            for kind, column in (("npy", "input_ids"), ("labels.npy", "labels"))
        ]
        shards.append(folder / f"{name}-{part}.tar")
        shards[-1].write_bytes(tar_bytes(members))
    return TarShards(index_shards(shards, folder / f"{name}.arrow", columns=("labels.npy",)))


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TarShards]:
    folder = tmp_path_factory.mktemp("shards")
    return {name: write_tar(folder, name) for name in CORPORA}


class Ledger:
    """What has been trained since an epoch was begun out of turn, held against what had to be."""

    def __init__(self, corpus: Corpus, kind: str, labelled: bool, last: str, too_long: str, capacity: int) -> None:
        self.corpus, self.kind, self.last = corpus, kind, last
        self.piece = capacity if too_long == "split" else 1 << 40
        self.wanted = corpus.wanted(too_long, capacity)
        self.labels = corpus.labels(labelled, too_long, capacity)
        self.jump(0)

    def jump(self, epoch: int, opened: bool = False) -> None:
        """To the beginning of an epoch; ``opened``: perhaps by documents carried from the one before."""
        self.since, self.opened = epoch, opened
        self.counts = np.zeros(len(self.wanted), np.int64)  # how often each token was trained
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        self.epoch, self.before = epoch, self.counts.copy()
        self.start_over()

    def start_over(self) -> None:
        self.counts = self.before.copy()
        self.targets: dict[int, list[int]] = {}  # of each step: what was counted, and what was told
        self.num_steps = self.last_step = -1
        self.loaded = False  # a state that nothing was read from
        self.asked = False  # for the epoch of that state
        self.ended = False  # read until no more came
        self.at_end = False  # no micro-batch is left

    def begun(self, epoch: int | None) -> None:
        """An iteration has begun with a micro-batch of this epoch, or with none: where it had to."""
        follows = epoch == self.epoch + 1
        if self.ended or (self.at_end and not self.asked):
            assert follows, "behind its last micro-batch an epoch is over"
        if follows:
            assert not self.asked, "the epoch of the state was asked for"
            if not self.ended:
                self.check_end()
            self.begin(self.epoch + 1)
        elif not self.loaded:
            self.start_over()
        self.loaded = self.ended = self.asked = False

    def record(self, batches: list[Told], cap: int) -> None:
        """The micro-batches of all ranks in one slot."""
        first = batches[0]
        assert first.place[0] == self.epoch
        step, told = first.place[1], first.place[-1]
        counted, before = self.targets.get(step, [0, told])
        assert before == told, "a step has one number of targets"
        for batch in batches:
            assert batch.place == first.place and batch.state == first.state
            assert 0 < len(batch.ids) + batch.filler <= cap
            np.add.at(self.counts, batch.ids, 1)
            assert (batch.labels == self.labels[batch.ids]).all()
            assert (batch.positions == self.corpus.position[batch.ids]).all()
            counted += batch.num_targets
        self.targets[step], self.last_step = [counted, told], step

    def check_end(self) -> None:
        """What holds when an epoch is over."""
        for step, (counted, told) in self.targets.items():
            assert counted == told, f"targets of step {step}"
        assert self.num_steps in (-1, self.last_step + 1)
        assert not self.counts[~self.wanted].any()
        counts, done = self.counts[self.wanted], (self.counts - self.before)[self.wanted]
        epochs = self.epoch - self.since + 1
        if self.last == "partial":
            assert (done == 1).all()
        elif self.last == "drop":
            assert done.min() >= 0 and done.max() <= 1
        else:
            assert counts.min() >= epochs - 1 and counts.max() <= epochs + self.opened

    def left(self) -> tuple[int, int]:
        """Items and tokens of the epoch that are left out, or carried into the next one."""
        counts = self.counts - self.before if self.last == "drop" else self.counts
        left = self.wanted & (counts < (1 if self.last == "drop" else self.epoch - self.since + 1))
        return int((left & (self.corpus.position % self.piece == 0)).sum()), int(left.sum())

    def set_epoch(self, epoch: int) -> None:
        """As ``BalancedLoader.set_epoch`` says."""
        if self.loaded and epoch == self.epoch:
            self.asked = True
        elif epoch == self.epoch + 1 and (self.ended or (self.loaded and self.at_end)):
            self.begin(epoch)
        elif epoch == self.epoch:
            self.start_over()
        else:
            # Whether the end of a stream's epoch was read ahead, so that its rest is known, is a matter of time.
            near = self.kind != "stream" or epoch == self.epoch + 1
            self.jump(epoch, self.last == "carry" and epoch > 0 and near)

    def from_state(self) -> Ledger:
        """The ledger of a run that goes on from here."""
        other = copy.deepcopy(self)
        other.loaded, other.ended, other.asked, other.at_end, other.num_steps = True, False, False, False, -1
        return other


@dataclass(frozen=True)
class Told:
    """What a micro-batch says; ids, positions and labels of real tokens only."""

    place: tuple  # epoch, step, slot, slots, digest, targets of the step
    state: dict
    num_targets: int
    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    filler: int

    @classmethod
    def by(cls, batch: Any) -> Told:
        real = (batch.documents[batch.doc_ids.long()] >= 0).numpy()
        assert (batch.labels.numpy()[~real] == -100).all() and batch.skipped == ()
        return cls(
            (batch.epoch, batch.step, batch.slot, batch.num_slots, batch.digest, batch.num_targets_step),
            batch.state(),
            batch.num_targets,
            *(values.numpy()[real] for values in (batch.input_ids, batch.position_ids, batch.labels)),
            int((~real).sum()),
        )


@dataclass(frozen=True)
class Saved:
    state: dict
    ledger: Ledger
    config: dict


def configs(kind: str) -> st.SearchStrategy[dict]:
    """What may change from one part of a run to the next."""
    world = st.tuples(st.integers(1, 3), st.integers(1, 2)) if kind != "stream" else st.just((1, 1))
    size = [("documents_per_step", st.integers(2, 6)), ("tokens_per_step", st.integers(45, 70))]
    if kind != "stream":
        size.append(("packs_per_step", st.just(1)))
    return st.builds(
        lambda world, capacity, size, name: {
            "dp": world[0],
            "cp": world[1],
            "max_tokens_per_rank": -(-capacity // world[1]),
            size[0]: size[1] * world[0] if size[0] == "packs_per_step" else size[1],
            "recipe": name if size[0] != "packs_per_step" or name != "wlb" else "vrsp",
        },
        world,
        st.sampled_from([24, 32, 33]),
        st.one_of(*(st.tuples(st.just(name), values) for name, values in size)),
        st.sampled_from(sorted(RECIPES)),
    )


class Machine(RuleBasedStateMachine):
    """Every token of every document once in an epoch, with its label, counted in the step's targets."""

    saves = Bundle("saves")

    def __init__(self, kind: str, archives: dict[str, TarShards], folder: Path) -> None:
        super().__init__()
        self.kind, self.archives, self.folder = kind, archives, folder
        self.loaders: list[BalancedLoader] = []
        self.iterators: list[Iterator] | None = None

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        self.name = data.draw(st.sampled_from(sorted(CORPORA)), "corpus")
        self.labelled = data.draw(st.booleans(), "labelled")
        # Of pieces of a labelled document no index tells the targets: ranks would have to sum them.
        policies = ["drop"] if self.labelled and self.kind != "stream" else ["drop", "truncate", "split"]
        orders = ["shuffle", "preserve"] + ["largest_first"] * (self.kind != "stream")
        self.fixed = {
            "last": data.draw(st.sampled_from(["partial", "drop", "carry"]), "last"),
            "too_long": data.draw(st.sampled_from(policies), "too_long"),
            "shuffle": data.draw(st.booleans(), "shuffle"),
            "seed": data.draw(st.integers(0, 3), "seed"),
            "order": data.draw(st.sampled_from(orders), "order"),
        }
        self.config = data.draw(configs(self.kind), "config")
        self.loaders = self.made(self.config)
        capacity = self.config["max_tokens_per_rank"] * self.config["cp"]
        last, too_long = self.fixed["last"], self.fixed["too_long"]
        self.ledger = Ledger(Corpus(CORPORA[self.name]), self.kind, self.labelled, last, too_long, capacity)

    def made(self, config: dict) -> list[BalancedLoader]:
        """A loader for each rank."""
        source = data_of(self.kind, self.name, self.labelled, self.archives)
        options = {**self.fixed, **config, "recipe": RECIPES[config["recipe"]], "timeout": 20.0, "cost": cost}
        return [BalancedLoader(**source, **options, rank=rank) for rank in range(config["dp"] * config["cp"])]

    def teardown(self) -> None:
        for loader in self.loaders:
            loader.close()

    # Reading.

    @rule(count=st.integers(1, 9))
    def take(self, count: int) -> None:
        while count and self.one():
            count -= 1

    @rule()
    def read_to_the_end(self) -> None:
        while self.one():
            pass

    @rule()
    def break_off(self) -> None:
        self.iterators = None

    def one(self) -> bool:
        """One micro-batch on every rank; False at the end of an iteration."""
        begins = self.iterators is None
        if self.iterators is None:
            self.iterators = [iter(loader) for loader in self.loaders]
        batches = [next(each, None) for each in self.iterators]
        told = [Told.by(batch) for batch in batches if batch is not None]
        if begins:
            self.ledger.begun(told[0].place[0] if told else None)
        if not told:
            self.ledger.check_end()
            self.check_left()
            self.iterators, self.ledger.ended = None, True
            return False
        assert len(told) == len(batches), "ranks end together"
        self.ledger.record(told, self.config["max_tokens_per_rank"])
        self.look_ahead(batches[0].is_last_slot and batches[0].step + 1)
        return True

    def look_ahead(self, steps_done: int) -> None:
        """Where an index tells how many steps there are."""
        if self.kind != "stream":
            self.ledger.num_steps = self.loaders[0].steps_per_epoch
            self.ledger.at_end = steps_done == self.ledger.num_steps

    def check_left(self) -> None:
        """Left out or carried is less than a step, and counted."""
        items, tokens = self.ledger.left()
        if self.fixed["last"] == "partial" or self.ledger.opened:
            return
        assert items < self.config.get("documents_per_step", 1 << 40)
        assert tokens < self.config.get("tokens_per_step", 1 << 40)
        if self.fixed["last"] == "drop" and self.kind != "stream":
            assert self.loaders[0].sampler.admission.dropped(self.ledger.epoch) == items

    # Epochs and states.

    @rule(ahead=st.integers(0, 2), first=st.booleans())
    def set_epoch(self, ahead: int, first: bool) -> None:
        epoch = 0 if first else self.ledger.epoch + ahead
        for loader in self.loaders:
            loader.set_epoch(epoch)
            assert loader.epoch == epoch
        self.iterators = None
        self.ledger.set_epoch(epoch)

    def state(self, as_file: bool) -> dict:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        if as_file:
            self.loaders[0].save(self.folder / "state.json")
        return json.loads(json.dumps(states[0]))

    @rule(target=saves)
    def save(self) -> Saved:
        return Saved(self.state(False), self.ledger.from_state(), self.config)

    @rule(as_file=st.booleans())
    def go_on_in_another_process(self, as_file: bool) -> None:
        """The same configuration; the state is the same before anything is read."""
        saved = Saved(self.state(as_file), self.ledger.from_state(), self.config)
        self.put(saved, self.made(self.config), self.config, as_file)
        assert self.loaders[0].state_dict() == saved.state

    @rule(saved=saves, data=st.data(), where=st.sampled_from(["here", "as it was", "elsewhere"]))
    def load(self, saved: Saved, data: Any, where: str) -> None:
        """In the loaders that are there, or on other ranks, with other options; refused for a good reason only."""
        drawn = data.draw(configs(self.kind), "config") if where == "elsewhere" else {}
        config = {"here": self.config, "as it was": saved.config}.get(where, drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.put(saved, self.loaders if where == "here" else self.made(config), config, False)
            except ValueError as error:
                assert where != "as it was" and any(reason in str(error) for reason in REFUSALS), str(error)
                self.iterators = None if where == "here" else self.iterators

    def put(self, saved: Saved, loaders: list[BalancedLoader], config: dict, as_file: bool) -> None:
        for loader in loaders:
            if as_file:
                loader.load(self.folder / "state.json")
            else:
                loader.load_state_dict(copy.deepcopy(saved.state))
        if loaders is not self.loaders:
            self.teardown()
        self.loaders, self.config, self.iterators = loaders, config, None
        self.ledger = saved.ledger.from_state()
        if self.kind != "stream":
            self.ledger.at_end, self.ledger.num_steps = loaders[0].sampler.at_end, loaders[0].steps_per_epoch


def data_of(kind: str, name: str, labelled: bool, archives: dict[str, TarShards]) -> dict:
    """The documents, and their index where the labels need one."""
    corpus = Corpus(CORPORA[name])
    rows: Any = corpus.rows if labelled else [{"input_ids": row["input_ids"]} for row in corpus.rows]
    if kind == "stream":
        return {"dataset": Stream.of([rows[at::PARTS] for at in range(PARTS)])}
    if kind == "tar":
        rows = archives[name] if labelled else Without(archives[name])
    if not labelled:
        return {"dataset": rows}
    targets = [int((row["labels"][1:] != -100).sum()) for row in corpus.rows]
    return {"dataset": rows, "lengths": Lengths.from_array(np.array(corpus.lengths), targets=np.array(targets))}


class Without:
    """Shards without their labels."""

    def __init__(self, source: TarShards) -> None:
        self.inner, self.column_names = source, ["input_ids"]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, document: int) -> dict:
        return {"input_ids": self.inner[document]["input_ids"]}

    def lengths(self) -> Lengths:
        return self.inner.lengths()

    def rows(self, documents: list[int]) -> dict:
        return {"input_ids": self.inner.rows(documents)["input_ids"]}


@pytest.mark.parametrize("kind", ["map", "tar", "stream"])
def test_every_token_once_whatever_happens(kind: str, archives: dict[str, TarShards], tmp_path: Path) -> None:
    """The machine's rules assert: what each step held, what is left, and at the end of an epoch that nothing is."""
    run_state_machine_as_test(
        lambda: Machine(kind, archives, tmp_path),
        settings=settings(max_examples=70, stateful_step_count=12, deadline=None, print_blob=False),
    )


# The same over processes that talk to each other: streams, and labels that no index counts.


def leg(rank: int, world: int, kind: str, name: str, options: dict, path: str, resumed: bool, count: int) -> Any:
    """Part of a run, from a file and to it: (whether an iteration begins, its micro-batch or none), the state; or a refusal."""
    rows = Corpus(CORPORA[name]).rows
    dataset: Any = rows if kind == "map" else Stream.of([rows[at::PARTS] for at in range(PARTS)])
    asked = options.pop("asked")
    options = {**options, "recipe": RECIPES[options["recipe"]], "cost": cost, "timeout": 30.0}
    loader = BalancedLoader(dataset, **options, dp=world // options["cp"], rank=rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if resumed:
                loader.load(path)
        if asked:
            loader.set_epoch(loader.epoch)
        told: list[tuple[bool, Told | None]] = []
        iterator: Iterator | None = None
        for _ in range(count):
            begins, iterator = iterator is None, iterator or iter(loader)
            batch = next(iterator, None)
            told.append((begins, None if batch is None else Told.by(batch)))
            iterator = None if batch is None else iterator
        loader.save(path)
        return told, loader.state_dict()
    except ValueError as error:
        return str(error)
    finally:
        loader.close()


WORLDS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2))


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_over_worlds(ranks, kind: str, seed: int, tmp_path: Path) -> None:
    """A run that is stopped five times anywhere, each time to go on with 1 to 4 ranks, other steps and another recipe."""
    rng, path = np.random.default_rng(seed), str(tmp_path / "state.json")
    name, last = rng.choice(["tail", "short"]), ("partial", "drop", "carry")[seed % 3]
    fixed = {"last": last, "too_long": "split", "seed": seed}
    ledger, chosen = Ledger(Corpus(CORPORA[name]), kind, True, last, "split", 32), "static"
    for at in range(6):
        world, cp = WORLDS[rng.integers(len(WORLDS))]
        size = [{"documents_per_step": int(rng.integers(2, 6))}, {"tokens_per_step": int(rng.integers(45, 70))}][
            rng.integers(2)
        ]
        options = {**fixed, **size, "cp": cp, "max_tokens_per_rank": 32 // cp, "asked": bool(at and rng.integers(2))}
        count = int(rng.integers(1, 25)) if at < 5 else 60
        other = str(rng.choice(sorted(RECIPES)))
        for name_of in (other, chosen):
            told = ranks.run(leg, world, kind, name, {**options, "recipe": name_of}, path, at > 0, count)
            if not isinstance(told[0], str):
                chosen = name_of
                break
            assert set(told) == {told[0]} and any(reason in told[0] for reason in REFUSALS), told
        ledger.asked = options["asked"]
        follow(ledger, [rank[0] for rank in told], 32 // cp)
        assert all(rank[1] == told[0][1] for rank in told), "the state is the same on all ranks"
        ledger = ledger.from_state()
    assert ledger.epoch > 0


def follow(ledger: Ledger, told: list[list[tuple[bool, Told | None]]], cap: int) -> None:
    """What the ranks read in lockstep, into the ledger."""
    for row in zip(*told, strict=True):
        begins, batches = row[0][0], [batch for _, batch in row if batch is not None]
        if begins:
            ledger.begun(batches[0].place[0] if batches else None)
        if batches:
            assert len(batches) == len(row), "ranks end together"
            ledger.record(batches, cap)
        else:
            ledger.check_end()
            ledger.ended = True


# Workers that stay, and one loader throughout.


def script(loader: BalancedLoader) -> list[tuple]:
    """An epoch edge, iterations broken off, and states loaded into the loader that is there."""
    seen: list[tuple] = []

    def take(count: int) -> None:
        for batch, _ in zip(loader, range(count), strict=False):
            seen.append((batch.epoch, batch.step, batch.slot, tuple(batch.input_ids.tolist())))
        seen.append(("state", json.dumps(loader.state_dict())))

    take(3)
    early = loader.state_dict()
    take(99)
    loader.load_state_dict(early)
    take(2)
    take(99)
    end = loader.state_dict()
    take(4)
    for epoch in (0, 1):
        loader.load_state_dict(end)
        loader.set_epoch(epoch)
        take(99)
        take(1)
    loader.set_epoch(3)
    take(5)
    loader.close()
    take(2)
    loader.close()
    return seen


@pytest.mark.parametrize("kind", ["map", "tar", "stream"])
def test_workers_that_stay_are_told_where_to_go_on(kind: str, archives: dict[str, TarShards]) -> None:
    """A2, B5: in every epoch, behind every state, workers read what this process alone does."""
    options = {"recipe": RECIPES["vrsp"], "dp": 1, "max_tokens_per_rank": 33, "documents_per_step": 4, "timeout": 60.0}
    alone, *others = (
        script(
            BalancedLoader(**data_of(kind, "tail", kind != "map", archives), **options, too_long="drop", num_workers=n)
        )
        for n in (0, 1, 2)
    )
    assert {row[0] for row in alone} > {0, 1, 3}
    assert all(other == alone for other in others)


def test_a_state_goes_from_any_number_of_workers_to_any_other(archives: dict[str, TarShards]) -> None:
    """A1, B4, C10: chained, with 0, 2, 0 and 1 workers, it is one unbroken run."""
    options = {"recipe": RECIPES["vrsp"], "dp": 1, "max_tokens_per_rank": 33, "documents_per_step": 4, "last": "carry"}
    for kind in ("tar", "stream"):
        source = data_of(kind, "short", True, archives)
        whole = BalancedLoader(**source, **options)
        truth = [batch.input_ids.tolist() for _ in range(2) for batch in whole]
        seen, state = [], BalancedLoader(**source, **options).state_dict()
        for at, num_workers in enumerate((0, 2, 0, 1)):
            loader = BalancedLoader(**source, **options, num_workers=num_workers, timeout=60.0)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            count = len(truth) // 4 if at < 3 else len(truth)
            while count and len(seen) < len(truth):
                for batch in loader:
                    seen.append(batch.input_ids.tolist())
                    count -= 1
                    if not count or len(seen) == len(truth):
                        break
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
        assert seen == truth


# One loader, asked for other things meanwhile.


def numbers(count: int = 60) -> list[np.ndarray]:
    return [np.arange(n) for n in np.random.default_rng(0).integers(1, 9, count)]


def make(rows: Any = None, **options: Any) -> BalancedLoader:
    given = {"dp": 1, "max_tokens_per_rank": 16, "tokens_per_step": 24, "timeout": 20.0, **options}
    return BalancedLoader(numbers() if rows is None else rows, given.pop("recipe", RECIPES["static"]), **given)


@pytest.mark.parametrize("name", ["static", "wlb"])
def test_steps_are_counted_while_a_thread_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar asks for steps_per_epoch; the thread that plans ahead scans the same edges, and both find the same."""
    truth = [batch.documents.tolist() for batch in make(recipe=RECIPES[name])]
    scan = Admission._next_edge
    monkeypatch.setattr(Admission, "_next_edge", lambda *place: (time.sleep(0.001), scan(*place))[1])
    loader, seen = make(recipe=RECIPES[name], ahead=1), []
    for batch in loader:
        seen.append(batch.documents.tolist())
        assert loader.steps_per_epoch == loader.sampler.admission.num_steps(0)
    assert seen == truth and batch.step + 1 == loader.steps_per_epoch


@pytest.mark.parametrize("name", ["static", "wlb"])
@pytest.mark.parametrize("other", [{}, {"tokens_per_step": 31}, {"tokens_per_step": None, "documents_per_step": 5}])
def test_a_sampler_begins_an_epoch_anew_behind_a_state(name: str, other: dict) -> None:
    """Whatever the size of a step was before the state; earlier steps cannot be planned from it."""
    first = make(recipe=RECIPES[name]).sampler
    state = [batch.state for (batch,) in first if batch.state["slot"] == 0][5]
    second, fresh = (make(recipe=RECIPES[name], **other).sampler for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.load_state_dict(state)
    with pytest.raises(ValueError, match=r"step 2 of epoch 0 lies before step 6.*set_epoch\(0\) begins"):
        second.plan(2)
    second.set_epoch(0)
    assert [batch.spans.document.tolist() for (batch,) in second] == [
        batch.spans.document.tolist() for (batch,) in fresh
    ]


def test_an_epoch_is_over_behind_its_last_micro_batch() -> None:
    """Whether or not more was asked for: as it is for a state that was saved there."""
    loader = make(last="drop")
    count = len(list(loader))
    for how in ("asked", "not asked", "loaded"):
        loader = make(last="drop")
        taken = list(islice(loader, count + (how == "asked")))
        if how == "loaded":
            loader.load_state_dict(loader.state_dict())
        assert len(taken) == count and next(iter(loader)).epoch == 1
    loader.set_epoch(0)
    assert next(iter(loader)).epoch == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.set_epoch(0),
        lambda loader: loader.load_state_dict(make().state_dict()),
        lambda loader: loader.close(),
    ],
)
def test_an_iteration_that_was_ended_says_so(end: Any) -> None:
    """At once: what it had ready is not handed out, and moves no state."""
    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    end(loader)
    state = loader.state_dict()
    with pytest.raises(RuntimeError, match="this iteration was ended"):
        next(iterator)
    assert loader.state_dict() == state
    loader.close()
