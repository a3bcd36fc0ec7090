"""Runs our queries on the caller's own connection, whatever library it came from.

psycopg, SQLAlchemy and Django, as long as psycopg 3 is underneath. In a cursor of our own: never
committing, never changing a setting, whatever row factory or mode the connection has. The
frameworks are told by their names, so none of them is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus
from psycopg.rows import tuple_row

from leasetask.connection import gives_rows
from leasetask.errors import ConfigurationError
from leasetask.protocol import Query

Rows = Sequence[Sequence[Any]]


def execute(conn: Any, query: Query) -> Rows:
    """Run a query on a sync connection, session or cursor provider.

    Raises:
        ConfigurationError: it is none that we know.
    """
    if isinstance(conn, psycopg.Connection):
        with conn.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(*query)
            return cursor.fetchall() if _may_give_rows(conn, cursor) else []
    if _is_from("sqlalchemy", conn):
        connection = conn if hasattr(conn, "exec_driver_sql") else conn.connection()
        result = connection.exec_driver_sql(query.sql, tuple(query.params))
        return [tuple(row) for row in result] if result.returns_rows else []
    if _is_from("django", conn):
        with conn.cursor() as cursor:
            cursor.execute(query.sql, list(query.params))
            return list(cursor.fetchall()) if cursor.description else []
    raise _unknown(conn)


async def execute_async(conn: Any, query: Query) -> Rows:
    """Run a query on an async connection or session; raises as `execute`."""
    if isinstance(conn, psycopg.AsyncConnection):
        async with conn.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(*query)
            return await cursor.fetchall() if _may_give_rows(conn, cursor) else []
    if _is_from("sqlalchemy", conn):
        connection = conn if hasattr(conn, "exec_driver_sql") else await conn.connection()
        result = await connection.exec_driver_sql(query.sql, tuple(query.params))
        return [tuple(row) for row in result] if result.returns_rows else []
    raise _unknown(conn)


def driver_connection(conn: Any) -> Any:
    """Return the psycopg connection underneath, None if it cannot be had without awaiting."""
    if isinstance(conn, psycopg.Connection | psycopg.AsyncConnection):
        return conn
    if _is_from("django", conn):
        return conn.connection
    connection = conn if hasattr(conn, "exec_driver_sql") else None
    if connection is None and hasattr(conn, "sync_session"):
        return None
    if connection is None:
        connection = conn.connection()
    return getattr(getattr(connection, "connection", None), "driver_connection", None)


def _may_give_rows(conn: Any, cursor: Any) -> bool:
    in_pipeline = (
        conn.pgconn.pipeline_status != PipelineStatus.OFF
    )  # no result before it is fetched
    return in_pipeline or gives_rows(cursor)


def _is_from(framework: str, conn: Any) -> bool:
    return any(base.__module__.split(".")[0] == framework for base in type(conn).__mro__)


def _unknown(conn: Any) -> ConfigurationError:
    return ConfigurationError(
        f"conn= takes a connection or session of psycopg 3, SQLAlchemy or Django, not a "
        f"{type(conn).__module__}.{type(conn).__qualname__}; for other drivers use app.enqueue_sql"
    )
