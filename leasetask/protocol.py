"""The calls of schema.sql's functions: the only Python with SQL in it.

Each function gives a `Query`: the statement and its parameters. Statements are constants, so that
the driver can prepare them; JSON travels as text. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Generic, LiteralString, NamedTuple, TypeVar

import msgspec

from leasetask.model import (
    Ack,
    Checkpoint,
    Claimed,
    Fail,
    Finish,
    Note,
    Release,
    Suspend,
    Swept,
    TaskView,
)
from leasetask.payload import decode_stored

T = TypeVar("T")

SCHEMA_VERSION = 1
CHANNEL = "leasetask"


class Query(NamedTuple):
    """A statement and its parameters, for any driver that takes `%s`."""

    sql: LiteralString
    params: Sequence[Any] = ()


class Lane(NamedTuple):
    """One (kind, version, priority) of the ready tasks, and where the last claim in it began."""

    kind: str
    version: int
    priority: int
    since: datetime


class Item(NamedTuple, Generic[T]):
    """One task's part of a batch."""

    id: str
    token: str
    body: T


_JSONB_ARRAY: LiteralString = "array(select e::jsonb from json_array_elements(%s::json) e)"
_TEXT_ARRAY: LiteralString = "array(select e from json_array_elements_text(%s::json) e)"
# Large arrays travel as one text: the driver would look at each element of a list.


def _readable_time(column: LiteralString) -> LiteralString:
    """Bring a time within Python's years, in any time zone: one that is not would stop its reader."""
    return (
        f"case when {column} > '9998-12-31' then '9998-12-31' "
        f"when {column} < '0002-01-01' then '0002-01-01' else {column} end"
    )


def _json_array(encoded: Iterable[str]) -> str:
    return "[" + ",".join(encoded) + "]"


def _uuid_array(uuids: Iterable[str]) -> str:
    return "{" + ",".join(uuids) + "}"


def _ids(items: Sequence[Item[Any]]) -> str:
    return _uuid_array(item.id for item in items)


def _tokens(items: Sequence[Item[Any]]) -> str:
    return _uuid_array(item.token for item in items)


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


# --- schema -------------------------------------------------------------------------------

SCHEMA_EXISTS = Query("select to_regclass('leasetask.schema_version') is not null")
SCHEMA_CURRENT = Query("select max(version) from leasetask.schema_version")
TAKE_MIGRATION_LOCK = Query("select pg_advisory_xact_lock(hashtext('leasetask.migrate'))")
BACKEND_PID = Query("select pg_backend_pid()")
IS_READ_ONLY = Query("select pg_is_in_recovery()")
LISTEN = Query("listen leasetask")


def limit_statements(seconds: float) -> Query:
    """Rows: not to be read. For this session."""
    return Query(
        "select set_config('statement_timeout', %s, false)", (str(max(1, int(seconds * 1000))),)
    )


PING = Query("select 1")


# --- producers ----------------------------------------------------------------------------


class KindPolicy(NamedTuple):
    """What a declared kind brings along: numbers of its retry policy, in seconds."""

    kind: str
    version: int
    priority: int
    max_attempts: int
    backoff_initial: float
    backoff_factor: float
    backoff_max: float
    backoff_jitter: float
    deadline: float | None


_OPTIONS: dict[str, LiteralString] = {
    "at": ", at => %s::timestamptz",
    "delay": ", delay => make_interval(secs => %s::float8)",
    "priority": ", priority => %s::smallint",
    "version": ", version => %s::int",
    "max_attempts": ", max_attempts => %s::int",
    "backoff_initial": ", backoff_initial => %s::real",
    "backoff_factor": ", backoff_factor => %s::real",
    "backoff_max": ", backoff_max => %s::real",
    "backoff_jitter": ", backoff_jitter => %s::real",
    "deadline": ", deadline => %s::float8",
    "trace": ", trace => %s::text",
}


def _options(policy: KindPolicy | None, **more: Any) -> tuple[LiteralString, list[Any]]:
    """Name only what is given: each parameter costs the driver and the server a microsecond."""
    given = {} if policy is None else policy._asdict()
    given |= {name: value for name, value in more.items() if value is not None}
    names = [name for name in _OPTIONS if given.get(name) is not None]
    return "".join(_OPTIONS[name] for name in names), [given[name] for name in names]


def enqueue(
    kind: str,
    encoded: str,
    key: str | None,
    policy: KindPolicy | None,
    *,
    at: datetime | None = None,
    delay: float | None = None,
    priority: int | None = None,
    trace: str | None = None,
) -> Query:
    """Rows: id, outcome, stored input of a conflict. For any driver: plain parameters.

    Args:
        policy: what the kind's declaration says; None: what its workers have declared.
    """
    options, values = _options(policy, at=at, delay=delay, priority=priority, trace=trace)
    return Query(
        "select id::text, outcome, stored_input::text from leasetask.try_enqueue("
        "%s::text, %s::text::jsonb, %s::text" + options + ")",
        [kind, encoded, key, *values],
    )


def enqueue_many(
    kind: str,
    encoded: Sequence[str],
    keys: Sequence[str | None],
    policy: KindPolicy | None,
    *,
    at: datetime | None = None,
    delay: float | None = None,
    priority: int | None = None,
    trace: str | None = None,
) -> Query:
    """Rows, one for each: as `enqueue`."""
    options, values = _options(policy, at=at, delay=delay, priority=priority, trace=trace)
    if any(key is not None for key in keys):
        options = ", keys => " + _TEXT_ARRAY + options
        values = [msgspec.json.encode(keys).decode(), *values]
    return Query(
        "select id::text, outcome, stored_input::text from leasetask.enqueue_many(%s::text, "
        + _JSONB_ARRAY
        + options
        + ") order by ord",
        [kind, _json_array(encoded), *values],
    )


def numbered(sql: str) -> str:
    """Return a statement with $1, $2, … in place of %s, as asyncpg and others take it."""
    parts = sql.split("%s")
    return "".join(f"{part}${i}" for i, part in enumerate(parts[:-1], 1)) + parts[-1]


def kind_is_declared(kind: str) -> Query:
    """Rows: whether a worker has ever declared it."""
    return Query("select exists (select from leasetask.kind where kind = %s)", (kind,))


def signal(topic: str, payload: str | None, sticky: bool) -> Query:
    """Rows: the signal's id."""
    return Query("select leasetask.signal(%s, %s::jsonb, %s)", (topic, payload, sticky))


def signal_now(topic: str, payload: str | None, sticky: bool) -> Query:
    """Rows: the signal's id, and how many waiters it woke at once; `deliver` comes next."""
    return Query(
        "select id, woken from leasetask.signal_now(%s, %s::jsonb, %s)", (topic, payload, sticky)
    )


PAUSE = Query("select pg_sleep(0.01)")


def is_consumed(signal_id: int) -> Query:
    """Rows: whether a task has consumed the signal."""
    return Query(
        "select exists (select from leasetask.task_signal where id = %s and consumed_by is not null)",
        (signal_id,),
    )


def clear_signal(topic: str) -> Query:
    """Rows: whether there was a latch."""
    return Query("select leasetask.clear_signal(%s)", (topic,))


def cancel(task_id: str, reason: str | None) -> Query:
    """Rows: canceled, compensating, requested or finished."""
    return Query("select leasetask.cancel(%s::uuid, %s)", (task_id, reason))


def retry(task_id: str) -> Query:
    """No rows."""
    return Query("select leasetask.retry(%s::uuid)", (task_id,))


def resolve(task_id: str, step: str, done: str | None) -> Query:
    """No rows. `done`: the effect's result as JSON; None: do it again."""
    return Query("select leasetask.resolve(%s::uuid, %s, %s::text::jsonb)", (task_id, step, done))


# What a running task does, as its worker's last heartbeat told; not what has been recorded since.
_TOLD: LiteralString = """
left join lateral (
  select p.step, to_timestamp((t.progress ->> 'since')::float8) as since
  from (select t.progress ->> 'step') as p (step)
  where t.status = 'running' and leasetask.recorded_steps(t.id, array[p.step]) = '{}') told on true"""

# What the handler itself says.
_PROGRESS: LiteralString = (
    "case when t.progress ? 'fraction' then t.progress - array['step', 'since'] end"
)

_STEP: LiteralString = (
    "coalesce(t.wait_name, told.step, (select o.key from jsonb_each(t.open_steps) o limit 1))"
)

_VIEW: LiteralString = f"""
select t.id::text, t.kind, t.handler_version, t.idempotency_key, t.status, t.priority, t.attempts,
  t.max_attempts, t.runs, t.input, t.result, t.last_error,
  array(select r.key from jsonb_each(leasetask.recorded_steps(t.id)) r
        order by (r.value ->> 'n')::int) as steps,
  {_STEP} as current_step, told.since, {_PROGRESS}, t.wait_topic,
  case when t.next_run_at < 'infinity' then {_readable_time("t.next_run_at")} end as next_run_at,
  t.lease_owner, t.lease_until, {_readable_time("t.deadline")}, t.cancel_requested_at,
  t.cancel_reason, t.created_at, t.updated_at, t.finished_at
from leasetask.task t {_TOLD} where t.id = %s::uuid"""


def get(task_id: str) -> Query:
    """Rows: what `task_view` reads."""
    return Query(_VIEW, (task_id,))


_HISTORY: LiteralString = """
select t.id::text, t.kind, t.handler_version, t.idempotency_key, t.status, t.input,
  leasetask.recorded_steps(t.id), t.open_steps, t.compensating,
  case when t.wait_mode in ('sleep', 'signal') then t.wait_name end
from leasetask.task t"""


def history(task_id: str) -> Query:
    """Rows: what `History` takes."""
    return Query(_HISTORY + " where t.id = %s::uuid", (task_id,))


def unfinished_histories(statuses: Sequence[str], after: str | None, n: int) -> Query:
    """Rows: what `History` takes, of tasks in these states, a page by id."""
    return Query(
        _HISTORY
        + " where t.status = any (%s::text[]) and (%s::uuid is null or t.id > %s::uuid)"
        + " order by t.id limit %s",
        (list(statuses), after, after, n),
    )


def steps(task_id: str) -> Query:
    """Rows: one: records by name, open steps, waiting since and until, when it was pruned, now."""
    return Query(
        "select leasetask.recorded_steps(t.id), t.open_steps, t.waiting_since, "
        + _readable_time("t.wait_until")
        + ", t.pruned_at, leasetask.clock() from leasetask.task t where t.id = %s::uuid",
        (task_id,),
    )


class ConsumedSignal(NamedTuple):
    """A row of `signals`."""

    id: int
    topic: str
    payload: Any
    sent_at: datetime
    consumed_at: datetime | None


def signals(ids: Sequence[int]) -> Query:
    """Rows: `ConsumedSignal`, of those that have not been pruned."""
    return Query(
        "select id, topic, payload, created_at, consumed_at from leasetask.task_signal "
        "where id = any (%s::bigint[]) order by id",
        (list(ids),),
    )


def task_view(row: Sequence[Any]) -> TaskView:
    """Read a row of `get`."""
    return TaskView(*row)


# --- workers ------------------------------------------------------------------------------


def declare_kinds(policies: Sequence[KindPolicy]) -> Query:
    """No rows."""
    columns = [list(column) for column in zip(*policies, strict=True)]
    return Query(
        "select leasetask.declare_kinds(%s::text[], %s::int[], %s::smallint[], %s::int[], "
        "%s::real[], %s::real[], %s::real[], %s::real[], %s::float8[])",
        columns,
    )


_CLAIM: LiteralString = f"""
select id::text, kind, handler_version, idempotency_key, input::text, state::text, open_steps::text,
  stored_steps, attempts, max_attempts, runs, lease_token::text, priority,
  {_readable_time("next_run_at")}, created_at, {_readable_time("deadline")}, claimed_at,
  cancel_requested, compensating, last_error, trace
from leasetask.claim(%s, %s::text[], %s::int[], %s, make_interval(secs => %s), %s"""
_CLAIM_HEADS: LiteralString = _CLAIM + ")"
_CLAIM_LANES: LiteralString = _CLAIM + ", %s::smallint[], %s::timestamptz[])"


def claim(
    owner: str, pairs: Sequence[tuple[str, int]], n: int, lease: float, *, suspects: bool = False
) -> Query:
    """Rows: what `claimed` reads; a last one with a null id tells when the next task is due."""
    kinds, versions = [k for k, _ in pairs], [v for _, v in pairs]
    return Query(_CLAIM_HEADS, (owner, kinds, versions, n, lease, suspects))


def claim_lanes(owner: str, lanes: Sequence[Lane], n: int, lease: float) -> Query:
    """Rows: what `claimed` reads."""
    kinds, versions, priorities, sinces = (list(column) for column in zip(*lanes, strict=True))
    return Query(_CLAIM_LANES, (owner, kinds, versions, n, lease, False, priorities, sinces))


def claimed(row: Sequence[Any]) -> Claimed:
    """Read a row of `claim`."""
    id_, kind, version, key, input_, state, open_steps, *rest = row
    return Claimed(
        id_, kind, version, key, decode_stored(input_), _records(state), _records(open_steps), *rest
    )


def _records(text: str) -> Any:
    return {} if text == "{}" else decode_stored(text)


def seconds_until_due(row: Sequence[Any]) -> float:
    """Read the last row of `claim`, by the server's clock alone."""
    due, now = row[13], row[16]
    return max(0.0, float((due - now).total_seconds()))


def stored_steps(task_id: str) -> Query:
    """Rows: all records of a task, by step name."""
    return Query("select leasetask.recorded_steps(%s::uuid)", (task_id,))


def heartbeat(
    ids: Sequence[str], tokens: Sequence[str], lease: float, progress: Sequence[str | None]
) -> Query:
    """Rows: ord, answer, cancel_requested."""
    return Query(
        "select ord, answer, cancel_requested from leasetask.heartbeat("
        "%s::uuid[], %s::uuid[], make_interval(secs => %s), %s::text[]::jsonb[])",
        (_uuid_array(ids), _uuid_array(tokens), lease, list(progress)),
    )


_CHECKPOINT: LiteralString = (
    "select ord, answer, cancel_requested, recorded::text from leasetask.checkpoint("
)


def checkpoint(items: Sequence[Item[Checkpoint]], lease: float) -> Query:
    """Rows: ord, answer, cancel_requested, recorded."""
    patches = [
        "{" + ",".join(f"{_json(name)}:{record}" for name, record in i.body.records.items()) + "}"
        for i in items
    ]
    if len(items) == 1:  # arrays cost a lone step a twentieth of its time
        item = items[0]
        return Query(
            _CHECKPOINT + "array[%s::uuid], array[%s::uuid], array[%s::text::jsonb], "
            "make_interval(secs => %s), array[%s::int])",
            (item.id, item.token, patches[0], lease, item.body.compensations),
        )
    return Query(
        _CHECKPOINT
        + "%s::uuid[], %s::uuid[], "
        + _JSONB_ARRAY
        + ", make_interval(secs => %s), %s::int[])",
        (
            _ids(items),
            _tokens(items),
            _json_array(patches),
            lease,
            [i.body.compensations for i in items],
        ),
    )


def open_fenced(task_id: str, token: str, lease: float, *, lock: bool) -> Query:
    """Rows: not to be read. The first statement of a business transaction.

    `lock`: take the task's row now; raises lock_not_available, or LT005 for a lost lease.
    """
    return Query(
        "select leasetask.open_fenced(%s::uuid, %s::uuid, make_interval(secs => %s), %s)",
        (task_id, token, lease, lock),
    )


def note(items: Sequence[Item[Note]], lease: float) -> Query:
    """Rows: ord, answer, cancel_requested."""
    return Query(
        "select ord, answer, cancel_requested from leasetask.note("
        "%s::uuid[], %s::uuid[], %s::text[]::jsonb[], make_interval(secs => %s), %s::int[])",
        (
            _ids(items),
            _tokens(items),
            [_json(i.body.notes) for i in items],
            lease,
            [i.body.compensations for i in items],
        ),
    )


def finish(items: Sequence[Item[Finish]], *, fenced: bool = False) -> Query:
    """Rows: ord, answer, status. `fenced`: inside a business transaction."""
    return Query(
        "select ord, answer, status from leasetask.finish("
        "%s::uuid[], %s::uuid[], " + _JSONB_ARRAY + ", %s)",
        (_ids(items), _tokens(items), _json_array(i.body.result for i in items), fenced),
    )


def suspend(items: Sequence[Item[Suspend]], now: float) -> Query:
    """Rows: ord, answer, status. `now`: the local monotonic time that `Wait.until` counts in."""
    waits = [i.body.wait for i in items]
    return Query(
        "select ord, answer, status from leasetask.suspend(%s::uuid[], %s::uuid[], %s::text[], "
        "%s::text[], %s::int[], %s::text[], %s::float8[], null, %s::text[]::pg_snapshot[], "
        "%s::text[]::jsonb[])",
        (
            _ids(items),
            _tokens(items),
            [w.mode for w in waits],
            [w.name for w in waits],
            [w.seq for w in waits],
            [w.topic for w in waits],
            [None if w.until is None else max(0.0, w.until - now) for w in waits],
            [w.snapshot for w in waits],
            [_json(i.body.notes) for i in items],
        ),
    )


def release(items: Sequence[Item[Release]]) -> Query:
    """Rows: ord, answer, status."""
    return Query(
        "select ord, answer, status from leasetask.release("
        "%s::uuid[], %s::uuid[], %s::float8[], %s::text[]::jsonb[], %s::text[]::jsonb[])",
        (
            _ids(items),
            _tokens(items),
            [i.body.delay for i in items],
            [_json(i.body.notes) for i in items],
            [_json(i.body.error) for i in items],
        ),
    )


def fail(items: Sequence[Item[Fail]]) -> Query:
    """Rows: ord, answer, status."""
    return Query(
        "select ord, answer, status from leasetask.fail("
        "%s::uuid[], %s::uuid[], %s::text[]::jsonb[], %s::bool[], %s::bool[])",
        (
            _ids(items),
            _tokens(items),
            [_json(i.body.error) for i in items],
            [i.body.retryable for i in items],
            [i.body.outright for i in items],
        ),
    )


def abandon(items: Sequence[Item[None]], seconds: float) -> Query:
    """Rows: ord, answer."""
    return Query(
        "select ord, answer from leasetask.abandon(%s::uuid[], %s::uuid[], %s::float8)",
        (_ids(items), _tokens(items), seconds),
    )


def ack(row: Sequence[Any]) -> Ack:
    """Read a row of checkpoint, note or heartbeat; of finish inside a business transaction too."""
    recorded = row[3] if len(row) > 3 else None
    return Ack(
        row[1],
        cancel_requested=row[2] is True,
        recorded=None if recorded is None else msgspec.json.decode(recorded),
    )


def end_ack(row: Sequence[Any]) -> Ack:
    """Read a row of a call that ends a run."""
    return Ack(row[1], status=row[2] if len(row) > 2 else None)


SNAPSHOT = Query("select pg_current_snapshot()::text")


# --- maintenance --------------------------------------------------------------------------


def set_idle(owner: str, idle: bool) -> Query:
    """No rows."""
    return Query("select leasetask.set_idle(%s, %s)", (owner, idle))


def sweep(n: int) -> Query:
    """Rows: what `swept` reads."""
    return Query("select id::text, kind, outcome, error from leasetask.sweep(%s)", (n,))


def swept(row: Sequence[Any]) -> Swept:
    """Read a row of `sweep`."""
    return Swept(*row)


def suspects(pairs: Sequence[tuple[str, int]]) -> Query:
    """Rows: whether a suspect of these kinds waits to be run alone."""
    return Query(
        "select exists (select from leasetask.lanes(%s::text[], %s::int[], true))",
        ([k for k, _ in pairs], [v for _, v in pairs]),
    )


MOST_TOPICS = 100
UNDELIVERED = Query("select leasetask.undelivered_topics(%s)", (MOST_TOPICS,))


def deliver(topics: Sequence[str]) -> Query:
    """Rows: topic, woken, again."""
    return Query("select topic, woken, again from leasetask.deliver(%s::text[])", (list(topics),))


def prune(age: float, signal_age: float, forget_keys: bool, n: int) -> Query:
    """Rows: how many rows were touched."""
    return Query(
        "select leasetask.prune(make_interval(secs => %s), make_interval(secs => %s), %s, %s)",
        (age, signal_age, forget_keys, n),
    )


# --- operators ----------------------------------------------------------------------------


class KindStats(NamedTuple):
    """A row of `stats`; times in seconds, counts cut at the query's limit."""

    kind: str
    version: int
    declared_ago: float | None
    paused: bool | None
    ready: int
    suspects: int
    later: int
    waiting: int
    running: int
    oldest_ready: float | None
    succeeded: int
    failed: int
    wait_p50: float | None
    wait_p95: float | None
    run_p50: float | None
    run_p95: float | None


class Listed(NamedTuple):
    """A row of `list`; times in seconds."""

    id: str
    kind: str
    version: int
    key: str
    status: str
    priority: int
    attempts: int
    max_attempts: int
    due_in: float | None
    age: float
    note: str | None


class Running(NamedTuple):
    """A row of `running`; times in seconds."""

    id: str
    kind: str
    version: int
    owner: str
    since: float
    lease_left: float
    attempts: int
    step: str | None
    step_for: float | None
    progress: dict[str, Any] | None


def stats(period: float, most: int) -> Query:
    """Rows: `KindStats`."""
    return Query(
        "select kind, version, extract(epoch from leasetask.clock() - declared_at)::float8, paused, "
        "ready, suspects, later, waiting, running, "
        "extract(epoch from leasetask.clock() - oldest_ready)::float8, succeeded, failed, "
        "wait_p50, wait_p95, run_p50, run_p95 "
        "from leasetask.stats(make_interval(secs => %s), %s)",
        (period, most),
    )


class Filters(NamedTuple):
    """What `list` may be narrowed by; `older_than` in seconds, `before` a task's id."""

    kind: str | None = None
    version: int | None = None
    statuses: tuple[str, ...] | None = None
    key: str | None = None
    topic: str | None = None
    older_than: float | None = None
    priority: int | None = None
    before: str | None = None


def list_tasks(by: Filters, n: int) -> Query:
    """Rows: `Listed`, the newest first."""
    return Query(
        "select id::text, kind, handler_version, idempotency_key, status, priority, attempts, "
        "max_attempts, case when next_run_at < 'infinity' and finished_at is null "
        "then extract(epoch from next_run_at - leasetask.clock())::float8 end, "
        "extract(epoch from leasetask.clock() - created_at)::float8, "
        "case when status in ('pending', 'failed', 'dead') then last_error ->> 'message' "
        "when status = 'waiting' then coalesce(wait_topic, wait_name) when status = 'canceled' "
        "then cancel_reason else lease_owner end "
        "from leasetask.list(%s::text, %s::int, %s::text[], %s::text, %s::text, "
        "make_interval(secs => %s::float8), %s::smallint, %s::uuid, %s::int)",
        (
            by.kind,
            by.version,
            None if by.statuses is None else list(by.statuses),
            *by[3:],
            n,
        ),
    )


def running(n: int) -> Query:
    """Rows: `Running`, the longest first."""
    return Query(
        "select t.id::text, t.kind, t.handler_version, t.lease_owner, "
        "extract(epoch from leasetask.clock() - t.claimed_at)::float8, "
        "extract(epoch from t.lease_until - leasetask.clock())::float8, t.attempts, "
        f"{_STEP}, extract(epoch from leasetask.clock() - told.since)::float8, {_PROGRESS} "
        f"from leasetask.task t {_TOLD} where t.status = 'running' order by t.claimed_at limit %s",
        (n,),
    )


def pause(kind: str, version: int | None, paused: bool) -> Query:
    """Rows: how many (kind, version) pairs there are."""
    return Query("select leasetask.pause(%s, %s::int, %s)", (kind, version, paused))


def dead_letter_ids(kind: str | None, version: int | None, n: int) -> Query:
    """Rows: ids of dead letters that can be retried, the oldest first."""
    return Query(
        "select id::text from leasetask.task where dead_letter_at is not null "
        "and compensating is null and pruned_at is null "
        "and (%s::text is null or kind = %s) and (%s::int is null or handler_version = %s) "
        "order by dead_letter_at limit %s",
        (kind, kind, version, version, n),
    )


# --- doctor: each answers a few rows, none or zero where all is well -------------------------

LONG_TRANSACTIONS = Query(
    "select pid, coalesce(application_name, ''), state, "
    "extract(epoch from clock_timestamp() - xact_start)::float8 from pg_stat_activity "
    "where xact_start < clock_timestamp() - interval '1 minute' and datname = current_database() "
    "and pid <> pg_backend_pid() order by xact_start"
)
DEAD_ROWS = Query(
    "select relname, n_live_tup, n_dead_tup, last_autovacuum from pg_stat_user_tables "
    "where schemaname = 'leasetask' and n_dead_tup > 10000 and n_dead_tup > n_live_tup"
)
AUTOVACUUM = Query("select current_setting('autovacuum')")
EXPIRED_LEASES = Query(
    "select count(*), extract(epoch from leasetask.clock() - min(lease_until))::float8 "
    "from leasetask.task where status = 'running' "
    "and lease_until < leasetask.clock() - interval '10 seconds'"
)
CONNECTIONS = Query(
    "select count(*), current_setting('max_connections')::int from pg_stat_activity"
)
DEAD_LETTERS = Query(
    "select count(*) from (select from leasetask.task where dead_letter_at is not null "
    "and pruned_at is null limit 1000) d"
)
SERVER_CLOCK = Query("select extract(epoch from clock_timestamp())::float8")
UNDELIVERED_FOR_LONG = Query(
    "select count(*) from leasetask.task_signal "
    "where undelivered and created_at < leasetask.clock() - interval '30 seconds'"
)
INDEXES = Query(
    "select c.relname, i.indisvalid from pg_index i join pg_class c on c.oid = i.indexrelid "
    "join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'leasetask'"
)
EXPECTED_INDEXES = frozenset(
    {
        "task_key_is_unique",
        "task_ready",
        "task_running",
        "task_deadline",
        "task_waiting_for_topic",
        "task_undelivered",
        "task_finished",
        "task_dead_letter",
        "signal_by_age",
        "signal_consumed",
        "signal_unconsumed",
        "signal_sticky",
        "signal_undelivered",
        "signal_of_topic",
    }
)


# --- outbox -------------------------------------------------------------------------------


def outbox_take(n: int) -> Query:
    """Rows: id, kind, key, payload of the oldest that are due, locked."""
    return Query(
        "select id, kind, idempotency_key, payload::text from outbox_event "
        "where status = 'pending' and next_attempt_at <= clock_timestamp() "
        "order by next_attempt_at, id limit %s for update skip locked",
        (n,),
    )


def outbox_settle(
    ids: Sequence[int], task_ids: Sequence[str | None], errors: Sequence[str | None]
) -> Query:
    """No rows. Without an error: dispatched."""
    return Query(
        "update outbox_event e set attempts = attempts + 1, task_id = s.task_id, error = s.error, "
        "status = case when s.error is null then 'dispatched' else 'refused' end, "
        "dispatched_at = case when s.error is null then clock_timestamp() end "
        "from unnest(%s::bigint[], %s::uuid[], %s::text[]) s (id, task_id, error) "
        "where e.id = s.id",
        (list(ids), list(task_ids), list(errors)),
    )


def outbox_prune(age: float, n: int) -> Query:
    """Rows: how many were deleted."""
    return Query(
        "with gone as (delete from outbox_event where id = any (array("
        "select id from outbox_event where status = 'dispatched' "
        "and dispatched_at < clock_timestamp() - make_interval(secs => %s) "
        "order by dispatched_at limit %s for update skip locked)) returning 1) "
        "select count(*) from gone",
        (age, n),
    )
