"""The outbox: each committed row becomes exactly one task, whoever dies in between."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg
import pytest
from conftest import SOAK
from helpers import working

from leasetask import App, Context, outbox
from leasetask.errors import SchemaError


@pytest.fixture
def business(empty_dsn: str) -> str:
    outbox.install(empty_dsn)
    outbox.install(empty_dsn)
    return empty_dsn


def write(business: str, *rows: tuple[str, str, object]) -> None:
    with psycopg.connect(business) as db:
        for kind, key, payload in rows:
            db.execute(
                "insert into outbox_event (kind, idempotency_key, payload) values (%s, %s, %s)",
                [kind, key, json.dumps(payload)],
            )


def states(business: str) -> list[tuple[str, str | None]]:
    with psycopg.connect(business) as db:
        return db.execute("select status, error from outbox_event order by id").fetchall()


def test_rows_become_tasks_once(dsn: str, db: psycopg.Connection, business: str) -> None:
    write(business, ("a", "1", {"x": 1}), ("b", "1", None), ("a", "2", [1]), ("a", "1", {"x": 1}))
    assert outbox.dispatch(business, dsn) == outbox.Dispatched(4, 0)
    assert outbox.dispatch(business, dsn) == outbox.Dispatched(0, 0)
    tasks = db.execute("select kind, idempotency_key, input from leasetask.task order by 1, 2")
    assert tasks.fetchall() == [("a", "1", {"x": 1}), ("a", "2", [1]), ("b", "1", None)]
    assert {status for status, _ in states(business)} == {"dispatched"}
    assert outbox.prune(business, 0) == 4
    assert states(business) == []


def test_a_refused_row_is_marked_and_blocks_nobody(dsn: str, business: str) -> None:
    write(business, ("a", "1", 1), ("a", "1", 2), ("a", "k" * 2000, 3), ("", "1", 4), ("b", "2", 5))
    assert outbox.dispatch(business, dsn) == outbox.Dispatched(2, 3)
    found = states(business)
    assert [s for s, _ in found] == ["dispatched", "refused", "refused", "refused", "dispatched"]
    assert "another input" in found[1][1]
    assert "1 to 1000 bytes" in found[3][1]
    assert all("\n" not in (error or "") for _, error in found)


def test_without_the_table_the_mend_is_named(dsn: str, empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="leasetask outbox install"):
        outbox.dispatch(empty_dsn, dsn)


def test_a_worker_dispatches(dsn: str, business: str) -> None:
    app = App(dsn)

    @app.task
    def double(ctx: Context, n: int) -> int:
        return n * 2

    with working(app, roles=("worker", "sweep", "outbox"), outbox=business):
        write(business, ("double", "k", 21))
        with psycopg.connect(business, autocommit=True) as db:
            for _ in range(2000):
                row = db.execute("select task_id::text from outbox_event").fetchone()
                if row[0]:
                    break
                db.execute("select pg_sleep(0.005)")
        assert app.wait(row[0], timeout=10).result == 42


DISPATCH = "from leasetask import outbox; import sys; outbox.dispatch(sys.argv[1], sys.argv[2])"


def test_killed_dispatchers_lose_and_double_nothing(
    dsn: str, db: psycopg.Connection, business: str
) -> None:
    """Two dispatchers, killed again and again while they work."""
    rows = 100_000 if SOAK else 5_000
    with psycopg.connect(business) as conn:
        conn.execute(
            "insert into outbox_event (kind, idempotency_key, payload) "
            "select 'k', 'key-' || g, to_jsonb(g) from generate_series(1, %s) g",
            [rows],
        )
    kills = 0
    with psycopg.connect(business, autocommit=True) as conn:
        done = 0
        while done < rows:
            pair = [
                subprocess.Popen([sys.executable, "-c", DISPATCH, business, dsn]) for _ in range(2)
            ]
            target = min(rows, done + max(500, rows // 5))
            while done < target and any(p.poll() is None for p in pair):
                query = "select count(*) from outbox_event where status = 'dispatched'"
                done = conn.execute(query).fetchone()[0]
            for process in pair:
                if process.poll() is None:
                    process.kill()
                    kills += 1
                process.wait()
            done = conn.execute(query).fetchone()[0]
    assert kills > 0
    counted = "select count(*), count(distinct idempotency_key) from leasetask.task"
    assert db.execute(counted).fetchone() == (rows, rows)
