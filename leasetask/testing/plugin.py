"""The pytest plugin: `leasetask_db`, a migrated database per test, and `leasetask_engine` on it.

The server is LEASETASK_TEST_DSN, a container, or the embedded one. Databases are copied from a
template that is migrated once per process, so tests may run in parallel under pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from leasetask.app import App
from leasetask.testing.engine import Engine
from leasetask.testing.server import Databases, found_server


@pytest.fixture(scope="session")
def leasetask_databases() -> Iterator[Databases]:
    """The server of this test session, and the template."""
    with found_server() as server:
        databases = Databases(server)
        yield databases
        databases.close()


@pytest.fixture
def leasetask_db(leasetask_databases: Databases) -> Iterator[str]:
    """The DSN of a migrated database of the test's own."""
    with leasetask_databases.fresh() as dsn:
        yield dsn


@pytest.fixture
def leasetask_engine(leasetask_db: str) -> Iterator[Callable[[App], Engine]]:
    """Makes an `Engine` for an App on the test's own database: `engine = leasetask_engine(app)`."""
    engines: list[Engine] = []

    def make(app: App) -> Engine:
        engines.append(Engine(app, leasetask_db))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
