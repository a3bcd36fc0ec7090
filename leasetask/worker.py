"""The worker: claims for its free slots, runs, commits, and drains when it is told to stop.

It owns no rule of the protocol; it connects the parts that do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from leasetask import outbox, protocol, telemetry
from leasetask.branches import task_factory
from leasetask.claimer import Claimer
from leasetask.committer import Committer, End
from leasetask.connection import is_disconnect, is_transient
from leasetask.errors import ConfigurationError, LeaseLost, PayloadError, WorkerError
from leasetask.execution import execute
from leasetask.failures import describe
from leasetask.heartbeat import Heartbeat, Watchdog
from leasetask.journal import Journal
from leasetask.link import Link, pause_until
from leasetask.listener import listen
from leasetask.maintenance import Maintenance
from leasetask.model import LONGEST, Ack, Claimed, Completed, Fail, Lost, Outcome, Release, Suspend
from leasetask.payload import DEFAULT_LIMIT, readable
from leasetask.protocol import Item
from leasetask.registry import Registry
from leasetask.run import Run, log_fields
from leasetask.sources import Transactions
from leasetask.telemetry import Ended
from leasetask.threads import Threads
from leasetask.transactions import Keeper

logger = logging.getLogger("leasetask")

ROLES = ("worker", "sweep", "outbox")
DEFAULT_ROLES = ("worker", "sweep")
DEFAULT_RETENTION = 30 * 86400.0
"""Seconds that finished tasks are kept whole."""

_NOT_FOUND = 2
"""Exit status of a child that cannot import the App; any other may be better the next time."""

ALONE = "LEASETASK_ALONE"
"""In the environment of a child that imports the App to run suspects alone: its parent's pid."""

_UNWIND = 1.0
"""Seconds that handlers get to unwind once the grace is over."""

_FULL = 0.05
"""Seconds without a free slot after which a worker is not idle any more."""

_PREFETCH = 0.02
"""Seconds of work, at the present rate, that are claimed ahead of the free slots."""

_MOST_PREFETCHED = 400
_STALE = 0.25
"""Seconds after which a task claimed ahead that has found no slot is handed back."""

_NOT_READ = Journal({}, {})
"""Until what a task has recorded is read."""

_SHORTEST_LIMIT = 5.0
"""Seconds that a statement of ours may take; a lease, if that is longer."""

_SILENT = 10.0
"""Seconds without an answered claim after which a worker is not healthy; or three polls."""

_CLAIM_ENDS = 5.0
"""Seconds that a claim on its way is waited for when the worker stops."""

_CERTAIN_END = 2.0
"""Seconds after which an abandoned task's process is gone for certain."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker runs.

    Attributes:
        concurrency: tasks at the same time.
        lease: seconds that a claim lasts without a heartbeat; a crash is noticed after it.
        poll_interval: seconds between looks when nothing notifies.
        retention: seconds after which finished tasks are pruned; None: never. Goes with the role
            `sweep`.
        grace: seconds that handlers may still run after a stop was asked for.
        roles: `worker` runs tasks, `sweep` recovers expired leases, `outbox` dispatches events.
        outbox: the DSN of the database with `outbox_event`, for that role.
        listen_dsn: a direct DSN to hear notifications on, where `dsn` goes through a pooler.
        revive: starts an embedded server again that has died.
        spec: how a child process imports the App (`module:app`), to run suspects alone.
        alone: run suspects only, one at a time, and end when there is none.
        transactions: the user's own source of transactions, see `App`.
    """

    concurrency: int = 20
    lease: float = 30.0
    poll_interval: float = 1.0
    grace: float = 30.0
    retention: float | None = DEFAULT_RETENTION
    roles: tuple[str, ...] = DEFAULT_ROLES
    payload_limit: int = DEFAULT_LIMIT
    spec: str | None = None
    alone: bool = False
    transactions: Callable[[], Any] | None = None
    outbox: str | None = None
    listen_dsn: str | None = None
    revive: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError("a worker's concurrency is at least 1")
        if not 0.5 <= self.lease <= LONGEST:
            raise ConfigurationError(f"a lease is 0.5 to {LONGEST:.0f} seconds")
        if not 0 < self.poll_interval <= LONGEST or not 0 <= self.grace <= LONGEST:
            raise ConfigurationError(
                f"poll_interval is more than 0 seconds, grace at least 0, both at most {LONGEST:.0f}"
            )
        if ("outbox" in self.roles) != (self.outbox is not None):
            raise ConfigurationError("the role outbox goes with the DSN of the outbox's database")
        if self.retention is not None and not 0 < self.retention <= LONGEST:
            raise ConfigurationError(
                f"retention is more than 0 and at most {LONGEST:.0f} seconds, or None to keep all"
            )
        unknown = set(self.roles) - set(ROLES)
        if unknown or not self.roles:
            raise ConfigurationError(f"roles are {ROLES}, not {tuple(self.roles)}")


class Worker:
    """One worker process's work; `serve` it in an event loop, `stop` it from anywhere."""

    def __init__(self, registry: Registry, dsn: str, options: WorkerOptions) -> None:
        self._registry = registry
        self._dsn = dsn
        self._options = options
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._runs: dict[str, Run] = {}
        self._prefetched: deque[Run] = deque()
        self._threads = Threads()
        self._ending = 0
        self._lost_threads = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop_requested = False
        self._hurry = False
        self._fatal: BaseException | None = None
        self._suspects_wait = False
        self._deaf = False
        self._child_is_of_use = True
        self._child: subprocess.Popen[bytes] | None = None
        self._claimer: Claimer | None = None
        self.on_end: list[Callable[[Ended], None]] = [telemetry.count_end]
        self.started = False

    # --- from outside ------------------------------------------------------------------------

    def stop(self, *, hurry: bool = False) -> None:
        """Claim no more, let handlers finish for the grace, hand the rest back.

        Safe from any thread and from a signal handler. `hurry`, or a second call: no grace.
        """
        self._hurry = self._hurry or hurry or self._stop_requested
        self._stop_requested = True
        if self.started:
            with suppress(RuntimeError):  # the loop has closed: it ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._notice_stop)

    @property
    def running(self) -> int:
        """How many tasks it has in its hands."""
        return len(self._runs)

    @property
    def slots(self) -> int:
        """How many tasks it may run at a time."""
        return self._options.concurrency

    def troubles(self) -> list[str]:
        """Say why it cannot do its work now, a line for each reason; none if all is well."""
        if not self.started:
            return ["it has not started, or has stopped"]
        found = []
        if self._stop_requested:
            found.append("it drains: it was told to stop")
        if not self._heartbeat.healthy:
            found.append("its heartbeats do not get through: it cannot keep leases")
        if self._claimer is not None and self._has_slot:
            silent = time.monotonic() - self._claimer.answered_at
            if silent > max(_SILENT, 3 * self._options.poll_interval):
                found.append(f"no claim has been answered for {silent:.0f} s")
        return found

    def _notice_stop(self) -> None:
        self._changed.set()
        self._wake.set()

    async def serve(self) -> None:
        """Work until stopped.

        Raises:
            WorkerError: a part of the worker died, or too many handlers never end.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(task_factory)
        self._traced = telemetry.is_set_up()
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        limit = max(_SHORTEST_LIMIT, self._options.lease)
        self._claims = Link(self._dsn, "leasetask claim", limit=limit, revive=self._options.revive)
        self._commits = Link(self._dsn, "leasetask commit", limit=limit)
        chores = Link(self._dsn, "leasetask chores", limit=limit)
        ears = Link(self._options.listen_dsn or self._dsn, "leasetask listen", limit=limit)
        self._committer = Committer(self._commits)
        leases = [kind.lease for kind in self._registry.kinds() if kind.lease is not None]
        shortest = min([self._options.lease, *leases])
        self._heartbeat = Heartbeat(self._dsn, shortest, self._held, self._die)
        watchdog = Watchdog(shortest, self._held, self._heartbeat)
        self._maintenance = Maintenance(
            chores,
            self._options.lease,
            self._registry.policies() if "worker" in self._options.roles else (),
            retention=self._options.retention,
            sweeps="sweep" in self._options.roles and not self._options.alone,
            on_suspects=None if self._options.alone else self._run_suspects,
        )
        keeper = Keeper(shortest)
        self._transactions = Transactions(
            self._dsn, self._options.concurrency, keeper, self._options.transactions
        )
        self.started = True
        threads = (self._heartbeat, watchdog, keeper)
        for thread in threads:
            thread.start()
        if "worker" in self._options.roles:
            known = ", ".join(f"{kind} v{version}" for kind, version in self._registry.pairs())
            logger.info("%s runs %s, %d at a time", self.owner, known or "nothing", self.slots)
        services = [
            self._service(self._committer.serve()),
            self._service(self._maintenance.serve()),
            self._service(self._listen(ears)),
        ]
        if self._options.alone:
            services.append(self._service(self._leave_with_the_parent()))
        if self._options.outbox is not None:
            services.append(self._service(self._dispatch_outbox(self._options.outbox)))
        claiming: list[asyncio.Task[None]] = []
        if "worker" in self._options.roles:
            claiming.append(self._service(self._claim_for_ever()))
        try:
            while not self._stop_requested:
                await self._changed.wait()
                self._changed.clear()
            await self._drain(claiming)
        finally:
            self.started = False
            await self._end_services([*services, *claiming])
            self._committer.close()
            for thread in threads:
                thread.stop()
            self._threads.close()
            await self._transactions.close()
            for link in (self._claims, self._commits, chores, ears):
                await link.close()
        if self._fatal is not None:
            raise WorkerError(f"worker {self.owner} ends: {self._fatal}") from self._fatal

    async def _end_services(self, services: list[asyncio.Task[None]]) -> None:
        for service in services:
            service.cancel()
        _, left = await asyncio.wait(services, timeout=_CLAIM_ENDS)
        for service in left:
            logger.error("stopping: %s does not end", service.get_coro())

    async def _listen(self, ears: Link) -> None:
        await listen(ears, self._hear)
        self._deaf = True

    def _service(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._service_ended)
        return task

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self._die(error)

    def _die(self, error: BaseException) -> None:
        if self._fatal is None:
            self._fatal = error
            logger.critical("a part of the worker died: %r", error, exc_info=error)
        self.stop(hurry=True)

    def _held(self) -> Collection[Run]:
        return list(self._runs.values())

    def _hear(self, word: str) -> None:
        if word == "task":
            self._wake.set()
        elif word == "signal":
            self._maintenance.look_soon()
        elif word == "cancel":
            self._heartbeat.beat_soon()

    # --- claiming ----------------------------------------------------------------------------

    async def _claim_for_ever(self) -> None:
        self._claimer = claimer = Claimer(
            self._claims,
            self.owner,
            self._registry.pairs(),
            lease=self._options.lease,
            interval=self._options.poll_interval,
            suspects=self._options.alone,
            hears=lambda: not self._deaf,
        )
        while not self._stop_requested:
            if self._suspects_wait:
                await self._run_one_suspect(claimer)
                continue
            self._wake.clear()
            self._hand_back_stale()
            free = self._free_slots(claimer.rate)
            if free < 1 or not self._heartbeat.healthy:
                await self._pause(_FULL)
                if self._free_slots(claimer.rate) < 1 and not self._prefetched:
                    # Whoever cannot take more must not make the producers pay for notifying it.
                    await claimer.leave()
                    await self._pause(self._options.poll_interval)
                continue
            sent_at = time.monotonic()
            for claimed in await claimer.claim(free):
                self._start(self._run_of(claimed, sent_at))
            if self._options.alone and not self._runs:
                self.stop()
            pause = await claimer.settle()
            if pause > 0:
                await self._pause(pause)
        await claimer.leave()

    def _free_slots(self, rate: float) -> int:
        """Return how many tasks may be claimed.

        A handler that has ended leaves its slot while its outcome is committed, so that the next
        claim is under way meanwhile; of those there may be as many again. Short tasks are claimed a
        little ahead, in few large claims, so that the server works while the handlers do.
        """
        most = self._options.concurrency - self._lost_threads
        if self._options.alone:
            return most - len(self._runs)
        most += min(_MOST_PREFETCHED, int(rate * _PREFETCH))
        free = min(most - (len(self._runs) - self._ending), 2 * most - len(self._runs))
        return 0 if self._prefetched and free < most // 2 else free

    @property
    def _has_slot(self) -> bool:
        """Whether a handler may start."""
        running = len(self._runs) - self._ending - len(self._prefetched)
        return running < self._options.concurrency - self._lost_threads

    def _hand_back_stale(self) -> None:
        """Others may be free for what was claimed ahead, once tasks turn out to be long."""
        if self._prefetched and time.monotonic() - self._prefetched[0].started > _STALE:
            self._hand_back_prefetched()

    def _hand_back_prefetched(self) -> None:
        while self._prefetched:
            run = self._prefetched.popleft()
            run.handing_back = True
            self._launch(run)

    async def _pause(self, seconds: float) -> None:
        await pause_until(self._wake, seconds)

    def _run_of(self, claimed: Claimed, sent_at: float) -> Run:
        kind = self._registry.find(claimed.kind, claimed.version)
        assert kind is not None  # only declared pairs are claimed
        return Run(
            claimed=claimed,
            kind=kind,
            journal=_NOT_READ,
            port=self._committer,
            transactions=self._transactions,
            registry=self._registry,
            loop=self._loop,
            payload_limit=self._options.payload_limit,
            lease=kind.lease or self._options.lease,
            lease_ends=sent_at + self._options.lease,
            attempt=claimed.attempts,
            handing_back=self._stop_requested,
            traced=self._traced,
        )

    def _start(self, run: Run) -> None:
        # By token: a task that came back to this worker may still have an old run in a thread.
        starts = self._has_slot or run.handing_back
        self._runs[run.claimed.token] = run
        if starts:
            self._launch(run)
        else:
            self._prefetched.append(run)

    def _launch(self, run: Run) -> None:
        self._tasks[run.claimed.token] = self._loop.create_task(self._run(run))

    # --- one task ------------------------------------------------------------------------------

    async def _run(self, run: Run) -> None:
        try:
            outcome = await self._outcome_of(run)
            self._ending += 1
            while self._prefetched and self._has_slot:
                self._launch(self._prefetched.popleft())
            self._wake.set()
            try:
                await self._end(run, outcome)
            finally:
                self._ending -= 1
        finally:
            del self._runs[run.claimed.token], self._tasks[run.claimed.token]
            self._wake.set()

    async def _outcome_of(self, run: Run) -> Outcome:
        """Run the handler; whatever goes wrong around it is a failure of this task alone."""
        if run.handing_back or run.is_lost():
            # Nothing has begun. A lease that is out by our clock, since its claim was answered late,
            # may be held on the server all the same.
            return Release()
        claimed = run.claimed
        try:
            records = claimed.state
            if claimed.stored_steps:
                records = (await self._claims.ask(protocol.stored_steps(claimed.id)))[0][0]
            run.journal = Journal(readable(records), readable(claimed.open_steps))
            return await execute(run, self._threads)
        except Exception as error:
            logger.exception("%s: cannot be run", run.label)
            retryable = not isinstance(error, PayloadError)
            return Fail(describe(error, run.attempt), retryable=retryable, outright=not retryable)

    async def _end(self, run: Run, outcome: Outcome) -> None:
        if isinstance(outcome, Lost):
            logger.warning(
                "%s: %s; nothing more of this run is recorded", run.label, outcome.reason
            )
            return
        if isinstance(outcome, Completed):
            self._log(run, outcome, Ack("done", status="succeeded"))
            return
        run.ending = True
        try:
            outcome, ack = await self._commit_end(run, outcome)
        except LeaseLost as error:
            logger.warning("%s", error)
            return
        self._log(run, outcome, ack)
        if isinstance(outcome, Suspend) and outcome.wait.topic is not None:
            self._maintenance.deliver_soon(outcome.wait.topic)
        if isinstance(outcome, Fail) and outcome.error["type"] == "RunTimeout":
            self._count_lost_thread(run)

    async def _commit_end(self, run: Run, outcome: End) -> tuple[End, Ack]:
        """Commit a run's end; one that the server refuses becomes a failure with its reason."""
        try:
            return outcome, await self._committer.end(run, outcome)
        except LeaseLost:
            raise
        except Exception as error:
            refused = Fail(describe(error, run.attempt), retryable=True)
            return refused, await self._committer.end(run, refused)

    def _log(self, run: Run, outcome: Outcome, ack: Ack) -> None:
        took = time.monotonic() - run.started
        claimed = run.claimed
        waited = (claimed.claimed_at - claimed.due_at).total_seconds()
        for tell in self.on_end:
            tell(Ended(claimed.kind, claimed.version, ack.status or "lost", took, waited))
        error = outcome.error if isinstance(outcome, Fail | Release) else None
        level = logging.INFO if error is None else logging.WARNING
        if not logger.isEnabledFor(level):
            return
        extra = {**log_fields(run), "status": ack.status, "duration": round(took, 6)}
        line = "%s: %s after %.3f s"
        told: list[Any] = [run.label, ack.status, took]
        if error is not None:
            line += ": %s: %s"
            told += [error["type"], error["message"]]
        logger.log(level, line, *told, extra=extra)

    def _count_lost_thread(self, run: Run) -> None:
        if run.kind.is_async:
            return
        run.lose("it ran longer than its timeout")
        self._lost_threads += 1
        if self._lost_threads > self._options.concurrency // 2:
            self._die(
                WorkerError(f"{self._lost_threads} threads are inside handlers past their timeout")
            )

    # --- outbox --------------------------------------------------------------------------------

    async def _dispatch_outbox(self, business_dsn: str) -> None:
        away = False
        while True:
            try:
                await asyncio.to_thread(outbox.dispatch, business_dsn, self._dsn)
                away = False
            except Exception as error:
                if not (is_disconnect(error) or is_transient(error)):
                    raise
                if not away:
                    logger.warning("outbox: not dispatched, trying again: %s", error)
                away = True
            await asyncio.sleep(self._options.poll_interval)

    # --- suspects ------------------------------------------------------------------------------

    async def _run_suspects(self) -> None:
        """Let a child process with one slot run what may have killed a worker."""
        if self._child is not None:
            status = self._child.poll()
            if status is None:
                return
            if status > 0:
                logger.error("the child that runs suspects alone ended with status %d", status)
                self._child_is_of_use = status != _NOT_FOUND
        if self._options.spec is None or not self._child_is_of_use:
            # No child could import this App: once this worker is empty, it runs them itself.
            self._suspects_wait = True
            self._wake.set()
            return
        command = [sys.executable, "-m", "leasetask", "worker", self._options.spec, "--alone"]
        command += ["--lease", str(self._options.lease)]
        environment = {**os.environ, "LEASETASK_DSN": self._dsn, ALONE: str(os.getpid())}
        self._child = subprocess.Popen(command, env=environment)

    async def _leave_with_the_parent(self) -> None:
        """A child whose parent was killed must not look for a vanished database for ever."""
        parent = os.environ.get(ALONE)
        while parent in (None, str(os.getppid())):  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(1)
        self.stop()

    async def _run_one_suspect(self, claimer: Claimer) -> None:
        """Let what runs end, then run one suspect and nothing beside it."""
        while self._runs and not self._stop_requested:
            self._wake.clear()
            await self._pause(self._options.poll_interval)
        self._suspects_wait = False
        if not self._stop_requested:
            sent_at = time.monotonic()
            for claimed in await claimer.claim_suspect():
                self._start(self._run_of(claimed, sent_at))
        while self._runs and not self._stop_requested:
            self._wake.clear()
            await self._pause(self._options.poll_interval)

    # --- the end -------------------------------------------------------------------------------

    async def _drain(self, claiming: list[asyncio.Task[None]]) -> None:
        """Let handlers finish, hand back what has not; the sweep gets what is inside a thread."""
        deadline = time.monotonic() + self._options.grace
        if self._runs:
            logger.info(
                "stopping: %d tasks may finish for %s s", len(self._runs), self._options.grace
            )
        if claiming:
            # A claim on its way holds tasks that we do not know of yet.
            await asyncio.wait(claiming, timeout=_CLAIM_ENDS)
        self._hand_back_prefetched()
        await self._until_empty(deadline)
        for run in self._held():
            run.hand_back()
        await self._until_empty(time.monotonic() + _UNWIND, hurries=False)
        left = [run for run in self._held() if run.lost is None]
        if left:
            items = [Item(run.claimed.id, run.claimed.token, None) for run in left]
            logger.warning("stopping: %d tasks are still inside their handlers", len(left))
            try:
                async with asyncio.timeout(_UNWIND):
                    await self._claims.ask(protocol.abandon(items, _CERTAIN_END))
            except TimeoutError:
                logger.warning("stopping: the database is away; their leases run out by themselves")
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    async def _until_empty(self, deadline: float, *, hurries: bool = True) -> None:
        while self._runs and time.monotonic() < deadline and not (hurries and self._hurry):
            self._wake.clear()
            await self._pause(min(0.1, max(0.001, deadline - time.monotonic())))
