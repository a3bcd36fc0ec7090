"""A connection that comes back: the one way in which a worker's parts talk to the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import psycopg

from leasetask.connection import (
    backoff_delays,
    connect_async,
    fetch_async,
    is_disconnect,
    is_transient,
    shut,
)
from leasetask.errors import DatabaseUnavailable
from leasetask.protocol import Query

logger = logging.getLogger("leasetask")


_SILENCE = 2.0
"""Seconds past a statement's limit within which at least the server's refusal must be heard."""


async def pause_until(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for so long at the most; tell whether it came.

    Not asyncio.wait_for: before Python 3.12 it swallows a cancel that arrives with the event.
    """
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Link:
    """An async connection that is opened again, for ever and with backoff, when it is lost.

    Logs one line when it goes and one when it is back, not one per try.

    Args:
        limit: seconds that a statement may take, by the server's clock; when not even that is
            heard of, the network is taken to be frozen and the connection for lost.
        revive: called, in a thread, before another try: starts an embedded server again.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        *,
        limit: float = 30.0,
        revive: Callable[[], object] | None = None,
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._limit = limit
        self._revive = revive
        self._conn: psycopg.AsyncConnection[Any] | None = None
        self._was_lost = False
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()

    async def get(self) -> psycopg.AsyncConnection[Any]:
        """Return the open connection, opening it for as long as that takes."""
        if self._conn is not None and not self._conn.closed:
            return self._conn
        async with self._opening:
            return await self._open()

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        if self._conn is not None and not self._conn.closed:
            return self._conn  # by who asked before
        for delay in backoff_delays():
            try:
                self._conn = await connect_async(self._dsn, name=self._name, limit=self._limit)
                break
            except DatabaseUnavailable as error:
                self.report_lost(error)
                await asyncio.sleep(delay)
                if self._revive is not None:
                    await asyncio.to_thread(self._revive)
        if self._was_lost:
            self._was_lost = False
            logger.warning("%s: the database is back", self._name)
        assert self._conn is not None
        return self._conn

    async def try_once(self, query: Query) -> list[tuple[Any, ...]]:
        """Run a query; drop the connection if it is of no use any more, and raise all the same."""
        # One at a time: who is cancelled while it waits must not end another's statement.
        async with self._turn:
            conn = await self.get()
            frozen = asyncio.get_running_loop().call_later(self._limit + _SILENCE, shut, conn)
            try:
                return await fetch_async(conn, query)
            except Exception as error:
                if is_disconnect(error) or conn.closed:
                    self.report_lost(error)
                    await self.close()
                raise
            except asyncio.CancelledError:
                await self.close()
                raise
            finally:
                frozen.cancel()

    async def ask(self, query: Query) -> list[tuple[Any, ...]]:
        """Run a query that may be repeated, through any number of lost connections."""
        for delay in backoff_delays():
            try:
                return await self.try_once(query)
            except Exception as error:
                if not (is_disconnect(error) or is_transient(error)):
                    raise
                await asyncio.sleep(delay)
        raise AssertionError("backoff never ends")

    def report_lost(self, error: Exception) -> None:
        """Log the loss once."""
        if not self._was_lost:
            self._was_lost = True
            reason = " ".join(str(error).split())
            logger.warning("%s: the database is away, trying again: %s", self._name, reason)

    async def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self._conn is not None:
            await self._conn.close()
            self._conn = None
