"""The package as it is installed: a wheel with every module and nothing else, a lazy face, examples that run."""

from __future__ import annotations

import doctest
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import equipoise
import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("packing", "samplers", "attention", "loaders")
MODULES = sorted(
    ".".join(("equipoise", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
)


def test_the_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "any-name"
    skip = shutil.ignore_patterns(
        ".git", ".venv", "build", "runs", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, source, ignore=skip)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"{module.replace('.', '/')}.py" for module in MODULES}
    packages = {"equipoise", *(f"equipoise.{room}" for room in ROOMS), "equipoise.attention.kernels"}
    expected -= {f"{package.replace('.', '/')}.py" for package in packages}
    expected |= {f"{package.replace('.', '/')}/__init__.py" for package in packages} | {"equipoise/py.typed"}
    assert names == expected


def test_import_is_lazy() -> None:
    """Nothing heavy is imported until a name needs it; planning names need no torch."""
    code = (
        "import sys, equipoise\n"
        "assert not {'numpy', 'numba', 'torch', 'datasets'} & set(sys.modules), sorted(sys.modules)\n"
        "equipoise.recipe('wlb'), equipoise.Lengths, equipoise.AttentionPlan\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in equipoise.__all__:
        assert getattr(equipoise, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = equipoise.nothing
    assert set(equipoise.__all__) <= set(dir(equipoise))


def test_a_second_import_under_the_folders_name_works() -> None:
    """pytest imports the root ``__init__.py`` again under the checkout folder's name, whatever that is."""
    spec = importlib.util.spec_from_file_location("checkout-1", ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
