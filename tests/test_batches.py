"""H32: one bad item never takes its batch down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from support import enqueue, wait_for_end

from leasetask import App, AsyncContext, execution

BAD = 50


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


def hundred_that_end_together(app: App, result: Any) -> None:
    """Declare a task of which a hundred end in one batch; number 50 with a result of its own."""
    together = asyncio.Barrier(100)

    @app.task
    async def ends(ctx: AsyncContext, number: int) -> Any:
        await together.wait()
        return result if number == BAD else number


def run_them(app: App, db: psycopg.Connection[Any]) -> str:
    """Run a hundred; return the error of the bad one."""
    for number in range(100):
        enqueue(db, "ends", number, max_attempts=1)
    with app.start(concurrency=100, lease=20):
        assert wait_for_end(db) == {"succeeded": 99, "failed": 1}
    failed = (
        "select input::int, last_error ->> 'message' from leasetask.task where status = 'failed'"
    )
    ((number, message),) = db.execute(failed).fetchall()
    assert number == BAD
    return str(message)


def test_h32_a_result_that_is_not_json(app: App, db: psycopg.Connection[Any]) -> None:
    """Refused in the worker, with the path of what does not fit."""
    hundred_that_end_together(app, {"ratio": float("nan")})
    assert "$.ratio is nan" in run_them(app, db)


def test_h32_a_result_that_only_the_server_refuses(
    app: App, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What slips through our own checks fails alone all the same: the batch is sent one by one."""
    hundred_that_end_together(app, "refuse me")
    encode = execution.encode

    def slipping(value: object, *args: Any, **options: Any) -> str:
        return '{"broken' if value == "refuse me" else encode(value, *args, **options)

    monkeypatch.setattr(execution, "encode", slipping)
    assert "PostgreSQL refused the value" in run_them(app, db)
