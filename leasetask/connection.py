"""Connections as every part of leasetask makes them, and what their failures mean."""

from __future__ import annotations

import logging
import os
import random
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.adapt import Loader
from psycopg.types.json import set_json_loads

from leasetask import protocol
from leasetask.errors import (
    DatabaseUnavailable,
    LeaseTaskError,
    PayloadError,
    SchemaError,
    TaskNotFound,
    TaskRefused,
)
from leasetask.payload import decode_stored
from leasetask.protocol import Query

logger = logging.getLogger("leasetask")

CONNECT_TIMEOUT = 10
"""Seconds; libpq's own knob notices a frozen server, keepalives do not."""


_Connection = TypeVar("_Connection", psycopg.Connection[Any], psycopg.AsyncConnection[Any])


class _TextLoader(Loader):
    def load(self, data: Any) -> str:
        return bytes(data).decode()


def connect(dsn: str, *, name: str = "leasetask") -> psycopg.Connection[Any]:
    """Open a connection in autocommit.

    Raises:
        DatabaseUnavailable: one line that says why, and what to look at.
    """
    try:
        conn = psycopg.Connection.connect(dsn, autocommit=True, **settings(dsn, name))
        if conn.info.backend_pid != conn.execute(*protocol.BACKEND_PID).fetchone()[0]:  # type: ignore[index]  # always one row
            conn.prepare_threshold = None
    except psycopg.Error as error:
        raise unavailable(dsn, error) from error
    return _adapt(conn)


async def connect_async(
    dsn: str, *, name: str = "leasetask", limit: float | None = None
) -> psycopg.AsyncConnection[Any]:
    """Open an async connection in autocommit; raises as `connect` does.

    Args:
        limit: seconds after which the server ends a statement. Not set behind a pooler, where it
            would be left behind for others.
    """
    try:
        conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True, **settings(dsn, name))
        row = await (await conn.execute(*protocol.BACKEND_PID)).fetchone()
        if conn.info.backend_pid != row[0]:  # type: ignore[index]  # always one row
            conn.prepare_threshold = None
        elif limit is not None:
            await conn.execute(*protocol.limit_statements(limit))
    except psycopg.Error as error:
        raise unavailable(dsn, error) from error
    return _adapt(conn)


def is_pooled(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether `connect` has found a transaction-mode pooler in between."""
    return conn.prepare_threshold is None


def shut(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Let whoever waits for this connection's server learn that it is lost.

    From any thread: libpq must not be touched from outside, its socket may be. A cancel would wait
    for the server once more, for ten seconds on a network that is frozen.
    """
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as raw:
        raw.shutdown(socket.SHUT_RDWR)


def settings(dsn: str, name: str) -> dict[str, Any]:
    """Return what every connection is opened with; what the DSN says of time-outs stands."""
    chosen: dict[str, Any] = {"application_name": name}
    given = psycopg.conninfo.conninfo_to_dict(dsn).get("connect_timeout")
    if given is None and "PGCONNECT_TIMEOUT" not in os.environ:
        chosen["connect_timeout"] = CONNECT_TIMEOUT
    return chosen


def _adapt(conn: _Connection) -> _Connection:
    """Read uuids as text and JSON with msgspec.

    Another backend than the one that answered the connect means a transaction-mode pooler, which
    mixes prepared statements up between its clients: the callers switch them off then.
    """
    conn.adapters.register_loader("uuid", _TextLoader)
    set_json_loads(decode_stored, conn)
    return conn


def fetch(conn: psycopg.Connection[Any], query: Query) -> list[tuple[Any, ...]]:
    """Run a query on a connection of ours and return its rows."""
    cursor = conn.execute(*query)
    return cursor.fetchall() if gives_rows(cursor) else []


async def fetch_async(conn: psycopg.AsyncConnection[Any], query: Query) -> list[tuple[Any, ...]]:
    """Run a query on an async connection of ours and return its rows.

    In binary: neither side then writes and reads times as text, six microseconds for a claimed task.
    """
    cursor = await conn.execute(*query, binary=True)
    return await cursor.fetchall() if gives_rows(cursor) else []


def gives_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether a statement has a result; `description` would make an object of each column."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def dsn_or_environment(dsn: str | None) -> str | None:
    """Return the DSN given, or the environment's LEASETASK_DSN, or None."""
    return dsn or os.environ.get("LEASETASK_DSN") or None


# --- what an error means --------------------------------------------------------------------


def unavailable(dsn: str, error: Exception) -> DatabaseUnavailable:
    """Say in one line why a server could not be reached; the password is left out."""
    reason = " ".join(str(error).split())
    return DatabaseUnavailable(f"no connection to PostgreSQL ({place(dsn)}): {reason}")


def lost_meanwhile(dsn: str, error: Exception) -> DatabaseUnavailable:
    """Say in one line that a call's connection was lost before its answer came."""
    reason = " ".join(str(error).split())
    return DatabaseUnavailable(
        f"the connection to PostgreSQL ({place(dsn)}) was lost before the answer came: {reason}; "
        "the call may have taken effect: repeat it (an enqueue with a key finds its task again)"
    )


def speaks(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection has something to say: mostly that the server has gone."""
    try:
        return bool(select.select([conn.pgconn.socket], [], [], 0)[0])
    except (ValueError, psycopg.OperationalError):
        return True  # more files open than select can name, or no socket any more


def place(dsn: str) -> str:
    """Name the server and database of a DSN, without its password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "unreadable DSN; write postgresql://user:password@host:port/database"
    known = {k: parts[k] for k in ("host", "port", "dbname", "user") if parts.get(k)}
    return " ".join(f"{k}={v}" for k, v in known.items()) or "defaults of libpq"


def translated(error: Exception, *, task_id: str | None = None) -> LeaseTaskError | None:
    """Return our error for a driver's error that has a meaning here, else None.

    Works through SQLAlchemy and Django, which keep the driver's error as the cause.
    """
    state = sqlstate(error)
    message = str(error).split("\n")[0].removeprefix("leasetask: ")
    if state == "LT002":
        return TaskNotFound(f"no task {task_id}; `leasetask list` shows what there is")
    if state == "LT003":
        hint = getattr(getattr(error, "diag", None), "message_hint", None)
        return TaskRefused(f"{message}. {hint}" if hint else message)
    if state in ("3F000", "42P01", "42883"):
        return SchemaError("the schema leasetask is not in this database; run `leasetask migrate`")
    if state == "23514" or (state or "").startswith("22"):
        return PayloadError(f"PostgreSQL refused the value: {message}")
    return None


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, also when a framework has wrapped it."""
    return getattr(error, "sqlstate", None) or getattr(error.__cause__, "sqlstate", None)


def is_disconnect(error: BaseException) -> bool:
    """Whether the connection is of no use any more: gone, shutting down, or read-only now."""
    if isinstance(error, DatabaseUnavailable | OSError):
        return True
    if isinstance(error, pg.AdminShutdown | pg.CrashShutdown | pg.CannotConnectNow):
        return True
    if isinstance(error, pg.ReadOnlySqlTransaction | pg.IdleInTransactionSessionTimeout):
        return True
    state = sqlstate(error)
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return state is None or state.startswith(("08", "57P"))
    return False


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may well succeed at once: serialization, deadlock, time-out."""
    state = sqlstate(error) or ""
    return state in ("40001", "40P01", "55P03", "57014") or state.startswith("53")


def backoff_delays(initial: float = 0.05, longest: float = 1.6) -> Iterator[float]:
    """Give delays in seconds, doubling to `longest`, each varied by up to a half."""
    delay = initial
    while True:
        yield delay * random.uniform(0.5, 1.5)
        delay = min(delay * 2, longest)


def first(rows: Sequence[Sequence[Any]]) -> Any:
    """Return the single value of a query that gives one."""
    return rows[0][0]
