"""Calls of schema.sql's functions straight through psycopg, and a clock that tests can move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.datetime import TimestamptzLoader

START = datetime(2030, 1, 1, tzinfo=UTC)
"""Where the clock of a scratch database stands until a session moves it."""

FOREVER = datetime.max.replace(tzinfo=UTC)

LEASE = 30
"""Seconds of a lease, unless a test says otherwise."""

KIND = "k"

CLOCK = """
create or replace function leasetask.clock() returns timestamptz
language sql volatile parallel safe as $$
  select coalesce(nullif(current_setting('leasetask_test.now', true), '')::timestamptz,
                  clock_timestamp())
$$
"""
"""Replaces the server's clock: each session sees the time that it was told."""

_TABLES = ("task", "task_step", "task_signal", "kind", "lost_owner", "idle_worker")
CLEAR = "".join(f"delete from leasetask.{table};" for table in reversed(_TABLES))
_SAVE = "".join(
    f"drop table if exists saved_{table}; create temp table saved_{table} as table leasetask.{table};"
    for table in _TABLES
)
_RESTORE = CLEAR + "".join(
    f"insert into leasetask.{table} table saved_{table};" for table in _TABLES
)

_SIGNATURES = """
select p.proname, p.proargnames[1:p.pronargs],
       array(select t::regtype::text from unnest(p.proargtypes) with ordinality as u (t, o) order by o)
from pg_proc p where p.pronamespace = 'leasetask'::regnamespace
"""


@cache
def _statement(name: str, arguments: tuple[tuple[str, str], ...]) -> str:
    """Write the call of a function with named arguments, each converted to its type."""
    casts = {
        "interval": "make_interval(secs => %s::float8)",
        "jsonb[]": "%s::text[]::jsonb[]",
        "pg_snapshot[]": "%s::text[]::pg_snapshot[]",
        "interval[]": "%s::text[]::interval[]",
    }
    named = ", ".join(f"{arg} => {casts.get(type_, f'%s::{type_}')}" for arg, type_ in arguments)
    return f"select * from leasetask.{name}({named})"


def _parameter(value: Any, type_: str) -> Any:
    if value is None:
        return None
    if type_ == "jsonb":
        return json.dumps(value)
    if type_ == "jsonb[]":
        return [None if item is None else json.dumps(item) for item in value]
    return value


class _Timestamps(TimestamptzLoader):
    """Reads what Python cannot hold as the last moment that it can."""

    def load(self, data: Any) -> datetime:
        return FOREVER if bytes(data) == b"infinity" else super().load(data)


class Session:
    """One connection, and the functions of the protocol as its callers see them."""

    def __init__(self, conn: psycopg.Connection[Any], seconds: float | None = 0) -> None:
        self.conn = conn
        self.conn.autocommit = True
        self.conn.adapters.register_loader("timestamptz", _Timestamps)
        self._types = {
            name: dict(zip(names or [], types, strict=True))
            for name, names, types in conn.execute(_SIGNATURES).fetchall()
        }
        self._seconds: float | None = None
        self._runs = 0
        if seconds is not None:
            self.at(seconds)

    @property
    def pid(self) -> int:
        """The server process of this connection."""
        return self.conn.info.backend_pid

    def at(self, seconds: float) -> None:
        """Move this session's clock to so many seconds after START."""
        if seconds == self._seconds:
            return
        self._seconds = seconds
        now = (START + timedelta(seconds=seconds)).isoformat()
        self.conn.execute("select set_config('leasetask_test.now', %s, false)", [now])

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Call a function of the protocol and return its rows; JSON and seconds go in plain."""
        types = self._types[name]
        sql = _statement(name, tuple((arg, types[arg]) for arg in arguments))
        values = [_parameter(value, types[arg]) for arg, value in arguments.items()]
        with self.conn.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(sql.encode(), values).fetchall()

    def value(self, name: str, **arguments: Any) -> Any:
        """Call a function that answers one value."""
        return self.call(name, **arguments)[0][0]

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run any statement and return its rows."""
        with self.conn.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute(sql.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def do(self, sql: str, *values: Any) -> None:
        """Run a statement whose answer does not matter."""
        self.conn.execute(sql.encode(), values or None)

    def scalar(self, sql: str, *values: Any) -> Any:
        """Run any query and return its first value."""
        return self.rows(sql, *values)[0][0]

    # --- what most tests do -------------------------------------------------------------------

    def task(self, id: str) -> Any:
        """Return the row of a task."""
        return self.rows("select * from leasetask.task where id = %s", id)[0]

    def enqueue(self, key: str | None = None, input: Any = 0, **more: Any) -> str:
        """Enqueue a task without jitter and return its id."""
        made = self.call(
            "try_enqueue", **{"kind": KIND, "backoff_jitter": 0} | more, key=key, input=input
        )
        return str(made[0].id)

    def claim(self, owner: str = "w", n: int = 1, **more: Any) -> list[Any]:
        """Claim tasks of KIND; the row that tells the next due time is left out."""
        arguments = {"kinds": [KIND], "versions": [1], "lease": LEASE} | more
        return [row for row in self.call("claim", owner=owner, n=n, **arguments) if row.id]

    def run(self, key: str | None = None, owner: str = "w", **more: Any) -> tuple[str, str]:
        """Enqueue a task before all others and claim it; return its id and token."""
        self._runs += 1
        first = START - timedelta(days=self._runs)
        id = self.enqueue(key, **{"priority": -1, "at": first} | more)
        (row,) = self.claim(owner)
        assert str(row.id) == id
        return id, str(row.lease_token)

    def checkpoint(self, id: str, token: str | None, patch: Any, **more: Any) -> Any:
        """Record steps of one task."""
        return self.call(
            "checkpoint", ids=[id], tokens=[token], patches=[patch], **{"lease": LEASE} | more
        )[0]

    def note(self, id: str, token: str | None, patch: Any, **more: Any) -> Any:
        """Note what is known of an open step of one task."""
        return self.call(
            "note", ids=[id], tokens=[token], patches=[patch], **{"lease": LEASE} | more
        )[0]

    def finish(self, id: str, token: str | None, result: Any = None) -> Any:
        """End one task."""
        return self.call("finish", ids=[id], tokens=[token], results=[result])[0]

    def suspend(
        self,
        id: str,
        token: str | None,
        topic: str | None = "t",
        *,
        mode: str = "signal",
        name: str = "wait",
        seq: int | None = 1,
        seconds: float | None = None,
        snapshot: str | None = None,
    ) -> Any:
        """Let one task wait."""
        return self.call(
            "suspend",
            ids=[id],
            tokens=[token],
            modes=[mode],
            names=[name],
            seqs=[seq],
            topics=[topic],
            seconds=[seconds],
            untils=[None],
            snapshots=[snapshot],
        )[0]

    def wait(self, key: str | None = None, topic: str = "t", **more: Any) -> str:
        """Enqueue a task, claim it and let it wait; return its id."""
        id, token = self.run(key)
        assert self.suspend(id, token, topic, **more).answer == "done"
        return id

    def release(self, id: str, token: str | None, **more: Any) -> Any:
        """Give one task back."""
        return self.call("release", ids=[id], tokens=[token], **more)[0]

    def fail(
        self, id: str, token: str | None, *, retryable: bool = True, outright: bool = False
    ) -> Any:
        """End one run with an error."""
        return self.call(
            "fail",
            ids=[id],
            tokens=[token],
            errors=[{"type": "E"}],
            retryable=[retryable],
            outright=[outright],
        )[0]

    def heartbeat(self, id: str, token: str | None) -> Any:
        """Extend one lease."""
        return self.call("heartbeat", ids=[id], tokens=[token], lease=LEASE)[0]

    def signal(self, topic: str = "t", payload: Any = None, **more: Any) -> int:
        """Insert a signal."""
        return int(self.value("signal", topic=topic, payload=payload, **more))

    def deliver(self, topics: Sequence[str] = ("t",)) -> list[Any]:
        """Deliver topics, one round."""
        return self.call("deliver", topics=list(topics))

    def cancel(self, id: str) -> str:
        """Cancel a task."""
        return str(self.value("cancel", task=id))

    def poll(self) -> list[str]:
        """Do what a worker does once a second; return the topics that it has to ask for again."""
        topics = [row[0] for row in self.call("undelivered_topics")]
        return [row.topic for row in self.deliver(topics) if row.again]

    def deliver_all(self) -> None:
        """Poll until nothing is left that nobody has looked at; somebody holding a row is an error."""
        for _ in range(20):
            if not self.poll():
                return
        raise AssertionError("a topic is never delivered to its end")

    def clear(self) -> None:
        """Forget every task and signal; a delete is cheaper than a truncate on tables this small."""
        self.do(CLEAR)

    def save(self) -> None:
        """Keep what is there, for `restore` on this connection."""
        self.do(_SAVE)

    def restore(self) -> None:
        """Put back what was saved, and nothing else."""
        self.do(_RESTORE)


def scratch(dsn: str) -> Session:
    """Open a session whose commits wait for no disk, in a database whose clock can be moved."""
    conn = psycopg.connect(dsn, autocommit=True, options="-c synchronous_commit=off")
    return Session(conn)
