"""The hard cases that the SQL functions alone must get right, each told by one session.

Those that need several sessions (H01, H04, H05, H21, H28, H43, H44) are in test_interleavings.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import CLOCK, Session, scratch
from checks import CHECKS

from leasetask.testing.server import Databases


@pytest.fixture(scope="module")
def scratched(databases: Databases) -> Iterator[Session]:
    with databases.fresh() as dsn:
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
