"""The fuzz target: everything that takes data from outside, with values by seed.

    make fuzz                        a million inputs
    make fuzz INPUTS=50000 SEED=7    fewer, or a failing seed once more

Every refusal must be one of leasetask's errors (or, from SQL, one of its SQLSTATEs or PostgreSQL's for bad
data); what is taken must be there exactly, and what is refused must leave nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from support import wait_for_end
from values import Values

from leasetask import App, Context, LeaseTaskError, Retry, cli, outbox, payload
from leasetask.payload import encode
from leasetask.testing.server import shared_databases

REFUSALS = ("LT", "22", "23502", "23514", "42804", "42846", "54", "0A")
"""SQLSTATEs, or their beginnings, of a refusal: ours, bad data, a constraint, wrong types, too large."""


class Wrong(AssertionError):
    """Something got out, or stayed behind, that must not."""


class Fuzz:
    """The targets, on one database."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.values = Values(seed)
        self.rng = random.Random(seed + 1)
        self.dsn = dsn
        self.db = psycopg.connect(dsn, autocommit=True)
        self.app = App(dsn)
        self.counts: Counter[str] = Counter()
        self._drawn: dict[int, Any] = {}
        app, drawn, values, once = self.app, self._drawn, self.values, Retry(max_attempts=1)

        @app.task(retry=once)
        def returns(ctx: Context, number: int) -> Any:
            return drawn[number]

        @app.task(retry=once)
        def steps(ctx: Context, number: int) -> None:
            ctx.progress(0.5, values.text())
            ctx.step(values.text() or "s", lambda: drawn[number])

        @app.task(retry=once)
        def raises(ctx: Context, number: int) -> None:
            raise values.error()

    def close(self) -> None:
        self.app.close()
        self.db.close()

    def run(self, inputs: int) -> None:
        """Offer so many inputs, by turns to each target."""
        targets: list[tuple[Callable[[], int], float]] = [
            (self.payloads, 0.86),
            (self.enqueues, 0.04),
            (self.many, 0.03),
            (self.signals, 0.02),
            (self.sql_functions, 0.02),
            (self.command, 0.01),
            (self.handlers, 0.01),
            (self.outbox_rows, 0.01),
        ]
        total = 0
        while total < inputs:
            for target, share in targets:
                wanted = share * (total + 1000)
                while self.counts[target.__name__] < wanted:
                    made = target()
                    self.counts[target.__name__] += made
                    total += made
            self.check_nothing_half_written()

    # --- targets: each returns how many inputs it has offered ------------------------------------

    def payloads(self) -> int:
        """What `encode` takes jsonb takes, and gives back as the first run saw it."""
        taken = []
        for _ in range(1000):
            value = self.values.anything()
            with self._refused_properly(lambda value=value: f"encode {_shown(value)}"):
                taken.append(encode(value, what="it"))
        rows = self.db.execute(
            "select e::jsonb::text from json_array_elements(%s::json) e", [f"[{','.join(taken)}]"]
        ).fetchall()
        for text, (stored,) in zip(taken, rows, strict=True):
            if payload.decode(text, what="it") != payload.decode(stored, what="it"):
                raise Wrong(f"{text[:200]} came back as {stored[:200]}")
        return 1000

    def enqueues(self) -> int:
        """One task, with random input, key, kind and times."""
        kind = self.values.text() if self.rng.random() < 0.3 else "returns"
        value = self.values.anything()
        options = self._when()
        if self.rng.random() < 0.5:
            options["key"] = (
                self.values.text() if self.rng.random() < 0.9 else self.values.anything()
            )
        with self._refused_properly(lambda: f"enqueue {kind!r} {_shown(value)} {options}"):
            made = self.app.enqueue(kind, value, **options)
            row = self.db.execute("select input::text from leasetask.task where id = %s", [made.id])
            ((stored,),) = row.fetchall()
            if payload.decode(stored, what="it") != payload.decode(
                encode(value, what="it"), what="it"
            ):
                raise Wrong(f"{value!r} is stored as {stored[:200]}")
        return 1

    def many(self) -> int:
        """A batch: all of it or nothing."""
        inputs = [self.values.json() for _ in range(self.rng.randrange(20))]
        before = self._tasks()
        made: list[Any] | None = None
        with self._refused_properly(lambda: f"enqueue_many {_shown(inputs)}"):
            made = self.app.enqueue_many("returns", inputs, **self._when())
        if self._tasks() - before != len(made or []):
            raise Wrong(f"{len(made or [])} answers, {self._tasks() - before} tasks")
        return max(1, len(inputs))

    def signals(self) -> int:
        """A signal, a latch or its end."""
        topic = self.values.text() if self.rng.random() < 0.9 else self.values.anything()
        value = self.values.anything()
        with self._refused_properly(lambda: f"signal {topic!r} {_shown(value)}"):
            if self.rng.random() < 0.1:
                self.app.clear_signal(topic)
            else:
                self.app.signal(topic, value, sticky=self.rng.random() < 0.2)
        return 1

    def sql_functions(self) -> int:
        """A function of the protocol with random arguments of its own types."""
        name, types = self.rng.choice(_functions(self.db))
        arguments = [self._literal(type_) for type_ in types]
        call = f"select * from leasetask.{name}({', '.join(arguments)})"
        try:
            self.db.execute(call.encode("utf-8", "replace"))
        except psycopg.Error as error:
            if not (error.sqlstate or "").startswith(REFUSALS):
                raise Wrong(f"{call[:500]}: {error.sqlstate} {error}") from error
        return 1

    def command(self) -> int:
        """A command line: a status from 0 to 3, and no traceback."""
        words = [self.rng.choice(_COMMANDS)]
        words += [self._word() for _ in range(self.rng.randrange(4))]
        said = io.StringIO()
        before = sys.argv
        sys.argv = ["leasetask", *words, *(["--once"] if words[0] == "top" else [])]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                cli.main()
        except SystemExit as end:
            if end.code not in (None, 0, 1, 2, 3):
                raise Wrong(f"{words}: status {end.code}: {said.getvalue()[-500:]}") from end
        except BaseException as error:
            raise Wrong(f"{words}: {error!r}") from error
        finally:
            sys.argv = before
        if "Traceback" in said.getvalue():
            raise Wrong(f"{words}: {said.getvalue()[-2000:]}")
        return 1

    def handlers(self) -> int:
        """Results of handlers and steps, progress and errors: each task ends, all others too."""
        numbers = range(len(self._drawn), len(self._drawn) + 100)
        self._drawn.update((number, self.values.anything()) for number in numbers)
        self.db.execute("truncate leasetask.task cascade")
        self.db.execute("update leasetask.kind set paused = false")  # another target's doing
        for number in numbers:
            kind = self.rng.choice(("returns", "steps", "raises"))
            self.db.execute(
                "select leasetask.try_enqueue(%s, to_jsonb(%s::int), max_attempts => 1)",
                [kind, number],
            )
        with self.app.start(concurrency=50, lease=30):
            ended = wait_for_end(self.db, 60)
        if sum(ended.values()) != len(numbers) or set(ended) - {"succeeded", "failed"}:
            raise Wrong(f"{len(numbers)} tasks came to {ended}")
        self._drawn.clear()
        return len(numbers)

    def outbox_rows(self) -> int:
        """Rows that another program wrote: each is a task, or refused with its error."""
        outbox.install(self.dsn)
        rows = 0
        for _ in range(50):
            event = (self.values.text(), self.values.text(), self.values.json())
            with contextlib.suppress(psycopg.Error, LeaseTaskError, UnicodeEncodeError, ValueError):
                self.db.execute(
                    "insert into outbox_event (kind, idempotency_key, payload) values (%s, %s, %s)",
                    [event[0], event[1], encode(event[2], what="it")],
                )
                rows += 1
        done = outbox.dispatch(self.dsn, self.dsn)
        pending = self.db.execute(
            "select count(*) from outbox_event where status = 'pending'"
        ).fetchone()
        if done.rows != rows or pending != (0,):
            raise Wrong(f"{rows} rows came to {done}, {pending} are pending")
        self.db.execute("truncate outbox_event")
        return 50

    def check_nothing_half_written(self) -> None:
        """No task but whole ones, with the time for the next round."""
        strays = """select count(*) from leasetask.task_step s
          where not exists (select from leasetask.task t where t.id = s.task_id)"""
        if self.db.execute(strays).fetchone() != (0,):
            raise Wrong("a step without a task")
        self.db.execute("truncate leasetask.task, leasetask.task_signal cascade")

    # --- drawing ----------------------------------------------------------------------------------

    def _when(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        rng = self.rng
        if rng.random() < 0.3:
            options["delay"] = rng.choice((0, -1, 1e9, 1e300, float("nan"), float("inf"), 0.5))
        if rng.random() < 0.2:
            later = timedelta(days=rng.randrange(-900, 900))
            options["at"] = rng.choice(
                (datetime.now(UTC) + later, datetime(2030, 1, 1), datetime.max)
            )  # must be refused
        if rng.random() < 0.3:
            options["priority"] = rng.choice((0, -32768, 32767, 5))
        return options

    def _literal(self, type_: str) -> str:
        text, rng = self.values.text().replace("\x00", ""), self.rng
        quoted = "'" + text.replace("'", "''") + "'"
        plain: dict[str, list[str]] = {
            "text": [quoted, "null", "'a'"],
            "jsonb": [f"to_jsonb({quoted}::text)", "null", "'{}'", "'[1]'", '\'{"a": {"n": 1}}\''],
            "uuid": ["gen_random_uuid()", "null", self._id()],
            "integer": ["0", "1", "-1", "2147483647", "null", "7"],
            "smallint": ["0::smallint", "32767::smallint", "null"],
            "bigint": ["0", "null", "9223372036854775807"],
            "boolean": ["true", "false", "null"],
            "real": ["0::real", "1::real", "'NaN'::real", "'infinity'::real", "null", "-1::real"],
            "double precision": ["0", "1", "'NaN'::float8", "'-infinity'::float8", "1e300", "null"],
            "interval": ["'1 s'", "'-1 s'", "null", "'1000000 years'", "'0'"],
            "timestamp with time zone": ["now()", "'infinity'", "'-infinity'", "null"],
            "pg_snapshot": ["pg_current_snapshot()", "null"],
        }
        if type_.endswith("[]"):
            inner = type_.removesuffix("[]")
            if rng.random() < 0.1:
                return f"null::{type_}"
            items = [self._literal(inner) for _ in range(rng.randrange(3))]
            return f"array[{', '.join(items)}]::{type_}"
        return f"{rng.choice(plain[type_])}::{type_}"

    def _id(self) -> str:
        row = self.db.execute("select id::text from leasetask.task limit 1").fetchone()
        return f"'{row[0]}'" if row else "gen_random_uuid()"

    def _word(self) -> str:
        return self.rng.choice(_WORDS) if self.rng.random() < 0.5 else self.values.argument()

    def _tasks(self) -> int:
        row = self.db.execute("select count(*) from leasetask.task").fetchone()
        assert row is not None
        return int(row[0])

    @contextlib.contextmanager
    def _refused_properly(self, what: Callable[[], str]) -> Any:
        try:
            yield
        except LeaseTaskError as error:
            if "\n" in str(error):
                raise Wrong(f"{what()}: more than a line: {error}") from error
        except Wrong:
            raise
        except BaseException as error:
            raise Wrong(f"{what()}: {error!r}") from error


_COMMANDS = (
    "enqueue", "signal", "cancel", "retry", "resolve", "show", "list", "dead-letter", "stats", "sweep",
    "prune", "pause", "resume", "export", "doctor", "migrate", "top", "nonsense",
)  # fmt: skip
_WORDS = (
    "--json", "--key", "--kind", "--reason", "--limit", "--older-than", "--all", "--dry-run", "--status",
    "returns", "-1", "--before", "--batch", "--delay", "--at", "--done", "--redo",
)  # fmt: skip


def _functions(db: psycopg.Connection[Any]) -> list[tuple[str, list[str]]]:
    rows = db.execute("""
      select proname, array(select format_type(a, null) from unnest(proargtypes) a)
      from pg_proc where pronamespace = 'leasetask'::regnamespace and prokind = 'f'
        and proname not in ('clock') order by 1""")
    return rows.fetchall()


def _shown(value: Any) -> str:
    try:
        return repr(value)[:300]
    except Exception:
        return f"a {type(value).__name__}"


def fuzz(inputs: int, seed: int) -> Counter[str]:
    """Offer so many inputs to all targets; returns how many each took."""
    with shared_databases().fresh() as dsn:
        os.environ["LEASETASK_DSN"] = dsn
        run = Fuzz(dsn, seed)
        try:
            run.run(inputs)
        except Wrong as error:
            raise Wrong(f"seed {seed}: {error}") from error.__cause__
        finally:
            run.close()
            del os.environ["LEASETASK_DSN"]
        return run.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    began = time.monotonic()
    counts = fuzz(asked.inputs, seed)
    print(
        f"seed {seed}: {sum(counts.values())} inputs in {time.monotonic() - began:.0f} s, none got out"
    )
    for target, number in counts.items():
        print(f"  {target:<14} {number}")


if __name__ == "__main__":
    main()
