"""oban for Python: one queue of a hundred."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import marks
from oban import Oban, worker
from oban.schema import install

BULK = 1_000


@worker(queue="default")
class Noop:
    async def process(self, job: Any) -> None:
        marks.first()


@worker(queue="default")
class Pick:
    async def process(self, job: Any) -> None:
        marks.note("pick", job.args["i"])


KINDS = {"noop": Noop, "pick": Pick}


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Oban]:
    pool = await Oban.create_pool(dsn=marks.DSN, max_size=20)
    async with Oban(pool=pool, **options) as oban:
        yield oban
    await pool.close()


async def setup() -> None:
    pool = await Oban.create_pool(dsn=marks.DSN)
    await install(pool)
    await pool.close()


async def enqueue(kind: str, n: str) -> float:
    jobs = [KINDS[kind].new({"i": i}) for i in range(int(n))]
    async with opened() as oban:
        began = time.perf_counter()
        for start in range(0, len(jobs), BULK):
            await oban.enqueue_many(jobs[start : start + BULK])
        return time.perf_counter() - began


async def single(kind: str, n: str) -> float:
    async with opened() as oban:
        began = time.perf_counter()
        for i in range(int(n)):
            await oban.enqueue(KINDS[kind].new({"i": i}))
        return time.perf_counter() - began


async def paced(kind: str, n: str, seconds: str) -> list[float]:
    began = []
    async with opened() as oban:
        for i in range(int(n)):
            await asyncio.sleep(float(seconds))
            began.append(time.monotonic())
            await oban.enqueue(KINDS[kind].new({"i": i}))
    return began


async def work() -> None:
    async with opened(queues={"default": 100}):
        await asyncio.Event().wait()


def blocking(command: Any) -> Any:
    return lambda *arguments: asyncio.run(command(*arguments))


marks.run({c.__name__: blocking(c) for c in (setup, enqueue, single, paced, work)})
