"""Pools of connections that serve again as soon as the server does.

psycopg-pool looks after connections well, but after an outage it doubles the time before each attempt
to connect, to minutes in the end, and likewise between one stale connection and the next. So a pool
that lends a stale connection, or that has none to lend, is replaced by a fresh one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolClosed, PoolTimeout

from leasetask.connection import connect, connect_async, settings, speaks, unavailable
from leasetask.errors import DatabaseUnavailable

PATIENCE = 10.0
"""Seconds that a caller waits for a connection."""

_FAREWELL = 0.5
"""Seconds to wait for the threads of a pool that is replaced; psycopg-pool warns of those left."""


class Pool:
    """Connections for sync callers in any thread; the first of them opens it.

    Args:
        dsn: where to connect.
        name: the connections' application_name.
        size: connections at the most.
        transactional: what is done with a lent connection is one transaction, of the user's own
            statements: none of them is prepared, since their tables may change meanwhile.
        revive: starts the server, if it is ours to start.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        size: int,
        *,
        transactional: bool,
        revive: Callable[[], object] | None = None,
    ) -> None:
        self._dsn = dsn
        self._size = size
        self._options = partial(_options, dsn, name, size, transactional)
        self._revive = revive
        self._process = os.getpid()
        self._failed = _Failed()
        self._pool: ConnectionPool[psycopg.Connection[Any]] | None = None
        self._opening = threading.Lock()
        self._places = threading.Semaphore(size)

    @property
    def is_inherited(self) -> bool:
        """Whether a fork lies between: the connections are the parent's, their threads are not here."""
        return self._process != os.getpid()

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection; commits when left, rolls back on an exception.

        Raises:
            DatabaseUnavailable: no server, or no connection came free for `PATIENCE`.
        """
        if not self._places.acquire(timeout=PATIENCE):
            raise _all_busy(self._dsn, self._size)
        try:
            pool, conn = self._lend()
            try:
                with conn:
                    yield conn
            finally:
                pool.putconn(conn)
        finally:
            self._places.release()

    def close(self, timeout: float = 5.0) -> None:
        """Close the connections; those that are lent, when they come back.

        Args:
            timeout: seconds to wait for the pool's threads.
        """
        pool, self._pool = self._pool, None
        if pool is not None and not self.is_inherited:
            pool.close(timeout)

    def _lend(self) -> tuple[ConnectionPool[psycopg.Connection[Any]], psycopg.Connection[Any]]:
        while True:
            pool = self._opened()
            try:
                conn = pool.getconn(PATIENCE)
            except PoolClosed:
                continue  # another thread has replaced it
            except PoolTimeout as error:
                self._drop(pool)
                raise unavailable(self._dsn, error) from error
            if not speaks(conn) or _answers(conn):
                return pool, conn
            self._drop(pool)
            pool.putconn(conn)

    def _opened(self) -> ConnectionPool[psycopg.Connection[Any]]:
        asked = time.monotonic()
        with self._opening:
            if self._pool is None:
                self._failed.raise_if_after(asked)
                if self._revive is not None:
                    self._revive()
                # One connection by hand first: its error says why, the pool's only that.
                with self._failed.noted(), connect(self._dsn) as first:
                    threshold = first.prepare_threshold
                self._pool = ConnectionPool(self._dsn, open=True, **self._options(threshold))
            return self._pool

    def _drop(self, pool: ConnectionPool[psycopg.Connection[Any]]) -> None:
        with self._opening:
            if self._pool is pool:
                self._pool = None
        pool.close(timeout=_FAREWELL)


class AsyncPool:
    """The same for the coroutines of one event loop."""

    def __init__(
        self,
        dsn: str,
        name: str,
        size: int,
        *,
        transactional: bool,
        revive: Callable[[], object] | None = None,
    ) -> None:
        self._dsn = dsn
        self._size = size
        self._options = partial(_options, dsn, name, size, transactional)
        self._revive = revive
        self._failed = _Failed()
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] | None = None
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(size)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend a connection, as `Pool.connection` does."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._places.acquire()
        except TimeoutError:
            raise _all_busy(self._dsn, self._size) from None
        try:
            pool, conn = await self._lend()
            try:
                async with conn:
                    yield conn
            finally:
                await pool.putconn(conn)
        finally:
            self._places.release()

    async def close(self, timeout: float = 5.0) -> None:
        """Close the connections; those that are lent, when they come back."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(timeout)

    async def _lend(
        self,
    ) -> tuple[AsyncConnectionPool[psycopg.AsyncConnection[Any]], psycopg.AsyncConnection[Any]]:
        while True:
            pool = await self._opened()
            try:
                conn = await pool.getconn(PATIENCE)
            except PoolClosed:
                continue  # another coroutine has replaced it
            except PoolTimeout as error:
                await self._drop(pool)
                raise unavailable(self._dsn, error) from error
            if not speaks(conn) or await _answers_async(conn):
                return pool, conn
            await self._drop(pool)
            await pool.putconn(conn)

    async def _opened(self) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
        asked = time.monotonic()
        async with self._opening:
            if self._pool is None:
                self._failed.raise_if_after(asked)
                if self._revive is not None:
                    await asyncio.to_thread(self._revive)
                with self._failed.noted():
                    async with await connect_async(self._dsn) as first:
                        threshold = first.prepare_threshold
                pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
                    self._dsn, open=False, **self._options(threshold)
                )
                # Outside the caller's context: the pool's own tasks are no part of a handler.
                await asyncio.get_running_loop().create_task(pool.open(), context=Context())
                self._pool = pool
            return self._pool

    async def _drop(self, pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]]) -> None:
        if self._pool is pool:
            self._pool = None
        await pool.close(timeout=_FAREWELL)


class _Failed:
    """How the last attempt to connect failed: who waited for it meanwhile does not try once more."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._why = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except DatabaseUnavailable as error:
            self._at, self._why = time.monotonic(), str(error)
            raise

    def raise_if_after(self, asked: float) -> None:
        if self._at > asked:
            raise DatabaseUnavailable(self._why)


def _options(
    dsn: str, name: str, size: int, transactional: bool, prepare_threshold: int | None
) -> dict[str, Any]:
    kwargs = settings(dsn, name) | {
        "autocommit": not transactional,
        "prepare_threshold": None if transactional else prepare_threshold,
    }
    return {"min_size": 0, "max_size": size, "kwargs": kwargs}


def _all_busy(dsn: str, size: int) -> DatabaseUnavailable:
    busy = f"all {size} connections of this process were in use for {PATIENCE:g} s"
    return unavailable(dsn, TimeoutError(busy))


def _answers(conn: psycopg.Connection[Any]) -> bool:
    try:
        ConnectionPool.check_connection(conn)
    except psycopg.Error:
        return False
    return True


async def _answers_async(conn: psycopg.AsyncConnection[Any]) -> bool:
    try:
        await AsyncConnectionPool.check_connection(conn)
    except psycopg.Error:
        return False
    return True
