"""Replay: a recorded step is never run again, and a handler that has changed is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from helpers import FAST, crash_once, ended, until, working

from leasetask import App, AsyncContext, Context, NonRetryable, SignalTimeout, StepFailed


def test_recorded_steps_are_not_run_again_sync(dsn: str) -> None:
    """H17's shape without a kill: steps 1 to 3 run once, the replay goes on at step 4."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def five(ctx: Context) -> list[int]:
        done = []
        for i in range(5):
            if i == 3:
                crash_once(calls)
            done.append(ctx.step(f"step-{i}", lambda i=i: calls.append(f"step-{i}") or i))
        return done

    view = ended(app, five)
    assert view.status == "succeeded"
    assert view.result == [0, 1, 2, 3, 4]
    assert calls == ["step-0", "step-1", "step-2", "crash", "step-3", "step-4"]
    assert view.runs == 2


@pytest.mark.parametrize("style", ["gather", "group"])
def test_concurrent_steps_replay_whatever_order_they_finished_in(dsn: str, style: str) -> None:
    """asyncio.gather and TaskGroup of steps: each body runs once, the results stay in place."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    async def fan(ctx: AsyncContext) -> list[int]:
        async def one(i: int) -> int:
            await asyncio.sleep(0.02 * (3 - i))
            return await ctx.step(f"s{i}", body, i)

        async def body(i: int) -> int:
            calls.append(f"s{i}")
            await asyncio.sleep(0.01 * (3 - i))
            return i * 10

        if style == "gather":
            first = list(await asyncio.gather(*(one(i) for i in range(3))))
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i)) for i in range(3)]
            first = [task.result() for task in tasks]
        crash_once(calls)
        return [*first, await ctx.step("last", body, 9)]

    view = ended(app, fan)
    assert view.status == "succeeded", view.last_error
    assert view.result == [0, 10, 20, 90]
    assert sorted(calls) == ["crash", "s0", "s1", "s2", "s9"]


def test_a_wait_under_gather_lets_the_others_finish(dsn: str) -> None:
    """A branch that waits parks; the handler is dropped only when every branch stands."""
    app, calls = App(dsn), []

    @app.task
    async def handler(ctx: AsyncContext) -> list[object]:
        async def slow() -> str:
            await asyncio.sleep(0.1)
            calls.append("slow")
            return "slow"

        return list(
            await asyncio.gather(
                ctx.wait_signal(f"go:{ctx.task_id}", name="go"), ctx.step("slow", slow)
            )
        )

    task = app.enqueue(handler)
    with working(app):
        until(app, task.id, "status = 'waiting'")
        assert calls == ["slow"]
        assert app.signal(f"go:{task.id}", "went") == 1
        view = app.wait(task.id, timeout=10)
    assert view.result == ["went", "slow"]
    assert calls == ["slow"]


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("change", ["removed", "renamed", "between"])
def test_a_changed_handler_is_found_before_any_unrecorded_body_runs(
    dsn: str, colour: str, change: str
) -> None:
    """H19: removed, renamed and put-in-between steps end in NonDeterminismError, nothing run."""
    calls: list[str] = []
    old, new = App(dsn), App(dsn)
    names = ["a", "b", "wait"]
    changed = {
        "removed": ["b", "wait", "c"],
        "renamed": ["a", "B", "wait"],
        "between": ["a", "x", "b", "wait"],
    }[change]

    def declare(app: App, steps: list[str]) -> Callable:
        def body(name: str) -> str:
            calls.append(name)
            return name

        if colour == "sync":

            @app.task(kind="k", retry=FAST)
            def handler(ctx: Context) -> None:
                for name in steps:
                    if name == "wait":
                        ctx.wait_signal("topic", name="wait")
                    else:
                        ctx.step(name, body, name)

            return handler

        @app.task(kind="k", retry=FAST)
        async def async_handler(ctx: AsyncContext) -> None:
            for name in steps:
                if name == "wait":
                    await ctx.wait_signal("topic", name="wait")
                else:
                    await ctx.step(name, body, name)

        return async_handler

    task = old.enqueue(declare(old, names))
    with working(old):
        until(old, task.id, "status = 'waiting'")
    assert calls == ["a", "b"]
    declare(new, changed)
    new.signal("topic")
    with working(new):
        view = new.wait(task.id, timeout=10)
    assert view.status == "failed"
    assert view.last_error["type"] == "NonDeterminismError"
    assert calls == ["a", "b"]


def test_appended_and_inserted_steps_are_fine(dsn: str) -> None:
    """A step at the end, or one put in between and declared so, is no change that breaks."""
    old, new, calls = App(dsn), App(dsn), []

    @old.task(kind="k")
    def before(ctx: Context) -> None:
        ctx.step("a", calls.append, "a")
        ctx.wait_signal("topic", name="wait")

    @new.task(kind="k")
    def after(ctx: Context) -> None:
        ctx.step("x", calls.append, "x", inserted=True)
        ctx.step("a", calls.append, "a")
        ctx.wait_signal("topic", name="wait")
        ctx.step("end", calls.append, "end")

    task = old.enqueue(before)
    with working(old):
        until(old, task.id, "status = 'waiting'")
    new.signal("topic")
    with working(new):
        assert new.wait(task.id, timeout=10).status == "succeeded"
    assert calls == ["a", "x", "end"]


def test_two_steps_of_one_name_are_refused(dsn: str) -> None:
    """H19: the second use raises before its body."""
    app, calls = App(dsn), []

    @app.task
    def twice(ctx: Context) -> None:
        ctx.step("a", calls.append, 1)
        ctx.step("a", calls.append, 2)

    view = ended(app, twice)
    assert (view.status, view.last_error["type"]) == ("failed", "DuplicateStep")
    assert calls == [1]


def test_a_second_wait_at_a_time_is_refused(dsn: str) -> None:
    app = App(dsn)

    @app.task
    async def two(ctx: AsyncContext) -> None:
        await asyncio.gather(ctx.wait_signal("a", name="a"), ctx.wait_signal("b", name="b"))

    view = ended(app, two)
    assert (view.status, view.last_error["type"]) == ("failed", "ConcurrentWait")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_swallowed_suspension_fails_the_task(dsn: str, colour: str) -> None:
    """A handler that catches BaseException around a wait and goes on cannot be trusted."""
    app = App(dsn)

    @app.task
    def swallow(ctx: Context) -> str:
        with suppress(BaseException):
            ctx.sleep(60)
        return "went on"

    @app.task
    async def swallow_async(ctx: AsyncContext) -> str:
        with suppress(BaseException):
            await ctx.sleep(60)
        return "went on"

    view = ended(app, swallow if colour == "sync" else swallow_async)
    assert (view.status, view.last_error["type"]) == ("failed", "SuspensionSwallowed")


def test_a_spent_step_takes_the_same_other_way_on_replay(dsn: str) -> None:
    """A recorded StepFailed is raised again at the same place, its body not called again."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def other_way(ctx: Context) -> str:
        def flaky() -> None:
            calls.append("flaky")
            raise ValueError("no")

        try:
            ctx.step("flaky", flaky)
        except StepFailed as error:
            way = f"{error.step}: {error.error['type']}"
        crash_once(calls)
        return ctx.step("other", lambda: way)

    view = ended(app, other_way)
    assert view.result == "flaky: ValueError"
    assert calls == ["flaky"] * 3 + ["crash"]


def test_not_retryable_and_retry_on(dsn: str) -> None:
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        def never() -> None:
            calls.append("never")
            raise NonRetryable("give up")

        def wrong_kind() -> None:
            calls.append("wrong kind")
            raise ValueError("not an OSError")

        for name, body in (("n", never), ("w", wrong_kind)):
            with pytest.raises(StepFailed):
                ctx.step(name, body, retry_on=(OSError,))

    assert ended(app, handler).status == "succeeded"
    assert calls == ["never", "wrong kind"]


def test_an_uncaught_step_failure_fails_the_task_and_retry_goes_on_from_it(dsn: str) -> None:
    """`failed` and a dead letter; `retry` drops the failure and keeps what came before."""
    app, calls, broken = App(dsn), [], [True]

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        ctx.step("before", calls.append, "before")

        def flaky() -> str:
            calls.append("flaky")
            if broken[0]:
                raise ValueError("no")
            return "mended"

        return ctx.step("flaky", flaky)

    task = app.enqueue(handler)
    with working(app):
        view = app.wait(task.id, timeout=10)
        assert view.status == "failed"
        assert view.last_error["type"] == "StepFailed"
        assert "no" in view.last_error["message"]
        broken[0] = False
        app.retry(task.id)
        view = app.wait(task.id, timeout=10)
    assert (view.status, view.result) == ("succeeded", "mended")
    assert calls == ["before", "flaky", "flaky", "flaky", "flaky"]


@pytest.mark.parametrize("verb", ["step", "effect", "transaction", "wait_for"])
def test_a_cancelled_async_step_replays_its_cancellation(dsn: str, verb: str) -> None:
    """asyncio.timeout around a verb: the replay times out too, and the body is not called again."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    async def handler(ctx: AsyncContext) -> str:
        async def long(*_: object) -> None:
            calls.append("long")
            await asyncio.sleep(60)

        try:
            async with asyncio.timeout(0.2):
                if verb == "step":
                    await ctx.step("long", long)
                elif verb == "effect":
                    await ctx.effect("long", long, long)
                elif verb == "transaction":
                    await ctx.transaction("long", long)
                else:
                    await ctx.wait_for("long", long, topic="never", every=60)
        except TimeoutError:
            calls.append("timed out")
        await ctx.step("went on", lambda: None)
        crash_once(calls)
        return await ctx.step("after", lambda: "after")

    view = ended(app, handler)
    assert view.result == "after"
    assert calls == ["long", "timed out", "crash", "timed out"]


@pytest.mark.parametrize("group", [True, False])
def test_what_an_error_beside_it_has_cancelled_runs_again(dsn: str, group: bool) -> None:
    """The error need not come again: a recorded cancellation would be waited for in vain."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    async def handler(ctx: AsyncContext) -> int:
        async def slow() -> int:
            calls.append("slow")
            if len(calls) == 1:
                await asyncio.sleep(60)
            return 7

        async def flaky() -> None:
            await asyncio.sleep(0.1)
            crash_once(calls)

        if not group:
            return (await asyncio.gather(ctx.step("slow", slow), flaky()))[0]
        async with asyncio.TaskGroup() as tasks:
            found = tasks.create_task(ctx.step("slow", slow))
            tasks.create_task(flaky())
        return found.result()

    assert ended(app, handler).result == 7
    assert calls == ["slow", "crash", "slow"]


def test_a_cancelled_step_is_recorded_when_the_run_suspends(dsn: str) -> None:
    """Its branch has no further verb; another branch sleeps meanwhile."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    async def handler(ctx: AsyncContext) -> str:
        async def long() -> None:
            calls.append("long")
            await asyncio.sleep(60)

        async def gives_up() -> str:
            try:
                async with asyncio.timeout(0.05):
                    await ctx.step("long", long)
            except TimeoutError:
                return "gave up"
            return "went on"

        return (await asyncio.gather(gives_up(), ctx.sleep(0.3)))[0]

    assert ended(app, handler).result == "gave up"
    assert calls == ["long"]


def test_a_step_that_the_runs_time_limit_ended_runs_again(dsn: str) -> None:
    app, calls = App(dsn), []

    @app.task(retry=FAST, timeout=0.3)
    async def handler(ctx: AsyncContext) -> int:
        async def slow_at_first() -> int:
            calls.append("slow")
            if len(calls) == 1:
                await asyncio.sleep(60)
            return 7

        return await ctx.step("slow", slow_at_first)

    assert ended(app, handler).result == 7
    assert calls == ["slow", "slow"]


def test_a_timed_out_wait_stays_timed_out(dsn: str) -> None:
    """H18: the timeout branch was taken, the process died, the signal came: the same branch."""
    app, calls = App(dsn), []

    @app.task(retry=FAST)
    def handler(ctx: Context) -> str:
        try:
            ctx.wait_signal("late", timeout=0.05)
            way = "signal"
        except SignalTimeout:
            way = "timeout"
        if not calls:
            calls.append("crash")
            app.signal("late", 1)
            raise RuntimeError("as if the process had died here")
        return ctx.step("way", lambda: way)

    assert ended(app, handler).result == "timeout"


def test_branches_that_share_a_semaphore_suspend_together(dsn: str) -> None:
    """Its holders are parked for a later try: whoever waits for it cannot go on before the next run."""
    app, calls = App(dsn), []

    @app.task
    async def handler(ctx: AsyncContext) -> int:
        slots = asyncio.Semaphore(2)

        def flaky(number: int) -> int:
            calls.append(number)
            if number < 2 and calls.count(number) == 1:
                raise ValueError("not yet")
            return number

        async def branch(number: int) -> int:
            async with slots:
                return await ctx.step(f"step-{number}", flaky, number, retry=FAST)

        return sum(await asyncio.gather(*(branch(number) for number in range(6))))

    assert ended(app, handler).result == 15
    assert sorted(calls) == [0, 0, 1, 1, 2, 3, 4, 5]
