"""The hard cases that the SQL functions alone must get right, each told by one session.

Those that need several sessions (H01, H04, H05, H21, H28, H43, H44) are in test_interleavings.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from calls import CLOCK, Session, scratch
from checks import CHECKS
from mutants import BATCHED, BATCHED_CHECKPOINT

from leasetask import schema
from leasetask.testing.server import Databases


@pytest.fixture(scope="module", params=["as they come", "lone items as batches"])
def scratched(databases: Databases, request: pytest.FixtureRequest) -> Iterator[Session]:
    """Lone items have a shorter way of their own; both must keep the rules."""
    script = schema.sql()
    if request.param == "lone items as batches":
        for old, new in (BATCHED, BATCHED_CHECKPOINT):
            assert script.count(old) == 1, old
            script = script.replace(old, new)
    with databases.fresh(migrated=False) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(script.encode())
        session = scratch(dsn)
        session.do(CLOCK)
        yield session
        session.conn.close()


@pytest.mark.parametrize("check", CHECKS)
def test_a_rule_holds(scratched: Session, check: str) -> None:
    """H02, H03, H11, H14, H15, H18, H28, H37, H42: each check's docstring says which."""
    scratched.clear()
    scratched.at(0)
    CHECKS[check](scratched)
