"""Business writes: there if and only if the record is; effects look before they redo."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from helpers import FAST, crash_once, ended, until, working

from leasetask import (
    App,
    AsyncContext,
    Attempt,
    Context,
    Done,
    NotDone,
    Retry,
    StepFailed,
    Unknown,
)
from leasetask.errors import TaskRefused

ISOLATIONS = ["read committed", "repeatable read", "serializable"]


@pytest.fixture
def business(db: psycopg.Connection) -> Callable[[], list[str]]:
    db.execute("create table business (what text)")
    return lambda: [r[0] for r in db.execute("select what from business order by 1").fetchall()]


def insert(db: psycopg.Connection, what: str) -> str:
    db.execute("insert into business values (%s)", [what])
    return what


async def insert_async(db: psycopg.AsyncConnection, what: str) -> str:
    await db.execute("insert into business values (%s)", [what])
    return what


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_business_write_is_made_once_and_replayed(
    dsn: str, business: Callable, colour: str, isolation: str
) -> None:
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def sync(ctx: Context) -> str:
        made = ctx.transaction("mark", insert, "row", isolation=isolation)
        crash_once(calls)
        return made

    @app.task(retry=FAST)
    async def asynchronous(ctx: AsyncContext) -> str:
        made = await ctx.transaction("mark", insert_async, "row", isolation=isolation)
        crash_once(calls)
        return made

    view = ended(app, sync if colour == "sync" else asynchronous)
    assert (view.status, view.result, view.runs) == ("succeeded", "row", 2)
    assert business() == ["row"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_complete_ends_the_task_with_the_write(dsn: str, business: Callable, colour: str) -> None:
    app = App(dsn)

    @app.task
    def sync(ctx: Context) -> str:
        return ctx.complete(insert, "last")

    @app.task
    async def asynchronous(ctx: AsyncContext) -> str:
        return await ctx.complete(insert_async, "last")

    view = ended(app, sync if colour == "sync" else asynchronous)
    assert (view.status, view.result) == ("succeeded", "last")
    assert business() == ["last"]


@pytest.mark.parametrize(
    "error", [ValueError("no"), FileNotFoundError("no"), psycopg.OperationalError("another server")]
)
def test_a_write_that_raises_leaves_nothing_and_is_tried_again(
    dsn: str, business: Callable, error: Exception
) -> None:
    """As a failure of the step, also where the error could be taken for one of the connection."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        def write(db: psycopg.Connection) -> None:
            insert(db, "half")
            calls.append(ctx.run)
            if len(calls) < 3:
                raise error

        ctx.transaction("mark", write)

    assert ended(app, handler).status == "succeeded"
    assert business() == ["half"]
    assert calls == [1, 2, 3]


def test_a_result_that_does_not_fit_leaves_nothing(dsn: str, business: Callable) -> None:
    app = App(dsn)

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        def write(db: psycopg.Connection) -> int:
            insert(db, "half")
            return "not a number"

        with pytest.raises(StepFailed, match="does not fit int"):
            ctx.transaction("mark", write)

    assert ended(app, handler).status == "succeeded"
    assert business() == []


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_transaction_three_leases_long_keeps_its_lease(
    dsn: str, business: Callable, colour: str, isolation: str
) -> None:
    app, runs = App(dsn), []

    @app.task
    def sync(ctx: Context) -> None:
        def slow(db: psycopg.Connection) -> None:
            runs.append(1)
            insert(db, "slow")
            threading.Event().wait(3)

        ctx.transaction("slow", slow, isolation=isolation)

    @app.task
    async def asynchronous(ctx: AsyncContext) -> None:
        async def slow(db: psycopg.AsyncConnection) -> None:
            runs.append(1)
            await insert_async(db, "slow")
            await asyncio.sleep(3)

        await ctx.transaction("slow", slow, isolation=isolation)

    task = app.enqueue(sync if colour == "sync" else asynchronous)
    with working(app, lease=1):
        view = app.wait(task.id, timeout=20)
    assert (view.status, view.runs, len(runs)) == ("succeeded", 1, 1), view.last_error
    assert business() == ["slow"]


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_a_lost_lease_rolls_the_business_write_back(
    dsn: str, db: psycopg.Connection, business: Callable, isolation: str
) -> None:
    """The old worker's write is gone, whether the task was taken over before or after it."""
    app, entered, leave, runs = App(dsn), threading.Event(), threading.Event(), []

    @app.task
    def handler(ctx: Context) -> int:
        run = len(runs)
        runs.append(1)

        def write(conn: psycopg.Connection) -> int:
            insert(conn, f"run {run}")
            if run == 0:
                entered.set()
                assert leave.wait(10)
            return run

        if isolation == "serializable" and run == 0:
            # Only before the row is locked can the lease be lost at all.
            db.execute("update leasetask.task set lease_token = gen_random_uuid()")
            db.execute("update leasetask.task set lease_until = now() - interval '1 second'")
            leave.set()
        return ctx.transaction("write", write, isolation=isolation)

    task = app.enqueue(handler)
    with working(app):
        if isolation == "read committed":
            assert entered.wait(10)
            db.execute("update leasetask.task set lease_until = now() - interval '1 second'")
            db.execute("select * from leasetask.sweep()")
            until(app, task.id, "status = 'succeeded'")
            leave.set()
        view = app.wait(task.id, timeout=10)
    assert (view.status, view.result) == ("succeeded", 1)
    assert business() == ["run 1"]


def test_the_fence_runs_the_function_again_when_the_row_is_held(
    dsn: str, business: Callable
) -> None:
    """A user's open cancel holds the row: rolled back and run again, then the cancel is learnt."""
    app, calls, entered = App(dsn), [], threading.Event()

    @app.task
    def handler(ctx: Context) -> None:
        def write(db: psycopg.Connection) -> None:
            calls.append(1)
            entered.set()
            insert(db, "row")

        ctx.step("before", lambda: held.wait(10))
        ctx.transaction("write", write)
        ctx.step("after", calls.append, "after")

    held = threading.Event()
    task = app.enqueue(handler)
    with working(app), psycopg.connect(dsn) as user:
        until(app, task.id, "status = 'running'")
        user.execute("select 1 from leasetask.task where id = %s for update", [task.id])
        held.set()
        time.sleep(0)
        user.rollback()
        view = app.wait(task.id, timeout=10)
    assert view.status == "succeeded"
    assert business() == ["row"]


# --- effects ---------------------------------------------------------------------------------------


class Outside:
    """An API that may take an order and then fail to say so."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.keys: list[str] = []

    def add(self, attempt: Attempt) -> str:
        self.keys.append(attempt.key)
        self.orders.append(attempt.token)
        if len(self.orders) == 1:
            raise ConnectionResetError("accepted, then disconnected")
        return "added again"


@pytest.mark.parametrize("answer", ["done", "not done"])
def test_an_effect_is_reconciled_before_it_is_done_again(
    dsn: str, db: psycopg.Connection, answer: str
) -> None:
    app, outside, asked = App(dsn), Outside(), []

    def reconcile(attempt: Attempt) -> Any:
        asked.append((attempt.number, attempt.key))
        return Done("found outside") if answer == "done" else NotDone()

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        return ctx.effect("add", outside.add, reconcile)

    view = ended(app, handler)
    assert view.status == "succeeded", view.last_error
    assert view.result == ("found outside" if answer == "done" else "added again")
    assert asked == [(1, f"{view.id}/add")]
    assert len(outside.orders) == (1 if answer == "done" else 2)
    assert set(outside.keys) == {f"{view.id}/add"}
    record = db.execute("select state -> 'add' from leasetask.task").fetchone()[0]
    assert record["started"] == len(outside.orders)


@pytest.mark.parametrize("decision", ["done", "redo"])
def test_an_unknown_effect_waits_for_a_person(dsn: str, decision: str) -> None:
    app, outside = App(dsn), Outside()

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        ctx.compensate("undo", outside.orders.clear)
        return ctx.effect("add", outside.add, lambda attempt: Unknown("the API is gone"))

    task = app.enqueue(handler)
    with working(app):
        view = app.wait(task.id, timeout=10)
        assert (view.status, view.last_error["type"]) == ("failed", "EffectUnknown")
        assert "leasetask resolve" in view.last_error["message"]
        assert len(outside.orders) == 1
        with pytest.raises(TaskRefused):
            app.resolve(task.id, "other", redo=True)
        if decision == "done":
            app.resolve(task.id, "add", done="a person looked")
        else:
            app.resolve(task.id, "add", redo=True)
        view = app.wait(task.id, timeout=10)
        with pytest.raises(TaskRefused):
            app.resolve(task.id, "add", redo=True)
    assert view.status == "succeeded", view.last_error
    assert view.result == ("a person looked" if decision == "done" else "added again")


def test_a_started_effect_is_found_out_before_its_compensation(dsn: str) -> None:
    """Canceled between start and result: reconcile says it happened, so it is undone."""
    app, calls, entered = App(dsn), [], threading.Event()

    @app.task(retry=FAST)
    async def handler(ctx: AsyncContext) -> None:
        async def do(attempt: Attempt) -> str:
            calls.append("do")
            entered.set()
            await asyncio.sleep(60)
            return "never"

        def reconcile(attempt: Attempt) -> Done[str]:
            calls.append("reconcile")
            return Done("found")

        await ctx.effect("add", do, reconcile, compensate=lambda found: calls.append(found))

    task = app.enqueue(handler)
    with working(app):
        assert entered.wait(10)
        app.cancel(task.id)
        assert app.wait(task.id, timeout=10).status == "canceled"
    assert calls == ["do", "reconcile", "found"]


@pytest.mark.parametrize("answer", ["unknown", "raises"])
@pytest.mark.parametrize("decision", ["done", "redo"])
def test_nothing_is_undone_before_an_effect_is_decided_on(
    dsn: str, answer: str, decision: str
) -> None:
    """Canceled inside `do`, and reconcile cannot tell: a person decides, then the rest is undone."""
    app, undone, entered = App(dsn), [], threading.Event()

    @app.task(retry=FAST)
    async def handler(ctx: AsyncContext) -> None:
        async def do(attempt: Attempt) -> str:
            entered.set()
            await asyncio.sleep(60)
            return "never"

        def reconcile(attempt: Attempt) -> Unknown:
            if answer == "raises":
                raise ConnectionError("the bank is away")
            return Unknown("the bank does not say")

        await ctx.step("flight", lambda: "flight", compensate=undone.append)
        await ctx.effect("pay", do, reconcile, compensate=undone.append)

    task = app.enqueue(handler)
    with working(app):
        assert entered.wait(10)
        app.cancel(task.id)
        view = app.wait(task.id, timeout=10)
        assert (view.status, view.last_error["type"], undone) == ("failed", "EffectUnknown", [])
        assert "the bank" in view.last_error["message"]
        if decision == "done":
            app.resolve(task.id, "pay", done="paid")
        else:
            app.resolve(task.id, "pay", redo=True)
        until(app, task.id, "status = 'canceled'")
    assert undone == (["paid", "flight"] if decision == "done" else ["flight"])


def test_an_effect_that_failed_for_good_is_looked_for_after_a_retry(dsn: str) -> None:
    """Its error may have been the answer's, not the act's: invariant 9 holds across `retry` too."""
    app, done, asked = App(dsn), [], []

    def do(attempt: Attempt) -> str:
        done.append(attempt.number)
        raise TimeoutError("sent, but no answer")

    def reconcile(attempt: Attempt) -> Done[str]:
        asked.append(attempt.number)
        return Done("it had arrived")

    @app.task(retry=Retry(max_attempts=1))
    def handler(ctx: Context) -> str:
        return ctx.effect("send", do, reconcile)

    view = ended(app, handler)
    assert view.status == "failed"
    app.retry(view.id)
    with working(app):
        assert app.wait(view.id, timeout=10).result == "it had arrived"
    assert (done, asked) == ([1], [1])


def test_a_retry_that_goes_back_behind_an_effect_looks_for_it(dsn: str) -> None:
    app, done, asked, mended = App(dsn), [], [], []

    def reconcile(attempt: Attempt) -> Done[str]:
        asked.append(attempt.token)
        return Done("found")

    def flaky() -> str:
        if not mended:
            raise ValueError("no")
        return "well"

    @app.task(retry=Retry(max_attempts=1))
    def handler(ctx: Context) -> str:
        value, failure = None, None
        try:
            value = ctx.step("flaky", flaky)
        except StepFailed as error:
            failure = error
        ctx.effect("mail", lambda attempt: done.append(attempt.token), reconcile)
        if failure is not None:
            raise KeyError("wrapped") from failure
        return value

    view = ended(app, handler)
    assert (view.status, view.last_error["type"]) == ("failed", "KeyError")
    mended.append(True)
    app.retry(view.id)
    with working(app):
        view = app.wait(view.id, timeout=10)
    assert view.result == "well", view.last_error
    assert len(done) == 1
    assert asked == done


def test_two_compensations_of_one_name_are_refused(dsn: str) -> None:
    app = App(dsn)

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        ctx.step("hotel", lambda: 1, compensate=lambda _: None)
        ctx.compensate("hotel", print)

    view = ended(app, handler)
    assert (view.status, view.last_error["type"]) == ("failed", "DuplicateStep")
    assert "two compensations are named 'hotel'" in view.last_error["message"]


# --- the user's own source of transactions ---------------------------------------------------------


def test_a_factory_of_ones_own(dsn: str, business: Callable) -> None:
    opened = []

    @contextmanager
    def factory():
        opened.append(1)
        with psycopg.connect(dsn) as conn:
            yield conn

    app = App(dsn, transactions=factory)

    @app.task
    def handler(ctx: Context) -> str:
        ctx.transaction("one", insert, "one")
        return ctx.complete(insert, "two")

    assert ended(app, handler).status == "succeeded"
    assert business() == ["one", "two"]
    assert len(opened) >= 2, "one more for each fence that was refused for the moment"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_task_enqueued_by_a_task_is_enqueued_once(dsn: str, colour: str) -> None:
    app, calls = App(dsn), []

    @app.task
    def child(ctx: Context, n: int) -> int:
        return n * 2

    @app.task(retry=FAST)
    def sync(ctx: Context) -> str:
        made = ctx.enqueue("child", child, 21)
        crash_once(calls)
        return made

    @app.task(retry=FAST)
    async def asynchronous(ctx: AsyncContext) -> str:
        made = await ctx.enqueue("child", child, 21)
        crash_once(calls)
        return made

    view = ended(app, sync if colour == "sync" else asynchronous)
    assert view.status == "succeeded", view.last_error
    with working(app):
        assert app.wait(view.result, timeout=10).result == 42
    assert app.get(view.result).key == f"{view.id}/child"


def test_enqueue_sql_for_other_drivers(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn)

    @app.task(retry=FAST, deadline=60)
    def handler(ctx: Context, n: int) -> None: ...

    sql, parameters = app.enqueue_sql(handler, 1, key="k")
    first = db.execute(sql, parameters).fetchone()
    assert first[1] == "new"
    assert db.execute(sql, parameters).fetchone() == (first[0], "existing", None)
    sql, parameters = app.enqueue_sql(handler, 2, key="k", style="$1")
    with psycopg.RawCursor(db) as raw:
        assert raw.execute(sql, parameters).fetchone() == (first[0], "conflict", "1")
    row = db.execute("select max_attempts, deadline_after from leasetask.task").fetchone()
    assert row == (3, 60)
