"""Puts schema.sql into a database, and tells whether the one there is the one we speak."""

from __future__ import annotations

import time
from importlib import resources

import psycopg

from leasetask import protocol
from leasetask.connection import backoff_delays, connect, fetch, first, translated
from leasetask.errors import SchemaError
from leasetask.protocol import SCHEMA_VERSION


def sql() -> str:
    """Return the text of schema.sql as it ships with this version."""
    return resources.files("leasetask").joinpath("schema.sql").read_text(encoding="utf-8")


def roles_sql() -> str:
    """Return the text of roles.sql."""
    return resources.files("leasetask").joinpath("roles.sql").read_text(encoding="utf-8")


def migrate(dsn: str, *, roles: bool = False) -> tuple[int | None, int]:
    """Bring a database's schema to this library's version.

    Idempotent, and safe from many processes at once: one transaction under one lock.

    Args:
        roles: create the roles of roles.sql too, and grant them what their parts need.

    Returns:
        The version found (None if there was none) and the version now.

    Raises:
        SchemaError: the schema there is newer than this library.
        DatabaseUnavailable: no connection could be had.
    """
    with connect(dsn, name="leasetask migrate") as conn:
        for delay in backoff_delays():
            try:
                return _migrate_once(conn, roles), SCHEMA_VERSION
            except psycopg.errors.LockNotAvailable:
                time.sleep(delay)
            except psycopg.errors.InsufficientPrivilege as error:
                message = f"migrate needs more rights: {error.diag.message_primary}"
                raise SchemaError(message) from error
    raise AssertionError("backoff never ends")


def _migrate_once(conn: psycopg.Connection, roles: bool) -> int | None:
    with conn.transaction():
        fetch(conn, protocol.TAKE_MIGRATION_LOCK)
        before = installed_version(conn)
        if before is not None and before > SCHEMA_VERSION:
            raise _too_new(before)
        if before != SCHEMA_VERSION:
            conn.execute(_without_transaction(sql()).encode())
        if roles:
            conn.execute(roles_sql().encode())
        return before


def installed_version(conn: psycopg.Connection) -> int | None:
    """Return the schema version of the connected database, None if there is none."""
    if not first(fetch(conn, protocol.SCHEMA_EXISTS)):
        return None
    version = first(fetch(conn, protocol.SCHEMA_CURRENT))
    return None if version is None else int(version)


def check(dsn: str) -> None:
    """Make sure that the database speaks our version of the protocol.

    Raises:
        SchemaError: it is missing, older or newer; the message names the mend.
        DatabaseUnavailable: no connection could be had.
    """
    with connect(dsn, name="leasetask check") as conn:
        try:
            version = installed_version(conn)
        except psycopg.Error as error:
            raise translated(error) or error from error
    if version is None:
        raise SchemaError("the schema leasetask is not in this database; run `leasetask migrate`")
    if version < SCHEMA_VERSION:
        raise SchemaError(
            f"the database has schema version {version}, this leasetask speaks {SCHEMA_VERSION}; "
            "run `leasetask migrate`"
        )
    if version > SCHEMA_VERSION:
        raise _too_new(version)


def _too_new(version: int) -> SchemaError:
    return SchemaError(
        f"the database has schema version {version}, newer than the {SCHEMA_VERSION} that this "
        "leasetask speaks; run `pip install --upgrade leasetask`"
    )


def _without_transaction(script: str) -> str:
    """Drop the script's own begin and commit: it runs inside ours, after the version check."""
    return script.replace("\nbegin;\n", "\n", 1).replace("\ncommit;\n", "\n", 1)
