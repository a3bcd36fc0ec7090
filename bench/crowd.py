"""The drain's rate among many rows nobody can run, under a snapshot held open, with more workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg

from bench.common import Adapted, drain
from bench.engine import Adapter
from bench.lab import Case, Lab, Sample

_FUTURE = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, priority, next_run_at)
select gen_random_uuid(), 'noop', 1, 'later-' || i, '1', i %% 7 - 3, now() + interval '1 day' + i * interval '1 ms'
from generate_series(1, %s) i"""
_UNSUPPORTED = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, priority, next_run_at)
select gen_random_uuid(), case when i %% 2 = 0 then 'noop' else 'unknown' end, 7, 'odd-' || i, '1', -5,
  now() - interval '1 day' + i * interval '1 ms'
from generate_series(1, %s) i"""
_FINISHED = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, status, result, finished_at, runs)
select gen_random_uuid(), 'noop', 1, 'done-' || i, '1', 'succeeded', '1', now() - i * interval '1 ms', 1
from generate_series(1, %s) i"""


def cases(lab: Lab, adapted: Adapted) -> Iterator[Case]:
    """Give the cases of all three."""
    n = lab.size(20_000, 10_000)
    for rows in (0, 10**5) if lab.quick else (0, 10**5, 10**6, 10**7):
        if rows > lab.most_rows:
            continue
        run = partial(drain, lab, adapted, "noop", n, prepare=partial(fill, rows), watch=sampled)
        times = 1 if rows == 10**7 else lab.times
        yield Case(
            "backlog",
            f"{rows:,} future, {rows:,} finished, {rows // 10:,} unsupported",
            "tasks/s",
            run,
            times=times,
        )
    many = lab.size(200_000, 20_000)
    for held in (False, True):
        name = f"{many:,} tasks, snapshot {'held open' if held else 'not held'}"
        yield Case(
            "snapshot",
            name,
            "tasks/s",
            partial(under_snapshot, lab, adapted, many, held),
            times=lab.times,
        )
    for workers in (1, 2) if lab.quick else (1, 2, 4, 8):
        run = partial(drain, lab, adapted, "noop", 2 * n, workers=workers)
        yield Case(
            "processes",
            f"{workers} worker process{'es' if workers > 1 else ''}",
            "tasks/s",
            run,
            times=lab.times,
        )


def fill(rows: int, dsn: str) -> None:
    """Rows that no claim may walk past."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement, n in ((_FUTURE, rows), (_FINISHED, rows), (_UNSUPPORTED, rows // 10)):
            conn.execute(statement.replace("%s", str(n)).replace("%%", "%"))


def sampled(adapter: Adapter) -> Callable[[], bool]:
    """Look at some of the tasks by their ids until these are done, and only then at all."""
    conn = adapter.conn
    query = "/* observer */ select id from leasetask.task where kind = 'noop' and handler_version = 1 and status = 'pending' and next_run_at <= now() order by md5(id::text)"
    ids = [row[0] for row in conn.execute(query).fetchall()]

    def done() -> bool:
        time.sleep(0.015)
        return unfinished(conn, ids[:200]) == 0 and unfinished(conn, ids) == 0

    return done


def unfinished(conn: psycopg.Connection[Any], ids: list[object]) -> int:
    query = "/* observer */ select count(*) from leasetask.task where id = any (%s) and finished_at is null"
    row = conn.execute(query, [ids]).fetchone()
    assert row is not None
    return int(row[0])


def under_snapshot(lab: Lab, adapted: Adapted, n: int, held: bool) -> Sample:
    """Drain while another session holds a snapshot that sees the tasks as they were before."""
    holders: list[psycopg.Connection[Any]] = []

    def hold(dsn: str) -> None:
        if held:
            holders.append(psycopg.connect(dsn, application_name="bench"))
            holders[0].execute("set transaction isolation level repeatable read")
            holders[0].execute("select count(*) from leasetask.task")

    try:
        return drain(lab, adapted, "noop", n, prepare=hold, watch=sampled)
    finally:
        for conn in holders:
            conn.close()
