"""Which indexes each call of the protocol goes through, and how much of them it reads.

By the counters of the call's own transaction, which are exact: no plan is parsed, no time is taken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from conftest import SOAK

Conn = psycopg.Connection[Any]

PLANNERS = 50
BULK = 1_000_000 if SOAK else 20_000
FINISHED = 5 * BULK if SOAK else BULK

# Pending counters hold earlier transactions of the session too, until it flushes them at a
# transaction's end: what counts is the difference.
_COUNTERS = """
select c.relname, c.relkind = 'r', pg_stat_get_xact_numscans(c.oid)::int,
       pg_stat_get_xact_tuples_returned(c.oid)::int
from pg_class c join pg_namespace s on s.oid = c.relnamespace
left join pg_index i on i.indexrelid = c.oid
where s.nspname = 'leasetask' and c.relkind in ('r', 'i')
  and coalesce(i.indrelid, c.oid) in (
    'leasetask.task'::regclass, 'leasetask.task_step'::regclass, 'leasetask.task_signal'::regclass)"""


@dataclass
class Reads:
    """What one transaction read: entries by index, and the tables it scanned from end to end."""

    indexes: dict[str, int] = field(default_factory=dict)
    scanned: set[str] = field(default_factory=set)


@contextmanager
def reads(conn: Conn) -> Iterator[Reads]:
    """Count what the block reads; what it writes is rolled back."""
    found = Reads()
    with conn.transaction(force_rollback=True):
        before = conn.execute(_COUNTERS).fetchall()
        yield found
        after = conn.execute(_COUNTERS).fetchall()
    for (name, is_table, scans, entries), now in zip(sorted(before), sorted(after), strict=True):
        if now[2] > scans and is_table:
            found.scanned.add(name)
        elif now[2] > scans:
            found.indexes[name] = now[3] - entries


@dataclass(frozen=True)
class Held:
    """Tasks that a worker holds, and one that waits."""

    ids: list[str]
    tokens: list[str]
    waiter: str


def fill(db: Conn, n: int, statistics: str = "of the empty table") -> Held:
    """n each of ready, future, finished, and ready of a kind nobody runs, ahead of all others.

    `statistics`: what the planner knows of the table, for as long as the test lasts.
    """
    db.execute("alter table leasetask.task set (autovacuum_enabled = off)")
    db.execute("alter table leasetask.task_signal set (autovacuum_enabled = off)")
    analyze = "analyze leasetask.task, leasetask.task_signal"
    db.execute(analyze)
    db.execute(
        "insert into leasetask.task (id, kind, handler_version, idempotency_key, input, status, finished_at)"
        " select gen_random_uuid(), 'work', 1, 'done-' || i, '1', 'succeeded', now() - interval '40 days'"
        " from generate_series(1, %s) i",
        [FINISHED if n == BULK else n],
    )
    if statistics == "of a drained table":  # where nothing seems to be pending or to wait
        db.execute(analyze)
    add(db, n, "work", "0")
    add(db, n, "work", "1 day")
    add(db, n, "nobody-runs-it", "-1 day", priority=-5)
    db.execute("select leasetask.signal('elsewhere-' || i) from generate_series(1, 5000) i")
    db.execute("update leasetask.task_signal set undelivered = false")
    db.execute("select leasetask.signal('new-' || i) from generate_series(1, 20) i")
    rows = claim(db, 20)
    ids, tokens = [row[0] for row in rows], [row[1] for row in rows]
    suspend(db, ids[:1], tokens[:1])
    if statistics == "fresh":
        db.execute(analyze)
    return Held(ids[1:], tokens[1:], ids[0])


def add(db: Conn, n: int, kind: str, due: str, *, priority: int = 0) -> None:
    """Tasks that become due after an interval."""
    db.execute(
        "select count(*) from leasetask.enqueue_many(%s, array(select to_jsonb(i) from"
        " generate_series(1, %s::int) i), at => now() + %s::interval, priority => %s::smallint)",
        [kind, n, due, priority],
    )


def claim(db: Conn, n: int, **lanes: Any) -> list[tuple[Any, ...]]:
    """Claim, as a worker does; with lanes, from where the last claim began."""
    query = "select id::text, lease_token::text, next_run_at from leasetask.claim('w', %s, %s, %s, '1 hour'"
    if not lanes:
        return db.execute(query + ")", [["work"], [1], n]).fetchall()
    query += ", false, array[0]::smallint[], %s::timestamptz[])"
    return db.execute(query, [["work"], [1], n, [lanes["since"]]]).fetchall()


def suspend(db: Conn, ids: list[str], tokens: list[str]) -> None:
    db.execute(
        "select leasetask.suspend(%s::uuid[], %s::uuid[], array['signal'], array['wait'], array[1],"
        " array['topic'], array[1000.0]::float8[], null, null)",
        [ids, tokens],
    )


def calls(held: Held) -> dict[str, tuple[str, list[Any]]]:
    """Every call that workers and producers make often, with its parameters."""
    both = [held.ids, held.tokens]
    one = [held.ids[:1], held.tokens[:1]]
    patches = ['{"a": {"n": 1, "ok": 1}}'] * len(held.ids)
    return {
        "enqueue": (
            "select * from leasetask.enqueue_many('work', array['1', '2']::jsonb[], array['a', 'b'])",
            [],
        ),
        "enqueue again": (
            "select * from leasetask.enqueue_many('work', array['1']::jsonb[], array['done-7'])",
            [],
        ),
        "claim": ("select * from leasetask.claim('w', array['work'], array[1], 10, '1 hour')", []),
        "claim on": (
            "select * from leasetask.claim('w', array['work'], array[1], 10, '1 hour', false,"
            " array[0]::smallint[], array[now() - interval '1 hour'])",
            [],
        ),
        "heartbeat": ("select * from leasetask.heartbeat(%s::uuid[], %s::uuid[], '1 hour')", both),
        "checkpoint": (
            "select * from leasetask.checkpoint(%s::uuid[], %s::uuid[], %s::jsonb[], '1 hour')",
            [*both, patches],
        ),
        "note": (
            "select * from leasetask.note(%s::uuid[], %s::uuid[], %s::jsonb[], '1 hour')",
            [*both, patches],
        ),
        "finish": (
            "select * from leasetask.finish(%s::uuid[], %s::uuid[], %s::jsonb[])",
            [*both, patches],
        ),
        "release": ("select * from leasetask.release(%s::uuid[], %s::uuid[])", both),
        "fail": (
            "select * from leasetask.fail(%s::uuid[], %s::uuid[], %s::jsonb[], array_fill(true, array[19]))",
            [*both, patches],
        ),
        "suspend": (
            "select leasetask.suspend(%s::uuid[], %s::uuid[], array['signal'], array['wait'], array[1],"
            " array['topic'], array[1000.0]::float8[], null, null)",
            one,
        ),
        "deliver": ("select * from leasetask.deliver(array['topic'])", []),
        "signal": ("select * from leasetask.signal_now('topic')", []),
        "signal nobody": ("select * from leasetask.signal_now('nobody waits for it')", []),
        "look for topics": ("select * from leasetask.undelivered_topics()", []),
        "cancel": ("select leasetask.cancel(%s::uuid)", [held.waiter]),
        "sweep": ("select * from leasetask.sweep()", []),
        "prune": ("select leasetask.prune()", []),
    }


BY_ID = {"task_pkey"}
BY_KEY = {"task_key_is_unique"}
OF_A_TOPIC = {
    "task_waiting_for_topic",
    "task_pkey",
    "task_signal_pkey",
    "signal_unconsumed",
    "signal_sticky",
    "signal_of_topic",
}
EXPECTED = {
    "enqueue": BY_KEY,
    "enqueue again": BY_KEY,
    "claim": {"task_ready", "task_pkey"},
    "claim on": {"task_ready", "task_pkey"},
    "heartbeat": BY_ID,
    "checkpoint": BY_ID,
    "note": BY_ID,
    "finish": BY_ID,
    "release": BY_ID,
    "fail": BY_ID,
    "suspend": BY_ID,
    "deliver": {*OF_A_TOPIC, "task_undelivered", "signal_undelivered"},
    "signal": OF_A_TOPIC,
    "signal nobody": OF_A_TOPIC,
    "look for topics": {"task_undelivered", "signal_undelivered"},
    "cancel": BY_ID,
    "sweep": {"task_running", "task_deadline"},
    "prune": {
        "task_finished",
        "task_pkey",
        "task_step_pkey",
        "task_signal_pkey",
        "signal_consumed",
        "signal_by_age",
        "signal_sticky",
        "signal_of_topic",
    },
}

# Far below what lies in wait, and above the entries that earlier calls of the test leave dead.
FEW = BULK // 2


def planner(seed: int) -> dict[str, str]:
    """Settings that somebody may have, or that make the planner think of another machine."""
    dice = random.Random(seed)
    switches = (
        "bitmapscan",
        "hashjoin",
        "indexonlyscan",
        "material",
        "memoize",
        "mergejoin",
        "nestloop",
        "sort",
    )
    settings = {f"enable_{name}": dice.choice(("on", "on", "off")) for name in switches}
    return settings | {
        "random_page_cost": dice.choice(("0.1", "1.1", "4", "40")),
        "seq_page_cost": dice.choice(("0.1", "1", "10")),
        "cpu_tuple_cost": dice.choice(("0.001", "0.01", "0.1")),
        "cpu_index_tuple_cost": dice.choice(("0.0005", "0.005", "0.5")),
        "effective_cache_size": dice.choice(("8MB", "4GB", "64GB")),
        "work_mem": dice.choice(("64kB", "4MB", "256MB")),
        "plan_cache_mode": dice.choice(("auto", "force_generic_plan", "force_custom_plan")),
        "default_statistics_target": dice.choice(("10", "100")),
        "jit": "off",
    }


def judge(call: str, found: Reads) -> str | None:
    """Say what is wrong with what a call read."""
    if found.scanned:
        return f"{call} scans {found.scanned} from end to end"
    if strange := found.indexes.keys() - EXPECTED[call]:
        return f"{call} goes through {strange}"
    many = {name: n for name, n in found.indexes.items() if n > FEW and name != "task_signal_pkey"}
    return f"{call} reads much of {many}" if many else None


STATISTICS = ("of the empty table", "of a drained table", "fresh")


@pytest.mark.parametrize("statistics", STATISTICS)
def test_each_call_keeps_to_its_indexes(db: Conn, statistics: str) -> None:
    """Under fifty planners; in the fast profile each of them with one of the statistics."""
    held = fill(db, BULK, statistics)
    first, step = (0, 1) if SOAK else (STATISTICS.index(statistics), len(STATISTICS))
    wrong = {}
    for seed in range(first, PLANNERS, step):
        for name, value in planner(seed).items():
            db.execute("select set_config(%s, %s, false)", [name, value])
        db.execute("discard plans")
        for call, (query, parameters) in calls(held).items():
            with reads(db) as found:
                db.execute(query, parameters)  # type: ignore[arg-type]
            if reason := judge(call, found):
                wrong[reason] = seed
    assert not wrong, "\n".join(f"planner({seed}): {reason}" for reason, seed in wrong.items())


def test_h22_a_claim_among_many_rows_reads_few(db: Conn) -> None:
    """Ready, future and finished rows, statistics of the empty table, a generic plan."""
    fill(db, BULK)
    db.execute("set plan_cache_mode = force_generic_plan")
    for _ in range(8):  # past the five custom plans that come first
        with reads(db) as found:
            rows = claim(db, 50)
        assert len(rows) == 50
        assert found.scanned == set()
        # 50 seen, 50 locked, the priorities' walk, and what the rounds before have left dead.
        assert found.indexes["task_ready"] <= 600


def test_h22_a_claim_goes_on_where_the_last_began(dsn: str, db: Conn) -> None:
    """Under a snapshot that is held open, dead entries at the head are not walked again."""
    fill(db, 10)
    db.execute(
        "insert into leasetask.task (id, kind, handler_version, idempotency_key, input, next_run_at)"
        " select gen_random_uuid(), 'work', 1, 'old-' || i, '1', now() - interval '1 h' + i * interval '1 ms'"
        " from generate_series(1, %s) i",
        [BULK],
    )
    with psycopg.connect(dsn) as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from leasetask.task")
        rows = claim(db, 500)
        for _ in range(BULK // 1000):
            rows = claim(db, 500, since=min(row[2] for row in rows))
            assert len(rows) == 500
        with reads(db) as from_the_head:
            claim(db, 500)
        with reads(db) as found:
            claim(db, 500, since=min(row[2] for row in rows))
    assert from_the_head.indexes["task_ready"] > BULK // 2, "or the test shows nothing"
    assert found.indexes["task_ready"] <= 2500


def test_h23_rows_that_nobody_runs_cost_a_claim_nothing(db: Conn) -> None:
    """BULK ready rows of a kind unknown here stand at the head of the order."""
    counted = []
    for bulk in (10, BULK):
        db.execute("truncate leasetask.task cascade")
        add(db, bulk, "nobody-runs-it", "-1 day", priority=-5)
        add(db, bulk, "work", "1 day", priority=-9)
        add(db, 50, "work", "0")
        with reads(db) as found:
            assert len([row for row in claim(db, 10) if row[0]]) == 10
        counted.append(found.indexes["task_ready"])
    assert counted[1] <= counted[0] + 20
