"""What ranks tell each other ahead of training: plans compared, targets summed, and no rank left waiting."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections import Counter
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from equipoise import BalancedLoader, CostModel, recipe
from equipoise.loaders.ahead import Pump
from torch.distributed.device_mesh import init_device_mesh

LENGTHS = np.random.default_rng(0).integers(1, 40, 60)
ROWS = [{"input_ids": np.arange(n), "labels": np.where(np.arange(n) % 3, np.arange(n), -100)} for n in LENGTHS]
TARGETS = [int((row["labels"][1:] != -100).sum()) for row in ROWS]


def make(rank: int, world: int, **options) -> BalancedLoader:
    defaults = {
        "max_tokens_per_rank": 48,
        "documents_per_step": 16,
        "dp": world // 2,
        "cp": 2,
        "rank": rank,
        "timeout": 50,
    }
    return BalancedLoader(ROWS, recipe("vrsp", attend="none"), **{**defaults, **options})


def read(rank: int, world: int, num_workers: int) -> list[tuple]:
    """Two epochs: (epoch, step, targets told, targets here, documents)."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks here may have workers
    loader = make(rank, world, num_workers=num_workers)
    return [
        (b.epoch, b.step, b.num_targets_step, b.num_targets, b.documents.tolist()) for _ in range(2) for b in loader
    ]


@pytest.mark.parametrize(("world", "num_workers"), [(4, 0), (2, 1)])
def test_targets_are_summed_over_all_ranks_and_slots(ranks, world: int, num_workers: int) -> None:
    rows = [row for rank in ranks.run(read, world, num_workers) for row in rank]
    for epoch, step in {row[:2] for row in rows}:
        held = [row for row in rows if row[:2] == (epoch, step)]
        documents = {document for row in held for document in row[4] if document >= 0}
        assert (
            {row[2] for row in held}
            == {sum(TARGETS[document] for document in documents)}
            == {sum(row[3] for row in held)}
        )


def broken_off(rank: int, world: int) -> list:
    """Iterations left after 0, 1, 2 … micro-batches, alike on all ranks, then a whole epoch."""
    loader = make(rank, world, ahead=1)
    seen = []
    for stop in range(6):
        loader.set_epoch(0)
        for at, batch in enumerate(loader):
            seen.append((batch.step, batch.slot, batch.num_targets_step))
            if at == stop:
                break
    loader.set_epoch(0)
    return [seen, [(batch.step, batch.slot, batch.num_targets_step) for batch in loader]]


def test_ranks_stay_in_step_when_training_breaks_off(ranks) -> None:
    """A rank that ran ahead into an exchange must find the others there; the next iteration's sums are right."""
    results = ranks.run(broken_off, 4)
    assert all(result == results[0] for result in results)
    seen, whole = results[0]
    assert seen == [row for stop in range(6) for row in whole[: stop + 1]]


def other_seed(rank: int, world: int, key: str) -> str:
    try:
        list(make(rank, world, **{key: 1 if rank == 2 else 0}))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_with_another_plan_is_found_on_all_ranks(ranks) -> None:
    told = ranks.run(other_seed, 4, "seed")
    assert len(set(told)) == 1 and "ranks [2] planned step 0 of epoch 0 otherwise than rank 0" in told[0]


def on_mesh(rank: int, world: int) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
    loader = BalancedLoader(
        ROWS, recipe("vrsp", attend="none"), mesh=mesh, max_tokens_per_rank=48, documents_per_step=16, timeout=50
    )
    batch = next(iter(loader))
    loader.close()
    return batch.documents.tolist(), batch.cp_rank, batch.num_targets_step, dist.get_rank()


def test_a_mesh_gives_tp_peers_the_same_batches(ranks) -> None:
    """Axes dp, tp, cp: ranks that differ only in tp get the same pack and shard; targets are not counted twice."""
    told = ranks.run(on_mesh, 8)
    for first, second in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert told[first][:3] == told[second][:3]
    assert told[0][0] == told[1][0] != told[4][0]
    assert [row[1] for row in told] == [0, 1] * 4


def on_other_meshes(rank: int, world: int) -> list:
    seen: list = []
    for shape, names in (((4,), ("tp",)), ((2, 2), ("pp", "cp")), ((2, 2), ("dp_replicate", "dp_shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        loader = BalancedLoader(
            ROWS, recipe("vrsp", attend="none"), mesh=mesh, max_tokens_per_rank=48, documents_per_step=16, timeout=50
        )
        batch = next(iter(loader))
        loader.close()
        seen.append((loader.sampler.cluster.dp, loader.sampler.cluster.cp, batch.cp_rank, batch.documents.tolist()))
    for mesh, options in (
        (init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), {"dp": 2}),
        (init_device_mesh("cpu", (world,)), {}),
    ):
        try:
            BalancedLoader(ROWS, recipe("static"), mesh=mesh, max_tokens_per_rank=48, documents_per_step=16, **options)
        except ValueError as error:
            seen.append(str(error))
    return seen


def test_a_mesh_may_have_any_axes(ranks) -> None:
    """Only dp (or HSDP's dp_…) and cp tell ranks apart; without them all get the same batches."""
    told = ranks.run(on_other_meshes, 4)
    assert [row[0] for row in told] == [(1, 1, 0, told[0][0][3])] * 4
    assert [row[1][:3] for row in told] == [(1, 2, 0), (1, 2, 1)] * 2
    assert [row[2][:3] for row in told] == [(4, 1, 0)] * 4 and len({str(row[2][3]) for row in told}) == 4
    assert "give mesh= or dp=, cp=, rank=, not both" in told[0][3] and "needs names for its axes" in told[0][4]


def observed(rank: int, world: int) -> tuple:
    """An epoch measured as 0.2 us a pair and 3 us a token on even ranks, twice that on odd ones; then the next one."""
    start = CostModel(seconds_per_pair=1.0, seconds_per_token=1e-9)
    loader = make(rank, world, cost=start, refit=True)
    for batch in loader:
        loader.observe(batch, (1 + rank % 2) * (2e-7 * batch.pairs + 3e-6 * batch.input_ids.numel()))
    first = next(iter(loader))
    loader.close()
    state = loader.state_dict()
    again = make(rank, world, cost=start, refit=True)
    again.load_state_dict(state)
    second = next(iter(again))
    again.close()
    return first.epoch, loader.sampler.cost, first.digest, again.sampler.cost, second.slot, second.digest


def test_measured_seconds_refit_the_cost_model_at_the_epoch_edge(ranks) -> None:
    told = ranks.run(observed, 4)
    assert len({row[2] for row in told}) == 1 and len({repr(row[1]) for row in told}) == 1
    epoch, cost, digest, resumed, slot, after = told[0]
    assert epoch == 1 and resumed == cost and (slot > 0 or after != digest)
    ratio = cost.seconds_per_token / cost.seconds_per_pair
    assert 12 < ratio < 18 and 2e-7 < cost.seconds_per_pair < 4e-7


def test_refit_needs_coefficients() -> None:
    with pytest.raises(ValueError, match="refit=True needs a CostModel"):
        make(0, 2, cost=lambda pairs, tokens: pairs * 1e-9, refit=True)


def struck(rank: int, world: int, times: int) -> Counter:
    """What a trainer hears that a signal strikes, again and again, while it takes micro-batches."""

    def raises(*_: object) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGALRM, raises)
    batch = SimpleNamespace(slot=0, step=0, num_targets_step=1)
    batch.complete = lambda: batch
    alone = SimpleNamespace(group=None, skip=False, every=1)
    pump = Pump(lambda gate: repeat(batch), agreement=alone, ahead=2, timeout=20.0)  # type: ignore[arg-type]
    heard: Counter = Counter()
    for _ in range(times):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
            while True:
                assert pump._next() == ("batch", batch)
        except RuntimeError as error:
            heard[str(error)] += 1
    signal.signal(signal.SIGALRM, before)
    pump.stop()
    return heard


def test_what_a_signal_raises_is_heard_and_leaves_the_queue_whole(ranks) -> None:
    """torch raises the death of a worker in the trainer's thread, whatever that is at."""
    assert ranks.run(struck, 1, 1000, timeout=60) == [{"a worker was killed": 1000}]
