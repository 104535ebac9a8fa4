"""Plans on disk: they come back as they were, and damage or another configuration is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from equipoise import StepPlan, plan
from equipoise.recipes import Recipe

from tests.strategies import RECIPES

LENGTHS = np.array([30, 9, 3, 22, 5, 12, 1, 4, 4, 17])


@pytest.mark.parametrize("chosen", RECIPES, ids=lambda recipe: recipe.name)
def test_a_plan_comes_back_as_it_was(chosen: Recipe, tmp_path: Path) -> None:
    cp = 1 if chosen.shard == "whole" else 2
    made = plan(LENGTHS, chosen, dp=2, cp=cp, max_tokens_per_rank=32)
    made.save(tmp_path / "step.npz")
    back = StepPlan.load(tmp_path / "step.npz", made.config)
    assert back.digest == made.digest and back.describe() == made.describe() and back.config == made.config
    assert np.array_equal(back.operations(1), made.operations(1))
    back.check()


def test_speeds_come_back(tmp_path: Path) -> None:
    made = plan(LENGTHS, "vrsp", dp=2, max_tokens_per_rank=64, speeds=(1.0, 0.9))
    made.save(tmp_path / "step.npz")
    assert StepPlan.load(tmp_path / "step.npz", made.config).digest == made.digest


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    made = plan(LENGTHS, "vrsp", dp=2, max_tokens_per_rank=64)
    made.save(tmp_path / "step.npz")
    other = plan(LENGTHS, "vrsp", dp=2, max_tokens_per_rank=48)
    with pytest.raises(ValueError, match="max_tokens_per_rank: saved 64, now 48"):
        StepPlan.load(tmp_path / "step.npz", other.config)


def test_damage_is_refused(tmp_path: Path) -> None:
    made = plan(LENGTHS, "wlb", dp=2, max_tokens_per_rank=64)
    path = tmp_path / "step.npz"
    made.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no complete plan file"):
        StepPlan.load(path)
    with _saved(made, path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["slot"] = arrays["slot"][::-1] + 1
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="was changed: its arrays have digest"):
        StepPlan.load(path)


def _saved(made: StepPlan, path: Path) -> np.lib.npyio.NpzFile:
    made.save(path)
    return np.load(path)
