"""Fixtures shared by all tests, and an order of files that keeps two cores busy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Ranks, start_server
from tests.scripts import Ran, Scripts

SCRIPTS = pytest.StashKey[Scripts]()
NUMBER = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "script(path, *options, status=0): runs beside other tests, see tests/scripts.py"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """In whole folders there are tests with ranks: their server compiles the planners while tests are collected."""
    if any(Path(arg).is_dir() for arg in session.config.args) and not session.config.option.collectonly:
        start_server()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files without ranks come first: what takes one core runs beside the server of ranks and the scripts."""
    with_ranks = {item.path for item in items if "ranks" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.get_closest_marker("script") is not None, item.path in with_ranks))


def pytest_collection_finish(session: pytest.Session) -> None:
    marked = [item for item in session.items if item.get_closest_marker("script") and not is_skipped(item)]
    for number, item in enumerate(marked):
        item.stash[NUMBER] = number
    if marked and not session.config.option.collectonly:
        session.stash[SCRIPTS] = Scripts([item.get_closest_marker("script").args for item in marked])  # type: ignore[union-attr]


def is_skipped(item: pytest.Item) -> bool:
    """By the condition of a mark."""
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if scripts := session.stash.get(SCRIPTS, None):
        scripts.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks.run(function, world, *args)`: see tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Ran:
    """The script of the test's mark, once it has ended: see tests/scripts.py."""
    mark, scripts = request.node.get_closest_marker("script"), request.session.stash[SCRIPTS]
    return scripts.result(request.node.stash[NUMBER], **mark.kwargs)
