"""A worker that is told to stop: it always exits, and leaves nothing behind that is missed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from psycopg import sql
from support import (
    Fleet,
    WorkerProcess,
    column,
    enqueue,
    pass_time,
    statuses,
    wait_for_end,
    wait_until,
)

from leasetask import App, AsyncContext, Context, Retry

Db = psycopg.Connection[Any]


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(dsn, tmp_path) as fleet:
        yield fleet


def exit_of(worker: WorkerProcess, seconds: float = 10.0) -> tuple[int, float]:
    """Wait for the exit; return the status and the seconds that it took."""
    began = time.monotonic()
    return worker.wait(seconds), time.monotonic() - began


def test_h40_a_stop_just_after_the_start(db: Db, fleet: Fleet) -> None:
    """H40: SIGTERM within milliseconds of the start, 20 times (soak: 1,000): it always exits.

    Before the worker listens to the signal it dies of it; afterwards it drains. No traceback, and
    whatever it had claimed is finished or due again, at once and uncharged.
    """
    rng = random.Random(40)
    number, at_once = (1000, 5) if SOAK else (20, 5)
    for _ in range(number // at_once):
        for _ in range(50):
            enqueue(db, "brief")
        workers = [fleet.start("slow", "--grace", "1", lease=60) for _ in range(at_once)]
        for worker in workers:
            pass_time(rng.uniform(0.0, 0.2))
            worker.terminate()
        for worker in workers:
            status, _ = exit_of(worker)
            assert status in (0, -signal.SIGTERM)
            assert "Traceback" not in worker.log
        assert set(statuses(db)) <= {"pending", "succeeded"}
    assert column_values(db, "attempts", "pending") <= {0, 1}


def test_h40_a_stop_among_notifications(dsn: str, db: Db) -> None:
    """H40: the worker is woken at the very moment at which its parts are told to end."""
    app, over = App(dsn), threading.Event()

    def notify() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not over.is_set():
                conn.execute("select pg_notify('leasetask', 'signal')")

    notifying = threading.Thread(target=notify)
    notifying.start()
    try:
        for _ in range(200 if SOAK else 15):
            worker = app.start(poll_interval=30, grace=1)
            wait_until(lambda: db.execute("select 1 from leasetask.idle_worker").fetchone())
            stopping = threading.Thread(target=worker.stop, daemon=True)
            stopping.start()
            stopping.join(10)
            assert not stopping.is_alive()
    finally:
        over.set()
        notifying.join()
        app.close()


def column_values(db: Db, name: str, status: str) -> set[Any]:
    """Return the values of a column over the tasks of a status."""
    rows = db.execute(f"select distinct {name} from leasetask.task where status = %s", [status])
    return {row[0] for row in rows.fetchall()}


def test_an_idle_worker_leaves_at_once(db: Db, fleet: Fleet) -> None:
    """SIGTERM while it waits for half a minute, or SIGINT: gone within a second, status 0."""
    for stop in (WorkerProcess.terminate, WorkerProcess.interrupt):
        worker = fleet.start("slow", "--poll", "30", "--grace", "30")
        wait_until(lambda: db.execute("select 1 from leasetask.idle_worker").fetchone())
        stop(worker)
        status, took = exit_of(worker)
        assert (status, took < 1) == (0, True)
        assert db.execute("select count(*) from leasetask.idle_worker").fetchone() == (0,)


def test_handlers_finish_within_the_grace(db: Db, fleet: Fleet) -> None:
    """SIGTERM: what can finish within the grace does; nothing more is claimed meanwhile."""
    running = enqueue(db, "finishes", 0.5)
    worker = fleet.start("slow", "--grace", "20")
    fleet.ledger.wait_for("finishes: begins")
    worker.terminate()
    wait_until(lambda: "stopping" in worker.log)
    later = enqueue(db, "finishes", 0)
    status, took = exit_of(worker)
    assert (status, took < 5) == (0, True)
    assert column(db, "status", running) == "succeeded"
    assert column(db, "(status, runs)", later) == ("pending", "0")


def test_what_can_be_unwound_is_handed_back_at_once(db: Db, fleet: Fleet) -> None:
    """After the grace no step is begun, async bodies are cancelled, the rows are due at once."""
    tasks = [enqueue(db, kind) for kind in ("walks", "awaits")]
    worker = fleet.start("slow", "--grace", "0.2", lease=60)
    for kind in ("walks", "awaits"):
        fleet.ledger.wait_for(f"{kind}: begins")
    worker.terminate()
    status, took = exit_of(worker)
    assert (status, took < 2) == (0, True)
    for task in tasks:
        assert column(db, "(status, attempts, next_run_at <= clock_timestamp())", task) == (
            "pending",
            "0",
            "t",
        )


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_hurries(db: Db, fleet: Fleet, signals: int) -> None:
    """A second SIGTERM, or a SIGINT, ends the grace."""
    enqueue(db, "walks")
    worker = fleet.start("slow", "--grace", "60", lease=60)
    fleet.ledger.wait_for("walks: begins")
    if signals == 2:
        worker.terminate()
        wait_until(lambda: "stopping" in worker.log)
        worker.terminate()
    else:
        worker.interrupt()
    status, took = exit_of(worker)
    assert (status, took < 3) == (0, True)
    assert statuses(db) == {"pending": 1}


def test_stubborn_handlers_do_not_hold_the_process(db: Db, fleet: Fleet) -> None:
    """A thread, and a coroutine that refuses to be cancelled: both are left behind.

    Their leases now end just after the process's certain end, and it is gone before that, so no
    other worker's run overlaps with theirs. They are not charged.
    """
    kinds = ("in_thread", "refuses")
    tasks = [enqueue(db, kind) for kind in kinds]
    worker = fleet.start("slow", "--grace", "0.1", lease=60)
    for kind in kinds:
        fleet.ledger.wait_for(f"{kind}: begins")
    worker.terminate()
    status, took = exit_of(worker)
    assert (status, took < 4) == (0, True)
    for task in tasks:
        row = column(db, "(status, attempts, abandoned, lease_until > clock_timestamp())", task)
        assert row == ("running", "0", "t", "t")
        assert column(db, "lease_until < clock_timestamp() + interval '2 s'", task)


@pytest.mark.parametrize("kind", ["thread", "executor", "refuses"])
def test_an_embedded_worker_stops_beside_stubborn_handlers(dsn: str, kind: str) -> None:
    """`stop()` of a worker in one's own process returns although a handler goes on."""
    app, inside, over = App(dsn), threading.Event(), threading.Event()

    def stand() -> None:
        inside.set()
        over.wait()

    @app.task
    def thread(ctx: Context) -> None:
        stand()

    @app.task
    async def executor(ctx: AsyncContext) -> None:
        await asyncio.to_thread(stand)

    @app.task
    async def refuses(ctx: AsyncContext) -> None:
        inside.set()
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    task = app.enqueue(kind).id
    worker = app.start(grace=0)
    try:
        assert inside.wait(10)
        stopping = threading.Thread(target=worker.stop, daemon=True)
        stopping.start()
        stopping.join(6)
        assert not stopping.is_alive()
        view = app.get(task)
        assert (view.status, view.attempts) in (("running", 0), ("pending", 0))
    finally:
        over.set()
        app.close()


def test_a_thread_of_an_async_handler_does_not_hold_the_process(db: Db, fleet: Fleet) -> None:
    """Its handler is cancelled and the task due at once; the thread ends with the process."""
    task = enqueue(db, "in_executor")
    worker = fleet.start("slow", "--grace", "0.1", lease=60)
    fleet.ledger.wait_for("in_executor: begins")
    worker.terminate()
    status, took = exit_of(worker)
    assert (status, took < 2) == (0, True)
    assert column(db, "(status, attempts)", task) == ("pending", "0")


def test_a_stop_while_the_database_is_away(dsn: str, db: Db, fleet: Fleet) -> None:
    """SIGTERM while nothing can be handed back: it exits, and the tasks are recovered later."""
    name = db.info.dbname
    kinds = ("walks", "awaits", "in_thread")
    tasks = [enqueue(db, kind) for kind in kinds]
    worker = fleet.start("slow", "--grace", "0.1", lease=3)
    for kind in kinds:
        fleet.ledger.wait_for(f"{kind}: begins")
    allow = sql.SQL("alter database {} with allow_connections {}")
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as other:
        other.execute(allow.format(sql.Identifier(name), sql.Literal(False)))
        try:
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = %s and application_name like 'leasetask%%'",
                [name],
            )
            worker.terminate()
            status, took = exit_of(worker, 15)
        finally:
            other.execute(allow.format(sql.Identifier(name), sql.Literal(True)))
    assert (status, took < 12) == (0, True)
    assert "Traceback" not in worker.log
    fleet.start("noop", lease=1)
    wait_until(lambda: statuses(db) == {"pending": len(tasks)})


def test_killed_within_the_grace(db: Db, fleet: Fleet) -> None:
    """kill -9 after SIGTERM, as supervisors do it: an ordinary crash, recovered by lease."""
    task = enqueue(db, "finishes", 0.3)
    worker = fleet.start("slow", "--grace", "60", lease=1)
    fleet.ledger.wait_for("finishes: begins")
    worker.terminate()
    worker.kill()
    fleet.start("slow", lease=1)
    assert wait_for_end(db) == {"succeeded": 1}
    assert column(db, "runs", task) == 2


_TIDY = """
import gc, sys
from leasetask import App, AsyncContext, Context

app = App(sys.argv[1])

@app.task
def waits(ctx: Context) -> str:
    ctx.step("one", lambda: 1)
    return ctx.wait_signal("topic")

@app.task
async def looks(ctx: AsyncContext) -> str:
    return await ctx.wait_for("x", lambda: app.get(first).status, topic="topic", every=60)

first = app.enqueue(waits).id
second = app.enqueue(looks).id
with app.start(concurrency=4, lease=1, poll_interval=0.05):
    app.wait(second, timeout=20)
    app.signal("topic", "done")
    assert app.wait(first, timeout=20).result == "done"
app.close()
gc.collect()
"""


def test_nothing_is_left_open(dsn: str) -> None:
    """In Python's development mode, which tells of each loop, socket and connection left open."""
    command = [sys.executable, "-X", "dev", "-c", _TIDY, dsn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_drain_inside_a_task_group_spends_no_attempt(dsn: str) -> None:
    """The group wraps what the verbs raise to leave; the task is given back all the same."""
    app = App(dsn)
    begun = threading.Event()

    @app.task(retry=Retry(max_attempts=1))
    async def handler(ctx: AsyncContext) -> str:
        async def body() -> str:
            begun.set()
            try:
                await asyncio.sleep(60 if ctx.run == 1 else 0)
            except asyncio.CancelledError:
                return "in part"
            return "whole"

        async def branch(name: str) -> None:
            await ctx.step(name, body)
            await ctx.step(name + " again", lambda: None)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(branch("a"))
            tasks.create_task(branch("b"))
        return "ended"

    task = app.enqueue(handler)
    with app.start(grace=0.2):
        assert begun.wait(10)
    assert app.get(task.id).status == "pending"
    with app.start():
        assert app.wait(task.id, timeout=10).result == "ended"
    app.close()


def test_what_a_body_has_started_may_live_on(dsn: str) -> None:
    """A client's own task, say: it keeps no run from suspending, and no run's end cancels it."""
    app = App(dsn)
    kept: list[asyncio.Task[str]] = []

    @app.task
    async def handler(ctx: AsyncContext) -> str:
        async def keep_alive() -> str:
            await asyncio.sleep(60)
            return "never"

        async def opens() -> None:
            kept.append(asyncio.get_running_loop().create_task(keep_alive()))

        await ctx.step("open", opens)
        await ctx.sleep(0.1)
        return "slept"

    task = app.enqueue(handler)
    with app.start():
        assert app.wait(task.id, timeout=10).result == "slept"
        assert not kept[0].done()
    app.close()
