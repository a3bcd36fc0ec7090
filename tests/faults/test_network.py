"""The network freezes, resets, or loses an acknowledgement between worker and server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from conftest import SOAK
from network import Proxy
from servers import Server, dsn_of, one_server
from support import Fleet, column, enqueue, pass_time, wait_for_end, wait_until

from leasetask import schema

TURNS = 50 if SOAK else 5
LEASE = 1.5


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with one_server() as server:
        schema.migrate(server.dsn)
        yield server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def db(server: Server) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("truncate leasetask.task, leasetask.kind cascade")
        yield conn


@pytest.fixture
def fleet(proxy: Proxy, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(dsn_of(proxy.port), tmp_path) as fleet:
        yield fleet


def test_h37_a_lost_acknowledgement_is_recognised(
    proxy: Proxy, db: psycopg.Connection, fleet: Fleet
) -> None:
    """H37: completions and checkpoints are committed, and their answers lost (soak: 50 times).

    The worker sends them again with the same token and hears that they are done: no handler and no
    recorded step runs again.
    """
    fleet.start("outage", "--poll", "0.1", lease=60)
    for number in range(TURNS):
        lost = proxy.lost_answers
        proxy.lose_answer("leasetask commit")
        task = enqueue(db, "steps", number)
        wait_until(lambda task=task: column(db, "status", task) == "succeeded", 20)
        assert proxy.lost_answers == lost + 1
        assert column(db, "runs", task) == 1
    expected = {f"step {n} {step}": 1 for n in range(TURNS) for step in range(3)}
    assert Counter(entry.what for entry in fleet.ledger.entries()) == expected


def test_connections_that_are_reset_at_any_moment(
    proxy: Proxy, db: psycopg.Connection, fleet: Fleet
) -> None:
    """All connections are cut again and again (soak: 50 times): nothing is lost, no step runs twice."""
    worker = fleet.start("outage", "--poll", "0.1", "--concurrency", "10", lease=2)
    for turn in range(TURNS):
        for number in range(turn * 20, turn * 20 + 20):
            enqueue(db, "steps", number)
        fleet.ledger.wait_for(f"step {turn * 20 + 5} 1", seconds=30)
        assert proxy.reset() > 0
    assert wait_for_end(db, 60) == {"succeeded": TURNS * 20}
    assert not worker.ended()


def test_a_network_that_freezes(proxy: Proxy, db: psycopg.Connection, fleet: Fleet) -> None:
    """Nothing passes and nothing is closed, for longer than a lease: as if a cable were pulled.

    The handler learns of the loss by the local clock alone; another worker, whose way is free, goes
    on; when the network is back the first one works again.
    """
    cut_off = fleet.start("outage", "--poll", "0.1", lease=LEASE)
    watched = enqueue(db, "watches")
    fleet.ledger.wait_for("watches: run 1")
    proxy.freeze()
    fleet.ledger.wait_for("watches: told of the loss")
    free = fleet.start("outage", "--poll", "0.1", lease=LEASE, LEASETASK_DSN=dsn_of(proxy.target))
    wait_until(lambda: column(db, "status", watched) == "succeeded", 20)
    free.kill()
    enqueue(db, "quick", 1)
    proxy.thaw()
    fleet.ledger.wait_for("quick 1", seconds=30)
    assert not cut_off.ended()


def test_h13_heartbeats_alone_do_not_get_through(
    proxy: Proxy, db: psycopg.Connection, fleet: Fleet
) -> None:
    """H13: the worker tells its handlers, claims nothing more, and recovers by itself."""
    worker = fleet.start("outage", "--poll", "0.1", lease=LEASE)
    watched = enqueue(db, "watches")
    fleet.ledger.wait_for("watches: run 1")
    proxy.freeze("leasetask heartbeat")
    fleet.ledger.wait_for("watches: told of the loss")
    pass_time(LEASE)  # from the last beat that got through
    enqueue(db, "quick", 1)
    pass_time(LEASE)
    assert fleet.ledger.count("quick 1") == 0, "it claims what it could not keep"
    proxy.thaw()
    fleet.ledger.wait_for("quick 1", seconds=30)
    wait_until(lambda: column(db, "status", watched) == "succeeded", 20)
    assert not worker.ended()


def test_h13_a_background_thread_that_dies_ends_the_worker(
    db: psycopg.Connection, fleet: Fleet
) -> None:
    """H13: with a status that is not zero, and one line that says why; the tasks go to others."""
    worker = fleet.start("mortal", lease=1)
    task = enqueue(db, "waits")
    assert worker.wait(20) == 1
    assert "worker" in worker.log
    assert "heartbeats cannot go on" in worker.log
    fleet.start("outage", lease=1)
    wait_until(lambda: column(db, "status", task) != "running", 20, "for its lease's end")
