"""No part of a worker keeps another from its turn."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import cast
from unittest.mock import MagicMock

import psycopg
import pytest
from support import wait_until

from leasetask import App, Context, maintenance
from leasetask.committer import Committer
from leasetask.link import Link, pause_until
from leasetask.model import Checkpoint, Finish
from leasetask.protocol import Query
from leasetask.run import Run


def test_an_end_is_committed_beside_steps_that_never_pause() -> None:
    """While one batch is on its way the other task's next step is ready: the end has its turn."""

    class SlowLink:
        async def try_once(self, query: Query) -> list[tuple[object, ...]]:
            await asyncio.sleep(0.001)
            items = str(query.params[0]).count(",") + 1
            return [(1, "done", "succeeded" if "finish" in query.sql else False, None)] * items

    async def go() -> str:
        loop = asyncio.get_running_loop()
        committer = Committer(cast(Link, SlowLink()))
        runs = [
            cast(Run, MagicMock(lease=30.0, loop=loop, claimed=MagicMock(id=name, token=name)))
            for name in "abc"
        ]

        async def step_for_ever(run: Run, first: float) -> None:
            await asyncio.sleep(first)
            for number in count():
                await committer.send(run, Checkpoint({f"step-{number}": "1"}))

        serving = asyncio.create_task(committer.serve())
        steppers = [
            asyncio.create_task(step_for_ever(run, first))
            for run, first in zip(runs, (0.0, 0.0005), strict=False)
        ]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            ack = await committer.end(runs[2], Finish("1"))
        for task in (serving, *steppers):
            task.cancel()
        return ack.status

    assert asyncio.run(go()) == "succeeded"


def test_a_cancelled_query_leaves_its_links_other_query_alone(dsn: str) -> None:
    """It waits for its turn; only one that is under way takes the connection with it."""

    async def go() -> list[tuple[object, ...]]:
        link = Link(dsn, name="leasetask test", limit=5)
        slow = asyncio.create_task(link.try_once(Query("select pg_sleep(0.3)::text, 7")))
        await asyncio.sleep(0)
        behind = asyncio.create_task(link.try_once(Query("select 8")))
        await asyncio.sleep(0.05)
        behind.cancel()
        with pytest.raises(asyncio.CancelledError):
            await behind
        rows = await slow
        await link.close()
        return rows

    assert asyncio.run(go()) == [("", 7)]


def test_a_worker_without_the_sweep_rests(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chores wait for the next look; one that is never due must not keep it awake."""
    pauses: list[float] = []

    async def noted(event: asyncio.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return await pause_until(event, seconds)

    monkeypatch.setattr(maintenance, "pause_until", noted)
    app = App(dsn)

    @app.task
    def unused(ctx: Context) -> None: ...

    with app.start(roles=("worker",)):
        wait_until(lambda: sum(pause > 0.5 for pause in pauses) >= 2)
    assert len(pauses) < 20
    app.close()


def test_many_topics_of_one_transaction_are_delivered_at_once(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look finds a hundred topics; the rest does not wait for the next, which never comes here."""
    monkeypatch.setattr(maintenance, "DELIVER_EVERY", 10_000)
    app = App(dsn)

    @app.task
    def waits(ctx: Context, number: int) -> None:
        ctx.wait_signal(f"topic-{number}")

    def all_are(status: str) -> bool:
        counted = "select count(*) from leasetask.task where status = %s"
        return db.execute(counted, [status]).fetchone() == (500,)

    listening = """select count(*) from pg_stat_activity, leasetask.idle_worker
      where query = 'listen leasetask' and datname = current_database()"""
    with app.start(concurrency=50):
        app.enqueue_many(waits, range(500))
        wait_until(lambda: all_are("waiting"))
        wait_until(lambda: db.execute(listening).fetchone() == (1,))
        db.execute("select leasetask.signal('topic-' || i) from generate_series(0, 499) i")
        wait_until(lambda: all_are("succeeded"))
    app.close()
