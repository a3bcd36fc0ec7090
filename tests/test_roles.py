"""Least privilege: each role does its part and is refused the others', and no search_path misleads."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from support import enqueue

from leasetask import App, Context, schema

Db = psycopg.Connection[Any]

TASK = "00000000-0000-7000-8000-000000000001"
_ARRAYS: LiteralString = f"array['{TASK}']::uuid[], array['{TASK}']::uuid[]"

CALLS: dict[str, tuple[LiteralString, frozenset[str]]] = {
    name: (statement, frozenset(roles.split()))
    for name, statement, roles in (
        ("read a task", "select * from leasetask.task", "observer producer worker operator"),
        ("stats", "select * from leasetask.stats()", "observer producer worker operator"),
        ("list", "select * from leasetask.list(n => 5)", "observer producer worker operator"),
        ("enqueue", "select leasetask.enqueue('a', '1')", "producer worker operator"),
        (
            "enqueue_many",
            "select * from leasetask.enqueue_many('a', array['1'::jsonb])",
            "producer worker operator",
        ),
        ("signal", "select leasetask.signal('t')", "producer worker operator"),
        ("deliver", "select * from leasetask.deliver(array['t'])", "producer worker operator"),
        ("cancel", f"select leasetask.cancel('{TASK}')", "producer worker operator"),
        ("claim", "select * from leasetask.claim('me', array['a'], array[1], 1, '1 s')", "worker"),
        ("heartbeat", f"select * from leasetask.heartbeat({_ARRAYS}, '1 s')", "worker"),
        (
            "checkpoint",
            f"select * from leasetask.checkpoint({_ARRAYS}, array['{{}}'::jsonb], '1 s')",
            "worker",
        ),
        ("finish", f"select * from leasetask.finish({_ARRAYS}, array['1'::jsonb])", "worker"),
        ("release", f"select * from leasetask.release({_ARRAYS})", "worker"),
        (
            "fail",
            f"select * from leasetask.fail({_ARRAYS}, array['{{}}'::jsonb], array[true], array[false])",
            "worker",
        ),
        ("sweep", "select * from leasetask.sweep()", "worker operator"),
        ("retry", f"select leasetask.retry('{TASK}')", "operator"),
        ("resolve", f"select leasetask.resolve('{TASK}', 's', '1')", "operator"),
        ("prune", "select * from leasetask.prune('1 day')", "worker operator"),
        ("pause", "select leasetask.pause('a')", "operator"),
        ("insert a task", f"insert into leasetask.task (id) values ('{TASK}')", ""),
        ("change a task", "update leasetask.task set status = 'succeeded'", ""),
        ("remove tasks", "delete from leasetask.task", ""),
        ("truncate", "truncate leasetask.task cascade", ""),
        ("change a signal", "update leasetask.task_signal set payload = '1'", ""),
        ("change a kind", "update leasetask.kind set paused = true", ""),
        ("say a version", "insert into leasetask.schema_version values (99)", ""),
        (
            "replace the clock",
            "create or replace function leasetask.clock() returns timestamptz language sql as 'select now()'",
            "",
        ),
        ("make a table", "create table leasetask.mine (i int)", ""),
        (
            "use a helper",
            f"select leasetask.end_or_compensate(array['{TASK}']::uuid[], 'failed', null, false, now())",
            "",
        ),
    )
}  # fmt: skip
ROLES = ("observer", "producer", "worker", "operator")


@pytest.fixture
def with_roles(db: Db) -> Db:
    db.execute(schema.roles_sql().encode())
    return db


@contextmanager
def acting_as(db: Db, role: str) -> Iterator[None]:
    db.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    try:
        yield
    finally:
        db.execute("reset role")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_its_part_and_no_more(with_roles: Db, role: str) -> None:
    with acting_as(with_roles, f"leasetask_{role}"):
        for call, (statement, allowed) in CALLS.items():
            try:
                with_roles.execute(statement)
                refused = False
            except pg.InsufficientPrivilege:
                refused = True
            except psycopg.Error as error:
                assert (error.sqlstate or "").startswith("LT"), (call, error)  # no such task, say
                refused = False
            assert refused == (role not in allowed), call


def test_somebody_without_a_role_may_do_nothing(with_roles: Db) -> None:
    """Nothing is granted to PUBLIC, also not by usage on the schema alone."""
    stranger = f"stranger_{secrets.token_hex(4)}"
    with_roles.execute(sql.SQL("create role {}").format(sql.Identifier(stranger)))
    try:
        grant = sql.SQL("grant usage on schema leasetask to {}")
        with_roles.execute(grant.format(sql.Identifier(stranger)))
        with acting_as(with_roles, stranger):
            for statement, _ in CALLS.values():
                with pytest.raises(pg.InsufficientPrivilege):
                    with_roles.execute(statement)
    finally:
        drop = sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(stranger))
        with_roles.execute(drop)


def test_each_function_is_granted_to_somebody_or_is_a_helper(with_roles: Db) -> None:
    """A function that is added is thought of in roles.sql."""
    helpers = {
        "answers", "backoff", "cancel_taken", "deliver_topic", "end_or_compensate", "error",
        "hash_input", "new_id", "pair_topic", "sweep_lease", "take", "wake",
    }  # fmt: skip
    rows = with_roles.execute("""
      select proname from pg_proc p where pronamespace = 'leasetask'::regnamespace
      and not exists (select from aclexplode(p.proacl) a
                      join pg_roles r on r.oid = a.grantee where r.rolname like 'leasetask\\_%')""")
    assert {row[0] for row in rows} == helpers


def test_a_worker_and_a_producer_of_these_roles_work(with_roles: Db, dsn: str) -> None:
    """The whole engine with logins that have no more than their role, and the business table."""
    logins = {}
    for role in ("producer", "worker"):
        login = f"{role}_{secrets.token_hex(4)}"
        statement = sql.SQL("create role {} login password 'secret' in role {}")
        with_roles.execute(
            statement.format(sql.Identifier(login), sql.Identifier(f"leasetask_{role}"))
        )
        logins[role] = login
    with_roles.execute("create table paid (order_id int)")
    grant = sql.SQL("grant usage on schema public to {0}; grant insert on paid to {0}")
    with_roles.execute(grant.format(sql.Identifier(logins["worker"])))
    dsn_of = {
        role: make_conninfo(dsn, user=login, password="secret") for role, login in logins.items()
    }
    app = App(dsn_of["worker"])

    @app.task
    def child(ctx: Context, order: int) -> int:
        return order

    @app.task
    def pay(ctx: Context, order: int) -> str:
        ctx.transaction(
            "pay", lambda db: db.execute("insert into paid values (%s)", [order]) and None
        )
        ctx.enqueue("child", child, order)
        by: str = ctx.wait_signal("paid")
        return ctx.step("say", lambda: f"by {by}")

    producer = App(dsn_of["producer"])
    producer.registry.add(app.registry.resolve(pay))
    try:
        with app.start(concurrency=2, lease=5):
            task = producer.enqueue("pay", 7, key="order-7")
            producer.signal("paid", "card")
            assert producer.wait(task.id, timeout=20).result == "by card"
        assert with_roles.execute("select order_id from paid").fetchall() == [(7,)]
    finally:
        producer.close()
        app.close()
        for login in logins.values():
            drop = sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(login))
            with_roles.execute(drop)


HOSTILE = """
create schema hostile;
create table hostile.task as select * from leasetask.task with no data;
create table hostile.kind as select * from leasetask.kind with no data;
create function hostile.trap() returns boolean language plpgsql as
  $$ begin raise exception 'misled by search_path'; end $$;
create function hostile.clock_timestamp() returns timestamptz language plpgsql as
  $$ begin perform hostile.trap(); return null; end $$;
create function hostile.gen_random_uuid() returns uuid language plpgsql as
  $$ begin perform hostile.trap(); return null; end $$;
create function hostile.pg_notify(text, text) returns void language plpgsql as
  $$ begin perform hostile.trap(); end $$;
create function hostile.same(uuid, uuid) returns boolean language sql as 'select hostile.trap()';
create operator hostile.= (leftarg = uuid, rightarg = uuid, function = hostile.same);
create function hostile.same(text, text) returns boolean language sql as 'select hostile.trap()';
create operator hostile.= (leftarg = text, rightarg = text, function = hostile.same);
create function hostile.later(timestamptz, timestamptz) returns boolean language sql as
  'select hostile.trap()';
create operator hostile.<= (leftarg = timestamptz, rightarg = timestamptz, function = hostile.later);
create operator hostile.> (leftarg = timestamptz, rightarg = timestamptz, function = hostile.later);
create temp table task (id uuid, status text);
"""


def test_no_search_path_misleads_a_function(db: Db) -> None:
    """Tables, functions and operators of the caller's that stand before pg_catalog are never used."""
    enqueue(db, "a", 1, key="before")
    db.execute(HOSTILE)
    db.execute("set search_path = hostile, pg_temp, leasetask, pg_catalog")
    try:
        with pytest.raises(pg.RaiseException, match="misled"):
            db.execute("select 'a'::text = 'b'::text")  # the trap works
        made = db.execute("select leasetask.enqueue('a', '2', 'mine')").fetchone()
        assert made is not None
        for statement, allowed in CALLS.values():
            if allowed and "leasetask.task" not in statement:
                try:
                    db.execute(statement)
                except psycopg.Error as error:
                    assert (error.sqlstate or "").startswith("LT"), error
        claim = "select id from leasetask.claim('me', array['a'], array[1], 10, '1 hour')"
        claimed = db.execute(claim).fetchall()
    finally:
        db.execute("reset search_path")
    assert len(claimed) >= 2
    assert db.execute("select count(*) from hostile.task").fetchone() == (0,)
    assert db.execute("select count(*) from pg_temp.task").fetchone() == (0,)
