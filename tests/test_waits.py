"""Sleeps, signals and wait_for: nothing lost, nothing woken twice, no worker held."""

from __future__ import annotations

import psycopg
import pytest
from helpers import FAST, ended, until, working

from leasetask import App, AsyncContext, Context, SignalTimeout
from leasetask.model import Retry


@pytest.mark.parametrize("when", ["before", "during", "after a wait of its own"])
def test_a_signal_reaches_its_waiter_whenever_it_comes(dsn: str, when: str) -> None:
    app = App(dsn)

    @app.task
    def waits(ctx: Context) -> object:
        if when != "during":
            ctx.sleep(0.05)
        return ctx.wait_signal("topic", timeout=20)

    task = app.enqueue(waits)
    if when == "before":
        assert app.signal("topic", {"n": 1}) == 0
    with working(app):
        if when != "before":
            until(app, task.id, "wait_topic is not null")
            assert app.signal("topic", {"n": 1}) == 1
        assert app.wait(task.id, timeout=10).result == {"n": 1}


def test_each_signal_is_consumed_by_one_waiter_the_longest_first(dsn: str) -> None:
    app = App(dsn)

    @app.task
    def waits(ctx: Context) -> object:
        return ctx.wait_signal("topic")

    with working(app):
        tasks = []
        for _ in range(3):
            tasks.append(app.enqueue(waits))
            until(app, tasks[-1].id, "status = 'waiting'")
        for n, task in enumerate(tasks):
            assert app.signal("topic", n) == 1
            assert app.wait(task.id, timeout=10).result == n
        assert app.signal("topic", "nobody") == 0


def test_a_latch_is_seen_by_everyone_until_it_is_cleared(dsn: str) -> None:
    app = App(dsn)

    @app.task
    def waits(ctx: Context) -> object:
        return ctx.wait_signal("latch", timeout=0.2)

    with working(app):
        app.signal("latch", "old", sticky=True)
        app.signal("latch", "new", sticky=True)
        for _ in range(2):
            task = app.enqueue(waits)
            assert app.wait(task.id, timeout=10).result == "new"
        assert app.clear_signal("latch")
        assert not app.clear_signal("latch")
        view = app.wait(app.enqueue(waits).id, timeout=10)
    assert view.status == "failed"
    assert view.last_error["type"] == "SignalTimeout"


def test_a_signal_in_a_transaction_counts_when_it_commits(dsn: str) -> None:
    """With conn= it only inserts; a worker delivers within a second. Rolled back, it never was."""
    app = App(dsn)

    @app.task
    def waits(ctx: Context) -> object:
        return ctx.wait_signal("topic")

    task = app.enqueue(waits)
    with working(app), psycopg.connect(dsn) as conn:
        until(app, task.id, "status = 'waiting'")
        assert app.signal("topic", "rolled back", conn=conn) is None
        conn.rollback()
        assert app.signal("topic", "committed", conn=conn) is None
        conn.commit()
        assert app.wait(task.id, timeout=10).result == "committed"


def test_forty_waits_spend_no_attempt(dsn: str) -> None:
    """H14's second half: forty suspensions with max_attempts=3, and attempts is 1 at the end."""
    app = App(dsn)

    @app.task(retry=Retry(max_attempts=3))
    def sleepy(ctx: Context) -> int:
        for _ in range(40):
            ctx.sleep(0)
        return ctx.attempt

    view = ended(app, sleepy)
    assert (view.status, view.result, view.runs) == ("succeeded", 1, 41)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_wait_for_looks_again_on_a_signal_and_consumes_nothing(dsn: str, colour: str) -> None:
    app, found, looks = App(dsn), [], []

    def check() -> str | None:
        looks.append(1)
        return found[0] if found else None

    @app.task
    def sync(ctx: Context) -> str:
        return ctx.wait_for("approved", check, topic="approval", every=60)

    @app.task
    async def asynchronous(ctx: AsyncContext) -> str:
        return await ctx.wait_for("approved", check, topic="approval", every=60)

    handler = sync if colour == "sync" else asynchronous
    tasks = [app.enqueue(handler), app.enqueue(handler)]
    with working(app):
        for task in tasks:
            until(app, task.id, "status = 'waiting'")
        assert len(looks) == 2
        found.append("yes")
        app.signal("approval")  # a worker may be faster to deliver it
        assert [app.wait(t.id, timeout=10).result for t in tasks] == ["yes", "yes"]


def test_an_early_or_sticky_signal_does_not_make_wait_for_spin(dsn: str) -> None:
    """It was committed before the check began, so it tells nothing new."""
    app, looks = App(dsn), []

    @app.task
    def handler(ctx: Context) -> None:
        ctx.wait_for("x", lambda: looks.append(1), topic="topic", every=60)

    app.signal("topic", sticky=True)
    app.signal("topic")
    task = app.enqueue(handler)
    with working(app):
        until(app, task.id, "status = 'waiting' and not undelivered")
        before = len(looks)
        app.signal("other topic")
        until(app, task.id, "status = 'waiting'")
        assert len(looks) == before == 1
        app.signal("topic")
        until(app, task.id, "runs = 2 and status = 'waiting'")


def test_a_thousand_rounds_of_wait_for_leave_the_row_as_small_as_one(dsn: str) -> None:
    app, looks = App(dsn), []
    rounds = 200

    @app.task
    def handler(ctx: Context) -> int:
        def check() -> bool:
            looks.append(1)
            return len(looks) > rounds

        ctx.wait_for("x", check, topic="topic", every=0)
        return len(looks)

    view = ended(app, handler)
    assert view.result == rounds + 1
    assert view.steps == ["x"]
    with psycopg.connect(dsn) as db:
        size = db.execute("select pg_column_size(t.*) from leasetask.task t").fetchone()[0]
    assert size < 1000


def test_a_check_that_raises_is_tried_again(dsn: str) -> None:
    app, looks = App(dsn), []

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        def check() -> str:
            looks.append(1)
            if len(looks) < 3:
                raise OSError("the database is away")
            return "found"

        return ctx.wait_for("x", check, topic="topic", every=60)

    assert ended(app, handler).result == "found"


def test_a_timeout_is_raised(dsn: str) -> None:
    app = App(dsn)

    @app.task
    async def handler(ctx: AsyncContext) -> str:
        try:
            await ctx.wait_signal("never", timeout=0.05)
        except SignalTimeout:
            return "timed out"
        return "signal"

    assert ended(app, handler).result == "timed out"
