"""Claims: never more than asked for, each task once, and no later than it is due."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from support import column, enqueue, pass_time, wait_for_status, wait_until

from leasetask import App, AsyncContext, Context, Retry

Db = psycopg.Connection[Any]
POLL = 30.0
"""A poll interval that no test waits for: what starts sooner was notified or foreseen."""


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


# --- how many ------------------------------------------------------------------------------------

CLAIM = """
select id::text from leasetask.claim(
  'w', array['a', 'b', 'a', 'c'], array[1, 1, 2, 1], %s, '1 hour') where id is not null"""


def random_planner(db: Db, rng: random.Random) -> dict[str, str]:
    """Draw settings that make the planner choose otherwise than it would."""
    rows = db.execute("""
      select name, vartype, enumvals from pg_settings
      where category like 'Query Tuning%' and context = 'user'""").fetchall()
    settings = {}
    for name, type_, values in rows:
        if type_ == "bool":
            settings[name] = rng.choice(("on", "off"))
        elif type_ == "enum":
            settings[name] = rng.choice(values)
        elif name.endswith("_cost"):
            settings[name] = str(rng.choice((0, 0.001, 1, 1000, 1e6)))
        elif name.endswith("_limit"):
            settings[name] = rng.choice(("1", "8"))
    return settings


def test_h20_a_claim_never_takes_more_than_it_asks_for(dsn: str, db: Db) -> None:
    """H20: fifty random planner settings (soak: five hundred); exactly the first n in the order."""
    db.execute("""
      insert into leasetask.task (id, kind, handler_version, idempotency_key, input, priority,
                                  next_run_at)
      select gen_random_uuid(), (array['a', 'b', 'c', 'other'])[1 + i % 4], 1 + i % 3, i::text, '1',
             i % 5, clock_timestamp() + make_interval(secs => (i * 7919) % 1000 - 700)
      from generate_series(1, 2000) i""")
    db.execute("analyze leasetask.task")
    rng = random.Random(20)
    for _ in range(500 if SOAK else 50):
        settings = random_planner(db, rng)
        with psycopg.connect(dsn) as conn:
            for name, value in settings.items():
                conn.execute("select set_config(%s, %s, false)", [name, value])
            for n in (1, 2, 7, 50):
                due = conn.execute("""
                  select id::text, (priority, next_run_at) from leasetask.task
                  where status = 'pending' and next_run_at <= clock_timestamp()
                    and (kind, handler_version) in (('a', 1), ('b', 1), ('a', 2), ('c', 1))
                  order by priority, next_run_at""").fetchall()
                taken = [row[0] for row in conn.execute(CLAIM, [n])]
                assert len(set(taken)) == len(taken) == n, settings
                ranks = dict(due)
                assert max(ranks[id_] for id_ in taken) <= due[n - 1][1], settings
            for n in (0, -1):
                assert conn.execute(CLAIM, [n]).fetchall() == []
            conn.rollback()


def test_h20_a_claim_for_more_than_there_is_takes_what_is_due(db: Db) -> None:
    """H20: and says when the next one is due."""
    due = {enqueue(db, kind) for kind in "abc"}
    enqueue(db, "a", delay=60)
    rows = db.execute(
        "select id::text, next_run_at - claimed_at from leasetask.claim("
        "'w', array['a', 'b', 'c'], array[1, 1, 1], 100, '1 hour')"
    ).fetchall()
    assert {id_ for id_, _ in rows[:3]} == due
    assert rows[3][0] is None
    assert 59 < rows[3][1].total_seconds() <= 60


def test_a_worker_runs_no_more_than_its_concurrency(app: App) -> None:
    """H20, at the worker: forty quick tasks, five at a time at the most."""
    inside, most = Counter[str](), []

    @app.task
    async def crowd(ctx: AsyncContext) -> None:
        inside["now"] += 1
        most.append(inside["now"])
        await ctx.step("pause", time.sleep, 0.001)
        inside["now"] -= 1

    tasks = app.enqueue_many(crowd, [None] * 40)
    with app.start(concurrency=5):
        for task in tasks:
            app.wait(task.id, timeout=10)
    assert max(most) == 5
    assert len(most) == 40


# --- who -----------------------------------------------------------------------------------------


@contextmanager
def stopped_before_taking(db: Db) -> Iterator[None]:
    """Stop each claim between choosing its rows and taking them, until the block ends."""
    db.execute("""
      create function stop_here() returns trigger language plpgsql as $$
      begin
        perform pg_advisory_xact_lock_shared(21);
        return new;
      end $$""")
    db.execute("""
      create trigger stop_here before update on leasetask.task for each row
      when (new.status = 'running' and old.status <> 'running' and new.lease_owner = 'stopped')
      execute function stop_here()""")
    db.execute("select pg_advisory_lock(21)")
    try:
        yield
    finally:
        db.execute("select pg_advisory_unlock(21)")


def claim(dsn: str, owner: str, n: int, taken: dict[str, list[str]], commits: bool = True) -> None:
    """Claim n tasks of kind k in a transaction of its own."""
    with psycopg.connect(dsn, application_name=owner) as conn:
        rows = conn.execute(
            "select id::text from leasetask.claim(%s, array['k'], array[1], %s, '1 hour')"
            " where id is not null",
            [owner, n],
        ).fetchall()
        if not commits:
            conn.rollback()
    taken[owner] = [row[0] for row in rows]


@pytest.mark.parametrize("commits", [True, False])
def test_h21_two_claimers_never_take_the_same(dsn: str, db: Db, commits: bool) -> None:
    """H21: one stands between choosing and taking while the other claims; each task goes once.

    If the first then rolls back, what it had chosen is there for the next.
    """
    tasks = {enqueue(db, "k", n) for n in range(10)}
    taken: dict[str, list[str]] = {}
    first = threading.Thread(target=claim, args=(dsn, "stopped", 4, taken, commits))
    with stopped_before_taking(db):
        first.start()
        wait_until(
            lambda: db.execute(
                "select 1 from pg_stat_activity"
                " where application_name = 'stopped' and wait_event = 'advisory'"
            ).fetchone()
        )
        claim(dsn, "second", 4, taken)
        assert "stopped" not in taken
    first.join()
    claim(dsn, "third", 10, taken)
    assert len(taken["stopped"]) == len(taken["second"]) == 4
    assert not set(taken["stopped"]) & set(taken["second"])
    kept = [taken["stopped"]] if commits else []
    everything = [*kept, taken["second"], taken["third"]]
    assert sorted(id_ for ids in everything for id_ in ids) == sorted(tasks)
    owners = dict(db.execute("select id::text, lease_owner from leasetask.task").fetchall())
    for owner in ("second", "third", *(["stopped"] if commits else [])):
        assert all(owners[id_] == owner for id_ in taken[owner])


def test_h21_many_claimers_take_each_task_once(dsn: str, db: Db) -> None:
    """H21: eight claimers at once, a few tasks each time, until there is none."""
    number = 20_000 if SOAK else 2_000
    db.execute(
        "select count(*) from leasetask.enqueue_many("
        "'k', array(select to_jsonb(i) from generate_series(1, %s::int) i))",
        [number],
    )
    taken: list[tuple[str, str]] = []

    def work(rng: random.Random) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while rows := conn.execute(
                "select id::text, lease_token::text from leasetask.claim("
                "'w', array['k'], array[1], %s, '1 hour') where id is not null",
                [rng.randint(1, 9)],
            ).fetchall():
                taken.extend(rows)

    threads = [threading.Thread(target=work, args=(random.Random(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == number
    assert len({id_ for id_, _ in taken}) == len({token for _, token in taken}) == number


# --- when ----------------------------------------------------------------------------------------


@contextmanager
def idle_worker(app: App, db: Db) -> Iterator[None]:
    """A worker that polls every half minute and has turned idle."""
    with app.start(poll_interval=POLL):
        wait_until(lambda: db.execute("select 1 from leasetask.idle_worker").fetchone())
        yield


def test_h24_a_task_committed_just_before_the_wait_is_seen(app: App, db: Db) -> None:
    """H24: it commits after the claim's snapshot, while nobody is idle and so nobody notified.

    The function by which a worker declares itself idle is made to enqueue a task just before.
    """

    @app.task
    async def late(ctx: AsyncContext) -> None:
        pass

    db.execute("alter function leasetask.set_idle(text, boolean) rename to declare_idle")
    db.execute("""
      create function leasetask.set_idle(worker text, idle boolean) returns void
      language plpgsql as $$
      begin
        if idle and not exists (select from leasetask.task) then
          perform leasetask.enqueue('late', 'null', 'late');
        end if;
        perform leasetask.declare_idle(worker, idle);
      end $$""")
    with app.start(poll_interval=POLL):
        wait_until(lambda: db.execute("select 1 from leasetask.task").fetchone())
        began = time.monotonic()
        wait_until(lambda: db.execute("select 1 from leasetask.task where runs = 1").fetchone(), 10)
        assert time.monotonic() - began < 1


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_h24_a_long_transaction_is_seen_within_its_own_length(
    app: App, dsn: str, db: Db, seconds: float
) -> None:
    """H24: it enqueues before the worker is idle, notifies nobody, and commits later."""

    @app.task
    async def late(ctx: AsyncContext) -> None:
        pass

    with psycopg.connect(dsn) as producer:
        task = app.enqueue(late, conn=producer).id
        with idle_worker(app, db):
            pass_time(seconds)
            producer.commit()
            committed = time.monotonic()
            wait_for_status(db, task, "succeeded")
            assert time.monotonic() - committed < seconds + 1


def test_h24_an_idle_worker_is_notified(app: App, db: Db) -> None:
    """H24: a task for a worker that has been idle for a while starts at once."""

    @app.task
    async def prompt(ctx: AsyncContext) -> None:
        pass

    with idle_worker(app, db):
        for _ in range(5):
            pass_time(0.2)
            task = app.enqueue(prompt).id
            enqueued = time.monotonic()
            wait_for_status(db, task, "succeeded")
            assert time.monotonic() - enqueued < 0.5


@pytest.mark.parametrize("when", ["before the start", "while idle"])
def test_h27_a_task_due_soon_starts_when_due(app: App, db: Db, when: str) -> None:
    """H27: due in 0.3 s, polled every 30 s: starts in 0.3 s."""

    @app.task
    async def soon(ctx: AsyncContext) -> None:
        pass

    if when == "before the start":
        task = app.enqueue(soon, delay=0.3).id
        with app.start(poll_interval=POLL):
            wait_for_status(db, task, "succeeded")
    else:
        with idle_worker(app, db):
            task = app.enqueue(soon, delay=0.3).id
            wait_for_status(db, task, "succeeded")
    late = column(db, "extract(epoch from claimed_at - next_run_at)", task)
    assert 0 <= late < 0.5
    assert 0.29 < column(db, "extract(epoch from claimed_at - created_at)", task) < 0.8


def test_h27_sleeps_and_retries_end_when_due(app: App, db: Db) -> None:
    """H27: the same for a sleep, a failed try and a failed step, of the worker's own tasks."""
    moments: dict[str, list[float]] = {"sleep": [], "try": [], "step": []}
    retry = Retry(max_attempts=2, initial=0.3, jitter=0)

    @app.task
    def naps(ctx: Context) -> None:
        moments["sleep"].append(time.monotonic())
        ctx.sleep(0.3)

    @app.task(retry=retry)
    def fails(ctx: Context) -> None:
        moments["try"].append(time.monotonic())
        if ctx.run == 1:
            raise RuntimeError("once")

    def body() -> None:
        moments["step"].append(time.monotonic())
        if len(moments["step"]) == 1:
            raise RuntimeError("once")

    @app.task(retry=retry)
    def stumbles(ctx: Context) -> None:
        ctx.step("body", body)

    with idle_worker(app, db):
        for handler in (naps, fails, stumbles):
            assert app.wait(app.enqueue(handler).id, timeout=10).status == "succeeded"
    for what, (first, second) in moments.items():
        assert 0.29 < second - first < 3, what


# --- claiming ahead ------------------------------------------------------------------------------


def test_what_was_claimed_ahead_is_handed_back_when_tasks_turn_out_long(app: App, db: Db) -> None:
    """Short tasks make a worker claim ahead; behind a long one that must not keep others waiting.

    Two slots, 3,000 short tasks, then 60 that last. Those that find no slot are given back within
    moments, uncharged, to whoever is free; at the stop the rest is.
    """
    handed_out: list[str] = []

    @app.task
    async def short(ctx: AsyncContext) -> None:
        pass

    @app.task
    async def long(ctx: AsyncContext) -> None:
        handed_out.append(ctx.task_id)
        await asyncio.sleep(3600)

    app.enqueue_many(short, [None] * 3000)
    app.enqueue_many(long, [None] * 60, priority=1)
    with app.start(concurrency=2, lease=30, grace=0):
        wait_until(lambda: len(handed_out) == 2, what="for both slots to be taken")
        claimed_ahead = "select count(*) from leasetask.task where kind = 'long' and runs > 0"
        running = "select count(*) from leasetask.task where kind = 'long' and status = 'running'"
        wait_until(lambda: db.execute(running).fetchone() == (2,), what="for the rest's return")
        assert db.execute(claimed_ahead).fetchone() > (2,), "nothing was claimed ahead"
        others = "select distinct attempts from leasetask.task where kind = 'long' and status = 'pending'"
        assert db.execute(others).fetchall() == [(0,)]
    left = (
        "select status, max(attempts), count(*) from leasetask.task where kind = 'long' group by 1"
    )
    assert db.execute(left).fetchall() == [("pending", 0, 60)]
