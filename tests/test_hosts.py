"""Enqueue, signal and cancel in the caller's transaction, on every library that psycopg 3 is under.

One body over all of them: what was done with a connection is there if and only if it commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import django
import psycopg
import pytest
import sqlalchemy as sa
from django.conf import settings
from helpers import FAST, ended
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from leasetask import App, Context
from leasetask.errors import ConfigurationError

Work = Callable[[Any], None]


def engine_of(dsn: str) -> sa.Engine:
    return sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))


def on_psycopg(dsn: str, work: Work, commit: bool, **options: Any) -> None:
    with psycopg.connect(dsn, **options) as conn, conn.transaction(force_rollback=not commit):
        work(conn)


def on_connection(dsn: str, work: Work, commit: bool) -> None:
    engine = engine_of(dsn)
    with engine.connect() as conn:
        work(conn)
        conn.commit() if commit else conn.rollback()
    engine.dispose()


def on_session(dsn: str, work: Work, commit: bool) -> None:
    engine = engine_of(dsn)
    with Session(engine) as session:
        work(session)
        session.commit() if commit else session.rollback()
    engine.dispose()


def django_connection(dsn: str) -> Any:
    parts = conninfo_to_dict(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
    }
    if not settings.configured:
        settings.configure(DATABASES={"default": database}, USE_TZ=True)
        django.setup()
    from django.db import connections

    connections.settings["default"] |= database
    connection = connections["default"]
    connection.close()
    connection.settings_dict.update(database)
    return connection


def on_django(dsn: str, work: Work, commit: bool) -> None:
    from django.db import transaction

    connection = django_connection(dsn)
    with transaction.atomic():
        work(connection)
        if not commit:
            transaction.set_rollback(True)
    connection.close()


HOSTS: dict[str, Callable[[str, Work, bool], None]] = {
    "psycopg": on_psycopg,
    "psycopg, dict rows": lambda *a: on_psycopg(*a, row_factory=dict_row),
    "psycopg, autocommit": lambda *a: on_psycopg(*a, autocommit=True),
    "SQLAlchemy Connection": on_connection,
    "SQLAlchemy Session": on_session,
    "Django": on_django,
}


def declared(dsn: str) -> tuple[App, Callable[..., Any]]:
    app = App(dsn)

    @app.task
    def echo(ctx: Context, value: Any) -> Any:
        return value

    return app, echo


def state(db: psycopg.Connection) -> tuple[int, int, int]:
    return db.execute(
        "select (select count(*) from leasetask.task), (select count(*) from leasetask.task_signal),"
        " (select count(*) from leasetask.task where status = 'canceled')"
    ).fetchone()


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("host", HOSTS)
def test_in_the_callers_transaction(
    dsn: str, db: psycopg.Connection, host: str, commit: bool
) -> None:
    app, echo = declared(dsn)
    before = app.enqueue(echo, "before")

    def work(conn: Any) -> None:
        app.enqueue(echo, {"x": [1, "é"]}, key="k", conn=conn)
        app.enqueue_many(echo, [1, 2], conn=conn)
        assert app.signal("topic", {"a": 1}, conn=conn) is None
        assert app.cancel(before.id, reason="r", conn=conn) == "canceled"
        assert state(db) == (1, 0, 0)

    HOSTS[host](dsn, work, commit)
    assert state(db) == ((4, 1, 1) if commit else (1, 0, 0))


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize(
    "host", ["psycopg", "SQLAlchemy AsyncConnection", "SQLAlchemy AsyncSession"]
)
def test_in_the_callers_async_transaction(
    dsn: str, db: psycopg.Connection, host: str, commit: bool
) -> None:
    app, echo = declared(dsn)
    before = app.enqueue(echo, "before")

    async def work(conn: Any) -> None:
        await app.enqueue_async(echo, {"x": 1}, key="k", conn=conn)
        await app.enqueue_many_async(echo, [1, 2], conn=conn)
        assert await app.signal_async("topic", conn=conn) is None
        assert await app.cancel_async(before.id, conn=conn) == "canceled"

    async def scenario() -> None:
        if host == "psycopg":
            async with await psycopg.AsyncConnection.connect(dsn) as conn:
                await work(conn)
                await (conn.commit() if commit else conn.rollback())
            return

        async def connect() -> psycopg.AsyncConnection:
            return await psycopg.AsyncConnection.connect(dsn)

        engine = create_async_engine("postgresql+psycopg://", async_creator=connect)
        if host.endswith("Session"):
            async with AsyncSession(engine) as session:
                await work(session)
                await (session.commit() if commit else session.rollback())
        else:
            async with engine.connect() as conn:
                await work(conn)
                await (conn.commit() if commit else conn.rollback())
        await engine.dispose()

    asyncio.run(scenario())
    assert state(db) == ((4, 1, 1) if commit else (1, 0, 0))


@pytest.mark.parametrize("host", ["SQLAlchemy Connection", "SQLAlchemy Session", "Django"])
def test_business_transactions_of_the_users_own(
    dsn: str, db: psycopg.Connection, host: str
) -> None:
    """`App(transactions=…)`: the write, the record and the fence in one commit, by the framework."""
    db.execute("create table business (what text)")
    engine = engine_of(dsn)
    statement = "insert into business values ('row')"
    if host == "Django":
        django_connection(dsn)
        from contextlib import contextmanager

        from django.db import connection, transaction

        @contextmanager
        def factory() -> Any:
            try:
                with transaction.atomic():
                    yield connection
            finally:
                connection.close()

        def write(conn: Any) -> None:
            with conn.cursor() as cursor:
                cursor.execute(statement)
    else:
        factory = engine.begin if host.endswith("Connection") else sa.orm.sessionmaker(engine).begin

        def write(conn: Any) -> None:
            conn.execute(sa.text(statement))

    app = App(dsn, transactions=factory)

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        ctx.transaction("mark", write)
        ctx.complete(write)

    view = ended(app, handler)
    engine.dispose()
    assert view.status == "succeeded", view.last_error
    assert db.execute("select count(*) from business").fetchone() == (2,)


def test_anything_else_is_refused_with_a_way_out(dsn: str) -> None:
    app, echo = declared(dsn)
    with pytest.raises(ConfigurationError, match="enqueue_sql"):
        app.enqueue(echo, 1, conn=object())
