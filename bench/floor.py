"""The raw floor: what the server does with leasetask's own table, indexes and row width, and no engine.

Single statements by pgbench, at 1, 10 and 50 connections; COPY by psycopg. The best is the floor.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg

from bench.lab import Case, Lab, Sample
from bench.meter import Meter
from bench.server import pgbench
from leasetask import schema

ONE = "claim one, complete one"
BATCHED = "claim 50, complete 50"
STATE_ONE = "state || patch, one"
STATE_BATCHED = "state || patch, 50"
INSERT = "insert one"
UNNEST = "insert 1,000 by unnest"
COPY = "COPY"

_INSERT = """
insert into leasetask.task (id, kind, handler_version, idempotency_key, input, next_run_at)
select {id}, 'noop', 1, {id}::text, to_jsonb(i), now() from generate_series({first}, {last}) i"""

_CLAIM = """
with due as (
  select id from leasetask.task where kind = 'noop' and handler_version = 1 and not suspect
    and priority = 0 and status in ('pending', 'waiting') and next_run_at <= now()
  order by next_run_at limit {n} for no key update skip locked),
claimed as (
  update leasetask.task set status = 'running', attempts = 1, runs = 1, claimed_at = now(),
    lease_owner = 'host.example:12345:0123abcd', lease_until = now() + interval '30 s',
    lease_token = gen_random_uuid(), updated_at = now()
  where id = any (array(select id from due)) returning id)
select coalesce(array_agg(id), '{{}}') as ids from claimed \\gset
update leasetask.task set status = 'succeeded', result = '1', finished_at = now(),
  released_token = lease_token, lease_owner = null, lease_until = null, lease_token = null,
  updated_at = now()
where id = any (:ids);
"""

# Ten steps a row, over and over, so that the row has the width of a task of ten steps.
_STATE = """
\\set step random(0, 9)
\\set first {first}
update leasetask.task set state = state || ('{{"step-' || :step || '":{{"n":' || :step || ',"ok":1}}}}')::jsonb,
  attempts = 1, lease_until = now() + interval '30 s', updated_at = now()
where id = any (array(
  select lpad(to_hex(i), 32, '0')::uuid from generate_series(:first, :first + {n} - 1) i))
  and lease_token is not null;
"""

_NUMBERED = "lpad(to_hex(i), 32, '0')::uuid"


def cases(lab: Lab) -> Iterator[Case]:
    """Give the floor's cases."""
    rows = lab.size(150_000, 60_000)
    claim = partial(_pgbench, lab, tasks=rows)
    yield _case(ONE, "tasks/s", partial(claim, _CLAIM.format(n=1), 1))
    yield _case(BATCHED, "tasks/s", partial(claim, _CLAIM.format(n=50), 50))
    one = _STATE.format(n=1, first="random(1, 2500)")
    batch = _STATE.format(n=50, first=":client_id * 50 + 1")
    yield _case(STATE_ONE, "steps/s", partial(_pgbench, lab, one, 1, running=2500))
    yield _case(STATE_BATCHED, "steps/s", partial(_pgbench, lab, batch, 50, running=2500))
    single = _INSERT.format(id="gen_random_uuid()", first=1, last=1) + ";"
    many = _INSERT.format(id="gen_random_uuid()", first=1, last=1000) + ";"
    yield _case(INSERT, "tasks/s", partial(_pgbench, lab, single, 1))
    yield _case(UNNEST, "tasks/s", partial(_pgbench, lab, many, 1000))
    yield _case(COPY, "tasks/s", partial(_copy, lab, lab.size(100_000, 30_000)))


def _case(name: str, unit: str, run: partial[Sample]) -> Case:
    return Case("floor", name, unit, run)


def _pgbench(lab: Lab, script: str, units: int, *, tasks: int = 0, running: int = 0) -> Sample:
    """Run a script at each number of connections, each on a table of its own; keep the best."""
    best = Sample(0.0)
    rates: dict[str, float] = {}
    for connections in (10,) if lab.quick else (1, 10, 50):
        sample = _at(lab, script, units, connections, tasks, running)
        rates[f"at_{connections}"] = sample.value
        best = max(best, sample, key=lambda s: s.value)
    return Sample(best.value, best.costs, rates)


def _at(lab: Lab, script: str, units: int, connections: int, tasks: int, running: int) -> Sample:
    with lab.database() as dsn, Meter(lab.server, dsn) as meter:
        schema.migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_INSERT.format(id="gen_random_uuid()", first=1, last=tasks))
            conn.execute(_INSERT.format(id=_NUMBERED, first=1, last=running))
            if running:
                conn.execute(
                    "update leasetask.task set status = 'running', lease_token = gen_random_uuid(), "
                    "lease_owner = 'host.example:12345:0123abcd', lease_until = now(), attempts = 1"
                )
            conn.execute("vacuum analyze leasetask.task")
            conn.execute("checkpoint")
        rows, began = meter.rows(), meter.read()
        transactions, seconds = _run(dsn, script, connections, lab.size(3, 1))
        ended = meter.read()
        done = max(1, transactions * units)
        if tasks:
            done = int(
                meter.value("select count(*) from leasetask.task where finished_at is not null")
            )
        costs = began.until(ended, done) | rows.until(meter.rows(), done)
        return Sample(done / seconds, costs)


def pgbench_rate(dsn: str, script: str, connections: int, seconds: int) -> float:
    """Return the transactions that pgbench makes in a second."""
    transactions, took = _run(dsn, script, connections, seconds)
    return transactions / took


def _run(dsn: str, script: str, connections: int, seconds: int) -> tuple[int, float]:
    """Return the transactions that pgbench has made, and in how many seconds."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sql"
        file.write_text(script.strip() + "\n")
        done = subprocess.run(
            [pgbench(), "-n", "-M", "prepared", "-f", file, "-c", str(connections), "-j", "1", "-T",
             str(seconds), "-h", str(parts["host"]), "-U", str(parts["user"]), str(parts["dbname"])],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    made = re.search(r"transactions actually processed: (\d+)", done.stdout)
    rate = re.search(r"tps = ([\d.]+) \(without initial", done.stdout)
    assert made and rate, done.stdout
    return int(made[1]), int(made[1]) / float(rate[1])


def _copy(lab: Lab, n: int) -> Sample:
    with lab.database() as dsn, Meter(lab.server, dsn) as meter:
        schema.migrate(dsn)
        rows, began = meter.rows(), meter.read()
        with psycopg.connect(dsn, autocommit=True) as conn:
            columns = "id, kind, handler_version, idempotency_key, input"
            ids = [f"{i:032x}" for i in range(n)]
            with conn.cursor().copy(f"copy leasetask.task ({columns}) from stdin") as copy:
                for i, id_ in enumerate(ids):
                    copy.write_row((id_, "noop", 1, id_, str(i)))
        ended = meter.read()
        costs = began.until(ended, n) | rows.until(meter.rows(), n)
        del costs["client_us"]
        return Sample(n / (ended.at - began.at), costs)
