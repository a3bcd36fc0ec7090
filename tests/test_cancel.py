"""Cancel and compensation: nothing new starts, and what was done is undone, once, in reverse."""

from __future__ import annotations

import asyncio
import threading

import pytest
from helpers import FAST, crash_once, ended, until, working

from leasetask import App, AsyncContext, Context, StepFailed, TaskCanceled


def test_a_pending_task_is_canceled_at_once(dsn: str) -> None:
    app = App(dsn)

    @app.task
    def never(ctx: Context) -> None:
        raise AssertionError("it must not run")

    task = app.enqueue(never, delay=0)
    assert app.cancel(task.id, reason="changed my mind") == "canceled"
    assert app.cancel(task.id) == "finished"
    view = app.get(task.id)
    assert (view.status, view.cancel_reason) == ("canceled", "changed my mind")


def test_a_waiting_task_is_canceled_at_once_and_strands_no_signal(dsn: str) -> None:
    app = App(dsn)

    @app.task
    def waits(ctx: Context) -> object:
        return ctx.wait_signal("topic")

    first, second = app.enqueue(waits), app.enqueue(waits)
    with working(app):
        until(app, first.id, "status = 'waiting'")
        until(app, second.id, "status = 'waiting'")
        assert app.cancel(first.id) == "canceled"
        assert app.signal("topic", "for the second") == 1
        assert app.wait(second.id, timeout=10).result == "for the second"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_running_task_learns_of_it_and_no_further_step_starts(dsn: str, colour: str) -> None:
    """The step under way is recorded (sync) or cancelled (async); the next one does not start."""
    app, calls, entered = App(dsn), [], threading.Event()
    leave = threading.Event()

    @app.task
    def sync(ctx: Context) -> None:
        def under_way() -> str:
            entered.set()
            assert leave.wait(10)
            while not ctx.cancel_requested:
                leave.wait(0.01)
            return "recorded"

        ctx.step("under way", under_way)
        ctx.step("next", calls.append, "next")

    @app.task
    async def asynchronous(ctx: AsyncContext) -> None:
        async def under_way() -> None:
            entered.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                calls.append("cancelled")
                raise

        await ctx.step("under way", under_way)
        await ctx.step("next", calls.append, "next")

    task = app.enqueue(sync if colour == "sync" else asynchronous)
    with working(app):
        assert entered.wait(10)
        assert app.cancel(task.id, reason="stop") == "requested"
        leave.set()
        view = app.wait(task.id, timeout=10)
    assert view.status == "canceled"
    assert calls == ([] if colour == "sync" else ["cancelled"])
    assert view.steps == (["under way"] if colour == "sync" else [])


def test_check_raises_between_the_chunks_of_a_step(dsn: str) -> None:
    app, entered = App(dsn), threading.Event()

    @app.task
    def copies(ctx: Context) -> None:
        def chunks() -> None:
            entered.set()
            while True:
                ctx.check()
                entered.wait(0.001)

        with pytest.raises(TaskCanceled):
            ctx.step("chunks", chunks)
        raise TaskCanceled("as a handler lets it pass")

    task = app.enqueue(copies)
    with working(app):
        assert entered.wait(10)
        app.cancel(task.id)
        assert app.wait(task.id, timeout=10).status == "canceled"


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_compensations_run_in_reverse_and_once(dsn: str, colour: str, end: str) -> None:
    """On cancel of a waiting task and on final failure, also when one has to be tried again."""
    app, calls = App(dsn), []

    def undo(what: str) -> None:
        if what == "two" and "undo two failed" not in calls:
            calls.append("undo two failed")
            raise OSError("try again")
        calls.append(f"undo {what}")

    def final() -> None:
        raise ValueError("for good")

    @app.task(retry=FAST)
    def sync(ctx: Context) -> None:
        ctx.step("one", calls.append, "one")
        ctx.compensate("one", undo, "one")
        ctx.step("two", lambda: calls.append("two") or "two", compensate=undo)
        if end == "cancel":
            ctx.wait_signal("never")
        ctx.step("three", final)

    @app.task(retry=FAST)
    async def asynchronous(ctx: AsyncContext) -> None:
        await ctx.step("one", calls.append, "one")
        await ctx.compensate("one", undo, "one")
        await ctx.step("two", lambda: calls.append("two") or "two", compensate=undo)
        if end == "cancel":
            await ctx.wait_signal("never")
        await ctx.step("three", final)

    task = app.enqueue(sync if colour == "sync" else asynchronous)
    with working(app):
        if end == "cancel":
            until(app, task.id, "status = 'waiting'")
            assert app.cancel(task.id, reason="no") == "compensating"
        view = app.wait(task.id, timeout=10)
    assert view.status == ("canceled" if end == "cancel" else "failed")
    assert calls == ["one", "two", "undo two failed", "undo two", "undo one"]
    if end == "fail":
        assert "for good" in view.last_error["message"]


def test_a_compensation_that_fails_for_good_ends_the_task_failed(dsn: str) -> None:
    app = App(dsn)

    def broken() -> None:
        raise OSError("cannot undo")

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        ctx.compensate("undo", broken)
        ctx.wait_signal("never")

    task = app.enqueue(handler)
    with working(app):
        until(app, task.id, "status = 'waiting'")
        app.cancel(task.id)
        view = app.wait(task.id, timeout=10)
    assert view.status == "failed"
    assert "cannot undo" in view.last_error["message"]


def test_a_crash_half_way_through_compensations_goes_on_with_the_rest(dsn: str) -> None:
    app, calls = App(dsn), []

    def undo(what: str) -> None:
        calls.append(f"undo {what}")

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        ctx.compensate("a", undo, "a")
        ctx.compensate("b", undo, "b")
        try:
            ctx.wait_signal("never")
        except TaskCanceled:
            if "undo b" in calls:
                crash_once(calls)
            raise

    def failing_once(what: str) -> None:
        undo(what)
        if what == "b":
            raise OSError("the process dies before this is recorded")

    task = app.enqueue(handler)
    with working(app):
        until(app, task.id, "status = 'waiting'")
        app.cancel(task.id)
        view = app.wait(task.id, timeout=10)
    assert view.status == "canceled"
    assert calls == ["undo b", "undo a"]


def test_a_handler_that_returns_in_spite_of_a_cancel_has_succeeded(dsn: str) -> None:
    app, entered = App(dsn), threading.Event()

    @app.task
    def stubborn(ctx: Context) -> str:
        entered.set()
        while not ctx.cancel_requested:
            entered.wait(0.01)
        return "done all the same"

    task = app.enqueue(stubborn)
    with working(app):
        assert entered.wait(10)
        app.cancel(task.id)
        view = app.wait(task.id, timeout=10)
    assert (view.status, view.result) == ("succeeded", "done all the same")


def test_a_registration_after_the_step_it_undoes_survives_a_cancel_in_between(dsn: str) -> None:
    """The step is recorded, the cancel arrives, the handler registers: what was done is undone."""
    app, calls, entered = App(dsn), [], threading.Event()

    @app.task
    def handler(ctx: Context) -> None:
        def do() -> None:
            entered.set()
            while not ctx.cancel_requested:
                entered.wait(0.01)

        ctx.step("do", do)
        ctx.compensate("do", calls.append, "undone")
        ctx.step("more", calls.append, "more")

    task = app.enqueue(handler)
    with working(app):
        assert entered.wait(10)
        app.cancel(task.id)
        assert app.wait(task.id, timeout=10).status == "canceled"
    assert calls == ["undone"]


def test_a_failed_step_that_the_handler_survives_compensates_nothing(dsn: str) -> None:
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        ctx.compensate("undo", calls.append, "undo")
        with pytest.raises(StepFailed):
            ctx.step("bad", int, "x")
        return "fine"

    assert ended(app, handler).status == "succeeded"
    assert calls == []
