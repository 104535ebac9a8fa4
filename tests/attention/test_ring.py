"""Ring plans, proved on paper over drawn documents and group sizes; a plan that is wrong anywhere is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import contiguous, zigzag
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, assert_part, assert_same, sharded


def ring(shards, rank=None, skip=True, forward=True) -> AttentionPlan:
    return ring_plan(shards, tuple(range(shards.cp_size)), rank, skip=skip, forward=forward)


@PROMISE
@given(sharded(), st.booleans(), st.booleans())
def test_every_pair_once_every_row_in_time_every_gradient_home(shards, skip, forward):
    plan = ring(shards, skip=skip, forward=forward)
    plan.check(shards.cu_seqlens)
    assert np.array_equal(plan.loads().pairs, shards.pairs())
    assert [plan.tokens_of(r) for r in range(shards.cp_size)] == shards.tokens().tolist()


@PROMISE
@given(sharded(), st.integers(0, 11), st.booleans(), st.booleans())
def test_one_ranks_plan_is_its_part_of_the_whole(shards, rank, skip, forward):
    rank %= shards.cp_size
    whole, part = ring(shards, None, skip, forward), ring(shards, rank, skip, forward)
    part.check(shards.cu_seqlens)
    assert_part(part, whole)


@PROMISE
@given(sharded(largest=20), st.booleans())
def test_parts_lower_to_what_the_whole_does(shards, forward):
    whole = ring(shards, forward=forward)
    for rank in range(shards.cp_size):
        assert_same(lower(ring(shards, rank, forward=forward), rank), lower(whole, rank))


@PROMISE
@given(sharded())
def test_rows_travel_no_further_than_they_are_needed(shards):
    """Brute force: a row goes on from rank to rank until nobody behind holds a later query of its document."""
    P, ways = shards.cp_size, {forward: ring(shards, forward=forward) for forward in (True, False)}
    holder, last = {}, {}
    for rank in range(P):
        for p in shards.positions(rank).tolist():
            document = int(np.searchsorted(shards.cu_seqlens, p, side="right")) - 1
            holder[p] = (rank, document)
            last[rank, document] = max(p, last.get((rank, document), -1))
    carried, used = set(), set()
    for p, (rank, document) in holder.items():
        needed = [s for s in range(1, P) if last.get(((rank + s) % P, document), -1) > p]
        used |= {(s, (rank + s) % P, rank, p) for s in needed}
        carried |= {(s, (rank + s) % P, (rank + s - 1) % P, p) for s in range(1, max(needed, default=0) + 1)}
    for forward, sent in ((True, carried), (False, used)):
        moves, returns = ways[forward].moves.tolist(), ways[forward].returns.tolist()
        assert sent == {(s, dst, src, p) for s, _, src, dst, a, b in moves for p in range(a, b)}
        assert used == {(s, src, dst, p) for s, _, src, dst, a, b in returns for p in range(a, b)}


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_a_full_ring_moves_all_rows_but_its_own(cp):
    loads = ring(zigzag([0, 64 * cp], cp), skip=False).loads(bytes_per_row=4)
    assert loads.rows_sent.tolist() == loads.rows_received.tolist() == [64 * (cp - 1)] * cp
    assert loads.bytes_received.tolist() == [4 * 64 * (cp - 1)] * cp


@pytest.mark.parametrize(
    "h_kv,cp,mib", [(1024, 2, 64), (1024, 4, 96), (1024, 8, 112), (1024, 16, 120), (8192, 2, 512), (8192, 16, 960)]
)
def test_published_traffic_of_a_ring(h_kv, cp, mib):
    """(cp-1) · 2 · (N/cp) · h_kv · 2 bytes per rank and layer, N = 32768, bf16."""
    loads = ring(contiguous([0, 32768], cp), skip=False).loads(bytes_per_row=2 * h_kv * 2)
    assert loads.bytes_sent.tolist() == [mib * 2**20] * cp


def test_a_ring_without_zigzag_computes_unevenly():
    """cp 4, causal, contiguous: the ranks compute 1, 2, 3 and 4 blocks."""
    tiles = ring(contiguous([0, 16], 4)).tiles
    assert np.bincount(tiles[:, 0]).tolist() == [1, 2, 3, 4]


def test_documents_of_one_rank_stay_there():
    plan = ring(contiguous([0, 3, 5, 8], 2))
    assert plan.moves[:, 2:].tolist() == [[0, 1, 3, 4]] and plan.returns[:, 2:].tolist() == [[1, 0, 3, 4]]


# ---- What check() refuses. ----

CU = np.array([0, 9, 10, 23])


def without(plan: AttentionPlan, name: str, row: int) -> AttentionPlan:
    return replace(plan, **{name: np.delete(getattr(plan, name), row, axis=0)})


def doubled(plan: AttentionPlan, name: str, row: int) -> AttentionPlan:
    array = getattr(plan, name)
    return replace(plan, **{name: np.concatenate([array, array[row : row + 1]])})


@PROMISE
@given(sharded(), st.sampled_from(["tiles", "moves", "returns"]), st.booleans(), st.integers(0, 10**6))
def test_leaving_out_or_doubling_anything_is_refused(shards, name, double, index):
    plan = ring(shards)
    count = len(getattr(plan, name))
    assume(count > 0)
    broken = (doubled if double else without)(plan, name, index % count)
    with pytest.raises(ValueError):
        broken.check(shards.cu_seqlens)


@pytest.mark.parametrize(
    "name,row,column,value,says",
    [
        ("tiles", 0, 0, 1, "not at home"),
        ("tiles", -1, 1, 0, "has not arrived"),
        ("tiles", 0, 6, 1, "never computed"),
        ("tiles", 0, 5, 30, "outside of the 23 tokens"),
        ("moves", 0, 0, 0, "stage 1 or later"),
        ("moves", -1, 0, 1, "does not have row"),
        ("moves", 0, 2, 1, "No such move"),
        ("moves", 0, 3, 7, "No such move"),
        ("returns", -1, 3, 0, "not its home and sends it on"),
        ("returns", -1, 0, 1, "last in stage 2 and returns its gradient in stage 1"),
        ("home", 0, 1, 1, "held by no rank"),
        ("home", 0, 1, 23, "holds too"),
    ],
)
def test_what_is_wrong_is_named(name, row, column, value, says):
    plan = ring(zigzag(CU, 3))
    array = getattr(plan, name).copy()
    array[row, column] = value
    with pytest.raises(ValueError, match=says):
        replace(plan, **{name: array}).check(CU)


@pytest.mark.parametrize(
    "name,index", [("by_stage", (1, 0)), ("by_stage", (2, 1)), ("by_rank", (0, 1)), ("by_rank", (3, 1))]
)
def test_what_a_rank_is_told_of_all_must_fit_what_it_does(name, index):
    """A rank that takes part in an exchange which others believe does not happen would wait for ever."""
    plan = ring(zigzag(CU, 3), rank=1)
    plan.check(CU)
    array = getattr(plan.known, name).copy()
    array[index] = 0
    with pytest.raises(ValueError, match="said to"):
        replace(plan, known=replace(plan.known, **{name: array})).check(CU)
    shifted = plan.known.by_stage + np.array([[0], [1], [-1]]) * plan.known.by_stage[2]
    with pytest.raises(ValueError, match="said to be"):
        replace(plan, known=replace(plan.known, by_stage=shifted)).check(CU)
    with pytest.raises(ValueError, match="leave out known"):
        replace(plan, rank=None)
    for missing in ("moves", "returns"):
        with pytest.raises(ValueError):
            without(plan, missing, 0).check(CU)


def test_a_pair_outside_of_the_mask_is_named():
    plan = ring(zigzag(CU, 1))
    tiles = plan.tiles.copy()
    tiles[1, 4] = 8
    with pytest.raises(ValueError, match="query 9, key 8.*outside of the mask"):
        replace(plan, tiles=tiles).check(CU)


def test_other_documents_are_refused():
    plan = ring(zigzag(CU, 2))
    for cu in ([0, 9, 23], [0, 23], [0, 9, 10, 22], [0, 5, 9, 10, 23]):
        with pytest.raises(ValueError):
            plan.check(cu)


def test_a_plan_travels_without_what_was_prepared():
    plan = ring(zigzag(CU, 2), rank=1)
    plan.cache["prepared"] = lambda: None
    again = pickle.loads(pickle.dumps(plan))
    assert again.cache == {} and again.rank == 1 and again.ranks == plan.ranks
    for name in ("home_offsets", "home", "tiles", "moves", "returns"):
        assert np.array_equal(getattr(again, name), getattr(plan, name))


def test_plans_print_themselves():
    shards = zigzag([0, 8, 12], 2)
    assert str(ring(shards)) == (
        "AttentionPlan over 2 ranks, 12 tokens, 2 stages: pairs 23/23 (max/mean 1.000), "
        "KV rows received 6/3, returned 6/3"
    )
    assert "pairs 23 (rank 1 alone)" in str(ring(shards, rank=1))


def test_planning_imports_no_torch():
    code = "import sys, equipoise.attention.ring, equipoise.attention.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_wrong_arguments_are_refused():
    shards = zigzag(CU, 2)
    with pytest.raises(ValueError, match="one rank per shard"):
        ring_plan(shards, (0, 1, 2))
    with pytest.raises(ValueError, match="0 … 1; got 2"):
        ring_plan(shards, (0, 1), 2)
    with pytest.raises(ValueError, match="int64\\[n, 8\\]"):
        replace(ring(shards), tiles=np.zeros((1, 7), np.int64))
