"""python -m pytest tests/packing/test_mask_picture.py"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from equipoise.attention.ring import ring_plan
from equipoise.packing.mask_kinds import causal, causal_blockwise, window_with_sinks
from equipoise.packing.mask_picture import draw, picture
from equipoise.packing.shards import zigzag


def test_text_shows_who_computes():
    """Zigzag over two ranks: chunks 0 and 3 of the document are rank 0's, 1 and 2 rank 1's."""
    plan = ring_plan(zigzag([0, 8], 2), ranks=(0, 1))
    assert picture(causal([8]), plan.tiles, cells=4).split("\n") == ["0···", "11··", "111·", "0000"]


def test_text_shows_how_full_cells_are():
    rows = picture(causal([64]), cells=4).split("\n")
    assert rows[3][:3] == "███" and rows[0] == "▓···"
    assert len(picture(causal_blockwise([100_000])).split("\n")) == 32
    with pytest.raises(ValueError, match="at least one cell"):
        picture(causal([4]), cells=0)
    with pytest.raises(ValueError, match="one token"):
        picture(causal([0]))


def test_an_image_has_a_colour_for_each_rank(tmp_path: Path):
    mask = causal([300, 200])
    plan = ring_plan(zigzag(mask.cu_seqlens, 4), ranks=(0, 1, 2, 3))
    axes = draw(mask, plan.tiles, cells=100, title="zigzag")
    image = axes.images[0].get_array()
    assert image.shape == (100, 100, 3) and np.all(image[0, 50] == 1)
    computed = image[image.sum(axis=2) < 3]
    hues = {tuple(np.round((1 - colour) / (1 - colour).max(), 2)) for colour in computed}
    assert len(hues) == 4
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    shares = [float(text.split(": ")[1].rstrip("%")) for text in legend]
    assert len(legend) == 4 and sum(shares) == pytest.approx(100, abs=0.5)
    axes.figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_heads_that_are_placed_apart_lie_on_top_of_each_other():
    """Positions of head group g begin at g · tokens; rank 1 computes two groups of three, so the cells are its own."""
    tiles = np.array(
        [[rank, 0, *(4 * group + np.array([0, 4, 0, 4])), 0, 1 << 40] for group, rank in enumerate((1, 0, 1))]
    )
    assert picture(causal([4]), tiles).split("\n") == ["1···", "11··", "111·", "1111"]
    axes = draw(causal([4]), tiles)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0: 33.3%", "rank 1: 66.7%"]
    assert np.allclose(
        axes.images[0].get_array()[3, 0], (255 / 255, 127 / 255, 14 / 255)
    )  # full colour: all heads are there


def test_many_ranks_and_long_masks_are_drawn(tmp_path: Path):
    mask = window_with_sinks([131072])
    plan = ring_plan(zigzag([0, 131072], 24), ranks=tuple(range(24)))
    draw(causal([131072]), plan.tiles, cells=48).figure.savefig(tmp_path / "many.png")
    axes = draw(mask, cells=64)
    assert axes.get_title() == "Mask of 1 documents" and axes.get_legend() is None


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"equipoise\[plot\]"):
        draw(causal([3]))
