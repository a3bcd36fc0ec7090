"""H45: a worker frozen inside `ctx.transaction` holds its business locks for one lease, no longer."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from support import Fleet, column, enqueue, wait_for_end, wait_until

LEASE = 1.0


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_h45_the_rightful_owner_gets_on(
    dsn: str,
    db: psycopg.Connection,
    tmp_path: Path,
    isolation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frozen one's transaction is ended by the server, and its writes are gone for good."""
    monkeypatch.setenv("ISOLATION", isolation)
    db.execute("create table account (balance int, by text)")
    db.execute("insert into account values (10, 'nobody')")
    task = enqueue(db, "pay", max_attempts=5)
    with Fleet(dsn, tmp_path) as fleet:
        frozen = fleet.start("frozen", lease=LEASE)
        first = f"booked by {frozen.pid}"
        fleet.ledger.wait_for(first)
        frozen.freeze()
        fleet.gate("second").touch()
        other = fleet.start("frozen", lease=LEASE)
        assert wait_for_end(db, 15) == {"succeeded": 1}
        assert db.execute("select balance, by from account").fetchone() == (9, str(other.pid))
        fleet.gate("go").touch()
        frozen.thaw()
        wait_until(lambda: "nothing" in frozen.log or "lost" in frozen.log, 10, "for it to learn")
        assert db.execute("select balance, by from account").fetchone() == (9, str(other.pid))
        assert column(db, "result", task) == str(other.pid)
