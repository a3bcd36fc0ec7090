"""Upgraded while running: new schema applied under load, new code beside the old and after it."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import psycopg
from support import COMMAND, Fleet, enqueue, wait_for_end, wait_until

from leasetask import App

ORDERS = range(60)
CLAIMING = """
select count(*) from pg_stat_activity
where application_name = 'leasetask claim' and datname = current_database()"""
UP_TO_THE_WAIT = """
select count(*) from leasetask.task where status = 'waiting' and wait_topic is not null"""


def test_an_upgrade_under_load_loses_and_doubles_nothing(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    """Old workers run and wait; the schema is applied again; new workers start; the old ones drain.

    Tasks of the old release that wait are gone on with by the new one, which has a step put in
    between and one more at the end. The ledger and the business table say that each happened once.
    """
    db.execute("create table business (number int, what text)")
    app = App(dsn)
    with Fleet(dsn, tmp_path) as fleet:
        old = [fleet.start("upgraded", "--grace", "5", lease=3, RELEASE="1") for _ in range(2)]
        wait_until(lambda: db.execute(CLAIMING).fetchone() == (2,), 20, "for both workers")
        for number in ORDERS[:40]:
            enqueue(db, "order", number, key=str(number))
        wait_until(lambda: db.execute(UP_TO_THE_WAIT).fetchone() == (40,), 20, "for them to wait")
        db.execute("delete from leasetask.schema_version")
        migrating = subprocess.Popen([COMMAND, "migrate", "--dsn", dsn], stdout=subprocess.DEVNULL)
        for number in ORDERS[:20]:
            app.signal(f"paid:{number}")
        assert migrating.wait(30) == 0
        fleet.start("upgraded", lease=3, RELEASE="2")
        for number in ORDERS[40:]:
            enqueue(db, "order", number, key=str(number), version=2 if number % 2 else 1)
        for worker in old:
            worker.terminate()
            assert worker.wait(20) == 0
        for number in ORDERS[20:]:
            app.signal(f"paid:{number}")
        assert wait_for_end(db, 60) == {"succeeded": len(ORDERS)}
        noted = Counter(entry.what for entry in fleet.ledger.entries())
    app.close()
    assert [noted[f"reserve {number}"] for number in ORDERS] == [1] * len(ORDERS)
    rows = db.execute("select number, what from business").fetchall()
    assert Counter(rows) == {(n, what): 1 for n in ORDERS for what in ("booked", "shipped")}
    by_release = dict(
        db.execute("select idempotency_key::int, result::int from leasetask.task").fetchall()
    )
    thanked = {number for number in ORDERS if noted[f"thank {number}"]}
    assert thanked == {number for number, release in by_release.items() if release == 2}
    assert set(ORDERS[20:]) <= thanked
