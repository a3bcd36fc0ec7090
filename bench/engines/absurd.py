"""absurd: its asynchronous SDK, polling every 10 ms."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import marks
from absurd_sdk import Absurd, AsyncAbsurd

QUEUE = "bench"


def client() -> Absurd:
    return Absurd(marks.DSN, queue_name=QUEUE)


def setup() -> None:
    absurdctl = Path(sys.executable).with_name("absurdctl")
    subprocess.run(
        [absurdctl, "init"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "ABSURD_DATABASE_URL": marks.DSN},
    )
    client().create_queue(QUEUE)


def enqueue(kind: str, n: str) -> float:
    to, values = client(), marks.inputs(kind, n)
    return marks.timed(lambda: [to.spawn(kind, {"i": i}, queue=QUEUE) for i in values])


def paced(kind: str, n: str, seconds: str) -> list[float]:
    to = client()
    return marks.paced(int(n), float(seconds), lambda i: to.spawn(kind, {"i": i}, queue=QUEUE))


def send(n: str, seconds: str) -> list[float]:
    to = client()
    return marks.paced(int(n), float(seconds), lambda i: to.emit_event(f"topic-{i}", i))


async def serve() -> None:
    app = AsyncAbsurd(marks.DSN, queue_name=QUEUE)

    @app.register_task("noop")
    async def noop(params: Any, ctx: Any) -> int:
        marks.first()
        return int(params["i"])

    @app.register_task("steps")
    async def steps(params: Any, ctx: Any) -> int:
        marks.first()
        total = 0
        for number in range(10):
            total += await ctx.step(f"step-{number}", returning(number))
        return total

    @app.register_task("long")
    async def long(params: Any, ctx: Any) -> None:
        marks.first()
        for number in range(params["i"]):
            marks.step(number, params["i"])
            await ctx.step(f"step-{number}", returning(number))
        marks.step(params["i"], params["i"])

    @app.register_task("pick")
    async def pick(params: Any, ctx: Any) -> None:
        marks.note("pick", params["i"])

    @app.register_task("wait")
    async def wait(params: Any, ctx: Any) -> None:
        await ctx.await_event(f"topic-{params['i']}")
        marks.note("woken", params["i"])

    await app.start_worker(concurrency=100, poll_interval=0.01)


def returning(number: int) -> Any:
    async def step() -> int:
        return number

    return step


marks.run({
    "setup": setup, "enqueue": enqueue, "single": enqueue, "paced": paced, "signal": send,
    "work": lambda: asyncio.run(serve()),
})  # fmt: skip
