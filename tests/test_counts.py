"""What tasks cost, in counts and not in seconds: statements, row versions, HOT, WAL, notifications."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from helpers import working
from support import wait_until

from leasetask import App, AsyncContext
from leasetask.link import Link
from leasetask.protocol import Query

Conn = psycopg.Connection[Any]


# --- statements ------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the statements that workers send, by the function called; empty claims do not count."""
    counted: Counter[str] = Counter()
    plain = Link.try_once

    async def counting(link: Link, query: Query) -> list[tuple[Any, ...]]:
        rows = await plain(link, query)
        name = query.sql.partition("leasetask.")[2].partition("(")[0]
        if name != "claim" or any(row[0] is not None for row in rows):
            counted[name] += 1
        return rows

    monkeypatch.setattr(Link, "try_once", counting)
    return counted


@contextmanager
def listening(app: App, db: Conn, **options: Any) -> Iterator[None]:
    """A worker whose start is over, and that beats no heart: what meets one is sent again."""
    with working(app, lease=60, **options):
        idle = "select count(*) from leasetask.idle_worker"
        wait_until(lambda: db.execute(idle).fetchone() == (1,), 20, "for it to be idle")
        yield


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_lone_task_costs_two_statements_and_one_a_step(
    dsn: str, db: Conn, sent: Counter[str], steps: int
) -> None:
    app = App(dsn)

    @app.task
    async def work(ctx: AsyncContext) -> None:
        for i in range(steps):
            await ctx.step(f"step-{i}", lambda: i)

    with listening(app, db):
        task = app.enqueue(work)
        app.wait(task.id, timeout=20)
    costs = {name: sent[name] for name in ("claim", "checkpoint", "note", "finish", "suspend")}
    assert costs == {"claim": 1, "checkpoint": steps, "note": 0, "finish": 1, "suspend": 0}


def test_tasks_that_are_ready_together_share_their_statements(
    dsn: str, db: Conn, sent: Counter[str]
) -> None:
    """Fifty tasks, ten steps each, in step with each other: batches, and none of them by time."""
    tasks, steps = 50, 10
    app = App(dsn)
    barrier = asyncio.Barrier(tasks)

    @app.task
    async def work(ctx: AsyncContext) -> None:
        for i in range(steps):
            await barrier.wait()
            await ctx.step(f"step-{i}", lambda: i)
        await barrier.wait()

    with listening(app, db, concurrency=tasks):
        for task in app.enqueue_many(work, [None] * tasks):
            app.wait(task.id, timeout=20)
    assert sent["claim"] == 1
    assert sent["checkpoint"] <= 2 * steps  # 500 steps
    assert sent["finish"] <= 2


# --- row versions, HOT, WAL ------------------------------------------------------------------


@dataclass
class Cost:
    """What one statement wrote to leasetask.task, and to all of WAL."""

    inserted: int = 0
    updated: int = 0
    hot: int = 0
    wal: int = 0


_WRITES = """
select pg_stat_get_xact_tuples_inserted(c), pg_stat_get_xact_tuples_updated(c),
       pg_stat_get_xact_tuples_hot_updated(c)
from (select 'leasetask.task'::regclass::oid) t (c)"""


def run(db: Conn, query: str, *parameters: Any) -> Cost:
    """Run a statement in a transaction of its own and count what it wrote."""
    with db.transaction():
        before = db.execute(_WRITES).fetchone()
        explained = db.execute(
            "explain (analyze, wal, format json) " + query, parameters
        ).fetchone()  # type: ignore[arg-type]
        after = db.execute(_WRITES).fetchone()
    assert before and after and explained
    plan = explained[0][0]["Plan"]
    # A checkpoint of the server in between puts whole pages into the WAL: those are not ours.
    wal = plan["WAL Bytes"] if plan["WAL FPI"] == 0 else 0
    return Cost(*(b - a for a, b in zip(before, after, strict=True)), wal)


_CLAIM_FIFTY = "select * from leasetask.claim('w', array['work'], array[1], 50, '1 hour')"


class Batch:
    """Tasks that a worker holds, driven by the calls that it makes."""

    def __init__(self, db: Conn, n: int) -> None:
        self._db = db
        query = (
            "select id::text, lease_token::text from leasetask.claim("
            "'host.example:12345:0123abcd', array['work'], array[1], %s, '1 hour')"
        )
        rows = [row for row in db.execute(query, [n]).fetchall() if row[0]]
        self.ids, self.tokens = [row[0] for row in rows], [row[1] for row in rows]

    def checkpoint(self, step: int) -> Cost:
        patch = json.dumps({f"step-{step}": {"n": step + 1, "ok": step}})
        query = "select * from leasetask.checkpoint(%s::uuid[], %s::uuid[], %s::jsonb[], '1 hour')"
        return run(self._db, query, self.ids, self.tokens, [patch] * len(self.ids))

    def heartbeat(self) -> Cost:
        query = "select * from leasetask.heartbeat(%s::uuid[], %s::uuid[], '1 hour')"
        return run(self._db, query, self.ids, self.tokens)

    def finish(self) -> Cost:
        query = "select * from leasetask.finish(%s::uuid[], %s::uuid[], %s::jsonb[])"
        return run(self._db, query, self.ids, self.tokens, ["1"] * len(self.ids))


@contextmanager
def quiet_table(db: Conn, tasks: int) -> Iterator[None]:
    """A table with tasks, in which autovacuum does not count too."""
    db.execute("alter table leasetask.task set (autovacuum_enabled = off)")
    enqueued = run(
        db,
        "select leasetask.enqueue_many('work', array("
        "select to_jsonb(i) from generate_series(1, %s::int) i))",
        tasks,
    )
    assert (enqueued.inserted, enqueued.updated) == (tasks, 0)
    yield


def test_a_step_is_one_row_version(db: Conn) -> None:
    """One version at enqueue, one at the claim, one for each step, one at the end: none besides."""
    with quiet_table(db, 100):
        claimed = run(db, _CLAIM_FIFTY)
        assert (claimed.inserted, claimed.updated) == (0, 50)
        batch = Batch(db, 50)
        for step in range(3):
            wrote = batch.checkpoint(step)
            assert (wrote.inserted, wrote.updated) == (0, 50)
        beat = batch.heartbeat()
        assert (beat.inserted, beat.updated) == (0, 50)
        ended = batch.finish()
        assert (ended.inserted, ended.updated) == (0, 50)
        assert db.execute("select count(*) from leasetask.task_step").fetchone() == (0,)


@pytest.mark.parametrize("together", [20, 100])
def test_steps_and_heartbeats_are_hot(db: Conn, together: int) -> None:
    """At least 95 of 100, for ten steps a task whose results stay inline."""
    steps, beats = Cost(), Cost()
    with quiet_table(db, 1000):
        while (batch := Batch(db, together)).ids:
            for step in range(10):
                add(steps, batch.checkpoint(step))
            for _ in range(3):
                add(beats, batch.heartbeat())
            batch.finish()
    assert steps.updated == 10_000
    assert steps.hot >= 0.95 * steps.updated
    assert beats.hot >= 0.95 * beats.updated


def add(total: Cost, more: Cost) -> None:
    total.updated += more.updated
    total.hot += more.hot


# Bytes a unit as measured on PostgreSQL 15 and 18, and what may be on top of it.
WAL = {"claim": 480, "step": 520, "heartbeat": 300, "finish": 530}
TOLERANCE = 1.3


def test_wal_per_unit(db: Conn) -> None:
    """Of a batch of fifty, after some that warm the pages up."""
    counted: dict[str, int] = {}
    with quiet_table(db, 500):
        while (batch := Batch(db, 50)).ids:
            steps = [batch.checkpoint(step).wal for step in range(10)]
            counted["step"] = sum(steps) // (50 * len(steps))
            counted["heartbeat"] = batch.heartbeat().wal // 50
            counted["finish"] = batch.finish().wal // 50
    with quiet_table(db, 100):
        counted["claim"] = run(db, _CLAIM_FIFTY).wal // 50
    too_much = {name: n for name, n in counted.items() if n > TOLERANCE * WAL[name]}
    assert not too_much, f"{too_much} of {counted}"


# --- notifications ---------------------------------------------------------------------------


@pytest.fixture
def heard(dsn: str) -> Iterator[Any]:
    """Give a function that returns what was notified up to now."""
    with (
        psycopg.connect(dsn, autocommit=True) as ears,
        psycopg.connect(dsn, autocommit=True) as mouth,
    ):
        ears.execute("listen leasetask")

        def so_far() -> list[str]:
            mouth.execute("select pg_notify('leasetask', 'that is all')")
            words = []
            for notification in ears.notifies():
                if notification.payload == "that is all":
                    break
                words.append(notification.payload)
            return words

        yield so_far


def test_h46_no_notification_while_nobody_is_idle(db: Conn, heard: Any) -> None:
    db.execute("select leasetask.enqueue('work', '1')")
    db.execute("select count(*) from leasetask.enqueue_many('work', array['1', '2']::jsonb[])")
    db.execute("select leasetask.signal('topic')")
    assert heard() == []


def test_h46_an_idle_worker_is_notified_once_a_statement(db: Conn, heard: Any) -> None:
    db.execute("select leasetask.set_idle('somebody', true)")
    db.execute("select count(*) from leasetask.enqueue_many('work', array['1', '2']::jsonb[])")
    db.execute("select leasetask.signal('topic')")
    assert heard() == ["task", "signal"]
    db.execute("select leasetask.set_idle('somebody', false)")
    db.execute("select leasetask.enqueue('work', '1')")
    assert heard() == []


def test_h46_full_worker_is_not_notified(dsn: str, db: Conn, heard: Any) -> None:
    """All of its slots are taken by slow tasks: a notification would be of no use to it."""
    app = App(dsn)
    let_go = asyncio.Event()
    inside: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    @app.task
    async def slow(ctx: AsyncContext, i: int) -> None:
        inside.append(i)
        loops.append(asyncio.get_running_loop())
        await let_go.wait()

    with working(app, concurrency=2):
        wait_until(lambda: declared_idle(db) == 1, what="for an idle worker")
        made = app.enqueue_many(slow, [1, 2])
        wait_until(lambda: len(inside) == 2, what="for both slots to be taken")
        try:
            wait_until(lambda: declared_idle(db) == 0, what="for the worker to be idle no more")
            heard()
            app.enqueue(slow, 3)
            assert heard() == []
        finally:
            loops[0].call_soon_threadsafe(let_go.set)
        for task in made:
            app.wait(task.id, timeout=20)


def declared_idle(db: Conn) -> int:
    row = db.execute("select count(*) from leasetask.idle_worker").fetchone()
    assert row is not None
    return int(row[0])
