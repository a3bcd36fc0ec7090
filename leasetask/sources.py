"""Where the transactions of `ctx.transaction` come from: our own pools, or the user's factory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any

import psycopg
from psycopg import IsolationLevel

from leasetask.pools import AsyncPool, Pool
from leasetask.transactions import Isolation, Keeper

LEVELS = {
    "read committed": IsolationLevel.READ_COMMITTED,
    "repeatable read": IsolationLevel.REPEATABLE_READ,
    "serializable": IsolationLevel.SERIALIZABLE,
}
"""Our names for the levels, and psycopg's."""


class Transactions:
    """Opens transactions for one worker.

    Args:
        dsn: where our own pools connect.
        size: connections at the most; as many as the worker has slots.
        keeper: watches over what is open.
        factory: the user's own: called without arguments, it gives a context manager that yields a
            connection or session, commits when left and rolls back on an exception.
    """

    def __init__(
        self, dsn: str, size: int, keeper: Keeper, factory: Callable[[], Any] | None
    ) -> None:
        self.keeper = keeper
        self._factory = factory
        self._pool = Pool(dsn, "leasetask transaction", size, transactional=True)
        self._async_pool = AsyncPool(dsn, "leasetask transaction", size, transactional=True)

    def open(self, isolation: Isolation) -> AbstractContextManager[Any]:
        """Open a transaction for a sync handler."""
        if self._factory is not None:
            return self._factory()  # type: ignore[no-any-return]  # the user's promise
        return self._from_pool(isolation)

    def open_async(self, isolation: Isolation) -> AbstractAsyncContextManager[Any]:
        """Open a transaction for an async handler."""
        if self._factory is not None:
            return self._factory()  # type: ignore[no-any-return]  # the user's promise
        return self._from_async_pool(isolation)

    async def close(self) -> None:
        """Close our own pools."""
        self._pool.close(timeout=1)
        await self._async_pool.close(timeout=1)

    @contextmanager
    def _from_pool(self, isolation: Isolation) -> Iterator[psycopg.Connection[Any]]:
        with self._pool.connection() as conn:
            conn.isolation_level = LEVELS[isolation]
            yield conn

    @asynccontextmanager
    async def _from_async_pool(
        self, isolation: Isolation
    ) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._async_pool.connection() as conn:
            await conn.set_isolation_level(LEVELS[isolation])
            yield conn
