"""pgqueuer, with asyncpg and uvloop, as its own benchmark runs it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import marks
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

BULK = 1_000
"""Jobs in one statement."""


async def queries() -> Queries:
    return Queries(AsyncpgDriver(await asyncpg.connect(marks.DSN)))


async def setup() -> None:
    await (await queries()).install()


async def enqueue(kind: str, n: str) -> float:
    to = await queries()
    values = [str(i).encode() for i in range(int(n))]
    began = time.perf_counter()
    for start in range(0, len(values), BULK):
        some = values[start : start + BULK]
        await to.enqueue([kind] * len(some), some, [0] * len(some))
    return time.perf_counter() - began


async def single(kind: str, n: str) -> float:
    to = await queries()
    began = time.perf_counter()
    for i in range(int(n)):
        await to.enqueue(kind, str(i).encode())
    return time.perf_counter() - began


async def paced(kind: str, n: str, seconds: str) -> list[float]:
    to = await queries()
    began = []
    for i in range(int(n)):
        await asyncio.sleep(float(seconds))
        began.append(time.monotonic())
        await to.enqueue(kind, str(i).encode())
    return began


async def work() -> None:
    manager = QueueManager(await queries())

    @manager.entrypoint("noop")
    async def noop(job: Job) -> None:
        marks.first()

    @manager.entrypoint("pick")
    async def pick(job: Job) -> None:
        marks.note("pick", int(job.payload or b"0"))

    await manager.run(batch_size=100)


def blocking(command: Any) -> Any:
    return lambda *arguments: uvloop.run(command(*arguments))


marks.run({c.__name__: blocking(c) for c in (setup, enqueue, single, paced, work)})
