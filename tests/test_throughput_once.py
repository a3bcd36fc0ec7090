"""Many quick tasks and two worker processes: each runs once, nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from conftest import SOAK
from support import Fleet, wait_for_end


def test_ten_thousand_tasks_run_once(dsn: str, db: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Must show (b): 10,000 no-ops (soak: 100,000), two processes; counted in a file."""
    number = 100_000 if SOAK else 10_000
    db.execute(
        "select count(*) from leasetask.enqueue_many("
        "'noop', array(select to_jsonb(i) from generate_series(1, %s::int) i))",
        [number],
    )
    with Fleet(dsn, tmp_path) as fleet:
        for _ in range(2):
            fleet.start("noop", "--concurrency", "100", lease=30)
        assert wait_for_end(db, 300 if SOAK else 60) == {"succeeded": number}
        entries = fleet.ledger.entries()
    assert sorted(int(entry.what) for entry in entries) == list(range(1, number + 1))
    assert len({entry.pid for entry in entries}) == 2
    left = db.execute("""
      select count(*) from leasetask.task
      where runs <> 1 or attempts <> 1 or lease_token is not null or last_error is not null""")
    assert left.fetchone() == (0,)
