"""LISTEN: only ever saves waiting. Without it, through a pooler say, polling does the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psycopg

from leasetask import protocol
from leasetask.connection import backoff_delays, fetch_async, is_pooled
from leasetask.link import Link

logger = logging.getLogger("leasetask")

_LOOK = 30.0
"""Seconds between looks whether a silent connection is alive."""


async def listen(link: Link, hear: Callable[[str], None]) -> None:
    """Call `hear` with each notification's word, for ever, or until a pooler makes it useless.

    After every (re)connection LISTEN comes first and one call of `hear("task")` second: what was
    committed before the LISTEN sent nothing to this connection.
    """
    delays = backoff_delays()
    while True:
        conn = await link.get()
        if is_pooled(conn):
            # There LISTEN is accepted, hears nothing, and stays on a server that others get.
            logger.warning(
                "a transaction-mode pooler stands before the database: new tasks are found by "
                "polling; --listen-dsn with a direct DSN makes them start at once"
            )
            await link.close()
            return
        try:
            await fetch_async(conn, protocol.LISTEN)
            delays = backoff_delays()
            for word in ("task", "signal", "cancel"):
                hear(word)
            while True:
                async for notification in conn.notifies(timeout=_LOOK):
                    hear(notification.payload)
                await link.try_once(protocol.PING)
        except psycopg.Error as error:
            link.report_lost(error)
        await link.close()
        await asyncio.sleep(next(delays))
