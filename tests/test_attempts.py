"""What spends an attempt, and what does not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from support import Fleet, column, enqueue, pass_time, statuses, wait_for_end, wait_until

from leasetask import App, AsyncContext, Context, Retry

Db = psycopg.Connection[Any]
FAST = Retry(max_attempts=3, initial=0.01, factor=1.0, jitter=0.0)


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


# --- H14 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_attempts", [1, 4])
def test_h14_a_handler_that_always_fails(app: App, max_attempts: int) -> None:
    """H14: it runs exactly max_attempts times, `def` and `async def` alike, and ends failed."""
    retry = Retry(max_attempts=max_attempts, initial=0.01, jitter=0.0)
    attempts: dict[str, list[int]] = {"fails": [], "fails_async": []}

    @app.task(retry=retry)
    def fails(ctx: Context) -> None:
        attempts["fails"].append(ctx.attempt)
        raise RuntimeError("always")

    @app.task(retry=retry)
    async def fails_async(ctx: AsyncContext) -> None:
        attempts["fails_async"].append(ctx.attempt)
        raise RuntimeError("always")

    tasks = [app.enqueue(handler).id for handler in (fails, fails_async)]
    with app.start(lease=5):
        views = [app.wait(task, timeout=10) for task in tasks]
    for view in views:
        assert (view.status, view.attempts, view.runs) == ("failed", max_attempts, max_attempts)
        assert view.last_error is not None
        assert view.last_error["message"] == "always"
    assert set(map(tuple, attempts.values())) == {tuple(range(1, max_attempts + 1))}


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_h14_a_step_that_always_fails(app: App, max_attempts: int) -> None:
    """H14: a step's own budget: its body runs so often, the task's attempts are not spent."""
    bodies: list[int] = []

    def body() -> None:
        bodies.append(1)
        raise RuntimeError("always")

    @app.task(retry=Retry(max_attempts=1))
    def stumbles(ctx: Context) -> None:
        ctx.step("body", body, retry=Retry(max_attempts=max_attempts, initial=0.01, jitter=0.0))

    task = app.enqueue(stumbles).id
    with app.start(lease=5):
        view = app.wait(task, timeout=10)
    assert view.status == "failed"
    assert len(bodies) == max_attempts
    assert view.last_error is not None
    assert view.last_error["type"] == "StepFailed"


def test_h14_the_budget_is_per_step(app: App) -> None:
    """H14: progress makes the budget whole again: three steps may each be reached three times."""
    reached: list[str] = []

    @app.task(retry=FAST)
    def slow_going(ctx: Context) -> str:
        for name in "abc":
            reached.append(name)
            if reached.count(name) < 3:
                raise RuntimeError(f"before {name}")
            ctx.step(name, str)
        return "there"

    task = app.enqueue(slow_going).id
    with app.start(lease=5):
        view = app.wait(task, timeout=10)
    assert (view.status, view.result) == ("succeeded", "there")
    assert view.runs == 7


@pytest.mark.parametrize("colour", ["def", "async def"])
def test_h14_forty_waits_spend_no_attempt(app: App, colour: str) -> None:
    """H14: forty sleeps and forty signals in a task with max_attempts=3."""
    attempts: list[int] = []

    @app.task(retry=FAST)
    def patient(ctx: Context) -> int:
        attempts.append(ctx.attempt)
        for _ in range(40):
            ctx.sleep(0)
        return sum(ctx.wait_signal("hint") for _ in range(40))

    @app.task(retry=FAST)
    async def patient_async(ctx: AsyncContext) -> int:
        attempts.append(ctx.attempt)
        for _ in range(40):
            await ctx.sleep(0)
        return sum([await ctx.wait_signal("hint") for _ in range(40)])

    for _ in range(40):
        app.signal("hint", 1)
    task = app.enqueue(patient if colour == "def" else patient_async).id
    with app.start(lease=5):
        view = app.wait(task, timeout=30)
    assert (view.status, view.result) == ("succeeded", 40)
    assert view.runs == 81
    assert set(attempts) == {1}


# --- H15 -----------------------------------------------------------------------------------------


def test_h15_what_is_unwound_at_shutdown_spends_no_attempt(app: App, db: Db) -> None:
    """H15: unwound at its next verb, or cancelled while it awaits: due at once, attempts 0."""
    inside: list[str] = []

    @app.task(retry=FAST)
    def walks(ctx: Context) -> None:
        inside.append(ctx.task_id)
        for number in range(10_000):
            ctx.step(f"wait-{number}", time.sleep, 0.02)

    @app.task(retry=FAST)
    async def stands(ctx: AsyncContext) -> None:
        inside.append(ctx.task_id)
        await asyncio.sleep(3600)

    tasks = [app.enqueue(handler).id for handler in (walks, stands)]
    for run in range(1, 6):
        inside.clear()
        with app.start(lease=30, grace=0):
            wait_until(lambda: sorted(inside) == sorted(tasks))
        for task in tasks:
            view = app.get(task)
            assert (view.status, view.attempts, view.runs) == ("pending", 0, run)
            assert column(db, "next_run_at <= clock_timestamp()", task)


def test_h15_a_stop_leaves_nothing_claimed(app: App, db: Db) -> None:
    """H15: a worker stopped while it claims: each task has run, or is due with no attempt spent."""
    ran: list[str] = []

    @app.task
    async def quick(ctx: AsyncContext) -> None:
        ran.append(ctx.task_id)

    rng = random.Random(15)
    for _ in range(60 if SOAK else 12):
        app.enqueue_many(quick, [None] * 300)
        worker = app.start(concurrency=30, grace=0)
        pass_time(rng.uniform(0, 0.12))
        worker.stop()
        assert set(statuses(db)) <= {"pending", "succeeded"}
    rows = db.execute("select status, attempts, runs from leasetask.task").fetchall()
    assert all(row[1] == 0 for row in rows if row[0] == "pending")
    assert all(row[1] == 1 for row in rows if row[0] == "succeeded")
    assert len(ran) == len(set(ran)) == statuses(db).get("succeeded", 0)


def test_h15_what_is_inside_a_thread_at_shutdown_spends_no_attempt(
    db: Db, dsn: str, tmp_path: Path
) -> None:
    """H15: three sync tasks that cannot be unwound, each with a budget of one.

    The process leaves them behind at once; soon they are due, and neither charged nor suspect.
    """
    with Fleet(dsn, tmp_path) as fleet:
        tasks = [enqueue(db, "stuck_once", max_attempts=1) for _ in range(3)]
        worker = fleet.start("recovery", "--grace", "0.1", lease=30)
        fleet.ledger.wait_for("run 1 stands", times=3)
        worker.terminate()
        stopped = time.monotonic()
        assert worker.wait() == 0
        assert time.monotonic() - stopped < 4
        assert statuses(db) == {"running": 3}
        for task in tasks:
            assert column(db, "lease_until < clock_timestamp() + interval '2 s'", task)
            assert column(db, "attempts", task) == 0
        fleet.start("recovery", lease=1)
        assert wait_for_end(db) == {"succeeded": 3}
        for task in tasks:
            assert column(db, "(runs, attempts, suspect, swept)", task) == ("2", "1", "f", "0")


# --- H16 -----------------------------------------------------------------------------------------


def test_h16_an_input_that_no_longer_decodes(app: App, db: Db) -> None:
    """H16: it ends failed after one run, with the reason; the worker goes on."""
    entered: list[Any] = []

    @app.task
    def typed(ctx: Context, number: int) -> int:
        entered.append(number)
        return number

    @app.task
    async def typed_async(ctx: AsyncContext, number: int) -> int:
        entered.append(number)
        return number

    bad = [enqueue(db, kind, {"not": "a number"}) for kind in ("typed", "typed_async")]
    with app.start(lease=5):
        for task in bad:
            view = app.wait(task, timeout=10)
            assert (view.status, view.runs) == ("failed", 1)
            assert view.last_error is not None
            assert view.last_error["type"] == "PayloadError"
            assert column(db, "dead_letter_at is not null", task)
        for kind in ("typed", "typed_async"):
            assert app.wait(enqueue(db, kind, 7), timeout=10).result == 7
    assert entered == [7, 7]


UNREADABLE = {
    "deep": "(repeat('[', 1500) || repeat(']', 1500))::jsonb",
    "digits": "('1' || repeat('0', 5000))::jsonb",
    "fraction": "('1' || repeat('0', 400) || '.5')::jsonb",
}
"""JSON that PostgreSQL stores and Python does not read, as any SQL producer may enqueue it."""


@pytest.mark.parametrize("value", UNREADABLE)
def test_h16_an_input_that_cannot_be_read(app: App, db: Db, value: str) -> None:
    """H16: it ends failed, with the reason, and takes neither the worker nor others with it."""
    ran: list[int] = []

    @app.task
    async def anything(ctx: AsyncContext, value: Any) -> None:
        ran.append(value)

    query = f"select leasetask.enqueue('anything', {UNREADABLE[value]}, 'unreadable')::text"
    with db.transaction():
        first = app.enqueue(anything, 1).id
        bad = db.execute(query).fetchall()[0][0]
        last = app.enqueue(anything, 2).id
    with app.start(lease=5):
        for task in (first, last):
            assert app.wait(task, timeout=10).status == "succeeded"
        wait_until(lambda: column(db, "status", bad) == "failed")
        assert app.wait(app.enqueue(anything, 3).id, timeout=10).status == "succeeded"
    assert column(db, "(runs, last_error ->> 'type')", bad) == ("1", "PayloadError")
    assert sorted(ran) == [1, 2, 3]


def test_h16_a_signal_that_cannot_be_read(app: App, db: Db) -> None:
    """H16: the same in a signal: the task that consumes it fails, the worker goes on."""

    @app.task
    async def waits(ctx: AsyncContext, topic: str) -> Any:
        return await ctx.wait_signal(topic)

    bad, good = (app.enqueue(waits, topic).id for topic in ("bad", "good"))
    with app.start(lease=5):
        wait_until(lambda: statuses(db) == {"waiting": 2})
        db.execute(f"select leasetask.signal('bad', {UNREADABLE['deep']})")
        view = app.wait(bad, timeout=10)
        assert (view.status, view.last_error and view.last_error["type"]) == (
            "failed",
            "PayloadError",
        )
        app.signal("good", 1)
        assert app.wait(good, timeout=10).result == 1


def test_h16_a_type_that_cannot_be_made(app: App, db: Db) -> None:
    """H16: whatever a type raises when an input is converted to it: failed, after one run."""

    @dataclass
    class Strict:
        number: int

        def __post_init__(self) -> None:
            raise KeyError(self.number)

    async def strict(ctx: AsyncContext, value: Any) -> None:
        pass

    strict.__annotations__["value"] = Strict
    app.task(strict)
    bad = enqueue(db, "strict", {"number": 1})
    with app.start(lease=5):
        view = app.wait(bad, timeout=10)
    assert (view.status, view.runs) == ("failed", 1)
    assert view.last_error is not None
    assert view.last_error["type"] == "PayloadError"


def test_h16_a_handler_that_is_gone(app: App, db: Db) -> None:
    """H16: its tasks are left alone, unclaimed and uncharged, until their deadline.

    Then they are dead letters. Meanwhile the worker runs the others and does not spin.
    """

    @app.task(version=2)
    async def here(ctx: AsyncContext) -> None:
        pass

    gone = [enqueue(db, "gone") for _ in range(50)]
    late = enqueue(db, "gone", deadline=1.5)
    old = enqueue(db, "here", version=1)
    with app.start(lease=1, poll_interval=1):
        assert app.wait(app.enqueue(here).id, timeout=10).status == "succeeded"
        began = time.process_time()
        pass_time(1)
        assert time.process_time() - began < 0.5
        view = app.wait(late, timeout=10)
    assert (view.status, view.runs) == ("failed", 0)
    assert view.last_error is not None
    assert view.last_error["type"] == "DeadlineExceeded"
    assert column(db, "dead_letter_at is not null", late)
    for task in (*gone, old):
        assert column(db, "(status, runs, attempts)", task) == ("pending", "0", "0")
