"""H26: a transaction-mode pooler between the engine and the database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pooler import pooled
from servers import Server, one_server
from support import Fleet, enqueue, wait_for_end, wait_until

from leasetask import App, Context, schema


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with one_server() as server:
        schema.migrate(server.dsn)
        yield server


@pytest.fixture
def through(server: Server) -> Iterator[str]:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("truncate leasetask.task, leasetask.kind, leasetask.idle_worker cascade")
    with pooled(server.dsn) as dsn:
        yield dsn


def test_h26_everything_works_through_a_pooler(
    server: Server, through: str, tmp_path: Path
) -> None:
    """Two workers and four producers through it: nothing is mixed up; one warning says what it costs."""
    with Fleet(through, tmp_path) as fleet:
        workers = [fleet.start("outage", "--poll", "0.1", lease=5) for _ in range(2)]
        app = App(through)

        @app.task
        def steps(ctx: Context, number: int) -> int:
            return number

        def produce(first: int) -> None:
            for number in range(first, first + 50):
                app.enqueue(steps, number, key=f"key-{number}")

        threads = [threading.Thread(target=produce, args=(i * 50,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with psycopg.connect(server.dsn, autocommit=True) as db:
            assert wait_for_end(db, 60) == {"succeeded": 200}
            wrong = """select count(*) from leasetask.task
              where result <> input or idempotency_key <> 'key-' || (input #>> '{}')"""
            assert db.execute(wrong).fetchone() == (0,)
            left = "select count(*) from pg_stat_activity where query = 'listen leasetask'"
            assert db.execute(left).fetchone() == (0,), "LISTEN was left on a server of the pool"
            assert db.execute("select count(*) from leasetask.idle_worker").fetchone() == (0,)
        app.close()
        for worker in workers:
            assert worker.log.count("a transaction-mode pooler stands before the database") == 1
            assert "ERROR" not in worker.log


def test_h26_notifications_come_by_a_direct_way(
    server: Server, through: str, tmp_path: Path
) -> None:
    """With --listen-dsn a task starts at once, however rarely the worker polls."""
    with Fleet(through, tmp_path) as fleet, psycopg.connect(server.dsn, autocommit=True) as db:
        worker = fleet.start("outage", "--poll", "300", lease=60, LEASETASK_LISTEN_DSN=server.dsn)
        idle = "select count(*) from leasetask.idle_worker"
        wait_until(lambda: db.execute(idle).fetchone() == (1,), 20, "for it to be idle")
        enqueue(db, "quick", 1)
        fleet.ledger.wait_for("quick 1", seconds=20)
        assert "pooler stands" not in worker.log


def test_transactions_work_through_a_pooler(server: Server, through: str) -> None:
    """A business write, fenced, with its settings and isolation for this transaction alone."""
    app = App(through)

    @app.task
    def books(ctx: Context, number: int) -> None:
        for isolation in ("read committed", "serializable"):
            ctx.transaction(
                isolation,
                lambda db: db.execute("insert into booked values (%s)", [number]) and None,
                isolation=isolation,
            )

    with psycopg.connect(server.dsn, autocommit=True) as db:
        db.execute("drop table if exists booked; create table booked (number int)")
        with app.start(concurrency=8, lease=10):
            for number in range(20):
                app.enqueue(books, number)
            assert wait_for_end(db, 60) == {"succeeded": 20}
        counted = "select count(*), count(distinct number) from booked"
        assert db.execute(counted).fetchone() == (40, 20)
    app.close()
