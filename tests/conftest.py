"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks.run(function, world, *args)`: see tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()
