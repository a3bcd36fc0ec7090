"""Time that the test moves, and tasks that run when it says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from leasetask import App, AsyncContext, Context, Retry, SignalTimeout
from leasetask.errors import TaskNotFound
from leasetask.testing import Engine

YEAR = 365 * 86400.0

Make = Callable[[App], Engine]


@pytest.fixture
def app() -> App:
    return App("postgresql://localhost/not-used")


@pytest.fixture(params=["sync", "async"])
def naps(request: pytest.FixtureRequest, app: App) -> Any:
    """Sleeps for a year, then waits a day for a signal."""
    if request.param == "sync":

        @app.task
        def naps(ctx: Context, who: str) -> str:
            ctx.sleep(YEAR)
            try:
                told = ctx.wait_signal(f"wake {who}", timeout=86400)
            except SignalTimeout:
                return f"nobody woke {who}"
            return ctx.step("get up", lambda: f"{who}: {told}")

        return naps

    @app.task(kind="naps")
    async def naps_async(ctx: AsyncContext, who: str) -> str:
        await ctx.sleep(YEAR)
        try:
            told = await ctx.wait_signal(f"wake {who}", timeout=86400)
        except SignalTimeout:
            return f"nobody woke {who}"
        up: str = await ctx.step("get up", asyncio.sleep, 0, f"{who}: {told}")
        return up

    return naps_async


def test_a_year_passes_in_a_moment(leasetask_engine: Make, app: App, naps: Any) -> None:
    engine = leasetask_engine(app)
    task = engine.enqueue(naps, "ann")
    began = time.monotonic()
    assert engine.drain() == 1
    engine.advance(days=364, hours=23)
    assert engine.drain() == 0
    assert engine.get(task).status == "waiting"
    engine.advance(hours=1)
    assert engine.drain() == 1
    assert engine.get(task).wait_topic == "wake ann"
    assert engine.signal("wake ann", "hello") == 1
    assert engine.drain() == 1
    assert engine.result(task) == "ann: hello"
    assert time.monotonic() - began < 5, "seconds, on a machine under load; it is some ms"


def test_a_timeout_comes_when_its_time_has(leasetask_engine: Make, app: App, naps: Any) -> None:
    engine = leasetask_engine(app)
    task = engine.enqueue(naps, "bob")
    engine.drain_to_the_end()
    assert engine.result(task) == "nobody woke bob"
    view = engine.get(task)
    assert view.finished_at is not None
    assert view.finished_at - view.created_at >= timedelta(days=366)


def test_a_frozen_clock_stands_and_moves_only_when_moved(leasetask_engine: Make, app: App) -> None:
    @app.task
    def nothing(ctx: Context) -> None:
        pass

    engine = leasetask_engine(app)
    engine.freeze()
    tasks = [engine.enqueue(nothing) for _ in range(2)]
    assert len({engine.get(task).created_at for task in tasks}) == 1
    later = engine.enqueue(nothing, delay=0.5)
    engine.freeze()
    assert engine.drain() == 2
    engine.advance(0.5)
    assert engine.drain() == 1
    assert engine.get(later).created_at == engine.get(tasks[0]).created_at


def test_result_says_what_a_task_does_instead(leasetask_engine: Make, app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    def fails(ctx: Context) -> None:
        raise RuntimeError("no such order")

    @app.task
    def waits(ctx: Context) -> None:
        ctx.wait_signal("paid", name="payment")

    engine = leasetask_engine(app)
    failing, waiting = engine.enqueue(fails), engine.enqueue(waits)
    engine.drain()
    with pytest.raises(AssertionError, match=r"fails .* is failed: RuntimeError: no such order"):
        engine.result(failing)
    with pytest.raises(AssertionError, match=r"waits .* is waiting at 'payment'$"):
        engine.result(waiting)
    with pytest.raises(TaskNotFound):
        engine.result("0190163d-8694-739b-aea5-966c26f8ad90")


def test_a_failing_step_is_tried_again_when_its_time_has_come(
    leasetask_engine: Make, app: App
) -> None:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("reset")
        return "ok"

    @app.task(retry=Retry(max_attempts=3, initial=60, factor=1, jitter=0))
    def calls_out(ctx: Context) -> str:
        return ctx.step("call", call)

    engine = leasetask_engine(app)
    task = engine.enqueue(calls_out)
    engine.drain()
    assert (len(calls), engine.get(task).status) == (1, "pending")
    engine.advance(61)
    engine.drain()
    assert len(calls) == 2
    engine.drain_to_the_end()
    assert engine.result(task) == "ok"


def test_children_and_priorities_are_drained_too(leasetask_engine: Make, app: App) -> None:
    ran: list[str] = []

    @app.task
    def parent(ctx: Context) -> str:
        return ctx.enqueue("child", child, "child")

    @app.task
    def child(ctx: Context, name: str) -> None:
        ran.append(name)

    engine = leasetask_engine(app)
    task = engine.enqueue(parent)
    engine.enqueue(child, "second", priority=1)
    engine.enqueue(child, "first", priority=-1)
    assert engine.drain() == 4
    assert ran == ["first", "child", "second"]
    assert engine.get(engine.result(task)).status == "succeeded"


def test_a_task_is_enqueued_inside_the_tests_own_transaction(
    leasetask_engine: Make, app: App, leasetask_db: str
) -> None:
    @app.task
    def nothing(ctx: Context) -> str:
        return "done"

    engine = leasetask_engine(app)
    with psycopg.connect(leasetask_db) as db:
        task = engine.enqueue(nothing, conn=db)
        assert engine.drain() == 0
    assert engine.drain() == 1
    assert engine.result(task) == "done"


def test_cancel_reset_and_endless_waits(leasetask_engine: Make, app: App) -> None:
    @app.task
    def looks(ctx: Context) -> None:
        ctx.wait_for("approved", lambda: None, topic="approval", every=60)

    engine = leasetask_engine(app)
    task = engine.enqueue(looks)
    with pytest.raises(AssertionError, match="still become due after 20 rounds"):
        engine.drain_to_the_end(limit=20)
    assert engine.cancel(task, "enough") == "canceled"
    assert engine.get(task).cancel_reason == "enough"
    engine.drain_to_the_end()
    engine.advance(days=1)
    engine.reset()
    with pytest.raises(TaskNotFound):
        engine.get(task)
    row = engine.db.execute("select leasetask.clock() - clock_timestamp()").fetchone()
    assert row is not None
    assert abs(row[0]) < timedelta(seconds=5)


def test_business_writes_of_handlers_are_there_after_a_drain(
    leasetask_engine: Make, app: App, leasetask_db: str
) -> None:
    @app.task
    def books(ctx: Context) -> None:
        ctx.transaction("one", lambda db: db.execute("insert into booking values (1)") and None)

    @app.task
    async def books_async(ctx: AsyncContext) -> None:
        async def book(db: psycopg.AsyncConnection) -> None:
            await db.execute("insert into booking values (2)")

        await ctx.complete(book)

    engine = leasetask_engine(app)
    engine.db.execute("create table booking (n int)")
    engine.enqueue(books)
    engine.enqueue(books_async)
    assert engine.drain() == 2
    assert engine.db.execute("select n from booking order by n").fetchall() == [(1,), (2,)]


async def _drain(engine: Engine) -> int:
    return engine.drain()


def test_an_engine_may_be_used_inside_a_running_loop(leasetask_engine: Make, app: App) -> None:
    @app.task
    async def nothing(ctx: AsyncContext) -> str:
        return "done"

    engine = leasetask_engine(app)
    task = engine.enqueue(nothing)
    assert asyncio.run(_drain(engine)) == 1
    assert engine.result(task) == "done"


def test_several_engines_may_be_on_one_database_and_each_lets_go(
    leasetask_db: str, app: App
) -> None:
    @app.task
    def nothing(ctx: Context) -> None:
        pass

    for _ in range(3):
        with Engine(app, leasetask_db) as engine:
            engine.enqueue(nothing)
            assert engine.drain() == 1
    with psycopg.connect(leasetask_db, autocommit=True) as db:
        for _ in range(100):
            others = db.execute(
                "select count(*) from pg_stat_activity where datname = current_database() "
                "and pid <> pg_backend_pid()"
            ).fetchone()
            if others == (0,):
                return
            db.execute("select pg_sleep(0.02)")
    raise AssertionError(f"{others} connections were left")


def test_a_deadline_on_the_way_is_kept(leasetask_engine: Make, app: App) -> None:
    """A worker's sweep would end the task there; so does draining to the end."""

    @app.task(deadline=60)
    def waits_too_long(ctx: Context) -> None:
        ctx.sleep(600)

    engine = leasetask_engine(app)
    task = engine.enqueue(waits_too_long)
    engine.drain_to_the_end()
    assert engine.get(task).status == "failed"
