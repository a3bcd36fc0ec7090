"""A proof that has never failed proves nothing: each broken copy of schema.sql is caught by name."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from calls import CLOCK, scratch
from conftest import SOAK
from interleave import Explorer, gated_database
from mutants import MUTANTS, Caught, Mutant

from leasetask import schema
from leasetask.testing.server import Databases


@contextmanager
def database(databases: Databases, script: str, *, gated: bool) -> Iterator[str]:
    """Give a database with this script instead of schema.sql."""
    if gated:
        with gated_database(databases, script) as dsn:
            yield dsn
        return
    with databases.fresh(migrated=False) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(script.encode())
            conn.execute(CLOCK)
        yield dsn


def run(caught: Caught, dsn: str) -> None:
    """Run a check; it fails if the schema is broken."""
    if caught.check is not None:
        session = scratch(dsn)
        try:
            session.clear()
            caught.check(session)
        finally:
            session.conn.close()
    elif caught.program is not None:
        explorer = Explorer(dsn)
        try:
            explorer.explore(caught.program())
        finally:
            explorer.close()


def told(error: BaseException) -> str:
    """Return the error's text and the line of the check that raised it."""
    first = error.__cause__ or error
    return f"{error}\n{traceback.extract_tb(first.__traceback__)[-1].line}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(databases: Databases, mutant: Mutant) -> None:
    script = mutant.apply(schema.sql())
    with (
        database(databases, script, gated=mutant.caught.gated) as dsn,
        pytest.raises((AssertionError, psycopg.Error)) as failure,
    ):
        run(mutant.caught, dsn)
    assert re.search(mutant.caught.says, told(failure.value)), told(failure.value)


@pytest.mark.parametrize(
    "mutant",
    [mutant for mutant in MUTANTS if SOAK or mutant.caught.check is not None],
    ids=lambda mutant: mutant.name,
)
def test_the_check_of_a_mutant_passes_the_unbroken_schema(
    whole: dict[bool, str], mutant: Mutant
) -> None:
    """The programs among the checks are those of test_interleavings, or few more."""
    run(mutant.caught, whole[mutant.caught.gated])


@pytest.fixture(scope="module")
def whole(databases: Databases) -> Iterator[dict[bool, str]]:
    """The unbroken schema, without gates and with."""
    with (
        database(databases, schema.sql(), gated=False) as plain,
        database(databases, schema.sql(), gated=True) as gated,
    ):
        yield {False: plain, True: gated}
