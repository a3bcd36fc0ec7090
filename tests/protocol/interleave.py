"""Runs two or three real connections through every order of their steps.

An actor is a list of steps on a connection of its own: each in its own transaction, or all in one
with a given isolation level that is committed or rolled back at the end. `explore` runs a program
again and again from the same beginning until every order has been seen. A step that waits for a
lock is an outcome, not a hang: its actor is set aside until somebody lets it go on.

In a *gated* copy of the schema an actor also stops between any two statements inside the functions
that it names, and, if asked, at each row that a statement looks at, after its snapshot was taken and
before it locks the row. A stop waits for an advisory lock that the explorer holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from calls import CLOCK, Session, scratch

from leasetask.testing.server import Databases

READ_COMMITTED = "read committed"
REPEATABLE_READ = "repeatable read"
SERIALIZABLE = "serializable"
ISOLATIONS = (READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE)
SERIALIZATION_FAILURE = "40001"

_POLL = 0.0004
_PATIENCE = 20.0
_TRUNCATE_EVERY = 200
_TABLES = ("task", "task_step", "task_signal")

Memory = dict[str, Any]
Step = Callable[[Session, Memory], Any]


@dataclass(frozen=True)
class Actor:
    """One connection's part of a program.

    Attributes:
        isolation: of the one transaction around all steps; None: each step commits by itself.
        commits: whether that transaction is committed or rolled back; if not, `steps` have no effect.
        at: where this actor's clock stands, in seconds.
        gates: functions that stop between their statements; in a gated database only.
        rows: stop at each row of task and task_signal that is looked at, too.
    """

    name: str
    steps: tuple[Step, ...]
    isolation: str | None = None
    commits: bool = True
    at: float = 0
    gates: tuple[str, ...] = ()
    rows: bool = False


@dataclass
class Outcome:
    """What came of an actor."""

    results: list[Any] = field(default_factory=list)
    error: str | None = None
    """SQLSTATE of what ended it."""
    blocked: int = 0
    """How often a step of it had to wait."""
    committed: bool = False


@dataclass(frozen=True)
class Run:
    """One order, run to the end."""

    session: Session
    memory: Memory
    outcomes: dict[str, Outcome]
    order: list[str]

    def committed(self, name: str) -> bool:
        """Whether an actor's work is there."""
        return self.outcomes[name].committed

    def result(self, name: str, step: int = 0) -> Any:
        """What a step of an actor answered; None if it never came to it."""
        results = self.outcomes[name].results
        return results[step] if step < len(results) else None


@dataclass(frozen=True)
class Program:
    """What is run in every order, and what must hold after each.

    Attributes:
        prepare: makes the state that every run begins with; what it returns, the steps are handed.
        check: fails if something does not hold; called once everybody is through.
        allowed: the SQLSTATEs that a caller may get.
    """

    name: str
    actors: tuple[Actor, ...]
    prepare: Callable[[Session], Memory]
    check: Callable[[Run], None]
    allowed: frozenset[str] = frozenset()


class ScheduleFailed(AssertionError):
    """Something did not hold after one order of the steps."""


class Deadlock(AssertionError):
    """Every actor waits for another, and the server does not end it."""


class RolledBack(Exception):
    """Raised by a step to give its transaction up, as a program does that was refused."""


_IDLE, _BUSY, _BLOCKED, _GATE, _DONE = "idle", "busy", "blocked", "gate", "done"


class _Player:
    """An actor on its connection, in its thread."""

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self.session = session
        self.thread = ThreadPoolExecutor(max_workers=1)
        session.do("set deadlock_timeout = '20ms'")
        session.do("set plan_cache_mode = force_generic_plan")

    def start(self, actor: Actor, memory: Memory) -> None:
        self.actor = actor
        self.outcome = Outcome()
        self.state = _IDLE
        self.future: Future[None] | None = None
        self.gates = 0
        self._steps = self._play(memory)
        self.session.at(actor.at)
        if actor.gates:
            places = " ".join(actor.gates + ("row",) * actor.rows)
            self.session.do(
                "select set_config('gate.actor', %s, false), set_config('gate.places', %s, false),"
                " setval('gate.place_' || %s, 1, false)",
                str(self.number),
                places,
                self.number,
            )
            if actor.rows:
                self.session.do("set role leasetask_gated")

    def stop(self) -> None:
        if self.actor.gates:
            self.session.do(
                "reset role; select set_config('gate.actor', '', false), pg_advisory_unlock_all()"
            )

    def submit(self) -> None:
        self.state = _BUSY
        self.future = self.thread.submit(lambda: next(self._steps, None))  # type: ignore[arg-type]

    def collect(self) -> None:
        """Take the result of a step that has ended."""
        assert self.future is not None
        more = self.future.result()
        self.future = None
        self.state = _IDLE if more else _DONE

    def _play(self, memory: Memory) -> Iterator[bool]:
        """Do a step each time it is asked, and tell whether there is another."""
        try:
            yield from self._transaction(memory) if self.actor.isolation else self._alone(memory)
        except RolledBack:
            self.outcome.committed = False
            self.session.do("rollback")
            yield False
        except psycopg.Error as error:
            self.outcome.error = error.sqlstate or "?"
            self.outcome.committed = False
            self.session.do("rollback")
            yield False

    def _alone(self, memory: Memory) -> Iterator[bool]:
        for left, step in zip(
            range(len(self.actor.steps) - 1, -1, -1), self.actor.steps, strict=True
        ):
            self.outcome.results.append(step(self.session, memory))
            self.outcome.committed = True
            yield left > 0

    def _transaction(self, memory: Memory) -> Iterator[bool]:
        assert self.actor.isolation
        self.session.do(f"begin isolation level {self.actor.isolation}")
        for step in self.actor.steps:
            self.outcome.results.append(step(self.session, memory))
            yield True
        self.session.do("commit" if self.actor.commits else "rollback")
        self.outcome.committed = self.actor.commits
        yield False


class Explorer:
    """Connections to a scratch database on which programs are explored."""

    def __init__(self, dsn: str) -> None:
        self.session = scratch(dsn)
        self._gates = psycopg.connect(dsn, autocommit=True)
        self._dsn = dsn
        self._players: list[_Player] = []
        self._runs = 0
        # Neither a vacuum's locks nor new statistics may make one run differ from the next.
        for table in _TABLES:
            self.session.do(f"alter table leasetask.{table} set (autovacuum_enabled = off)")

    def close(self) -> None:
        """Close the connections."""
        self._dismiss()
        self.session.conn.close()
        self._gates.close()

    def _dismiss(self) -> None:
        """Let the actors' connections go, whatever they are waiting for."""
        for player in self._players:
            self._gates.execute("select pg_terminate_backend(%s)", [player.session.pid])
            player.thread.shutdown()
            player.session.conn.close()
        self._players = []

    def _cast(self, actors: Sequence[Actor]) -> list[_Player]:
        while len(self._players) < len(actors):
            self._players.append(_Player(len(self._players) + 1, scratch(self._dsn)))
        return self._players[: len(actors)]

    def explore(self, program: Program, limit: int | None = None) -> int:
        """Run every order of a program's steps and check each; return how many there were.

        Args:
            limit: stop after so many.

        Raises:
            ScheduleFailed: one did not hold; the message tells the order.
        """
        self._truncate()
        self.session.clear()
        self.session.at(0)
        memory = program.prepare(self.session)
        self.session.save()
        choices: list[int] = []
        for count in itertools.count(1):
            try:
                trace = self._run(program, dict(memory), choices)
            except BaseException:
                self._dismiss()
                raise
            while trace and trace[-1][0] == trace[-1][1][-1]:
                trace.pop()
            if not trace or count == limit:
                return count
            choices = [choice for choice, _ in trace]
            enabled = trace[-1][1]
            choices[-1] = enabled[enabled.index(choices[-1]) + 1]
        raise AssertionError("unreachable")

    def _truncate(self) -> None:
        self.session.do(f"truncate {', '.join(f'leasetask.{table}' for table in _TABLES)}")

    def _run(
        self, program: Program, memory: Memory, choices: Sequence[int]
    ) -> list[tuple[int, list[int]]]:
        """Run one order: the given choices, then always the first. Return what could be chosen."""
        self._runs += 1
        if self._runs % _TRUNCATE_EVERY == 0:
            self._truncate()
        self.session.restore()
        players = self._cast(program.actors)
        for player, actor in zip(players, program.actors, strict=True):
            player.start(actor, memory)
            if actor.gates:
                self._gates.execute("select pg_advisory_lock(%s, 1)", [player.number])
        trace: list[tuple[int, list[int]]] = []
        order: list[str] = []
        try:
            while any(p.state != _DONE for p in players):
                enabled = [i for i, p in enumerate(players) if p.state in (_IDLE, _GATE)]
                if not enabled:
                    self._break_deadlock(players)
                    order.append("(deadlock)")
                    continue
                choice = choices[len(trace)] if len(trace) < len(choices) else enabled[0]
                assert choice in enabled, f"{program.name}: the order {order} is not deterministic"
                trace.append((choice, enabled))
                self._step(players[choice])
                self._settle(players)
                order.append(self._told(players[choice]))
            for player in players:
                player.stop()
            outcomes = {p.actor.name: p.outcome for p in players}
            self._judge(program, Run(self.session, memory, outcomes, order))
        finally:
            self._gates.execute("select pg_advisory_unlock_all()")
        return trace

    def _judge(self, program: Program, run: Run) -> None:
        try:
            for name, outcome in run.outcomes.items():
                if outcome.error is not None and outcome.error not in program.allowed:
                    raise AssertionError(f"{name} got {outcome.error}")
            program.check(run)
        except AssertionError as error:
            outcomes = "; ".join(f"{name}: {o}" for name, o in run.outcomes.items())
            raise ScheduleFailed(
                f"{program.name}: {error}\nafter {' '.join(run.order)}\nwith {outcomes}"
            ) from error

    @staticmethod
    def _told(player: _Player) -> str:
        mark = {_BLOCKED: "(waits)", _GATE: f"@{player.gates}", _DONE: "."}.get(player.state, "")
        return player.actor.name + mark

    def _step(self, player: _Player) -> None:
        if player.state == _GATE:
            player.state = _BUSY
            self._gates.execute(
                "select pg_advisory_lock(%(n)s, %(gate)s + 1), pg_advisory_unlock(%(n)s, %(gate)s)",
                {"n": player.number, "gate": player.gates},
            )
        else:
            player.submit()

    def _settle(self, players: list[_Player]) -> None:
        """Wait until every actor has ended its step, or waits for a lock or at a gate."""
        for _ in range(int(_PATIENCE / _POLL)):
            busy = {p.session.pid: p for p in players if p.future is not None}
            if not busy:
                return
            wait([p.future for p in busy.values() if p.future], _POLL, "FIRST_COMPLETED")
            if not self._collect(busy.values()):
                waiting = dict(
                    self._gates.execute(
                        "select pid, bool_or(locktype = 'advisory' and objsubid = 2)"
                        " from pg_locks where not granted and pid = any (%s) group by pid",
                        [list(busy)],
                    ).fetchall()
                )
                if len(waiting) == len(busy) and not self._collect(busy.values()):
                    for pid, player in busy.items():
                        self._set_waiting(player, at_gate=waiting[pid])
                    return
        raise AssertionError("a step neither ended nor waits for a lock")

    @staticmethod
    def _collect(players: Any) -> bool:
        """Take the results of the steps that have ended."""
        done = [p for p in players if p.future is not None and p.future.done()]
        for player in done:
            player.collect()
        return bool(done)

    @staticmethod
    def _set_waiting(player: _Player, *, at_gate: bool) -> None:
        if player.state == _BUSY:
            player.gates += at_gate
            player.outcome.blocked += not at_gate
        elif player.state == _BLOCKED:
            player.gates += at_gate
        player.state = _GATE if at_gate else _BLOCKED

    def _break_deadlock(self, players: list[_Player]) -> None:
        """Let the server find the deadlock and end one of its transactions."""
        futures = [p.future for p in players if p.future is not None]
        done, _ = wait(futures, _PATIENCE, "FIRST_COMPLETED")
        if not done:
            raise Deadlock("everybody waits, and the server sees no deadlock")
        self._settle(players)


# --- a copy of the schema with gates -----------------------------------------------------------

_GATES = """
create schema gate;
create sequence gate.place_1; create sequence gate.place_2; create sequence gate.place_3;

create function gate.stop(place text) returns boolean language plpgsql as $$
declare
  actor int := nullif(current_setting('gate.actor', true), '')::int;
begin
  if actor is not null
     and place = any (string_to_array(current_setting('gate.places'), ' ')) then
    perform pg_advisory_lock_shared(actor, nextval('gate.place_' || actor)::int);
  end if;
  return true;
end $$;
"""

_ROLE = """
do $$ begin
  create role leasetask_gated;
exception when duplicate_object or unique_violation then null;
end $$;
"""

_ROWS = """
grant usage on schema leasetask, gate to leasetask_gated;
grant all on all tables in schema leasetask to leasetask_gated;
grant all on all sequences in schema leasetask, gate to leasetask_gated;
alter table leasetask.task enable row level security;
alter table leasetask.task_signal enable row level security;
create policy looked_at on leasetask.task using (gate.stop('row')) with check (true);
create policy looked_at on leasetask.task_signal using (gate.stop('row')) with check (true);
"""

_REVOKED = "revoke all on all functions in schema leasetask from public;"
_FUNCTION = re.compile(
    r"create or replace function leasetask\.(\w+)\((.*?)\n(begin\n.*?\n)end \$\$;", re.S
)
_OPENS = re.compile(r"(^|\s)(begin|loop|then|else)$")
_CLOSES = re.compile(r"\s*(end\b|else\b|elsif\b|exception\b|when\b)")


def gated(script: str) -> str:
    """Return a copy of schema.sql with a stop before every statement of its volatile functions.

    An `assert` leaves `found` and the row count as they are. Functions run as their caller there, for
    whom row security looks at each row.
    """
    as_caller = script.replace(" security definer", "").replace(_REVOKED, "")
    assert as_caller.count(_REVOKED) == 0 < script.count(_REVOKED)
    return _FUNCTION.sub(_with_stops, as_caller)


def _with_stops(function: re.Match[str]) -> str:
    name, head, body = function.groups()
    if re.search(r"language plpgsql stable", head):
        return function[0]
    lines: list[str] = []
    boundary = False
    for line in body.splitlines():
        code = line.split("--")[0].rstrip()
        if boundary and code and not _CLOSES.match(code):
            lines.append(f"{' ' * (len(code) - len(code.lstrip()))}assert gate.stop('{name}');")
        if code:
            boundary = code.endswith(";") or (bool(_OPENS.search(code)) and not _in_case(code))
        lines.append(line)
    return f"create or replace function leasetask.{name}({head}\n" + "\n".join(lines) + "\nend $$;"


def _in_case(code: str) -> bool:
    """Whether a line that ends in `then` or `else` belongs to an SQL `case`."""
    return bool(re.search(r"\bcase\b", code)) or code.startswith("    " * 3)


@contextmanager
def gated_database(databases: Databases, script: str) -> Iterator[str]:
    """Give the DSN of a database with the gated copy of a schema, and the role that stops at rows."""
    with databases.fresh(migrated=False) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_GATES)
            conn.execute(gated(script).encode())
            conn.execute(CLOCK)
            conn.execute(_ROLE)
            conn.execute(_ROWS)
        yield dsn
