"""Users' transactions on the rows that workers work on: nobody waits long, nobody is a victim."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from support import pass_time, statuses, wait_for_end, wait_until

from leasetask import App, AsyncContext

Db = psycopg.Connection[Any]
LEASE = 1.0


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


def test_h43_a_users_open_cancel_stops_no_other_heartbeat(app: App, dsn: str, db: Db) -> None:
    """H43: one of fifty running tasks is canceled by a transaction that stays open past the leases.

    The other forty-nine are renewed meanwhile and run once; the one ends canceled.
    """
    over = threading.Event()
    runs: list[str] = []

    @app.task
    async def lasting(ctx: AsyncContext) -> None:
        runs.append(ctx.task_id)
        while not over.is_set():
            await asyncio.sleep(0.02)

    tasks = [task.id for task in app.enqueue_many(lasting, [None] * 50)]
    with app.start(concurrency=50, lease=LEASE), psycopg.connect(dsn) as user:
        wait_until(lambda: len(runs) == 50)
        app.cancel(tasks[7], conn=user)
        pass_time(3 * LEASE)
        out = db.execute(
            "select id::text from leasetask.task where lease_until < clock_timestamp()"
        )
        assert {row[0] for row in out} <= {tasks[7]}
        user.commit()
        wait_until(lambda: statuses(db).get("canceled") == 1)
        over.set()
        assert wait_for_end(db) == {"succeeded": 49, "canceled": 1}
    assert sorted(runs) == sorted(tasks)
    assert app.get(tasks[7]).status == "canceled"


def test_h43_a_locked_row_does_not_stop_a_batch(app: App, dsn: str, db: Db) -> None:
    """H43: fifty tasks end at once, a user holds the row of one: forty-nine end, that one later."""
    over = threading.Event()
    inside: list[str] = []

    @app.task
    async def ends(ctx: AsyncContext) -> None:
        inside.append(ctx.task_id)
        while not over.is_set():
            await asyncio.sleep(0.01)

    tasks = [task.id for task in app.enqueue_many(ends, [None] * 50)]
    with app.start(concurrency=50, lease=30), psycopg.connect(dsn) as user:
        wait_until(lambda: len(inside) == 50)
        user.execute("select from leasetask.task where id = %s for update", [tasks[7]])
        over.set()
        began = time.monotonic()
        wait_until(lambda: statuses(db) == {"succeeded": 49, "running": 1})
        assert time.monotonic() - began < 2
        user.commit()
        assert wait_for_end(db) == {"succeeded": 50}


def test_h43_opposite_orders_deadlock_nobody(app: App, dsn: str, db: Db) -> None:
    """H43: users cancel, signal and lock the workers' tasks in every order, in open transactions.

    Each user has tasks of its own, so users cannot deadlock with each other; workers hold all of
    them in batches, checkpoint, suspend, deliver, finish and sweep. No deadlock reaches anyone:
    the server counts none.
    """
    seconds, users = (60.0, 8) if SOAK else (3.0, 4)

    @app.task
    async def busy(ctx: AsyncContext, topic: str) -> None:
        for number in range(3):
            await ctx.step(f"before-{number}", asyncio.sleep, 0)
            await ctx.wait_signal(topic)
            await ctx.sleep(0)

    errors: list[BaseException] = []
    until = time.monotonic() + seconds

    def user(name: str) -> None:
        rng = random.Random(name)
        try:
            with psycopg.connect(dsn) as conn:
                while time.monotonic() < until:
                    own = [app.enqueue(busy, f"{name}-{n % 3}").id for n in range(12)]
                    for _ in range(6):
                        rng.shuffle(own)
                        for task in own[:5]:
                            if rng.random() < 0.2:
                                app.cancel(task, conn=conn)
                            else:
                                conn.execute(
                                    "update leasetask.task set updated_at = updated_at"
                                    " where id = %s",
                                    [task],
                                )
                            app.signal(f"{name}-{rng.randrange(3)}", None, conn=conn)
                        if rng.random() < 0.8:
                            conn.commit()
                        else:
                            conn.rollback()
                        app.signal(f"{name}-{rng.randrange(3)}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=user, args=(f"user-{n}",)) for n in range(users)]
    with app.start(concurrency=30, lease=LEASE), app.start(concurrency=30, lease=LEASE):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for name in (f"user-{n}-{topic}" for n in range(users) for topic in range(3)):
            app.signal(name, None, sticky=True)
        ended = wait_for_end(db, 60)
    assert set(ended) <= {"succeeded", "canceled"}
    db.execute("select pg_stat_clear_snapshot()")
    deadlocks = db.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    assert deadlocks.fetchone() == (0,)


def test_h43_a_user_waits_for_no_batch(app: App, dsn: str, db: Db) -> None:
    """H43: a worker's statement in progress holds a user's cancel for a moment, not for a lease."""

    @app.task
    async def busy(ctx: AsyncContext) -> None:
        for number in range(200):
            await ctx.step(f"step-{number}", asyncio.sleep, 0)

    tasks = [task.id for task in app.enqueue_many(busy, [None] * 20)]
    with app.start(concurrency=20, lease=30):
        wait_until(lambda: statuses(db).get("running"))
        for task in tasks:
            began = time.monotonic()
            app.cancel(task)
            assert time.monotonic() - began < 1
        assert set(wait_for_end(db)) <= {"succeeded", "canceled"}


def test_h34_prunes_sweeps_and_cancels_beside_busy_workers(app: App, dsn: str, db: Db) -> None:
    """H34: five prunes, two sweeps and cancels on the rows that two workers claim, renew and end.

    No deadlock reaches anyone, nobody is refused anything, and every task ends.
    """
    seconds = 120.0 if SOAK else 3.0

    @app.task
    async def brief(ctx: AsyncContext, number: int) -> int:
        await ctx.step("one", asyncio.sleep, 0.001)
        await ctx.step("two", asyncio.sleep, 0.001)
        return number

    errors: list[BaseException] = []
    until = time.monotonic() + seconds

    def again_and_again(call: str, pause: float) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                while time.monotonic() < until:
                    conn.execute(call.encode())
                    pass_time(pause)
        except BaseException as error:
            errors.append(error)

    def cancel() -> None:
        rng = random.Random(34)
        try:
            while time.monotonic() < until:
                made = app.enqueue_many(brief, list(range(50)))
                for task in rng.sample(made, 10):
                    app.cancel(task.id)
        except BaseException as error:
            errors.append(error)

    prune = "select leasetask.prune('0 s', n => 50)"
    threads = [threading.Thread(target=again_and_again, args=(prune, 0.01)) for _ in range(5)]
    sweep = "select leasetask.sweep()"
    threads += [threading.Thread(target=again_and_again, args=(sweep, 0.01)) for _ in range(2)]
    threads.append(threading.Thread(target=cancel))
    with app.start(concurrency=30, lease=LEASE), app.start(concurrency=30, lease=LEASE):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        ended = wait_for_end(db, 60)
    assert set(ended) <= {"succeeded", "canceled"}
    assert ended["succeeded"] > 100
    db.execute("select pg_stat_clear_snapshot()")
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert db.execute(deadlocks).fetchone() == (0,)
