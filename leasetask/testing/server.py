"""Finds a PostgreSQL for tests, and gives each test a migrated database of its own.

The server is LEASETASK_TEST_DSN, else a container where Docker runs, else the embedded one.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from leasetask import schema


@contextmanager
def found_server() -> Iterator[str]:
    """Give the DSN of a server on which databases may be created.

    Raises:
        EmbeddedError: there is none, and the embedded one cannot be started.
    """
    dsn = os.environ.get("LEASETASK_TEST_DSN")
    if dsn:
        yield dsn
    elif docker_runs():
        from testcontainers.postgres import PostgresContainer  # noqa: PLC0415  # an extra

        with PostgresContainer("postgres:16-alpine", driver=None) as container:
            yield _for_scratch(container.get_connection_url())
    else:
        from leasetask import embedded  # noqa: PLC0415  # an extra

        folder = Path(tempfile.mkdtemp(prefix="leasetask-test-"))
        folder.chmod(0o755)  # as root the server runs as another user, who has to get there
        try:
            yield _for_scratch(embedded.ensure(folder))
        finally:
            embedded.release(folder)
            _wait_until_stopped(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _for_scratch(dsn: str) -> str:
    """Let a server that is thrown away afterwards wait for no disk."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter system set fsync = off")
        conn.execute("alter system set full_page_writes = off")
        conn.execute("select pg_reload_conf()")
    return dsn


@contextmanager
def scratch_database(dsn: str | None) -> Iterator[str]:
    """Give the DSN of a migrated scratch database: the one given, or a fresh one.

    The server is started once for the process.
    """
    if dsn is not None:
        yield dsn
        return
    with shared_databases().fresh() as fresh:
        yield fresh


@functools.cache
def shared_databases() -> Databases:
    """Return the databases of this process, on a server that lives as long as it does."""
    stack = ExitStack()
    atexit.register(stack.close)
    databases = Databases(stack.enter_context(found_server()))
    stack.callback(databases.close)
    return databases


def _wait_until_stopped(folder: Path) -> None:
    """The server lingers for a moment: its folder must not go from under it."""
    from leasetask import embedded  # noqa: PLC0415  # an extra

    deadline = time.monotonic() + 10
    while embedded.status(folder).running and time.monotonic() < deadline:
        time.sleep(0.05)


def docker_runs() -> bool:
    """Whether a Docker engine answers."""
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


class Databases:
    """Databases on one server, copied from a template that is migrated once."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._template = f"leasetask_template_{secrets.token_hex(4)}"
        self._create(self._template, "template1")
        schema.migrate(self.dsn_of(self._template))

    def dsn_of(self, name: str) -> str:
        """Return the DSN of a database on this server."""
        return make_conninfo(self._server, dbname=name)

    @contextmanager
    def fresh(self, *, migrated: bool = True) -> Iterator[str]:
        """Give the DSN of a new database, dropped afterwards with whoever is still in it."""
        name = f"leasetask_test_{secrets.token_hex(4)}"
        self._create(name, self._template if migrated else "template1")
        try:
            yield self.dsn_of(name)
        finally:
            self._drop(name)

    def close(self) -> None:
        """Drop the template."""
        self._drop(self._template)

    def _create(self, name: str, template: str) -> None:
        self._run(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )

    def _drop(self, name: str) -> None:
        self._run(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._server, autocommit=True) as conn:
            conn.execute(statement)
