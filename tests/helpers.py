"""What several tests of handlers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from leasetask import App, Retry
from leasetask.model import TaskView

FAST = Retry(max_attempts=3, initial=0.01, factor=1, jitter=0)


@contextmanager
def working(app: App, **options: Any) -> Iterator[None]:
    """A worker inside this process."""
    with app.start(**{"concurrency": 10, "lease": 5, "poll_interval": 0.05, "grace": 5} | options):
        yield


def ended(app: App, handler: Callable[..., Any], value: object = None) -> TaskView:
    """Enqueue, run to the end, and return the task."""
    task = app.enqueue(handler, value)
    with working(app):
        return app.wait(task.id, timeout=20)


def crash_once(calls: list[str], name: str = "crash") -> None:
    """Fail the handler outside its steps the first time it comes here."""
    if name not in calls:
        calls.append(name)
        raise RuntimeError("as if the process had died here")


def until(app: App, task_id: str, condition: str, seconds: float = 10) -> None:
    """Wait until an SQL condition on the task's row holds."""
    with psycopg.connect(app.dsn, autocommit=True) as db:
        for _ in range(int(seconds / 0.005)):
            query = f"select {condition} from leasetask.task where id = %s"
            if db.execute(query, [task_id]).fetchone()[0]:
                return
            db.execute("select pg_sleep(0.005)")
        row = db.execute("select to_jsonb(t) from leasetask.task t where id = %s", [task_id])
        raise AssertionError(f"never {condition}: {row.fetchone()}")
