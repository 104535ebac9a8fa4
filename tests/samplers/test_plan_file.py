"""Plans on disk: they come back as they were, and damage or another configuration is told."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from equipoise import StepPlan, plan
from equipoise.recipes import Recipe
from equipoise.samplers.plan_file import plan_bytes, plan_from_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loaders.solvers import content
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
    for other in (back, plan_from_bytes(plan_bytes(made), made.config)):
        assert content(other) == content(made)
        assert other.slot.flags.writeable  # or kernels are compiled once more


def test_speeds_come_back(tmp_path: Path) -> None:
    made = plan(LENGTHS, "vrsp", dp=2, max_tokens_per_rank=64, speeds=(1.0, 0.9))
    made.save(tmp_path / "step.npz")
    assert StepPlan.load(tmp_path / "step.npz", made.config).digest == made.digest


def test_pools_come_back(tmp_path: Path) -> None:
    made = plan(LENGTHS, "libra", dp=4, cp=2, max_tokens_per_rank=32)
    made.save(tmp_path / "step.npz")
    back = StepPlan.load(tmp_path / "step.npz", made.config)
    assert content(back) == content(made) and back.describe() == made.describe()
    assert np.array_equal(back.loads().cost, made.loads().cost)


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


MADE = plan(LENGTHS, "chunkflow", dp=2, max_tokens_per_rank=32)
BYTES = plan_bytes(MADE)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(BYTES) - 1), flip=st.integers(1, 255), cut=st.booleans())
def test_bytes_with_any_damage_are_refused(at: int, flip: int, cut: bool) -> None:
    damaged = BYTES[:at] if cut else BYTES[:at] + bytes([BYTES[at] ^ flip]) + BYTES[at + 1 :]
    with pytest.raises(ValueError, match="were damaged"):
        plan_from_bytes(damaged)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(BYTES) - 9), flip=st.integers(1, 255))
def test_a_file_with_any_damage_is_refused_or_still_right(tmp_path_factory, at: int, flip: int) -> None:
    """Some bytes of an archive, such as its dates, say nothing about the plan."""
    archive = BYTES[8:]
    path = tmp_path_factory.mktemp("damaged") / "step.npz"
    path.write_bytes(archive[:at] + bytes([archive[at] ^ flip]) + archive[at + 1 :])
    try:
        back = StepPlan.load(path)
    except ValueError:
        return
    assert content(back) == content(MADE)


def test_bytes_of_another_configuration_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the plan was planned under another configuration .*seed: saved 0, now 1"):
        plan_from_bytes(BYTES, {**MADE.config, "seed": 1})


def _with_member(name: str, member: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(BYTES[8:])) as old, zipfile.ZipFile(made, "w", compression) as new:
        for each in old.namelist():
            new.writestr(each, member if each == name else old.read(each))
    return made.getvalue()


def test_what_a_header_claims_is_not_believed(tmp_path: Path) -> None:
    """Neither a terabyte of slots, nor objects, nor gigabytes behind a compression."""
    path = tmp_path / "step.npz"
    claims = io.BytesIO()
    np.lib.format.write_array_header_1_0(claims, {"descr": "<i8", "fortran_order": False, "shape": (1 << 37,)})
    objects = io.BytesIO()
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    zeros = io.BytesIO()
    np.save(zeros, np.zeros(1 << 20, np.int64))
    for wrong, told in (
        (_with_member("slot.npy", claims.getvalue() + bytes(64)), "its header says"),
        (_with_member("slot.npy", objects.getvalue()), "holds object"),
        (_with_member("slot.npy", zeros.getvalue(), zipfile.ZIP_DEFLATED), "plans are not compressed"),
    ):
        path.write_bytes(wrong)
        tracemalloc.start()
        with pytest.raises(ValueError, match=told):
            StepPlan.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
