"""What property tests draw: length mixes with a tail, duplicates, giants; clusters of any size; every recipe."""

from __future__ import annotations

import numpy as np
from equipoise import recipe
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.dynamic_cp import DynamicCp
from equipoise.samplers.solve import ChunkFlow
from hypothesis import strategies as st

RECIPES = [
    recipe("static"),
    recipe("static", pack="concat"),
    recipe("wlb"),
    recipe("vrsp"),
    recipe("wlb", place="in_order", shard="zigzag_sequence", options=WlbQueues(max_delay=0)),
    recipe("static", pack="concat", place="vrsp", shard="contiguous"),
    recipe("chunkflow"),
    recipe("chunkflow", options=ChunkFlow(chunk_tokens=7, keep=2)),
    recipe("skrull"),
    recipe("flexsp"),
    recipe("dynamic_cp"),
    recipe("dynamic_cp", options=DynamicCp(degrees="any", traffic_price=0.3)),
]


def cost(pairs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Seconds that make documents of some dozen tokens quadratic."""
    return 2e-6 * pairs + 2e-5 * tokens


@st.composite
def document_lengths(draw: st.DrawFn, max_size: int = 60, empty: bool = True) -> list[int]:
    """1 … max_size lengths: a long tail, all equal, or one giant among tiny ones."""
    least = 0 if empty else 1
    kind = draw(st.sampled_from(["tail", "equal", "giant"]))
    count = draw(st.integers(1, max_size))
    if kind == "equal":
        return [draw(st.integers(1, 40))] * count
    lengths = draw(st.lists(st.integers(least, 30), min_size=count, max_size=count))
    for at in draw(st.lists(st.integers(0, count - 1), max_size=4 if kind == "tail" else 1)):
        lengths[at] = draw(st.integers(1, 400))
    return lengths


@st.composite
def clusters(draw: st.DrawFn) -> dict:
    """dp, cp, cap and sync of a sampler."""
    return {
        "dp": draw(st.integers(1, 12)),
        "cp": draw(st.integers(1, 8)),
        "max_tokens_per_rank": draw(st.integers(1, 64)),
        "sync": draw(st.sampled_from(["step", "slot"])),
    }


@st.composite
def step_sizes(draw: st.DrawFn, dp: int, longest: int, packs: bool = True) -> dict:
    """One of the three ways to say how large a step is."""
    kinds = ["documents_per_step", "tokens_per_step", "packs_per_step"]
    kind = draw(st.sampled_from(kinds if packs else kinds[:2]))
    if kind == "documents_per_step":
        return {kind: draw(st.integers(1, 40))}
    if kind == "tokens_per_step":
        return {kind: longest + draw(st.integers(0, 400))}
    return {kind: dp * draw(st.integers(1, 4))}
