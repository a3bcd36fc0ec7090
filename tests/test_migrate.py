"""`leasetask migrate`: from many processes at once, from older versions, killed half-way."""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import COMMAND, enqueue, wait_until

from leasetask import schema
from leasetask.protocol import SCHEMA_VERSION

Db = psycopg.Connection[Any]
PROCESSES = 10 if SOAK else 4

OBJECTS = """
select 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod)
from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'leasetask'::regnamespace and a.attnum > 0 and not a.attisdropped
union all
select 'index', tablename, indexname, indexdef from pg_indexes where schemaname = 'leasetask'
union all
select 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
from pg_constraint where connamespace = 'leasetask'::regnamespace
union all
select 'function', oid::regprocedure::text, '', pg_get_functiondef(oid)
from pg_proc where pronamespace = 'leasetask'::regnamespace
order by 1, 2, 3"""


def start_migrate(dsn: str) -> subprocess.Popen[str]:
    """Start `leasetask migrate` in a process of its own."""
    return subprocess.Popen(
        [COMMAND, "migrate"],
        env={**os.environ, "LEASETASK_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its status and what it wrote."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out.strip(), err.strip()


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[Db]:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        yield conn


def is_whole(db: Db, fresh: Db) -> bool:
    """Whether the schema equals a fresh one, at this version, and nobody holds a lock on it."""
    versions = db.execute("select max(version) from leasetask.schema_version").fetchone()
    locks = db.execute("""
      select locktype, mode from pg_locks
      where pid <> pg_backend_pid() and database = (
        select oid from pg_database where datname = current_database())""").fetchall()
    assert (versions, locks) == ((SCHEMA_VERSION,), [])
    return db.execute(OBJECTS).fetchall() == fresh.execute(OBJECTS).fetchall()


def waiting(db: Db, event: str) -> int:
    """Count the migrates that wait for a lock of this sort."""
    row = db.execute(
        "select count(*) from pg_stat_activity where application_name = 'leasetask migrate'"
        " and datname = current_database() and wait_event_type = 'Lock' and wait_event = %s",
        [event],
    ).fetchone()
    assert row is not None
    return int(row[0])


# --- at once -------------------------------------------------------------------------------------


def test_h35_many_processes_at_once(empty_dsn: str, empty: Db, db: Db) -> None:
    """H35: four processes (soak: ten) say that the schema is there; one has created it."""
    processes = [start_migrate(empty_dsn) for _ in range(PROCESSES)]
    outcomes = [outcome(process) for process in processes]
    at = f"schema leasetask is at version {SCHEMA_VERSION}"
    assert sorted(outcomes) == sorted(
        [(0, at, "")] * (PROCESSES - 1) + [(0, f"{at} (created)", "")]
    )
    assert is_whole(empty, db)


@contextmanager
def held_half_way(dsn: str, db: Db) -> Iterator[None]:
    """Whoever migrates makes everything, and then stands before it writes its version."""
    db.execute("create schema leasetask")
    db.execute(
        "create table leasetask.schema_version (version int primary key,"
        " applied_at timestamptz not null default clock_timestamp())"
    )
    with psycopg.connect(dsn) as holder:
        holder.execute("lock table leasetask.schema_version in share row exclusive mode")
        yield
        holder.rollback()


def test_h35_one_process_is_killed_half_way(empty_dsn: str, empty: Db, db: Db) -> None:
    """H35: kill -9; others start while its half is still in the server. They end well.

    The schema is whole, nothing stays locked.
    """
    with held_half_way(empty_dsn, empty):
        first = start_migrate(empty_dsn)
        wait_until(lambda: waiting(empty, "relation") == 1)
        first.kill()
        outcome(first)
        others = [start_migrate(empty_dsn) for _ in range(PROCESSES - 1)]
        wait_until(lambda: waiting(empty, "advisory") > 0)
    assert [outcome(process)[0] for process in others] == [0] * (PROCESSES - 1)
    assert is_whole(empty, db)


def test_h35_one_connection_ends_half_way(empty_dsn: str, empty: Db, db: Db) -> None:
    """H35: the server ends one of the connections: that process says so, the others end well."""
    end_one = """
      select pg_terminate_backend(pid) from pg_stat_activity
      where application_name = 'leasetask migrate' and datname = current_database()
        and wait_event = 'relation'"""
    with held_half_way(empty_dsn, empty):
        processes = [start_migrate(empty_dsn) for _ in range(PROCESSES)]
        wait_until(lambda: empty.execute(end_one).fetchone())
    outcomes = sorted(outcome(process) for process in processes)
    assert [status for status, _, _ in outcomes] == [0] * (PROCESSES - 1) + [3]
    assert_one_line(outcomes[-1][2])
    assert is_whole(empty, db)


def assert_one_line(err: str) -> None:
    """A mistake is told in one line."""
    assert err.startswith("leasetask: ")
    assert len(err.splitlines()) == 1


def test_h35_with_one_connection(empty_dsn: str, empty: Db, db: Db) -> None:
    """H35: a role that may have one connection at a time migrates, and owns what it has made."""
    role, password = f"migrator_{secrets.token_hex(4)}", secrets.token_hex(8)
    name = sql.Identifier(role)
    empty.execute(
        sql.SQL("create role {} login connection limit 1 password {}").format(
            name, sql.Literal(password)
        )
    )
    empty.execute(
        sql.SQL("grant create on database {} to {}").format(
            sql.Identifier(str(conninfo_to_dict(empty_dsn)["dbname"])), name
        )
    )
    try:
        own = make_conninfo(empty_dsn, user=role, password=password)
        assert outcome(start_migrate(own))[0] == 0
        assert outcome(start_migrate(own))[0] == 0
        assert is_whole(empty, db)
    finally:
        empty.execute(sql.SQL("drop owned by {}").format(name))
        empty.execute(sql.SQL("drop role {}").format(name))


def test_h35_the_file_itself_may_be_applied_at_once(empty_dsn: str, empty: Db, db: Db) -> None:
    """H35: as `psql -f schema.sql` does it, from four connections, twice each."""
    errors: list[BaseException] = []

    def apply() -> None:
        try:
            with psycopg.connect(empty_dsn, autocommit=True) as conn:
                for _ in range(2):
                    conn.execute(schema.sql().encode())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=apply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert is_whole(empty, db)


# --- versions ------------------------------------------------------------------------------------


def set_version(db: Db, version: int) -> None:
    """Make the schema say that it is of another version."""
    db.execute("delete from leasetask.schema_version")
    db.execute("insert into leasetask.schema_version (version) values (%s)", [version])


def test_h35_many_processes_upgrade_at_once(dsn: str, db: Db) -> None:
    """H35: from an older version; one upgrades, no row is lost or changed."""
    for number in range(20):
        enqueue(db, "kept", number)
    db.execute("select leasetask.signal('kept', '1')")
    db.execute("select from leasetask.claim('w', array['kept'], array[1], 7, '1 hour')")
    rows = "select to_jsonb(t) from leasetask.task t order by id"
    before = db.execute(rows).fetchall()
    set_version(db, 0)
    outcomes = [outcome(process) for process in [start_migrate(dsn) for _ in range(PROCESSES)]]
    at = f"schema leasetask is at version {SCHEMA_VERSION}"
    assert sorted(outcomes) == sorted([(0, at, "")] * (PROCESSES - 1) + [(0, f"{at} (was 0)", "")])
    assert db.execute(rows).fetchall() == before
    assert db.execute("select count(*) from leasetask.task_signal").fetchone() == (1,)


def test_h35_a_newer_schema_is_left_alone(dsn: str, db: Db) -> None:
    """H35: older processes say so, and change nothing."""
    set_version(db, SCHEMA_VERSION + 1)
    db.execute("drop function leasetask.prune")
    before = db.execute(OBJECTS).fetchall()
    for status, out, err in [outcome(p) for p in [start_migrate(dsn) for _ in range(PROCESSES)]]:
        assert (status, out) == (1, "")
        assert_one_line(err)
        assert "newer" in err
    assert db.execute(OBJECTS).fetchall() == before
    assert db.execute("select version from leasetask.schema_version").fetchall() == [
        (SCHEMA_VERSION + 1,)
    ]


def test_h35_a_migrate_of_the_same_version_stands_in_nobodys_way(dsn: str, db: Db) -> None:
    """H35: nothing stays locked, also not behind a user's transaction that is left open.

    Every deployment runs it: it must neither wait for such a transaction nor make others wait.
    """
    with psycopg.connect(dsn) as user:
        enqueue(user, "left_open")
        process = start_migrate(dsn)
        try:
            wait_until(lambda: process.poll() is not None or waiting(db, "relation"))
            db.execute("set statement_timeout = '3s'")
            enqueue(db, "meanwhile")
            assert outcome(process)[0] == 0
        finally:
            user.rollback()
            process.wait(30)
