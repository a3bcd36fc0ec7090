"""A pool lends what works: not what the server has dropped, and not what a parent process opened."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import psycopg
import pytest
from support import wait_until

from leasetask import App, Context, pools
from leasetask.connection import CONNECT_TIMEOUT, settings
from leasetask.errors import DatabaseUnavailable
from leasetask.pools import AsyncPool, Pool

SIZE = 6
PIDS = "select pg_backend_pid()"


def make(dsn: str) -> Pool:
    return Pool(dsn, "pooled", SIZE, transactional=False)


def fill(pool: Pool) -> set[int]:
    """Let it open all it may; returns the backends' process ids."""
    with ExitStack() as lent:
        conns = [lent.enter_context(pool.connection()) for _ in range(SIZE)]
        return {conn.execute(PIDS).fetchone()[0] for conn in conns}


async def fill_async(pool: AsyncPool) -> set[int]:
    async with AsyncExitStack() as lent:
        conns = [await lent.enter_async_context(pool.connection()) for _ in range(SIZE)]
        return {(await (await conn.execute(PIDS)).fetchone())[0] for conn in conns}


def drop(db: psycopg.Connection, pids: set[int]) -> None:
    """End these sessions and see them gone."""
    ended = "select bool_and(pg_terminate_backend(pid, 10000)) from unnest(%s::int[]) as pid"
    assert db.execute(ended, [list(pids)]).fetchone() == (True,)


def test_dropped_connections_cost_no_wait(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg-pool's own check would wait 0, 1, 2, 4 ... seconds between one and the next."""
    monkeypatch.setattr(pools, "PATIENCE", 3.0)
    pool = make(dsn)
    old = fill(pool)
    assert len(old) == SIZE
    drop(db, old)
    with pool.connection() as conn:
        assert conn.execute(PIDS).fetchone()[0] not in old
    assert not fill(pool) & old
    pool.close()


def test_dropped_connections_cost_no_wait_async(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 3.0)

    async def go() -> None:
        pool = AsyncPool(dsn, "pooled", SIZE, transactional=False)
        old = await fill_async(pool)
        drop(db, old)
        assert not await fill_async(pool) & old
        await pool.close()

    asyncio.run(go())


def test_who_waits_for_a_busy_pool_is_told(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make(dsn)
    busy = "all 6 connections of this process were in use for 0.1 s"
    with ExitStack() as lent:
        for _ in range(SIZE):
            lent.enter_context(pool.connection())
        monkeypatch.setattr(pools, "PATIENCE", 0.1)
        with pytest.raises(DatabaseUnavailable, match=busy), pool.connection():
            pass
    assert len(fill(pool)) == SIZE
    pool.close()


def test_who_waits_for_a_busy_pool_is_told_async(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        pool = AsyncPool(dsn, "pooled", SIZE, transactional=False)
        async with AsyncExitStack() as lent:
            for _ in range(SIZE):
                await lent.enter_async_context(pool.connection())
            monkeypatch.setattr(pools, "PATIENCE", 0.1)
            with pytest.raises(DatabaseUnavailable, match="were in use"):
                await lent.enter_async_context(pool.connection())
        assert len(await fill_async(pool)) == SIZE
        await pool.close()

    asyncio.run(go())


def test_who_waits_for_a_connect_that_fails_fails_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one after another, each after a connect of its own."""
    attempts = []

    async def mute(dsn: str) -> Any:
        attempts.append(dsn)
        await asyncio.sleep(0.05)
        raise DatabaseUnavailable("no answer")

    async def go() -> list[Any]:
        pool = AsyncPool("host=127.0.0.1", "pooled", SIZE, transactional=False)

        async def use() -> None:
            async with pool.connection():
                pass

        return await asyncio.gather(*(use() for _ in range(SIZE)), return_exceptions=True)

    monkeypatch.setattr(pools, "connect_async", mute)
    assert {str(error) for error in asyncio.run(go())} == {"no answer"}
    assert len(attempts) == 1


def test_the_dsns_own_connect_timeout_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    assert settings("host=a", "x")["connect_timeout"] == CONNECT_TIMEOUT
    assert "connect_timeout" not in settings("host=a,b connect_timeout=2", "x")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "3")
    assert "connect_timeout" not in settings("host=a", "x")


def test_event_loops_that_have_ended_leave_no_connections(dsn: str, db: psycopg.Connection) -> None:
    """`asyncio.run(app.enqueue_async(…))` again and again, without close_async."""
    app = App(dsn)

    @app.task
    def work(ctx: Context, number: int) -> None: ...

    for number in range(5):
        asyncio.run(app.enqueue_async(work, number))
    gc.collect()
    query = """select count(*) <= 1 from pg_stat_activity
      where datname = current_database() and application_name = 'leasetask'"""
    wait_until(lambda: db.execute(query).fetchone() == (True,))


def test_a_forked_child_opens_its_own(dsn: str, db: psycopg.Connection) -> None:
    """As under a preforking web server whose App has enqueued before the fork."""
    app = App(dsn)

    @app.task
    def work(ctx: Context, number: int) -> None: ...

    app.enqueue(work, 1)
    for act in (lambda: app.close(), lambda: [app.enqueue(work, 2), app.close()]):
        child = os.fork()
        if child == 0:
            os._exit(_outcome(act))
        assert os.waitpid(child, 0)[1] == 0
    app.enqueue(work, 3)
    app.close()
    made = db.execute("select array_agg(input::int order by id) from leasetask.task").fetchone()
    assert made == ([1, 2, 3],)


def _outcome(act: Callable[[], object]) -> int:
    try:
        act()
    except BaseException:
        return 1
    return 0
