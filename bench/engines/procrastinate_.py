"""procrastinate: a hundred jobs at a time, woken by LISTEN/NOTIFY."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import marks
from procrastinate import App, PsycopgConnector

BULK = 1_000
app = App(connector=PsycopgConnector(conninfo=marks.DSN, max_size=20))


@app.task(name="noop")
async def noop(i: int) -> None:
    marks.first()


@app.task(name="pick")
async def pick(i: int) -> None:
    marks.note("pick", i)


KINDS = {"noop": noop, "pick": pick}


async def setup() -> None:
    await app.schema_manager.apply_schema_async()


async def enqueue(kind: str, n: str) -> float:
    jobs = [{"i": i} for i in range(int(n))]
    began = time.perf_counter()
    for start in range(0, len(jobs), BULK):
        await KINDS[kind].batch_defer_async(*jobs[start : start + BULK])
    return time.perf_counter() - began


async def single(kind: str, n: str) -> float:
    began = time.perf_counter()
    for i in range(int(n)):
        await KINDS[kind].defer_async(i=i)
    return time.perf_counter() - began


async def paced(kind: str, n: str, seconds: str) -> list[float]:
    began = []
    for i in range(int(n)):
        await asyncio.sleep(float(seconds))
        began.append(time.monotonic())
        await KINDS[kind].defer_async(i=i)
    return began


async def work() -> None:
    await app.run_worker_async(concurrency=100)


def blocking(command: Any) -> Any:
    async def opened(*arguments: str) -> Any:
        async with app.open_async():
            return await command(*arguments)

    return lambda *arguments: asyncio.run(opened(*arguments))


marks.run({c.__name__: blocking(c) for c in (setup, enqueue, single, paced, work)})
