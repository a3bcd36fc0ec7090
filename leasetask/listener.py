"""LISTEN: only ever saves waiting. Without it, through a pooler say, polling does the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg

from leasetask import protocol
from leasetask.connection import backoff_delays, fetch_async
from leasetask.link import Link


async def listen(link: Link, hear: Callable[[str], None]) -> None:
    """Call `hear` with each notification's word, for ever.

    After every (re)connection LISTEN comes first and one call of `hear("task")` second: what was
    committed before the LISTEN sent nothing to this connection.
    """
    delays = backoff_delays()
    while True:
        conn = await link.get()
        try:
            await fetch_async(conn, protocol.LISTEN)
            delays = backoff_delays()
            for word in ("task", "signal", "cancel"):
                hear(word)
            async for notification in conn.notifies():
                hear(notification.payload)
        except psycopg.Error as error:
            link.report_lost(error)
        await link.close()
        await asyncio.sleep(next(delays))
