"""dbos: a queue polled every 10 ms, workflows and steps as coroutines."""

from __future__ import annotations

import threading
from typing import Any

import marks
from dbos import DBOS, DBOSClient

URL = marks.DSN.replace("postgresql://", "postgresql+psycopg://", 1)


@DBOS.workflow()
async def noop(i: int) -> int:
    marks.first()
    return i


@DBOS.step()
async def echo(i: int) -> int:
    return i


@DBOS.workflow()
async def steps(i: int) -> int:
    marks.first()
    total = 0
    for number in range(10):
        total += await echo(number)
    return total


@DBOS.workflow()
async def long(n: int) -> None:
    marks.first()
    for number in range(n):
        marks.step(number, n)
        await echo(number)
    marks.step(n, n)


@DBOS.workflow()
async def pick(i: int) -> None:
    marks.note("pick", i)


@DBOS.workflow()
async def wait(i: int) -> None:
    await DBOS.recv_async("topic", timeout_seconds=120)
    marks.note("woken", i)


def launch() -> None:
    DBOS(config={
        "name": "bench", "system_database_url": URL, "sys_db_pool_size": 20,
        "log_level": "ERROR", "application_version": "1",
    })  # fmt: skip
    DBOS.launch()
    DBOS.register_queue("bench", worker_concurrency=100, polling_interval_sec=0.01)


def setup() -> None:
    launch()
    DBOS.destroy()


def enqueuer() -> Any:
    client = DBOSClient(system_database_url=URL)
    fixed = {"queue_name": "bench", "app_version": "1"}

    def one(kind: str, i: int) -> None:
        client.enqueue({**fixed, "workflow_name": kind, "workflow_id": f"{kind}-{i}"}, i)

    return one


def enqueue(kind: str, n: str) -> float:
    one = enqueuer()
    return marks.timed(lambda: [one(kind, i) for i in marks.inputs(kind, n)])


def paced(kind: str, n: str, seconds: str) -> list[float]:
    one, first = enqueuer(), 0 if int(n) > 5 else 1_000_000
    return marks.paced(int(n), float(seconds), lambda i: one(kind, first + i))


def send(n: str, seconds: str) -> list[float]:
    to = DBOSClient(system_database_url=URL)
    return marks.paced(int(n), float(seconds), lambda i: to.send(f"wait-{i}", i, "topic"))


def work() -> None:
    launch()
    threading.Event().wait()


marks.run({
    "setup": setup, "enqueue": enqueue, "single": enqueue, "paced": paced, "signal": send, "work": work,
})  # fmt: skip
