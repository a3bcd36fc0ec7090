"""The pytest plugin: `leasetask_db`, a migrated database per test, and `leasetask_engine` on it.

The server is LEASETASK_TEST_DSN, a container, or the embedded one. Databases are copied from a
template that is migrated once per process, so tests may run in parallel under pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from leasetask.app import App
from leasetask.testing.engine import Engine
from leasetask.testing.server import Databases, shared_databases


@pytest.fixture(scope="session")
def leasetask_databases() -> Databases:
    """The server of this test session, and the template."""
    return shared_databases()


@pytest.fixture
def leasetask_db(leasetask_databases: Databases) -> Iterator[str]:
    """The DSN of a migrated database of the test's own."""
    with leasetask_databases.fresh() as dsn:
        yield dsn


@pytest.fixture
def leasetask_engine(leasetask_db: str) -> Iterator[Callable[[App], Engine]]:
    """Makes an `Engine` for an App on the test's own database: `engine = leasetask_engine(app)`."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(Engine(app, leasetask_db))
