"""An engine for tests: real protocol, real PostgreSQL, time that the test moves.

`Engine` runs what is due when it is told to, in workers whose every commit a test may stop at. The
scratch database's `leasetask.clock()` is replaced by one that can be shifted; production code has
no part in that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

from leasetask import client, protocol
from leasetask.app import App
from leasetask.branches import task_factory
from leasetask.committer import Committer
from leasetask.connection import connect, fetch
from leasetask.execution import execute
from leasetask.journal import Journal
from leasetask.link import Link
from leasetask.maintenance import SWEEP_BATCH
from leasetask.model import Ack, Checkpoint, Completed, Enqueued, Lost, Note, Swept, TaskView
from leasetask.run import Observer, Run
from leasetask.sources import Transactions
from leasetask.threads import Threads
from leasetask.transactions import Keeper

T = TypeVar("T")

LEASE = 30.0
"""Seconds, of the engine's own clock."""

_CLOCK = """
create table if not exists leasetask.test_clock (shift interval not null, frozen timestamptz);
delete from leasetask.test_clock;
insert into leasetask.test_clock values ('0', null);
create or replace function leasetask.clock() returns timestamptz language sql volatile as
  'select coalesce(frozen, clock_timestamp()) + shift from leasetask.test_clock'
"""

_EMPTY = """
delete from leasetask.task; delete from leasetask.task_signal; delete from leasetask.lost_owner;
delete from leasetask.kind; update leasetask.test_clock set shift = '0', frozen = null
"""


class Engine:
    """Runs an App's tasks on a scratch database, when told to and by the clock that it moves.

    Args:
        app: declares the tasks; its own DSN is not used.
        dsn: a migrated scratch database of this engine's own.
    """

    def __init__(self, app: App, dsn: str) -> None:
        self.app = app
        self.dsn = dsn
        self.db: psycopg.Connection[Any] = connect(dsn, name="leasetask test engine")
        self.db.execute(_CLOCK)
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(task_factory)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._names = (f"worker {letter}" for letter in _letters())
        self._threads = Threads()
        self._own: Hand | None = None
        self.claims = Link(dsn, "leasetask test claims")
        self.commits = Link(dsn, "leasetask test commits")
        self.transactions = Transactions(dsn, 8, Keeper(LEASE), app.transactions)

    # --- what a test does ------------------------------------------------------------------------

    def enqueue(self, task: Any, input: Any = None, **options: Any) -> Enqueued:
        """Enqueue a task, as `App.enqueue`."""
        return self.app.enqueue(task, input, conn=self.db, **options)

    def signal(self, topic: str, payload: Any = None, *, sticky: bool = False) -> int:
        """Send a signal and deliver it; returns how many it woke."""
        call = client.signal(topic, payload, sticky, self.app.payload_limit, True)
        return client.run(call, self._ask) or 0

    def cancel(self, task_id: str, reason: str | None = None) -> str:
        """Ask a task to stop, as `App.cancel`."""
        return client.run(client.cancel(task_id, reason), self._ask, task_id)

    def get(self, task_id: str) -> TaskView:
        """Return what is known of a task."""
        return client.run(client.get(task_id), self._ask)

    def result(self, task: Enqueued | str) -> Any:
        """Return a succeeded task's result.

        Raises:
            AssertionError: it has not succeeded; the message says what it does instead.
        """
        view = self.get(task if isinstance(task, str) else task.id)
        if view.status != "succeeded":
            raise AssertionError(
                f"{view.kind} {view.id} is {view.status} at {view.current_step!r}: {view.last_error}"
            )
        return view.result

    def advance(self, seconds: float = 0.0, *, hours: float = 0.0, days: float = 0.0) -> None:
        """Move the clock on; what becomes due waits for `drain`."""
        total = seconds + hours * 3600 + days * 86400
        self.db.execute(
            "update leasetask.test_clock set shift = shift + make_interval(secs => %s)", [total]
        )

    def freeze(self) -> None:
        """Stop the clock; `advance` still moves it."""
        self.db.execute("update leasetask.test_clock set frozen = clock_timestamp()")

    def drain(self) -> int:
        """Run all that is due, and what that makes due; returns how many runs it took."""
        if self._own is None:
            self._own = self.hand()
        return self._own.drain()

    def drain_to_the_end(self, limit: int = 10_000) -> None:
        """Drain, moving the clock to whatever is due next, until nothing ever will be.

        Raises:
            AssertionError: more than `limit` rounds: something waits and wakes for ever.
        """
        for _ in range(limit):
            self.drain()
            if not self.skip():
                return
        raise AssertionError(f"tasks still become due after {limit} rounds")

    def sweep(self) -> list[Swept]:
        """Recover expired leases, as a worker's sweep does."""
        return [protocol.swept(row) for row in self._ask(protocol.sweep(SWEEP_BATCH))]

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
        self.db.execute(_EMPTY)

    def close(self) -> None:
        """Let go of the database."""
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._threads.close()
        self.db.close()

    # --- what workers need -------------------------------------------------------------------------

    def hand(self, observer: Observer | None = None) -> Hand:
        """Return a new worker, with an identity of its own."""
        return self.call(Hand.create(self, next(self._names), observer))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _close(self) -> None:
        if self._own is not None:
            self._own.die()
        for link in (self.claims, self.commits):
            await link.close()
        await self.transactions.close()

    @property
    def threads(self) -> Threads:
        """The pool for sync handlers."""
        return self._threads

    def _ask(self, query: protocol.Query) -> list[tuple[Any, ...]]:
        return fetch(self.db, query)


class Hand:
    """One worker of a test engine: claims one task at a time and runs it to its outcome."""

    def __init__(self, engine: Engine, name: str, observer: Observer | None) -> None:
        self.name = name
        self._engine = engine
        self._observer = observer
        self._link = engine.claims
        self._committer = Committer(engine.commits)
        self._serving = asyncio.get_running_loop().create_task(self._committer.serve())
        self._runs: list[Run] = []
        self.outcomes: list[str] = []
        self.swallowed_cancel = False

    @classmethod
    async def create(cls, engine: Engine, name: str, observer: Observer | None) -> Hand:
        """Make one inside the engine's event loop."""
        return cls(engine, name, observer)

    def drain(self) -> int:
        """Run all that is due; returns how many runs it took."""
        return self._engine.call(self.drain_async())

    async def drain_async(self) -> int:
        """As `drain`, in the engine's event loop."""
        runs = 0
        while True:
            await self._deliver()
            pairs = self._engine.app.registry.pairs()
            rows = await self._link.ask(protocol.claim(self.name, pairs, 1, LEASE))
            if not rows or rows[0][0] is None:
                rows = await self._link.ask(
                    protocol.claim(self.name, pairs, 1, LEASE, suspects=True)
                )
            if not rows or rows[0][0] is None:
                return runs
            runs += 1
            await asyncio.get_running_loop().create_task(self._run(rows[0]))

    def learn_of_cancel(self) -> None:
        """As from a heartbeat: a cancel has been asked for."""
        for run in self._runs[-1:]:
            run.loop.call_soon_threadsafe(run.request_cancel)

    def cut_transactions(self) -> None:
        """End the transactions that this worker has open, as the server does after a lease."""
        for opened in self._engine.transactions.keeper.opened():
            connection = opened.connection
            if opened.run in self._runs and connection is not None and not connection.closed:
                pid = connection.info.backend_pid
                self._engine.db.execute("select pg_terminate_backend(%s)", [pid])

    def die(self) -> None:
        """As a killed process: it commits nothing more, and nothing of it is unwound."""
        self._engine.start(self._die())

    async def _die(self) -> None:
        self._serving.cancel()

    async def _deliver(self) -> None:
        topics = [row[0] for row in await self._link.ask(protocol.UNDELIVERED)]
        while topics:
            rows = await self._link.ask(protocol.deliver(topics))
            topics = [topic for topic, _, again in rows if again]

    async def _run(self, row: tuple[Any, ...]) -> None:
        claimed = protocol.claimed(row)
        kind = self._engine.app.registry.find(claimed.kind, claimed.version)
        assert kind is not None
        records = claimed.state
        if claimed.stored_steps:
            records = (await self._link.ask(protocol.stored_steps(claimed.id)))[0][0]
        run = Run(
            claimed=claimed,
            # A replay that asks for a step with other arguments is worth an error in a test.
            kind=dataclasses.replace(kind, strict=True),
            journal=Journal(records, claimed.open_steps),
            port=_ObservedPort(self._committer, self._observer),
            transactions=self._engine.transactions,
            registry=self._engine.app.registry,
            loop=asyncio.get_running_loop(),
            payload_limit=self._engine.app.payload_limit,
            lease=LEASE,
            lease_ends=time.monotonic() + 1e6,
            attempt=claimed.attempts,
            observer=self._observer,
        )
        self._runs.append(run)
        outcome = await execute(run, self._engine.threads)
        self.outcomes.append(type(outcome).__name__)
        if isinstance(outcome, Lost | Completed):
            return
        if run.cancel_requested and self.outcomes[-1] == "Finish" and run.refused_by_cancel:
            self.swallowed_cancel = True
        await self._observe("before the commit of", "the end")
        with suppress(Exception):  # a lost lease, or a value that the server refused: as a worker
            await self._committer.end(run, outcome)
        await self._observe("after the commit of", "the end")

    async def _observe(self, what: str, name: str) -> None:
        if self._observer is not None:
            await self._observer.wait(what, name)


class _ObservedPort:
    """The committer, with a point before each commit and one before its answer is heard."""

    def __init__(self, committer: Committer, observer: Observer | None) -> None:
        self._committer = committer
        self._observer = observer

    async def send(self, run: Run, request: Checkpoint | Note) -> Ack:
        names = ", ".join(request.records if isinstance(request, Checkpoint) else request.notes)
        what = "" if isinstance(request, Checkpoint) else "the start of "
        if self._observer is not None:
            await self._observer.wait("before the commit of", what + names)
        ack = await self._committer.send(run, request)
        if self._observer is not None:
            await self._observer.wait("after the commit of", what + names)
        return ack

    async def snapshot(self) -> str:
        return await self._committer.snapshot()


def _letters() -> Iterator[str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return itertools.chain(alphabet, (f"{a}{n}" for n in itertools.count(1) for a in alphabet))
