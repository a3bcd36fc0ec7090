"""leasetask itself, driven as the others are."""

from __future__ import annotations

import asyncio
import os

import marks
import psycopg

from leasetask import App, AsyncContext, Context
from leasetask.cli.work import serve
from leasetask.worker import WorkerOptions

app = App(marks.DSN)


@app.task
async def noop(ctx: AsyncContext, i: int) -> int:
    marks.first()
    return i


@app.task
def noop_def(ctx: Context, i: int) -> int:
    marks.first()
    return i


@app.task
async def steps(ctx: AsyncContext, i: int) -> int:
    marks.first()
    total = 0
    for number in range(10):
        total += await ctx.step(f"step-{number}", lambda: number)
    return total


@app.task
async def long(ctx: AsyncContext, n: int) -> int:
    marks.first()
    for number in range(n):
        marks.step(number, n)
        await ctx.step(f"step-{number}", lambda: number)
    marks.step(n, n)
    return n


@app.task
async def pick(ctx: AsyncContext, i: int) -> None:
    marks.note("pick", i)


@app.task
async def wait(ctx: AsyncContext, i: int) -> None:
    await ctx.wait_signal(f"topic-{i}")
    marks.note("woken", i)


@app.task
async def hold(ctx: AsyncContext, i: int) -> None:
    """Runs long the first time, so that it can be killed meanwhile."""
    marks.note("hold", i)
    if ctx.run == 1:
        await asyncio.sleep(600)


def enqueue(kind: str, n: str) -> float:
    values = marks.inputs(kind, n)
    parts = [values[i : i + 10_000] for i in range(0, len(values), 10_000)]
    with psycopg.connect(marks.DSN, autocommit=True) as conn:
        return marks.timed(lambda: [app.enqueue_many(kind, part, conn=conn) for part in parts])


def single(kind: str, n: str) -> float:
    with psycopg.connect(marks.DSN, autocommit=True) as conn:
        app.enqueue(kind, 0, conn=conn)
        return marks.timed(lambda: [app.enqueue(kind, i, conn=conn) for i in range(int(n))])


def in_transaction(kind: str, n: str) -> float:
    """Each beside a business row, in the caller's own transaction."""

    def both() -> None:
        for i in range(int(n)):
            with conn.transaction():
                conn.execute("insert into orders (id) values (%s)", [i])
                app.enqueue(kind, i, conn=conn)

    with psycopg.connect(marks.DSN) as conn:
        conn.execute("create table orders (id int primary key)")
        conn.commit()
        return marks.timed(both)


def paced(kind: str, n: str, seconds: str) -> list[float]:
    with psycopg.connect(marks.DSN, autocommit=True) as conn:
        return marks.paced(int(n), float(seconds), lambda i: app.enqueue(kind, i, conn=conn))


def send(n: str, seconds: str) -> list[float]:
    app.signal("warm", 0)
    return marks.paced(int(n), float(seconds), lambda i: app.signal(f"topic-{i}", i))


def work() -> None:
    options = WorkerOptions(
        concurrency=int(os.environ.get("BENCH_CONCURRENCY", "100")),
        lease=float(os.environ.get("BENCH_LEASE", "30")),
    )
    serve(app.worker(options))


def setup() -> None:
    from leasetask import schema

    schema.migrate(marks.DSN)


if __name__ == "__main__":
    marks.run(
        {
            "setup": setup,
            "enqueue": enqueue,
            "single": single,
            "transaction": in_transaction,
            "paced": paced,
            "signal": send,
            "work": work,
        }
    )
