"""`leasetask show`: what the person who is paged finds out about one task."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator

import psycopg
import pytest
from support import COMMAND, enqueue, wait_for_status, wait_until

from leasetask import App, Attempt, Context, NotDone, Retry, Unknown


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


def show(dsn: str, task: str, *options: str) -> str:
    done = subprocess.run(
        [COMMAND, "show", task, "--dsn", dsn, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_that_waits_and_one_that_ended(app: App, dsn: str, db: psycopg.Connection) -> None:
    tries: list[int] = []

    @app.task(retry=Retry(max_attempts=3, initial=0.01))
    def buys(ctx: Context, order: int) -> str:
        def unsteady() -> str:
            tries.append(1)
            if len(tries) < 3:
                raise ConnectionError("no route")
            return "x" * 300

        ctx.step("look", unsteady)
        ctx.effect("charge", lambda attempt: "ch_1", lambda attempt: NotDone())
        paid = ctx.wait_signal("paid", timeout=3600)
        return f"by {paid['by']}"

    with app.start(lease=5):
        task = app.enqueue(buys, 7, key="order-7").id
        wait_for_status(db, task, "waiting")
        wait_until(lambda: "waits for" in show(dsn, task))
        text = show(dsn, task)
        app.signal("paid", {"by": "card"})
        app.wait(task, timeout=10)
    for words in (
        "buys v1",
        "status     waiting",
        "next run   in 60 min",
        "waits for  topic paid, as wait-1, for ",
        ", until in 60 min (",
        "key        order-7",
        "input      7",
        "started 1, ended 1",
        "… (302 characters)",
    ):
        assert words in text, text
    (look,) = [line.split() for line in text.splitlines() if " look " in line]
    assert look[0] == "1"
    assert "3" in look, "its tries"
    ended = show(dsn, task)
    assert "status    succeeded" in ended
    assert 'result    "by card"' in ended
    assert "SIGNAL" in ended
    assert '{"by": "card"}' in ended
    told = json.loads(show(dsn, task, "--json"))
    assert list(told["records"]) == ["look", "charge", "wait-1"]
    assert told["signals"][0]["topic"] == "paid"


def test_a_running_task_tells_the_step_that_it_is_in(
    app: App, dsn: str, db: psycopg.Connection
) -> None:
    """Of a plain step too, which leaves no mark before it is recorded: with the next heartbeat."""
    gate = threading.Event()

    @app.task
    def stands(ctx: Context) -> None:
        ctx.step("quick", lambda: None)
        ctx.step("slow", lambda: gate.wait(20) and None)
        ctx.sleep(3600)

    with app.start(lease=2):
        task = app.enqueue(stands).id
        wait_until(lambda: "does      slow, for " in show(dsn, task), 20, "for the step")
        view = app.get(task)
        assert view.current_step == "slow"
        assert view.step_since is not None
        assert abs((view.created_at - view.step_since).total_seconds()) < 5
        assert view.progress is None
        top = [COMMAND, "top", "--once", "--dsn", dsn]
        assert "slow (" in subprocess.run(top, capture_output=True, text=True, check=True).stdout
        gate.set()
        wait_until(lambda: app.get(task).status == "waiting", 20, "for the sleep")
    assert app.get(task).current_step == "sleep-1"
    assert "does" not in show(dsn, task)


def test_a_running_task_tells_its_lease_and_progress(
    app: App, dsn: str, db: psycopg.Connection
) -> None:
    @app.task
    def copies(ctx: Context) -> None:
        ctx.progress(0.42, "copying")
        wait_until(lambda: ctx.cancel_requested, 20)
        ctx.check()

    with app.start(lease=2):
        task = app.enqueue(copies).id
        wait_until(lambda: "42%  copying" in show(dsn, task), 20, "for the progress")
        text = show(dsn, task)
        app.cancel(task, reason="no more room")
        app.wait(task, timeout=20)
    assert "does" not in text
    assert "status    running on " in text
    assert "; its lease ends in 1." in text or "; its lease ends in 2." in text, text
    assert "tries     1 of 5; claimed 1 times in all" in text
    assert "asked for" in show(dsn, task)
    assert "no more room" in show(dsn, task)


def test_a_failed_task_tells_why(app: App, dsn: str, db: psycopg.Connection) -> None:
    @app.task(retry=Retry(max_attempts=1))
    def breaks(ctx: Context) -> None:
        raise KeyError("customer")

    @app.task
    def unclear(ctx: Context) -> None:
        def cut(attempt: Attempt) -> None:
            raise SystemExit

        ctx.effect("send", cut, lambda attempt: Unknown("no list"))

    with app.start(lease=5):
        task = app.enqueue(breaks).id
        app.wait(task, timeout=10)
    text = show(dsn, task)
    assert "status    failed" in text
    assert "last error (try 1, " in text
    assert "KeyError: 'customer'" in text
    assert "Traceback (most recent call last)" in text


def test_an_expired_lease_is_said_loudly(dsn: str, db: psycopg.Connection) -> None:
    task = enqueue(db, "a")
    db.execute("select * from leasetask.claim('host:1:x', array['a'], array[1], 1, '1 ms')")
    wait_until(lambda: "its lease RAN OUT" in show(dsn, task), 10)
