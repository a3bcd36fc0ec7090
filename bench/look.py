"""How fast the operator's commands answer beside 5,000,000 finished and 500,000 ready tasks.

`python -m bench.look` starts a server of its own, fills it (some two minutes, 6 GB) and prints, for each
command, the fastest and slowest of ten runs in ms, the process's start left out.
"""

from __future__ import annotations

import contextlib
import io
import time

import psycopg

from bench import server
from leasetask import schema
from leasetask.cli import cli

_FINISHED = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, status, result, attempts, runs,
  finished_at, claimed_at, next_run_at, created_at)
select leasetask.new_id(at), 'kind-' || i % 20, 1, 'done-' || i, '{"id": 1}', 'succeeded', '1', 1, 1,
  at, at - interval '1 s', at - interval '2 s', at - interval '3 s'
from (select i, now() - i * interval '100 ms' as at from generate_series(1, 5000000) i) f"""
_READY = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, next_run_at)
select leasetask.new_id(now()), 'kind-' || i % 20, 1, 'ready-' || i, '{"id": 1}', now() - i * interval '1 ms'
from generate_series(1, 500000) i"""
_DEAD = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, status, attempts, finished_at,
  dead_letter_at, last_error)
select leasetask.new_id(now()), 'kind-' || i % 20, 1, 'bad-' || i, '{"id": 1}', 'failed', 5, now(), now(),
  '{"type": "E", "message": "no"}'
from generate_series(1, 2000) i"""


def main() -> None:
    with server.running() as running, running.database("look") as dsn:
        schema.migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            for statement in (
                _FINISHED,
                _READY,
                _DEAD,
                "vacuum analyze leasetask.task",
                "checkpoint",
            ):
                conn.execute(statement.encode())
            query = "select id::text from leasetask.task where idempotency_key = 'bad-7' limit 1"
            row = conn.execute(query).fetchone()
        assert row is not None
        for words in (
            ("list",),
            ("list", "--kind", "kind-3", "--status", "pending"),
            ("list", "--status", "failed"),
            ("show", row[0]),
            ("dead-letter",),
            ("stats",),
        ):
            times = sorted(took(dsn, *words) for _ in range(10))
            print(f"{' '.join(words):60} {times[0]:4.0f} to {times[-1]:4.0f} ms")


def took(dsn: str, *words: str) -> float:
    """Run a command; returns its time in ms."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main([*words, "--dsn", dsn], standalone_mode=False)
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
