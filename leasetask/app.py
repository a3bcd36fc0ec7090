"""`App`: what a program declares its tasks on, enqueues through, and starts workers from."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import psycopg

from leasetask import client, hosts, protocol, registry
from leasetask.connection import dsn_or_environment, is_disconnect, lost_meanwhile
from leasetask.errors import ConfigurationError, DatabaseUnavailable, LeaseTaskError
from leasetask.model import Enqueued, Retry, TaskView
from leasetask.payload import DEFAULT_LIMIT
from leasetask.pools import AsyncPool, Pool
from leasetask.protocol import KindPolicy, Query
from leasetask.registry import Kind, Registry
from leasetask.worker import ALONE, DEFAULT_RETENTION, DEFAULT_ROLES, Worker, WorkerOptions

F = TypeVar("F", bound=Callable[..., Any])
Target = Callable[..., Any] | str


class App:
    """The tasks of a program and the database they live in.

    Args:
        dsn: a PostgreSQL connection string. By default the environment's LEASETASK_DSN, and
            without that the embedded server of the extra `leasetask[embedded]`, started on demand.
        payload_limit: the largest input, result or signal, in bytes of JSON.
        transactions: opens the transactions of `ctx.transaction`, in the same database: called
            without arguments, it gives a context manager that yields a psycopg connection, a
            SQLAlchemy connection or session, or Django's connection, commits when it is left and
            rolls back on an exception. `engine.begin` and `sessionmaker.begin` are such. By
            default a pool of leasetask's own.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        payload_limit: int = DEFAULT_LIMIT,
        transactions: Callable[[], Any] | None = None,
    ) -> None:
        self._dsn = dsn_or_environment(dsn)
        self._payload_limit = payload_limit
        self._transactions = transactions
        self._registry = Registry()
        self._pool: Pool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}
        self._lock = threading.Lock()

    @property
    def dsn(self) -> str:
        """The connection string in use.

        Raises:
            EmbeddedError: there is none, and the embedded server cannot be started.
        """
        if self._dsn is not None:
            return self._dsn
        return _ensure_embedded()

    @property
    def revive(self) -> Callable[[], object] | None:
        """Starts the embedded server again, if that is the one in use."""
        return _ensure_embedded if self._dsn is None else None

    @property
    def registry(self) -> Registry:
        """The declared kinds."""
        return self._registry

    # --- declaring -----------------------------------------------------------------------------

    @overload
    def task(self, handler: F, /) -> F: ...
    @overload
    def task(
        self,
        /,
        *,
        kind: str | None = None,
        version: int = 1,
        accepts: tuple[int, ...] = (),
        retry: Retry | None = None,
        priority: int = 0,
        lease: float | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        strict: bool = False,
    ) -> Callable[[F], F]: ...
    def task(
        self,
        handler: Callable[..., Any] | None = None,
        /,
        *,
        kind: str | None = None,
        version: int = 1,
        accepts: tuple[int, ...] = (),
        retry: Retry | None = None,
        priority: int = 0,
        lease: float | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        strict: bool = False,
    ) -> Any:
        """Declare a `def` or `async def` function, `(ctx)` or `(ctx, input)`, as a task's handler.

        The annotations of the input and the result are enforced at enqueue and at claim.

        Args:
            kind: the function's name by default.
            version: raise it with a change that tasks in flight cannot replay.
            accepts: older versions that this code can run as well.
            retry: tries of the task, and of steps without a policy of their own.
            priority: lower runs sooner, -32768 to 32767.
            lease: seconds between renewals at the most; the worker's by default.
            timeout: seconds for one run of the handler or of a step. An async one is cancelled;
                a thread cannot be stopped, so the try is charged and its slot is lost.
            deadline: seconds from enqueue for the whole task, waits included.
            strict: a replay with other step arguments is an error instead of a warning.

        Raises:
            ConfigurationError: the signature, the name or a number does not fit.
        """

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._registry.add(
                registry.declare(
                    function,
                    name=kind,
                    version=version,
                    accepts=accepts,
                    retry=retry or Retry(),
                    priority=priority,
                    lease=lease,
                    timeout=timeout,
                    deadline=deadline,
                    strict=strict,
                )
            )
            return function

        return declare if handler is None else declare(handler)

    # --- producing -----------------------------------------------------------------------------

    def enqueue(
        self,
        task: Target,
        input: Any = None,
        *,
        key: str | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        conn: Any = None,
    ) -> Enqueued:
        """Enqueue a task; the same kind and key give the same task, for ever.

        Args:
            task: the handler, or its kind's name.
            input: what the handler's second parameter takes.
            key: names the task within its kind; a fresh one by default.
            at: when it is due, with a time zone. delay: or in how many seconds.
            priority: lower runs sooner; the kind's by default.
            conn: your own connection or session (psycopg, SQLAlchemy, Django): the task is there
                if your transaction commits.

        Raises:
            PayloadError: the input does not fit; nothing was written.
            IdempotencyConflict: the key names a task with another input.
            UnknownKind, DatabaseUnavailable, SchemaError: as they say.
        """
        return self._call(self._enqueue(task, input, key, at, delay, priority), conn)

    async def enqueue_async(
        self,
        task: Target,
        input: Any = None,
        *,
        key: str | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        conn: Any = None,
    ) -> Enqueued:
        """As `enqueue`; `conn` is an async connection."""
        return await self._call_async(self._enqueue(task, input, key, at, delay, priority), conn)

    def enqueue_many(
        self,
        task: Target,
        inputs: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        conn: Any = None,
    ) -> list[Enqueued]:
        """Enqueue many tasks of one kind in one statement.

        Args:
            key: gives each input's key.

        Returns:
            One outcome for each input, in order: new, existing, or conflict.

        Raises:
            PayloadError: an input does not fit; it is named by its index, nothing was written.
        """
        return self._call(self._enqueue_many(task, inputs, key, at, delay, priority), conn)

    async def enqueue_many_async(
        self,
        task: Target,
        inputs: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        conn: Any = None,
    ) -> list[Enqueued]:
        """As `enqueue_many`; `conn` is an async connection."""
        call = self._enqueue_many(task, inputs, key, at, delay, priority)
        return await self._call_async(call, conn)

    def enqueue_sql(
        self,
        task: Target,
        input: Any = None,
        *,
        key: str | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        style: Literal["%s", "$1"] = "%s",
    ) -> tuple[str, list[Any]]:
        """Return the statement that enqueues a task, for a driver that `conn=` does not know.

        Args:
            style: how the driver marks parameters: psycopg2 and the like take `%s`, asyncpg `$1`.

        Returns:
            The SQL and its parameters. It gives one row: the task's id; the outcome, which is
            `new`, `existing` or `conflict`; the other input that the key has, if it is a conflict,
            which does not raise.

        Raises:
            PayloadError, UnknownKind: as `enqueue`.
        """
        kind = self._registry.resolve(task)
        encoded = client.encode_input(kind, input, self._payload_limit)
        client.check_start(at, delay)
        if key is not None:
            client.check_name("key", key)
        query = protocol.enqueue(
            kind.name, encoded, key, kind.policy(), at=at, delay=delay, priority=priority
        )
        sql = protocol.numbered(query.sql) if style == "$1" else query.sql
        return sql, list(query.params)

    def signal(
        self,
        topic: str,
        payload: Any = None,
        *,
        sticky: bool = False,
        conn: Any = None,
    ) -> int | None:
        """Send a signal to whoever waits on a topic, now or later.

        Args:
            payload: plain JSON.
            sticky: a latch: everyone who waits on the topic sees it, until `clear_signal`.
            conn: your own connection: the signal is there if your transaction commits, and a
                worker delivers it within a second.

        Returns:
            How many waiters it woke; None with `conn`.
        """
        call = client.signal(topic, payload, sticky, self._payload_limit, conn is None)
        return self._call(call, conn)

    async def signal_async(
        self,
        topic: str,
        payload: Any = None,
        *,
        sticky: bool = False,
        conn: Any = None,
    ) -> int | None:
        """As `signal`; `conn` is an async connection."""
        call = client.signal(topic, payload, sticky, self._payload_limit, conn is None)
        return await self._call_async(call, conn)

    def clear_signal(self, topic: str, *, conn: Any = None) -> bool:
        """End a topic's latch; tell whether there was one."""
        return self._call(client.clear_signal(topic), conn)

    async def clear_signal_async(self, topic: str, *, conn: Any = None) -> bool:
        """As `clear_signal`."""
        return await self._call_async(client.clear_signal(topic), conn)

    def cancel(
        self,
        task_id: str,
        *,
        reason: str | None = None,
        conn: Any = None,
    ) -> str:
        """Ask a task to stop.

        Returns:
            `canceled` (it has ended), `compensating` (it will, once its compensations have run),
            `requested` (it runs: it learns of it within a heartbeat), or `finished` (it had ended).

        Raises:
            TaskNotFound: no task has this id. ValueError: it is no id.
        """
        id_ = client.task_id(task_id)
        return self._call(client.cancel(id_, reason), conn, id_)

    async def cancel_async(
        self,
        task_id: str,
        *,
        reason: str | None = None,
        conn: Any = None,
    ) -> str:
        """As `cancel`; `conn` is an async connection."""
        id_ = client.task_id(task_id)
        return await self._call_async(client.cancel(id_, reason), conn, id_)

    def retry(self, task_id: str) -> None:
        """Give a `failed` or `dead` task another chance, from the step that failed.

        Raises:
            TaskNotFound, TaskRefused: as they say. ValueError: it is no id.
        """
        id_ = client.task_id(task_id)
        self._call(client.retry(id_), None, id_)

    async def retry_async(self, task_id: str) -> None:
        """As `retry`."""
        id_ = client.task_id(task_id)
        await self._call_async(client.retry(id_), None, id_)

    def resolve(self, task_id: str, step: str, *, done: Any = None, redo: bool = False) -> None:
        """Decide on an effect whose `reconcile` could not tell; the task goes on.

        Args:
            step: the effect's name.
            done: it happened, with this result.
            redo: it did not; `do` is called again.

        Raises:
            TaskNotFound, TaskRefused: as they say. ValueError: it is no id.
        """
        id_ = client.task_id(task_id)
        self._call(client.resolve(id_, step, done, redo, self._payload_limit), None, id_)

    async def resolve_async(
        self, task_id: str, step: str, *, done: Any = None, redo: bool = False
    ) -> None:
        """As `resolve`."""
        id_ = client.task_id(task_id)
        call = client.resolve(id_, step, done, redo, self._payload_limit)
        await self._call_async(call, None, id_)

    def get(self, task_id: str) -> TaskView:
        """Return what is known of a task.

        Raises:
            TaskNotFound: no task has this id. ValueError: it is no id.
        """
        return self._call(client.get(client.task_id(task_id)), None)

    async def get_async(self, task_id: str) -> TaskView:
        """As `get`."""
        return await self._call_async(client.get(client.task_id(task_id)), None)

    def wait(self, task_id: str, *, timeout: float | None = None) -> TaskView:
        """Return the task once it has ended, well or not.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it has not ended; it goes on.
        """
        for pause in client.wait_pauses(task_id, timeout):
            view = self.get(task_id)
            if view.finished:
                return view
            time.sleep(pause)
        raise AssertionError("wait_pauses raises at its end")

    async def wait_async(self, task_id: str, *, timeout: float | None = None) -> TaskView:
        """As `wait`."""
        for pause in client.wait_pauses(task_id, timeout):
            view = await self.get_async(task_id)
            if view.finished:
                return view
            await asyncio.sleep(pause)
        raise AssertionError("wait_pauses raises at its end")

    # --- working -------------------------------------------------------------------------------

    def start(
        self,
        *,
        concurrency: int = 20,
        lease: float = 30.0,
        poll_interval: float = 1.0,
        grace: float = 30.0,
        retention: float | None = DEFAULT_RETENTION,
        roles: Sequence[str] = DEFAULT_ROLES,
        outbox: str | None = None,
        listen_dsn: str | None = None,
    ) -> RunningWorker:
        """Start a worker inside this process, in a thread of its own.

        Args:
            concurrency: tasks at the same time.
            lease: seconds after which a crashed worker's tasks go on elsewhere.
            poll_interval: seconds between looks when nothing notifies.
            grace: seconds that handlers may still run after `stop()`.
            retention: seconds after which finished tasks are pruned, 30 days by default; None: never.
            roles: `worker` runs tasks, `sweep` recovers expired leases, `outbox` makes tasks of the
                rows of `outbox_event`.
            outbox: the DSN of the database with that table.
            listen_dsn: a direct DSN to hear notifications on, where the App's goes through a pooler.

        Raises:
            SchemaError, DatabaseUnavailable, ConfigurationError: as they say.
        """
        from leasetask import schema  # noqa: PLC0415  # only workers check it

        if os.environ.get(ALONE):
            raise ConfigurationError(
                "app.start() was called while the module was imported to run a suspect task alone; "
                'put it under `if __name__ == "__main__":`'
            )
        schema.check(self.dsn)
        options = WorkerOptions(
            concurrency=concurrency,
            lease=lease,
            poll_interval=poll_interval,
            grace=grace,
            retention=retention,
            roles=tuple(roles),
            outbox=outbox,
            listen_dsn=listen_dsn,
            payload_limit=self._payload_limit,
            spec=self._import_spec(),
            transactions=self._transactions,
        )
        return RunningWorker(Worker(self._registry, self.dsn, options))

    def worker(self, options: WorkerOptions) -> Worker:
        """Return a worker to be served in the caller's own event loop."""
        return Worker(self._registry, self.dsn, options)

    @property
    def transactions(self) -> Callable[[], Any] | None:
        """The user's own source of transactions."""
        return self._transactions

    @property
    def payload_limit(self) -> int:
        """The largest payload, in bytes."""
        return self._payload_limit

    def close(self) -> None:
        """Close the connections that producer calls have opened."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _import_spec(self) -> str | None:
        """Find how another process can import this App: the module and name it stands under."""
        for name, module in list(sys.modules.items()):
            for attribute, value in list(vars(module).items()) if module else ():
                if value is self:
                    if name != "__main__":
                        return f"{name}:{attribute}"
                    file = getattr(module, "__file__", None)
                    return f"{Path(file).resolve()}:{attribute}" if file else None
        return None

    # --- how calls reach the server --------------------------------------------------------------

    def _enqueue(
        self,
        task: Target,
        input: Any,
        key: str | None,
        at: datetime | None,
        delay: float | None,
        priority: int | None,
    ) -> client.Call[Enqueued]:
        kind = self._registry.resolve(task)
        encoded = client.encode_input(kind, input, self._payload_limit)
        if key is not None:
            client.check_name("key", key)
        return client.enqueue(kind.name, kind.policy(), encoded, key, at, delay, priority)

    def _enqueue_many(
        self,
        task: Target,
        inputs: Iterable[Any],
        key: Callable[[Any], str] | None,
        at: datetime | None,
        delay: float | None,
        priority: int | None,
    ) -> client.Call[list[Enqueued]]:
        kind = self._registry.resolve(task)
        encoded: list[str] = []
        keys: list[str | None] = []
        for index, value in enumerate(inputs):
            encoded.append(client.encode_input(kind, value, self._payload_limit, f" [{index}]"))
            keys.append(None if key is None else client.check_name("key", key(value)))
        policy: KindPolicy = kind.policy()
        return client.enqueue_many(kind.name, policy, encoded, keys, at, delay, priority)

    def _call(
        self,
        call: client.Call[client.T],
        conn: Any,
        task_id: str | None = None,
    ) -> client.T:
        if conn is not None:
            return client.run(call, _on(conn), task_id)
        try:
            with self._own_pool().connection() as own:
                return client.run(call, _on(own), task_id)
        except psycopg.Error as error:
            lost = self._lost(error)
            if lost is None:
                raise
            raise lost from error

    async def _call_async(
        self,
        call: client.Call[client.T],
        conn: Any,
        task_id: str | None = None,
    ) -> client.T:
        if conn is not None:
            return await client.run_async(call, _on_async(conn), task_id)
        try:
            async with self._own_async_pool().connection() as own:
                return await client.run_async(call, _on_async(own), task_id)
        except psycopg.Error as error:
            lost = self._lost(error)
            if lost is None:
                raise
            raise lost from error

    def _lost(self, error: psycopg.Error) -> DatabaseUnavailable | None:
        return lost_meanwhile(self.dsn, error) if is_disconnect(error) else None

    def _own_pool(self) -> Pool:
        with self._lock:
            if self._pool is None or self._pool.is_inherited:
                self._pool = Pool(
                    self.dsn, "leasetask", _CONNECTIONS, transactional=False, revive=self.revive
                )
            return self._pool

    def _own_async_pool(self) -> AsyncPool:
        loop = asyncio.get_running_loop()
        if loop not in self._async_pools:
            open_ones = {k: pool for k, pool in self._async_pools.items() if not k.is_closed()}
            pool = AsyncPool(
                self.dsn, "leasetask", _CONNECTIONS, transactional=False, revive=self.revive
            )
            self._async_pools = open_ones | {loop: pool}
        return self._async_pools[loop]

    async def close_async(self) -> None:
        """Close the connections that async producer calls of this event loop have opened."""
        pool = self._async_pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()


_CONNECTIONS = 8
"""Of an App, at the most: producer calls are short."""


def _on(conn: Any) -> Callable[[Query], client.Rows]:
    return lambda query: hosts.execute(conn, query)


def _on_async(conn: Any) -> Callable[[Query], Any]:
    return lambda query: hosts.execute_async(conn, query)


def _ensure_embedded() -> str:
    from leasetask import embedded  # noqa: PLC0415  # an extra: only who uses it pays for it

    return embedded.ensure()


async def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    rest = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=1)


class RunningWorker:
    """A worker that runs in a thread of this process; a context manager that stops it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="leasetask-worker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not asyncio.run: it waits for every task and thread, also those inside a handler that never
        # ends; they have been given to the sweep.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._worker.serve())
            loop.run_until_complete(_cancel_rest(loop))
        except BaseException as error:
            self._error = error
        finally:
            # What is still pending was told of when its task was given to the sweep.
            loop.set_exception_handler(lambda _loop, _context: None)
            loop.close()

    @property
    def owner(self) -> str:
        """The name that this worker's leases carry."""
        return self._worker.owner

    def stop(self, timeout: float | None = None) -> None:
        """Drain and end the worker.

        Args:
            timeout: seconds to wait for it; None: its grace and what follows.

        Raises:
            LeaseTaskError: why it ended before it was stopped, if it did.
        """
        self._worker.stop()
        self._thread.join(timeout)
        if self._error is not None:
            if isinstance(self._error, LeaseTaskError):
                raise self._error
            raise LeaseTaskError(f"the worker died: {self._error!r}") from self._error

    def __enter__(self) -> RunningWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


__all__ = ["App", "Kind", "RunningWorker"]
