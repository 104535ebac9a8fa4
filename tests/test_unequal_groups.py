"""FlexSP and dynamic CP train: one step over groups of unequal size equals the same documents, one at a time.

Loss and every gradient, fp64, relative 1e-10, through the real planner, loader, batches and an unmodified HF model; in
one slot some ranks share a pack four ways, others two ways, and others have packs to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equipoise import BalancedLoader, CpGroups, recipe, register_attention
from equipoise.samplers.dynamic_cp import DynamicCp
from equipoise.samplers.flexsp import FlexSp, SpModel
from torch.distributed.device_mesh import init_device_mesh

from tests.test_training import VOCAB, documents, one_step, wrapped

ANY_FLEXSP = FlexSp(model=SpModel.preset("gpt-7b"), degrees="any", more_slots=1)
ANY_DYNAMIC = DynamicCp(degrees="any", traffic_price=0.02)
CHEAP = DynamicCp(traffic_price=0.01)
RECIPES = [
    recipe("flexsp"),
    recipe("dynamic_cp"),
    recipe("flexsp", shard="zigzag", attend="ring", options=ANY_FLEXSP),
    recipe("dynamic_cp", attend="ulysses", options=CHEAP),
    recipe("dynamic_cp", options=ANY_DYNAMIC),
]


class Watched:
    """A loader that remembers how many ranks shared each pack that this rank ran."""

    def __init__(self, loader: BalancedLoader) -> None:
        self.loader = loader
        self.groups: list[tuple[int, ...]] = []

    def steps(self) -> Iterator[list]:
        for step in self.loader.steps():
            batches = list(step)
            self.groups = [batch.cp_ranks for batch in batches]
            yield batches


def run(rank: int, world: int, cases: list[tuple], wrap: str) -> list[tuple]:
    """Each (recipe, documents, cap, documents of the step): where the step is furthest off, and who ran with whom by slot."""
    torch.set_num_threads(1)
    groups = CpGroups(world, 1)
    register_attention(groups)
    mesh, group = init_device_mesh("cpu", (world,)), dist.new_group(backend="gloo")
    results = []
    for chosen, rows, cap, per_step in cases:
        loader = BalancedLoader(
            rows,
            chosen,
            max_tokens_per_rank=cap,
            documents_per_step=per_step,
            dp=world,
            cp=1,
            rank=rank,
            seed=3,
            timeout=50,
            group=group,
        )
        watched = Watched(loader)
        worst = one_step(watched, rows, wrapped(wrap, mesh))
        loader.close()
        everyone: list = [None] * world
        dist.all_gather_object(everyone, watched.groups)
        results.append((worst, [[ranks[slot] for ranks in everyone] for slot in range(len(watched.groups))]))
    groups.close()
    return results


def assert_exact(results: list[tuple], cases: list[tuple]) -> None:
    for ((name, error), _), (chosen, *_rest) in zip(results, cases, strict=True):
        assert error < 1e-10, f"{chosen.name}: {name} is off by {error:.2e}"


def of_lengths(*tokens: int) -> list[dict]:
    rng = np.random.default_rng(sum(tokens))
    return [{"input_ids": ids, "labels": ids.copy()} for ids in (rng.integers(0, VOCAB, n) for n in tokens)]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [4, 8])
def test_a_step_equals_one_process(ranks, world: int, wrap: str) -> None:
    cases = [(chosen, documents(world, "some"), 16, 12) for chosen in RECIPES]
    results = ranks.run(run, world, cases, wrap, timeout=300)[0]
    assert_exact(results, cases)
    mixed = [len({len(ranks) for ranks in slot}) > 1 for _, slots in results for slot in slots]
    assert sum(mixed) > len(mixed) // 4, "these documents were to lead to groups of unequal size"


def test_a_slot_of_cp_4_2_1_and_1(ranks) -> None:
    """Documents that fill eight ranks in one way only."""
    cases = [
        (recipe(name, attend=attend, shard=shard), of_lengths(32, 64, 128, 32), 32, 4)
        for name in ("flexsp", "dynamic_cp")
        for attend, shard in (("ulysses", "contiguous"), ("ring", "zigzag"))
    ]
    results = ranks.run(run, 8, cases, "ddp", timeout=300)[0]
    assert_exact(results, cases)
    for _, slots in results:
        assert slots == [[(0, 1, 2, 3)] * 4 + [(4, 5)] * 2 + [(6,), (7,)]]


def test_groups_that_no_communicator_was_built_for(ranks) -> None:
    """Documents that fill eight ranks as 5 + 3 and six as 3 + 2 + 1."""
    for world, lengths, sizes in ((8, (96, 160), {5, 3}), (6, (64, 96, 32), {3, 2, 1})):
        cases = [
            (recipe("dynamic_cp", options=ANY_DYNAMIC), of_lengths(*lengths), 32, len(lengths)),
            (recipe("flexsp", options=ANY_FLEXSP), of_lengths(*lengths), 32, len(lengths)),
        ]
        results = ranks.run(run, world, cases, "ddp", timeout=300)[0]
        assert_exact(results, cases)
        for _, slots in results:
            assert [{len(ranks) for ranks in slot} for slot in slots] == [sizes]
