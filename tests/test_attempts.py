"""What spends an attempt, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import Fleet, column, enqueue, statuses, wait_for_status, wait_until

from leasetask import App, AsyncContext, Context, Retry

Db = psycopg.Connection[Any]
FAST = Retry(max_attempts=3, initial=0.01, factor=1.0, jitter=0.0)


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


# --- H14 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
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
    """H15: handed back at its next verb, or cancelled while it awaits: pending, due, attempts 0."""
    inside: list[str] = []

    @app.task(retry=FAST)
    def loops(ctx: Context) -> None:
        inside.append(ctx.task_id)
        for number in range(1000):
            ctx.step(f"wait-{number}", time.sleep, 0.05)

    @app.task(retry=FAST)
    def stands(ctx: Context) -> None:
        inside.append(ctx.task_id)
        while not ctx.cancel_requested:
            time.sleep(0.05)
            ctx.check()

    @app.task(retry=FAST)
    async def awaits(ctx: AsyncContext) -> None:
        inside.append(ctx.task_id)
        await threading_free_sleep()

    async def threading_free_sleep() -> None:
        import asyncio

        await asyncio.sleep(3600)

    tasks = [app.enqueue(handler).id for handler in (loops, awaits)]
    for _ in range(5):
        inside.clear()
        with app.start(lease=30, grace=0):
            wait_until(lambda: sorted(inside) == sorted(tasks))
        for task in tasks:
            view = app.get(task)
            assert view.status == "pending"
            assert view.attempts <= 1
            assert column(db, "next_run_at <= clock_timestamp()", task)
    assert app.get(tasks[1]).attempts == 0
    assert app.get(tasks[1]).runs == 5
