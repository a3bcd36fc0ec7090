"""The server goes away, comes back, changes places or takes no writes: nothing is lost or run twice."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from conftest import SOAK
from servers import Pair, Server, a_pair, dsn_of, one_server, wait_for_server
from support import Fleet, column, enqueue, pass_time, statuses, wait_for_end, wait_until

from leasetask import App, Context, pools, schema
from leasetask.errors import DatabaseUnavailable
from leasetask.pools import Pool

AWAY = 60.0 if SOAK else 2.0
"""Seconds that the server is away."""

FAILOVERS = 20 if SOAK else 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with one_server() as server:
        schema.migrate(server.dsn)
        yield server


@pytest.fixture
def fleet(server: Server, tmp_path: Path) -> Iterator[Fleet]:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("truncate leasetask.task, leasetask.kind cascade")
    with Fleet(server.dsn, tmp_path) as fleet:
        yield fleet


def connected(dsn: str) -> psycopg.Connection:
    return psycopg.connect(dsn, autocommit=True)


def times_said(log: str, words: str) -> Counter[str]:
    """Count the log's lines with these words by the part of the worker that says so."""
    return Counter(re.findall(rf"leasetask: ([^:]*): {words}", log))


def test_h38_a_ready_result_survives_an_outage(server: Server, fleet: Fleet) -> None:
    """H38: away for a while (soak: 60 s). The process stays, says so once, and commits what it has.

    The handler's result is ready while the server is away; its lease lasts longer. Recovered within
    3 s of the moment at which the server accepts connections.
    """
    worker = fleet.start("outage", "--concurrency", "4", lease=120)
    with connected(server.dsn) as db:
        kept = enqueue(db, "finishes")
    fleet.ledger.wait_for("finishes: begins")
    server.stop("immediate")
    fleet.gate("go").touch()
    fleet.ledger.wait_for("finishes: has its result")
    pass_time(AWAY)
    assert not worker.ended()
    server.start()
    back = time.monotonic()
    with connected(server.dsn) as db:
        enqueue(db, "quick", 1)
        assert wait_for_end(db) == {"succeeded": 2}
        assert column(db, "runs", kept) == 1
        assert column(db, "result", kept) == "kept"
    assert fleet.ledger.wait_for("quick 1").at - back < 3
    assert fleet.ledger.count("finishes: begins") == 1
    away = times_said(worker.log, "the database is away")
    assert away
    assert set(away.values()) == {1}, "one line for a change of state, not for each try"
    wait_until(
        lambda: times_said(worker.log, "the database is back") == away, 10, "for all to be back"
    )


@pytest.mark.parametrize("colour", ["def", "async def"])
def test_a_producer_goes_on_after_a_restart(server: Server, fleet: Fleet, colour: str) -> None:
    """Its pool's connections have gone: no call pays for that with an error. Away, it says so."""
    app = App(server.dsn)

    @app.task
    def work(ctx: Context, number: int) -> None: ...

    async def enqueues(number: int) -> str:
        return (await app.enqueue_async(work, number)).outcome

    with asyncio.Runner() as runner:

        def outcome(number: int) -> str:
            if colour == "def":
                return app.enqueue(work, number).outcome
            return runner.run(enqueues(number))

        assert outcome(1) == "new"
        server.stop("immediate")
        server.start()
        assert outcome(2) == "new"
        server.stop("immediate")
        with pytest.raises(DatabaseUnavailable, match="no connection to PostgreSQL"):
            outcome(3)
        server.start()
        assert outcome(4) == "new"
        app.close()
        runner.run(app.close_async())
    with connected(server.dsn) as db:
        made = db.execute("select array_agg(input::int order by id) from leasetask.task").fetchone()
    assert made == ([1, 2, 4],)


def test_a_pool_that_waits_to_connect_is_replaced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is back: so is the pool, whatever pause psycopg-pool has come to."""
    pool = Pool(server.dsn, "pooled", 2, transactional=False)
    with pytest.raises(psycopg.OperationalError), pool.connection() as conn:
        server.stop("immediate")
        conn.execute("select 1")
    with monkeypatch.context() as hasty:
        hasty.setattr(pools, "PATIENCE", 0.1)
        with pytest.raises(DatabaseUnavailable, match="a connection after"), pool.connection():
            pass
    with pytest.raises(DatabaseUnavailable, match="Connection refused"), pool.connection():
        pass
    server.start()
    with pool.connection() as conn:
        assert conn.execute("select 1").fetchone() == (1,)
    pool.close()


def test_h25_a_lost_listener_listens_again(server: Server, fleet: Fleet) -> None:
    """H25: what is enqueued just when the listening connection dies is claimed all the same.

    The poll interval is longer than the test: whatever starts was notified, or claimed because the
    listener was back.
    """
    listening = """select count(*) from pg_stat_activity
      where application_name = 'leasetask listen' and query = 'listen leasetask'"""
    worker = fleet.start("outage", "--poll", "300", lease=60)
    with connected(server.dsn) as db:
        for number in range(5):
            wait_until(lambda: db.execute(listening).fetchone() == (1,), 20, "for a listener")
            assert server.end_backends("leasetask listen") == 1
            enqueue(db, "quick", number)
            fleet.ledger.wait_for(f"quick {number}", seconds=20)
    assert not worker.ended()


def test_h37_backends_that_die_at_any_moment(server: Server, fleet: Fleet) -> None:
    """H37: the connections that claim and commit are killed again and again: each task ends, once."""
    fleet.start("outage", "--concurrency", "10", "--poll", "0.1", lease=2)
    numbers = range(200)
    with connected(server.dsn) as db:
        for number in numbers:
            enqueue(db, "quick", number)
            if number % 10 == 0:
                server.end_backends("leasetask commit")
                server.end_backends("leasetask claim")
        assert wait_for_end(db, 60) == {"succeeded": len(numbers)}
    ran = Counter(entry.what for entry in fleet.ledger.entries())
    assert ran == {f"quick {number}": 1 for number in numbers}


def test_h39_a_server_that_takes_no_writes(server: Server, fleet: Fleet) -> None:
    """H39: read-only from one moment to the next: as good as away, until it takes writes again."""
    worker = fleet.start("outage", "--poll", "0.1", lease=60)
    with connected(server.dsn) as db:
        enqueue(db, "quick", 1)
        fleet.ledger.wait_for("quick 1")
        enqueue(db, "quick", 2, delay=1.0)
        db.execute("alter system set default_transaction_read_only = on")
        db.execute("select pg_reload_conf()")
        try:
            wait_until(lambda: "the database is away" in worker.log, 20, "for it to notice")
        finally:
            db.execute("set default_transaction_read_only = off")
            db.execute("alter system reset default_transaction_read_only")
            db.execute("select pg_reload_conf()")
        assert wait_for_end(db) == {"succeeded": 2}
    assert not worker.ended()
    assert fleet.ledger.count("quick 2") == 1


def test_h39_a_pair_that_fails_over(tmp_path: Path) -> None:
    """H39: the primary is killed under load, the standby takes over (soak: 20 times): nothing is lost.

    The DSN names both. Every enqueue that was acknowledged is there afterwards, and has run; no
    step that is recorded runs again.
    """
    with a_pair() as pair:
        dsn = dsn_of(pair.primary.port, pair.standby.port)
        schema.migrate(dsn)
        with Fleet(dsn, tmp_path) as fleet:
            workers = [fleet.start("outage", "--poll", "0.2", lease=2) for _ in range(2)]
            # A worker that finds no server at its start ends; from then on it stays.
            claiming = (
                "select count(*) from pg_stat_activity where application_name = 'leasetask claim'"
            )
            with connected(dsn) as db:
                wait_until(lambda: db.execute(claiming).fetchone() == (2,), 20, "for both workers")
            acknowledged: set[int] = set()
            for turn in range(FAILOVERS):
                if turn:
                    pair.rebuild()
                acknowledged |= enqueued_through(pair, dsn, range(turn * 100, turn * 100 + 100))
            assert not any(worker.ended() for worker in workers)
            wait_for_server(dsn)
            with connected(dsn) as db:
                wait_for_end(db, 30)
                rows = db.execute("select input::int from leasetask.task").fetchall()
                assert acknowledged <= {number for (number,) in rows}
                assert set(statuses(db)) == {"succeeded"}
            bodies = Counter(entry.what for entry in fleet.ledger.entries())
            assert {f"step {n} {step}" for n in acknowledged for step in range(3)} <= set(bodies)


def enqueued_through(pair: Pair, dsn: str, numbers: range) -> set[int]:
    """Enqueue while the pair fails over half-way; return the acknowledged ones."""
    acknowledged = set()
    db = connected(dsn)
    for number in numbers:
        if number == numbers[50]:
            pair.fail_over()
        try:
            enqueue(db, "steps", number, key=str(number))
        except psycopg.OperationalError:
            db.close()
            wait_for_server(dsn)
            db = connected(dsn)
        else:
            acknowledged.add(number)
    db.close()
    return acknowledged
