"""The producers' calls, versions, times and policies, as a program uses them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from helpers import FAST, ended, until, working
from psycopg.rows import dict_row

from leasetask import App, AsyncContext, Context, IdempotencyConflict, PayloadError, Retry
from leasetask.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    SchemaError,
    TaskNotFound,
    TaskRefused,
    UnknownKind,
    WaitTimeout,
)


def app_with(dsn: str) -> tuple[App, Callable[..., Any]]:
    app = App(dsn)

    @app.task
    def echo(ctx: Context, value: Any) -> Any:
        return value

    return app, echo


def test_the_same_kind_and_key_give_the_same_task(dsn: str) -> None:
    app, echo = app_with(dsn)
    first = app.enqueue(echo, {"a": 1, "b": [1, 2]}, key="k")
    assert app.enqueue(echo, {"b": [1, 2], "a": 1}, key="k").id == first.id
    assert app.enqueue(echo, {"b": [1, 2], "a": 1}, key="k").outcome == "existing"
    with pytest.raises(IdempotencyConflict, match=r"\$\.b\[1\]: 2 and now 3") as conflict:
        app.enqueue(echo, {"a": 1, "b": [1, 3]}, key="k")
    assert conflict.value.task_id == first.id


def test_a_conflict_leaves_the_callers_transaction_usable(dsn: str, db: psycopg.Connection) -> None:
    app, echo = app_with(dsn)
    app.enqueue(echo, 1, key="k")
    db.execute("create table business (x int)")
    with psycopg.connect(dsn) as conn:
        conn.execute("insert into business values (1)")
        with pytest.raises(IdempotencyConflict):
            app.enqueue(echo, 2, key="k", conn=conn)
        conn.execute("insert into business values (2)")
        conn.commit()
    assert db.execute("select count(*) from business").fetchone() == (2,)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("rows", ["tuples", "dicts"])
def test_enqueue_in_the_callers_transaction(
    dsn: str, db: psycopg.Connection, commit: bool, rows: str
) -> None:
    app, echo = app_with(dsn)
    options: dict[str, Any] = {"row_factory": dict_row} if rows == "dicts" else {}
    with psycopg.connect(dsn, **options) as conn:
        app.enqueue(echo, 1, conn=conn)
        app.enqueue_many(echo, [2, 3], conn=conn)
        assert db.execute("select count(*) from leasetask.task").fetchone() == (0,)
        conn.commit() if commit else conn.rollback()
    assert db.execute("select count(*) from leasetask.task").fetchone() == (3 * commit,)


def test_many_are_answered_one_by_one(dsn: str) -> None:
    app, echo = app_with(dsn)
    app.enqueue(echo, 1, key="1")
    app.enqueue(echo, "other", key="2")
    outcomes = app.enqueue_many(echo, [1, 2, 3, 3], key=str)
    assert [o.outcome for o in outcomes] == ["existing", "conflict", "new", "existing"]
    assert outcomes[2].id == outcomes[3].id
    assert app.enqueue_many(echo, []) == []


def test_a_task_without_a_key_stands_in_nobodys_way(dsn: str) -> None:
    """Its id stands for a key in the row, and is no key that anything is looked up by."""
    app = App(dsn)

    @app.task
    def handler(ctx: Context, n: int) -> None: ...

    first = app.enqueue(handler, 1)
    assert app.get(first.id).key == first.id
    assert app.enqueue(handler, 2, key=first.id).outcome == "new"
    assert app.enqueue(handler, 2, key=first.id).outcome == "existing"
    outcomes = app.enqueue_many(handler, [2, 3, 3], key=lambda n: first.id)
    assert [made.outcome for made in outcomes] == ["existing", "conflict", "conflict"]
    app.close()


def test_one_key_from_many_connections_gives_one_task(dsn: str) -> None:
    app, echo = app_with(dsn)
    start, ids = threading.Barrier(8), []

    def enqueue() -> None:
        start.wait()
        ids.append(app.enqueue(echo, {"x": 1}, key="k").id)

    threads = [threading.Thread(target=enqueue) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1


def test_the_async_twins(dsn: str) -> None:
    app, echo = app_with(dsn)

    @app.task
    async def waits(ctx: AsyncContext) -> Any:
        return await ctx.wait_signal("topic")

    async def scenario() -> None:
        first = await app.enqueue_async(echo, 1, key="k")
        assert (await app.enqueue_async(echo, 1, key="k")).id == first.id
        many = await app.enqueue_many_async(echo, [1, 2], delay=60)
        assert [m.outcome for m in many] == ["new", "new"]
        assert (await app.cancel_async(many[0].id, reason="r")) == "canceled"
        waiting = await app.enqueue_async(waits)
        await app.signal_async("topic", 5)
        assert (await app.wait_async(waiting.id, timeout=10)).result == 5
        assert (await app.get_async(first.id)).kind == "echo"
        await app.signal_async("latch", sticky=True)
        assert await app.clear_signal_async("latch")
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            rolled_back = await app.enqueue_async(echo, 9, conn=conn)
            await conn.rollback()
        with pytest.raises(TaskNotFound):
            await app.get_async(rolled_back.id)
        await app.close_async()

    with working(app):
        asyncio.run(scenario())


def test_what_is_asked_wrongly_is_told_in_one_line(dsn: str, empty_dsn: str) -> None:
    app, echo = app_with(dsn)
    nobody = "00000000-0000-4000-8000-000000000000"
    cases: list[tuple[type[Exception], Callable[[], object], str]] = [
        (ValueError, lambda: app.get("x"), "'x' is not a task id"),
        (TaskNotFound, lambda: app.get(nobody), f"no task {nobody}"),
        (TaskNotFound, lambda: app.cancel(nobody), f"no task {nobody}"),
        (TaskRefused, lambda: app.retry(app.enqueue(echo, 1).id), "only a failed or dead task"),
        (UnknownKind, lambda: app.enqueue("nope", 1), "declared are: echo"),
        (UnknownKind, lambda: app.enqueue(print, 1), "declared are: echo"),
        (PayloadError, lambda: app.enqueue(echo, 1, key=""), "1 to 1000 bytes"),
        (PayloadError, lambda: app.enqueue(echo, 1, key="é" * 501), "1 to 1000 bytes"),
        (PayloadError, lambda: app.enqueue(echo, 1, key="\x00"), "NUL"),
        (PayloadError, lambda: app.signal("", 1), "topic"),
        (PayloadError, lambda: app.enqueue(echo, 1, at=datetime(2030, 1, 1)), "time zone"),
        (PayloadError, lambda: app.enqueue(echo, 1, at=datetime.now(UTC), delay=1), "not both"),
        (WaitTimeout, lambda: app.wait(app.enqueue(echo, 1).id, timeout=0.01), "not ended"),
        (SchemaError, lambda: App(empty_dsn).signal("t"), "leasetask migrate"),
        (SchemaError, lambda: App(empty_dsn).start(), "leasetask migrate"),
        (DatabaseUnavailable, lambda: App("host=127.0.0.1 port=1").signal("t"), "no connection"),
        (ConfigurationError, lambda: app.start(concurrency=0), "at least 1"),
        (ConfigurationError, lambda: app.start(roles=("cook",)), "roles"),
        (ConfigurationError, lambda: app.task(lambda: None), "takes 0 parameters"),
        (ConfigurationError, lambda: app.task(kind="echo")(lambda ctx: 1), "declared twice"),
        (ConfigurationError, lambda: Retry(max_attempts=0), "at least 1"),
    ]
    for kind, call, text in cases:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_start_in_the_future_and_the_session_time_zone(dsn: str, db: psycopg.Connection) -> None:
    """H42: at= with a zone, whatever zone a session has."""
    app, echo = app_with(dsn)
    at = datetime.now(UTC) + timedelta(hours=3)
    with psycopg.connect(dsn, options="-c timezone=Pacific/Kiritimati") as conn:
        task = app.enqueue(echo, 1, at=at, conn=conn)
    assert app.get(task.id).next_run_at == at
    soon = app.enqueue(echo, 2, delay=0.3)
    with working(app, poll_interval=30):
        view = app.wait(soon.id, timeout=10)
    waited = (view.finished_at - view.created_at).total_seconds()
    assert 0.3 <= waited < 2
    assert app.get(task.id).status == "pending"


def test_lower_priority_numbers_run_sooner(dsn: str) -> None:
    app, order = App(dsn), []

    @app.task
    def note(ctx: Context, value: int) -> None:
        order.append(value)

    tasks = [app.enqueue(note, p, priority=p) for p in (5, -5, 0)]
    with working(app, concurrency=1):
        for task in tasks:
            app.wait(task.id, timeout=10)
    assert order == [-5, 0, 5]


def test_two_versions_side_by_side_and_accepts(dsn: str, db: psycopg.Connection) -> None:
    """A worker claims only what it has declared; two functions may serve two versions."""
    old, both, newest = App(dsn), App(dsn), App(dsn)

    @old.task(kind="k")
    def first(ctx: Context) -> str:
        return "v1"

    @both.task(kind="k")
    def one(ctx: Context) -> str:
        return "v1"

    @both.task(kind="k", version=2)
    def two(ctx: Context) -> str:
        return "v2"

    @newest.task(kind="k", version=3, accepts=(2,))
    def three(ctx: Context) -> str:
        return "v3"

    v1, v2, v3 = old.enqueue(first), both.enqueue(two), newest.enqueue("k")
    with working(newest):
        assert newest.wait(v3.id, timeout=10).result == "v3"
        assert newest.wait(v2.id, timeout=10).result == "v3"
        assert newest.get(v1.id).status == "pending"
    again = both.enqueue(two)
    with working(both):
        assert both.wait(v1.id, timeout=10).result == "v1"
        assert both.wait(again.id, timeout=10).result == "v2"
    from_sql = db.execute("select leasetask.enqueue('k', 'null')").fetchone()[0]
    assert old.get(str(from_sql)).version == 3


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("what", ["handler", "step"])
def test_a_run_past_its_timeout_is_charged(dsn: str, colour: str, what: str) -> None:
    app, leave, runs = App(dsn), threading.Event(), []

    @app.task(retry=Retry(max_attempts=2, initial=0.01), timeout=0.3 if what == "handler" else None)
    def sync(ctx: Context) -> None:
        runs.append(1)
        if what == "handler":
            leave.wait(20)
        else:
            ctx.step("slow", leave.wait, 20, timeout=0.3)

    @app.task(retry=Retry(max_attempts=2, initial=0.01), timeout=0.3 if what == "handler" else None)
    async def asynchronous(ctx: AsyncContext) -> None:
        runs.append(1)
        if what == "handler":
            await asyncio.sleep(20)
        else:
            await ctx.step("slow", asyncio.sleep, 20, timeout=0.3)

    began = time.monotonic()
    view = ended(app, sync if colour == "sync" else asynchronous)
    assert time.monotonic() - began < 8
    leave.set()
    assert view.status == "failed"
    assert "RunTimeout" in str(view.last_error)
    assert len(runs) == 2


def test_a_deadline_counts_waits_and_fails_the_task(dsn: str) -> None:
    app = App(dsn)

    @app.task(deadline=0.3)
    def waits(ctx: Context) -> None:
        ctx.wait_signal("never")

    view = ended(app, waits)
    assert (view.status, view.last_error["type"]) == ("failed", "DeadlineExceeded")


def test_a_deadline_ends_tasks_of_kinds_that_nobody_runs(dsn: str) -> None:
    orphaned, sweeping = App(dsn), App(dsn)

    @orphaned.task(deadline=0.1)
    def nobody(ctx: Context) -> None: ...

    task = orphaned.enqueue(nobody)
    with sweeping.start(roles=("sweep",), lease=1):
        assert orphaned.wait(task.id, timeout=10).status == "failed"


def test_get_tells_what_a_task_does(dsn: str) -> None:
    app, entered, leave = App(dsn), threading.Event(), threading.Event()

    @app.task
    def busy(ctx: Context, n: int) -> int:
        ctx.step("first", int, "1")
        ctx.progress(0.5, "half way")
        entered.set()
        leave.wait(20)
        ctx.wait_signal("go", name="waiting for it")
        return n

    task = app.enqueue(busy, 7, key="key")
    with working(app, lease=0.6):
        assert entered.wait(10)
        until(app, task.id, "progress is not null")
        view = app.get(task.id)
        assert (view.status, view.attempts, view.steps) == ("running", 1, ["first"])
        assert view.progress == {"fraction": 0.5, "message": "half way"}
        assert (view.key, view.input) == ("key", 7)
        leave.set()
        until(app, task.id, "status = 'waiting'")
        assert app.get(task.id).current_step == "waiting for it"
        app.signal("go")
        assert app.wait(task.id, timeout=10).result == 7


def test_pruned_tasks_keep_their_key(dsn: str, db: psycopg.Connection) -> None:
    """H: prune empties input, state and result; the key still names the task and its input."""
    app, echo = app_with(dsn)
    task = app.enqueue(echo, {"a": 1.0}, key="k")
    with working(app):
        app.wait(task.id, timeout=10)
    assert db.execute("select leasetask.prune('0')").fetchone() == (1,)
    assert app.get(task.id).result is None
    assert app.enqueue(echo, {"a": 1}, key="k").id == task.id
    with pytest.raises(IdempotencyConflict):
        app.enqueue(echo, {"a": 2}, key="k")
    db.execute("select leasetask.prune('0', forget_keys => true)")
    assert app.enqueue(echo, {"a": 2}, key="k").outcome == "new"


def test_long_tasks_move_their_steps_out_of_the_row(dsn: str, db: psycopg.Connection) -> None:
    """Step results past 2 kB live in task_step; the replay finds them all, each run once."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def many(ctx: Context) -> int:
        total = 0
        for i in range(300):
            if i == 200 and len(calls) == 200:
                calls.append(-1)
                raise RuntimeError("replay")
            total += ctx.step(f"s{i}", lambda i=i: calls.append(i) or i)
        big = ctx.step("big", lambda: "x" * 100_000)
        ctx.sleep(0)
        return total + len(big)

    view = ended(app, many)
    assert view.result == sum(range(300)) + 100_000
    assert calls == [*range(200), -1, *range(200, 300)]
    assert len(view.steps) == 302
    size = db.execute("select pg_column_size(state), stored_steps from leasetask.task").fetchone()
    assert size[0] <= 2000
    assert size[1] > 250


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/Los_Angeles"])
def test_a_time_that_python_cannot_name_harms_nobody(
    dsn: str, db: psycopg.Connection, zone: str
) -> None:
    """Nor the worker that comes across it, nor whoever looks at the task."""
    db.execute(f"alter database {db.info.dbname} set timezone = '{zone}'")
    app, echo = app_with(dsn)
    far = app.enqueue(echo, 1, at=datetime.max.replace(tzinfo=UTC))
    with psycopg.connect(dsn, autocommit=True) as other:
        made = [
            other.execute(
                f"select id::text from leasetask.try_enqueue('echo', '2', {more})"
            ).fetchone()[0]
            for more in (
                "at => '20000-01-01'",
                "at => 'infinity'",
                "at => '-infinity'",
                "deadline => 1e12",
            )
        ]
    with working(app):
        for task in made[2:]:
            assert app.wait(task, timeout=10).result == 2
        assert app.wait(app.enqueue(echo, 3).id, timeout=10).result == 3
    assert [app.get(task).status for task in (far.id, *made[:2])] == ["pending"] * 3
    for look in ("stats", "list", "top", "dead-letter", "doctor"):
        command = [Path(sys.executable).with_name("leasetask"), look, "--dsn", dsn]
        command += ["--once"] if look == "top" else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    app.close()


def test_a_wait_longer_than_a_lifetime_is_refused(dsn: str) -> None:
    app = App(dsn)

    @app.task
    def handler(ctx: Context) -> None:
        ctx.sleep(1e12)

    view = ended(app, handler)
    assert (view.status, view.last_error["type"]) == ("failed", "ConfigurationError")
    assert "sleep-1: 1000000000000.0 seconds; at most 1000000000" in view.last_error["message"]


def test_enqueue_in_a_pipeline(dsn: str, db: psycopg.Connection) -> None:
    """psycopg's pipeline mode: the answer is fetched, and the task enqueued once."""
    app, echo = app_with(dsn)
    with db.pipeline():
        assert app.enqueue(echo, 1, conn=db).outcome == "new"
    assert db.execute("select count(*) from leasetask.task").fetchone() == (1,)
