"""An engine for tests: real protocol, real PostgreSQL, time that the test moves.

`Engine` runs what is due when it is told to, in workers whose every commit a test may stop at. The
scratch database's `leasetask.clock()` is replaced by one that can be shifted; production code has
no part in that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import psycopg

from leasetask import client, protocol
from leasetask.app import App
from leasetask.branches import task_factory
from leasetask.committer import Committer
from leasetask.connection import connect, fetch, is_disconnect
from leasetask.execution import execute
from leasetask.journal import Journal
from leasetask.link import Link
from leasetask.maintenance import SWEEP_BATCH
from leasetask.model import (
    Completed,
    Enqueued,
    Fail,
    Finish,
    Lost,
    Outcome,
    Suspend,
    Swept,
    TaskView,
)
from leasetask.run import Run
from leasetask.testing.loop import Loop, Switch, bury, switch_here
from leasetask.testing.probe import Point, Probe, Registered, Script, Watcher
from leasetask.threads import Threads
from leasetask.transactions import Isolation, Keeper

T = TypeVar("T")

LEASE = 30.0
"""Seconds, of the engine's own clock."""

_MAKE_READY = """
create table if not exists leasetask.test_clock (shift interval not null, frozen timestamptz);
create or replace function leasetask.clock() returns timestamptz language sql volatile as
  'select coalesce(frozen, clock_timestamp()) + shift from leasetask.test_clock';
create or replace function leasetask.test_reset() returns timestamptz language plpgsql as $$ begin
  delete from leasetask.task; delete from leasetask.task_signal;
  delete from leasetask.lost_owner; delete from leasetask.kind;
  update leasetask.test_clock set shift = '0', frozen = null;
  return clock_timestamp();
end $$;
delete from leasetask.test_clock; insert into leasetask.test_clock values ('0', null)
"""

_IN_TRANSACTION = """
select pid from pg_stat_activity
where datname = current_database() and state like 'idle in transaction%%' and backend_start > %s
"""

_TERMINATE = "select pg_terminate_backend(pid) from unnest(%s::int[]) pid"

_ALIVE = "select count(*) from pg_stat_activity where pid = any (%s)"


class Engine:
    """Runs an App's tasks on a scratch database, when told to and by the clock that it moves.

    While it is open, `app.dsn` is the scratch database's, so that a handler's own calls go there.

    Args:
        app: declares the tasks.
        dsn: a migrated scratch database of this engine's own.
        attach: another engine has made it ready, in another process; its clock is this one's too.
    """

    def __init__(self, app: App, dsn: str, *, attach: bool = False) -> None:
        self.app = app
        self.dsn = dsn
        self.db: psycopg.Connection[Any] = connect(dsn, name="leasetask test")
        if not attach:
            self.db.execute(_MAKE_READY)
            self.db.execute(_FORGETFUL)
        self._place = _Place(app, dsn)
        self._loop = Loop()
        self._loop.set_task_factory(task_factory)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="leasetask-test", daemon=True
        )
        self._thread.start()
        self._own: Hand | None = None
        self.threads = Threads()
        self.wire = Wire(dsn)
        self.suspects = False
        self.hands: set[Hand] = set()
        self.transactions = _Transactions(dsn, app.transactions)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what a test does ------------------------------------------------------------------------

    def enqueue(self, task: Any, input: Any = None, **options: Any) -> Enqueued:
        """Enqueue a task, as `App.enqueue`."""
        return self.app.enqueue(task, input, **{"conn": self.db, **options})

    def signal(self, topic: str, payload: Any = None, *, sticky: bool = False) -> int:
        """Send a signal and deliver it; returns how many it woke."""
        call = client.signal(topic, payload, sticky, self.app.payload_limit, True)
        return client.run(call, self._ask) or 0

    def cancel(self, task: Enqueued | str, reason: str | None = None) -> str:
        """Ask a task to stop, as `App.cancel`."""
        task_id = _id_of(task)
        return client.run(client.cancel(task_id, reason), self._ask, task_id)

    def get(self, task: Enqueued | str) -> TaskView:
        """Return what is known of a task."""
        task_id = _id_of(task)
        return client.run(client.get(task_id), self._ask, task_id)

    def result(self, task: Enqueued | str) -> Any:
        """Return a succeeded task's result.

        Raises:
            AssertionError: it has not succeeded; the message says what it does instead.
        """
        view = self.get(task)
        if view.status != "succeeded":
            error = view.last_error or {}
            told = f": {error.get('type')}: {error.get('message')}" if error else ""
            stands = f" at {view.current_step!r}" if view.current_step else ""
            raise AssertionError(f"{view.kind} {view.id} is {view.status}{stands}{told}")
        return view.result

    def advance(self, seconds: float = 0.0, *, hours: float = 0.0, days: float = 0.0) -> None:
        """Move the database's clock on; what becomes due waits for `drain`.

        Python's own clock stays: what a handler asks of `time` or `datetime` is the real time.
        """
        total = seconds + hours * 3600 + days * 86400
        self.db.execute(
            "update leasetask.test_clock set shift = shift + make_interval(secs => %s)", [total]
        )

    def freeze(self) -> None:
        """Stop the clock; `advance` still moves it."""
        self.db.execute(
            "update leasetask.test_clock set frozen = coalesce(frozen, clock_timestamp())"
        )

    def drain(self) -> int:
        """Run all that is due, and what that makes due; returns how many runs it took."""
        if self._own is None:
            self._own = self.hand("test engine")
        return self.call(self._own.drain())

    def drain_to_the_end(self, limit: int = 10_000) -> None:
        """Drain, moving the clock to whatever is due next, until nothing ever will be.

        Deadlines on the way are kept, as a worker's sweep keeps them.

        Raises:
            AssertionError: more than `limit` rounds: something waits and wakes for ever.
        """
        for _ in range(limit):
            self.drain()
            if not self.skip():
                return
            self.sweep()
        raise AssertionError(f"tasks still become due after {limit} rounds")

    def sweep(self) -> list[Swept]:
        """Recover expired leases, as a worker's sweep does."""
        swept = [protocol.swept(row) for row in self._ask(protocol.sweep(SWEEP_BATCH))]
        self.suspects |= any(one.outcome == "suspect" for one in swept)
        return swept

    def skip(self) -> bool:
        """Move the clock to when the next task is due; False if none ever is."""
        row = self.db.execute(
            "select extract(epoch from min(next_run_at) - leasetask.clock())::float8 "
            "from leasetask.task where status in ('pending', 'waiting') "
            "and next_run_at < 'infinity'"
        ).fetchone()
        if row is None or row[0] is None:
            return False
        self.advance(max(0.0, row[0]) + 0.001)
        return True

    def reset(self) -> None:
        """Forget all tasks and signals, and set the clock right."""
        self.db.execute("select leasetask.test_reset()")

    def close(self) -> None:
        """Let go of the database."""
        with suppress(FutureTimeout):  # a coroutine that blocks the loop is left where it is
            self.start(self._let_go()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._loop.is_running():
            # Workers that crashed are never unwound: asyncio would call their tasks forgotten.
            self._loop.set_exception_handler(lambda _loop, _context: None)
            self._loop.close()
        self.threads.close()
        self.wire.hang_up()
        self.db.close()
        self._place.leave()

    async def _let_go(self) -> None:
        for hand in list(self.hands):
            if hand.switch.frozen:
                hand.bury()
            else:
                await hand.retire()
        await self.transactions.close()
        await self.app.close_async()

    # --- what workers need -------------------------------------------------------------------------

    def hand(self, name: str, script: Script | None = None, probe: type[Probe] = Probe) -> Hand:
        """Return a new worker, with an identity of its own."""
        return self.call(Hand.create(self, name, script, probe))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def server_time(self) -> datetime:
        """Return the server's own time, which no test moves."""
        row = self.db.execute("select clock_timestamp()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]  # a timestamptz

    def cut_sessions(self, since: datetime) -> None:
        """End the transactions of whoever has connected since, as when a process has died."""
        self.end_sessions([row[0] for row in self.db.execute(_IN_TRANSACTION, [since])])

    def end_sessions(self, pids: list[int]) -> None:
        """End sessions of the scratch database, and wait until they have let go of their locks.

        pg_terminate_backend can wait itself, but looks only every 100 ms.
        """
        if not pids:
            return
        self.db.execute(_TERMINATE, [pids])
        while self.db.execute(_ALIVE, [pids]).fetchone() != (0,):
            time.sleep(0.001)

    @property
    def loop(self) -> Loop:
        """The event loop of all workers."""
        return self._loop

    def _ask(self, query: protocol.Query) -> list[tuple[Any, ...]]:
        return fetch(self.db, query)


_FORGETFUL = """
do $$ begin
  execute format('alter database %I set synchronous_commit = off', current_database());
end $$; set synchronous_commit = off
"""
"""A scratch database need not survive a power cut, and commits much sooner so."""


def _id_of(task: Enqueued | str) -> str:
    return task if isinstance(task, str) else task.id


class Hand:
    """One worker of a test engine: claims one task at a time and runs it to its outcome."""

    def __init__(
        self, engine: Engine, name: str, script: Script | None, probe: type[Probe]
    ) -> None:
        self.name = name
        self.switch = Switch()
        self.probe = None if script is None else probe(name, script, self.switch, engine.loop)
        self._engine = engine
        self._committer = Committer(engine.wire)
        self._runs: list[_WatchedRun] = []
        engine.hands.add(self)
        context = copy_context()
        context.run(switch_here.set, self.switch)
        self._serving = engine.loop.create_task(self._committer.serve(), context=context)

    @property
    def points(self) -> list[Point]:
        """What it has come to."""
        return [] if self.probe is None else self.probe.points

    @classmethod
    async def create(
        cls, engine: Engine, name: str, script: Script | None, probe: type[Probe]
    ) -> Hand:
        """Make one inside the engine's event loop."""
        return cls(engine, name, script, probe)

    async def drain(self) -> int:
        """Run all that is due; returns how many runs it took."""
        switch_here.set(self.switch)
        runs = 0
        while row := await self._claim():
            runs += 1
            await asyncio.get_running_loop().create_task(self.run(row))
        return runs

    def learn_of_cancel(self, task_id: str) -> None:
        """As from a heartbeat: a cancel of this task has been asked for."""
        for run in self._runs[-1:]:
            if run.claimed.id == task_id:
                run.loop.call_soon_threadsafe(run.request_cancel)

    def cut_transactions(self) -> None:
        """End the transactions that this worker has open, as the server does after a lease."""
        opened = [
            transaction.connection
            for transaction in self._engine.transactions.keeper.opened()
            if transaction.run in self._runs and transaction.connection is not None
        ]
        self._engine.end_sessions([c.info.backend_pid for c in opened if not c.closed])

    def bury(self) -> None:
        """It has died: keep it, so that nothing of it is ever unwound."""
        self._engine.hands.discard(self)
        bury(self, *self._runs)

    async def retire(self) -> None:
        """It has nothing left to do."""
        self._engine.hands.discard(self)
        self._serving.cancel()

    async def _claim(self) -> tuple[Any, ...] | None:
        await self._deliver()
        pairs = self._engine.app.registry.pairs()
        for suspects in (False, True) if self._engine.suspects else (False,):
            rows = await self._engine.wire.ask(
                protocol.claim(self.name, pairs, 1, LEASE, suspects=suspects)
            )
            if rows and rows[0][0] is not None:
                return rows[0]
        return None

    async def _deliver(self) -> None:
        topics = [row[0] for row in await self._engine.wire.ask(protocol.UNDELIVERED)]
        while topics:
            rows = await self._engine.wire.ask(protocol.deliver(topics))
            topics = [topic for topic, _, again in rows if again]

    async def run(self, row: tuple[Any, ...]) -> None:
        """Run what a claim has given, to its outcome."""
        run, watcher = await self._prepare(protocol.claimed(row))
        self._runs.append(run)
        outcome = await execute(run, self._engine.threads)
        if isinstance(outcome, Lost | Completed):
            return
        if self.probe is not None and run.swallowed_cancel(outcome):
            self.probe.script.log.swallowed_cancel = True
        with suppress(Exception):  # a lost lease, or a value that the server refused: as a worker
            if watcher is None:
                await self._committer.end(run, outcome)
            else:
                await watcher.end(outcome, _words_of(outcome))

    async def _prepare(self, claimed: Any) -> tuple[_WatchedRun, Watcher | None]:
        app = self._engine.app
        kind = app.registry.find(claimed.kind, claimed.version)
        assert kind is not None  # only declared pairs are claimed
        records = claimed.state
        if claimed.stored_steps:
            stored = await self._engine.wire.ask(protocol.stored_steps(claimed.id))
            records = stored[0][0]
        run = _WatchedRun(
            claimed=claimed,
            # A replay that asks for a step with other arguments is worth an error in a test.
            kind=dataclasses.replace(kind, strict=True),
            journal=Journal(records, claimed.open_steps),
            port=self._committer,
            transactions=self._engine.transactions,
            registry=app.registry,
            loop=self._engine.loop,
            payload_limit=app.payload_limit,
            lease=LEASE,
            # Never by its own clock: a paused machine's stands still, so only the fence is sure.
            lease_ends=time.monotonic() + 1e6,
            attempt=claimed.attempts,
            switch=self.switch,
        )
        if self.probe is None:
            return run, None
        watcher = self.probe.watch(run, self._committer)
        run.port = run.observer = watcher
        run.compensations = Registered(watcher.registered)
        return run, watcher


@dataclasses.dataclass(eq=False)
class _WatchedRun(Run):
    """A run that belongs to a worker which can be stopped, and that sees cancels swallowed."""

    switch: Switch | None = None
    cancel_delivered: bool = False

    def _interrupt_handler(self) -> None:
        if self.interrupt is not None and self.cancel_requested and self.lost is None:
            self.cancel_delivered = True
        super()._interrupt_handler()

    def swallowed_cancel(self, outcome: Outcome) -> bool:
        """Whether the handler was told of a cancel and returned all the same."""
        told = self.refused_by_cancel or self.cancel_delivered
        return isinstance(outcome, Finish) and told and self.claimed.compensating is None


def _words_of(outcome: Outcome) -> str:
    if isinstance(outcome, Finish):
        return "the end"
    if isinstance(outcome, Suspend):
        return f"the wait {outcome.wait.name!r}"
    return "the failure" if isinstance(outcome, Fail) else "the hand-back"


# --- connections -----------------------------------------------------------------------------------


class Wire(Link):
    """One connection for all workers of an engine.

    Blocking: a loop that has nothing but tests to serve need not be free while the server answers,
    and so nothing is under way when a worker is stopped.
    """

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, "leasetask test worker")
        self._blocking: psycopg.Connection[Any] | None = None

    async def try_once(self, query: protocol.Query) -> list[tuple[Any, ...]]:
        """Run a query."""
        if self._blocking is None or self._blocking.closed:
            self._blocking = connect(self._dsn, name=self._name)
        return fetch(self._blocking, query)

    async def ask(self, query: protocol.Query) -> list[tuple[Any, ...]]:
        """Run a query; once more if the connection was lost."""
        try:
            return await self.try_once(query)
        except Exception as error:
            if not is_disconnect(error):
                raise
            return await self.try_once(query)

    def hang_up(self) -> None:
        """Close the connection."""
        if self._blocking is not None:
            self._blocking.close()


class _Transactions:
    """Opens the transactions of `ctx.transaction`.

    Keeps no count of its connections: those of crashed workers never come back.
    """

    def __init__(self, dsn: str, factory: Callable[[], Any] | None) -> None:
        self.keeper = Keeper(LEASE)
        self._dsn = dsn
        self._factory = factory
        self._free: list[psycopg.Connection[Any]] = []
        self._free_async: list[psycopg.AsyncConnection[Any]] = []

    def open(self, isolation: Isolation) -> Any:
        """Open one for a sync handler."""
        return self._blocking(isolation) if self._factory is None else self._factory()

    def open_async(self, isolation: Isolation) -> Any:
        """Open one for an async handler."""
        return self._awaiting(isolation) if self._factory is None else self._factory()

    async def close(self) -> None:
        """Close what is free."""
        for connection in self._free:
            connection.close()
        for awaited in self._free_async:
            await awaited.close()

    @contextmanager
    def _blocking(self, isolation: Isolation) -> Iterator[psycopg.Connection[Any]]:
        connection = self._free.pop() if self._free else psycopg.connect(self._dsn)
        connection.isolation_level = _level(isolation)
        try:
            yield connection
            connection.commit()
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)

    @asynccontextmanager
    async def _awaiting(self, isolation: Isolation) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        if self._free_async:
            connection = self._free_async.pop()
        else:
            connection = await psycopg.AsyncConnection.connect(self._dsn)
        await connection.set_isolation_level(_level(isolation))
        try:
            yield connection
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        self._free_async.append(connection)


def _level(isolation: Isolation) -> psycopg.IsolationLevel:
    return psycopg.IsolationLevel[isolation.replace(" ", "_").upper()]


class _Place:
    """Where an App is: on the scratch database while an engine has it, then where it was."""

    def __init__(self, app: App, dsn: str) -> None:
        self._app = app
        self._before = (app._dsn, app._pool, app._async_pools)
        app._dsn, app._pool, app._async_pools = dsn, None, {}

    def leave(self) -> None:
        """Put it back."""
        self._app.close()
        self._app._dsn, self._app._pool, self._app._async_pools = self._before
