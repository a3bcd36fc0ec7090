"""Every test runs on a real PostgreSQL; `make long` sets LEASETASK_SOAK for the full numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis  # noqa: F401  # its plugin imports it after the tests: too late for CPython 3.11
import psycopg
import pytest

from leasetask.testing.server import Databases

SOAK = bool(os.environ.get("LEASETASK_SOAK"))


@pytest.fixture(scope="session")
def databases(leasetask_databases: Databases) -> Databases:
    """The plugin that users get is the one that our own tests stand on."""
    return leasetask_databases


@pytest.fixture
def dsn(databases: Databases) -> Iterator[str]:
    """A migrated database of the test's own."""
    with databases.fresh() as dsn:
        yield dsn


@pytest.fixture
def db(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to the test's database, in autocommit."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def empty_dsn(databases: Databases) -> Iterator[str]:
    """A database without the schema."""
    with databases.fresh(migrated=False) as dsn:
        yield dsn
